//! The cost of hand-overs, as the scheduler times it: it uses no figure that a client reports.
//!
//! | figure | from | to |
//! |---|---|---|
//! | drain | DROP_LOCK sent | LOCK_RELEASED, or IDLE |
//! | evict | EVICT sent | EVICTED |
//! | restore | LOCK_OK sent | RUNNING |
//! | gap | the last holder's work complete | RUNNING of the client that waited for it |
//!
//! A drain is not lost time: the GPU computes meanwhile. The cost of a hand-over is the `gap`: evictions, the
//! grant, restoring.

#![cfg_attr(
    not(feature = "test-api"),
    expect(unreachable_pub, reason = "tests alone see these figures from outside")
)]

use std::time::Duration;

/// The mean of a duration. Recent samples count most: the last three make up half of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RecentMean {
    mean: Duration,
    samples: u64,
}

impl RecentMean {
    /// A new sample counts for one part in this many of the mean.
    const ONE_IN: u32 = 4;

    /// Returns the mean, or `None` if there is no sample yet.
    #[must_use]
    pub fn mean(self) -> Option<Duration> {
        (self.samples > 0).then_some(self.mean)
    }

    /// Returns the number of samples.
    #[cfg(any(test, feature = "test-api"))]
    #[must_use]
    pub fn samples(self) -> u64 {
        self.samples
    }

    pub(crate) fn record(&mut self, took: Duration) {
        self.mean = match self.samples {
            0 => took,
            _ => (self.mean * (Self::ONE_IN - 1) + took) / Self::ONE_IN,
        };
        self.samples = self.samples.saturating_add(1);
    }
}

/// The cost of hand-overs: on a GPU, or of one client on it. See the module's documentation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HandOverCosts {
    /// From DROP_LOCK to LOCK_RELEASED.
    pub drain: RecentMean,
    /// From EVICT to EVICTED.
    pub evict: RecentMean,
    /// From LOCK_OK to RUNNING.
    pub restore: RecentMean,
    /// From the end of the last holder's drain to the open gate of the client that waited; on a client: of
    /// this one.
    pub gap: RecentMean,
}

impl HandOverCosts {
    /// Returns the larger of the usual drain and the part of a usual restore that exceeds the quantum: see
    /// `share.rs`.
    pub(crate) fn overrun_allowance(&self, quantum: Duration) -> Duration {
        let drain = self.drain.mean().unwrap_or_default();
        drain.max(self.restore.mean().unwrap_or_default().saturating_sub(quantum))
    }
}

/// How long hand-overs take that move memory, by the bytes that have to leave for them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct MoveCost {
    /// Means, in seconds and bytes. The samples count as in [`RecentMean`].
    took: f64,
    bytes: f64,
}

impl MoveCost {
    /// Records a hand-over for which `bytes` had to leave.
    pub(crate) fn record(&mut self, took: Duration, bytes: u64) {
        let part = if self.bytes > 0.0 { 1.0 / f64::from(RecentMean::ONE_IN) } else { 1.0 };
        self.took += (took.as_secs_f64() - self.took) * part;
        self.bytes += (bytes as f64 - self.bytes) * part;
    }

    /// Returns the time of a hand-over for which `bytes` have to leave, or `None` if there is no sample. The
    /// programs' first hand-overs, while they grow, move little. The mean of the times alone would be too
    /// short for several turns.
    pub(crate) fn estimate(self, bytes: u64) -> Option<Duration> {
        let took = self.took * (bytes as f64 / self.bytes);
        (self.bytes > 0.0).then(|| Duration::try_from_secs_f64(took).unwrap_or(Duration::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_follows_recent_samples() {
        const MS: fn(u64) -> Duration = Duration::from_millis;
        let mut timed = RecentMean::default();
        assert_eq!(timed.mean(), None);
        timed.record(MS(100));
        assert_eq!(timed.mean(), Some(MS(100)));
        for _ in 0..5 {
            timed.record(MS(1000));
        }
        let mean = timed.mean().expect("samples");
        assert!(mean > MS(750) && mean < MS(1000), "{mean:?}");
        assert_eq!(timed.samples(), 6);
        timed.record(Duration::MAX / 8);
        timed.record(Duration::MAX / 8);
    }

    #[test]
    fn small_hand_overs_say_how_long_large_ones_take() {
        const MS: fn(u64) -> Duration = Duration::from_millis;
        let mut moving = MoveCost::default();
        assert_eq!(moving.estimate(1), None);
        moving.record(MS(2), 100);
        assert_eq!(moving.estimate(8000), Some(MS(160)));
        moving.record(MS(200), 8000);
        let large = moving.estimate(8000).expect("samples");
        assert!(large > MS(190) && large < MS(210), "{large:?}");
        assert_eq!(moving.estimate(0), Some(MS(0)));
    }
}
