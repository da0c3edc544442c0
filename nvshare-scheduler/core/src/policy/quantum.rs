//! The length of a turn, where it follows from the cost of hand-overs.
//!
//! While a hand-over moves memory, nobody computes. So that hand-overs take no more than a stated part of the
//! time, a turn is a multiple of their cost. But nobody is to wait longer than stated: where both are
//! impossible, the limit on the wait counts more.

use std::time::Duration;

use nvshare_proto::units::saturate_u32;

/// The shortest quantum that the rule chooses.
pub(crate) const MIN_LENGTH: Duration = Duration::from_millis(20);
/// The longest one.
pub(crate) const MAX_LENGTH: Duration = Duration::from_secs(300);

/// The administrator's targets for a chosen quantum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AutoTarget {
    /// The part of the time that hand-overs may take, in millionths.
    pub overhead_ppm: u32,
    /// How long work may wait for its turn.
    pub max_wait: Duration,
}

/// Returns the quantum that meets the target. `cost`: the time of one hand-over; `jobs`: how many jobs take
/// turns.
#[must_use]
pub(crate) fn auto(target: AutoTarget, cost: Duration, jobs: usize) -> Duration {
    let overhead = f64::from(target.overhead_ppm.clamp(1000, 900_000)) / 1e6;
    // The shortest turn whose hand-overs stay within the overhead.
    let cheapest = cost.mul_f64((1.0 - overhead) / overhead);
    cheapest.min(longest(target, cost, jobs)).clamp(MIN_LENGTH, MAX_LENGTH)
}

/// Returns the longest quantum with which no job waits for longer than stated.
#[must_use]
pub(crate) fn longest(target: AutoTarget, cost: Duration, jobs: usize) -> Duration {
    // A waiter waits for a turn of each of the others, and for a hand-over to each of them and to itself.
    let others = saturate_u32(jobs.saturating_sub(1).max(1));
    (target.max_wait.saturating_sub(cost) / others).saturating_sub(cost)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn quanta_for_costs_and_bounds() {
        for (percent, max_wait, cost, jobs, expected) in [
            // 1 s of 20 s.
            (5, 3_600_000, 1000, 2, 19_000),
            (50, 3_600_000, 1000, 2, 1000),
            // The wait counts more: two hand-overs and a turn of the other in 10 s.
            (5, 10_000, 1000, 2, 8000),
            (5, 30_000, 1000, 4, 8666),
            // A wait that is impossible, and costs of nothing and of an hour.
            (5, 1000, 1000, 9, 20),
            (5, 10_000, 0, 2, 20),
            (5, 36_000_000, 3_600_000, 2, 300_000),
            (5, 10_000, 1000, 0, 8000),
        ] {
            let target = AutoTarget { overhead_ppm: percent * 10_000, max_wait: MS(max_wait) };
            let got = auto(target, MS(cost), jobs);
            assert_eq!(
                got.as_millis() as u64,
                expected,
                "{percent} %, {max_wait} ms, {cost} ms, {jobs} jobs"
            );
        }
    }
}
