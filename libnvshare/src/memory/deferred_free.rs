//! Stream-ordered frees of managed memory, for drivers that do not support them. An event behind the stream's work says when
//! the memory can be freed.
//!
//! The driver's own free waits for all work of the device. That work, a host function for example, may wait for the thread that
//! frees. The program's call did not wait, so no call of the program does that wait for it. The memory is freed
//!
//! - by a call of the program that frees other memory of the context, and so waits as well ([`free_due_of_context`]);
//! - by the mover, when all work is complete and the gate is closed ([`free_all_due`]);
//! - else by a thread of its own, at a moment at which the device has nothing to do. If an allocation would be refused without
//!   the memory, that thread does not wait for such a moment for longer than [`PATIENCE`].
//!
//! Beside work that does not end, none of these may come. An allocation of as many bytes gets the memory before it is freed
//! ([`reuse`]). So a program that allocates and frees the same amount over and over stays within the card.

mod state;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::allocations::{self, Allocation, Kind};
use super::backing::Work;
use super::free::{self, free as free_now};
use crate::driver::types::{CUdevice, CUdeviceptr, CUresult, CUstream};
use crate::driver::{self, functions};
use crate::process::{lifecycle, threads};
use crate::work::contexts::{self, Context};
use crate::work::drain::Drain;
use crate::work::event::Event;
use crate::work::life::Gone;
use crate::work::stream_key::StreamKey;
use crate::work::{callbacks, captures};
use state::{By, DEFERRED, DeferredFree, Stage};

/// The longest wait of an allocation or of a free for memory that is freed later. Beside a capture, the work before the free
/// may be out of sight until the capture ends. The waiting thread may be the one that ends it. The work of the device may wait
/// for that thread as well.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// While an allocation waits for the memory, it is freed after this time even if the device has work.
const PATIENCE: Duration = Duration::from_secs(1);
/// Pauses of the thread between two looks at the device.
const MIN_PAUSE: Duration = Duration::from_millis(1);
const MAX_PAUSE: Duration = Duration::from_millis(64);

/// Frees memory once the work on a stream is complete. Called for the program's own call with that stream.
pub(crate) fn free_in_order(allocation: &Arc<Allocation>, stream: CUstream) -> CUresult {
    let behind = behind(stream).map(Arc::new);
    if DEFERRED.has(|freed| Arc::ptr_eq(&freed.allocation, allocation)) {
        return CUresult::INVALID_VALUE;
    }
    match behind {
        Ok(behind) if DEFERRED.add(allocation, &behind) => CUresult::SUCCESS,
        Ok(_) => CUresult::INVALID_VALUE,
        Err(error) => error,
    }
}

/// An event behind the work on a stream. For a legacy stream it is an event behind the whole context, since an event on the
/// legacy stream would delay the context's blocking streams. Only on drivers before 12.5, and beside a capture, is the event
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
    // The driver may have returned the address again: memory that has just ended is still among the deferred frees.
    let is_now = |old: &Arc<Allocation>| allocations::find(base).is_none_or(|now| Arc::ptr_eq(&now, old));
    let is_at = |freed: &DeferredFree| freed.allocation.base == base && is_now(&freed.allocation);
    !DEFERRED.is_empty() && DEFERRED.has(is_at)
}

/// Finds the frees whose work is complete by now, in contexts that may be `asked`. Returns whether there is memory that can be
/// freed.
///
/// While a thread waits for a place in a full queue, the driver answers nothing about its context (measured). The work in that
/// queue may wait for the caller. So a thread of the program asks only where its own call would wait as well.
fn look(asked: impl Fn(&Context) -> bool) -> bool {
    if DEFERRED.is_empty() || lifecycle::is_forked() || lifecycle::is_exiting() {
        return false;
    }
    let events = DEFERRED.events(asked);
    let complete: Vec<Arc<Event>> = events.into_iter().filter(|event| event.is_complete()).collect();
    DEFERRED.complete(&complete)
}

/// Tells whether a context is another than the calling thread's current one.
fn is_elsewhere() -> impl Fn(&Context) -> bool {
    let here = driver::current_context().ok();
    move |context| here != Some(context.handle())
}

/// Managed memory of `bytes` bytes that the program has freed, for an allocation in the same context. The work before the free is complete, so
/// nothing of the program uses it any more. For the driver and in the account it stays what it was.
pub(super) fn reuse(context: &Arc<Context>, bytes: u64) -> Option<Arc<Allocation>> {
    // In a broken context the driver refuses the allocation.
    if !look(|asked| asked.handle() == context.handle()) || context.is_broken() {
        return None;
    }
    let is_fitting = |freed: &DeferredFree| {
        let old = &freed.allocation;
        freed.is_in(context)
            && !old.is_attributed()
            && old.kind == Kind::DeviceAsManaged
            && old.size == bytes
            && is_listed(old)
    };
    let again = DEFERRED.take_due(is_fitting)?;
    again.begin_reuse();
    Some(again)
}

/// Whether an allocation is on the list of allocations. If not, it has ended, and its address may be another one's.
fn is_listed(allocation: &Arc<Allocation>) -> bool {
    allocations::find(allocation.base).is_some_and(|now| Arc::ptr_eq(&now, allocation))
}

fn forget_freed(allocation: &Arc<Allocation>) {
    // A thread that does not find the memory any more finds it counted.
    free::note_ended_late();
    DEFERRED.remove(allocation);
}

/// Frees memory. If the library does not map it, the driver's free waits for the work of the device. Returns whether it is freed: not while
/// its context is ending, which the driver may leave as it is.
fn free_due(allocation: &Arc<Allocation>) -> bool {
    let base = allocation.base;
    let freed = if is_mapped(allocation) {
        // This waits for a move of the memory. If its context is ending, the move is over only after that, so nothing here keeps it alive.
        free::free_mapped(allocation);
        Ok(Ok(()))
    } else {
        allocation.context.with(|| match functions::cuMemFree_v2.get().filter(|_| is_listed(allocation)) {
            // SAFETY: an allocation that the program has given back; its context lives through the call.
            Some(free) => free_now(base, Work::Complete, || unsafe { free(base) }).ok(),
            None => Ok(()),
        })
    };
    let is_freed = !matches!(freed, Err(Gone::Ending));
    if is_freed {
        forget_freed(allocation);
    } else {
        DEFERRED.put_off(allocation);
    }
    is_freed
}

/// Whether the library maps the memory. Its free does not call the driver's own, which waits.
fn is_mapped(allocation: &Allocation) -> bool {
    allocation.kind == Kind::Mapped
}

fn free_those_due(which: impl Fn(&DeferredFree) -> bool, asked: impl Fn(&Context) -> bool) {
    if look(asked) {
        // One that is put off is behind the others.
        for _ in 0..DEFERRED.count() {
            let Some(allocation) = DEFERRED.begin_due(&which, By::Caller) else { break };
            free_due(&allocation);
        }
    }
}

/// Frees the memory whose work is complete. Called when all work is complete and the gate is closed.
pub(crate) fn free_all_due() {
    free_those_due(|_| true, |_| true);
}

/// Frees the memory of a context whose work is complete. Called for the program's own call that frees other memory of
/// the context, and so waits for its work.
pub(crate) fn free_due_of_context(context: &Arc<Context>) {
    // A callback must not call the driver.
    if !callbacks::are_running() {
        // The driver's own free waits for the work of the device.
        let on_device = |asked: &Context| asked.device() == context.device();
        free_those_due(|freed| freed.is_in(context), on_device);
        wait_for_own_thread(context);
    }
}

/// Waits for memory of a context that the library's own thread is freeing: when the program's call returns, that memory is free as
/// well. The free waits for the same work as the program's call does.
fn wait_for_own_thread(context: &Arc<Context>) {
    let is_being_freed = |freed: &DeferredFree| {
        matches!(freed.stage, Stage::BeingFreed(By::OwnThread)) && freed.is_in(context)
    };
    let begin = Instant::now();
    while !DEFERRED.is_empty()
        && !lifecycle::is_forked()
        && !lifecycle::is_exiting()
        && begin.elapsed() < MAX_WAIT
        && DEFERRED.has(is_being_freed)
    {
        threads::pause();
    }
}

/// Frees the memory whose work is complete, and that of other [frees that were put off](free::finish_late_frees). It does not wait for the
/// driver, so some memory is free at once and some soon. The thread asks about work in other contexts than the current one.
pub(crate) fn free_without_waiting() {
    if DEFERRED.is_empty() && !free::has_late_ends() {
        return;
    }
    let is_elsewhere = is_elsewhere();
    free::finish_late_frees_in(&|asked| !is_elsewhere(asked));
    free_those_due(|freed| is_mapped(&freed.allocation), |asked| !is_elsewhere(asked));
    let is_for_thread = |freed: &DeferredFree| match &freed.stage {
        Stage::Behind(event) => is_elsewhere(event.context()),
        stage => matches!(stage, Stage::Due),
    };
    if !lifecycle::is_forked()
        && !lifecycle::is_exiting()
        && (free::has_late_ends() || DEFERRED.has(is_for_thread))
        && DEFERRED.begin_thread()
        && !threads::spawn_worker("nvshare-free", run_thread)
    {
        DEFERRED.end_thread();
    }
}

/// The thread that frees memory. It ends when there is none left.
fn run_thread() {
    let mut pause = MIN_PAUSE;
    while !lifecycle::is_exiting() && (!DEFERRED.is_empty() || free::has_late_ends()) {
        free::finish_late_frees();
        look(|_| true);
        DEFERRED.note_look();
        let is_urgent = DEFERRED.is_urgent();
        let may_end = |due: &Arc<Allocation>| {
            is_urgent || is_mapped(due) || Drain::of(due.context.device()).poll() == 0
        };
        let begin = |due: Arc<Allocation>| {
            DEFERRED.begin_due(|freed| Arc::ptr_eq(&freed.allocation, &due), By::OwnThread)
        };
        let due = DEFERRED.first_due().filter(may_end).and_then(begin);
        if due.is_some_and(|allocation| free_due(&allocation)) {
            pause = MIN_PAUSE;
        } else {
            threads::sleep(pause);
            let longest = if DEFERRED.is_awaited() { MIN_PAUSE } else { MAX_PAUSE };
            pause = (pause * 2).min(longest);
        }
    }
    // The next call of [`free_without_waiting`] finds what is freed from here on.
    DEFERRED.end_thread();
}

/// An allocation that waits for memory that was freed.
#[derive(Debug)]
struct Waiter {
    begin: Instant,
    is_urgent: bool,
    /// The thread's looks before the wait began.
    looks_before: usize,
}

impl Waiter {
    fn new() -> Self {
        DEFERRED.begin_waiting();
        Self { begin: Instant::now(), is_urgent: false, looks_before: DEFERRED.looks() }
    }

    /// Frees what can be freed by now, and presses for the rest after a while. Returns whether more will be free soon. With
    /// `for_work`, memory is that also if work before its free is not complete.
    fn look_again(&mut self, for_work: bool) -> bool {
        free_without_waiting();
        if !self.is_urgent && self.begin.elapsed() >= PATIENCE {
            self.is_urgent = true;
            DEFERRED.press();
        }
        // The second look has begun since then.
        let is_looked_at = DEFERRED.looks().wrapping_sub(self.looks_before) >= 2;
        let is_elsewhere = is_elsewhere();
        let is_soon_free = |freed: &DeferredFree| match &freed.stage {
            Stage::Behind(event) => for_work || (!is_looked_at && is_elsewhere(event.context())),
            Stage::Due | Stage::BeingFreed(_) => true,
        };
        !DEFERRED.is_empty() && DEFERRED.has(is_soon_free)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        DEFERRED.end_waiting(self.is_urgent);
    }
}

/// The frees that an allocation may wait for before it is refused.
#[derive(Debug)]
pub(super) struct LateFrees {
    /// [`free::ended_late`] before the allocation was last tried.
    seen: usize,
    /// When it first waited.
    begin: Option<Instant>,
}

impl LateFrees {
    /// An allocation is about to be tried for the first time.
    pub(super) fn begin() -> Self {
        Self { seen: free::ended_late(), begin: None }
    }

    /// Waits for memory that ends later than the program freed it. Returns whether some has ended since the allocation
    /// was last tried, so that it is worth another try. All tries together take [`MAX_WAIT`] at most: another thread may
    /// free memory over and over, and none of it may ever do.
    ///
    /// `is_enough`: whether the allocation could be made with this many bytes of the device back. Then it waits for the work before their
    /// frees, too. The driver's own pools do the same for an allocation that would fail otherwise
    /// (`CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES`).
    pub(super) fn wait(&mut self, device: CUdevice, is_enough: impl Fn(u64) -> bool) -> bool {
        // In a forked child the driver refuses every allocation.
        if lifecycle::is_forked() {
            return false;
        }
        let mut waiter = Waiter::new();
        let begin = *self.begin.get_or_insert(waiter.begin);
        let is_in_time = || begin.elapsed() < MAX_WAIT && !lifecycle::is_exiting();
        while free::ended_late() == self.seen
            && (waiter.look_again(is_enough(DEFERRED.bytes_on(device))) || free::has_late_frees())
            && is_in_time()
        {
            threads::pause();
        }
        let more = free::ended_late() != self.seen && is_in_time();
        self.seen = free::ended_late();
        more
    }
}

/// Removes the memory of a context that has ended.
pub(crate) fn forget_context(context: &Arc<Context>) {
    // The events are dropped here, without the lock.
    drop(DEFERRED.remove_context(context));
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
        DEFERRED.add_due(&old);
        assert!(is_freed(BASE), "it is being freed");
        // The driver has freed it, and another thread has the address.
        allocations::insert(&new);
        assert!(!is_freed(BASE) && !is_listed(&old));
        forget_freed(&old);
        assert!(!is_freed(BASE) && is_listed(&new));
        allocations::remove(BASE);
    }

    #[test]
    fn memory_whose_context_may_end_is_freed_later() {
        const BASE: CUdeviceptr = 0x62_1000;
        let context = contexts::learn(CUcontext(0x62_0000 as *mut _), 62);
        let allocation =
            Arc::new(Allocation::new(BASE, 8, 62, Arc::clone(&context), Kind::DeviceAsManaged, 0));
        allocations::insert(&allocation);
        DEFERRED.add_due(&allocation);
        let take = || DEFERRED.begin_due(|freed| freed.is_in(&context), By::Caller);
        context.life().end();
        assert!(!free_due(&take().unwrap()) && is_freed(BASE));
        // The driver has ended it after all.
        context.life().over();
        assert!(free_due(&take().unwrap()) && !is_freed(BASE));
        allocations::remove(BASE);
    }
}
