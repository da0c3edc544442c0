//! Functions about the pools of stream-ordered memory. See [`pools`].

use std::ffi::{c_int, c_void};

use super::target::{device_of, device_of_properties};
use crate::driver;
use crate::driver::functions::signatures;
use crate::driver::types::{
    CU_MEM_LOCATION_TYPE_DEVICE, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, CUdevice, CUmemLocation, CUmemoryPool,
    CUresult,
};
use crate::memory::allocations::Kind;
use crate::memory::devices::{self, Device};
use crate::memory::driver_reserve;
use crate::memory::pools::{self, Pool, PoolProperties};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`: device memory.
const PINNED: c_int = 1;

/// The device of a pool with these properties, if it is an ordinary pool of device memory, which can be managed instead.
///
/// # Safety
/// Null, or what the driver's contract says.
unsafe fn ordinary(properties: *const c_void) -> Option<&'static Device> {
    // SAFETY: promised by the caller.
    let asked = unsafe { properties.cast::<PoolProperties>().as_ref() }?;
    let plain = asked.properties.kind == PINNED && asked.properties.handle_types == 0 && asked.rest == [0; 9];
    // SAFETY: as above.
    let device = unsafe { device_of_properties(properties) }?;
    // Managed memory cannot be on a part of a device.
    let whole = asked.properties.location.is_device(device.ordinal);
    (plain && whole && pools::may_be_managed(device)).then_some(device)
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create(
    real: signatures::cuMemPoolCreate,
    pool: *mut CUmemoryPool,
    properties: *const c_void,
) -> CUresult {
    if pool.is_null() {
        // SAFETY: the caller's arguments.
        return unsafe { real(pool, properties) };
    }
    // SAFETY: the caller's properties, where the driver accepts them.
    if let Some(device) = unsafe { ordinary(properties) } {
        let managed = pools::managed_on(device.ordinal);
        // SAFETY: the caller's place, and properties that live as long as the call.
        if unsafe { real(pool, (&raw const managed).cast()) } == CUresult::SUCCESS {
            // SAFETY: the driver has written it.
            pools::enter(unsafe { *pool }, Pool { device: Some(device.ordinal), kind: Kind::ManagedPool });
            return CUresult::SUCCESS;
        }
    }
    // SAFETY: the caller's arguments.
    let result = unsafe { real(pool, properties) };
    if result == CUresult::SUCCESS {
        // SAFETY: the driver accepted both.
        let (pool, device) = unsafe { (*pool, device_of_properties(properties)) };
        // SAFETY: the driver has read them.
        pools::note_properties(unsafe { &*properties.cast::<PoolProperties>() });
        pools::enter(pool, Pool { device: device.map(|device| device.ordinal), kind: Kind::PlainPool });
    }
    result
}

/// Asks the driver for a pool by `real`, and gives the program `ours` instead if there is one.
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
    real: signatures::cuDeviceGetDefaultMemPool,
    pool: *mut CUmemoryPool,
    device: CUdevice,
) -> CUresult {
    let ours = device_of(device).and_then(pools::stand_in);
    // SAFETY: the caller's arguments.
    unsafe { instead(ours, pool, || real(pool, device)) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn current_of_device(
    real: signatures::cuDeviceGetMemPool,
    pool: *mut CUmemoryPool,
    device: CUdevice,
) -> CUresult {
    let ours = device_of(device).and_then(pools::current);
    // SAFETY: the caller's arguments.
    unsafe { instead(ours, pool, || real(pool, device)) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn set_of_device(
    real: signatures::cuDeviceSetMemPool,
    device: CUdevice,
    pool: CUmemoryPool,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let set = |pool| unsafe { real(device, pool) };
    match device_of(device) {
        Some(known) => pools::make_current(known, pool, set),
        None => set(pool),
    }
}

/// # Safety
/// Null, or a location.
unsafe fn device_at(location: *const CUmemLocation, kind: c_int) -> Option<&'static Device> {
    // SAFETY: promised by the caller.
    let location = unsafe { location.as_ref() }?;
    (kind == PINNED && location.kind == CU_MEM_LOCATION_TYPE_DEVICE).then(|| device_of(location.id)).flatten()
}

/// Asks the driver for a pool of its own of this kind. It makes a managed one at the first such call (measured).
fn of_kind(kind: c_int, ask: impl FnOnce() -> CUresult) -> CUresult {
    let result = ask();
    if result == CUresult::SUCCESS && kind == pools::MANAGED {
        pools::note_managed();
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn default_at(
    real: signatures::cuMemGetDefaultMemPool,
    pool: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    kind: c_int,
) -> CUresult {
    // SAFETY: the caller's arguments.
    unsafe {
        instead(device_at(location, kind).and_then(pools::stand_in), pool, || {
            of_kind(kind, || real(pool, location, kind))
        })
    }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn current_at(
    real: signatures::cuMemGetMemPool,
    pool: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    kind: c_int,
) -> CUresult {
    // SAFETY: the caller's arguments.
    unsafe {
        instead(device_at(location, kind).and_then(pools::current), pool, || {
            of_kind(kind, || real(pool, location, kind))
        })
    }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn set_at(
    real: signatures::cuMemSetMemPool,
    location: *mut CUmemLocation,
    kind: c_int,
    pool: CUmemoryPool,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let set = |pool| unsafe { real(location, kind, pool) };
    // SAFETY: the caller's location.
    match unsafe { device_at(location, kind) } {
        Some(known) => pools::make_current(known, pool, set),
        None => set(pool),
    }
}

/// A device may read and write a pool of its own memory. The driver does not say so of a managed pool.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_access(
    real: signatures::cuMemPoolGetAccess,
    flags: *mut c_int,
    pool: CUmemoryPool,
    location: *mut CUmemLocation,
) -> CUresult {
    /// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
    const READ_AND_WRITE: c_int = 3;
    // SAFETY: the caller's arguments.
    let result = unsafe { real(flags, pool, location) };
    if let (CUresult::SUCCESS, Some(of)) = (result, pools::managed_of(pool)) {
        // SAFETY: the driver has read the one and written the other.
        unsafe {
            if (*location).kind == CU_MEM_LOCATION_TYPE_DEVICE && (*location).id == of {
                *flags = READ_AND_WRITE;
            }
        }
    }
    result
}

/// Destroys a pool. Its allocations live until they are freed.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn destroy(real: signatures::cuMemPoolDestroy, pool: CUmemoryPool) -> CUresult {
    if let Some(default) = pools::stands_for(pool).and_then(|device| driver::default_pool(device).ok()) {
        // SAFETY: the default pool, which the program means. The driver refuses to destroy it.
        return unsafe { real(default) };
    }
    let known = pools::remove(pool);
    // SAFETY: the caller's argument.
    let result = unsafe { real(pool) };
    if result == CUresult::SUCCESS {
        pools::destroyed(pool);
    }
    match (result, known) {
        (CUresult::SUCCESS, Some(Pool { device: Some(device), .. })) => {
            devices::get(device).into_iter().for_each(driver_reserve::refresh);
        }
        (CUresult::SUCCESS, _) | (_, None) => {}
        (_, Some(known)) => pools::enter(pool, known),
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn set_attribute(
    real: signatures::cuMemPoolSetAttribute,
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
            driver_reserve::note_pools();
        }
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn trim_to(real: signatures::cuMemPoolTrimTo, pool: CUmemoryPool, keep: usize) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(pool, keep) };
    devices::used().for_each(driver_reserve::refresh);
    result
}
