//! Admission: checks the limits, gets room on the card if the memory needs it, and enters the allocation.

use std::sync::Arc;

use nvshare_client::{Admission, Caller, Residency, Wait};

use super::allocations::{self, Allocation, Kind, Part};
use super::backing::{self, Made, Request};
use super::deferred_free::LateFrees;
use super::devices::Device;
use super::{deferred_free, driver_reserve, free, slabs};
use crate::driver::types::{CUdeviceptr, CUresult};
use crate::process::unwind::OnUnwind;
use crate::process::{bell, log, threads};
use crate::work::gate::{self, FrameMark};

/// How often one allocation finds that the driver has less than the account says, before it fails.
const MOST_LOSSES: u32 = 16;

/// Makes an allocation within the limits, and enters it into the list: its address. `call` makes one by the function that the
/// program called.
pub(crate) fn allocate(
    request: Request,
    call: impl Fn() -> Result<CUdeviceptr, CUresult>,
) -> Result<CUdeviceptr, CUresult> {
    if request.is_small() { in_slab(&request) } else { make(&request, call).map(|made| made.base) }
}

/// Makes a small allocation in a slab, which is made if there is none with room.
fn in_slab(request: &Request) -> Result<CUdeviceptr, CUresult> {
    request.check_context()?;
    deferred_free::sweep();
    let asked = request.bytes;
    let (base, slab) = match slabs::take(&request.context, asked) {
        Some(found) => found,
        None => {
            let slab = make(&request.for_slab(), || Err(CUresult::NOT_SUPPORTED))?;
            slabs::add(&slab, asked);
            (slab.base, slab)
        }
    };
    let allocation = Arc::new(Allocation::in_slab(base, Part { slab, asked }));
    if let Some(gone) = allocations::insert(&allocation) {
        free::forget(&gone);
    }
    Ok(base)
}

/// Makes memory of its own within the limits, and enters it into the list. `call` makes it by the function that the program
/// called.
pub(super) fn make(
    request: &Request,
    call: impl Fn() -> Result<CUdeviceptr, CUresult>,
) -> Result<Arc<Allocation>, CUresult> {
    request.check_context()?;
    let (device, kind, backing) = (request.device, request.kind, backing::of(request.kind));
    let span = backing.span(request.bytes).ok_or(CUresult::OUT_OF_MEMORY)?;
    if kind == Kind::DeviceAsManaged
        && let Some(again) = deferred_free::take_again(&request.context, span)
    {
        return Ok(again);
    }
    let make = |charged| backing.allocate(request, charged, &call);
    let allocation = admitted(device, span, kind, make, |Made { base, mapped }, charged| {
        let context = Arc::clone(&request.context);
        let allocation = Allocation::new(base, span, device.ordinal, context, kind, charged);
        let allocation = Arc::new(allocation.with_chunks(mapped));
        if let Some(gone) = allocations::insert(&allocation) {
            free::forget(&gone);
        }
        backing.populate(&allocation, charged);
        allocation
    })?;
    settle(device, &allocation);
    Ok(allocation)
}

/// Charges an allocation that was admitted while the lock was elsewhere, if the lock has come while the driver made it. The
/// grant has restored the allocations that were on the list by then, and this one was not.
fn settle(device: &'static Device, allocation: &Allocation) {
    let is_settled = |residency: &Residency| residency.is_freed() || residency.resident_bytes() > 0;
    let mut awaited = None;
    while !is_settled(&allocation.residency()) && device.account().is_holding() {
        let mark = FrameMark::new();
        let Some(pass) = gate::try_enter(&mark) else {
            threads::pause();
            continue;
        };
        let mut residency = allocation.residency();
        let charge = || device.update(|account| account.charge_whole(allocation.size));
        let charged = if is_settled(&residency) { Ok(0) } else { charge() };
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
            Err(lacks) => match device.wait_for_room(lacks, Wait::WhileHolding, bell::ring) {
                Some(room) => awaited = Some(room),
                None => return,
            },
        }
    }
}

/// Makes something that takes memory by `make`, within the limits, and enters it by `enter` before the gate can close. Both
/// are told how many of the bytes are charged.
pub(crate) fn admitted<T, U>(
    device: &'static Device,
    bytes: u64,
    kind: Kind,
    make: impl Fn(u64) -> Result<T, CUresult>,
    enter: impl Fn(T, u64) -> U,
) -> Result<U, CUresult> {
    deferred_free::sweep();
    let mut frees = LateFrees::begin();
    // For plain memory, the driver itself reports that the card is full.
    let fits = || device.has_it_alone(bytes);
    let mut fits_then = || {
        (free::drop_spares(device) && fits())
            || (driver_reserve::give_up(device) && fits())
            || (frees.wait() && fits())
    };
    if kind.is_in_disguise() && !fits() && !fits_then() {
        return Err(CUresult::OUT_OF_MEMORY);
    }
    let mut awaited = None;
    let mut losses = 0;
    loop {
        let mark = FrameMark::new();
        let pass = gate::try_enter(&mark);
        let caller = if pass.is_some() { Caller::InsideGate } else { Caller::OutsideGate };
        // The gate is about to open after a grant, or the lock is about to be given back. Both are soon over.
        if caller == Caller::OutsideGate && device.account().is_holding() {
            threads::pause();
            continue;
        }
        // From before it is charged: an eviction that finds the memory charged finds this.
        let under_way = device.begin_change();
        let admission = device.admit(bytes, kind, caller);
        drop(awaited.take());
        match admission {
            Ok(Admission::Lacks(lacks)) => {
                drop(under_way);
                leave(pass, &mark);
                if free::drop_spares(device) {
                    continue;
                }
                awaited = device.wait_for_room(lacks, Wait::of(kind), bell::ring);
                if awaited.is_none() && !driver_reserve::give_up(device) && !frees.wait() {
                    return Err(CUresult::OUT_OF_MEMORY);
                }
            }
            Ok(Admission::Again) => leave(pass, &mark),
            Ok(Admission::Charged(charged)) => {
                let _under_way = (charged > 0).then_some(under_way);
                let undo = OnUnwind::new(|| device.release(bytes, charged, kind));
                let made = make(charged);
                undo.done();
                let made = match made {
                    Ok(made) => {
                        log::debug(format_args!("allocated {bytes} bytes, {kind:?}, {charged} on the card"));
                        Ok(enter(made, charged))
                    }
                    Err(error) => {
                        device.release(bytes, charged, kind);
                        Err(error)
                    }
                };
                leave(pass, &mark);
                // The driver has less than the account says: the program has freed more than the driver has back, or others have
                // what the scheduler has given.
                if matches!(made, Err(CUresult::OUT_OF_MEMORY)) {
                    if free::drop_spares(device) {
                        continue;
                    }
                    if kind == Kind::Mapped && losses < MOST_LOSSES && device.lose_room(charged, bell::ring) {
                        losses += 1;
                        continue;
                    }
                    if device.wait_for_scheduler(bytes) {
                        continue;
                    }
                }
                if made.is_ok() && device.is_usage_stale() {
                    bell::ring();
                }
                return made;
            }
            Err(error) => {
                drop(under_way);
                leave(pass, &mark);
                if !free::drop_spares(device) && !driver_reserve::give_up(device) && !frees.wait() {
                    return Err(error);
                }
            }
        }
    }
}

fn leave(pass: Option<gate::Pass>, mark: &FrameMark) {
    if let Some(pass) = pass {
        gate::leave(pass, mark, CUresult::SUCCESS);
    }
}
