//! Whether a turn is over for those who would have to leave.
//!
//! - Nobody is asked to leave before the quantum is over, counted from the moment that the turn's first client
//!   ran, nor before a deferred drain may be tried again.
//! - A holder that is idle gives way earlier: at once if nothing has to move, else when it has been idle for
//!   [`IDLE_FACTOR`] times what the move costs, there and back. So a loop with 60 ms of host work is not moved
//!   out at each step, and an abandoned notebook costs one wait.

use std::time::Duration;

/// An idle holder keeps its memory for this many times the cost of a hand-over.
pub const IDLE_FACTOR: u32 = 2;

/// A turn on one GPU, seen by a waiter.
#[derive(Debug, Clone)]
pub struct Turn {
    /// When its first client ran; none yet.
    pub started: Option<Duration>,
    /// How long it lasts if somebody waits.
    pub quantum: Duration,
    /// Not before this, because a drain was deferred.
    pub not_before: Duration,
    /// When the last of those who would have to leave became idle, if all are.
    pub idle_since: Option<Duration>,
    /// What moving the memory for this waiter would cost.
    pub move_cost: Duration,
}

/// When the turn is over; `None`: not before something happens that is not yet known.
#[must_use]
pub fn ends(turn: &Turn) -> Option<Duration> {
    let quantum_ends = turn.started.map(|started| started.saturating_add(turn.quantum));
    let idle_ends =
        turn.idle_since.map(|since| since.saturating_add(turn.move_cost.saturating_mul(IDLE_FACTOR)));
    let ends = match (quantum_ends, idle_ends) {
        (Some(quantum), Some(idle)) => quantum.min(idle),
        (one, other) => one.or(other)?,
    };
    Some(ends.max(turn.not_before))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn check(started: Option<u64>, not_before: u64, idle: Option<u64>, cost: u64, expected: Option<u64>) {
        let turn = Turn {
            started: started.map(MS),
            quantum: MS(1000),
            not_before: MS(not_before),
            idle_since: idle.map(MS),
            move_cost: MS(cost),
        };
        assert_eq!(ends(&turn), expected.map(MS), "{turn:?}");
    }

    #[test]
    fn as_data() {
        // Busy: the quantum decides, and a holder that still restores is not asked.
        check(Some(500), 0, None, 300, Some(1500));
        check(None, 0, None, 300, None);
        // Idle, nothing to move: at once. Something to move: later, but never later than the quantum.
        check(Some(500), 0, Some(700), 0, Some(700));
        check(Some(500), 0, Some(700), 300, Some(1300));
        check(Some(500), 0, Some(700), 3000, Some(1500));
        // A deferral moves everything.
        check(Some(500), 9000, Some(700), 0, Some(9000));
    }
}
