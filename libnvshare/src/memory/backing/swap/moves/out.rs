//! Out to the host: a chunk is copied as far as it has to be, and then unmapped.

use std::sync::Arc;

use nvshare_proto::HandOverPhase::{CopyOut, Look, Unmap};

use super::{Begun, may_go_on, stop, stop_at_cut};
use crate::memory::allocations::{self, Allocation};
use crate::memory::backing::Evicted;
use crate::memory::backing::swap::chunks::{in_parts, take};
use crate::memory::backing::swap::content::{self, Leaving, Looked};
use crate::memory::backing::swap::flights::{Completion, Flight, Queue};
use crate::memory::backing::swap::order::{self, ChunkToMove};
use crate::memory::devices::Device;
use crate::memory::exports;
use crate::memory::mapping::host_pool::{self, NoSlots};
use crate::memory::mapping::{Chunk, Mapped, copies};
use crate::process::phases::Laps;
use crate::work::{contexts, gate};

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
pub(in super::super) fn evict(device: &'static Device, wanted: u64, report: &mut dyn FnMut(u64)) -> Evicted {
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
