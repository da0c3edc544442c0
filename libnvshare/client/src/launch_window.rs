//! How much work may be in flight on a stream while another client waits.
//!
//! A mark (an event) is recorded every `stride` launches; with [`MARKS`] of them incomplete, the next launch waits for the
//! oldest. The stride follows the time that the marks take. It is halved while the queue holds more than [`MAX_WINDOW`] of work,
//! and doubled while it holds less than [`MIN_WINDOW`]. So a drain takes about [`MAX_WINDOW`], or one kernel where that is longer,
//! and a stream of tiny kernels is marked once in [`LARGEST_STRIDE`].
//!
//! A launch waits no longer than [`MAX_PATIENCE`], since the older one may itself wait for this launch. Each further launch
//! that waits in vain for the same mark waits half as long as the one before, down to [`MIN_PATIENCE`]. So a program that has
//! to make many launches before the oldest can complete is hardly delayed. A program with slow kernels does not run ahead of
//! them.

use std::time::Duration;

/// How much work may be in flight while the gate is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InFlight {
    /// As much as the program submits: no other client waits.
    Unbounded,
    /// As much as the launch window lets through.
    Bounded,
}

impl InFlight {
    /// The bound that holds while other clients wait, or do not.
    #[must_use]
    pub fn while_others_wait(waiting: bool) -> Self {
        if waiting { Self::Bounded } else { Self::Unbounded }
    }
}

/// Marks in flight.
pub const MARKS: u32 = 4;
/// Queues longer than this are shortened.
pub const MAX_WINDOW: Duration = Duration::from_millis(20);
/// Queues shorter than this may grow.
pub const MIN_WINDOW: Duration = Duration::from_millis(8);
/// Launches between two marks at most.
pub const LARGEST_STRIDE: u32 = 256;
/// Launches between two marks of a stream without measurements.
pub const FIRST_STRIDE: u32 = 4;
/// The longest time that a launch waits for an older one.
pub const MAX_PATIENCE: Duration = Duration::from_millis(200);
/// The shortest of these times. It is longer than most kernels, so that a queue that has grown long becomes shorter.
pub const MIN_PATIENCE: Duration = Duration::from_millis(20);

/// The next stride, after the oldest of [`MARKS`] marks took `took` to complete.
#[must_use]
pub fn next_stride(stride: u32, took: Duration) -> u32 {
    if took > MAX_WINDOW {
        (stride / 2).max(1)
    } else if took < MIN_WINDOW {
        (stride * 2).min(LARGEST_STRIDE)
    } else {
        stride
    }
}

/// How long the next launch waits for a mark, after a launch has waited for it in vain for `patience`.
#[must_use]
pub fn next_patience(patience: Duration) -> Duration {
    (patience / 2).max(MIN_PATIENCE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs kernels of one length and returns how much work is in flight in the end.
    fn settle(kernel: Duration) -> Duration {
        let mut stride = FIRST_STRIDE;
        for _ in 0..20 {
            stride = next_stride(stride, kernel * stride * MARKS);
        }
        kernel * stride * MARKS
    }

    #[test]
    fn settles_within_its_bounds_for_any_kernel() {
        for micros in [20, 100, 700, 1500, 3000] {
            let in_flight = settle(Duration::from_micros(micros));
            assert!(in_flight <= MAX_WINDOW, "{micros} us kernels: {in_flight:?}");
        }
        // Kernels that are longer than the bounds: the fewest possible are in flight.
        assert_eq!(settle(Duration::from_millis(50)), Duration::from_millis(200));
    }

    #[test]
    fn launches_that_wait_in_vain_wait_less_and_less() {
        let mut patience = MAX_PATIENCE;
        let mut waited = Duration::ZERO;
        for _ in 0..500 {
            waited += patience;
            patience = next_patience(patience);
        }
        assert!(waited < Duration::from_secs(11), "{waited:?}");
    }
}
