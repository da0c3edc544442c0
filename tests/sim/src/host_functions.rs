//! Functions of the host that streams run, and waiting for them.
//!
//! The driver has one queue for the host functions of a context. It may run them one after the other, whatever their streams
//! (documented), and prefetches that found their stream busy stand in that queue too: a host function that waits keeps them all
//! (measured).

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, PoisonError};

use crate::handles;
use crate::stream::unique;

/// The functions that run now.
static RUNNING: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());
static ENDED: Condvar = Condvar::new();

/// The driver's queue of a context.
#[derive(Debug, Default)]
pub(crate) struct DriverQueue(Mutex<()>);

impl DriverQueue {
    /// Does something in its turn.
    pub(crate) fn in_turn(&self, body: impl FnOnce()) {
        let _turn = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        body();
    }

    /// Runs a function of the host.
    pub(crate) fn run(&self, body: impl FnOnce()) {
        self.in_turn(|| run(body));
    }
}

fn run(body: impl FnOnce()) {
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
