//! Virtual time and weights: their units, and the one from the other.

use std::cell::Cell;
use std::time::Duration;

/// Virtual time, in nanoseconds of a job of the usual weight. Differences may be negative.
pub(crate) type VirtualTime = i64;

/// Real time, in nanoseconds. Differences may be negative.
pub(crate) type Nanos = i64;

/// The weight of a job that has no other.
pub(crate) const DEFAULT_SCALED_WEIGHT: u64 = nvshare_proto::DEFAULT_WEIGHT as u64 * WEIGHT_SCALE;
/// Weights inside the core are this many times what users say, so that a priority can divide them.
pub(crate) const WEIGHT_SCALE: u64 = 64;

/// Returns the virtual time that `time` is for jobs of this weight.
pub(crate) fn to_virtual(time: Nanos, weight: u64) -> VirtualTime {
    if weight == DEFAULT_SCALED_WEIGHT {
        return time;
    }
    let weight = i128::from(weight.max(1));
    i64::try_from(i128::from(time) * i128::from(DEFAULT_SCALED_WEIGHT) / weight)
        .unwrap_or(VirtualTime::MAX / 4)
}

pub(crate) fn nanos(time: Duration) -> Nanos {
    Nanos::try_from(time.as_nanos()).unwrap_or(Nanos::MAX / 4).min(Nanos::MAX / 4)
}

/// Returns the time that a job of this weight gets in this much virtual time.
pub(crate) fn to_real(time: VirtualTime, weight: u64) -> Nanos {
    let nanos = i128::from(time.max(0)) * i128::from(weight) / i128::from(DEFAULT_SCALED_WEIGHT);
    Nanos::try_from(nanos).unwrap_or(Nanos::MAX / 4)
}

/// A figure that is computed once in an event, since many ask for it.
#[derive(Debug, Clone, Default)]
pub(crate) struct OncePerEvent(Cell<Option<(u64, VirtualTime)>>);

impl OncePerEvent {
    pub(crate) fn get_or_compute(&self, event: u64, compute: impl FnOnce() -> VirtualTime) -> VirtualTime {
        if let Some((_, figure)) = self.0.get().filter(|&(of, _)| of == event) {
            return figure;
        }
        let figure = compute();
        self.0.set(Some((event, figure)));
        figure
    }

    /// Forgets the figure, when something that it follows from has changed.
    pub(crate) fn forget(&self) {
        self.0.set(None);
    }
}
