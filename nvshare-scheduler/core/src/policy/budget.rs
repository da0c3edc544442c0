//! The time that switching may still cost: hand-overs may take a stated part of the time.
//!
//! Passing time earns that part, and each hand-over spends the time that it took. Short work may go ahead of
//! long work while the debt is at most what [`LEEWAY`] earns. A turn of long work does not end while there is
//! a debt. So turns of long work and the short work that interrupts them cost no more together than the
//! stated part.

use std::time::Duration;

use nvshare_proto::units::saturate;

/// The largest saving, and the largest debt with which short work goes ahead, are what this much time earns.
pub(crate) const LEEWAY: Duration = Duration::from_secs(10);
/// The largest debt is what this much time earns: a hand-over that took hours is not paid for with days.
const MAX_DEBT: Duration = Duration::from_secs(60);

/// The balance of switching, in nanoseconds × 10⁶.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Budget {
    balance: i128,
    at: Duration,
}

impl Budget {
    /// Earns for the time that has passed up to `now`: switching may cost `ppm` millionths of it.
    pub(crate) fn advance(&mut self, ppm: u32, now: Duration) {
        let passed = now.saturating_sub(self.at);
        self.at = self.at.max(now);
        self.balance =
            (self.balance + earned(passed, ppm)).clamp(-earned(MAX_DEBT, ppm), earned(LEEWAY, ppm));
    }

    /// Spends the time that a hand-over took.
    pub(crate) fn spend(&mut self, took: Duration) {
        self.balance -= earned(took, 1_000_000);
    }

    /// Returns the time at which there is no debt any more, if no hand-over comes before.
    #[must_use]
    pub(crate) fn paid_at(&self, ppm: u32) -> Duration {
        self.owes_at_most(0, ppm)
    }

    /// Returns the time from which short work may go ahead of long work.
    #[must_use]
    pub(crate) fn allows_at(&self, ppm: u32) -> Duration {
        self.owes_at_most(earned(LEEWAY, ppm), ppm)
    }

    /// Returns how long short work waits, so that it comes no more often than `every` where the stated part
    /// pays for that. It does not wait while there is no debt. It waits for the whole of `every` when the
    /// debt is the largest one that short work may add to. So waits become longer by little and little, and
    /// are about the same each time.
    #[must_use]
    pub(crate) fn delays(&self, ppm: u32, every: Duration) -> Duration {
        let most = earned(LEEWAY, ppm).max(1);
        let debt = (-self.balance).clamp(0, most);
        every.mul_f64(debt as f64 / most as f64)
    }

    fn owes_at_most(&self, debt: i128, ppm: u32) -> Duration {
        let lacks = (-debt - self.balance).max(0);
        // Rounded up: a nanosecond too early, the debt is not paid yet.
        let nanos = (lacks + i128::from(ppm.max(1)) - 1) / i128::from(ppm.max(1));
        self.at.saturating_add(Duration::from_nanos(saturate(nanos)))
    }
}

fn earned(time: Duration, ppm: u32) -> i128 {
    i128::try_from(time.as_nanos()).unwrap_or(i128::MAX >> 32).min(i128::MAX >> 32) * i128::from(ppm)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;
    const FIVE_PER_CENT: u32 = 50_000;

    #[test]
    fn spent_time_is_earned_again() {
        for (spent, paid, allowed) in [
            (0, 0, 0),
            (160, 3200, 0),
            // Half a second is what ten earn.
            (500, 10_000, 0),
            (600, 12_000, 2000),
        ] {
            let mut budget = Budget::default();
            budget.spend(MS(spent));
            let at = [budget.paid_at(FIVE_PER_CENT), budget.allows_at(FIVE_PER_CENT)];
            assert_eq!(at, [MS(paid), MS(allowed)], "{spent} ms");
            budget.advance(FIVE_PER_CENT, MS(paid));
            assert_eq!(budget.paid_at(FIVE_PER_CENT), MS(paid), "no sooner and no later");
        }
    }

    #[test]
    fn short_work_waits_longer_the_more_is_owed() {
        for (spent, expected) in [(0, 0), (50, 100), (250, 500), (500, 1000), (5000, 1000)] {
            let mut budget = Budget::default();
            budget.spend(MS(spent));
            assert_eq!(budget.delays(FIVE_PER_CENT, MS(1000)), MS(expected), "{spent} ms");
        }
        let mut budget = Budget::default();
        budget.advance(FIVE_PER_CENT, MS(60_000));
        assert_eq!(budget.delays(FIVE_PER_CENT, MS(1000)), MS(0), "what was saved");
    }

    #[test]
    fn neither_savings_nor_debts_grow_without_end() {
        let mut budget = Budget::default();
        budget.advance(FIVE_PER_CENT, MS(3_600_000));
        budget.spend(MS(1000));
        assert_eq!(budget.paid_at(FIVE_PER_CENT), MS(3_610_000), "half a second was saved");
        budget.spend(Duration::MAX / 8);
        budget.advance(FIVE_PER_CENT, MS(3_600_001));
        assert_eq!(budget.paid_at(FIVE_PER_CENT), MS(3_660_001));
    }

    #[test]
    fn short_work_that_goes_whenever_it_may_costs_no_more_than_was_stated() {
        for (ppm, cost) in [(20_000, 160), (50_000, 160), (500_000, 160), (50_000, 2000)] {
            let (mut budget, mut now, mut spent) = (Budget::default(), MS(0), MS(0));
            while now < MS(600_000) {
                now = now.max(budget.allows_at(ppm)) + MS(cost);
                budget.advance(ppm, now);
                budget.spend(MS(cost));
                spent += MS(cost);
            }
            let part = spent.as_secs_f64() / now.as_secs_f64() * 1e6;
            // The debt that may be left in the end, and the last hand-over.
            let most = f64::from(ppm) * 1.04 + 2000.0 * cost as f64 / 600.0;
            assert!(part <= most, "{part} ppm of {ppm} at {cost} ms");
        }
    }
}
