//! Memory in stream order.

use std::ffi::c_int;

use super::{api, give, give_new, status, twins, with_place};
use crate::capture::Kind;
use crate::pool::Pool;
use crate::process::{self, CAPTURE_INVALIDATED, Failure, INVALID_VALUE, NOT_SUPPORTED};
use crate::tables::Tables;

/// `CU_MEM_ALLOCATION_TYPE_PINNED` and `CU_MEM_ALLOCATION_TYPE_MANAGED`
const PINNED: c_int = 1;
const MANAGED: c_int = 2;
/// `CU_MEM_LOCATION_TYPE_DEVICE`
const DEVICE: c_int = 1;

/// Attributes of pools.
const RELEASE_THRESHOLD: c_int = 4;
const RESERVED: c_int = 5;
const USED: c_int = 7;

api! {
    fn cuDeviceGetDefaultMemPool(pool: *mut usize, device: c_int) { unsafe { give(pool, process::get().and_then(|p| { let gpu = p.gpu_of(device)?; Ok(p.tables().default_pool(gpu)) })) } }
    fn cuDeviceGetMemPool(pool: *mut usize, device: c_int) { unsafe { give(pool, process::get().and_then(|p| { let gpu = p.gpu_of(device)?; Ok(p.tables().current_pool(gpu)) })) } }
    fn cuDeviceSetMemPool(device: c_int, pool: usize) { status(process::get().and_then(|p| { let gpu = p.gpu_of(device)?; p.tables().set_current_pool(gpu, pool) })) }
    fn cuMemGetDefaultMemPool(pool: *mut usize, location: *const [c_int; 2], kind: c_int) { unsafe { give(pool, pool_at(location, kind, Tables::default_pool)) } }
    fn cuMemGetMemPool(pool: *mut usize, location: *const [c_int; 2], kind: c_int) { unsafe { give(pool, pool_at(location, kind, Tables::current_pool)) } }
    fn cuMemPoolCreate(pool: *mut usize, properties: *const [c_int; 4]) {
        // SAFETY: null, or what begins with the kind, the kinds of handles, and the location.
        let Some(&[kind, handles, location, device]) = (unsafe { properties.as_ref() }) else { return INVALID_VALUE };
        unsafe { give_new(pool, || {
            let p = process::get()?;
            let is_possible = kind == PINNED || kind == MANAGED && p.world.config().managed_pools;
            // No pool is shared with other processes.
            if !is_possible || (handles, location) != (0, DEVICE) { return Err(INVALID_VALUE) }
            let gpu = p.gpu_of(device)?;
            Ok(p.tables().pools.add(Pool { gpu, managed: kind == MANAGED, threshold: 0 }))
        }) }
    }
    fn cuMemPoolDestroy(pool: usize) { status(process::get().and_then(|p| p.destroy_pool(pool))) }
    fn cuMemPoolSetAttribute(pool: usize, attribute: c_int, value: *const u64) {
        if value.is_null() || attribute != RELEASE_THRESHOLD { return INVALID_VALUE }
        // SAFETY: not null.
        status(process::get().and_then(|p| { p.tables().pools.get_mut(pool)?.threshold = unsafe { *value }; Ok(()) }))
    }
    fn cuMemPoolGetAttribute(pool: usize, attribute: c_int, value: *mut u64) {
        unsafe { give(value, process::get().and_then(|p| {
            let threshold = p.tables().pools.get(pool)?.threshold;
            let (used, idle) = p.pool_bytes(pool);
            match attribute { RELEASE_THRESHOLD => Ok(threshold), RESERVED => Ok(used + idle), USED => Ok(used), _ => Err(INVALID_VALUE) }
        })) }
    }
    fn cuMemPoolTrimTo(pool: usize, _keep: usize) { status(process::get().and_then(|p| { p.tables().pools.get(pool)?; p.trim_pool(pool); Ok(()) })) }
    fn cuDeviceGetGraphMemAttribute(device: c_int, attribute: c_int, value: *mut u64) {
        unsafe { give(value, process::get().and_then(|p| if attribute == 2 { Ok(p.graph_bytes(p.gpu_of(device)?)) } else { Err(INVALID_VALUE) })) }
    }
    fn cuDeviceGraphMemTrim(device: c_int) { status(process::get().and_then(|p| p.trim_graphs(p.gpu_of(device)?))) }
}

twins! { per_thread:
    fn cuMemAllocAsync / cuMemAllocAsync_ptsz (place: *mut u64, bytes: usize, stream: usize) {
        unsafe { give_new(place, || allocate(bytes, None, stream, per_thread)) }
    }
    fn cuMemAllocFromPoolAsync / cuMemAllocFromPoolAsync_ptsz (place: *mut u64, bytes: usize, pool: usize, stream: usize) {
        unsafe { give_new(place, || allocate(bytes, Some(pool), stream, per_thread)) }
    }
    fn cuMemFreeAsync / cuMemFreeAsync_ptsz (base: u64, stream: usize) {
        status(with_place(stream, per_thread, |p, s| p.free_in_order(base, &s)))
    }
}

/// A card's pool of device memory, as `of_device` finds it, or its pool of managed memory: no other one is made the current one.
///
/// # Safety
/// Null, or a location.
unsafe fn pool_at(
    location: *const [c_int; 2],
    kind: c_int,
    of_device: fn(&mut Tables, usize) -> usize,
) -> Result<usize, Failure> {
    // SAFETY: promised by the caller.
    let Some(&[DEVICE, device]) = (unsafe { location.as_ref() }) else { return Err(INVALID_VALUE) };
    let p = process::get()?;
    let gpu = p.gpu_of(device)?;
    match kind {
        PINNED => Ok(of_device(&mut p.tables(), gpu)),
        MANAGED if p.world.config().managed_pools => Ok(p.tables().default_managed_pool(gpu)),
        _ => Err(INVALID_VALUE),
    }
}

/// Allocates from a pool, or from the current pool of the stream's card.
fn allocate(bytes: usize, pool: Option<usize>, stream: usize, per_thread: bool) -> Result<u64, Failure> {
    with_place(stream, per_thread, |p, stream| {
        let mut tables = p.tables();
        let pool = pool.unwrap_or_else(|| tables.current_pool(stream.gpu));
        let Pool { gpu, managed, .. } = *tables.pools.get(pool)?;
        if !tables.is_capturing(&stream) {
            tables.legacy_is_free(&stream)?;
            drop(tables);
            return p.allocate_ordered(&stream, pool, bytes as u64);
        }
        drop(tables);
        // Graphs have a pool of their own.
        if managed {
            return Err(NOT_SUPPORTED);
        }
        let node = p.graph_node(gpu, bytes as u64)?;
        let captured = p.tables().capture_node(&stream, Kind::Memory, None, Some(node))?;
        if captured { Ok(node.base()) } else { Err(CAPTURE_INVALIDATED) }
    })
}
