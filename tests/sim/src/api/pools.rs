//! Memory in stream order.

use std::ffi::c_int;

use super::{api, give, give_new, status, twins, with_stream};
use crate::capture::Kind;
use crate::process::{self, CAPTURE_INVALIDATED, Failure, INVALID_VALUE, NOT_SUPPORTED};

/// The handle of the first card's default pool.
const POOLS: usize = 0x900;
/// The handle of the first card's managed pool.
const MANAGED_POOLS: usize = 0xa00;

api! {
    fn cuDeviceGetDefaultMemPool(pool: *mut usize, device: c_int) { unsafe { give(pool, process::get().and_then(|p| Ok(POOLS + p.gpu_of(device)?))) } }
    fn cuDeviceGetMemPool(pool: *mut usize, device: c_int) { unsafe { give(pool, process::get().and_then(|p| Ok(POOLS + p.gpu_of(device)?))) } }
    fn cuDeviceSetMemPool(device: c_int, pool: usize) { status(process::get().and_then(|p| if pool_of(pool)?.0 == p.gpu_of(device)? { Ok(()) } else { Err(INVALID_VALUE) })) }
    fn cuMemPoolCreate(pool: *mut usize, properties: *const [c_int; 4]) {
        // SAFETY: null, or what begins with the kind, the kinds of handles, and the location.
        let Some(&[kind, handles, location, device]) = (unsafe { properties.as_ref() }) else { return INVALID_VALUE };
        unsafe { give(pool, process::get().and_then(|p| {
            // One managed pool for each card is all that anybody has wanted.
            if (kind, handles, location) != (2, 0, 1) || !p.world.config().managed_pools { return Err(INVALID_VALUE) }
            Ok(MANAGED_POOLS + p.gpu_of(device)?)
        })) }
    }
    fn cuMemPoolDestroy(pool: usize) { status(pool_of(pool).and_then(|(_, managed)| if managed { Ok(()) } else { Err(INVALID_VALUE) })) }
    fn cuMemPoolSetAttribute(_pool: usize, attribute: c_int, value: *const u64) {
        if value.is_null() || attribute != 4 { return INVALID_VALUE }
        // SAFETY: not null.
        status(process::get().map(|p| p.tables().pool.threshold = unsafe { *value }))
    }
    fn cuMemPoolGetAttribute(pool: usize, attribute: c_int, value: *mut u64) {
        unsafe { give(value, process::get().and_then(|p| {
            let (gpu, managed) = pool_of(pool)?;
            let (used, idle) = p.pool_bytes(gpu, managed);
            match attribute { 4 => Ok(p.tables().pool.threshold), 5 => Ok(used + idle), 7 => Ok(used), _ => Err(INVALID_VALUE) }
        })) }
    }
    fn cuMemPoolTrimTo(pool: usize, _keep: usize) { status(process::get().and_then(|p| { let (gpu, managed) = pool_of(pool)?; p.trim_pool(gpu, managed); Ok(()) })) }
    fn cuDeviceGetGraphMemAttribute(device: c_int, attribute: c_int, value: *mut u64) {
        unsafe { give(value, process::get().and_then(|p| if attribute == 2 { Ok(p.graph_bytes(p.gpu_of(device)?)) } else { Err(INVALID_VALUE) })) }
    }
    fn cuDeviceGraphMemTrim(device: c_int) { status(process::get().and_then(|p| p.trim_graphs(p.gpu_of(device)?))) }
}

twins! { per_thread:
    fn cuMemAllocAsync / cuMemAllocAsync_ptsz (place: *mut u64, bytes: usize, stream: usize) {
        // A managed pool never takes the place of the plain one here (measured).
        unsafe { give_new(place, || allocate(bytes, None, stream, per_thread)) }
    }
    fn cuMemAllocFromPoolAsync / cuMemAllocFromPoolAsync_ptsz (place: *mut u64, bytes: usize, pool: usize, stream: usize) {
        unsafe { give_new(place, || allocate(bytes, Some(pool_of(pool)?), stream, per_thread)) }
    }
    fn cuMemFreeAsync / cuMemFreeAsync_ptsz (base: u64, stream: usize) {
        status(with_stream(stream, per_thread, |p, s| p.free_in_order(base, &s)))
    }
}

/// The card of a pool, and whether the pool is managed.
fn pool_of(pool: usize) -> Result<(usize, bool), Failure> {
    let most = process::get()?.world.config().gpus as usize;
    let (gpu, managed) = match pool {
        MANAGED_POOLS.. => (pool - MANAGED_POOLS, true),
        POOLS.. => (pool - POOLS, false),
        _ => return Err(INVALID_VALUE),
    };
    if gpu < most { Ok((gpu, managed)) } else { Err(INVALID_VALUE) }
}

fn allocate(
    bytes: usize,
    pool: Option<(usize, bool)>,
    stream: usize,
    per_thread: bool,
) -> Result<u64, Failure> {
    with_stream(stream, per_thread, |p, stream| {
        let (gpu, managed) = pool.unwrap_or((stream.gpu, false));
        if !p.tables().is_capturing(&stream) {
            p.tables().legacy_is_free(&stream)?;
            return p.allocate_ordered(&stream, gpu, bytes as u64, managed);
        }
        // Graphs have a pool of their own.
        if managed {
            return Err(NOT_SUPPORTED);
        }
        let node = p.graph_node(gpu, bytes as u64)?;
        let captured = p.tables().capture_node(&stream, Kind::Memory, None, Some(node))?;
        if captured { Ok(node.base()) } else { Err(CAPTURE_INVALIDATED) }
    })
}
