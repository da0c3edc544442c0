//! How much work may be in flight on a stream while another client waits.
//!
//! A mark (an event) is recorded every `stride` launches; with [`MARKS`] of them incomplete, the next launch waits
//! for the oldest. The stride follows the time that the marks take: it is halved while the queue holds more than
//! [`LONGEST`], doubled while it holds less than [`SHORTEST`] of work. So a drain takes about [`LONGEST`], or one
//! kernel where that is longer, and a stream of tiny kernels is marked once in 256.
//!
//! A launch waits no longer than [`MOST_PATIENCE`], since the older one may itself wait for this launch; and each further
//! launch that waits in vain for the same mark half as long as the one before, down to [`LEAST_PATIENCE`]: a program that has
//! to make many launches before the oldest can complete is hardly held up, and one whose kernels are slow does not run ahead
//! of them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::event::Event;

/// Marks in flight.
const MARKS: u32 = 4;
/// Queues longer than this are shortened.
const LONGEST: Duration = Duration::from_millis(20);
/// Queues shorter than this may grow.
const SHORTEST: Duration = Duration::from_millis(8);
const LARGEST_STRIDE: u32 = 256;
const FIRST_STRIDE: u32 = 4;
/// A launch waits for an older one this long at most, in microseconds.
const MOST_PATIENCE: u32 = 200_000;
/// And this long at least, in microseconds. More than most kernels take, so that a queue that has grown long becomes shorter.
const LEAST_PATIENCE: u32 = 20_000;

/// A stride of marks of which the oldest took `took` to complete becomes this.
fn next_stride(stride: u32, took: Duration) -> u32 {
    if took > LONGEST {
        (stride / 2).max(1)
    } else if took < SHORTEST {
        (stride * 2).min(LARGEST_STRIDE)
    } else {
        stride
    }
}

/// The window of one stream.
#[derive(Debug)]
pub(crate) struct Window {
    stride: AtomicU32,
    since_mark: AtomicU32,
    /// Marks in the list, for a look without its lock.
    count: AtomicU32,
    /// How long the next launch waits for the oldest, in microseconds.
    patience: AtomicU32,
    /// Events behind launches, oldest first, and when they were recorded.
    marks: Mutex<VecDeque<(Event, Instant)>>,
}

impl Window {
    pub(crate) const fn new() -> Self {
        Self {
            stride: AtomicU32::new(FIRST_STRIDE),
            since_mark: AtomicU32::new(0),
            count: AtomicU32::new(0),
            patience: AtomicU32::new(MOST_PATIENCE),
            marks: Mutex::new(VecDeque::new()),
        }
    }

    fn marks(&self) -> MutexGuard<'_, VecDeque<(Event, Instant)>> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether another launch may be made at once.
    #[inline(always)]
    pub(crate) fn has_room(&self) -> bool {
        self.count.load(Ordering::Relaxed) < MARKS
    }

    /// A launch was made. True: a mark is due.
    #[inline(always)]
    pub(crate) fn launched(&self) -> bool {
        // Threads that launch on one stream at the same time may lose a count: that is no harm.
        let since = self.since_mark.load(Ordering::Relaxed) + 1;
        self.since_mark.store(since, Ordering::Relaxed);
        since >= self.stride.load(Ordering::Relaxed)
    }

    /// Records the mark that is due, by `record`.
    pub(crate) fn mark(&self, record: impl FnOnce() -> Option<Event>) {
        self.since_mark.store(0, Ordering::Relaxed);
        if self.has_room()
            && let Some(event) = record()
        {
            let mut marks = self.marks();
            marks.push_back((event, Instant::now()));
            self.count.store(marks.len() as u32, Ordering::Relaxed);
        }
    }

    /// Looks at the marks. Whether there is room now.
    pub(crate) fn look(&self) -> bool {
        let mut marks = self.marks();
        let mut full = marks.len() >= MARKS as usize;
        while let Some((event, recorded)) = marks.front()
            && event.is_complete()
        {
            if std::mem::take(&mut full) {
                let stride = self.stride.load(Ordering::Relaxed);
                self.stride.store(next_stride(stride, recorded.elapsed()), Ordering::Relaxed);
            }
            marks.pop_front();
            self.patience.store(MOST_PATIENCE, Ordering::Relaxed);
        }
        self.count.store(marks.len() as u32, Ordering::Relaxed);
        marks.len() < MARKS as usize
    }

    /// How long a launch waits for the oldest mark.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_micros(self.patience.load(Ordering::Relaxed).into())
    }

    /// A launch has waited in vain and is made nevertheless.
    pub(crate) fn gave_up(&self) {
        let less = (self.patience.load(Ordering::Relaxed) / 2).max(LEAST_PATIENCE);
        self.patience.store(less, Ordering::Relaxed);
    }

    /// Of another stream from now on.
    pub(crate) fn reset(&self) {
        self.marks().clear();
        self.count.store(0, Ordering::Relaxed);
        self.since_mark.store(0, Ordering::Relaxed);
        self.stride.store(FIRST_STRIDE, Ordering::Relaxed);
        self.patience.store(MOST_PATIENCE, Ordering::Relaxed);
    }
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
            assert!(in_flight <= LONGEST, "{micros} us kernels: {in_flight:?}");
        }
        // Longer kernels: as few as there can be.
        assert_eq!(settle(Duration::from_millis(50)), Duration::from_millis(200));
    }

    #[test]
    fn launches_that_wait_in_vain_wait_less_and_less() {
        let window = Window::new();
        let waited: Duration = (0..500)
            .map(|_| {
                let patience = window.patience();
                window.gave_up();
                patience
            })
            .sum();
        assert!(waited < Duration::from_secs(11), "{waited:?}");
        window.reset();
        assert_eq!(window.patience(), Duration::from_millis(200));
    }

    #[test]
    fn a_mark_is_due_once_a_stride() {
        let window = Window::new();
        let mut marks = 0;
        for _ in 0..12 {
            if window.launched() {
                window.mark(|| None);
                marks += 1;
            }
        }
        assert_eq!(marks, 3);
    }
}
