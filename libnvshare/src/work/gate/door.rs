//! The door in front of the driver, for a process that may go off the card (`memory/sleep.rs`).
//!
//! While a process is off the card, some of the driver's functions would end it. So each call of the program looks at one word first.
//! While the door is closed, the call waits, and the session is told. Calls of the library's own threads do not look.
//!
//! To close the door is not enough: a thread may have looked before. There are three ways into the driver.
//!
//! - A submission passes the gate, which is closed all the while, with nobody inside.
//! - Another hook counts its call in the thread's slot and then looks ([`enter`]). A fence keeps that order, as at the gate. After
//!   [`close`], and once [`has_nobody_inside`] says so, no such call is under way. An exception that unwinds through a hook leaves the
//!   count as it is, and the process never sleeps again. Calls of NVML are counted in the same way (`hooks/nvml`).
//! - A function of the driver without a hook has a thunk (`hooks/thunks.rs`), which looks and jumps. Between the two a thread is never
//!   blocked in a system call. So each thread has to be seen blocked once ([`Unseen`](crate::process::blocked::Unseen)).
//!
//! A call of NVML that began before the door was hung, so before `cuInit`, is not counted. Only NVML's wait for an event may last until
//! the process sleeps.
//!
//! A thread that waits here allocates nothing, looks no symbol up, and keeps its `errno`: it may hold the loader's lock.

use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::FENCE;
use super::sleepers::{Sleeper, Sleepers};
use super::slots::{self, Slot};
use crate::driver;
use crate::process::lock::lock;
use crate::process::{bell, lifecycle, threads};

/// The process never goes off the card, and calls are not counted.
const NONE: u32 = 0;
const OPEN: u32 = 1;
/// The process is off the card, or on its way there or back. Thunks compare the word with this.
pub(crate) const CLOSED: u32 = 2;

/// The state of the door. Thunks read it.
pub(crate) static WORD: AtomicU32 = AtomicU32::new(NONE);
/// The first function that the program got without a thunk.
static PASSED_BY: OnceLock<String> = OnceLock::new();
/// Threads that wait at the door.
static WAITING: Sleepers = Sleepers::none();
/// Held between a waiter's look at the word and its sleep, so that no wake-up is lost in between.
static WAIT_LOCK: Mutex<()> = Mutex::new(());
static OPENED: Condvar = Condvar::new();

/// A call that is counted, until it [leaves](leave).
#[derive(Debug, Clone, Copy)]
#[must_use = "a call that is counted has to be counted out"]
pub(crate) struct Entered {
    /// Null: it is not counted.
    slot: *const Slot,
}

impl Entered {
    const UNCOUNTED: Self = Self { slot: ptr::null() };
}

/// Hangs the door, before the first call of the driver: from now on the process may go off the card.
pub(crate) fn hang() {
    if !lifecycle::is_forked() {
        let _ = WORD.compare_exchange(NONE, OPEN, Ordering::SeqCst, Ordering::SeqCst);
    }
}

/// Whether there is a door.
pub(crate) fn is_hung() -> bool {
    WORD.load(Ordering::SeqCst) != NONE
}

/// Counts a call of the program, and waits while the door is closed. A call from inside another one does not wait.
#[inline(always)]
pub(crate) fn enter() -> Entered {
    if WORD.load(Ordering::Relaxed) == NONE {
        return Entered::UNCOUNTED;
    }
    let slot = slots::current();
    // SAFETY: slots live for ever.
    if let Some(mine) = unsafe { slot.as_ref() } {
        let is_first = mine.begin_call();
        if !is_first || WORD.load(Ordering::SeqCst) != CLOSED {
            return Entered { slot };
        }
        mine.end_call();
    }
    enter_slowly()
}

#[cold]
#[inline(never)]
fn enter_slowly() -> Entered {
    let slot = slots::acquire();
    // SAFETY: slots live for ever.
    let Some(mine) = (unsafe { slot.as_ref() }) else { return Entered::UNCOUNTED };
    while mine.begin_call() && WORD.load(Ordering::SeqCst) == CLOSED {
        mine.end_call();
        if !wait() {
            return Entered::UNCOUNTED;
        }
    }
    Entered { slot }
}

/// Counts a call out.
#[inline(always)]
pub(crate) fn leave(entered: Entered) {
    // SAFETY: slots live for ever.
    if let Some(mine) = unsafe { entered.slot.as_ref() } {
        mine.end_call();
    }
}

/// Notes that the program gets a function that does not look at the door. The process never sleeps again: it waits here first until it is
/// back, and is counted until this is noted.
pub(crate) fn pass_by(name: &[u8]) {
    let entered = enter();
    PASSED_BY.get_or_init(|| String::from_utf8_lossy(name).into_owned());
    leave(entered);
}

/// A function that the program may call past the door.
pub(crate) fn passed_by() -> Option<&'static str> {
    PASSED_BY.get().map(String::as_str)
}

/// For thunks: waits while the door is closed.
pub(crate) fn wait_while_closed() {
    if WORD.load(Ordering::SeqCst) == CLOSED {
        wait();
    }
}

/// Counts a thread as waiting at the door, and lets the session know.
fn say_waiting(waiter: &mut Sleeper) {
    if waiter.count() {
        bell::ring();
    }
}

/// Waits while the door is closed. False: it is closed and this thread does not wait. It is one of the library's or of a forked
/// child, or the driver has shut down.
#[cold]
fn wait() -> bool {
    /// How often a thread that waits while the process exits looks whether the driver has shut down.
    const LOOK: Duration = Duration::from_millis(1);
    // The driver may call itself by its exported names, which are the hooks.
    if threads::is_own() || lifecycle::is_forked() {
        return false;
    }
    // SAFETY: the thread's own place.
    let errno = unsafe { *libc::__errno_location() };
    let mut waiter = Sleeper::of(&WAITING);
    say_waiting(&mut waiter);
    let mut wait = lock(&WAIT_LOCK);
    let mut has_ended = false;
    while WORD.load(Ordering::SeqCst) == CLOSED && !has_ended {
        // The door may have opened meanwhile, and closed again.
        say_waiting(&mut waiter);
        if lifecycle::is_exiting() {
            (wait, _) = OPENED.wait_timeout(wait, LOOK).unwrap_or_else(PoisonError::into_inner);
            drop(wait);
            has_ended = driver::has_ended();
            wait = lock(&WAIT_LOCK);
        } else {
            wait = OPENED.wait(wait).unwrap_or_else(PoisonError::into_inner);
        }
    }
    drop(wait);
    drop(waiter);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    !has_ended
}

/// Closes the door. Calls may still be under way: see the [module](self).
pub(crate) fn close() {
    let _wait = lock(&WAIT_LOCK);
    let _ = WORD.compare_exchange(OPEN, CLOSED, Ordering::SeqCst, Ordering::SeqCst);
    FENCE.before_look();
}

/// Opens the door.
pub(crate) fn open() {
    let wait = lock(&WAIT_LOCK);
    let _ = WORD.compare_exchange(CLOSED, OPEN, Ordering::SeqCst, Ordering::SeqCst);
    WAITING.forget();
    drop(wait);
    OPENED.notify_all();
}

/// Has the threads that wait look at what keeps them.
pub(crate) fn wake() {
    drop(lock(&WAIT_LOCK));
    OPENED.notify_all();
}

/// Whether a call of the program waits at the door.
pub(crate) fn has_waiters() -> bool {
    WAITING.are_any()
}

/// Whether no call of the program is counted as under way.
pub(crate) fn has_nobody_inside() -> bool {
    slots::all().all(Slot::has_no_call)
}

/// Takes the door away, in a forked child, where the driver's functions fail. In the child of a process that was off the card one of them
/// would end it (`cuEventQuery`, measured). There the door stays closed, and the thunks of such functions [refuse](is_closed_for_good).
pub(super) fn after_fork_in_child() {
    let _ = WORD.compare_exchange(OPEN, NONE, Ordering::SeqCst, Ordering::SeqCst);
}

/// Whether this is the child of a process that was off the card: nobody opens the door.
pub(crate) fn is_closed_for_good() -> bool {
    lifecycle::is_forked() && WORD.load(Ordering::SeqCst) == CLOSED
}
