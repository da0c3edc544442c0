//! Functions of the host that streams run, and what waits for them.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, PoisonError};

use crate::handles;
use crate::stream::unique;

/// Those that run.
static RUNNING: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());
static ENDED: Condvar = Condvar::new();

/// Runs one.
pub(crate) fn run(body: impl FnOnce()) {
    let id = unique();
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
    handles::as_host_function(body);
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    ENDED.notify_all();
}

/// Waits for those that run now. A function that is loaded when it is launched first waits for them.
pub(crate) fn wait() {
    let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    let now = running.clone();
    while !running.is_disjoint(&now) {
        running = ENDED.wait(running).unwrap_or_else(PoisonError::into_inner);
    }
}
