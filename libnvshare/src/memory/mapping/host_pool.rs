//! Page-locked memory of the host, for chunks that are not on the card.
//!
//! A pool belongs to one context, in which the driver page-locks it. The page-lock ends with the context (measured), and so do
//! the allocations whose contents are in the pool. Contents of memory that belongs to no context stay, in memory that is not
//! page-locked any more, until they are back on the card. A pool grows in segments of anonymous memory, in huge pages where the
//! kernel has them. Several threads touch a segment, which is ten times as fast as `cuMemHostAlloc` (measured). Forked children
//! and core dumps do not contain it. Segments come from the scheduler, as far as it [hands out any](supply). All others are
//! charged to the process's control group, which bounds their number. A pool grows to what is expected to leave the card, and
//! shrinks by whole segments when it has more than that and one segment.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nvshare_proto::{SEGMENT, ThrottledLine};

use super::GRANULE;
use super::segment::{PageLockError, Segment};
use super::supply::{self, Supplied};
use crate::driver::types::CUresult;
use crate::process::lock::lock;
use crate::process::{host_memory, lifecycle, log};
use crate::work::contexts::Context;
use crate::work::standstill;

/// A granule of a pool, by its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::memory) struct Slot(usize);

impl Slot {
    pub(in crate::memory) fn memory(self) -> *mut c_void {
        self.0 as *mut c_void
    }

    /// Whether the other slot is the next in memory.
    pub(in crate::memory) fn is_before(self, other: Self) -> bool {
        self.0 + GRANULE as usize == other.0
    }
}

#[derive(Debug, Default)]
struct Inner {
    segments: Vec<Segment>,
    /// Free parts: address and bytes; no part touches another.
    free: BTreeMap<usize, usize>,
    free_bytes: u64,
    bytes: u64,
}

impl Inner {
    fn add_free(&mut self, address: usize, bytes: usize) {
        self.free_bytes += bytes as u64;
        let (mut address, mut bytes) = (address, bytes);
        if let Some((&before, &length)) = self.free.range(..address).next_back()
            && before + length == address
        {
            self.free.remove(&before);
            (address, bytes) = (before, bytes + length);
        }
        if let Some(after) = self.free.remove(&(address + bytes)) {
            bytes += after;
        }
        self.free.insert(address, bytes);
    }

    /// Adds a segment that nothing uses.
    fn put_in(&mut self, segment: Segment) {
        self.bytes += segment.bytes as u64;
        self.add_free(segment.address, segment.bytes);
        self.segments.push(segment);
    }

    /// Whether nothing uses these bytes.
    fn is_free(&self, address: usize, bytes: usize) -> bool {
        let around = self.free.range(..=address).next_back();
        around.is_some_and(|(&from, &length)| from + length >= address + bytes)
    }

    /// Takes out a segment that nothing uses, if it `goes`.
    fn take_out(&mut self, goes: impl Fn(&Segment) -> bool) -> Option<Segment> {
        let is_unused = |segment: &&Segment| self.is_free(segment.address, segment.bytes);
        let found = self.segments.iter().position(|segment| goes(segment) && is_unused(&segment))?;
        let segment = self.segments.swap_remove(found);
        let (&from, &bytes) = self.free.range(..=segment.address).next_back()?;
        self.free.remove(&from);
        let (end, behind) = (segment.address + segment.bytes, from + bytes);
        // Segments may lie side by side.
        if segment.address > from {
            self.free.insert(from, segment.address - from);
        }
        if behind > end {
            self.free.insert(end, behind - end);
        }
        self.free_bytes -= segment.bytes as u64;
        self.bytes -= segment.bytes as u64;
        Some(segment)
    }

    /// For each of the scheduler's segments that would be free without these slots: its bytes, and those of the slots that it has.
    fn freed_without(&self, slots: &BTreeSet<Slot>) -> Vec<(u64, Vec<Slot>)> {
        let of_scheduler = self.segments.iter().filter(|segment| segment.number.is_some());
        let freed = |segment: &Segment| {
            let all = (segment.address..segment.address + segment.bytes).step_by(GRANULE as usize);
            let used: Vec<Slot> = all.filter(|&at| !self.is_free(at, GRANULE as usize)).map(Slot).collect();
            used.iter().all(|slot| slots.contains(slot)).then_some((segment.bytes as u64, used))
        };
        of_scheduler.filter_map(freed).collect()
    }

    /// A slot is not used any more. False: it belongs to another pool.
    fn give_back(&mut self, slot: Slot) -> bool {
        let is_here = self.segments.iter().any(|segment| segment.contains(slot.0));
        if is_here {
            self.add_free(slot.0, GRANULE as usize);
        }
        is_here
    }

    /// Slots for `bytes`, from few parts: all or nothing.
    fn take(&mut self, bytes: u64) -> Option<Vec<Slot>> {
        if self.free_bytes < bytes {
            return None;
        }
        let (mut slots, mut left) = (Vec::new(), bytes as usize);
        while left > 0 {
            let fitting = self.free.iter().find(|&(_, &length)| length >= left);
            let largest = || self.free.iter().max_by_key(|&(_, &length)| length);
            let (&address, &length) = fitting.or_else(largest)?;
            let taken = length.min(left);
            self.free.remove(&address);
            if length > taken {
                self.free.insert(address + taken, length - taken);
            }
            slots.extend((address..address + taken).step_by(GRANULE as usize).map(Slot));
            left -= taken;
        }
        self.free_bytes -= bytes;
        Some(slots)
    }
}

/// The reason why there are no slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::memory) enum NoSlots {
    /// The host has no room for them.
    Full,
    /// The context ends.
    Gone,
    /// The context is broken.
    Broken(CUresult),
}

/// For this long after a refusal, the driver is not asked to page-lock memory of the process's own. Each attempt would touch a
/// segment in vain.
const AGAIN_AFTER: Duration = Duration::from_secs(10);

/// Threads may be kept from submitting work for this long, so that memory goes to others that lack it.
const OTHERS_LACK: Duration = Duration::from_millis(100);

/// The page-locked memory of a context.
#[derive(Debug)]
pub(in crate::memory) struct HostPool {
    context: Arc<Context>,
    inner: Mutex<Inner>,
    /// Held by the thread that grows the pool.
    growing: Mutex<Option<Instant>>,
}

static POOLS: Mutex<Vec<Arc<HostPool>>> = Mutex::new(Vec::new());

/// The pool of a context.
pub(in crate::memory) fn of(context: &Arc<Context>) -> Arc<HostPool> {
    let mut pools = lock(&POOLS);
    // A move may have asked for the pool of a context that had just ended.
    pools.retain(|pool| Arc::ptr_eq(&pool.context, context) || pool.is_needed());
    if let Some(known) = pools.iter().find(|pool| Arc::ptr_eq(&pool.context, context)) {
        return Arc::clone(known);
    }
    let pool = HostPool { context: Arc::clone(context), inner: Mutex::default(), growing: Mutex::default() };
    let pool = Arc::new(pool);
    pools.push(Arc::clone(&pool));
    pool
}

/// A context has ended, and with it the page-lock of its pool, and the contents of its own memory there.
pub(crate) fn forget_context(context: &Arc<Context>) {
    lock(&POOLS).retain(|pool| !Arc::ptr_eq(&pool.context, context) || pool.is_in_use());
}

/// Slots are not used any more.
pub(in crate::memory) fn give_back(mut slots: Vec<Slot>) {
    if slots.is_empty() {
        return;
    }
    let mut pools = lock(&POOLS);
    for pool in pools.iter() {
        let mut inner = lock(&pool.inner);
        slots.retain(|slot| !inner.give_back(*slot));
    }
    pools.retain(|pool| pool.is_needed());
}

impl HostPool {
    fn is_in_use(&self) -> bool {
        let inner = lock(&self.inner);
        inner.free_bytes < inner.bytes
    }

    /// Whether the context lives, or contents are in the pool.
    fn is_needed(&self) -> bool {
        !self.context.life().is_over() || self.is_in_use()
    }

    /// Slots for `bytes`, growing the pool if necessary.
    ///
    /// # Errors
    /// The reason why there are none.
    pub(in crate::memory) fn take(&self, bytes: u64) -> Result<Vec<Slot>, NoSlots> {
        loop {
            match self.take_free(bytes) {
                Err(NoSlots::Full) => {}
                answer => return answer,
            }
            let mut refused = lock(&self.growing);
            let lacking = bytes.saturating_sub(lock(&self.inner).free_bytes);
            if lacking > 0 {
                self.grow(lacking, &mut refused)?;
            }
        }
    }

    /// Slots for `bytes`, as far as the pool has them.
    ///
    /// # Errors
    /// The reason why there are none.
    pub(in crate::memory) fn take_free(&self, bytes: u64) -> Result<Vec<Slot>, NoSlots> {
        let mut inner = lock(&self.inner);
        // The pool may have gone off the list: its segments end with it, whoever has slots. It goes only after this is so.
        if self.context.life().is_over() {
            return Err(NoSlots::Gone);
        }
        inner.take(bytes).ok_or(NoSlots::Full)
    }

    /// Grows by one segment, towards `wanted` bytes. `refused`: when the driver last refused memory of this process's own.
    fn grow(&self, wanted: u64, refused: &mut Option<Instant>) -> Result<(), NoSlots> {
        if !self.context.life().is_alive() {
            return Err(NoSlots::Gone);
        }
        let wanted = wanted.next_multiple_of(GRANULE);
        let asked = to_ask_for(wanted, self.bytes());
        let supplied = match supply::ask(asked) {
            Supplied::Refused if asked > wanted => supply::ask(wanted),
            supplied => supplied,
        };
        let from_scheduler = match supplied {
            Supplied::Segment(segment, file) => Segment::map_from_scheduler(segment, &file),
            Supplied::Refused => {
                static MORE: ThrottledLine = ThrottledLine::new(log::warn);
                MORE.say(format_args!(
                    "the scheduler has no more memory of the host for this program, which uses memory of its own"
                ));
                None
            }
            Supplied::Unavailable => None,
        };
        if let Some(segment) = from_scheduler {
            match self.register(segment) {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => {
                    supply::give_up();
                    log::warn(format_args!(
                        "the scheduler's memory cannot be page-locked here: {error:?}; this program uses memory of its own"
                    ));
                }
                Err(why) => return Err(why),
            }
        }
        // A refusal of the process's own memory says nothing about the scheduler's.
        if refused.is_some_and(|when| when.elapsed() < AGAIN_AFTER) {
            return Err(NoSlots::Full);
        }
        let segment = Self::own_segment(wanted.min(SEGMENT)).ok_or(NoSlots::Full)?;
        let bytes = segment.bytes as u64;
        match self.register(segment)? {
            Ok(()) => {
                *refused = None;
                Ok(())
            }
            Err(error) => {
                *refused = Some(Instant::now());
                log_refused(bytes, error);
                Err(NoSlots::Full)
            }
        }
    }

    /// Adds a segment to the pool, if the driver page-locks it. The inner error: the driver refuses.
    fn register(&self, mut segment: Segment) -> Result<Result<(), CUresult>, NoSlots> {
        match segment.page_lock(&self.context) {
            Ok(()) => {
                lock(&self.inner).put_in(segment);
                Ok(Ok(()))
            }
            Err(PageLockError::Driver(error)) if error.ends_all_work() => Err(NoSlots::Broken(error)),
            Err(PageLockError::Driver(error)) => Ok(Err(error)),
            Err(PageLockError::Gone) => Err(NoSlots::Gone),
        }
    }

    /// A segment of this process's own memory, as far as its control group allows.
    fn own_segment(bytes: u64) -> Option<Segment> {
        let segment = if host_memory::room() < bytes { None } else { Segment::new(bytes) }?;
        segment.prefault();
        Some(segment)
    }

    fn bytes(&self) -> u64 {
        lock(&self.inner).bytes
    }

    /// Gives memory back to the system, by whole segments, while the pool has more than `needed` bytes and one segment.
    fn shrink(&self, needed: u64) {
        while self.bytes() > needed + SEGMENT && !lifecycle::is_exiting() {
            let spare = usize::try_from(self.bytes().saturating_sub(needed)).unwrap_or(usize::MAX);
            let Some(segment) = lock(&self.inner).take_out(|segment| segment.bytes <= spare) else { return };
            if !self.release(segment, Duration::ZERO) {
                return;
            }
        }
    }

    /// Gives segments of the scheduler back that nothing uses, up to `bytes` and rather a few more than fewer. Returns how many bytes that are.
    fn give_up_unused(&self, bytes: u64) -> u64 {
        let mut given = 0;
        while given < bytes && !lifecycle::is_exiting() {
            let Some(segment) = lock(&self.inner).take_out(|segment| segment.number.is_some()) else { break };
            let bytes = segment.bytes as u64;
            if !self.release(segment, OTHERS_LACK) {
                break;
            }
            given += bytes;
        }
        given
    }

    /// Gives a segment back that is not in the pool any more. False: it cannot go now.
    ///
    /// `cuMemHostUnregister` waits for all work in flight, and threads that create or load something wait for it. On an H200, a host
    /// function waited for such a thread, without end. So the call is made only while none of the program's work runs.
    /// `keeps_out`: how long threads may be kept from submitting work for that.
    fn release(&self, mut segment: Segment, keeps_out: Duration) -> bool {
        match standstill::make_at_rest(keeps_out, || segment.unlock()) {
            Some(Ok(())) => true,
            // Work runs: the segment is tried again when memory is freed, or leaves the card. Or the context or the process is
            // ending: the segment ends with the pool.
            None | Some(Err(PageLockError::Gone)) => {
                lock(&self.inner).put_in(segment);
                false
            }
            // The driver still knows the addresses, as in a broken context: the segment can be used, and ends with the pool.
            Some(Err(PageLockError::Driver(error))) => {
                log::debug(format_args!("{} bytes stay page-locked: {error:?}", segment.bytes));
                lock(&self.inner).put_in(segment);
                false
            }
        }
    }
}

/// Whether a pool has more than a segment that nothing uses.
pub(in crate::memory) fn may_shrink() -> bool {
    lock(&POOLS).iter().any(|pool| lock(&pool.inner).free_bytes > SEGMENT)
}

/// Shrinks each pool to what it [needs](HostPool::shrink), as `needed` says.
pub(in crate::memory) fn shrink_all(needed: impl Fn(&Arc<Context>) -> u64) {
    supply::give_back_unused();
    let pools: Vec<Arc<HostPool>> = lock(&POOLS).clone();
    pools.iter().for_each(|pool| pool.shrink(needed(&pool.context)));
}

/// The slots, of these, that have to go so that segments of the scheduler with `bytes` in sum become free. The segments with
/// the fewest such slots are chosen.
pub(in crate::memory) fn that_free_segments(slots: &BTreeSet<Slot>, bytes: u64) -> BTreeSet<Slot> {
    let pools = lock(&POOLS);
    let mut freed: Vec<_> = pools.iter().flat_map(|pool| lock(&pool.inner).freed_without(slots)).collect();
    drop(pools);
    freed.sort_by_key(|(_, slots)| slots.len());
    let mut left = bytes;
    let is_wanted = |(bytes, _): &(u64, Vec<Slot>)| {
        let is_wanted = left > 0;
        left = left.saturating_sub(*bytes);
        is_wanted
    };
    freed.into_iter().take_while(is_wanted).flat_map(|(_, slots)| slots).collect()
}

/// Gives segments of the scheduler back that nothing uses, up to `bytes` and rather a few more than fewer.
pub(in crate::memory) fn give_up_unused(bytes: u64) {
    let pools: Vec<Arc<HostPool>> = lock(&POOLS).clone();
    pools.iter().fold(bytes, |left, pool| left.saturating_sub(pool.give_up_unused(left)));
}

fn log_refused(bytes: u64, error: CUresult) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        log::warn(format_args!(
            "{bytes} bytes of the host cannot be page-locked: {error:?}; what does not fit there stays on the card"
        ));
    }
}

/// The bytes that a pool of this size asks the scheduler for, if it lacks some. An owner may have few of the scheduler's segments, however
/// small they are, and evictions lack a little at a time. So a pool that has much asks for more.
const fn to_ask_for(lacking: u64, has: u64) -> u64 {
    let part = if has / 8 < SEGMENT { has / 8 } else { SEGMENT };
    let wanted = if lacking > part { lacking } else { part };
    wanted.next_multiple_of(GRANULE)
}

/// Grows the pool of a context to `bytes`, ahead of its use.
pub(in crate::memory) fn grow_ahead(context: &Arc<Context>, target: u64) {
    let pool = of(context);
    while !lifecycle::is_exiting() && context.life().is_alive() {
        let mut refused = lock(&pool.growing);
        let lacking = target.saturating_sub(pool.bytes());
        if lacking == 0 || pool.grow(lacking, &mut refused).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: usize = GRANULE as usize;

    #[test]
    fn a_few_hundred_segments_hold_much_however_little_is_lacking_at_a_time() {
        let (mut has, mut segments) = (0, 0);
        while has < 64 << 30 {
            has += to_ask_for(GRANULE, has);
            segments += 1;
        }
        assert!(segments < 400, "{segments}");
        assert_eq!([to_ask_for(3, 0), to_ask_for(5 * GRANULE, 8 * GRANULE)], [GRANULE, 5 * GRANULE]);
    }

    #[test]
    fn parts_that_touch_become_one_and_few_parts_are_taken() {
        let mut inner = Inner::default();
        inner.add_free(10 * G, 2 * G);
        inner.add_free(20 * G, 4 * G);
        inner.add_free(12 * G, G);
        assert_eq!(inner.free, BTreeMap::from([(10 * G, 3 * G), (20 * G, 4 * G)]));
        assert_eq!(inner.take(4 * GRANULE).unwrap(), [20, 21, 22, 23].map(|i| Slot(i * G)));
        assert_eq!(inner.take(4 * GRANULE), None, "all or nothing");
        inner.add_free(21 * G, G);
        assert_eq!(inner.take(4 * GRANULE).unwrap(), [10, 11, 12, 21].map(|i| Slot(i * G)));
        assert_eq!((inner.free_bytes, inner.free.len()), (0, 0));
        inner.add_free(13 * G, G);
        inner.add_free(11 * G, G);
        inner.add_free(12 * G, G);
        assert_eq!(inner.free, BTreeMap::from([(11 * G, 3 * G)]));
    }

    #[test]
    fn an_unused_segment_is_taken_out_and_its_neighbours_stay() {
        let mut inner = Inner::default();
        for at in [10, 12, 14, 20] {
            inner.segments.push(Segment::at(at * G, 2 * G, None));
            inner.add_free(at * G, 2 * G);
            inner.bytes += 2 * GRANULE;
        }
        assert_eq!(inner.take(6 * GRANULE).unwrap().len(), 6);
        assert!(
            inner.give_back(Slot(11 * G)) && inner.give_back(Slot(12 * G)) && inner.give_back(Slot(13 * G))
        );
        assert!(inner.give_back(Slot(14 * G)));
        let out = std::mem::ManuallyDrop::new(inner.take_out(|segment| segment.bytes <= 7 * G).unwrap());
        assert_eq!(out.address / G, 12);
        assert_eq!(inner.free, BTreeMap::from([(11 * G, G), (14 * G, G), (20 * G, 2 * G)]));
        assert_eq!((inner.bytes / GRANULE, inner.free_bytes / GRANULE), (6, 4));
        assert!(inner.take_out(|segment| segment.bytes <= G).is_none(), "it is too large");
        assert_eq!(std::mem::ManuallyDrop::new(inner.take_out(|_| true).unwrap()).address / G, 20);
        assert!(inner.take_out(|_| true).is_none(), "the others are in use");
        inner.segments.drain(..).for_each(std::mem::forget);
    }

    #[test]
    fn segments_of_the_scheduler_are_freed_without_their_copies() {
        let mut inner = Inner::default();
        for (at, number) in [(10, Some(1)), (20, Some(2)), (30, None), (40, Some(3)), (50, Some(4))] {
            inner.segments.push(Segment::at(at * G, 2 * G, number));
        }
        inner.add_free(11 * G, G);
        inner.add_free(50 * G, 2 * G);
        let copies = [10, 20, 30, 31, 40, 41].map(|at| Slot(at * G)).into();
        // One has something else in it, one is the process's own.
        let slots = |at: &[usize]| at.iter().map(|at| Slot(at * G)).collect::<Vec<_>>();
        let bytes = 2 * GRANULE;
        let freed = [(bytes, slots(&[10])), (bytes, slots(&[40, 41])), (bytes, slots(&[]))];
        assert_eq!(inner.freed_without(&copies), freed);
        inner.segments.drain(..).for_each(std::mem::forget);
    }

    #[test]
    fn a_segment_whose_context_is_ending_ends_with_the_pool() {
        let context = crate::work::contexts::learn(crate::driver::types::CUcontext(0x50_0000 as *mut _), 0);
        let pool = of(&context);
        let (number, bytes) = (7_000_002, 2 * GRANULE);
        let mut segment = Segment::new(bytes).unwrap().with_page_lock(&context);
        segment.number = Some(number);
        lock(&pool.inner).put_in(segment);
        context.life().end();
        assert_eq!(pool.give_up_unused(bytes), 0);
        assert!(!supply::is_given_back(number), "the driver still knows the addresses");
        context.life().over();
        forget_context(&context);
        drop(pool);
        assert!(supply::is_given_back(number));
    }

    /// A mover may still have the pool.
    #[test]
    fn a_pool_whose_context_has_ended_hands_out_no_slots() {
        let context = crate::work::contexts::learn(crate::driver::types::CUcontext(0x52_0000 as *mut _), 0);
        let pool = of(&context);
        lock(&pool.inner).put_in(Segment::new(2 * GRANULE).unwrap());
        let taken = pool.take(GRANULE).unwrap();
        context.life().over();
        forget_context(&context);
        assert_eq!(pool.take(GRANULE), Err(NoSlots::Gone));
        give_back(taken);
        assert_eq!(Arc::strong_count(&pool), 1, "it stayed on the list until its slots were back");
    }

    #[test]
    fn slots_know_their_neighbours() {
        assert!(Slot(4 * G).is_before(Slot(5 * G)));
        assert!(!Slot(4 * G).is_before(Slot(6 * G)) && !Slot(5 * G).is_before(Slot(4 * G)));
    }
}
