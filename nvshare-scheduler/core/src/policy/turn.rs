//! Whether a turn is over for the clients that would have to leave.
//!
//! - Nobody is asked to leave before the quantum is over, which begins when the turn's first client runs. Nor
//!   are those asked of whom one has given up a drain, before that may be tried again. Neither counts if all
//!   clients that would leave are idle: they have nothing to drain.
//! - A rank that brings its memory back while others of its gang work is waited for: they may not be able to drain before.
//! - A holder whose job has had less than the waiter's goes on until it has had as much. It does so for
//!   [`MAX_QUANTA`] quanta (more if its job has the larger share) and the longest drain, at most. So a
//!   client that drains slowly, or whose restores take longer than its turns, gets fewer turns, or the others
//!   get longer ones.
//! - If a rank is idle while others of its gang work, their kernels may wait for its next ones. So the gang is
//!   asked when the rank works again, or when it has been idle for as long as a drain may take; no later than
//!   that after the turn, however often ranks pause.
//! - An idle holder gives way earlier. It does so at once if no memory has to move, or if waiting through its
//!   last sleeps would not have paid (see [`super::rhythm`]). Else it gives way when it has been idle for
//!   [`IDLE_FACTOR`] times what its own return costs, there and back. So a loop with 60 ms of host work is
//!   not moved out at each step, and an abandoned notebook costs one wait.

use std::time::Duration;

/// An idle holder keeps its memory for this many times the cost of a hand-over.
pub(crate) const IDLE_FACTOR: u32 = 2;
/// When a holder is behind the waiter, a turn lasts at most this many quanta and the longest drain.
pub(crate) const MAX_QUANTA: u32 = 2;

/// A turn on one GPU, seen by a waiter.
#[derive(Debug, Clone)]
pub(crate) struct Turn {
    /// When the turn's first client ran, or `None` if no client has run yet.
    pub(crate) started: Option<Duration>,
    /// How long the turn lasts if somebody waits.
    pub(crate) quantum: Duration,
    /// The largest number of quanta that the turn lasts while its holders catch up.
    pub(crate) most_quanta: u32,
    /// When the clients that would have to leave have had as much as the waiter, if they go on.
    pub(crate) even_at: Duration,
    /// How much longer than these quanta the turn lasts at most. This is the longest recent drain, or the
    /// time beyond a quantum that the waiter's own turn counts for, times the ratio of the weights.
    pub(crate) beyond: Duration,
    /// Clients that run are not asked to leave before this time, because one of them has given up a drain.
    pub(crate) not_before: Duration,
    /// Since when the last rank has been idle of those whose gangs work on, if there is one.
    pub(crate) rank_idle_since: Option<Duration>,
    /// How long such a rank is waited for.
    pub(crate) rank_patience: Duration,
    /// When the last of the clients that would have to leave became idle, if all are idle.
    pub(crate) idle_since: Option<Duration>,
    /// How long the idle clients keep their places.
    pub(crate) patience: Duration,
}

/// Returns when the turn is over; `None`: not before an event that has not come yet.
#[must_use]
pub(crate) fn ends(turn: &Turn) -> Option<Duration> {
    let quantum_ends = turn.started.map(|started| {
        let least = started.saturating_add(turn.quantum);
        let most =
            started.saturating_add(turn.quantum.saturating_mul(turn.most_quanta)).saturating_add(turn.beyond);
        turn.even_at.clamp(least, most)
    });
    let idle_ends = turn.idle_since.map(|since| since.saturating_add(turn.patience));
    let ends = match (quantum_ends, idle_ends) {
        (Some(quantum), Some(idle)) => quantum.min(idle),
        (one, other) => one.or(other)?,
    };
    if turn.idle_since.is_some() {
        return Some(ends);
    }
    let ends = ends.max(turn.not_before);
    let returns_by = turn.rank_idle_since.map(|since| since.min(ends).saturating_add(turn.rank_patience));
    Some(returns_by.map_or(ends, |returns_by| ends.max(returns_by)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn turn(started: Option<u64>, not_before: u64, idle: Option<u64>, cost: u64) -> Turn {
        Turn {
            started: started.map(MS),
            quantum: MS(1000),
            most_quanta: MAX_QUANTA,
            even_at: Duration::ZERO,
            beyond: MS(300),
            not_before: MS(not_before),
            rank_idle_since: None,
            rank_patience: MS(200),
            idle_since: idle.map(MS),
            patience: MS(cost) * IDLE_FACTOR,
        }
    }

    #[test]
    fn a_turn_is_over_after_its_quantum_or_when_its_holders_are_idle() {
        for (turn, expected) in [
            // Busy: the quantum decides, and a holder that still restores is not asked.
            (turn(Some(500), 0, None, 300), Some(1500)),
            (turn(None, 0, None, 300), None),
            // Idle, nothing to move: at once. Something to move: later, but never later than the quantum.
            (turn(Some(500), 0, Some(700), 0), Some(700)),
            (turn(Some(500), 0, Some(700), 300), Some(1300)),
            (turn(Some(500), 0, Some(700), 3000), Some(1500)),
            // A deferral counts for holders that have something to drain.
            (turn(Some(500), 9000, None, 0), Some(9000)),
            (turn(Some(500), 9000, Some(700), 300), Some(1300)),
        ] {
            assert_eq!(ends(&turn), expected.map(MS), "{turn:?}");
        }
    }

    #[test]
    fn a_holder_that_has_had_less_than_the_waiter_goes_on_for_a_while() {
        for (even_at, expected) in [(0, 1500), (1700, 1700), (2800, 2800), (90_000, 2800)] {
            let turn = Turn { even_at: MS(even_at), ..turn(Some(500), 0, None, 300) };
            assert_eq!(ends(&turn), Some(MS(expected)), "even at {even_at}");
        }
        let idle = Turn { even_at: MS(90_000), ..turn(Some(500), 0, Some(700), 0) };
        assert_eq!(ends(&idle), Some(MS(700)), "an idle holder catches nothing up");
    }

    #[test]
    fn ranks_are_waited_for_no_longer_than_a_drain_may_take() {
        for (idle_since, expected) in [(None, 1000), (Some(700), 1000), (Some(900), 1100), (Some(4000), 1200)]
        {
            let turn = Turn { rank_idle_since: idle_since.map(MS), ..turn(Some(0), 0, None, 0) };
            assert_eq!(ends(&turn), Some(MS(expected)), "{turn:?}");
        }
    }
}
