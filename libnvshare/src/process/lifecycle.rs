//! The end of the process, and forks of it.
//!
//! **Exit**: the driver shuts down in an exit handler of its own, which it registers in `cuInit`. Handlers that run before
//! that one, and threads beside them, use the driver as ever, and natively it serves them. So gate, session and mover go on
//! until then. Right before it, the library stops to make driver calls. The driver can handle the program's own calls at
//! that time, but not a prefetch whose memory is being freed. From then on every call answers DEINITIALIZED, and memory
//! stays where it is until the process has ended (measured). Then the gate opens, drains are complete, and the lock is
//! given back.
//!
//! **Fork**: the child has the memory of the parent and none of its threads. The driver does not work in a child of a
//! process that has initialised it, so the library does not need to work there either. The child lets every call pass, and
//! closes the connection, which would otherwise keep the lock of a dead parent.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};
use std::time::Duration;

use super::threads;

/// The exit has come to the driver's own handler.
static EXITING: AtomicBool = AtomicBool::new(false);
/// The library's own driver calls that are under way.
static CALLS: AtomicUsize = AtomicUsize::new(0);
static FORKED: AtomicBool = AtomicBool::new(false);

/// The exit waits this many tenths of a millisecond for threads that are inside a call.
const PATIENCE_FOR_THREADS: usize = 50;
/// And this many for the piece of memory that is being moved. The next piece does not begin.
const PATIENCE_FOR_OURS: usize = 3000;
/// And this many for the process itself, on its way off the card or back: the driver then has all of its memory in hand.
const PATIENCE_FOR_WAYS: usize = 100_000;

/// Whether the exit has come so far that the driver may shut down at any moment.
pub(crate) fn is_exiting() -> bool {
    EXITING.load(Ordering::SeqCst)
}

/// One of the library's own driver calls. The exit waits until it is dropped.
#[derive(Debug)]
pub(crate) struct Call;

/// Holds the exit off for one driver call. `None`: the exit has begun.
pub(crate) fn hold_off_exit() -> Option<Call> {
    // This side announces the call and then reads; the exit writes and then reads. At least one of them sees the other.
    CALLS.fetch_add(1, Ordering::SeqCst);
    let call = Call;
    (!is_exiting()).then_some(call)
}

impl Drop for Call {
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The process is on its way off the card, or back.
static UNDER_WAY: AtomicBool = AtomicBool::new(false);

/// The driver's calls that take the process off the card, or back. The exit waits longer until they are over.
#[derive(Debug)]
pub(crate) struct Way {
    _call: Call,
}

/// Holds the exit off while the process is on its way off the card, or back. `None`: the exit has begun.
pub(crate) fn hold_off_exit_on_the_way() -> Option<Way> {
    let call = hold_off_exit()?;
    UNDER_WAY.store(true, Ordering::SeqCst);
    Some(Way { _call: call })
}

impl Drop for Way {
    fn drop(&mut self) {
        UNDER_WAY.store(false, Ordering::SeqCst);
    }
}

/// Actions of the layers above at the exit.
#[derive(Debug)]
pub(crate) struct AtExit {
    /// Sends the last message to the scheduler.
    pub(crate) last_words: fn(),
    /// Whether no thread of the program is inside the gate.
    pub(crate) nobody_inside: fn() -> bool,
    /// Has the threads that sleep at the gate look whether the driver has shut down.
    pub(crate) wake: fn(),
}

static AT_EXIT: OnceLock<AtExit> = OnceLock::new();

/// Sets the actions for the exit.
pub(crate) fn act_at_exit(actions: AtExit) {
    let _ = AT_EXIT.set(actions);
    watch_exit();
}

/// Watches the exit, from the first call on: right after the driver's initialisation, so that the library's handler runs right
/// before the driver's own.
pub(crate) fn watch_exit() {
    extern "C" fn at_exit() {
        EXITING.store(true, Ordering::SeqCst);
        if is_forked() {
            // Calls that are under way are under way in the parent.
            return;
        }
        if let Some(actions) = AT_EXIT.get() {
            (actions.last_words)();
            (actions.wake)();
            wait(PATIENCE_FOR_THREADS, actions.nobody_inside);
        }
        wait(PATIENCE_FOR_OURS, || CALLS.load(Ordering::SeqCst) == 0);
        wait(PATIENCE_FOR_WAYS, || !UNDER_WAY.load(Ordering::SeqCst));
    }
    fn wait(times: usize, until: impl Fn() -> bool) {
        for _ in 0..times {
            if until() {
                return;
            }
            threads::sleep(Duration::from_micros(100));
        }
    }
    static WATCH: Once = Once::new();
    // SAFETY: a function that is never unmapped.
    WATCH.call_once(|| _ = unsafe { libc::atexit(at_exit) });
}

/// Whether this is a forked child of a process with a session. The library does nothing there.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

static IN_CHILD: OnceLock<fn()> = OnceLock::new();

/// Runs `action` in each forked child. The action must not take a lock.
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
