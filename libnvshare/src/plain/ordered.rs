//! Stream-ordered allocations, of the driver's pools and of the program's own.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;

use super::{Properties, graphs, kept, later, lock};
use crate::cuda::{
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, CUcontext, CUdevice, CUdeviceptr, CUmemoryPool, CUresult, CUstream,
};
use crate::devices::{self, Device};
use crate::ledger::Kind;
use crate::streams::StreamKey;
use crate::{capture, driver, gate, ledger, memory};

type AllocAsync = unsafe extern "C-unwind" fn(*mut CUdeviceptr, usize, CUstream) -> CUresult;
type AllocFromPoolAsync =
    unsafe extern "C-unwind" fn(*mut CUdeviceptr, usize, CUmemoryPool, CUstream) -> CUresult;
type FreeAsync = unsafe extern "C-unwind" fn(CUdeviceptr, CUstream) -> CUresult;
type PoolCreate = unsafe extern "C-unwind" fn(*mut CUmemoryPool, *const c_void) -> CUresult;
type PoolSetAttribute = unsafe extern "C-unwind" fn(CUmemoryPool, c_int, *mut c_void) -> CUresult;
type PoolTrimTo = unsafe extern "C-unwind" fn(CUmemoryPool, usize) -> CUresult;
type PoolDestroy = unsafe extern "C-unwind" fn(CUmemoryPool) -> CUresult;

/// The program's own pools, by the device that they are on; `None`: on none.
static POOLS: Mutex<BTreeMap<usize, Option<CUdevice>>> = Mutex::new(BTreeMap::new());

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn pool_create(
    real: PoolCreate,
    pool: *mut CUmemoryPool,
    properties: *const c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(pool, properties) };
    if result == CUresult::SUCCESS && !pool.is_null() && !gate::is_forked() {
        // SAFETY: the driver accepted both.
        let (pool, device) = unsafe { (*pool, Properties::device(properties)) };
        lock(&POOLS).insert(pool.0 as usize, device.map(|device| device.ordinal));
    }
    result
}

/// Does something with each pool of a device, none of which goes away meanwhile.
pub(super) fn each_pool(device: CUdevice, mut body: impl FnMut(CUmemoryPool)) {
    let own = lock(&POOLS);
    driver::default_pool(device).into_iter().for_each(&mut body);
    own.iter()
        .filter(|(_, of)| **of == Some(device))
        .for_each(|(&pool, _)| body(CUmemoryPool(pool as *mut c_void)));
}

/// Allocations of the pool live on until they are freed.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn pool_destroy(real: PoolDestroy, pool: CUmemoryPool) -> CUresult {
    if gate::is_forked() {
        // SAFETY: the caller's argument.
        return unsafe { real(pool) };
    }
    let known = lock(&POOLS).remove(&(pool.0 as usize));
    // SAFETY: the caller's argument.
    let result = unsafe { real(pool) };
    match (result, known) {
        (CUresult::SUCCESS, Some(Some(device))) => devices::get(device).into_iter().for_each(kept::look),
        (CUresult::SUCCESS, _) | (_, None) => {}
        (_, Some(device)) => {
            lock(&POOLS).insert(pool.0 as usize, device);
        }
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn pool_set_attribute(
    real: PoolSetAttribute,
    pool: CUmemoryPool,
    attribute: c_int,
    value: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(pool, attribute, value) };
    if result == CUresult::SUCCESS && attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD && !value.is_null() {
        // SAFETY: the driver has read one of this size there.
        let threshold = unsafe { value.cast::<u64>().read_unaligned() };
        if threshold > 0 {
            kept::uses_pools();
        }
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn pool_trim_to(real: PoolTrimTo, pool: CUmemoryPool, keep: usize) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(pool, keep) };
    devices::used().for_each(kept::look);
    result
}

/// The device's pools are gone with its contexts.
pub(super) fn forget_pools(device: CUdevice) {
    lock(&POOLS).retain(|_, of| *of != Some(device));
}

/// Whether an allocation on a stream becomes a node of a graph.
fn in_graph(stream: CUstream, twin: bool) -> bool {
    capture::is_capturing(StreamKey::new(stream, twin))
}

/// # Safety
/// `place` is null or where the driver would write.
unsafe fn ordered(
    on: Option<(&'static Device, CUcontext)>,
    place: *mut CUdeviceptr,
    bytes: usize,
    real: impl Fn(*mut CUdeviceptr) -> CUresult,
) -> CUresult {
    let Some((device, context)) = on.filter(|_| !place.is_null() && bytes > 0) else { return real(place) };
    let made = memory::allocate(device, context, bytes as u64, Kind::Ordered, || {
        let mut base = 0;
        real(&raw mut base).ok()?;
        Ok(base)
    });
    // SAFETY: not null, and where the driver would write.
    unsafe { memory::answer(made, place) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn alloc_async<const TWIN: bool>(
    real: AllocAsync,
    place: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let on = memory::target();
    if in_graph(stream, TWIN) {
        // SAFETY: the caller's arguments.
        let add = || unsafe { real(place, bytes, stream) };
        return graphs::admitted(on.map(|(device, _)| device), bytes as u64, add);
    }
    // SAFETY: the caller's arguments, `place` or a place of ours.
    unsafe { ordered(on, place, bytes, |place| real(place, bytes, stream)) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn alloc_from_pool_async<const TWIN: bool>(
    real: AllocFromPoolAsync,
    place: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> CUresult {
    if in_graph(stream, TWIN) {
        // SAFETY: the caller's arguments.
        let add = || unsafe { real(place, bytes, pool, stream) };
        return graphs::admitted(memory::target().map(|(device, _)| device), bytes as u64, add);
    }
    let known = lock(&POOLS).get(&(pool.0 as usize)).copied();
    let on = match known {
        // A default pool: the current device's, as good as always.
        None => memory::target(),
        Some(None) => None,
        Some(Some(device)) => {
            memory::target().and_then(|(_, context)| Some((devices::get(device)?, context)))
        }
    };
    // SAFETY: the caller's arguments, `place` or a place of ours.
    unsafe { ordered(on, place, bytes, |place| real(place, bytes, pool, stream)) }
}

/// The driver frees what `cuMemAlloc` returned in stream order too. Should it not do so for managed memory, that is
/// [freed later](later).
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn free_async<const TWIN: bool>(
    real: FreeAsync,
    base: CUdeviceptr,
    stream: CUstream,
) -> CUresult {
    let result = memory::free_with(base, || {
        // SAFETY: the caller's arguments.
        unsafe { real(base, stream) }
    });
    if matches!(result, CUresult::INVALID_VALUE | CUresult::NOT_SUPPORTED)
        && let Some(allocation) = ledger::find(base)
        && allocation.kind == Kind::Device
        && !in_graph(stream, TWIN)
    {
        return later::free(base, allocation.context, StreamKey::new(stream, TWIN).handle());
    }
    result
}
