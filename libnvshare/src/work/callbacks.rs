//! Threads of the driver that run functions of the program.
//!
//! A drain waits for the work on a stream, and so for the callbacks in it. A callback that slept at the gate, or waited for
//! room, would wait for itself. So these threads are marked: they never wait, and they get the driver's own answers.
//!
//! Callbacks of graphs are not marked, since the driver gets the program's own function there. If one of them sleeps at the
//! gate, the drain that waits for it is given up, and tried again.

use std::cell::Cell;

thread_local! {
    static RUNNING: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread runs a callback for the driver.
pub(crate) fn are_running() -> bool {
    RUNNING.try_with(Cell::get).unwrap_or(false)
}

/// Marks the thread until it is dropped, also by unwinding through the callback.
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
