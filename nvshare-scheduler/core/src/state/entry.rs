//! A client's row in the ledger of one GPU.

use crate::Time;
use crate::state::client::Job;
use crate::state::place::Place;
use crate::state::shares::Activity;
use crate::state::sleep::Sleeper;

/// Where an entry's client stands, as far as the ledger needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Standing {
    /// The client does not run and does not request the lock.
    Parked,
    /// The client waits for the lock.
    Waits,
    /// The client is next.
    Next,
    /// The client holds the lock and was not asked to leave.
    Holds,
    /// The client holds the lock and was asked to leave.
    Leaves,
    /// Scheduling is off.
    Free,
    /// The client's connection has ended and its process has not.
    Departed,
}

impl Standing {
    pub(crate) fn holds(self) -> bool {
        matches!(self, Self::Holds | Self::Leaves)
    }

    pub(crate) fn is_staying(self) -> bool {
        matches!(self, Self::Holds | Self::Next)
    }
}

/// The memory of one client on the GPU, in bytes, and where the client stands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Entry {
    pub(crate) standing: Standing,
    /// Bytes that the client may have resident.
    pub(crate) room: u64,
    /// Bytes of `room` that the client cannot give back when asked.
    pub(crate) pinned: u64,
    /// Bytes that the client wants resident when it runs.
    pub(crate) demand: u64,
    pub(crate) allocated: u64,
    pub(crate) overhead: u64,
    /// Bytes that the client was told to give back and has not given back yet.
    pub(crate) bytes_ordered_out: Option<u64>,
    /// An allocation waits for room.
    pub(crate) has_need: bool,
    /// The client's gate is open, or its work completes.
    pub(crate) is_running: bool,
    /// The client does not answer. Its memory stays, and nobody waits for it to leave.
    pub(crate) is_silent: bool,
    /// The client is next, and others leave for it.
    pub(crate) is_claiming: bool,
    /// The client's activity, as its job's share counts it.
    pub(crate) activity: Activity,
    /// The job to which the client's time is charged.
    pub(crate) payer: Job,
    /// The job as which the client takes its turn: its own, or that of its gang.
    pub(crate) job: Job,
    /// The client's place among those that wait.
    pub(crate) place: Place,
    /// The virtual time of the place counts from the GPU's clock (ARCHITECTURE.md, Words): the client uses
    /// several GPUs, or waits with a gang.
    pub(crate) is_floating: bool,
    /// Bytes that the GPU has, as the client says, or `None` for a process that has left.
    pub(crate) total: Option<u64>,
    /// The first time at which something about the client is overdue.
    pub(crate) due: Option<Time>,
    /// Whether the client's process is off the card, and what it needs to come back.
    pub(crate) sleeper: Sleeper,
}

impl Entry {
    /// Whether the client was asked to leave, and may be expected to.
    pub(crate) fn is_leaving(&self) -> bool {
        self.standing == Standing::Leaves && !self.is_silent
    }

    /// Whether the client was asked to leave and does not answer.
    pub(crate) fn has_not_left(&self) -> bool {
        self.standing == Standing::Leaves && self.is_silent
    }

    /// Returns the bytes that the client lacks to have its whole demand resident.
    pub(crate) fn deficit(&self) -> u64 {
        self.demand.saturating_sub(self.room)
    }
}
