//! Moves memory that [the library maps](crate::memory::mapping) to the host and back, and ends it.

mod chunks;
mod content;
mod free;
mod moves;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Backing, Freed, Lacking, Made, Request, Restored, Work};
use crate::driver::types::{CUdeviceptr, CUresult};
use crate::memory::allocations::{self, Allocation};
use crate::memory::devices::Device;
use crate::memory::mapping::{self, Mapped, host_pool};
use crate::work::callbacks;
use crate::work::contexts::Context;

/// Memory that the library maps, as a [`Backing`].
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
        request: &Request,
        charged: u64,
        _call: &dyn Fn() -> Result<CUdeviceptr, CUresult>,
    ) -> Result<Made, CUresult> {
        content::prepare(&request.context);
        let (base, mapped) = match request.created {
            None => Mapped::reserve(request.bytes),
            Some(properties) => Mapped::reserve_for_program(request.bytes, properties, &request.context),
        }?;
        if charged > 0 {
            mapped.fill(base, request.device.ordinal).inspect_err(|_| mapped.end(base))?;
        }
        Ok(Made { base, mapped: Some(mapped) })
    }

    fn evict(&self, device: &'static Device, wanted: u64, report: &mut dyn FnMut(u64)) -> u64 {
        moves::evict(device, wanted, report)
    }

    fn restore(&self, device: &'static Device, lacking: Lacking, cancelled: &dyn Fn() -> bool) -> Restored {
        moves::restore(device, lacking, cancelled)
    }

    /// An unmapping does not wait for work that uses the memory. If a capture hides whether the work is complete, the
    /// memory ends later.
    fn free(&self, allocation: &Arc<Allocation>, work: Work, call: &dyn Fn() -> CUresult) -> Freed {
        if work == Work::MayRun && callbacks::are_running() {
            // The callback would wait for itself. The driver refuses the call: it does not know the address as an allocation.
            return Freed::Not(call());
        }
        free::free(allocation, work)
    }

    fn has_unfinished_frees(&self) -> bool {
        free::is_waiting()
    }

    fn finish_frees(&self) -> Vec<Arc<Allocation>> {
        free::sweep()
    }

    fn end(&self, allocation: &Allocation) {
        free::end(allocation);
    }

    fn forget_context(&self, context: &Arc<Context>) {
        content::forget_context(context);
        mapping::forget_context(context);
    }

    fn foresee_eviction(&self) {
        foresee_eviction();
    }
}

/// Bytes of memory that the library maps, for each context that has any.
fn by_context() -> Vec<(Arc<Context>, u64)> {
    let mut sums: Vec<(Arc<Context>, u64)> = Vec::new();
    allocations::each_mapped(|allocation| {
        let place = allocation.place();
        match sums.iter_mut().find(|(context, _)| Arc::ptr_eq(context, &place)) {
            Some((_, sum)) => *sum += allocation.size,
            None => sums.push((place, allocation.size)),
        }
    });
    sums
}

/// Prepares the host's memory in the background. Called by a thread of the library.
fn foresee_eviction() {
    static GROWING: AtomicBool = AtomicBool::new(false);
    let wanted = by_context();
    if wanted.is_empty() || GROWING.swap(true, Ordering::SeqCst) {
        return;
    }
    let work = move || {
        for (context, bytes) in wanted {
            host_pool::grow_ahead(&context, bytes);
        }
        GROWING.store(false, Ordering::SeqCst);
    };
    if std::thread::Builder::new().name("nvshare-pool".to_owned()).spawn(work).is_err() {
        GROWING.store(false, Ordering::SeqCst);
    }
}
