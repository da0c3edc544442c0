//! Moves memory that [the library maps](crate::memory::mapping) to the host and back, and ends it.

mod ahead;
mod chunks;
mod content;
mod flights;
mod late_free;
mod lost;
mod moves;
mod order;

use std::sync::Arc;

use super::{AllocationRequest, Backing, Evicted, Freed, Made, Moving, Restored, WithoutRoom, Work};
use crate::driver::types::{CUdeviceptr, CUresult};
use crate::memory::allocations::Allocation;
use crate::memory::devices::Device;
use crate::memory::mapping::{self, Mapped, peers};
use crate::work::callbacks;
use crate::work::contexts::Context;
pub(crate) use ahead::{foresee_eviction, give_way};
pub(in crate::memory) use content::{has_kernel, launch_kernel};

/// Memory that the library maps.
#[derive(Debug)]
pub(super) struct Swap;

impl Backing for Swap {
    fn span(&self, bytes: u64) -> Option<u64> {
        mapping::span(bytes)
    }

    /// With the lock, chunks are mapped behind all of the allocation. While the lock is elsewhere the allocation gets
    /// addresses alone, and the gate does not open before they have memory.
    fn allocate(
        &self,
        request: &AllocationRequest,
        charged: u64,
        _call: &dyn Fn() -> Result<CUdeviceptr, CUresult>,
    ) -> Result<Made, CUresult> {
        content::prepare(&request.context);
        let (base, mapped) = match request.created {
            None if request.is_slab => Mapped::reserve_slab(),
            None => Mapped::reserve(request.bytes),
            Some(properties) => Mapped::reserve_for_program(request.bytes, properties, &request.context),
        }?;
        if charged > 0 {
            mapped.fill(base, request.device.ordinal).inspect_err(|_| mapped.end(base))?;
        }
        Ok(Made { base, mapped: Some(mapped) })
    }

    /// Peers that were enabled while the memory was made did not find it on the list.
    fn populate(&self, allocation: &Allocation, _charged: u64) {
        if let Some(mapped) = allocation.mapped.as_ref().filter(|_| peers::are_any()) {
            mapped.set_peers(allocation.base, allocation.device, None);
        }
    }

    /// An unmapping does not wait for work that uses the memory. If a capture hides whether the work is complete, the
    /// memory ends later.
    fn free(&self, allocation: &Arc<Allocation>, work: Work, call: &dyn Fn() -> CUresult) -> Freed {
        if work == Work::MayRun && callbacks::are_running() {
            // The callback would wait for itself. The driver refuses the call: it does not know the address as an allocation.
            return Freed::Not(call());
        }
        let freed = late_free::free(allocation, work, call);
        ahead::tidy();
        freed
    }

    /// A part of a slab ends with the slab, which ends as well.
    fn end(&self, allocation: &Allocation) {
        late_free::end_chunks(allocation);
        ahead::tidy();
    }
}

impl Moving for Swap {
    fn evict(&self, device: &'static Device, wanted: u64, report: &mut dyn FnMut(u64)) -> Evicted {
        let gone = moves::evict(device, wanted, report);
        // Memory that has become zero needs none of the host's.
        ahead::tidy();
        gone
    }

    fn restore(
        &self,
        device: &'static Device,
        without_room: WithoutRoom,
        cancelled: &dyn Fn() -> bool,
    ) -> Restored {
        moves::restore(device, without_room, cancelled)
    }
}

/// Whether memory waits to be freed [later](Freed::Later).
pub(crate) fn has_unfinished_frees() -> bool {
    late_free::is_waiting()
}

/// Ends the memory that waits to be freed and whose work is complete by now. Only contexts that may be `asked` are looked at. `ended` is
/// told of its allocations, which are still in the account.
pub(crate) fn finish_frees(asked: &dyn Fn(&Context) -> bool, ended: &mut dyn FnMut(&Arc<Allocation>)) {
    late_free::finish(asked, ended);
}

/// Forgets what is kept for a context that has ended.
pub(crate) fn forget_context(context: &Arc<Context>) {
    content::forget_context(context);
    mapping::forget_context(context);
}
