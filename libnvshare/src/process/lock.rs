//! Locks that outlive a panic of whoever held them.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex. What it guards is consistent also after a panic: each change is made at once.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
