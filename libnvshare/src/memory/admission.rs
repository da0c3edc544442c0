//! Admission: checks the limits, gets room on the card if the memory needs it, and enters the allocation.
//!
//! While the lock is elsewhere, memory that can be absent is only entered: the next grant brings room for it. If the
//! process has the lock and no room, the session sends NEED_ROOM, and the thread waits outside the gate.

mod ladder;

use std::sync::Arc;

use nvshare_client::{Admission, Caller, Residency, Wait};

use super::allocations::{self, Allocation, Kind, Part};
use super::backing::{self, AllocationRequest, Made};
use super::devices::{self, Awaited, Device};
use super::{deferred_free, driver_reserve, free, slabs};
use crate::driver::types::{CUdeviceptr, CUresult};
use crate::process::unwind::OnUnwind;
use crate::process::{bell, log, threads};
use crate::work::gate::{self, FrameMark};
use ladder::{Ladder, Shortage};

/// Makes an allocation within the limits, and enters it into the list. Returns its address. `call` makes one by the function that
/// the program called.
pub(crate) fn allocate(
    request: AllocationRequest,
    call: impl Fn() -> Result<CUdeviceptr, CUresult>,
) -> Result<CUdeviceptr, CUresult> {
    if request.is_small() { in_slab(&request) } else { make(&request, call).map(|made| made.base) }
}

/// Makes a small allocation in a slab, which is made if there is none with room.
fn in_slab(request: &AllocationRequest) -> Result<CUdeviceptr, CUresult> {
    request.check_context()?;
    deferred_free::free_without_waiting();
    let asked = request.bytes;
    let (base, slab) = match slabs::take(&request.context, asked) {
        Some(found) => found,
        None => {
            let slab = make(&request.for_slab(), || Err(CUresult::NOT_SUPPORTED))?;
            slabs::add(&slab, asked);
            (slab.base, slab)
        }
    };
    insert(&Arc::new(Allocation::in_slab(base, Part { slab, asked })));
    Ok(base)
}

/// Makes memory of its own within the limits, and enters it into the list. `call` makes it by the function that the program
/// called.
pub(super) fn make(
    request: &AllocationRequest,
    call: impl Fn() -> Result<CUdeviceptr, CUresult>,
) -> Result<Arc<Allocation>, CUresult> {
    let (device, kind) = (request.device, request.kind);
    let (backing, span) = request.plan()?;
    if kind == Kind::DeviceAsManaged
        && let Some(again) = deferred_free::reuse(&request.context, span)
    {
        return Ok(again);
    }
    let kept = || driver_reserve::kept_for(device, kind, request.pool);
    let make = |charged| backing.allocate(request, charged, &call);
    let allocation = admitted(device, span, kind, kept, make, |Made { base, mapped }, charged| {
        let context = Arc::clone(&request.context);
        let allocation = Allocation::new(base, span, device.ordinal, context, kind, charged);
        let allocation = Arc::new(allocation.with_chunks(mapped));
        insert(&allocation);
        backing.populate(&allocation, charged);
        allocation
    })?;
    if free::end_with_context(&allocation) {
        return Err(CUresult::CONTEXT_IS_DESTROYED);
    }
    charge_late(device, &allocation);
    Ok(allocation)
}

/// Enters an allocation into the list. An old one at its address has ended unseen, and is forgotten.
fn insert(allocation: &Arc<Allocation>) {
    if let Some(gone) = allocations::insert(allocation) {
        free::forget(&gone);
    }
}

/// Charges an allocation that was admitted while the lock was elsewhere, if the lock has come while the driver made it. The
/// grant has restored the allocations that were on the list by then, and this one was not.
fn charge_late(device: &'static Device, allocation: &Allocation) {
    let is_settled = |residency: &Residency| residency.is_freed() || residency.resident_bytes() > 0;
    let mut awaited: Option<Awaited<'_>> = None;
    while !is_settled(&allocation.residency()) && device.account().is_holding() {
        let mark = FrameMark::new();
        let Some(pass) = gate::try_enter(&mark) else {
            threads::pause();
            continue;
        };
        let mut residency = allocation.residency();
        let charge = || device.update(|account| account.charge_whole(allocation.size));
        let charged = if is_settled(&residency) { Ok(0) } else { charge() };
        if charged.is_err() {
            awaited.iter_mut().for_each(Awaited::keep_need);
        }
        drop(awaited.take());
        if let Ok(charged @ 1..) = charged {
            residency.restored(charged);
            drop(residency);
            backing::of(allocation.kind).populate(allocation, charged);
        } else {
            drop(residency);
        }
        gate::leave(pass, &mark, CUresult::SUCCESS);
        match charged {
            Ok(_) => return,
            // The scheduler has no room. The driver brings the pages when they are touched.
            Err(bytes) => match device.wait_for_room(bytes, Wait::WhileHolding, bell::ring) {
                Some(room) => awaited = Some(room),
                None => return,
            },
        }
    }
}

/// Makes something that takes memory by `make`, within the limits, and enters it by `enter` before the gate can close. Both
/// are told how many of the bytes are charged. If there is no memory for it, it climbs the [ladder](Ladder) and tries again.
/// For memory of a pool, `kept` says how much the pool has kept.
///
/// # Errors
/// Out of memory: the ladder has not helped. Any other error is that of `make`.
pub(crate) fn admitted<T, U>(
    device: &'static Device,
    bytes: u64,
    kind: Kind,
    kept: impl Fn() -> u64,
    make: impl Fn(u64) -> Result<T, CUresult>,
    enter: impl Fn(T, u64) -> U,
) -> Result<U, CUresult> {
    device.wait_for_limit();
    let mut ladder = Ladder::new(device, bytes, kind);
    if kind == Kind::Mapped {
        // Behind the closed gate nothing is mapped yet. More than the capacity would be admitted, and the gate never open.
        device.wait_for_capacity();
    }
    // For plain memory, the driver itself reports that the card is full.
    while kind.is_in_disguise() && !device.has_it_alone(bytes) {
        ladder.climb(Shortage::Limit).inspect_err(|_| device.say_full(bytes))?;
    }
    loop {
        let mark = FrameMark::new();
        let pass = gate::try_enter(&mark);
        let caller = if pass.is_some() { Caller::InsideGate } else { Caller::OutsideGate };
        // The gate is about to open after a grant, or the lock is about to be given back. Both are soon over.
        if caller == Caller::OutsideGate && device.account().is_holding() {
            threads::pause();
            continue;
        }
        let admission = device.admit(bytes, kind, kept(), caller);
        // While it needs more, the room that has come stays with it: it is waiting from before to after.
        if !matches!(admission, Ok((Admission::NeedsRoom(_), _))) {
            ladder.end_waiting();
        }
        let shortage = match admission {
            Ok((Admission::Charged(charged), under_way)) => {
                let under_way = (charged > 0).then_some(under_way);
                let made = make_charged(device, bytes, kind, charged, &make);
                let made = made.map(|made| enter(made, charged));
                leave(pass, &mark);
                drop(under_way);
                if !matches!(made, Err(CUresult::OUT_OF_MEMORY)) {
                    if made.is_ok() {
                        device.tell_of_usage();
                    }
                    return made;
                }
                Shortage::Driver(charged)
            }
            Ok((Admission::Again, _)) => {
                leave(pass, &mark);
                continue;
            }
            Ok((Admission::NeedsRoom(bytes), under_way)) => {
                drop(under_way);
                leave(pass, &mark);
                Shortage::Room(bytes)
            }
            Err(_refused) => {
                leave(pass, &mark);
                Shortage::Limit
            }
        };
        ladder.climb(shortage).inspect_err(|_| {
            // A limit has said why already.
            if shortage != Shortage::Limit {
                devices::say_crowded(bytes);
            }
        })?;
    }
}

/// Makes something by `make` that is charged already. If that fails, it is not charged any more.
fn make_charged<T>(
    device: &'static Device,
    bytes: u64,
    kind: Kind,
    charged: u64,
    make: impl Fn(u64) -> Result<T, CUresult>,
) -> Result<T, CUresult> {
    // A part may have been in the pool's reserve, and is there again. How much, the driver says.
    let is_kept = kind.is_pools() && driver_reserve::is_kept_by_pools();
    let give_back = || {
        device.update(|account| {
            if is_kept { account.keep(bytes, charged, kind) } else { account.release(bytes, charged, kind) }
        });
    };
    let undo = OnUnwind::new(give_back);
    let made = make(charged);
    undo.done();
    match made {
        Ok(_) => log::debug(format_args!("allocated {bytes} bytes, {kind:?}, {charged} on the card")),
        Err(_) => {
            give_back();
            if is_kept {
                driver_reserve::refresh(device);
            }
        }
    }
    made
}

fn leave(pass: Option<gate::Pass>, mark: &FrameMark) {
    if let Some(pass) = pass {
        gate::leave(pass, mark, CUresult::SUCCESS);
    }
}
