//! The gate that every submission of work passes.
//!
//! One word says whether it is open. A thread marks its own [slot](slots) as inside, *then* reads the word; who
//! closes the gate writes the word, *then* reads the slots. Both orders hold ([`fence`]), so of a thread and a closer
//! at the same time at least one sees the other: after [`close`] and [`nobody_inside`], nothing is submitted until the
//! gate opens again.
//!
//! The open gate costs one store in, one out: no lock, no allocation, no clock, no look-up.

mod fence;
mod slots;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::cuda::CUresult;
use crate::streams::{self, StreamKey};
use crate::{callbacks, capture, session};
use slots::Slot;

/// Open.
const OPEN: u32 = 0;
/// Open, and work in flight is bounded because somebody waits.
const BOUNDED: u32 = 1;
/// Closed: who comes asks for the lock and sleeps.
const CLOSED: u32 = 2;
/// Nobody came yet: the first one starts the session.
const DORMANT: u32 = 3;

static STATE: AtomicU32 = AtomicU32::new(DORMANT);
/// Threads that sleep at the gate.
static SLEEPING: AtomicUsize = AtomicUsize::new(0);
/// Guards nothing but the sleep: a wake-up between a sleeper's look at the state and its sleep is not lost.
static BED: Mutex<()> = Mutex::new(());
static WAKE: Condvar = Condvar::new();
/// In a forked child the driver refuses everything; nothing of ours stands in its way.
static FORKED: AtomicBool = AtomicBool::new(false);

/// What a thread carries through the gate.
#[derive(Debug)]
#[must_use = "a thread that entered must leave"]
pub(crate) struct Pass {
    /// Null: it did not step in.
    slot: *const Slot,
    stream: StreamKey,
    /// Something is to be done when it leaves.
    extra: Extra,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extra {
    Nothing,
    /// The gate has not seen this stream in this thread yet.
    Meet,
    /// Work in flight is bounded: count this one.
    Count,
}

/// Steps in; sleeps while the gate is closed.
#[inline(always)]
pub(crate) fn enter(stream: StreamKey) -> Pass {
    let frame = frame();
    let slot = slots::current();
    // SAFETY: slots live for ever.
    if let Some(mine) = unsafe { slot.as_ref() }
        && mine.is_outside()
        && mine.knows(stream)
    {
        mine.step_in(frame);
        if STATE.load(Ordering::SeqCst) == OPEN {
            mine.count();
            return Pass { slot, stream, extra: Extra::Nothing };
        }
        mine.step_out();
    }
    enter_slowly(stream, frame)
}

/// Steps out, with the driver's result in hand.
#[inline(always)]
pub(crate) fn leave(pass: Pass, result: CUresult) {
    // SAFETY: slots live for ever.
    let Some(slot) = (unsafe { pass.slot.as_ref() }) else { return };
    if pass.extra != Extra::Nothing {
        leave_slowly(slot, &pass, result);
    }
    slot.step_out();
}

#[cold]
#[inline(never)]
fn enter_slowly(stream: StreamKey, frame: usize) -> Pass {
    let outside = Pass { slot: std::ptr::null(), stream, extra: Extra::Nothing };
    let slot = slots::acquire();
    // SAFETY: slots live for ever.
    let Some(mine) = (unsafe { slot.as_ref() }) else { return outside };
    if !mine.is_outside() {
        if mine.is_above(frame) {
            // Called from inside another call: the outer one holds the gate for both.
            if STATE.load(Ordering::SeqCst) >= CLOSED {
                mine.count_passed_by();
            }
            return outside;
        }
        // The frame that stepped in is gone: `longjmp`, or an exception.
        mine.step_out();
    }
    loop {
        let state = STATE.load(Ordering::SeqCst);
        match state {
            OPEN | BOUNDED => {
                if state == BOUNDED {
                    streams::wait_for_window(stream);
                }
                mine.step_in(frame);
                if STATE.load(Ordering::SeqCst) <= BOUNDED {
                    mine.count();
                    let extra = if !mine.knows(stream) {
                        Extra::Meet
                    } else if state == BOUNDED {
                        Extra::Count
                    } else {
                        Extra::Nothing
                    };
                    return Pass { slot, stream, extra };
                }
                mine.step_out();
            }
            DORMANT => {
                session::start();
                // Before `cuInit` there is nothing to share, and the driver says so.
                if STATE.load(Ordering::SeqCst) == DORMANT {
                    return outside;
                }
            }
            _ => {
                // The drain that the gate is closed for may be waiting for this thread.
                if callbacks::running() {
                    mine.count_passed_by();
                    return outside;
                }
                session::uses_current();
                // Nothing runs on a capturing stream, and a capture must not be held up half-way.
                if capture::is_capturing(stream) {
                    return outside;
                }
                sleep_until_open();
            }
        }
    }
}

#[cold]
#[inline(never)]
fn leave_slowly(slot: &Slot, pass: &Pass, result: CUresult) {
    // A stream that the driver did not accept may be no stream at all.
    if result != CUresult::SUCCESS {
        return;
    }
    if pass.extra == Extra::Meet && streams::meet(pass.stream) {
        session::uses_current();
        slot.learn(pass.stream);
    }
    if STATE.load(Ordering::Relaxed) == BOUNDED {
        streams::count_launch(pass.stream);
    }
}

fn sleep_until_open() {
    SLEEPING.fetch_add(1, Ordering::SeqCst);
    session::ask_for_lock();
    let mut bed = lock();
    while STATE.load(Ordering::SeqCst) == CLOSED {
        bed = WAKE.wait(bed).unwrap_or_else(PoisonError::into_inner);
    }
    drop(bed);
    SLEEPING.fetch_sub(1, Ordering::SeqCst);
}

/// Steps in if the gate is open; for what must not sleep.
#[inline(always)]
pub(crate) fn try_enter() -> Option<Pass> {
    try_enter_from(frame())
}

fn try_enter_from(frame: usize) -> Option<Pass> {
    let slot = slots::acquire();
    let extra = Extra::Nothing;
    let outside = Pass { slot: std::ptr::null(), stream: StreamKey::LEGACY, extra };
    // SAFETY: slots live for ever.
    let Some(mine) = (unsafe { slot.as_ref() }) else { return Some(outside) };
    if !mine.is_outside() {
        if mine.is_above(frame) {
            return Some(outside);
        }
        mine.step_out();
    }
    mine.step_in(frame);
    if STATE.load(Ordering::SeqCst) <= BOUNDED {
        return Some(Pass { slot, stream: StreamKey::LEGACY, extra });
    }
    mine.step_out();
    None
}

/// Before the gate closes for the first time.
pub(crate) fn prepare() {
    fence::prepare();
}

/// Lets everybody in; bounded or not.
pub(crate) fn open(bounded: bool) {
    let bed = lock();
    if !FORKED.load(Ordering::Relaxed) {
        STATE.store(if bounded { BOUNDED } else { OPEN }, Ordering::SeqCst);
    }
    drop(bed);
    WAKE.notify_all();
}

/// Bounds work in flight, or stops doing so, while the gate is open.
pub(crate) fn set_bounded(bounded: bool) {
    let (from, to) = if bounded { (OPEN, BOUNDED) } else { (BOUNDED, OPEN) };
    let _ = STATE.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst);
}

/// Lets nobody in from now on. Threads may still be inside: see [`nobody_inside`].
pub(crate) fn close() {
    if !FORKED.load(Ordering::Relaxed) {
        STATE.store(CLOSED, Ordering::SeqCst);
        fence::everywhere();
    }
}

/// Whether work in flight is to be bounded.
pub(crate) fn is_bounded() -> bool {
    STATE.load(Ordering::SeqCst) == BOUNDED
}

/// Whether no thread is between its step in and its step out.
pub(crate) fn nobody_inside() -> bool {
    slots::all().all(Slot::is_vacant)
}

/// Threads asleep at the gate.
pub(crate) fn anybody_asleep() -> bool {
    SLEEPING.load(Ordering::SeqCst) > 0
}

/// Submissions that passed the gate, and those that passed by it, since the start.
pub(crate) fn totals() -> (u64, u64) {
    slots::all().fold((0, 0), |(gated, passed), slot| {
        let (g, p) = slot.totals();
        (gated + g, passed + p)
    })
}

/// In a forked child: everything passes.
pub(crate) fn after_fork_in_child() {
    FORKED.store(true, Ordering::Relaxed);
    STATE.store(OPEN, Ordering::SeqCst);
    slots::forget_current();
}

/// Whether this is a forked child of a process with a session: nothing of ours is of use in it.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// A short pause for those who poll.
pub(crate) fn pause() {
    std::thread::sleep(Duration::from_micros(50));
}

fn lock() -> MutexGuard<'static, ()> {
    BED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An address within the caller's frame: a deeper call has a lower one.
#[inline(always)]
fn frame() -> usize {
    let marker = 0u8;
    std::hint::black_box(&raw const marker) as usize
}
