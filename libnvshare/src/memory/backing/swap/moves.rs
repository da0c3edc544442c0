//! Chunks on their way: out to the host, back to the card.
//!
//! Copies are begun ahead as far as the link needs to stay busy, and no further: copies of other programs wait behind
//! them (measured: for as long as all queued copies take). A chunk that is out is unmapped at once, so room appears
//! while the next ones are still under way.

use std::collections::VecDeque;
use std::sync::Arc;

use nvshare_proto::units::MIB;

use super::chunks::{Part, begin, copy_parts, quiesce, take, wait};
use super::content::{self, Leaving, Looked};
use crate::driver;
use crate::driver::types::{CUdeviceptr, CUmemHandle, CUresult};
use crate::memory::allocations::{self, Allocation};
use crate::memory::backing::{Evicted, Lacking, Restored};
use crate::memory::devices::Device;
use crate::memory::mapping::host_pool::{self, NoSlots};
use crate::memory::mapping::{Chunk, GRANULE, Mapped, copies, destroy};
use crate::process::{log, threads};
use crate::work::contexts::{self, Context};
use crate::work::event::{Event, Outcome};

/// Bytes under way at a time.
const IN_FLIGHT: u64 = 96 * MIB;

/// A chunk that is on its way.
#[derive(Debug)]
struct Flight {
    allocation: Arc<Allocation>,
    index: usize,
    offset: u64,
    bytes: u64,
    /// An event behind the chunk's copies; none: there is nothing to copy.
    behind: Option<Event>,
    /// What becomes of the chunk's contents; none on the way back.
    leaving: Option<Leaving>,
    /// The memory to which the chunk comes back; none on the way out.
    physical: Option<CUmemHandle>,
}

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

/// Chunks under way, in the order of their copies.
#[derive(Debug, Default)]
struct Queue {
    flights: VecDeque<Flight>,
    bytes: u64,
}

impl Queue {
    fn push(&mut self, flight: Flight) {
        self.bytes += flight.bytes;
        self.flights.push_back(flight);
    }

    fn pop(&mut self) -> Option<Flight> {
        let flight = self.flights.pop_front()?;
        self.bytes -= flight.bytes;
        Some(flight)
    }

    /// Whether the first chunk under way has arrived.
    fn has_arrived(&self) -> bool {
        let first = self.flights.front();
        first
            .is_some_and(|first| first.behind.as_ref().is_none_or(|event| event.outcome() != Outcome::NotYet))
    }
}

/// The move stops because of a driver's error, or because the context ends.
fn stopped(allocation: &Allocation, device: &Device, error: Option<CUresult>) -> Begun {
    match error {
        Some(error) if error.ends_all_work() => pin_context(&allocation.place(), device, error),
        Some(error) => {
            static FAILS: log::Seldom = log::Seldom::new();
            FAILS.warn(format_args!("moving memory at {:#x}: {error:?}", allocation.base));
        }
        None => {}
    }
    Begun::Stopped
}

/// A context is broken: its memory is not copied any more, and counts as immovable.
fn pin_context(context: &Arc<Context>, device: &Device, error: CUresult) {
    let mut bytes = 0;
    allocations::each_mapped(|allocation| {
        let mapped = allocation.mapped.as_ref().filter(|_| Arc::ptr_eq(&allocation.place(), context));
        if mapped.is_some_and(Mapped::pin) {
            bytes += allocation.size;
            device.update(|account| account.pin(allocation.size));
        }
    });
    if bytes > 0 {
        log::warn(format_args!(
            "{} MiB stay on the card: the program's own work has broken its context ({error:?})",
            bytes / MIB
        ));
    }
}

/// Moves `bytes` of a device's memory to the host, from the ends of the largest allocations, and rather a few more
/// than fewer. Calls `report` for each chunk that has left the card. Returns the bytes that have left, and those that were copied.
pub(super) fn evict(device: &'static Device, wanted: u64, report: &mut dyn FnMut(u64)) -> Evicted {
    let looked = content::look(device, wanted);
    let mut queue = Queue::default();
    let (mut begun, mut out) = (0, Evicted::default());
    let mut land = |queue: &mut Queue| {
        let landed = queue.pop().map_or(Evicted::default(), |flight| land_out(flight, device));
        out += landed;
        if landed.left > 0 {
            report(landed.left);
        }
    };
    'all: for allocation in allocations::of_device(device.ordinal) {
        let Some(mapped) = allocation.mapped.as_ref().filter(|mapped| !mapped.is_pinned()) else { continue };
        for index in (0..mapped.count()).rev() {
            if begun >= wanted {
                break 'all;
            }
            while queue.bytes >= IN_FLIGHT {
                land(&mut queue);
            }
            match begin_out(&allocation, mapped, index, device, &looked) {
                Begun::Flying(flight) => {
                    begun += flight.bytes;
                    queue.push(flight);
                }
                Begun::Nothing => {}
                // Another context may have memory of the host, and a smaller chunk may fit there.
                Begun::Full | Begun::Lacks(_) | Begun::Stopped => break,
            }
        }
    }
    while !queue.flights.is_empty() {
        land(&mut queue);
    }
    looked.log();
    out
}

fn begin_out(
    allocation: &Arc<Allocation>,
    mapped: &Mapped,
    index: usize,
    device: &Device,
    looked: &Looked,
) -> Begun {
    contexts::let_them_end(|| allocation.is_leaving());
    let on_card = |chunk: &mut Chunk| {
        chunk.physical.map(|_| (chunk.offset, chunk.bytes, std::mem::take(&mut chunk.host)))
    };
    let Some((offset, bytes, had)) = take(allocation, mapped, index, on_card) else { return Begun::Nothing };
    let (context, at) = (&allocation.place(), allocation.base + offset);
    let leaving = match Leaving::begin(context, at, bytes, had, looked) {
        Ok(leaving) => leaving,
        Err((had, why)) => {
            mapped.settle(index, |chunk| chunk.host = had);
            return match why {
                NoSlots::Full => Begun::Full,
                NoSlots::Gone => Begun::Stopped,
                NoSlots::Broken(error) => stopped(allocation, device, Some(error)),
            };
        }
    };
    let copies = || begin(context, |stream| leaving.copy(at, stream)).map(Some);
    let error = match if leaving.is_copied() { context.with(copies) } else { Ok(Ok(None)) } {
        Ok(Ok(behind)) => {
            let (allocation, leaving) = (Arc::clone(allocation), Some(leaving));
            return Begun::Flying(Flight {
                allocation,
                index,
                offset,
                bytes,
                behind,
                leaving,
                physical: None,
            });
        }
        Ok(Err(error)) => Some(error),
        Err(_) => None,
    };
    // Some copies may have begun before another one could not.
    quiesce(context);
    mapped.settle(index, |_| ());
    leaving.give_up();
    stopped(allocation, device, error)
}

/// Waits for a chunk that leaves. Returns the bytes that have left the card, and those that were copied.
fn land_out(flight: Flight, device: &Device) -> Evicted {
    let nothing = Evicted::default();
    let Flight { allocation, index, bytes, behind, leaving, .. } = flight;
    let (Some(mapped), Some(leaving)) = (&allocation.mapped, leaving) else { return nothing };
    let context = &allocation.place();
    if let Err(error) = wait(behind.as_ref()) {
        mapped.settle(index, |_| ());
        leaving.give_up();
        stopped(&allocation, device, error);
        return nothing;
    }
    let copied = leaving.copied_bytes();
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
        allocation.residency().left(bytes);
        device.update(|account| account.unmap(bytes));
        true
    });
    host_pool::give_back(copies::slots(host.unwrap_or_default()));
    if gone == Some(true) { Evicted { left: bytes, copied } } else { nothing }
}

/// Brings a device's memory back, as far as there is room; stops soon when it is `cancelled`.
pub(super) fn restore(device: &'static Device, lacking: Lacking, cancelled: &dyn Fn() -> bool) -> Restored {
    let mut result = Restored::default();
    let mut queue = Queue::default();
    'all: for allocation in allocations::of_device(device.ordinal) {
        let Some(mapped) = &allocation.mapped else { continue };
        for index in 0..mapped.count() {
            while queue.bytes >= IN_FLIGHT {
                land(&mut queue, device, &mut result);
            }
            if cancelled() {
                break 'all;
            }
            let begun = loop {
                let begun = begin_in(&allocation, mapped, index, device);
                // Room may also come before the driver has the memory of the process that has left it.
                let waits = lacking == Lacking::Wait && matches!(begun, Begun::Lacks(_) | Begun::Full);
                if !waits || cancelled() {
                    break begun;
                }
                if queue.has_arrived() {
                    land(&mut queue, device, &mut result);
                } else {
                    threads::pause();
                }
            };
            match begun {
                Begun::Flying(flight) => queue.push(flight),
                Begun::Nothing => {}
                Begun::Lacks(bytes) => result.lacks_mapped += bytes,
                // The driver has less memory than the scheduler says: it has not got back all that left, or others have it.
                Begun::Full => {
                    result.is_full = true;
                    break 'all;
                }
                Begun::Stopped => break,
            }
        }
    }
    while !queue.flights.is_empty() {
        land(&mut queue, device, &mut result);
    }
    result
}

fn land(queue: &mut Queue, device: &Device, result: &mut Restored) {
    if let Some(flight) = queue.pop() {
        land_in(flight, device, result);
    }
}

fn begin_in(allocation: &Arc<Allocation>, mapped: &Mapped, index: usize, device: &Device) -> Begun {
    contexts::let_them_end(|| allocation.is_leaving());
    let mut lacks = 0;
    let taken = take(allocation, mapped, index, |chunk| {
        if chunk.physical.is_some() {
            return None;
        }
        let charged = device.update(|account| account.charge(chunk.bytes));
        if charged < chunk.bytes {
            device.update(|account| account.uncharge(charged));
            lacks = chunk.bytes;
            return None;
        }
        Some((chunk.offset, chunk.bytes, chunk.host.clone()))
    });
    let Some((offset, bytes, host)) = taken else {
        return if lacks > 0 { Begun::Lacks(lacks) } else { Begun::Nothing };
    };
    let (context, at) = (&allocation.place(), allocation.base + offset);
    let made = context.with(|| {
        let physical = mapped.create(at, bytes, device.ordinal)?;
        let allowed = driver::allow_access(at, bytes, device.ordinal);
        allowed.inspect_err(|_| undo(at, bytes, physical))?;
        Ok(physical)
    });
    let physical = match made {
        Ok(Ok(physical)) => physical,
        Ok(Err(error)) => {
            stays_out(mapped, index, bytes, device);
            return match error {
                CUresult::OUT_OF_MEMORY => Begun::Full,
                error => stopped(allocation, device, Some(error)),
            };
        }
        Err(_) => {
            stays_out(mapped, index, bytes, device);
            return Begun::Stopped;
        }
    };
    let copies = || {
        begin(context, |stream| {
            copy_parts(at, host.iter().map(Part::from), |part, at, bytes| match part {
                Part::Copied(slot) => driver::copy_in(at, slot.memory(), bytes, stream),
                Part::Zero => driver::fill_with_zeros(at, bytes, stream),
                Part::Nothing => Ok(()),
            })
        })
        .map(Some)
    };
    let behind = match if host.is_empty() { Ok(Ok(None)) } else { context.with(copies) } {
        Ok(Ok(behind)) => behind,
        // In a broken context the program finds the error, not its data.
        Ok(Err(error)) if error.ends_all_work() => {
            stopped(allocation, device, Some(error));
            None
        }
        Ok(Err(error)) => {
            quiesce(context);
            undo(at, bytes, physical);
            stays_out(mapped, index, bytes, device);
            return stopped(allocation, device, Some(error));
        }
        // The context has ended since the chunk was mapped. Memory that belongs to no context comes back in another one.
        Err(_) => {
            undo(at, bytes, physical);
            stays_out(mapped, index, bytes, device);
            return Begun::Stopped;
        }
    };
    let (allocation, leaving) = (Arc::clone(allocation), None);
    Begun::Flying(Flight { allocation, index, offset, bytes, behind, leaving, physical: Some(physical) })
}

/// A chunk does not come back now; its contents stay where they were.
fn stays_out(mapped: &Mapped, index: usize, bytes: u64, device: &Device) {
    device.update(|account| account.uncharge(bytes));
    mapped.settle(index, |_| ());
}

/// Unmaps and releases memory that was mapped a moment ago.
fn undo(at: CUdeviceptr, bytes: u64, physical: CUmemHandle) {
    let physical = Some(physical);
    destroy(0, &mut Chunk { offset: at, bytes, physical, host: Vec::new(), moving: false, guessed: false });
}

/// Waits for a chunk that comes back.
fn land_in(flight: Flight, device: &Device, result: &mut Restored) {
    let Flight { allocation, index, offset, bytes, behind, physical, .. } = flight;
    let Some(mapped) = &allocation.mapped else { return };
    if let Err(error) = wait(behind.as_ref()) {
        stopped(&allocation, device, error);
        // In a broken context the program finds the error. In other cases no work may see contents that are not complete.
        if !error.is_some_and(CUresult::ends_all_work) {
            if let Some(physical) = physical {
                undo(allocation.base + offset, bytes, physical);
            }
            return stays_out(mapped, index, bytes, device);
        }
    }
    let settled = mapped.settle(index, |chunk| {
        if let Some(physical) = physical {
            let shown = mapped.show(offset, bytes, physical);
            shown.inspect_err(|_| undo(allocation.base + offset, bytes, physical))?;
        }
        chunk.physical = physical;
        allocation.residency().restored(bytes);
        device.update(|account| account.map(bytes));
        let had_contents = !chunk.host.is_empty();
        let copied = chunk.host.iter().filter(|copy| copy.slot().is_some()).count() as u64 * GRANULE;
        let (kept, free) = content::keep(std::mem::take(&mut chunk.host));
        chunk.host = kept;
        Ok((had_contents, copied, free))
    });
    let (had_contents, copied, free) = match settled {
        Some(Ok(settled)) => settled,
        // Its contents stay on the host.
        Some(Err(error)) => {
            stopped(&allocation, device, Some(error));
            return device.update(|account| account.uncharge(bytes));
        }
        None => return,
    };
    result.back += bytes;
    result.had_contents += if had_contents { bytes } else { 0 };
    result.copied += copied;
    host_pool::give_back(free);
}
