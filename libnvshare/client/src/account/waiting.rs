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
    /// An allocation begins to wait until there is room for `bytes`. False: it need not. Some has come since it was tried, or the lock has
    /// gone, without which it goes on. In both cases it counts until [`Self::end_waiting`]: room that has come stays with it.
    ///
    /// Room that was lacking when it was tried is not asked for in addition.
    pub fn begin_waiting(&mut self, bytes: u64, wait: Wait) -> bool {
        self.waiting += 1;
        let waits = self.lacks(bytes) > 0 && self.can_wait(wait);
        if waits {
            self.awaited = self.awaited.max(bytes);
            // The refusal was of an earlier need.
            if self.is_refused(bytes) {
                self.refused = 0;
            }
        }
        waits
    }

    /// Whether an allocation has to go on waiting for room for `bytes`. The program may have freed as much itself meanwhile. Where less is
    /// awaited, its own need has ended, and it has to say it anew.
    #[must_use]
    pub fn goes_on_waiting(&self, bytes: u64, wait: Wait) -> bool {
        bytes > 0
            && self.awaited >= bytes
            && self.can_wait(wait)
            && self.lacks(bytes) > 0
            && !self.is_refused(bytes)
    }

    fn can_wait(&self, wait: Wait) -> bool {
        self.holding || wait == Wait::AlsoWhileParked
    }

    /// Whether the scheduler has no room for an allocation that waits for room for `bytes`. One that lacks less than what was refused was not
    /// asked for.
    #[must_use]
    pub fn is_refused(&self, bytes: u64) -> bool {
        self.refused > 0 && self.lacks(bytes) >= self.refused
    }

    /// An allocation that waited until there is room for `bytes` does not wait any more. If none waits for more, the others say anew what
    /// they need. 0: another wait of it goes on, and its need stays.
    pub fn end_waiting(&mut self, bytes: u64) {
        self.waiting -= 1;
        if self.waiting == 0 || bytes >= self.awaited {
            self.awaited = 0;
        }
        if self.waiting == 0 {
            self.refused = 0;
        }
    }

    /// Whether allocations wait.
    #[must_use]
    pub fn is_anybody_waiting(&self) -> bool {
        self.waiting > 0
    }

    /// Whether an allocation waits for room, and has no answer yet.
    #[must_use]
    pub fn is_room_awaited(&self) -> bool {
        self.awaited > 0
    }

    /// Room that is lacking now: for allocations that wait, or because more is charged than was given.
    #[must_use]
    pub fn lacking(&self) -> u64 {
        self.lacks(self.awaited)
    }

    /// Room came from the scheduler.
    pub fn give(&mut self, bytes: u64) {
        self.room = self.room.saturating_add_unsigned(bytes);
        self.awaited = 0;
    }

    /// The scheduler does not have the room of `asked` bytes that was lacking. Room that an eviction has made, and of which it does not
    /// know yet, may be enough: then whoever waits asks anew.
    pub fn refuse(&mut self, asked: u64) {
        self.refused = if self.waiting > 0 && self.made == 0 { asked } else { 0 };
        self.awaited = 0;
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
