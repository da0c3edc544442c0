//! How much work may be in flight on a stream while somebody waits.
//!
//! A mark (an event) is recorded every `stride` launches; with [`MARKS`] of them incomplete, the next launch waits
//! for the oldest. The stride follows what the marks take: it is halved while the queue holds more than
//! [`LONGEST`], doubled while it holds less than [`SHORTEST`] of work. So a drain takes about [`LONGEST`], or one
//! kernel where that is longer, and a stream of tiny kernels is marked once in a thousand.

use std::time::Duration;

/// Marks in flight.
pub(crate) const MARKS: usize = 4;
/// Queues longer than this are shortened.
const LONGEST: Duration = Duration::from_millis(20);
/// Queues shorter than this may grow.
const SHORTEST: Duration = Duration::from_millis(8);
const LARGEST_STRIDE: u32 = 1024;

/// Counts launches on a stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    stride: u32,
    since_mark: u32,
}

impl Window {
    pub(crate) const fn new() -> Self {
        Self { stride: 4, since_mark: 0 }
    }

    /// A launch was made. True: record a mark behind it.
    pub(crate) fn launched(&mut self) -> bool {
        self.since_mark += 1;
        if self.since_mark < self.stride {
            return false;
        }
        self.since_mark = 0;
        true
    }

    /// All marks were in flight, and the oldest took this long from its recording to its completion.
    pub(crate) fn waited(&mut self, took: Duration) {
        if took > LONGEST {
            self.stride = (self.stride / 2).max(1);
        } else if took < SHORTEST {
            self.stride = (self.stride * 2).min(LARGEST_STRIDE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs kernels of one length and returns how much work is in flight in the end.
    fn settle(kernel: Duration) -> Duration {
        let mut window = Window::new();
        for _ in 0..20 {
            window.waited(kernel * window.stride * MARKS as u32);
        }
        kernel * window.stride * MARKS as u32
    }

    #[test]
    fn settles_within_its_bounds_for_any_kernel() {
        for micros in [20, 100, 700, 1500, 3000] {
            let in_flight = settle(Duration::from_micros(micros));
            assert!(in_flight <= LONGEST, "{micros} us kernels: {in_flight:?}");
        }
        // Longer kernels: as few as there can be.
        assert_eq!(settle(Duration::from_millis(50)), Duration::from_millis(200));
    }

    #[test]
    fn marks_once_a_stride() {
        let mut window = Window::new();
        assert_eq!((0..12).filter(|_| window.launched()).count(), 3);
    }
}
