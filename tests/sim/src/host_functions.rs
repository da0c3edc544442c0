//! Functions of the host that streams run, and waiting for them.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, PoisonError};

use crate::handles;
use crate::stream::unique;

/// The functions that run now.
static RUNNING: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());
static ENDED: Condvar = Condvar::new();

/// Runs one function.
pub(crate) fn run(body: impl FnOnce()) {
    let id = unique();
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
    handles::as_host_function(body);
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    ENDED.notify_all();
}

/// Waits for the functions that run now. The loading of a function at its first launch waits for them.
pub(crate) fn wait() {
    let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    let now = running.clone();
    while !running.is_disjoint(&now) {
        running = ENDED.wait(running).unwrap_or_else(PoisonError::into_inner);
    }
}
