//! Back to the card: memory is mapped for a chunk as soon as there is room, and what it held is copied.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use nvshare_client::machine::ROOM_IS_LATE;
use nvshare_proto::HandOverPhase::{CopyIn, Map};

use super::{Begun, may_go_on, stop, stop_at_cut};
use crate::driver;
use crate::driver::types::{CUdeviceptr, CUmemHandle, CUresult, CUstream};
use crate::memory::allocations::Allocation;
use crate::memory::backing::swap::chunks::{Cut, Part, copy_parts, in_parts, take};
use crate::memory::backing::swap::flights::{Completion, Flight, Queue};
use crate::memory::backing::swap::order::{self, ChunkToMove};
use crate::memory::backing::swap::{content, lost};
use crate::memory::backing::{Restored, WithoutRoom};
use crate::memory::devices::Device;
use crate::memory::mapping::at_hand::AtHand;
use crate::memory::mapping::copies::HostCopy;
use crate::memory::mapping::{Chunk, GRANULE, Mapped, destroy, host_pool, peers};
use crate::process::phases::Laps;
use crate::process::threads;
use crate::work::contexts::{self, Context};
use crate::work::gate;

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
pub(in super::super) fn restore(
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
