//! Slices: short turns of jobs that would fit the GPU together, and that are to have different parts of its
//! time.
//!
//! Side by side, the driver shares the time among jobs as it likes. So as soon as weights differ, or a
//! compute limit or a priority is in force, jobs take turns. No memory moves for that, and a hand-over costs
//! well below a millisecond.

use std::time::Duration;

/// Shortest slice.
pub(crate) const SHORTEST: Duration = Duration::from_millis(50);
/// Longest slice.
pub(crate) const LONGEST: Duration = Duration::from_millis(100);
/// A slice is this many times as long as a hand-over, within the bounds.
const TIMES_THE_COST: u32 = 100;
/// However heavy a job is, others wait for at most this many of its slices or quanta.
pub(crate) const MOST: u32 = 64;

/// Whether jobs that want a GPU take turns on it, whether they fit or not. `jobs`: how many there are;
/// `weights`: how many different weights they have; `limited`: how many have a compute limit.
#[must_use]
pub(crate) fn are_asked_for(jobs: usize, weights: usize, limited: usize) -> bool {
    jobs > 1 && (weights > 1 || limited > 0)
}

/// Returns the length of a slice. `cost`: the time of a hand-over that moves no memory.
#[must_use]
pub(crate) fn length(cost: Option<Duration>) -> Duration {
    (cost.unwrap_or_default() * TIMES_THE_COST).clamp(SHORTEST, LONGEST)
}

/// Returns how many turns of a waiter of this weight are worth one of a holder of that weight, rounded up.
#[must_use]
pub(crate) fn ratio(holder: u64, waiter: u64) -> u32 {
    holder.div_ceil(waiter.max(1)).min(u64::from(MOST)) as u32
}

/// Returns the most quanta that a turn lasts when a holder is behind a waiter, by their [`ratio`].
#[must_use]
pub(crate) fn most_quanta(ratio: u32, usual: u32) -> u32 {
    usual.max(ratio.saturating_add(1))
}

/// Returns how much longer than its quanta that turn lasts at most, where a turn of the waiter counts for
/// `each` more than a quantum. It stays within [`MOST`] quanta.
#[must_use]
pub(crate) fn beyond(ratio: u32, quantum: Duration, each: Duration) -> Duration {
    each.saturating_mul(ratio).min(quantum.saturating_mul(MOST.saturating_sub(ratio)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_only_if_jobs_ask_for_shares() {
        for (jobs, weights, limited, expected) in [
            (3, 1, 0, false),
            (3, 2, 0, true),
            // A limit of 100 per cent is a limit too.
            (3, 1, 1, true),
            (1, 1, 1, false),
            (0, 0, 0, false),
        ] {
            assert_eq!(are_asked_for(jobs, weights, limited), expected, "{jobs} {weights} {limited}");
        }
    }

    #[test]
    fn lengths_and_bounds() {
        const US: fn(u64) -> Duration = Duration::from_micros;
        for (cost, expected) in [(None, 50), (Some(300), 50), (Some(700), 70), (Some(9000), 100)] {
            assert_eq!(length(cost.map(US)), Duration::from_millis(expected), "{cost:?}");
        }
        for (holder, waiter, expected) in
            [(100, 100, 2), (400, 100, 5), (100, 400, 2), (1_000_000, 1, MOST + 1), (1, 0, 2)]
        {
            assert_eq!(most_quanta(ratio(holder, waiter), 2), expected, "{holder} to {waiter}");
        }
        let ms = Duration::from_millis;
        for (ratio, each, expected) in
            [(1, 20, 20), (8, 20, 160), (60, 100, 400), (MOST, 20, 0), (1, 99_999, 6300)]
        {
            assert_eq!(beyond(ratio, ms(100), ms(each)), ms(expected), "{each} ms, {ratio} times");
        }
    }
}
