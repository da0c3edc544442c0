//! The end of the process, and forks of it.
//!
//! **Exit**: the program's other threads may be anywhere while the driver is taken down. From then on the library adds
//! nothing to the program's own calls: the driver is ready for those, and not for a prefetch that is under way when its
//! memory goes.
//!
//! **Fork**: the child has the memory of the parent and none of its threads. The driver refuses to work in a child of a
//! process that has initialised it, so nothing of ours needs to: the child lets everything pass and drops the connection,
//! which would otherwise keep a dead parent's lock.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

static EXITING: AtomicBool = AtomicBool::new(false);
/// Driver calls of our own that are under way.
static CALLS: AtomicUsize = AtomicUsize::new(0);
static FORKED: AtomicBool = AtomicBool::new(false);

/// So many times a tenth of a millisecond, a thread that is inside a call has to come out of it.
const PATIENCE_FOR_THREADS: usize = 50;
/// So many, the piece of memory that is being moved has to arrive: the next one is not begun.
const PATIENCE_FOR_OURS: usize = 3000;

/// Whether the program exits.
pub(crate) fn is_exiting() -> bool {
    EXITING.load(Ordering::SeqCst)
}

/// A driver call of our own: the exit waits for it.
#[derive(Debug)]
pub(crate) struct Call;

/// Holds the exit off for one driver call; `None`: it has begun.
pub(crate) fn hold_off_exit() -> Option<Call> {
    // The call is announced before the look; the exit writes first and then looks: one of the two sees the other.
    CALLS.fetch_add(1, Ordering::SeqCst);
    let call = Call;
    (!is_exiting()).then_some(call)
}

impl Drop for Call {
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What the layers above do about the exit.
#[derive(Debug)]
pub(crate) struct AtExit {
    /// The last that is said to the scheduler.
    pub(crate) last_words: fn(),
    /// Whether no thread of the program is in a call that the gate let in.
    pub(crate) nobody_inside: fn() -> bool,
}

static AT_EXIT: OnceLock<AtExit> = OnceLock::new();

/// Has the exit noticed. The driver's own end was registered before, and so comes after this.
pub(crate) fn watch_exit(actions: AtExit) {
    extern "C" fn at_exit() {
        EXITING.store(true, Ordering::SeqCst);
        if is_forked() {
            // What is under way is so in the parent.
            return;
        }
        if let Some(actions) = AT_EXIT.get() {
            (actions.last_words)();
            wait(PATIENCE_FOR_THREADS, actions.nobody_inside);
        }
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
    if AT_EXIT.set(actions).is_ok() {
        // SAFETY: a function that is never unmapped.
        unsafe { libc::atexit(at_exit) };
    }
}

/// Whether this is a forked child of a process with a session: nothing of ours is of use in it.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

static IN_CHILD: OnceLock<fn()> = OnceLock::new();

/// Has children step out of the way, by `action`, which takes no lock.
pub(crate) fn watch_forks(action: fn()) {
    extern "C" fn in_child() {
        FORKED.store(true, Ordering::Relaxed);
        if let Some(action) = IN_CHILD.get() {
            action();
        }
    }
    if IN_CHILD.set(action).is_ok() {
        // SAFETY: a function that is never unmapped, and that takes no lock.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    }
}
