//! When short work goes ahead of long work that holds a GPU. Short work is that of an interactive client.
//!
//! - Short work goes as soon as the budget of switching allows it (see [`super::budget`]), and before it has
//!   waited for longer than stated.
//! - It runs no further ahead of its share than [`most_ahead`]: a client beyond that waits for its turn like
//!   all others. The time that it uses is charged like all time. So a client that only looks interactive
//!   comes sooner once, and gets no more in sum.
//! - It does not go ahead of work that has waited for half of the longest wait.
//! - It does not go ahead of other short work, which is over soon.

use std::time::Duration;

use nvshare_proto::units::saturate_u32;

use super::rhythm::MAX_SHORT_WORK;
use super::turn;

/// Returns how far short work may run ahead of its share: by the longest turn of long work and one spell of
/// its own, at most. While n jobs want the GPU and a long one waits, the others get ahead by one part in n of
/// the time, together. So the long one waits about as long as `max_wait` for them if each stops when it is
/// ahead by `max_wait / n²`. `jobs`: n.
#[must_use]
pub(crate) fn most_ahead(quantum: Duration, max_wait: Duration, jobs: usize) -> Duration {
    let jobs = saturate_u32(jobs.max(1));
    quantum
        .saturating_mul(turn::MAX_QUANTA)
        .saturating_add(MAX_SHORT_WORK)
        .min(max_wait / jobs.saturating_mul(jobs))
}

/// Short work that waits for a GPU which long work holds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShortWork {
    /// The time from which the budget of switching allows it.
    pub(crate) allowed_at: Duration,
    /// The time since which it waits.
    pub(crate) since: Duration,
    /// The longest time that work may wait.
    pub(crate) max_wait: Duration,
    /// The time that the hand-over to it takes.
    pub(crate) cost: Duration,
    /// The time that its job has had beyond its share, negative if less; in nanoseconds of virtual time.
    pub(crate) lead: i64,
    /// The largest `lead` with which it goes: see [`most_ahead`].
    pub(crate) most_ahead: Duration,
}

/// Returns the time at which short work may have the GPU before its turn, or `None` if it waits for its turn.
#[must_use]
pub(crate) fn earliest(request: &ShortWork) -> Option<Duration> {
    let most = i64::try_from(request.most_ahead.as_nanos()).unwrap_or(i64::MAX);
    let latest = request.since.saturating_add(request.max_wait.saturating_sub(request.cost));
    (request.lead <= most).then(|| request.allowed_at.min(latest))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn the_wait_counts_more_than_the_cost_and_the_share_more_than_both() {
        for (allowed, max_wait, cost, lead, expected) in [
            (0, 30_000, 160, 0, Some(0)),
            (5000, 30_000, 160, 0, Some(5000)),
            (5000, 400, 160, 0, Some(1240)),
            // A wait that cannot be had.
            (5000, 100, 160, 0, Some(1000)),
            (0, 30_000, 160, -60_000, Some(0)),
            (0, 30_000, 160, 4500, Some(0)),
            (0, 400, 160, 4501, None),
        ] {
            let request = ShortWork {
                allowed_at: MS(allowed),
                since: MS(1000),
                max_wait: MS(max_wait),
                cost: MS(cost),
                lead: lead * 1_000_000,
                most_ahead: MS(4500),
            };
            assert_eq!(earliest(&request), expected.map(MS), "{request:?}");
        }
    }

    #[test]
    fn a_crowd_runs_no_further_ahead_than_others_may_wait() {
        for (quantum, max_wait, jobs, expected) in
            [(2000, 30_000, 2, 4500), (2000, 30_000, 10, 300), (2000, 400, 2, 100), (2000, 400, 0, 400)]
        {
            let most = most_ahead(MS(quantum), MS(max_wait), jobs);
            assert_eq!(most, MS(expected), "{quantum} ms, {max_wait} ms, {jobs} jobs");
        }
    }
}
