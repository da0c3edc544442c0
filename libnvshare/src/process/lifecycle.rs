//! The program's exit: its other threads may be anywhere while the driver is taken down.
//!
//! From then on the library adds nothing to the program's own calls: the driver is ready for those, and not for a
//! prefetch that is under way when its memory goes.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::session;
use crate::work::gate;

static BEGUN: AtomicBool = AtomicBool::new(false);
/// Driver calls of our own that are under way.
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// So many times a tenth of a millisecond, a thread that is inside a call has to come out of it.
const PATIENCE_FOR_THREADS: usize = 50;
/// So many, the piece of memory that is being moved has to arrive: the next one is not begun.
const PATIENCE_FOR_OURS: usize = 3000;

/// Whether the program exits.
pub(crate) fn has_begun() -> bool {
    BEGUN.load(Ordering::SeqCst)
}

/// A driver call of our own: the exit waits for it.
#[derive(Debug)]
pub(crate) struct Call;

/// Holds the exit off for one driver call; `None`: it has begun.
pub(crate) fn hold_off() -> Option<Call> {
    // The call is announced before the look; `watch` writes first and then looks: one of the two sees the other.
    CALLS.fetch_add(1, Ordering::SeqCst);
    let call = Call;
    (!has_begun()).then_some(call)
}

impl Drop for Call {
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::SeqCst);
    }
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
        wait(PATIENCE_FOR_THREADS, gate::nobody_inside);
        wait(PATIENCE_FOR_OURS, || CALLS.load(Ordering::SeqCst) == 0);
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
