//! Threads of the driver that run functions of the program.
//!
//! A drain waits for the work on a stream, and so for the callbacks in it: a callback that slept at the gate, or
//! waited for room, would wait for itself. So those threads are marked, never wait, and get the driver's own
//! answers.

use std::cell::Cell;

thread_local! {
    static RUNNING: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is the driver's, and runs a callback.
pub(crate) fn are_running() -> bool {
    RUNNING.try_with(Cell::get).unwrap_or(false)
}

/// While this lives, the thread is marked. What unwinds through the callback leaves no mark.
pub(crate) struct Running;

impl Running {
    pub(crate) fn mark() -> Self {
        let _ = RUNNING.try_with(|running| running.set(true));
        Self
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = RUNNING.try_with(|running| running.set(false));
    }
}
