//! Events that administrators watch.

use serde::{Deserialize, Serialize};

use crate::{ClientState, GpuUuid};

/// The first event that a watcher asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WatchFrom {
    /// The next event that happens.
    Now,
    /// The oldest event that is kept.
    Kept,
    /// The event behind one that the watcher has seen. If that one is of another run of the scheduler: the oldest
    /// event that is kept.
    After {
        /// The run of the scheduler.
        boot: u64,
        /// The event's number.
        seq: u64,
    },
}

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// The scheduler started.
    Started,
    /// A client registered; bytes: allocated by the client.
    Registered,
    /// Work waits at the client's gate.
    Waiting,
    /// The client waits, and at present no room can be made for it.
    Blocked,
    /// The client is next: others leave and room is made for it.
    Next,
    /// The client is not next any more.
    Withdrawn,
    /// LOCK_OK was sent; bytes: to bring back to the card.
    Granted,
    /// Memory came back to one GPU, before the gate opens; bytes: restored; time: since LOCK_OK.
    Restored,
    /// The client's gate is open; bytes: restored; time: since LOCK_OK.
    Running,
    /// DROP_LOCK was sent.
    Drop,
    /// The client gave the lock back, or the scheduler took it at a pause; time: since DROP_LOCK, if that was sent.
    Released,
    /// The client's drain was given up, and it goes on; time: since DROP_LOCK.
    Deferred,
    /// The client has nothing to do, and keeps the lock until another client takes it.
    Idle,
    /// Scheduling is off: the client runs.
    Free,
    /// EVICT was sent; bytes: to leave the card.
    Evict,
    /// The eviction is over; bytes: room that came back, unused room included; time: since EVICT.
    Evicted,
    /// Memory could not leave the card; bytes: that stay.
    Stays,
    /// An allocation waits for room; bytes: of the need.
    NeedRoom,
    /// Room was given to an allocation that waited; bytes: given.
    Room,
    /// An allocation was refused, because no room can be made; bytes: of the need.
    Refused,
    /// The client does not answer.
    Stuck,
    /// The client's connection ended and its process lives on; bytes: that stay charged.
    Left,
    /// A process whose connection had ended has ended too, has come back, or has become another program.
    Ended,
    /// The client's connection ended.
    Gone,
    /// An administrator switched scheduling on.
    On,
    /// An administrator switched scheduling off.
    Off,
    /// An administrator set a quantum; time: the quantum.
    Quantum,
    /// SLEEP was sent: the client's process is to go off the card.
    Sleep,
    /// The client's process is off the card; bytes: what its contexts and modules took there; time: since SLEEP, if that was sent.
    Asleep,
    /// The client's process does not go off the card, or is not to any more.
    StaysAwake,
    /// The client's process is to come back to the card, and waits for its turn and room; bytes: what its contexts and modules need.
    WakeWanted,
    /// WAKE was sent; time: since the process was to come back.
    Wake,
    /// The client's process is back on the card; time: that the way back took.
    Awake,
    /// The client's program was refused to share its memory, since it is managed memory.
    CannotShare,
}

impl EventKind {
    /// All kinds.
    pub const ALL: [Self; 34] = [
        Self::Started,
        Self::Registered,
        Self::Waiting,
        Self::Blocked,
        Self::Next,
        Self::Withdrawn,
        Self::Granted,
        Self::Restored,
        Self::Running,
        Self::Drop,
        Self::Released,
        Self::Deferred,
        Self::Idle,
        Self::Free,
        Self::Evict,
        Self::Evicted,
        Self::Stays,
        Self::NeedRoom,
        Self::Room,
        Self::Refused,
        Self::Stuck,
        Self::Left,
        Self::Ended,
        Self::Gone,
        Self::On,
        Self::Off,
        Self::Quantum,
        Self::Sleep,
        Self::Asleep,
        Self::StaysAwake,
        Self::WakeWanted,
        Self::Wake,
        Self::Awake,
        Self::CannotShare,
    ];

    /// The name of the kind in texts.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Started => "started",
            Self::Registered => "registered",
            Self::Waiting => "waiting",
            Self::Blocked => "blocked",
            Self::Next => "next",
            Self::Withdrawn => "withdrawn",
            Self::Granted => "granted",
            Self::Restored => "restored",
            Self::Running => "running",
            Self::Drop => "drop",
            Self::Released => "released",
            Self::Deferred => "deferred",
            Self::Idle => "idle",
            Self::Free => "free",
            Self::Evict => "evict",
            Self::Evicted => "evicted",
            Self::Stays => "stays",
            Self::NeedRoom => "need_room",
            Self::Room => "room",
            Self::Refused => "refused",
            Self::Stuck => "stuck",
            Self::Left => "left",
            Self::Ended => "ended",
            Self::Gone => "gone",
            Self::On => "on",
            Self::Off => "off",
            Self::Quantum => "quantum",
            Self::Sleep => "sleep",
            Self::Asleep => "asleep",
            Self::StaysAwake => "stays_awake",
            Self::WakeWanted => "wake_wanted",
            Self::Wake => "wake",
            Self::Awake => "awake",
            Self::CannotShare => "cannot_share",
        }
    }

    /// The client's state after the event; none: the event does not change it.
    #[must_use]
    pub fn state(self) -> Option<ClientState> {
        Some(match self {
            Self::Registered | Self::Withdrawn | Self::Released | Self::Awake => ClientState::Parked,
            Self::Waiting => ClientState::Waiting,
            Self::Blocked => ClientState::Blocked,
            Self::Next => ClientState::Next,
            Self::Granted => ClientState::Restoring,
            Self::Running | Self::Deferred => ClientState::Running,
            Self::Drop => ClientState::Draining,
            Self::Idle => ClientState::Idle,
            Self::Free => ClientState::Free,
            Self::Left => ClientState::Left,
            Self::Gone | Self::Ended => ClientState::Gone,
            Self::Asleep => ClientState::Asleep,
            Self::Started
            | Self::Restored
            | Self::Evict
            | Self::Evicted
            | Self::Stays
            | Self::NeedRoom
            | Self::Room
            | Self::Refused
            | Self::Stuck
            | Self::On
            | Self::Off
            | Self::Quantum
            | Self::Sleep
            | Self::StaysAwake
            | Self::WakeWanted
            | Self::Wake
            | Self::CannotShare => return None,
        })
    }
}

/// A phase of a hand-over, in the order in which they come. Memory that has no such phase tells none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HandOverPhase {
    /// The gate is closed, and submitted work completes.
    Drain,
    /// The card looks for zeros, and for what has changed since the host's copy was made.
    Look,
    /// Memory is copied to the host, which first makes memory for it where it has none ready.
    CopyOut,
    /// Memory on the card is unmapped and released.
    Unmap,
    /// Memory on the card is created and mapped.
    Map,
    /// Contents are copied back.
    CopyIn,
    /// The lock is granted and all memory is back: the gate opens.
    Open,
}

impl HandOverPhase {
    /// All phases.
    pub const ALL: [Self; 7] =
        [Self::Drain, Self::Look, Self::CopyOut, Self::Unmap, Self::Map, Self::CopyIn, Self::Open];

    /// The name of the phase in texts. A copy has one name in both directions: the event says which it is.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Drain => "drain",
            Self::Look => "look",
            Self::CopyOut | Self::CopyIn => "copy",
            Self::Unmap => "unmap",
            Self::Map => "map",
            Self::Open => "open",
        }
    }

    /// The kind of the event that the phase is a part of.
    #[must_use]
    pub fn part_of(self) -> EventKind {
        match self {
            Self::Drain => EventKind::Released,
            Self::Look | Self::CopyOut | Self::Unmap => EventKind::Evicted,
            Self::Map | Self::CopyIn => EventKind::Restored,
            Self::Open => EventKind::Running,
        }
    }
}

/// The time that a phase of a hand-over took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseTime {
    /// The GPU whose memory moved; none: the phase is one of the client.
    pub gpu: Option<GpuUuid>,
    /// The phase.
    pub phase: HandOverPhase,
    /// The time in microseconds. Phases of one GPU alternate, chunk by chunk: this is the sum.
    pub micros: u64,
}

/// An event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchEvent {
    /// The event's number in this run of the scheduler, counted from 1.
    pub seq: u64,
    /// Time of the event, in microseconds since 1970 by the machine's clock.
    pub time_us: u64,
    /// Time of the event, in microseconds since the scheduler started. It never goes back.
    pub up_us: u64,
    /// The kind of the event.
    pub event: EventKind,
    /// The client; none: the event is the scheduler's.
    pub client: Option<u64>,
    /// The client's process.
    pub pid: Option<u32>,
    /// The client's program.
    pub name: Option<String>,
    /// The GPUs.
    pub gpus: Vec<GpuUuid>,
    /// Bytes; [`EventKind`] says which.
    pub bytes: Option<u64>,
    /// A time span in microseconds; [`EventKind`] says from when.
    pub took_us: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_listed_once_and_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<_> = EventKind::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!(names.len(), EventKind::ALL.len());
        // `ALL` has every kind: the last one's number gives their count.
        assert_eq!(EventKind::CannotShare as usize + 1, EventKind::ALL.len());
    }
}
