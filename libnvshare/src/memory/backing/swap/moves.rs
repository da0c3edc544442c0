//! Chunks on their way: out to the host, back to the card.
//!
//! Copies are begun ahead as far as the link needs to stay busy, and no further. Copies of other programs wait until all
//! queued copies are over (measured). A chunk that is out is unmapped at once, so room appears while the next ones are
//! still under way. A chunk is given up only when its copy is known to be complete, and touched only when its copy back is.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use nvshare_client::machine::ROOM_IS_LATE;
use nvshare_proto::HandOverPhase::{CopyIn, CopyOut, Look, Map, Unmap};
use nvshare_proto::ThrottledLine;
use nvshare_proto::units::MIB;

use super::chunks::{Cut, Part, copy_parts, in_parts, take};
use super::content::{self, Leaving, Looked};
use super::flights::{Completion, Flight, Queue};
use super::lost;
use super::order::{self, ChunkToMove};
use crate::driver;
use crate::driver::types::{CUdeviceptr, CUmemHandle, CUresult, CUstream};
use crate::memory::allocations::{self, Allocation};
use crate::memory::backing::{Evicted, Restored, WithoutRoom};
use crate::memory::devices::Device;
use crate::memory::mapping::at_hand::AtHand;
use crate::memory::mapping::copies::HostCopy;
use crate::memory::mapping::host_pool::{self, NoSlots};
use crate::memory::mapping::{Chunk, GRANULE, Mapped, Pin, copies, destroy, peers};
use crate::memory::{exports, pins};
use crate::process::phases::Laps;
use crate::process::{log, threads};
use crate::work::contexts::{self, Context};
use crate::work::gate;

/// The result of an attempt to begin a move.
enum Begun {
    Flying(Flight),
    /// This chunk has nothing to move.
    Nothing,
    /// There is no room at the chunk's destination.
    Full,
    /// The process lacks room for this many bytes of the chunk.
    Lacks(u64),
    /// No more of this allocation moves.
    Stopped,
}

/// The move stops because of a driver's error, or because the context ends.
fn stop(allocation: &Allocation, error: Option<CUresult>) -> Begun {
    match error {
        Some(error) if error.ends_all_work() => pin_context(&allocation.context_to_move_in(), error),
        Some(error) => {
            static FAILS: ThrottledLine = ThrottledLine::new(log::warn);
            FAILS.say(format_args!("moving memory at {:#x}: {error:?}", allocation.base));
        }
        None => {}
    }
    Begun::Stopped
}

/// A chunk stays where it was, though a part of it may have been copied.
fn stop_at_cut(allocation: &Allocation, cut: Cut) -> Begun {
    match cut {
        Cut::Unwanted => {
            log::debug(format_args!("a move at {:#x} is given up between two of its parts", allocation.base));
            Begun::Stopped
        }
        Cut::Gone => stop(allocation, None),
        Cut::Failed(error) => stop(allocation, error),
    }
}

/// Lets contexts end between two parts of a move. Returns whether the move goes on: not if the memory is being freed.
fn may_go_on(allocation: &Allocation) -> bool {
    contexts::let_them_end(|| allocation.is_leaving());
    !allocation.is_leaving()
}

/// A context is broken: its memory is not copied any more, and counts as immovable.
pub(super) fn pin_context(context: &Arc<Context>, error: CUresult) {
    let mut bytes = 0;
    allocations::each_mapped(|allocation| {
        let is_of_context = || Arc::ptr_eq(&allocation.context_to_move_in(), context);
        if allocation.mapped.is_some() && is_of_context() && pins::pin_for(allocation, Pin::ForGood) {
            bytes += allocation.residency().resident_bytes();
        }
    });
    if bytes > 0 {
        let why =
            if error.is_of_card() { "it is lost" } else { "the program's own work has broken its context" };
        log::warn(format_args!("{} MiB stay on the card: {why} ({error:?})", bytes / MIB));
    }
}

/// How an eviction goes on after a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AfterChunk {
    /// The chunk leaves, or has nothing to move.
    GoesOn,
    /// The host has no memory for it.
    HostIsFull,
    Stops,
}

/// An eviction that is under way.
struct Evicting<'a> {
    device: &'static Device,
    looked: Looked,
    laps: Laps,
    queue: Queue,
    /// Bytes of the chunks that have begun to leave.
    begun: u64,
    out: Evicted,
    /// Called for each chunk that has left the card.
    report: &'a mut dyn FnMut(u64),
}

impl Evicting<'_> {
    /// Begins to move a chunk out.
    fn begin(
        &mut self,
        allocation: &Arc<Allocation>,
        mapped: &Mapped,
        index: usize,
        host_is_full: bool,
    ) -> AfterChunk {
        match begin_out(allocation, mapped, index, &self.looked, host_is_full) {
            Begun::Flying(flight) => {
                self.begun += flight.bytes;
                // A chunk that is not copied does not wait for the copies of others.
                if matches!(flight.completion, Completion::Nothing) {
                    self.land(flight)
                } else {
                    self.queue.push(flight);
                    self.laps.end(CopyOut);
                }
                AfterChunk::GoesOn
            }
            Begun::Nothing => AfterChunk::GoesOn,
            Begun::Full => AfterChunk::HostIsFull,
            Begun::Lacks(_) | Begun::Stopped => AfterChunk::Stops,
        }
    }

    /// Unmaps a chunk whose copies are over.
    fn land(&mut self, flight: Flight) {
        let landed = land_out(flight, self.device);
        self.laps.end(Unmap);
        self.out += landed;
        if landed.left > 0 {
            (self.report)(landed.left);
        }
    }

    /// Lands what has arrived, and waits until no more is under way than that.
    fn land_until(&mut self, is_enough: impl Fn(&Queue) -> bool) {
        while !is_enough(&self.queue) || self.queue.first_is_over() {
            let Some(flight) = self.queue.wait_and_pop() else { return };
            self.laps.end(CopyOut);
            self.land(flight);
        }
    }
}

/// Moves `wanted` bytes of a device's memory to the host, from the ends of the largest allocations, and rather a few more
/// than fewer. Calls `report` for each chunk that has left the card. Returns the bytes that have left, and those that were copied.
pub(super) fn evict(device: &'static Device, wanted: u64, report: &mut dyn FnMut(u64)) -> Evicted {
    let mut laps = Laps::begin(device.uuid());
    let looked = content::look(device, wanted);
    let mut order = order::leaving(device, wanted, &looked);
    if looked.is_any() {
        laps.end(Look);
    }
    let (queue, out) = (Queue::default(), Evicted::default());
    let mut evicting = Evicting { device, looked, laps, queue, begun: 0, out, report };
    while let Some(ChunkToMove { allocation, index, .. }) = order.next(evicting.queue.is_full()) {
        // If one cannot leave, the loop below tries the rest and all others.
        let Some(mapped) = &allocation.mapped else { break };
        match evicting.begin(&allocation, mapped, index, false) {
            AfterChunk::GoesOn => {}
            AfterChunk::HostIsFull => order.drop_copies(),
            AfterChunk::Stops => break,
        }
        evicting.land_until(|queue| !queue.is_full() || !order.has_only_copies());
    }
    'all: for allocation in allocations::of_device(device.ordinal) {
        let Some(mapped) = allocation.mapped.as_ref().filter(|mapped| !mapped.is_pinned()) else { continue };
        let mut host_is_full = false;
        for index in (0..mapped.count()).rev() {
            if evicting.begun >= wanted {
                break 'all;
            }
            evicting.land_until(|queue| !queue.is_full());
            match evicting.begin(&allocation, mapped, index, host_is_full) {
                AfterChunk::GoesOn => {}
                // Another context may have memory of the host, and a smaller chunk may fit there.
                AfterChunk::HostIsFull => host_is_full = true,
                AfterChunk::Stops => break,
            }
        }
    }
    evicting.land_until(|_| false);
    evicting.looked.log();
    evicting.out
}

/// Begins to move a chunk out. `host_is_full`: only chunks leave that need no more host memory. No work has touched them since they
/// came, or nothing of them has to be copied. They make room for the clients that had made room for them.
fn begin_out(
    allocation: &Arc<Allocation>,
    mapped: &Mapped,
    index: usize,
    looked: &Looked,
    host_is_full: bool,
) -> Begun {
    contexts::let_them_end(|| allocation.is_leaving());
    if !exports::withdraw(allocation.id) {
        return Begun::Nothing;
    }
    let on_card = |chunk: &mut Chunk| {
        let is_untouched = chunk.untouched_in.is_some() && chunk.untouched_in == gate::closed_period();
        let is_copied = || looked.to_copy(allocation.base + chunk.offset, chunk.bytes, &chunk.host) > 0;
        let leaves = chunk.physical.is_some() && (is_untouched || !host_is_full || !is_copied());
        leaves.then(|| (chunk.offset, chunk.bytes, std::mem::take(&mut chunk.host), is_untouched))
    };
    let Some((offset, bytes, had, is_untouched)) = take(allocation, mapped, index, on_card) else {
        return Begun::Nothing;
    };
    let (context, at) = (&allocation.context_to_move_in(), allocation.base + offset);
    let leaving = if is_untouched {
        host_pool::give_back(copies::slots(had));
        Ok(Leaving::without_contents())
    } else {
        Leaving::begin(context, at, bytes, had, looked)
    };
    let leaving = match leaving {
        Ok(leaving) => leaving,
        Err((had, why)) => {
            mapped.settle(index, |chunk| chunk.host = had);
            return match why {
                NoSlots::Full => Begun::Full,
                NoSlots::Gone => Begun::Stopped,
                NoSlots::Broken(error) => stop(allocation, Some(error)),
            };
        }
    };
    let copied = if leaving.is_copied() {
        let goes_on = || may_go_on(allocation);
        in_parts(context, at, bytes, goes_on, |part, at, stream| leaving.copy(part, at, stream))
    } else {
        Ok(None)
    };
    let cut = match copied {
        Ok(completion) => {
            let copied = leaving.copied_bytes();
            let completion = match completion {
                Some(event) => Completion::Event(event),
                None if copied > 0 => Completion::Later(Arc::clone(context)),
                None => Completion::Nothing,
            };
            let (allocation, leaving) = (Arc::clone(allocation), Some(leaving));
            return Begun::Flying(Flight {
                allocation,
                index,
                offset,
                bytes,
                copied,
                completion,
                leaving,
                physical: None,
            });
        }
        Err(cut) => cut,
    };
    mapped.settle(index, |_| ());
    leaving.give_up();
    stop_at_cut(allocation, cut)
}

/// Ends the move of a chunk that leaves, after all its copies are over. Returns the bytes that have left the card, and those
/// that were copied.
fn land_out(flight: Flight, device: &Device) -> Evicted {
    let nothing = Evicted::default();
    let Flight { allocation, index, bytes, copied, completion, leaving, .. } = flight;
    let (Some(mapped), Some(leaving)) = (&allocation.mapped, leaving) else { return nothing };
    let context = &allocation.context_to_move_in();
    if let Completion::Failed(error) = completion {
        mapped.settle(index, |_| ());
        leaving.give_up();
        stop(&allocation, error);
        return nothing;
    }
    let mut host = Some(leaving.landed());
    let gone = mapped.settle(index, |chunk| {
        let _ = context.with(|| {
            mapped.destroy(allocation.base, chunk);
            Ok(())
        });
        if chunk.physical.is_some() {
            return false;
        }
        chunk.host = host.take().unwrap_or_default();
        chunk.untouched_in = None;
        allocation.residency().left(bytes);
        device.update(|account| account.unmap(bytes));
        true
    });
    host_pool::give_back(copies::slots(host.unwrap_or_default()));
    if gone == Some(true) { Evicted { left: bytes, copied } } else { nothing }
}

/// A restore that is under way.
struct Restoring<'a> {
    device: &'static Device,
    without_room: WithoutRoom,
    laps: Laps,
    queue: Queue,
    at_hand: AtHand,
    /// When the last chunk began to come.
    came_at: Instant,
    out: Restored,
    cancelled: &'a dyn Fn() -> bool,
}

impl Restoring<'_> {
    /// Begins to bring a chunk back. While room is still being made, waits for it.
    fn begin(&mut self, allocation: &Arc<Allocation>, mapped: &Mapped, index: usize) -> Begun {
        loop {
            let room_is_made =
                self.without_room == WithoutRoom::Wait && self.came_at.elapsed() < ROOM_IS_LATE;
            if !(room_is_made && self.waits_for_more(allocation)) {
                let begun = begin_in(allocation, mapped, index, self);
                // Room may also come before the driver has the memory of the process that has left it.
                let waits = room_is_made && matches!(begun, Begun::Lacks(_) | Begun::Full);
                if !waits || (self.cancelled)() {
                    return begun;
                }
            } else if (self.cancelled)() {
                return Begun::Nothing;
            }
            self.land_or_pause();
        }
    }

    /// Whether a chunk waits for room that is still being made, so that more come with it.
    fn waits_for_more(&mut self, allocation: &Allocation) -> bool {
        let (account, at_hand) = (self.device.account(), &mut self.at_hand);
        let more = || Ok(at_hand.waits_for_more(account.unused_room(), account.unmapped(), Instant::now()));
        matches!(allocation.context_to_move_in().with(more), Ok(Ok(true)))
    }

    /// Lands a chunk that has come, while another one waits for room. Where none has, pauses.
    fn land_or_pause(&mut self) {
        self.queue.record_all();
        if self.queue.first_is_over() {
            self.land();
        } else {
            threads::pause();
            // Without copies under way, it only waits for room.
            if self.queue.is_empty() { self.laps.skip() } else { self.laps.end(CopyIn) }
        }
    }

    /// Waits for the first chunk that is under way, and ends its move.
    fn land(&mut self) {
        if let Some(flight) = self.queue.wait_and_pop() {
            if flight.copied > 0 {
                self.laps.end(CopyIn);
            }
            land_in(flight, self.device, &mut self.out);
        }
    }
}

/// Brings a device's memory back, as far as there is room; stops soon when it is `cancelled`.
pub(super) fn restore(
    device: &'static Device,
    without_room: WithoutRoom,
    cancelled: &dyn Fn() -> bool,
) -> Restored {
    let mut order = order::coming(device);
    let laps = Laps::begin(device.uuid());
    let (queue, at_hand, out) = (Queue::default(), AtHand::default(), Restored::default());
    let came_at = Instant::now();
    let mut restoring = Restoring { device, without_room, laps, queue, at_hand, came_at, out, cancelled };
    while let Some(ChunkToMove { allocation, index, .. }) = order.next(restoring.queue.is_full()) {
        let Some(mapped) = &allocation.mapped else { continue };
        if cancelled() {
            break;
        }
        match restoring.begin(&allocation, mapped, index) {
            Begun::Flying(flight) => {
                restoring.came_at = Instant::now();
                let is_copied = flight.copied > 0;
                restoring.queue.push(flight);
                if is_copied {
                    restoring.laps.end(CopyIn);
                }
            }
            Begun::Lacks(bytes) => restoring.out.lacks_mapped += bytes,
            // The driver has less memory than the scheduler says: some that left is not back yet, or others have it.
            Begun::Full => {
                restoring.out.is_full = true;
                break;
            }
            Begun::Nothing | Begun::Stopped => {}
        }
        while restoring.queue.first_is_over() || restoring.queue.is_full() && order.has_only_copies() {
            restoring.land();
        }
    }
    while !restoring.queue.is_empty() {
        restoring.land();
    }
    lost::give_up(device);
    restoring.out
}

fn begin_in(
    allocation: &Arc<Allocation>,
    mapped: &Mapped,
    index: usize,
    restoring: &mut Restoring<'_>,
) -> Begun {
    let Restoring { device, cancelled, .. } = *restoring;
    contexts::let_them_end(|| allocation.is_leaving());
    let mut lacks = 0;
    let taken = take(allocation, mapped, index, |chunk| {
        if chunk.physical.is_some() {
            return None;
        }
        if !device.update(|account| account.charge_all(chunk.bytes)) {
            lacks = chunk.bytes;
            return None;
        }
        Some((chunk.offset, chunk.bytes, chunk.host.clone()))
    });
    let Some((offset, bytes, host)) = taken else {
        return if lacks > 0 { Begun::Lacks(lacks) } else { Begun::Nothing };
    };
    let (context, at) = (&allocation.context_to_move_in(), allocation.base + offset);
    let physical = match create(context, mapped, at, bytes, device, &mut restoring.at_hand) {
        Ok(physical) => physical,
        Err(error) => {
            stay_on_host(mapped, index, bytes, device);
            return match error {
                Some(CUresult::OUT_OF_MEMORY) => Begun::Full,
                Some(error) => stop_and_note_error(allocation, error),
                None => {
                    lost::note_end(context);
                    Begun::Stopped
                }
            };
        }
    };
    restoring.laps.end(Map);
    let copied = if host.is_empty() {
        Ok(None)
    } else {
        let goes_on = || may_go_on(allocation) && !cancelled();
        in_parts(context, at, bytes, goes_on, |part, at, stream| copy_back(&host, part, at, stream))
    };
    let completion = match copied {
        Ok(Some(event)) => Completion::Event(event),
        Ok(None) if host.is_empty() => Completion::Nothing,
        Ok(None) => Completion::Later(Arc::clone(context)),
        // In a broken context the program finds the error and never its data.
        Err(Cut::Failed(Some(error))) if error.ends_all_work() => {
            stop(allocation, Some(error));
            Completion::Nothing
        }
        // If the context has ended since the chunk was mapped, memory that belongs to no context comes back in another one.
        Err(cut) => {
            undo_map(at, bytes, physical);
            stay_on_host(mapped, index, bytes, device);
            return match cut {
                Cut::Failed(Some(error)) => stop_and_note_error(allocation, error),
                cut => stop_at_cut(allocation, cut),
            };
        }
    };
    let copied = host.iter().filter(|copy| copy.slot().is_some()).count() as u64 * GRANULE;
    let (allocation, leaving) = (Arc::clone(allocation), None);
    let physical = Some(physical);
    Begun::Flying(Flight { allocation, index, offset, bytes, copied, completion, leaving, physical })
}

/// Creates and maps memory on the card for a chunk that comes back.
///
/// # Errors
/// The driver's error; none: the context ends.
fn create(
    context: &Arc<Context>,
    mapped: &Mapped,
    at: CUdeviceptr,
    bytes: u64,
    device: &Device,
    at_hand: &mut AtHand,
) -> Result<CUmemHandle, Option<CUresult>> {
    let made = context.with(|| {
        // Chunks that come have room, as far as there is any, and room that is not used has chunks that come.
        let account = device.account();
        let coming = bytes + account.unused_room().min(account.unmapped().saturating_sub(bytes));
        at_hand.prepare(bytes, coming, device.ordinal);
        let physical = mapped.create(at, bytes, device.ordinal)?;
        let allowed = peers::allow(mapped, at, bytes, device.ordinal);
        allowed.inspect_err(|_| undo_map(at, bytes, physical))?;
        Ok(physical)
    });
    made.map_err(|_| None)?.map_err(Some)
}

/// Begins to copy granules of a chunk back, which are at this address.
fn copy_back(
    host: &[HostCopy],
    granules: Range<usize>,
    at: CUdeviceptr,
    stream: CUstream,
) -> Result<(), CUresult> {
    let copies = host.get(granules).unwrap_or_default();
    copy_parts(at, copies.iter().map(Part::from), |part, at, bytes| match part {
        Part::Copied(slot) => driver::copy_in(at, slot.memory(), bytes, stream),
        Part::Zero => driver::fill_with_zeros(at, bytes, stream),
        Part::Nothing => Ok(()),
    })
}

/// The driver does not let a chunk come back.
fn stop_and_note_error(allocation: &Allocation, error: CUresult) -> Begun {
    lost::note_failure(&allocation.context_to_move_in(), error);
    stop(allocation, Some(error))
}

/// A chunk does not come back now; its contents stay where they were.
fn stay_on_host(mapped: &Mapped, index: usize, bytes: u64, device: &Device) {
    device.update(|account| account.uncharge(bytes));
    mapped.settle(index, |_| ());
}

/// Undoes a mapping of a moment ago, and releases its memory.
fn undo_map(at: CUdeviceptr, bytes: u64, physical: CUmemHandle) {
    destroy(0, &mut Chunk { physical: Some(physical), ..Chunk::absent(at, bytes) });
}

/// Ends the move of a chunk that comes back, after all its copies are over.
fn land_in(flight: Flight, device: &Device, result: &mut Restored) {
    let Flight { allocation, index, offset, bytes, copied, completion, physical, .. } = flight;
    let Some(mapped) = &allocation.mapped else { return };
    if let Completion::Failed(error) = completion {
        match error {
            Some(error) if !error.ends_all_work() => stop_and_note_error(&allocation, error),
            error => stop(&allocation, error),
        };
        // In a broken context the program finds the error. In other cases no work may see contents that are not complete.
        if !error.is_some_and(CUresult::ends_all_work) {
            if let Some(physical) = physical {
                undo_map(allocation.base + offset, bytes, physical);
            }
            return stay_on_host(mapped, index, bytes, device);
        }
    }
    let settled = mapped.settle(index, |chunk| {
        if let Some(physical) = physical {
            let shown = mapped.show(offset, bytes, physical);
            shown.inspect_err(|_| undo_map(allocation.base + offset, bytes, physical))?;
        }
        chunk.physical = physical;
        chunk.exportable = mapped.is_shared();
        let had_contents = !chunk.host.is_empty();
        // Before the account: with the last absent bytes back, the gate may open, and the number would be that of the opening.
        chunk.untouched_in = if had_contents { None } else { gate::closed_period() };
        allocation.residency().restored(bytes);
        device.update(|account| account.map(bytes));
        let (kept, free) = content::keep(std::mem::take(&mut chunk.host));
        chunk.host = kept;
        Ok((had_contents, free))
    });
    let (had_contents, free) = match settled {
        Some(Ok(settled)) => settled,
        // Its contents stay on the host.
        Some(Err(error)) => {
            stop_and_note_error(&allocation, error);
            return device.update(|account| account.uncharge(bytes));
        }
        None => return,
    };
    lost::note_success(&allocation.context_to_move_in());
    result.back += bytes;
    result.had_contents += if had_contents { bytes } else { 0 };
    result.copied += copied;
    host_pool::give_back(free);
}
