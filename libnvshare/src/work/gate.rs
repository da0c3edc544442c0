//! The gate that every submission of work passes.
//!
//! One word says whether it is open. A thread first marks its own [slot](slots) as inside and then reads the word. The thread
//! that closes the gate first writes the word and then reads the slots. A [fence] keeps both orders, so at least one of the
//! two threads sees the other. After [`close`], and once [`nobody_inside`] is true, nothing is submitted until the gate opens.
//!
//! An open gate costs one store on the way in and one on the way out: no lock, no allocation, no clock, no look-up.

mod atomics;
pub(crate) mod door;
mod fence;
mod marks;
mod sleepers;
mod slots;
#[cfg(test)]
mod stress;

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use nvshare_client::launch_window::InFlight;

use crate::driver;
use crate::driver::types::CUresult;
use crate::process::lock::lock;
use crate::process::{bell, lifecycle, threads};
use crate::work::contexts::{self, Context};
use crate::work::stream_key::StreamKey;
use crate::work::streams::{self, Stream};
use crate::work::{callbacks, captures, used_devices};
use door::Entered;
use fence::Fence;
use sleepers::{Sleeper, Sleepers};
use slots::Slot;

/// The gate is open.
const OPEN: u32 = 0;
/// The gate is open, and work in flight is bounded because another client waits.
const BOUNDED: u32 = 1;
/// The gate is open, and memory of a context was given up: calls that submit work there answer the driver's error. Work in
/// flight is bounded as well.
const GUARDED: u32 = 2;
/// The gate is closed: a thread that comes requests the lock and sleeps.
const CLOSED: u32 = 3;
/// No thread has come yet. The first one starts the session.
const DORMANT: u32 = 4;
/// A thread of the program has [shut] the gate for a moment: a thread that comes sleeps.
const SHUT: u32 = 5;

static STATE: AtomicU32 = AtomicU32::new(DORMANT);
static FENCE: Fence = Fence { for_all: AtomicBool::new(false) };
/// Threads that sleep at the gate.
static SLEEPING: Sleepers = Sleepers::none();
/// Held between a sleeper's look at the state and its sleep, so that no wake-up is lost in between. Also held while the
/// state is changed from outside. While the gate is [shut], it has the state that follows.
static SLEEP_LOCK: Mutex<Option<u32>> = Mutex::new(None);
static WAKE: Condvar = Condvar::new();
/// Whether a thread has come to the closed gate since the session last looked.
static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Whether a call that must not sleep has found the gate [shut].
static TURNED_AWAY: AtomicBool = AtomicBool::new(false);

/// How often the gate has been opened.
static OPENINGS: AtomicU64 = AtomicU64::new(0);

/// Addresses may have no memory while the gate is closed. So calls that name them wait, on capturing streams as well.
static ADDRESSES_MAY_BE_EMPTY: AtomicBool = AtomicBool::new(false);

/// The record that a thread carries through the gate.
#[derive(Debug)]
#[must_use = "a thread that entered must leave"]
pub(crate) struct Pass {
    /// Null: the thread did not step in.
    slot: *const Slot,
    then: Then,
}

/// The thread's task when it leaves.
#[derive(Debug, Clone, Copy)]
enum Then {
    Nothing,
    /// The thread does not know the stream yet.
    Learn(StreamKey),
    /// Work in flight is bounded: count this launch.
    Count(&'static Stream),
    /// The thread did not step in: it is counted at the door.
    LeaveDoor(Entered),
}

/// A place in the stack frame of the call that passes the gate. The word in it shows that the frame still lives.
#[derive(Debug)]
pub(crate) struct FrameMark(Cell<usize>);

impl FrameMark {
    #[inline(always)]
    pub(crate) const fn new() -> Self {
        Self(Cell::new(0))
    }

    #[inline(always)]
    fn write(&self, word: usize) {
        // SAFETY: a valid place. The write is volatile, since the compiler does not see that the word is read.
        unsafe { self.0.as_ptr().write_volatile(word) };
    }
}

/// Steps in, and sleeps while the gate is closed. The first thread ever calls `start`, which starts the session.
///
/// # Errors
/// The call must not be made, and answers this error: memory that its work may reach was given up.
#[inline(always)]
pub(crate) fn enter(stream: StreamKey, mark: &FrameMark, start: fn()) -> Result<Pass, CUresult> {
    let slot = slots::current();
    // SAFETY: slots live for ever.
    if let Some(mine) = unsafe { slot.as_ref() }
        && mine.is_outside()
        && let Some(known) = mine.find(stream)
    {
        mine.step_in(mark);
        let state = STATE.load(Ordering::SeqCst);
        if state == OPEN {
            mine.count();
            return Ok(Pass { slot, then: Then::Nothing });
        }
        if state == BOUNDED && known.launch_window.is_open() {
            mine.count();
            return Ok(Pass { slot, then: Then::Count(known) });
        }
        mine.step_out();
    }
    enter_slowly(stream, mark, start, Call::Submits)
}

/// Steps out, after the driver's function has returned `result`.
#[inline(always)]
pub(crate) fn leave(pass: Pass, mark: &FrameMark, result: CUresult) {
    // SAFETY: slots live for ever.
    let Some(slot) = (unsafe { pass.slot.as_ref() }) else { return leave_from_outside(&pass) };
    match pass.then {
        Then::Nothing | Then::LeaveDoor(_) => {}
        Then::Count(stream) => {
            if stream.launch_window.launched() {
                leave_marked(stream, result);
            }
        }
        Then::Learn(stream) => leave_and_learn(slot, stream, result),
    }
    mark.write(0);
    slot.step_out();
}

/// The end of a call that did not step in.
#[inline(always)]
fn leave_from_outside(pass: &Pass) {
    if let Then::LeaveDoor(entered) = pass.then {
        door::leave(entered);
    }
}

#[cold]
#[inline(never)]
fn leave_marked(stream: &'static Stream, result: CUresult) {
    if result == CUresult::SUCCESS {
        stream.mark();
    }
}

#[cold]
#[inline(never)]
fn leave_and_learn(slot: &'static Slot, stream: StreamKey, result: CUresult) {
    // If the driver refused the call, the handle may not be a stream.
    if result != CUresult::SUCCESS {
        return;
    }
    contexts::learn_current();
    used_devices::add_current();
    let record = if stream.is_per_thread() {
        streams::note_per_thread();
        slot.own()
    } else {
        streams::learn(stream)
    };
    slot.learn(record);
    if is_bounded() && record.launch_window.launched() {
        record.mark();
    }
}

/// The effect of a call that passes the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Submits,
    /// It names addresses, and no work waits for it.
    Names,
}

/// The state of the slot when a thread that is marked as inside makes another call.
enum Inside {
    /// The call is made from inside another call, which is inside the gate for both.
    Nested,
    /// The frame that stepped in is gone: `longjmp`, or an exception.
    Left,
}

#[cold]
#[inline(never)]
fn enter_slowly(stream: StreamKey, mark: &FrameMark, start: fn(), call: Call) -> Result<Pass, CUresult> {
    let slot = slots::acquire();
    // SAFETY: slots live for ever.
    let Some(mine) = (unsafe { slot.as_ref() }) else {
        return Ok(Pass { slot, then: Then::Nothing });
    };
    if !mine.is_outside() {
        match mine.inside(mark) {
            Inside::Nested => {
                if STATE.load(Ordering::SeqCst) >= CLOSED {
                    mine.count_passed_by();
                }
                return Ok(Pass { slot: ptr::null(), then: Then::Nothing });
            }
            Inside::Left => mine.step_out(),
        }
    }
    // This asks the driver about the thread and its stream, and some calls go around the gate.
    let mut at_door = door::enter();
    let outside = |at_door| Ok(Pass { slot: ptr::null(), then: Then::LeaveDoor(at_door) });
    loop {
        let state = STATE.load(Ordering::SeqCst);
        match state {
            OPEN | BOUNDED | GUARDED => {
                if state == GUARDED
                    && let Some(error) = streams::failure(stream)
                {
                    door::leave(at_door);
                    return Err(error);
                }
                let known = mine.find(stream);
                let is_bounded_here = state != OPEN && call == Call::Submits;
                if is_bounded_here
                    && let Some(known) = known
                    && !known.launch_window.is_open()
                {
                    known.wait_for_launch_window(is_bounded);
                }
                mine.step_in(mark);
                // It may have been closed meanwhile, and open in another way.
                if STATE.load(Ordering::SeqCst) == state {
                    mine.count();
                    door::leave(at_door);
                    let then = match known {
                        None => Then::Learn(stream),
                        Some(known) if is_bounded_here => Then::Count(known),
                        Some(_) => Then::Nothing,
                    };
                    return Ok(Pass { slot, then });
                }
                mine.step_out();
            }
            DORMANT => {
                start();
                // Before `cuInit` there is no session, and the driver reports an error.
                if STATE.load(Ordering::SeqCst) == DORMANT {
                    return outside(at_door);
                }
            }
            _ => {
                // The drain may be waiting for this thread.
                if callbacks::are_running() {
                    mine.count_passed_by();
                    return outside(at_door);
                }
                // The library's own thread uses none, and must not call the driver while the process is off the card.
                if !threads::is_own() {
                    used_devices::add_current();
                }
                // Nothing runs on a capturing stream, and a capture is not delayed half-way. The exception is a call
                // that may name addresses without memory: the driver refuses them, or takes them for the host's
                // (measured).
                if !ADDRESSES_MAY_BE_EMPTY.load(Ordering::Relaxed) && captures::is_capturing(stream) {
                    return outside(at_door);
                }
                door::leave(at_door);
                sleep_until_open();
                at_door = door::enter();
            }
        }
    }
}

/// Counts a thread as sleeping at the gate, and lets the session know.
fn say_asleep(sleeper: &mut Sleeper) {
    if sleeper.count() && !REQUESTED.swap(true, Ordering::SeqCst) {
        bell::ring();
    }
}

fn sleep_until_open() {
    /// How often a thread that sleeps while the process exits looks whether the driver has shut down.
    const LOOK: Duration = Duration::from_millis(1);
    if open_if_driver_has_ended() {
        return;
    }
    let mut sleeper = Sleeper::of(&SLEEPING);
    say_asleep(&mut sleeper);
    let mut sleep = lock(&SLEEP_LOCK);
    while matches!(STATE.load(Ordering::SeqCst), CLOSED | SHUT) {
        // The gate may have opened meanwhile, and closed again.
        say_asleep(&mut sleeper);
        if lifecycle::is_exiting() {
            (sleep, _) = WAKE.wait_timeout(sleep, LOOK).unwrap_or_else(PoisonError::into_inner);
            drop(sleep);
            if open_if_driver_has_ended() {
                return;
            }
            sleep = lock(&SLEEP_LOCK);
        } else {
            sleep = WAKE.wait(sleep).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Opens the gate if the driver has shut down: it refuses all calls itself, and no scheduler can give a grant any effect. Returns whether it did.
fn open_if_driver_has_ended() -> bool {
    let has_ended = driver::has_ended();
    if has_ended {
        open(InFlight::Unbounded);
    }
    has_ended
}

/// Has the threads that sleep look at what keeps them, here and at the door.
pub(crate) fn wake() {
    drop(lock(&SLEEP_LOCK));
    WAKE.notify_all();
    door::wake();
}

/// Steps in if the gate is open. For calls that must not sleep.
#[inline(always)]
pub(crate) fn try_enter(mark: &FrameMark) -> Option<Pass> {
    let slot = slots::acquire();
    let outside = Pass { slot: ptr::null(), then: Then::Nothing };
    // SAFETY: slots live for ever.
    let Some(mine) = (unsafe { slot.as_ref() }) else { return Some(outside) };
    if !mine.is_outside() {
        match mine.inside(mark) {
            Inside::Nested => return Some(outside),
            Inside::Left => mine.step_out(),
        }
    }
    mine.step_in(mark);
    let state = STATE.load(Ordering::SeqCst);
    if state < CLOSED {
        return Some(Pass { slot, then: Then::Nothing });
    }
    mine.step_out();
    if state == SHUT {
        TURNED_AWAY.store(true, Ordering::SeqCst);
    }
    None
}

/// Steps in for a call that names addresses to the driver without submitting work. If addresses may have no memory
/// while the gate is closed, the thread sleeps until they have it.
///
/// # Errors
/// As [`enter`], for the current context.
pub(crate) fn enter_for_addresses(mark: &FrameMark, start: fn()) -> Result<Pass, CUresult> {
    if ADDRESSES_MAY_BE_EMPTY.load(Ordering::Relaxed) {
        return enter_slowly(StreamKey::LEGACY, mark, start, Call::Names);
    }
    Ok(Pass { slot: ptr::null(), then: Then::LeaveDoor(door::enter()) })
}

/// The calling thread has another context, in which default streams have the keys of those that it knows. If that context's device is a
/// new one for the program, the thread's next submission notes it.
pub(crate) fn note_other_context() {
    if !used_devices::contains_current() {
        // SAFETY: slots live for ever.
        unsafe { slots::current().as_ref() }.inspect(|mine| mine.forget_streams());
    }
}

/// From now on, addresses may have no memory while the gate is closed.
pub(crate) fn expect_empty_addresses() {
    ADDRESSES_MAY_BE_EMPTY.store(true, Ordering::Relaxed);
}

/// Prepares the fence, before the gate closes for the first time.
pub(crate) fn prepare() {
    FENCE.prepare();
}

/// Sets the state: at once, or for the time after the gate was [shut]. `next` is told the state that holds until then.
fn set(next: impl FnOnce(u32) -> u32) {
    let mut behind = lock(&SLEEP_LOCK);
    match &mut *behind {
        Some(state) => *state = next(*state),
        None => STATE.store(next(STATE.load(Ordering::SeqCst)), Ordering::SeqCst),
    }
}

/// Opens the gate.
pub(crate) fn open(in_flight: InFlight) {
    if !lifecycle::is_forked() {
        // This comes first: a thread that finds the gate closed later sees that it has been open.
        OPENINGS.fetch_add(1, Ordering::SeqCst);
        let state = if contexts::has_any_failed() { GUARDED } else { opened(in_flight) };
        set(|_| {
            SLEEPING.forget();
            state
        });
    }
    wake();
}

/// Bounds work in flight, or stops doing so, while the gate is open.
pub(crate) fn bound(in_flight: InFlight) {
    let from = match in_flight {
        InFlight::Unbounded => BOUNDED,
        InFlight::Bounded => OPEN,
    };
    set(|state| if state == from { opened(in_flight) } else { state });
}

/// Shuts the gate for a moment, whoever opens it meanwhile, until [`reopen`] is called. Threads may still be inside: see
/// [`nobody_else_inside`].
pub(crate) fn shut() {
    let mut behind = lock(&SLEEP_LOCK);
    TURNED_AWAY.store(false, Ordering::SeqCst);
    *behind = Some(STATE.swap(SHUT, Ordering::SeqCst));
    drop(behind);
    FENCE.before_look();
}

/// Whether a thread would be inside the gate if it were not [shut].
pub(crate) fn keeps_anybody_out() -> bool {
    let would_be_open = lock(&SLEEP_LOCK).is_some_and(|state| state != CLOSED);
    would_be_open && (anybody_asleep() || TURNED_AWAY.load(Ordering::SeqCst))
}

/// Gives the gate the state that it would have if it had not been [shut].
pub(crate) fn reopen() {
    let mut behind = lock(&SLEEP_LOCK);
    let Some(state) = behind.take() else { return };
    if !lifecycle::is_forked() {
        STATE.store(state, Ordering::SeqCst);
    }
    drop(behind);
    WAKE.notify_all();
    // Threads that came meanwhile have not asked for the lock.
    bell::ring();
}

/// Whether no thread is inside the gate but the calling one.
pub(crate) fn nobody_else_inside() -> bool {
    let mine = slots::current();
    slots::all().all(|slot| ptr::eq(slot, mine) || slot.is_vacant())
}

/// The state of a gate that is open for all contexts.
fn opened(in_flight: InFlight) -> u32 {
    match in_flight {
        InFlight::Unbounded => OPEN,
        InFlight::Bounded => BOUNDED,
    }
}

/// Closes the gate. Threads may still be inside: see [`nobody_inside`].
pub(crate) fn close() {
    if !lifecycle::is_forked() {
        set(|_| CLOSED);
        FENCE.before_look();
    }
}

/// If the gate is closed: the number of this closed period. Two times with the same number have no opening in between. A gate that is
/// [shut] is closed if it would be without that.
pub(crate) fn closed_period() -> Option<u64> {
    let openings = OPENINGS.load(Ordering::SeqCst);
    let behind = lock(&SLEEP_LOCK);
    let state = behind.unwrap_or_else(|| STATE.load(Ordering::SeqCst));
    (state == CLOSED).then_some(openings)
}

/// Whether work in flight has to be bounded.
pub(crate) fn is_bounded() -> bool {
    matches!(STATE.load(Ordering::SeqCst), BOUNDED | GUARDED)
}

/// Whether no thread is inside the gate.
pub(crate) fn nobody_inside() -> bool {
    slots::all().all(Slot::is_vacant)
}

/// Notes that the session looks at the sleeping threads. The next thread that comes rings the bell again.
pub(crate) fn forget_request() {
    REQUESTED.store(false, Ordering::SeqCst);
}

/// Forgets the launches of a context that has ended.
pub(crate) fn forget_context(context: &Arc<Context>) {
    slots::all().for_each(|slot| slot.own().launch_window.forget_context(context));
}

/// Whether any thread sleeps at the gate.
pub(crate) fn anybody_asleep() -> bool {
    SLEEPING.are_any()
}

/// The number of submissions that passed the gate, and of those that went around it, since the start.
pub(crate) fn totals() -> (u64, u64) {
    slots::all().fold((0, 0), |(gated, passed), slot| {
        let (g, p) = slot.totals();
        (gated + g, passed + p)
    })
}

/// Opens the gate for ever, in a forked child.
pub(crate) fn after_fork_in_child() {
    STATE.store(OPEN, Ordering::SeqCst);
    door::after_fork_in_child();
    slots::forget_current();
}
