//! The pools that stream-ordered allocations are of.
//!
//! From CUDA 13 on, a pool can be of managed memory: allocations of it are as fast as a plain pool's (measured), and can
//! be moved. So the program's own pools become such pools, and in place of a device's default pool stands one of ours,
//! which the program takes for it. Where the driver has none, or the pool's memory is to be shared with other
//! processes, the program gets what it asked for: that is counted, and not moved.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use nvshare_proto::MemoryMode;

use crate::driver::types::{
    CU_MEM_LOCATION_TYPE_DEVICE, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, CUdevice, CUdeviceptr, CUmemLocation,
    CUmemoryPool, CUresult, CUstream,
};
use crate::driver::{self, Relaxed};
use crate::entry_points::real;
use crate::hooks::callbacks;
use crate::memory::allocations::Kind;
use crate::memory::charge::{Properties, lock};
use crate::memory::devices::{self, Device};
use crate::memory::driver_reserve;
use crate::memory::plain;
use crate::process::{lifecycle, log};
use crate::session;

type PoolCreate = unsafe extern "C-unwind" fn(*mut CUmemoryPool, *const c_void) -> CUresult;
type PoolOfDevice = unsafe extern "C-unwind" fn(*mut CUmemoryPool, CUdevice) -> CUresult;
type PoolOfLocation = unsafe extern "C-unwind" fn(*mut CUmemoryPool, *mut CUmemLocation, c_int) -> CUresult;
type SetPoolOfDevice = unsafe extern "C-unwind" fn(CUdevice, CUmemoryPool) -> CUresult;
type SetPoolOfLocation = unsafe extern "C-unwind" fn(*mut CUmemLocation, c_int, CUmemoryPool) -> CUresult;
type GetAccess = unsafe extern "C-unwind" fn(*mut c_int, CUmemoryPool, *mut CUmemLocation) -> CUresult;
type PoolSetAttribute = unsafe extern "C-unwind" fn(CUmemoryPool, c_int, *mut c_void) -> CUresult;
type PoolTrimTo = unsafe extern "C-unwind" fn(CUmemoryPool, usize) -> CUresult;
type PoolDestroy = unsafe extern "C-unwind" fn(CUmemoryPool) -> CUresult;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`: device memory.
const PINNED: c_int = 1;
/// `CU_MEM_ALLOCATION_TYPE_MANAGED`
const MANAGED: c_int = 2;

/// A pool that was created.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pool {
    /// `None`: it is on none.
    pub(crate) device: Option<CUdevice>,
    /// What allocations of it are.
    pub(crate) kind: Kind,
}

/// The program's own pools, and ours, by handle.
static POOLS: Mutex<BTreeMap<usize, Pool>> = Mutex::new(BTreeMap::new());
/// What stands in place of each device's default pool; `None`: nothing does.
static STAND_INS: Mutex<BTreeMap<CUdevice, Option<usize>>> = Mutex::new(BTreeMap::new());
/// What the program has made each device's current pool. The driver keeps one for each kind of memory, and
/// `cuMemAllocAsync` is of that for device memory (measured); here the managed ones take part.
static CURRENT: Mutex<BTreeMap<CUdevice, usize>> = Mutex::new(BTreeMap::new());
/// Memory of a pool has been moved to the host, and may be handed out there again.
static MOVED: AtomicBool = AtomicBool::new(false);

/// `CUmemPoolProps`
#[repr(C)]
struct PoolProperties {
    properties: Properties,
    /// Security attributes, the most that it may have, how it is used, and what is not used yet.
    rest: [u64; 9],
}

/// The properties of a managed pool on a device.
fn managed_on(device: CUdevice) -> PoolProperties {
    let location = CUmemLocation { kind: CU_MEM_LOCATION_TYPE_DEVICE, id: device };
    PoolProperties { properties: Properties { kind: MANAGED, handle_types: 0, location }, rest: [0; 9] }
}

/// Whether pools on a device may be managed.
fn may_be_managed(device: &Device) -> bool {
    device.memory == MemoryMode::Managed && !plain::needs_some_plain()
}

/// The device of a pool with these properties, if it is one of device memory with nothing special about it.
///
/// # Safety
/// Null, or what the driver's contract says.
unsafe fn ordinary(properties: *const c_void) -> Option<&'static Device> {
    // SAFETY: promised by the caller.
    let asked = unsafe { properties.cast::<PoolProperties>().as_ref() }?;
    let plain = asked.properties.kind == PINNED && asked.properties.handle_types == 0 && asked.rest == [0; 9];
    // SAFETY: as above.
    unsafe { Properties::device(properties) }.filter(|device| plain && may_be_managed(device))
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create(
    real: PoolCreate,
    pool: *mut CUmemoryPool,
    properties: *const c_void,
) -> CUresult {
    if pool.is_null() {
        // SAFETY: the caller's arguments.
        return unsafe { real(pool, properties) };
    }
    // SAFETY: the caller's properties, where the driver accepts them.
    if let Some(device) = unsafe { ordinary(properties) } {
        let managed = managed_on(device.ordinal);
        // SAFETY: the caller's place, and properties that live as long as the call.
        if unsafe { real(pool, (&raw const managed).cast()) } == CUresult::SUCCESS {
            // SAFETY: the driver has written it.
            enter(unsafe { *pool }, Pool { device: Some(device.ordinal), kind: Kind::Pooled });
            return CUresult::SUCCESS;
        }
    }
    // SAFETY: the caller's arguments.
    let result = unsafe { real(pool, properties) };
    if result == CUresult::SUCCESS {
        // SAFETY: the driver accepted both.
        let (pool, device) = unsafe { (*pool, Properties::device(properties)) };
        enter(pool, Pool { device: device.map(|device| device.ordinal), kind: Kind::Ordered });
    }
    result
}

fn enter(handle: CUmemoryPool, pool: Pool) {
    lock(&POOLS).insert(handle.0 as usize, pool);
}

/// What is known of a pool; `None`: nobody created it, so it is a default pool.
pub(crate) fn find(pool: CUmemoryPool) -> Option<Pool> {
    lock(&POOLS).get(&(pool.0 as usize)).copied()
}

/// What stands in place of a device's default pool, from now on; `None`: nothing does.
fn stand_in(device: &Device) -> Option<CUmemoryPool> {
    let mut stand_ins = lock(&STAND_INS);
    let known = stand_ins.entry(device.ordinal).or_insert_with(|| {
        let _relaxed = Relaxed::begin();
        make_stand_in(device)
            .inspect_err(|error| {
                log::info(format_args!("no managed pools ({error:?}): stream-ordered memory is not moved"))
            })
            .ok()
    });
    known.map(|handle| CUmemoryPool(handle as *mut c_void))
}

fn make_stand_in(device: &Device) -> Result<usize, CUresult> {
    if !may_be_managed(device) {
        return Err(CUresult::NOT_SUPPORTED);
    }
    let create = real::cuMemPoolCreate.get().ok_or(CUresult::NOT_SUPPORTED)?;
    let mut pool = CUmemoryPool::NULL;
    let properties = managed_on(device.ordinal);
    // SAFETY: a place for the handle, and properties that live as long as the call.
    unsafe { create(&raw mut pool, (&raw const properties).cast()) }.ok()?;
    enter(pool, Pool { device: Some(device.ordinal), kind: Kind::Pooled });
    Ok(pool.0 as usize)
}

/// The managed pool that `cuMemAllocAsync` is of on a device; `None`: it is of one of the driver's own.
pub(crate) fn current(device: &Device) -> Option<CUmemoryPool> {
    let chosen = lock(&CURRENT).get(&device.ordinal).map(|&handle| CUmemoryPool(handle as *mut c_void));
    chosen.or_else(|| stand_in(device)).filter(|&pool| managed_of(pool).is_some())
}

/// The device that a managed pool is on; `None`: it is none.
fn managed_of(pool: CUmemoryPool) -> Option<CUdevice> {
    find(pool).filter(|pool| pool.kind == Kind::Pooled)?.device
}

/// Makes a pool a device's current one. For what is not of a managed one, the driver's default is current meanwhile.
fn make_current(device: &Device, pool: CUmemoryPool, set: impl FnOnce(CUmemoryPool) -> CUresult) -> CUresult {
    let result = match managed_of(pool) {
        Some(of) if of == device.ordinal => driver::default_pool(of).map_or_else(|error| error, set),
        Some(_) => CUresult::INVALID_VALUE,
        None => set(pool),
    };
    if result == CUresult::SUCCESS {
        if stand_in(device) == Some(pool) {
            lock(&CURRENT).remove(&device.ordinal);
        } else {
            lock(&CURRENT).insert(device.ordinal, pool.0 as usize);
        }
    }
    result
}

/// A device that the program asks about, perhaps before it uses any.
fn of_ordinal(device: CUdevice) -> Option<&'static Device> {
    // What the driver's own thread asks for, the driver answers.
    if callbacks::running() {
        return None;
    }
    session::start();
    devices::get(device)
}

/// Asks the driver for a pool by `real`; the program sees `ours` where there is one.
///
/// # Safety
/// `place` is null or where the driver would write.
unsafe fn instead(
    ours: Option<CUmemoryPool>,
    place: *mut CUmemoryPool,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let result = real();
    if let (CUresult::SUCCESS, Some(ours)) = (result, ours) {
        // SAFETY: the driver has written one there.
        unsafe { *place = ours };
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn default_of_device(
    real: PoolOfDevice,
    pool: *mut CUmemoryPool,
    device: CUdevice,
) -> CUresult {
    let ours = of_ordinal(device).and_then(stand_in);
    // SAFETY: the caller's arguments.
    unsafe { instead(ours, pool, || real(pool, device)) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn current_of_device(
    real: PoolOfDevice,
    pool: *mut CUmemoryPool,
    device: CUdevice,
) -> CUresult {
    let ours = of_ordinal(device).and_then(current);
    // SAFETY: the caller's arguments.
    unsafe { instead(ours, pool, || real(pool, device)) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn set_of_device(real: SetPoolOfDevice, device: CUdevice, pool: CUmemoryPool) -> CUresult {
    // SAFETY: the caller's arguments.
    let set = |pool| unsafe { real(device, pool) };
    match of_ordinal(device) {
        Some(known) => make_current(known, pool, set),
        None => set(pool),
    }
}

/// # Safety
/// Null, or a location.
unsafe fn device_at(location: *const CUmemLocation, kind: c_int) -> Option<&'static Device> {
    // SAFETY: promised by the caller.
    let location = unsafe { location.as_ref() }?;
    (kind == PINNED && location.kind == CU_MEM_LOCATION_TYPE_DEVICE)
        .then(|| of_ordinal(location.id))
        .flatten()
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn default_at(
    real: PoolOfLocation,
    pool: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    kind: c_int,
) -> CUresult {
    // SAFETY: the caller's arguments.
    unsafe { instead(device_at(location, kind).and_then(stand_in), pool, || real(pool, location, kind)) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn current_at(
    real: PoolOfLocation,
    pool: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    kind: c_int,
) -> CUresult {
    // SAFETY: the caller's arguments.
    unsafe { instead(device_at(location, kind).and_then(current), pool, || real(pool, location, kind)) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn set_at(
    real: SetPoolOfLocation,
    location: *mut CUmemLocation,
    kind: c_int,
    pool: CUmemoryPool,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let set = |pool| unsafe { real(location, kind, pool) };
    // SAFETY: the caller's location.
    match unsafe { device_at(location, kind) } {
        Some(known) => make_current(known, pool, set),
        None => set(pool),
    }
}

/// A pool of device memory is its own device's to read and write; the driver does not say so of a managed one.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_access(
    real: GetAccess,
    flags: *mut c_int,
    pool: CUmemoryPool,
    location: *mut CUmemLocation,
) -> CUresult {
    /// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
    const READ_AND_WRITE: c_int = 3;
    // SAFETY: the caller's arguments.
    let result = unsafe { real(flags, pool, location) };
    if let (CUresult::SUCCESS, Some(of)) = (result, managed_of(pool)) {
        // SAFETY: the driver has read the one and written the other.
        unsafe {
            if (*location).kind == CU_MEM_LOCATION_TYPE_DEVICE && (*location).id == of {
                *flags = READ_AND_WRITE;
            }
        }
    }
    result
}

/// Makes one driver call with each pool of a device, and the kind of its memory; none of them ends during its call.
pub(crate) fn each(device: CUdevice, mut call: impl FnMut(CUmemoryPool, Kind)) {
    driver::default_pool(device).into_iter().for_each(|pool| call(pool, Kind::Ordered));
    let of_device = |pool: &Pool| pool.device == Some(device);
    let handles: Vec<usize> =
        lock(&POOLS).iter().filter(|(_, pool)| of_device(pool)).map(|(&handle, _)| handle).collect();
    for handle in handles {
        // Its end takes it off the list first, and so waits for this one call.
        let pools = lock(&POOLS);
        if let Some(pool) = pools.get(&handle).filter(|pool| of_device(pool)) {
            call(CUmemoryPool(handle as *mut c_void), pool.kind);
        }
    }
}

/// The pools of a device that is being reset: from now on nobody uses them.
pub(crate) fn take(device: CUdevice) -> Vec<(usize, Pool)> {
    let mut pools = lock(&POOLS);
    let taken: Vec<(usize, Pool)> =
        pools.iter().filter(|(_, pool)| pool.device == Some(device)).map(|(&h, &pool)| (h, pool)).collect();
    taken.iter().for_each(|(handle, _)| {
        pools.remove(handle);
    });
    taken
}

/// The device was not reset.
pub(crate) fn put_back(taken: Vec<(usize, Pool)>) {
    lock(&POOLS).extend(taken);
}

/// Allocations of the pool live on until they are freed.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn destroy(real: PoolDestroy, pool: CUmemoryPool) -> CUresult {
    let handle = pool.0 as usize;
    let stands_for =
        lock(&STAND_INS).iter().find(|(_, ours)| **ours == Some(handle)).map(|(&device, _)| device);
    if let Some(default) = stands_for.and_then(|device| driver::default_pool(device).ok()) {
        // SAFETY: what the program means, which the driver refuses to destroy.
        return unsafe { real(default) };
    }
    let known = lock(&POOLS).remove(&handle);
    // SAFETY: the caller's argument.
    let result = unsafe { real(pool) };
    if result == CUresult::SUCCESS {
        lock(&CURRENT).retain(|_, current| *current != handle);
    }
    match (result, known) {
        (CUresult::SUCCESS, Some(Pool { device: Some(device), .. })) => {
            devices::get(device).into_iter().for_each(driver_reserve::look);
        }
        (CUresult::SUCCESS, _) | (_, None) => {}
        (_, Some(known)) => enter(pool, known),
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn set_attribute(
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
            driver_reserve::uses_pools();
        }
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn trim_to(real: PoolTrimTo, pool: CUmemoryPool, keep: usize) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(pool, keep) };
    devices::used().for_each(driver_reserve::look);
    result
}

/// The device's pools are gone with its contexts.
pub(crate) fn forget(device: CUdevice) {
    lock(&POOLS).retain(|_, pool| pool.device != Some(device));
    lock(&STAND_INS).remove(&device);
    lock(&CURRENT).remove(&device);
}

/// Memory of a pool is on the host now.
pub(crate) fn moved() {
    MOVED.store(true, Ordering::Relaxed);
}

/// What a pool hands out may have been moved to the host when it was another allocation: it is brought back in the order
/// of the stream.
pub(crate) fn bring(base: CUdeviceptr, bytes: u64, device: &Device, stream: CUstream) {
    if !MOVED.load(Ordering::Relaxed) || lifecycle::has_begun() {
        return;
    }
    let _relaxed = Relaxed::begin();
    if let Err(error) = driver::prefetch(base, bytes, device.ordinal, stream) {
        log::debug(format_args!("bring {bytes} bytes of a pool: {error:?}; they come by faults"));
    }
}
