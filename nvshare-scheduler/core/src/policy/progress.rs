//! Whether jobs that fit a GPU get more done side by side or by turns.
//!
//! Side by side, jobs fill each other's gaps. But where each of them fills the GPU alone, the driver's own
//! time slicing costs more than hand-overs do. Which of the two it is shows in what the jobs get done, in
//! submissions whose work is complete:
//!
//! *progress* of a set = the sum, over its jobs, of (rate side by side ÷ rate in turns of its own).
//!
//! By turns of equal length each job gets its part of its own rate, which sums up to 1. So below 1, turns get
//! more done.
//!
//! - A *round* is one turn of each job. Rounds alternate with windows side by side. So a program that changes
//!   its work between the two shows in one or two of the sums, not in all.
//! - Turns are taken when [`ROUNDS`] rounds show a sum below [`LESS`] and none a sum of 1 or more. One sum of
//!   1 or more is allowed if one more round shows a sum below [`LESS`]. On a busy host a program may be held
//!   up in one turn. With more than [`MAX_ROUNDS`] rounds nothing is decided, and the jobs stay side by
//!   side.
//! - While turns are taken, a window side by side shows every [`CHECK_EVERY`] whether that is still right. A
//!   sum above 1 twice, or above [`CLEARLY`] once, ends them.
//! - Rounds cost no more than [`MAY_COST`] of the time that the set has lasted. A trial that
//!   showed nothing is repeated after [`RETRY`], and each time twice as late, up to [`RETRY_AT_MOST`].

use std::time::Duration;

use nvshare_proto::units::saturate_u32;

use crate::policy::slices;

/// The part of the time that rounds may cost.
pub(crate) const MAY_COST: f64 = 0.01;
/// A round with a smaller sum speaks for turns.
pub(crate) const LESS: f64 = 0.97;
/// A sum above this is no noise: one is enough, that of the short first round too.
pub(crate) const CLEARLY: f64 = 1.05;
/// This number of rounds with a small sum decides.
pub(crate) const ROUNDS: usize = 3;
/// More rounds than this are not tried in a row.
pub(crate) const MAX_ROUNDS: usize = 5;
/// Jobs of a set that is measured: with more, each would wait for long.
pub(crate) const MAX_JOBS: usize = 8;
/// How long a set is counted side by side before its first round.
pub(crate) const FIRST_WINDOW: Duration = Duration::from_millis(6500);
/// How long it is counted side by side between rounds.
pub(crate) const WINDOW: Duration = Duration::from_secs(1);
/// How long what is in flight is short before the first round, at least.
pub(crate) const SHORT_WINDOW: Duration = Duration::from_millis(250);
/// Programs that took turns fill each other's gaps again after this time.
pub(crate) const MIXES: Duration = Duration::from_millis(100);
/// How often turns are checked against running side by side.
pub(crate) const CHECK_EVERY: Duration = Duration::from_secs(30);
/// The time after which turns are checked again whose check, or whose own rates, raised a doubt.
pub(crate) const CHECK_SOON: Duration = Duration::from_secs(5);
/// The time after which a set whose jobs did nothing is counted again; twice as long after each time.
pub(crate) const QUIET: Duration = Duration::from_secs(10);
/// The time after which a trial that showed nothing is repeated, and the longest such time.
pub(crate) const RETRY: Duration = Duration::from_secs(60);
/// See [`RETRY`].
pub(crate) const RETRY_AT_MOST: Duration = Duration::from_secs(600);
/// A job whose rate in its turns has changed by more than this part does other work.
pub(crate) const OTHER_WORK: f64 = 0.15;

/// The longest slice, and the longest round.
const SLICE: Duration = Duration::from_millis(250);
const ROUND: Duration = Duration::from_secs(1);
/// The longest time for which work in flight delays the end of a slice, mostly.
const DRAIN: Duration = Duration::from_millis(25);

/// Returns how long each of `jobs` has its turn. The first round is short, as it may cost much, and speaks
/// against turns alone. A few milliseconds of launches show too little to speak for them.
#[must_use]
pub(crate) fn slice(jobs: usize, first: bool) -> Duration {
    if first {
        return slices::MIN_LENGTH;
    }
    let jobs = saturate_u32(jobs.max(1));
    (ROUND / jobs).clamp(slices::MAX_LENGTH, SLICE)
}

/// Returns the progress of a set, of the rate side by side and the rate alone of each job, or `None` if that
/// says nothing.
#[must_use]
pub(crate) fn progress(rates: impl Iterator<Item = (f64, f64)>) -> Option<f64> {
    let parts: Vec<f64> = rates.map(|(beside, alone)| beside / alone).collect();
    let sum: f64 = parts.iter().sum();
    (parts.len() > 1 && parts.iter().all(|part| part.is_finite()) && sum > 0.0).then_some(sum)
}

/// The finding that follows from the sums of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finding {
    /// Turns get more done.
    Turns,
    /// Turns get no more done, or nothing shows that they do.
    SideBySide,
    /// Another round shows more.
    Unknown,
}

/// Returns the finding that follows from the sums of a trial's rounds, the first one first.
#[must_use]
pub(crate) fn finding(sums: &[f64]) -> Finding {
    let less = sums.iter().filter(|&&sum| sum < LESS).count();
    let more = sums.iter().filter(|&&sum| sum >= 1.0).count();
    if more > 1 {
        Finding::SideBySide
    } else if less >= ROUNDS + more {
        Finding::Turns
    } else if sums.len() >= MAX_ROUNDS {
        Finding::SideBySide
    } else {
        Finding::Unknown
    }
}

/// Whether a round that speaks clearly against turns may be an exception, as all sums before it speak for
/// them.
#[must_use]
pub(crate) fn is_outlier(before: &[f64]) -> bool {
    !before.is_empty() && before.iter().all(|&sum| sum < LESS)
}

/// Returns the finding of a check of turns.
#[must_use]
pub(crate) fn still(sum: f64, doubted: bool) -> Finding {
    if sum > CLEARLY || sum > 1.0 && doubted {
        Finding::SideBySide
    } else if sum > 1.0 {
        Finding::Unknown
    } else {
        Finding::Turns
    }
}

/// Returns the time that turns of this length lost, against running side by side.
#[must_use]
pub(crate) fn loss(sum: f64, took: Duration) -> Duration {
    took.mul_f64((1.0 - 1.0 / sum.max(1.0)).clamp(0.0, 1.0))
}

/// Returns the most that the first round of `jobs` may lose: while one works, the others wait.
#[must_use]
pub(crate) fn first_round_costs(jobs: usize) -> Duration {
    let others = saturate_u32(jobs.saturating_sub(1));
    (slice(jobs, true) + DRAIN).saturating_mul(others)
}

/// Returns how long a set has to last before it may have lost this much.
#[must_use]
pub(crate) fn pays_for(lost: Duration) -> Duration {
    lost.mul_f64(1.0 / MAY_COST)
}

/// Returns how long the next trial waits after the last of `failures` in a row that showed nothing.
#[must_use]
pub(crate) fn retry(failures: u32) -> Duration {
    RETRY.saturating_mul(1 << failures.saturating_sub(1).min(8)).min(RETRY_AT_MOST)
}

/// Returns how long the next count of a set waits after the last of `looks` at which it did nothing.
#[must_use]
pub(crate) fn quiet(looks: u32) -> Duration {
    QUIET.saturating_mul(1 << looks.saturating_sub(1).min(8)).min(RETRY_AT_MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn the_progress_of_sets() {
        for (rates, expected) in [
            // Each fills the GPU: the driver's slicing costs 6 %.
            (&[(0.47, 1.0), (235.0, 500.0)][..], Some(0.94)),
            // Each leaves gaps.
            (&[(0.75, 1.0), (0.75, 1.0)], Some(1.5)),
            (&[(0.1, 0.3), (0.1, 0.3), (0.1, 0.3)], Some(1.0)),
            // A job that did nothing in its turn, or is alone, shows nothing.
            (&[(0.5, 1.0), (0.5, 0.0)], None),
            (&[(0.0, 0.0), (0.5, 1.0)], None),
            (&[(0.0, 1.0), (0.0, 1.0)], None),
            (&[(1.0, 1.0)], None),
            (&[], None),
        ] {
            let got = progress(rates.iter().copied());
            let same =
                got.zip(expected).map_or(got == expected, |(got, by_hand)| (got - by_hand).abs() < 1e-9);
            assert!(same, "{rates:?}: {got:?}");
        }
    }

    #[test]
    fn three_rounds_decide_and_two_contradict() {
        use Finding::{SideBySide, Turns, Unknown};
        for (sums, expected) in [
            (&[][..], Unknown),
            (&[0.94, 0.94], Unknown),
            (&[0.94, 0.95, 0.96], Turns),
            (&[0.94, 0.98, 0.95, 0.96], Turns),
            // A program may have been held up once; then three do not decide.
            (&[0.94, 1.0, 0.94, 0.94], Unknown),
            (&[0.94, 1.2, 0.94, 0.94, 0.94], Turns),
            (&[1.0, 0.94, 0.94, 0.98, 0.94], SideBySide),
            (&[0.94, 1.0, 0.94, 1.0], SideBySide),
            (&[1.5, 1.5], SideBySide),
            (&[0.98, 0.98, 0.98, 0.98], Unknown),
            (&[0.98, 0.94, 0.98, 0.94, 0.98], SideBySide),
        ] {
            assert_eq!(finding(sums), expected, "{sums:?}");
        }
    }

    #[test]
    fn a_doubt_has_to_come_twice() {
        use Finding::{SideBySide, Turns, Unknown};
        for (sum, doubted, expected) in [
            (0.94, false, Turns),
            (0.99, true, Turns),
            (1.01, false, Unknown),
            (1.01, true, SideBySide),
            (1.5, false, SideBySide),
        ] {
            assert_eq!(still(sum, doubted), expected, "{sum} {doubted}");
        }
    }

    #[test]
    fn what_a_trial_costs_and_when_it_may_come() {
        for (jobs, first, expected) in
            [(2, true, 50), (2, false, 250), (4, false, 250), (8, false, 125), (0, false, 250)]
        {
            assert_eq!(slice(jobs, first), MS(expected), "{jobs} {first}");
        }
        for (sum, took, expected) in [(0.94, 500, 0), (1.0, 500, 0), (1.5, 600, 200), (2.0, 200, 100)] {
            assert_eq!(loss(sum, MS(took)), MS(expected), "{sum}");
        }
        for (jobs, seconds) in [(1, 0), (2, 7500), (3, 15_000), (8, 52_500)] {
            assert_eq!(pays_for(first_round_costs(jobs)), MS(seconds), "{jobs} jobs");
        }
        let times = [0, 1, 2, 3, 4, 5, 99].map(|failures| retry(failures).as_secs());
        assert_eq!(times, [60, 60, 120, 240, 480, 600, 600]);
        assert_eq!([1, 2, 99].map(|looks| quiet(looks).as_secs()), [10, 20, 600]);
    }
}
