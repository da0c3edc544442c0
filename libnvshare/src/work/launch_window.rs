//! How much work may be in flight on a stream while another client waits.
//!
//! [`nvshare_client::launch_window`] decides how far apart the marks are and how long a launch waits for one. This module
//! keeps the marks.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use nvshare_client::launch_window::{FIRST_STRIDE, MARKS, MAX_PATIENCE, next_patience, next_stride};

use super::contexts::Context;
use super::event::Event;
use crate::process::lock::lock;

/// Converts a patience to whole microseconds.
const fn micros(patience: Duration) -> u32 {
    patience.as_micros() as u32
}

/// An event behind a launch, and when it was recorded.
type Mark = (Arc<Event>, Instant);

/// The launch window of one stream. The legacy stream is one in all contexts, and so is a thread's own. Marks of each context are counted
/// and asked about by themselves. The driver may answer about another context only when a thread goes on there that waits for this
/// one.
#[derive(Debug)]
pub(crate) struct LaunchWindow {
    stride: AtomicU32,
    since_mark: AtomicU32,
    /// The largest number of marks of one context, which can be read without the lock.
    count: AtomicU32,
    /// How long the next launch waits for the oldest, in microseconds.
    patience: AtomicU32,
    /// Oldest first.
    marks: Mutex<VecDeque<Mark>>,
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

    fn marks(&self) -> MutexGuard<'_, VecDeque<Mark>> {
        lock(&self.marks)
    }

    /// Counts anew, after a change.
    fn count(&self, marks: &VecDeque<Mark>) {
        let of_context = |(one, _): &Mark| {
            marks.iter().filter(|(other, _)| Arc::ptr_eq(one.context(), other.context())).count()
        };
        let most = marks.iter().map(of_context).max().unwrap_or(0);
        self.count.store(most as u32, Ordering::Relaxed);
    }

    /// Whether another launch may be made without waiting, in any context.
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

    /// Records the mark that is due, by `record`. `is_own`: whether a mark is of the context of the launch.
    pub(crate) fn mark(&self, is_own: impl Fn(&Event) -> bool, record: impl FnOnce() -> Option<Event>) {
        self.since_mark.store(0, Ordering::Relaxed);
        let own = self.marks().iter().filter(|(event, _)| is_own(event)).count();
        if own < MARKS as usize
            && let Some(event) = record()
        {
            let mut marks = self.marks();
            marks.push_back((Arc::new(event), Instant::now()));
            self.count(&marks);
        }
    }

    /// Removes complete marks of the launch's context. Returns whether the window is open for it now. The driver is asked without
    /// the lock, for which threads of other contexts wait as well.
    pub(crate) fn look(&self, is_own: impl Fn(&Event) -> bool) -> bool {
        let mut is_first = true;
        loop {
            let own: Vec<Mark> = self.marks().iter().filter(|(event, _)| is_own(event)).cloned().collect();
            let Some((event, recorded)) = own.first() else { return true };
            let is_full = own.len() >= MARKS as usize;
            if !event.is_complete() {
                return !is_full;
            }
            if std::mem::take(&mut is_first) && is_full {
                let stride = self.stride.load(Ordering::Relaxed);
                self.stride.store(next_stride(stride, recorded.elapsed()), Ordering::Relaxed);
            }
            self.patience.store(micros(MAX_PATIENCE), Ordering::Relaxed);
            let mut marks = self.marks();
            marks.retain(|(other, _)| !Arc::ptr_eq(other, event));
            self.count(&marks);
        }
    }

    /// How long a launch waits for the oldest mark.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_micros(self.patience.load(Ordering::Relaxed).into())
    }

    /// Notes that a launch has waited in vain and is made nevertheless.
    pub(crate) fn gave_up(&self) {
        self.patience.store(micros(next_patience(self.patience())), Ordering::Relaxed);
    }

    /// Forgets the marks of a context that has ended: no thread asks about them any more.
    pub(crate) fn forget_context(&self, context: &Arc<Context>) {
        let mut marks = self.marks();
        let (gone, left) = std::mem::take(&mut *marks)
            .into_iter()
            .partition::<VecDeque<Mark>, _>(|(event, _)| Arc::ptr_eq(event.context(), context));
        *marks = left;
        self.count(&marks);
        // Without the lock, as the driver may be asked to end an event.
        drop(marks);
        drop(gone);
    }

    /// Starts anew, for another stream.
    pub(crate) fn reset(&self) {
        let gone = std::mem::take(&mut *self.marks());
        // Without the lock, as the driver may be asked to end an event.
        drop(gone);
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
                window.mark(|_| true, || None);
                marks += 1;
            }
        }
        assert_eq!(marks, 3);
    }
}
