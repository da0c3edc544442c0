//! Stream-ordered frees of managed memory, for drivers that do not support them. An event behind the stream's work says when
//! the memory can be freed.
//!
//! The driver's own free waits for all work of the device, and that work may wait for the thread that frees: a host function, for
//! example. The program's call did not wait, so no call of the program does that wait for it. The memory is freed
//!
//! - by a call of the program that frees other memory of the context, and so waits as well ([`before_a_free`]);
//! - by the mover, when all work is complete and the gate is closed ([`when_drained`]);
//! - else by a thread of its own, at a moment at which the device has nothing to do. If an allocation would be refused without
//!   the memory, that thread does not wait for such a moment for longer than [`PATIENCE`].
//!
//! Beside work that does not end, none of these may come. An allocation of as many bytes gets the memory before it is freed
//! ([`take_again`]), so a program that allocates and frees the same amount over and over stays within the card.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::allocations::{self, Allocation, Kind};
use super::backing::Work;
use super::free::{self, free as free_now};
use crate::driver::types::{CUdeviceptr, CUresult, CUstream};
use crate::driver::{self, functions};
use crate::process::lock::lock;
use crate::process::{lifecycle, threads};
use crate::work::contexts::{self, Context};
use crate::work::drain::Drain;
use crate::work::event::Event;
use crate::work::stream_key::StreamKey;
use crate::work::{callbacks, captures};

/// An allocation that would be refused, or a free, waits so long for memory that is freed later: beside a capture, the work before the
/// free may be out of sight until the capture ends, and the waiting thread may be the one that ends it. The work of the
/// device may wait for that thread as well.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// While an allocation waits for the memory, it is freed after this time though the device has work.
const PATIENCE: Duration = Duration::from_secs(1);
/// Pauses between two looks whether the device has nothing to do.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(64);

/// Memory that the program has freed in stream order.
#[derive(Debug)]
struct Deferred {
    allocation: Arc<Allocation>,
    state: State,
}

impl Deferred {
    fn is_in(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.allocation.context, context)
    }

    /// Whether this is what the program has freed at an address. The driver may have returned the address again already, when the
    /// memory has just ended and is still in the list.
    fn is_at(&self, base: CUdeviceptr) -> bool {
        let is_it = |now: &Arc<Allocation>| Arc::ptr_eq(now, &self.allocation);
        self.allocation.base == base && allocations::find(base).as_ref().is_none_or(is_it)
    }
}

#[derive(Debug)]
enum State {
    /// The work before the free may not be complete.
    Behind(Arc<Event>),
    /// The memory can be freed.
    Due,
    /// A thread of the program, or the mover, is freeing it.
    Ending,
    /// The thread is freeing it that frees memory at moments at which the device has nothing to do.
    EndingBeside,
}

static FREED: Mutex<Vec<Deferred>> = Mutex::new(Vec::new());
/// The length of that list, which can be read without the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Whether the thread runs that frees memory.
static HAS_THREAD: AtomicBool = AtomicBool::new(false);
/// How often that thread has found out whose work is complete.
static LOOKED: AtomicUsize = AtomicUsize::new(0);
/// Allocations that wait for such memory, and those of them that have waited for [`PATIENCE`].
static AWAITED: AtomicUsize = AtomicUsize::new(0);
static URGENT: AtomicUsize = AtomicUsize::new(0);

fn note_count(freed: &[Deferred]) {
    COUNT.store(freed.len(), Ordering::SeqCst);
}

/// Frees memory once the work on a stream is complete. Called for the program's own call with that stream.
pub(crate) fn in_order(allocation: &Arc<Allocation>, stream: CUstream) -> CUresult {
    let behind = behind(stream);
    let mut freed = lock(&FREED);
    if freed.iter().any(|freed| Arc::ptr_eq(&freed.allocation, allocation)) {
        return CUresult::INVALID_VALUE;
    }
    match behind {
        Ok(behind) => {
            let state = State::Behind(Arc::new(behind));
            freed.push(Deferred { allocation: Arc::clone(allocation), state });
            note_count(&freed);
            CUresult::SUCCESS
        }
        Err(error) => error,
    }
}

/// An event behind the work on a stream. For a legacy stream it is an event behind the whole context, since an event on the
/// legacy stream would delay the context's blocking streams. Only on drivers before 12.4, and beside a capture, is the event
/// recorded on the legacy stream.
fn behind(stream: CUstream) -> Result<Event, CUresult> {
    let of_stream = driver::context_of(stream)?;
    let context = contexts::find(of_stream).ok_or(CUresult::INVALID_CONTEXT)?;
    let _relaxed = driver::Relaxed::begin();
    driver::with_current(of_stream, || {
        let quiet = (StreamKey::with_legacy(stream) == StreamKey::LEGACY && driver::can_record_context())
            .then(|| captures::hold_off(&context))
            .flatten();
        if quiet.is_some() { Event::behind_context(&context) } else { Event::behind_stream(&context, stream) }
    })
}

/// Whether the program has freed this already.
pub(crate) fn is_freed(base: CUdeviceptr) -> bool {
    COUNT.load(Ordering::SeqCst) > 0 && lock(&FREED).iter().any(|freed| freed.is_at(base))
}

/// Finds out whose work is complete by now, of the work in contexts that may be `asked`. Returns whether there is memory that can be freed.
///
/// While a thread waits for a place in a full queue, the driver answers nothing about its context (measured), and the work in that queue may wait
/// for the caller. So a thread of the program asks only where its own call would wait as well.
fn look(asked: impl Fn(&Context) -> bool) -> bool {
    if COUNT.load(Ordering::SeqCst) == 0 || lifecycle::is_forked() || lifecycle::is_exiting() {
        return false;
    }
    let event_of = |freed: &Deferred| match &freed.state {
        State::Behind(event) if asked(event.context()) => Some(Arc::clone(event)),
        _ => None,
    };
    let events: Vec<Arc<Event>> = lock(&FREED).iter().filter_map(event_of).collect();
    // Asking the driver, and dropping events, happens without the lock.
    let complete: Vec<Arc<Event>> = events.into_iter().filter(|event| event.is_complete()).collect();
    let reached: BTreeSet<*const Event> = complete.iter().map(Arc::as_ptr).collect();
    let mut freed = lock(&FREED);
    for freed in freed.iter_mut() {
        if matches!(&freed.state, State::Behind(event) if reached.contains(&Arc::as_ptr(event))) {
            freed.state = State::Due;
        }
    }
    freed.iter().any(|freed| matches!(freed.state, State::Due))
}

/// Whether a context is another than the calling thread's current one.
fn is_elsewhere() -> impl Fn(&Context) -> bool {
    let here = driver::current_context().ok();
    move |context| here != Some(context.handle())
}

/// Takes memory that can be freed, if `which` accepts it. `state` says who frees it.
fn take(which: impl Fn(&Deferred) -> bool, state: State) -> Option<Arc<Allocation>> {
    let mut all = lock(&FREED);
    let found = all.iter_mut().find(|freed| matches!(freed.state, State::Due) && which(freed))?;
    found.state = state;
    Some(Arc::clone(&found.allocation))
}

/// Managed memory of `bytes` bytes that the program has freed, for an allocation in the same context. The work before the free is complete, so
/// nothing of the program uses it any more. For the driver and in the account it stays what it was.
pub(super) fn take_again(context: &Arc<Context>, bytes: u64) -> Option<Arc<Allocation>> {
    // In a broken context the driver refuses the allocation.
    if !look(|asked| asked.handle() == context.handle()) || context.is_broken() {
        return None;
    }
    let mut all = lock(&FREED);
    let is_fitting = |freed: &Deferred| {
        let old = &freed.allocation;
        let is_due = matches!(freed.state, State::Due) && freed.is_in(context);
        is_due
            && !old.is_attributed()
            && old.kind == Kind::DeviceAsManaged
            && old.size == bytes
            && is_listed(old)
    };
    let at = all.iter().position(is_fitting)?;
    let again = all.swap_remove(at).allocation;
    note_count(&all);
    again.begin_again();
    Some(again)
}

/// Whether an allocation is on the list of allocations. If not, it has ended, and its address may be another one's.
fn is_listed(allocation: &Arc<Allocation>) -> bool {
    allocations::find(allocation.base).is_some_and(|now| Arc::ptr_eq(&now, allocation))
}

fn forget_freed(allocation: &Arc<Allocation>) {
    // Whoever does not find it in the list any more finds it counted.
    free::count_late();
    let mut freed = lock(&FREED);
    freed.retain(|freed| !Arc::ptr_eq(&freed.allocation, allocation));
    note_count(&freed);
}

/// Frees memory. If the library does not map it, the driver's free waits for the work of the device.
fn end(allocation: &Arc<Allocation>) {
    let base = allocation.base;
    if let Some(free) = functions::cuMemFree_v2.get().filter(|_| is_listed(allocation)) {
        // SAFETY: an allocation that the program has given back; its context lives through the call.
        let _ = allocation.context.with(|| free_now(base, Work::Complete, || unsafe { free(base) }).ok());
    }
    forget_freed(allocation);
}

/// Whether its free does not call the driver's, which waits.
fn is_mapped(allocation: &Allocation) -> bool {
    !allocation.kind.is_drivers()
}

fn end_those(which: impl Fn(&Deferred) -> bool, asked: impl Fn(&Context) -> bool) {
    if look(asked) {
        while let Some(allocation) = take(&which, State::Ending) {
            end(&allocation);
        }
    }
}

/// Frees the memory whose work is complete. Called when all work is complete and the gate is closed.
pub(crate) fn when_drained() {
    end_those(|_| true, |_| true);
}

/// Frees the memory of a context whose work is complete. Called for the program's own call that frees other memory of
/// the context, and so waits for its work.
pub(crate) fn before_a_free(context: &Arc<Context>) {
    // A callback must not call the driver.
    if !callbacks::are_running() {
        // The driver's own free waits for the work of the device.
        let on_device = |asked: &Context| asked.device() == context.device();
        end_those(|freed| freed.is_in(context), on_device);
        wait_for_those_ending(context);
    }
}

/// Waits for memory of a context that the library's own thread is freeing: when the program's call returns, that memory is free as
/// well. The free waits for the same work as the program's call does.
fn wait_for_those_ending(context: &Arc<Context>) {
    let is_ending = |freed: &Deferred| matches!(freed.state, State::EndingBeside) && freed.is_in(context);
    let begin = Instant::now();
    while HAS_THREAD.load(Ordering::SeqCst)
        && !lifecycle::is_forked()
        && !lifecycle::is_exiting()
        && begin.elapsed() < LONGEST_WAIT
        && lock(&FREED).iter().any(is_ending)
    {
        threads::pause();
    }
}

/// Frees the memory whose work is complete, and that of other [frees that were put off](free::finish), without waiting for the driver:
/// some at once, and some soon. Work in other contexts than the current one is looked at by the thread.
pub(crate) fn sweep() {
    if COUNT.load(Ordering::SeqCst) == 0 && !free::is_unfinished() {
        return;
    }
    let is_elsewhere = is_elsewhere();
    free::finish_in(&|asked| !is_elsewhere(asked));
    if look(|asked| !is_elsewhere(asked)) {
        while let Some(allocation) = take(|freed| is_mapped(&freed.allocation), State::Ending) {
            end(&allocation);
        }
    }
    let is_for_thread = |freed: &Deferred| match &freed.state {
        State::Behind(event) => is_elsewhere(event.context()),
        state => matches!(state, State::Due),
    };
    if !lifecycle::is_forked()
        && !lifecycle::is_exiting()
        && (free::is_unfinished() || lock(&FREED).iter().any(is_for_thread))
        && !HAS_THREAD.swap(true, Ordering::SeqCst)
        && !threads::spawn("nvshare-free", free_those_due)
    {
        HAS_THREAD.store(false, Ordering::SeqCst);
    }
}

/// The first memory that can be freed.
fn next_due() -> Option<Arc<Allocation>> {
    let freed = lock(&FREED);
    let due = freed.iter().find(|freed| matches!(freed.state, State::Due))?;
    Some(Arc::clone(&due.allocation))
}

/// The thread that frees memory. It ends when there is none left.
fn free_those_due() {
    let mut pause = SHORTEST_PAUSE;
    while !lifecycle::is_exiting() && (COUNT.load(Ordering::SeqCst) > 0 || free::is_unfinished()) {
        free::finish();
        look(|_| true);
        LOOKED.fetch_add(1, Ordering::SeqCst);
        let is_urgent = URGENT.load(Ordering::SeqCst) > 0;
        let may_end = |due: &Arc<Allocation>| {
            is_urgent || is_mapped(due) || Drain::of(due.context.device()).poll() == 0
        };
        let begin =
            |due: Arc<Allocation>| take(|freed| Arc::ptr_eq(&freed.allocation, &due), State::EndingBeside);
        if let Some(allocation) = next_due().filter(may_end).and_then(begin) {
            end(&allocation);
            pause = SHORTEST_PAUSE;
        } else {
            threads::sleep(pause);
            let longest = if AWAITED.load(Ordering::SeqCst) > 0 { SHORTEST_PAUSE } else { LONGEST_PAUSE };
            pause = (pause * 2).min(longest);
        }
    }
    // What is freed from here on is found by the next sweep.
    HAS_THREAD.store(false, Ordering::SeqCst);
}

/// An allocation that waits for memory that was freed.
#[derive(Debug)]
struct Waiter {
    begin: Instant,
    is_urgent: bool,
    /// [`LOOKED`] when it began to wait.
    looked: usize,
}

impl Waiter {
    fn new() -> Self {
        AWAITED.fetch_add(1, Ordering::SeqCst);
        Self { begin: Instant::now(), is_urgent: false, looked: LOOKED.load(Ordering::SeqCst) }
    }

    /// Frees what can be freed by now, and presses for the rest after a while. Returns whether more will be free soon.
    fn look_again(&mut self) -> bool {
        sweep();
        if !self.is_urgent && self.begin.elapsed() >= PATIENCE {
            self.is_urgent = true;
            URGENT.fetch_add(1, Ordering::SeqCst);
        }
        // A look that has begun since then.
        let is_looked_at = LOOKED.load(Ordering::SeqCst).wrapping_sub(self.looked) >= 2;
        let is_elsewhere = is_elsewhere();
        let is_soon_free = |freed: &Deferred| match &freed.state {
            State::Behind(event) => !is_looked_at && is_elsewhere(event.context()),
            State::Due | State::Ending | State::EndingBeside => true,
        };
        !lifecycle::is_forked() && COUNT.load(Ordering::SeqCst) > 0 && lock(&FREED).iter().any(is_soon_free)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        AWAITED.fetch_sub(1, Ordering::SeqCst);
        URGENT.fetch_sub(usize::from(self.is_urgent), Ordering::SeqCst);
    }
}

/// The frees that an allocation may wait for before it is refused.
#[derive(Debug)]
pub(super) struct Frees {
    /// [`free::late`] before the allocation was last tried.
    seen: usize,
    /// When it first waited.
    begin: Option<Instant>,
}

impl Frees {
    /// An allocation is about to be tried for the first time.
    pub(super) fn begin() -> Self {
        Self { seen: free::late(), begin: None }
    }

    /// Waits for memory that is freed later than the program said so. Returns whether some has been freed since the allocation
    /// was last tried, so that it is worth another try. All tries together take [`LONGEST_WAIT`] at most: another thread may
    /// free memory over and over, and none of it may ever do.
    pub(super) fn wait(&mut self) -> bool {
        let mut waiter = Waiter::new();
        let begin = *self.begin.get_or_insert(waiter.begin);
        let is_in_time = || begin.elapsed() < LONGEST_WAIT && !lifecycle::is_exiting();
        while free::late() == self.seen && (waiter.look_again() || free::is_unfinished()) && is_in_time() {
            threads::pause();
        }
        let more = free::late() != self.seen && is_in_time();
        self.seen = free::late();
        more
    }
}

/// Removes the memory of a context that has ended.
pub(crate) fn forget_context(context: &Arc<Context>) {
    let mut freed = lock(&FREED);
    let (gone, left): (Vec<_>, _) =
        std::mem::take(&mut *freed).into_iter().partition(|freed| freed.is_in(context));
    *freed = left;
    note_count(&freed);
    drop(freed);
    // Dropping the events calls the driver, so it happens without the lock.
    drop(gone);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::types::CUcontext;

    #[test]
    fn an_address_that_comes_again_is_not_freed() {
        const BASE: CUdeviceptr = 0x60_1000;
        let context = contexts::learn(CUcontext(0x60_0000 as *mut _), 60);
        let new = || Arc::new(Allocation::new(BASE, 8, 60, Arc::clone(&context), Kind::DeviceAsManaged, 0));
        let (old, new) = (new(), new());
        let mut freed = lock(&FREED);
        freed.push(Deferred { allocation: Arc::clone(&old), state: State::Ending });
        note_count(&freed);
        drop(freed);
        assert!(is_freed(BASE), "it is being freed");
        // The driver has freed it, and another thread has the address.
        allocations::insert(&new);
        assert!(!is_freed(BASE) && !is_listed(&old));
        forget_freed(&old);
        assert!(!is_freed(BASE) && is_listed(&new));
        allocations::remove(BASE);
    }
}
