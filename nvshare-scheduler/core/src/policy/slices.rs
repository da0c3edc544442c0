//! Slices: short turns of jobs that would fit the GPU together, and that are to have different parts of its
//! time.
//!
//! Side by side, the driver shares the time among jobs as it likes. So as soon as weights differ, or a
//! compute limit or a priority is in force, jobs take turns. No memory moves for that, and a hand-over costs
//! well below a millisecond.

use std::time::Duration;

/// Shortest slice.
pub(crate) const MIN_LENGTH: Duration = Duration::from_millis(50);
/// Longest slice.
pub(crate) const MAX_LENGTH: Duration = Duration::from_millis(100);
/// A slice is this many times as long as a hand-over, within the bounds.
const TIMES_THE_COST: u32 = 100;
/// The largest ratio of weights that counts. However heavy a job is, its turn lasts at most one quantum more
/// than this many.
pub(crate) const LARGEST_RATIO: u32 = 64;

/// Whether `jobs` jobs that want a GPU take turns on it, whether they fit or not.
#[must_use]
pub(crate) fn are_asked_for(jobs: usize, has_unequal_weights: bool, has_limits: bool) -> bool {
    jobs > 1 && (has_unequal_weights || has_limits)
}

/// Returns the length of a slice. `cost`: the time of a hand-over that moves no memory.
#[must_use]
pub(crate) fn length(cost: Option<Duration>) -> Duration {
    (cost.unwrap_or_default() * TIMES_THE_COST).clamp(MIN_LENGTH, MAX_LENGTH)
}

/// Returns how many of the waiter's turns are worth one of the holder's, by their weights; rounded up.
#[must_use]
pub(crate) fn ratio(holder_weight: u64, waiter_weight: u64) -> u32 {
    holder_weight.div_ceil(waiter_weight.max(1)).min(u64::from(LARGEST_RATIO)) as u32
}

/// Returns the most quanta that a turn lasts when a holder is behind a waiter, by their [`ratio`].
#[must_use]
pub(crate) fn most_quanta(ratio: u32, usual: u32) -> u32 {
    usual.max(ratio.saturating_add(1))
}

/// Returns how much longer than its quanta that turn lasts at most, where each turn of the waiter counts for
/// `allowance_per_turn` more than a quantum.
#[must_use]
pub(crate) fn allowance(ratio: u32, quantum: Duration, allowance_per_turn: Duration) -> Duration {
    let longest = quantum.saturating_mul(LARGEST_RATIO.saturating_sub(ratio));
    allowance_per_turn.saturating_mul(ratio).min(longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_only_if_jobs_ask_for_shares() {
        for (jobs, unequal, limits, expected) in [
            (3, false, false, false),
            (3, true, false, true),
            // A limit of 100 per cent is a limit too.
            (3, false, true, true),
            (1, true, true, false),
            (0, false, false, false),
        ] {
            assert_eq!(are_asked_for(jobs, unequal, limits), expected, "{jobs} {unequal} {limits}");
        }
    }

    #[test]
    fn a_slice_is_a_multiple_of_the_cost_within_bounds() {
        const US: fn(u64) -> Duration = Duration::from_micros;
        for (cost, expected) in [(None, 50), (Some(300), 50), (Some(700), 70), (Some(9000), 100)] {
            assert_eq!(length(cost.map(US)), Duration::from_millis(expected), "{cost:?}");
        }
    }

    #[test]
    fn a_heavy_holder_has_a_bounded_turn() {
        for (holder, waiter, expected) in
            [(100, 100, 2), (400, 100, 5), (100, 400, 2), (1_000_000, 1, LARGEST_RATIO + 1), (1, 0, 2)]
        {
            assert_eq!(most_quanta(ratio(holder, waiter), 2), expected, "{holder} to {waiter}");
        }
        let ms = Duration::from_millis;
        for (ratio, per_turn, expected) in
            [(1, 20, 20), (8, 20, 160), (60, 100, 400), (LARGEST_RATIO, 20, 0), (1, 99_999, 6300)]
        {
            assert_eq!(allowance(ratio, ms(100), ms(per_turn)), ms(expected), "{per_turn} ms, {ratio} times");
        }
    }
}
