//! Frees: how an allocation leaves the list and the account.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nvshare_client::session::is_worth_offering;

use super::allocations::{self, Allocation};
use super::backing::{self, Freed, Work, swap};
use super::devices::{self, Device};
use super::{driver_reserve, exports, imports, pool_frees, slabs};
use crate::driver::types::{CUdeviceptr, CUresult};
use crate::process::bell;
use crate::process::unwind::OnUnwind;
use crate::work::contexts::Context;

/// Frees an allocation. `call` is the driver's own free.
pub(crate) fn free(base: CUdeviceptr, work: Work, call: impl Fn() -> CUresult) -> CUresult {
    // The driver handles pointers that the library does not know.
    let Some(allocation) = allocations::remove(base) else { return call() };
    free_removed(&allocation, work, call)
}

/// Frees this allocation, and no later one at its address, whose context need not live. The library maps it, and its work is complete.
pub(super) fn free_mapped(allocation: &Arc<Allocation>) {
    if allocations::remove_this(allocation) {
        free_removed(allocation, Work::Complete, || CUresult::SUCCESS);
    }
}

/// Frees memory of which the program knows no address, and whose work is complete.
pub(super) fn free_hidden(allocation: &Arc<Allocation>) {
    if allocations::remove_hidden(allocation) {
        free_removed(allocation, Work::Complete, || CUresult::SUCCESS);
    }
}

/// Ends the spare slabs of a device. Returns whether there was one.
pub(crate) fn end_spare_slabs(device: &Device) -> bool {
    let spares = slabs::take_spares(device.ordinal);
    spares.iter().for_each(free_hidden);
    !spares.is_empty()
}

fn free_removed(allocation: &Arc<Allocation>, work: Work, call: impl Fn() -> CUresult) -> CUresult {
    let _under_way = devices::get(allocation.device).map(Device::begin_change);
    let put_back = || {
        allocation.set_leaving(false);
        allocations::put_back(Arc::clone(allocation));
    };
    let undo = OnUnwind::new(put_back);
    allocation.set_leaving(true);
    let freed = backing::of(allocation.kind).free(allocation, work, &call);
    undo.done();
    match freed {
        Freed::Now => ended(allocation),
        Freed::WithSlab(slab) => {
            ended(allocation);
            ended(&slab);
        }
        Freed::Later => {}
        Freed::Not(result) => {
            put_back();
            return result;
        }
    }
    CUresult::SUCCESS
}

/// How often memory has ended later than the program freed it.
static LATE: AtomicUsize = AtomicUsize::new(0);

/// How often memory has ended later than the program freed it, and is out of the account.
pub(super) fn ended_late() -> usize {
    LATE.load(Ordering::SeqCst)
}

/// Notes that memory has ended so, and is out of the account.
pub(super) fn note_ended_late() {
    LATE.fetch_add(1, Ordering::SeqCst);
}

/// Ends memory that could not be ended when the program freed it. The library's threads call it, also when all work is complete
/// or memory has to leave. Otherwise a program that allocates nothing more would keep the memory that it has freed. Returns
/// whether there was any.
pub(crate) fn finish_late_frees() -> bool {
    finish_late_frees_in(&|_| true)
}

/// The same, without a look at contexts that may not be `asked`.
pub(super) fn finish_late_frees_in(asked: &dyn Fn(&Context) -> bool) -> bool {
    let mut any = false;
    let mut ended = |allocation: &Arc<Allocation>| {
        forget(allocation);
        note_ended_late();
        any = true;
    };
    swap::finish_frees(asked, &mut ended);
    imports::unmap_closed(asked);
    any
}

/// Whether there is such memory.
pub(super) fn has_late_frees() -> bool {
    swap::has_unfinished_frees()
}

/// Whether there is such memory, or memory of others that the program has closed.
pub(super) fn has_late_ends() -> bool {
    has_late_frees() || imports::are_any_closed()
}

/// Notes that the memory of an allocation, which is off the list, has ended by a free. A pool may have kept it.
fn ended(allocation: &Allocation) {
    if allocation.kind.is_pools() {
        pool_frees::note(allocation);
    }
    match devices::get(allocation.device) {
        Some(device) if allocation.kind.is_pools() && driver_reserve::is_kept_by_pools() => {
            driver_reserve::note_freed(device, allocation, allocation.residency().free());
        }
        _ => forget(allocation),
    }
}

/// Gives back the charge of an allocation that is off the list and has ended.
pub(super) fn forget(allocation: &Allocation) {
    exports::forget(allocation.id);
    let (size, charged) = {
        let mut residency = allocation.residency();
        (residency.size(), residency.free())
    };
    if allocation.part.is_some() {
        // Its slab is in the account.
        return;
    }
    if let Some(device) = devices::get(allocation.device) {
        if allocation.is_pinned() {
            device.update(|account| account.unpin(size));
        }
        if allocation.is_spare() {
            device.update(|account| account.release_aside(size, charged, allocation.kind));
        } else {
            device.release(size, charged, allocation.kind);
        }
        offer_room(device);
    }
}

/// Removes the allocations that end with a context.
pub(crate) fn forget_context(context: &Arc<Context>) {
    slabs::forget_context(context);
    imports::forget_context(context);
    for allocation in allocations::remove_context(context) {
        allocation.set_leaving(true);
        backing::of(allocation.kind).end(&allocation);
        forget(&allocation);
    }
    swap::forget_context(context);
}

/// Ends memory that was on its way to the list while its context ended, with what was on it. Returns whether its context has ended.
pub(super) fn end_with_context(allocation: &Arc<Allocation>) -> bool {
    if !allocation.ends_with_its_context() || !allocation.context.life().is_over() {
        return false;
    }
    // The end of the context may have found it on the list.
    if allocations::remove_this(allocation) || allocations::remove_hidden(allocation) {
        allocation.set_leaving(true);
        backing::of(allocation.kind).end(allocation);
        forget(allocation);
    }
    true
}

/// Offers unused room to other clients after memory of a device was freed, if there is enough of it.
pub(super) fn offer_room(device: &Device) {
    if is_worth_offering(&device.account()) {
        bell::ring();
    }
}
