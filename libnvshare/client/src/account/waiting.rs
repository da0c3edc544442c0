//! Allocations that wait for room. The caller does the waiting itself.

use std::time::Duration;

use super::{Account, TenantQuota};
use crate::kind::Kind;

/// Longest part of a wait.
const SLICE: Duration = Duration::from_secs(1);

/// How long an allocation waits for its room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// While the process holds the lock: without it, the allocation goes on without room.
    WhileHolding,
    /// Also while the lock is elsewhere.
    AlsoWhileParked,
}

impl Wait {
    /// How long memory of a kind waits.
    #[must_use]
    pub fn of(kind: Kind) -> Self {
        if kind.needs_room() { Self::AlsoWhileParked } else { Self::WhileHolding }
    }
}

/// The time that an allocation still waits for room. It waits in parts. A process that is stopped in a part finds its room when it goes on,
/// however long that was.
#[derive(Debug, Clone, Copy)]
pub struct Patience(Duration);

impl Patience {
    /// An allocation that has not waited yet.
    #[must_use]
    pub fn new(left: Duration) -> Self {
        Self(left)
    }

    /// The next part of the wait, at most; `None`: the wait is over.
    #[must_use]
    pub fn next_part(self) -> Option<Duration> {
        Some(self.0.min(SLICE)).filter(|part| !part.is_zero())
    }

    /// A part of the wait has taken this long.
    pub fn waited(&mut self, took: Duration) {
        self.0 = self.0.saturating_sub(took.min(SLICE));
    }
}

impl<T: TenantQuota> Account<T> {
    /// An allocation begins to wait until there is room for `bytes`. False: there is, as some has come since it was tried. Room
    /// that was lacking then is not asked for in addition.
    pub fn begin_waiting(&mut self, bytes: u64) -> bool {
        let lacks = self.lacks(bytes);
        self.needs = self.needs.max(lacks);
        self.waiting += 1;
        self.refused = false;
        lacks > 0
    }

    /// Whether an allocation has to go on waiting.
    #[must_use]
    pub fn goes_on_waiting(&self, wait: Wait) -> bool {
        let waits = self.holding || wait == Wait::AlsoWhileParked;
        self.needs > 0 && waits && !self.unmetered && !self.refused
    }

    /// Whether the scheduler has no room for the allocations that wait.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        self.refused
    }

    /// An allocation stops waiting, because waiting has no purpose any more. False: there will be no room for it.
    pub fn end_waiting(&mut self) -> bool {
        self.waiting -= 1;
        if self.refused || self.unmetered {
            self.needs = 0;
        }
        !self.refused
    }

    /// An allocation stops waiting, because its patience is over.
    pub fn give_up_waiting(&mut self) {
        self.waiting -= 1;
        self.needs = 0;
    }

    /// The thread that waited is gone.
    pub fn abandon_waiting(&mut self) {
        self.waiting -= 1;
    }

    /// Whether allocations wait.
    #[must_use]
    pub fn is_anybody_waiting(&self) -> bool {
        self.waiting > 0
    }

    /// Room that is lacking now: for allocations that wait, or because more is charged than was given.
    #[must_use]
    pub fn lacking(&self) -> u64 {
        if self.unmetered { 0 } else { self.needs.max(self.room.min(0).unsigned_abs()) }
    }

    /// Room came from the scheduler.
    pub fn give(&mut self, bytes: u64) {
        self.room = self.room.saturating_add_unsigned(bytes);
        self.needs = 0;
    }

    /// The scheduler has no room for the waiting allocations.
    pub fn refuse(&mut self) {
        self.refused = self.waiting > 0;
        self.needs = 0;
        self.find_lost();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_in_which_the_process_was_stopped_is_no_wait() {
        let mut patience = Patience::new(Duration::from_millis(2500));
        let parts: Vec<Option<Duration>> = [1000, 3_600_000, 500, 0]
            .map(|took| {
                let part = patience.next_part();
                patience.waited(Duration::from_millis(took));
                part
            })
            .into();
        assert_eq!(
            parts,
            [Some(1000), Some(1000), Some(500), None].map(|part| part.map(Duration::from_millis))
        );
    }
}
