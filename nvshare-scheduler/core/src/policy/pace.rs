//! An enforced compute limit: a job may hold the GPU for a part of the time, whether others want it or not.
//!
//! A job's credit grows with the time, at the rate of the limit, up to what one spell needs; holding uses it
//! up. A job that will have none left when its drain is over leaves, and comes back when it has credit for a
//! whole spell. A spell and the rest behind it take [`PERIOD`], and longer where a spell would be too short
//! to be worth a hand-over. When a drain takes longer than was expected, a longer rest makes up for it. A job
//! that has credit for a spell may be kept waiting by others. It saves what one more spell needs meanwhile,
//! so that it gets its part beside them too. A job that sleeps saves nothing.

use std::time::Duration;

/// Length of a spell and the rest behind it.
pub(crate) const PERIOD: Duration = Duration::from_millis(250);
/// Shortest spell, unless spell and rest would then take longer than a second.
pub(crate) const MIN_RUN: Duration = Duration::from_millis(20);
/// The largest credit that a job can owe after a drain that took longer than its spell, in nanoseconds.
const MAX_DEBT: i64 = 5_000_000_000;

/// A job's use of the GPU, as far as its limit is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PaceState {
    /// Its gate is open, or its work completes.
    Runs,
    /// It wants the GPU and does not hold it.
    Waits,
    /// It does not want the GPU.
    Sleeps,
}

/// The pace of one job. Credit is in nanoseconds × 100.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pace {
    percent: i64,
    credit: i64,
    at: Duration,
}

impl Pace {
    /// Returns the pace of a job that may hold the GPU for `percent` of the time, and has not held it lately.
    #[must_use]
    pub(crate) fn new(percent: u8, now: Duration) -> Self {
        let mut pace = Self { percent: i64::from(percent.clamp(1, 100)), credit: 0, at: now };
        pace.credit = pace.enough();
        pace
    }

    /// Sets another limit from now on: the job has credit for one spell, whatever it did under the other
    /// limit.
    pub(crate) fn set(&mut self, percent: u8, does: PaceState, now: Duration) {
        self.advance(does, now);
        let percent = i64::from(percent.clamp(1, 100));
        if percent != self.percent {
            self.percent = percent;
            self.credit = self.enough();
        }
    }

    /// Lets time pass, in which the job was in this state.
    pub(crate) fn advance(&mut self, does: PaceState, now: Duration) {
        let passed = nanos(now.saturating_sub(self.at));
        self.at = self.at.max(now);
        let rate = if does == PaceState::Runs { self.percent - 100 } else { self.percent };
        let most = if does == PaceState::Sleeps { self.enough() } else { self.enough() * 2 };
        let credit = self.credit.saturating_add(passed.saturating_mul(rate));
        self.credit = credit.clamp(-MAX_DEBT * 100, most);
    }

    /// Returns when a job that does not hold the GPU may hold it again.
    #[must_use]
    pub(crate) fn begins_at(&self) -> Duration {
        let lacks = self.enough() - self.credit;
        // Rounded up: a moment too early, the credit would not be enough.
        self.at + Duration::from_nanos(lacks.max(0).unsigned_abs().div_ceil(self.percent.unsigned_abs()))
    }

    /// Returns when a job that holds the GPU has to leave; `None` if never. Its drain ends with its credit
    /// then, if it takes as long as expected. Half of a spell it has in any case.
    #[must_use]
    pub(crate) fn ends_at(&self, drain: Duration) -> Option<Duration> {
        let rate = 100 - self.percent;
        let kept = nanos(drain).saturating_mul(rate).min(self.enough() / 2);
        let left = (self.credit - kept).max(0).unsigned_abs();
        (rate > 0).then(|| self.at + Duration::from_nanos(left.div_ceil(rate.unsigned_abs())))
    }

    /// Returns the credit for a whole spell: the amount that it uses up beyond what it earns meanwhile.
    fn enough(&self) -> i64 {
        let second = 1_000_000_000;
        let period = nanos(PERIOD).max(nanos(MIN_RUN) * 100 / self.percent).min(second);
        period * self.percent / 100 * (100 - self.percent)
    }
}

fn nanos(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX / 200).min(i64::MAX / 200)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    /// Returns the time that a job holds the GPU in ten seconds, if it holds it whenever it may and leaves
    /// `late` each time.
    fn held(pace: &mut Pace, begin: Duration, late: Duration) -> Duration {
        let (mut now, mut held) = (begin, Duration::ZERO);
        while now < begin + MS(10_000) {
            now = now.max(pace.begins_at());
            pace.advance(PaceState::Waits, now);
            let ends = pace.ends_at(MS(0)).map_or(begin + MS(10_000), |ends| ends + late);
            held += ends - now;
            now = ends;
            pace.advance(PaceState::Runs, now);
        }
        held
    }

    #[test]
    fn a_limit_is_a_part_of_the_time_however_late_drains_end() {
        for percent in [1, 2, 5, 10, 25, 50, 75, 99, 100] {
            for late in [0, 1, 20, 150] {
                let mut pace = Pace::new(percent, MS(5));
                let held = held(&mut pace, MS(5), MS(late));
                let expected = MS(100 * u64::from(percent));
                // The error is at most one spell.
                let error = held.saturating_sub(expected).max(expected.saturating_sub(held));
                assert!(error <= MS(260 + late), "{percent} %, {late} ms late: {held:?}");
            }
        }
    }

    #[test]
    fn within_each_second_too() {
        let mut pace = Pace::new(25, MS(0));
        let ends = pace.ends_at(MS(0)).expect("an end");
        assert_eq!(ends, Duration::from_micros(62_500));
        pace.advance(PaceState::Runs, ends);
        assert_eq!(pace.begins_at(), MS(250));
    }

    #[test]
    fn a_spell_ends_with_its_drain_where_that_is_as_long_as_expected() {
        let mut pace = Pace::new(25, MS(0));
        assert_eq!(pace.ends_at(MS(20)), Some(Duration::from_micros(42_500)));
        // Half a spell is left to a job whose drains are long.
        assert_eq!(pace.ends_at(MS(90)), Some(Duration::from_micros(31_250)));
        pace.advance(PaceState::Runs, Duration::from_micros(62_500));
        assert_eq!(pace.begins_at(), MS(250));
    }

    #[test]
    fn a_job_that_waits_saves_for_one_more_spell_and_one_that_sleeps_does_not() {
        for (does, expected) in [(PaceState::Waits, 125_000), (PaceState::Sleeps, 62_500)] {
            let mut pace = Pace::new(25, MS(0));
            pace.advance(does, MS(60_000));
            let ends = pace.ends_at(MS(0)).expect("an end") - MS(60_000);
            assert_eq!(ends, Duration::from_micros(expected), "{does:?}");
        }
    }

    #[test]
    fn another_limit_is_in_force_within_100_ms() {
        let limits = [1, 5, 20, 25, 60, 90, 99];
        for (from, to) in limits.into_iter().flat_map(|from| limits.map(|to| (from, to))) {
            for (does, then) in
                [(PaceState::Runs, 0), (PaceState::Runs, 40), (PaceState::Runs, 5000), (PaceState::Waits, 90)]
            {
                let mut pace = Pace::new(from, MS(0));
                pace.advance(does, MS(then));
                pace.set(to, does, MS(then));
                assert!(from == to || pace.begins_at() <= MS(then + 100), "{from} to {to}: {pace:?}");
                // A whole spell under the new limit, and no more.
                let spell = pace.ends_at(MS(0)).expect("an end") - MS(then);
                let most = MS(250).max(MS(20) * 100 / u32::from(to)).min(MS(1000)) * u32::from(to) / 100;
                assert!(from == to || spell <= most, "{from} to {to}: {spell:?}");
            }
        }
        let mut pace = Pace::new(25, MS(0));
        pace.advance(PaceState::Runs, MS(1000));
        let before = pace.clone();
        pace.set(25, PaceState::Runs, MS(1000));
        assert_eq!(pace, before, "the same limit is no other limit");
    }

    #[test]
    fn another_limit_holds_at_once() {
        let mut pace = Pace::new(20, MS(0));
        held(&mut pace, MS(0), MS(0));
        pace.set(60, PaceState::Waits, pace.at);
        let begin = pace.at;
        assert!(pace.begins_at() <= begin + MS(250), "{:?}", pace.begins_at() - begin);
        let held = held(&mut pace, begin, MS(0));
        assert!(held >= MS(5700) && held <= MS(6300), "{held:?}");
    }

    #[test]
    fn a_kernel_without_end_is_not_paid_for_without_end() {
        let mut pace = Pace::new(10, MS(0));
        pace.advance(PaceState::Runs, MS(3_600_000));
        assert!(pace.begins_at() <= MS(3_600_000 + 51_000), "{:?}", pace.begins_at());
    }
}
