//! Frees: how an allocation leaves the list and the account.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nvshare_client::session::is_worth_offering;

use super::allocations::{self, Allocation, Ending};
use super::backing::swap;
use super::devices::{self, Device};
use super::driver_reserve;
use super::mapping::{self, Mapped};
use crate::driver::types::{CUdeviceptr, CUresult};
use crate::process::unwind::OnUnwind;
use crate::process::{bell, lifecycle, threads};
use crate::work::callbacks;
use crate::work::contexts::Context;

/// An allocation that would be refused waits so long for memory that is freed later: beside a capture, the work before the
/// free may be out of sight until the capture ends, and the waiting thread may be the one that ends it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Frees an allocation by `call`.
pub(crate) fn free(base: CUdeviceptr, call: impl FnOnce() -> CUresult) -> CUresult {
    // The driver handles pointers that the library does not know.
    let Some(allocation) = allocations::remove(base) else { return call() };
    if allocation.mapped.is_some() {
        if callbacks::are_running() {
            // The callback would wait for itself. The driver refuses the call, and does not know the address as an allocation.
            allocations::put_back(allocation);
            return call();
        }
        free_mapped(allocation, true);
        return CUresult::SUCCESS;
    }
    let undo = OnUnwind::new(|| {
        allocation.set_leaving(false);
        allocations::put_back(Arc::clone(&allocation));
    });
    allocation.set_leaving(true);
    // This waits for a piece that is being moved.
    let mut residency = allocation.residency();
    let result = call();
    undo.done();
    if result != CUresult::SUCCESS {
        drop(residency);
        allocation.set_leaving(false);
        allocations::put_back(allocation);
        return result;
    }
    let charged = residency.free();
    drop(residency);
    match devices::get(allocation.device) {
        Some(device) if allocation.kind.is_pools() && driver_reserve::is_kept_by_pools() => {
            driver_reserve::freed(device, &allocation, charged);
        }
        _ => forget(&allocation),
    }
    result
}

/// Frees memory that the library maps, once the work before the free is complete: an unmapping does not wait for work
/// that uses the memory. If a capture hides whether the work is complete, the memory is freed later.
fn free_mapped(allocation: Arc<Allocation>, waits: bool) {
    allocation.set_leaving(true);
    if let Some(allocation) = swap::free(allocation, waits) {
        forget(&allocation);
    }
}

/// Frees memory that the library maps, after the program's stream has completed. False: the library does not map this memory.
pub(super) fn free_completed(base: CUdeviceptr) -> bool {
    let is_mapped = allocations::find(base).is_some_and(|allocation| allocation.mapped.is_some());
    if let Some(allocation) = is_mapped.then(|| allocations::remove(base)).flatten() {
        free_mapped(allocation, false);
    }
    is_mapped
}

/// Frees memory that could not be freed when the program asked for it.
pub(crate) fn sweep_mapped() {
    swap::sweep().iter().for_each(|allocation| forget(allocation));
}

/// Waits for memory that could not be freed when the program said so. Returns whether some is free now.
pub(super) fn wait_for_mapped() -> bool {
    let begin = Instant::now();
    while swap::is_waiting() && begin.elapsed() < PATIENCE && !lifecycle::is_exiting() {
        let freed = swap::sweep();
        if !freed.is_empty() {
            freed.iter().for_each(|allocation| forget(allocation));
            return true;
        }
        threads::pause();
    }
    false
}

/// Gives back the charge of an allocation that is off the list and has ended.
pub(super) fn forget(allocation: &Allocation) {
    let charged = allocation.residency().free();
    if let Some(device) = devices::get(allocation.device) {
        if allocation.mapped.as_ref().is_some_and(Mapped::is_pinned) {
            device.update(|account| account.unpin(allocation.size));
        }
        device.release(allocation.size, charged, allocation.kind);
        offer_room(device);
    }
}

/// Removes the allocations that end with a context.
pub(crate) fn forget_context(context: &Arc<Context>, ending: Ending) {
    for allocation in allocations::remove_context(context, ending) {
        if let Some(mapped) = &allocation.mapped {
            allocation.set_leaving(true);
            mapped.end(allocation.base, context);
        }
        forget(&allocation);
    }
    mapping::forget_context(context);
}

/// Offers unused room to other clients after memory of a device was freed, if there is enough of it.
pub(super) fn offer_room(device: &Device) {
    if is_worth_offering(&device.account()) {
        bell::ring();
    }
}
