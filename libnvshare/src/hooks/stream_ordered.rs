//! Stream-ordered allocations, from the driver's pools and from the program's own.

use std::sync::Arc;

use super::graphs;
use super::memory::free_unless_freed;
use super::target::{answer, target_of};
use crate::driver;
use crate::driver::functions::{self, signatures};
use crate::driver::types::{CUdeviceptr, CUmemoryPool, CUresult, CUstream};
use crate::memory::admission::allocate;
use crate::memory::allocations::{self, Kind};
use crate::memory::backing::AllocationRequest;
use crate::memory::devices::{self, Device};
use crate::memory::{deferred_free, plain, pools};
use crate::work::contexts::Context;
use crate::work::stream_key::StreamKey;
use crate::work::{captures, used_devices};

/// Whether an allocation on a stream becomes a node of a graph.
fn in_graph(stream: CUstream, per_thread: bool) -> bool {
    captures::is_capturing(StreamKey::new(stream, per_thread))
}

/// Allocates memory of a pool; none: the default pool.
///
/// # Safety
/// `place` is null or where the driver would write.
unsafe fn ordered(
    on: Option<(&'static Device, Arc<Context>)>,
    kind: Kind,
    pool: Option<CUmemoryPool>,
    place: *mut CUdeviceptr,
    bytes: usize,
    real: impl Fn(*mut CUdeviceptr) -> CUresult,
) -> CUresult {
    let Some((device, context)) = on.filter(|_| !place.is_null() && bytes > 0) else { return real(place) };
    // A pool may be on another device than the stream.
    used_devices::add(device.ordinal);
    let request = AllocationRequest { pool, ..AllocationRequest::new(device, context, kind, bytes as u64) };
    let made = allocate(request, || {
        let mut base = 0;
        real(&raw mut base).ok()?;
        Ok(base)
    });
    // SAFETY: not null, and where the driver would write.
    unsafe { answer(made, place) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn alloc_async<const PER_THREAD: bool>(
    real: signatures::cuMemAllocAsync,
    place: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let on = target_of(StreamKey::new(stream, PER_THREAD).handle());
    let in_graph = in_graph(stream, PER_THREAD);
    let from_pool = if PER_THREAD {
        &functions::cuMemAllocFromPoolAsync_ptsz
    } else {
        &functions::cuMemAllocFromPoolAsync
    };
    // Graphs have a pool of their own. Memory that other processes reach has to stay plain. Both come from the driver's pools.
    let managed = on
        .as_ref()
        .filter(|_| !in_graph && !plain::needs_plain_of_pools(bytes as u64))
        .and_then(|(device, _)| pools::current(device))
        .zip(from_pool.get());
    let kind = if managed.is_some() { Kind::ManagedPool } else { Kind::PlainPool };
    let call = |place| match managed {
        // SAFETY: the caller's arguments, `place` or a place of ours.
        None => unsafe { real(place, bytes, stream) },
        // SAFETY: as above, and a live pool.
        Some((pool, from_pool)) => unsafe { from_pool(place, bytes, pool, stream) },
    };
    if in_graph {
        return graphs::add_if_admitted(on.map(|(device, _)| device), bytes as u64, || call(place));
    }
    let of_program = || on.as_ref().and_then(|(device, _)| pools::current_plain(device));
    let pool = managed.map(|(pool, _)| pool).or_else(of_program);
    // SAFETY: the caller's place.
    unsafe { ordered(on, kind, pool, place, bytes, call) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn alloc_from_pool_async<const PER_THREAD: bool>(
    real: signatures::cuMemAllocFromPoolAsync,
    place: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> CUresult {
    let known = pools::find(pool);
    let target = || target_of(StreamKey::new(stream, PER_THREAD).handle());
    let on = match known {
        // A default pool, nearly always that of the stream's device.
        None => target(),
        Some(known) => target().and_then(|(_, context)| Some((devices::get(known.device?)?, context))),
    };
    if in_graph(stream, PER_THREAD) {
        let on = on.map(|(device, _)| device);
        let managed = known.is_some_and(|known| known.kind == Kind::ManagedPool);
        let plain = on.filter(|_| managed).and_then(|device| driver::default_pool(device.ordinal).ok());
        let pool = plain.unwrap_or(pool);
        // SAFETY: the caller's arguments. The pool may be another, as graphs have one of their own.
        return graphs::add_if_admitted(on, bytes as u64, || unsafe { real(place, bytes, pool, stream) });
    }
    let kind = known.map_or(Kind::PlainPool, |known| known.kind);
    // SAFETY: the caller's arguments, `place` or a place of ours.
    let call = |place| unsafe { real(place, bytes, pool, stream) };
    // SAFETY: the caller's place.
    unsafe { ordered(on, kind, known.map(|_| pool), place, bytes, call) }
}

/// The driver also frees memory of `cuMemAlloc` in stream order. If it does not do so for managed memory, the library
/// [frees it later](deferred_free).
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn free_async<const PER_THREAD: bool>(
    real: signatures::cuMemFreeAsync,
    base: CUdeviceptr,
    stream: CUstream,
) -> CUresult {
    if let Some(allocation) = allocations::find(base)
        && allocation.kind == Kind::Mapped
    {
        if in_graph(stream, PER_THREAD) {
            // A graph frees only memory that a graph has allocated: the driver reports an error.
            // SAFETY: the caller's arguments.
            return unsafe { real(base, stream) };
        }
        return deferred_free::free_in_order(&allocation, StreamKey::new(stream, PER_THREAD).handle());
    }
    let result = free_unless_freed(base, || {
        // SAFETY: the caller's arguments.
        unsafe { real(base, stream) }
    });
    if matches!(result, CUresult::INVALID_VALUE | CUresult::NOT_SUPPORTED)
        && let Some(allocation) = allocations::find(base)
        && allocation.kind == Kind::DeviceAsManaged
        && !in_graph(stream, PER_THREAD)
    {
        return deferred_free::free_in_order(&allocation, StreamKey::new(stream, PER_THREAD).handle());
    }
    result
}
