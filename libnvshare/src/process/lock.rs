//! Locks without poisoning.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex. A panic of the thread that held it is no obstacle: each change of guarded data is complete in itself.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// State behind a lock, with a count of its entries that can be read without the lock.
///
/// [`Self::change`] is the only way to change the state, and stores the new count before it frees the lock. So the count is right
/// for each thread that holds the lock. A thread that reads the count alone may be one change late, as if it had come a moment
/// earlier. It uses the count to save the lock where there is nothing to do.
///
/// In a forked child, a thread that does not exist there may hold the lock for ever. Callers that can run in one ask
/// [`is_forked`](super::lifecycle::is_forked) first.
#[derive(Debug)]
pub(crate) struct Counted<T> {
    state: Mutex<T>,
    count: AtomicUsize,
    count_of: fn(&T) -> usize,
}

impl<T> Counted<T> {
    /// State without entries, which `count_of` counts.
    pub(crate) const fn new(state: T, count_of: fn(&T) -> usize) -> Self {
        Self { state: Mutex::new(state), count: AtomicUsize::new(0), count_of }
    }

    /// The number of entries after a recent change.
    #[inline(always)]
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// Reads the state under the lock.
    pub(crate) fn read<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&lock(&self.state))
    }

    /// Changes the state under the lock.
    pub(crate) fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let mut state = lock(&self.state);
        let result = change(&mut state);
        self.count.store((self.count_of)(&state), Ordering::SeqCst);
        result
    }
}
