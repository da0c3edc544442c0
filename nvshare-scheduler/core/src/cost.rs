//! The cost of hand-overs, as the scheduler times it: it uses no figure that a client reports.
//!
//! | figure | from | to |
//! |---|---|---|
//! | drain | DROP_LOCK sent | LOCK_RELEASED, or IDLE |
//! | evict | EVICT sent | EVICTED |
//! | restore | LOCK_OK sent | RUNNING |
//! | idle | the last holder's work complete | RUNNING of the client that waited for it |
//!
//! A drain is not lost time: the GPU computes meanwhile. The cost of a hand-over is `idle`: evictions, the grant,
//! restoring.

use std::time::Duration;

/// The mean of a duration. Recent samples count most: the last three make up half of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timed {
    mean: Duration,
    samples: u64,
}

impl Timed {
    /// A new sample counts for one part in so many of the mean.
    const PART: u32 = 4;

    /// The mean; none: there is no sample yet.
    #[must_use]
    pub fn mean(self) -> Option<Duration> {
        (self.samples > 0).then_some(self.mean)
    }

    /// The number of samples.
    #[must_use]
    pub fn samples(self) -> u64 {
        self.samples
    }

    pub(crate) fn record(&mut self, took: Duration) {
        self.mean = match self.samples {
            0 => took,
            _ => (self.mean * (Self::PART - 1) + took) / Self::PART,
        };
        self.samples = self.samples.saturating_add(1);
    }
}

/// The cost of hand-overs: on a GPU, or of one client on it. See the module's documentation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SwitchCost {
    /// From DROP_LOCK to LOCK_RELEASED.
    pub drain: Timed,
    /// From EVICT to EVICTED.
    pub evict: Timed,
    /// From LOCK_OK to RUNNING.
    pub restore: Timed,
    /// From the end of the last holder's drain to the open gate of the client that waited; on a client: of this one.
    pub idle: Timed,
}

impl SwitchCost {
    /// How much more than this quantum a turn counts for: see `share.rs`.
    pub(crate) fn beyond(&self, quantum: Duration) -> Duration {
        let drain = self.drain.mean().unwrap_or_default();
        drain.max(self.restore.mean().unwrap_or_default().saturating_sub(quantum))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_follows_what_is_seen_of_late() {
        const MS: fn(u64) -> Duration = Duration::from_millis;
        let mut timed = Timed::default();
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
}
