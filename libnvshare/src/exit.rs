//! The program's exit: its other threads may be anywhere while the driver is taken down.
//!
//! From then on the library adds nothing to the program's own calls: the driver is ready for those, and not for a
//! prefetch that is under way when its memory goes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::{gate, mover, session};

static BEGUN: AtomicBool = AtomicBool::new(false);

/// So many times a tenth of a millisecond, who is inside a call has to come out of it.
const CALLS: usize = 50;
/// So many, the piece of memory that is being moved has to arrive: the next one is not begun.
const MOVES: usize = 3000;

/// Whether the program exits.
pub(crate) fn has_begun() -> bool {
    BEGUN.load(Ordering::SeqCst)
}

/// Has the exit noticed. The driver's own end was registered before, and so comes after this.
pub(crate) fn watch() {
    extern "C" fn at_exit() {
        BEGUN.store(true, Ordering::SeqCst);
        if gate::is_forked() {
            // What is under way is so in the parent.
            return;
        }
        session::say_counters();
        wait(CALLS, gate::nobody_inside);
        wait(MOVES, mover::is_still);
    }
    fn wait(times: usize, until: impl Fn() -> bool) {
        for _ in 0..times {
            if until() {
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    // SAFETY: a function that is never unmapped.
    unsafe { libc::atexit(at_exit) };
}
