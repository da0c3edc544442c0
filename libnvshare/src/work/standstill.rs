//! A moment in which none of the program's work runs, for a call of the program that has to change what work may use.

use std::time::{Duration, Instant};

use super::drain::Drain;
use super::gate;
use crate::process::{lifecycle, threads};

/// How long work is waited for, at each try: it may depend on a thread that sleeps at the gate meanwhile.
const PATIENCE: [Duration; 4] =
    [Duration::from_millis(100), Duration::from_millis(500), Duration::from_secs(2), Duration::from_secs(5)];
/// Between two tries, threads get on.
const PAUSE: Duration = Duration::from_millis(20);

/// Shuts the gate while this lives.
struct Shut;

impl Drop for Shut {
    fn drop(&mut self) {
        gate::reopen();
    }
}

/// Makes a call while nothing of the program's runs on a device, and no thread submits anything. The calling thread has to be
/// inside the gate, so that the lock is not given back meanwhile. One thread at a time. `None`: work does not come to an end.
pub(crate) fn make<T>(call: impl FnOnce() -> T) -> Option<T> {
    for (tried, patience) in PATIENCE.into_iter().enumerate() {
        if tried > 0 {
            threads::sleep(PAUSE);
        }
        gate::shut();
        let _shut = Shut;
        if is_quiet_within(patience) {
            return Some(call());
        }
    }
    None
}

fn is_quiet_within(patience: Duration) -> bool {
    let begin = Instant::now();
    let waits = || begin.elapsed() < patience && !lifecycle::is_exiting();
    while !gate::nobody_else_inside() {
        if !waits() {
            return false;
        }
        threads::pause();
    }
    let mut work = Drain::begin();
    while work.poll() > 0 {
        if !waits() {
            return false;
        }
        threads::pause();
    }
    !lifecycle::is_exiting()
}
