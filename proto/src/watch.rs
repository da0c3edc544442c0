//! What administrators see happen, one event after the other.

use serde::{Deserialize, Serialize};

use crate::{ClientState, GpuUuid};

/// Where the events begin that somebody asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WatchFrom {
    /// With the next one.
    Now,
    /// With the oldest one that is kept.
    Kept,
    /// Behind one that was seen already. Of another run of the scheduler: with the oldest one that is kept.
    After {
        /// The run of the scheduler.
        boot: u64,
        /// The event's number.
        seq: u64,
    },
}

/// What an event tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// The scheduler started.
    Started,
    /// A client registered; bytes: what it has allocated.
    Registered,
    /// Work waits at the client's gate.
    Waiting,
    /// The client waits, and no room can be made for it as things are.
    Blocked,
    /// The client is next: others leave and room is made for it.
    Next,
    /// The client is not next any more.
    Withdrawn,
    /// LOCK_OK was sent; bytes: what the client brings back to the card.
    Granted,
    /// Memory came back to one GPU, before the gate opens; bytes: how much; time: since LOCK_OK.
    Restored,
    /// The client's gate is open; bytes: what it brought back; time: since LOCK_OK.
    Running,
    /// DROP_LOCK was sent.
    Drop,
    /// The client gave the lock back, or it was taken at a pause; time: since DROP_LOCK, if that was sent.
    Released,
    /// The client's drain was given up, and it goes on; time: since DROP_LOCK.
    Deferred,
    /// The client has nothing to do, and keeps the lock until somebody takes it.
    Idle,
    /// Scheduling is off: the client runs.
    Free,
    /// EVICT was sent; bytes: how much is to leave the card.
    Evict,
    /// The eviction is over; bytes: room that came back, unused room included; time: since EVICT.
    Evicted,
    /// Memory could not leave the card; bytes: what stays.
    Stays,
    /// An allocation waits for room; bytes: how much.
    NeedRoom,
    /// Room was given to an allocation that waited; bytes: how much.
    Room,
    /// An allocation was refused, because no room can be made; bytes: how much.
    Refused,
    /// The client does not answer.
    Stuck,
    /// The client's connection ended and its process lives on; bytes: what stays charged.
    Left,
    /// A process that had left ended, or came back.
    Ended,
    /// The client's connection ended.
    Gone,
    /// An administrator switched scheduling on.
    On,
    /// An administrator switched scheduling off.
    Off,
    /// An administrator set a quantum; time: the quantum.
    Quantum,
}

impl EventKind {
    /// All of them.
    pub const ALL: [Self; 27] = [
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
    ];

    /// As it is written.
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
        }
    }

    /// Where the client stands from then on; none: where it stood.
    #[must_use]
    pub fn state(self) -> Option<ClientState> {
        Some(match self {
            Self::Registered | Self::Withdrawn | Self::Released => ClientState::Parked,
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
            | Self::Quantum => return None,
        })
    }
}

/// Something happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchEvent {
    /// Its number in this run of the scheduler, counted from 1.
    pub seq: u64,
    /// When, in microseconds since 1970 by the machine's clock.
    pub time_us: u64,
    /// When, in microseconds since the scheduler started. It never goes back.
    pub up_us: u64,
    /// What it tells.
    pub event: EventKind,
    /// Of which client; none: of the scheduler.
    pub client: Option<u64>,
    /// That client's process.
    pub pid: Option<u32>,
    /// That client's program.
    pub name: Option<String>,
    /// On which GPUs.
    pub gpus: Vec<GpuUuid>,
    /// How much; see [`EventKind`].
    pub bytes: Option<u64>,
    /// How long it took, in microseconds; see [`EventKind`].
    pub took_us: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_listed_once_and_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<_> = EventKind::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!(names.len(), EventKind::ALL.len());
        // `ALL` is as long as there are kinds: the last one's number says so.
        assert_eq!(EventKind::Quantum as usize + 1, EventKind::ALL.len());
    }
}
