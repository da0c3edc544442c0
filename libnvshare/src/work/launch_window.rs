//! How much work may be in flight on a stream while another client waits.
//!
//! [`nvshare_client::launch_window`] decides how far apart the marks are and how long a launch waits for one. This module
//! keeps the marks.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use nvshare_client::launch_window::{FIRST_STRIDE, MARKS, MAX_PATIENCE, next_patience, next_stride};

use super::event::Event;
use crate::process::lock::lock;

/// Converts a patience to whole microseconds.
const fn micros(patience: Duration) -> u32 {
    patience.as_micros() as u32
}

/// The launch window of one stream.
#[derive(Debug)]
pub(crate) struct LaunchWindow {
    stride: AtomicU32,
    since_mark: AtomicU32,
    /// The number of marks in the list, which can be read without the lock.
    count: AtomicU32,
    /// How long the next launch waits for the oldest, in microseconds.
    patience: AtomicU32,
    /// Events behind launches, oldest first, and when they were recorded.
    marks: Mutex<VecDeque<(Event, Instant)>>,
}

impl LaunchWindow {
    pub(crate) const fn new() -> Self {
        Self {
            stride: AtomicU32::new(FIRST_STRIDE),
            since_mark: AtomicU32::new(0),
            count: AtomicU32::new(0),
            patience: AtomicU32::new(micros(MAX_PATIENCE)),
            marks: Mutex::new(VecDeque::new()),
        }
    }

    fn marks(&self) -> MutexGuard<'_, VecDeque<(Event, Instant)>> {
        lock(&self.marks)
    }

    /// Whether another launch may be made without waiting.
    #[inline(always)]
    pub(crate) fn is_open(&self) -> bool {
        self.count.load(Ordering::Relaxed) < MARKS
    }

    /// Counts a launch. Returns whether a mark is due.
    #[inline(always)]
    pub(crate) fn launched(&self) -> bool {
        // Two threads that launch on one stream at the same time may lose a count. This does no harm.
        let since = self.since_mark.load(Ordering::Relaxed) + 1;
        self.since_mark.store(since, Ordering::Relaxed);
        since >= self.stride.load(Ordering::Relaxed)
    }

    /// Records the mark that is due, by `record`.
    pub(crate) fn mark(&self, record: impl FnOnce() -> Option<Event>) {
        self.since_mark.store(0, Ordering::Relaxed);
        if self.is_open()
            && let Some(event) = record()
        {
            let mut marks = self.marks();
            marks.push_back((event, Instant::now()));
            self.count.store(marks.len() as u32, Ordering::Relaxed);
        }
    }

    /// Removes complete marks. Returns whether the window is open now.
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
            self.patience.store(micros(MAX_PATIENCE), Ordering::Relaxed);
        }
        self.count.store(marks.len() as u32, Ordering::Relaxed);
        marks.len() < MARKS as usize
    }

    /// How long a launch waits for the oldest mark.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_micros(self.patience.load(Ordering::Relaxed).into())
    }

    /// Notes that a launch has waited in vain and is made nevertheless.
    pub(crate) fn gave_up(&self) {
        self.patience.store(micros(next_patience(self.patience())), Ordering::Relaxed);
    }

    /// Starts anew, for another stream.
    pub(crate) fn reset(&self) {
        self.marks().clear();
        self.count.store(0, Ordering::Relaxed);
        self.since_mark.store(0, Ordering::Relaxed);
        self.stride.store(FIRST_STRIDE, Ordering::Relaxed);
        self.patience.store(micros(MAX_PATIENCE), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_that_waited_in_vain_shortens_the_next_wait() {
        let window = LaunchWindow::new();
        window.gave_up();
        assert_eq!(window.patience(), MAX_PATIENCE / 2);
        window.reset();
        assert_eq!(window.patience(), MAX_PATIENCE);
    }

    #[test]
    fn a_mark_is_due_once_a_stride() {
        let window = LaunchWindow::new();
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
