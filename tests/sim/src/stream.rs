//! Streams: each works off its queue in order, on a thread of its own.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A piece of work, which a graph may run many times.
pub(crate) type Work = Arc<dyn Fn() + Send + Sync>;

/// At most this many pieces of work may be outstanding on a stream; a call that adds one more waits for the oldest (measured).
const MAX_OUTSTANDING: u64 = 1021;

/// A number that is unique in this process.
pub(crate) fn unique() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// A point in a stream: behind its first `count` pieces of work.
#[derive(Debug, Clone)]
pub(crate) struct Point {
    queue: Arc<Queue>,
    count: u64,
}

impl Point {
    pub(crate) fn is_reached(&self) -> bool {
        self.queue.state().completed >= self.count
    }

    /// Whether the other point is in the same stream, and not later.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.queue, &other.queue) && self.count >= other.count
    }

    pub(crate) fn wait(&self) {
        let mut state = self.queue.state();
        while state.completed < self.count {
            state = self.queue.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Item>,
    submitted: u64,
    completed: u64,
    has_thread: bool,
    closed: bool,
}

struct Item {
    after: Vec<Point>,
    work: Option<Work>,
}

impl std::fmt::Debug for Item {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Item").field("after", &self.after.len()).finish_non_exhaustive()
    }
}

/// The queue of a stream.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends work. It begins when all work before it here is complete, and all points of `after` are reached.
    pub(crate) fn submit(self: &Arc<Self>, work: Option<Work>, mut after: Vec<Point>) -> Point {
        after.retain(|point| !Arc::ptr_eq(&point.queue, self) && !point.is_reached());
        let mut state = self.state();
        state.submitted += 1;
        let count = state.submitted;
        let idle = state.waiting.is_empty() && state.completed + 1 == count;
        if work.is_none() && after.is_empty() && idle {
            // Nothing to do and nothing to wait for.
            state.completed = count;
        } else {
            state.waiting.push_back(Item { after, work });
            if !std::mem::replace(&mut state.has_thread, true) {
                let queue = Arc::clone(self);
                std::thread::Builder::new()
                    .name("nvsim-stream".to_owned())
                    // A program may have much memory of each thread, which comes off the stack.
                    .stack_size(16 << 20)
                    .spawn(move || queue.run())
                    .expect("a thread");
            }
        }
        self.changed.notify_all();
        Point { queue: Arc::clone(self), count }
    }

    fn is_full(&self) -> bool {
        let state = self.state();
        state.submitted - state.completed >= MAX_OUTSTANDING
    }

    fn wait_until_not_full(&self) {
        let mut state = self.state();
        while state.submitted - state.completed >= MAX_OUTSTANDING {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The point behind everything that was submitted so far.
    pub(crate) fn end(self: &Arc<Self>) -> Point {
        Point { queue: Arc::clone(self), count: self.state().submitted }
    }

    /// Nothing more will be submitted. Submitted work goes on to its end.
    pub(crate) fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }

    fn run(&self) {
        // A kernel lasts as long as it says, and not 50 microseconds longer.
        // SAFETY: it sets a number of this thread.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000) };
        loop {
            let item = {
                let mut state = self.state();
                loop {
                    match state.waiting.pop_front() {
                        Some(item) => break item,
                        None if state.closed => return,
                        None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                    }
                }
            };
            item.after.iter().for_each(Point::wait);
            if let Some(work) = item.work {
                work();
            }
            self.state().completed += 1;
            self.changed.notify_all();
        }
    }
}

/// The door of a context: while a thread waits in it for a place in a full queue, calls of other threads in the context
/// wait (measured).
#[derive(Debug, Default)]
pub(crate) struct Door {
    is_held: Mutex<bool>,
    changed: Condvar,
}

impl Door {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no thread waits in the door. While the caller holds the guard, no other thread passes.
    fn enter(&self) -> MutexGuard<'_, bool> {
        let mut is_held = self.lock();
        while *is_held {
            is_held = self.changed.wait(is_held).unwrap_or_else(PoisonError::into_inner);
        }
        is_held
    }

    /// Waits until no other thread waits for a place in a queue of the context.
    pub(crate) fn pass(&self) {
        drop(self.enter());
    }

    /// The same, and then waits for a place in a queue, which keeps other threads out meanwhile.
    pub(crate) fn pass_with_place(&self, queue: &Queue) {
        let mut is_held = self.enter();
        if queue.is_full() {
            *is_held = true;
            drop(is_held);
            queue.wait_until_not_full();
            *self.lock() = false;
            self.changed.notify_all();
        }
    }
}
