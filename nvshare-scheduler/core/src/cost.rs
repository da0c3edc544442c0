//! What hand-overs cost, as the scheduler timed them itself: nothing that a client says goes in.
//!
//! | figure | from | to |
//! |---|---|---|
//! | drain | DROP_LOCK sent | LOCK_RELEASED, or IDLE |
//! | evict | EVICT sent | EVICTED |
//! | restore | LOCK_OK sent | RUNNING |
//! | idle | the last holder's work complete | RUNNING of who waited for it |
//!
//! A drain is not lost: the GPU computes meanwhile. What a hand-over costs is `idle`: evictions, the grant, restoring.

use std::time::Duration;

/// The mean of a duration, in which what was seen of late counts most: half of it is the last three samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timed {
    mean: Duration,
    samples: u64,
}

impl Timed {
    /// One more sample counts for this part of the mean.
    const PART: u32 = 4;

    /// The mean; none: it has not happened yet.
    #[must_use]
    pub fn mean(self) -> Option<Duration> {
        (self.samples > 0).then_some(self.mean)
    }

    /// How often it has happened.
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

/// What hand-overs cost: on a GPU, or of one client on it. See the module's documentation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SwitchCost {
    /// From DROP_LOCK to LOCK_RELEASED.
    pub drain: Timed,
    /// From EVICT to EVICTED.
    pub evict: Timed,
    /// From LOCK_OK to RUNNING.
    pub restore: Timed,
    /// From the last holder's drained work to the open gate of who waited for it; on a client: of this one.
    pub idle: Timed,
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
