//! Physical memory that the program creates and maps itself (CUDA's virtual memory management).
//!
//! With `NVSHARE_MEMORY=swap` such memory moves and has handles of the library's, which the driver never sees. Other memory is
//! counted and stays. Both are in the books of [`physical`].

mod handles;

use std::ffi::{c_ulonglong, c_void};
use std::sync::Arc;

use nvshare_proto::MemoryMode;

use super::target::{answer, device_of_properties, pass_gate_for_addresses};
use crate::driver::functions::signatures;
use crate::driver::types::{CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUresult};
use crate::memory::charge::charged;
use crate::memory::physical::{self, Access, Handle, drivers};
use crate::memory::{allocations, imports};
use crate::work::callbacks;
pub(crate) use handles::{
    bind, bind_endpoint, bind_endpoint_range, bind_range, bind_range_v2, bind_v2, export, export_pointer,
    export_pool, get_properties, import_external, import_pointer, import_pool, map_arrays,
};

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create(
    real: signatures::cuMemCreate,
    handle: *mut Handle,
    bytes: usize,
    properties: *const c_void,
    flags: c_ulonglong,
) -> CUresult {
    let valid = !handle.is_null() && bytes > 0;
    // SAFETY: the caller's properties.
    let Some(device) = valid.then(|| unsafe { device_of_properties(properties) }).flatten() else {
        // SAFETY: the caller's arguments.
        return unsafe { real(handle, bytes, properties, flags) };
    };
    if device.memory == MemoryMode::Swap {
        // SAFETY: the caller's properties, not null.
        let wanted = unsafe { *properties.cast::<CUmemAllocationProp>() };
        if let Some(made) = physical::create(device, bytes as u64, &wanted, flags) {
            // SAFETY: not null, and where the driver would write.
            return unsafe { answer(made, handle) };
        }
    }
    let made = charged(device, bytes as u64, || {
        let mut made = 0;
        // SAFETY: a place for the handle, and the caller's arguments.
        unsafe { real(&raw mut made, bytes, properties, flags) }.ok()?;
        Ok(made)
    });
    let made = made.map(|(made, charge)| {
        drivers::enter(made, Arc::new(charge));
        made
    });
    // SAFETY: not null, and where the driver would write.
    unsafe { answer(made, handle) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn release(real: signatures::cuMemRelease, handle: Handle) -> CUresult {
    if physical::is_ours(handle) {
        return if callbacks::are_running() { CUresult::NOT_PERMITTED } else { physical::release(handle) };
    }
    // Remove the charge first: once the handle is released, the driver may give it to another thread.
    let charge = drivers::remove(handle);
    // SAFETY: the caller's argument.
    let result = unsafe { real(handle) };
    if let (true, Some(charge)) = (result != CUresult::SUCCESS, charge) {
        drivers::enter(handle, charge);
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn map(
    real: signatures::cuMemMap,
    address: CUdeviceptr,
    bytes: usize,
    offset: usize,
    handle: Handle,
    flags: c_ulonglong,
) -> CUresult {
    if physical::is_ours(handle) {
        let map = || physical::map(address, bytes as u64, offset as u64, handle, flags);
        return if callbacks::are_running() {
            CUresult::NOT_PERMITTED
        } else if physical::is_reserved(address, bytes as u64) {
            map()
        } else {
            // The driver has to say what it thinks of such addresses.
            pass_gate_for_addresses(map)
        };
    }
    drivers::map(handle, address, bytes as u64, || {
        // SAFETY: the caller's arguments.
        unsafe { real(address, bytes, offset, handle, flags) }
    })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn unmap(real: signatures::cuMemUnmap, address: CUdeviceptr, bytes: usize) -> CUresult {
    let drivers = |address, bytes: u64| {
        // SAFETY: a part of the caller's range, in which the library has mapped nothing.
        unsafe { real(address, bytes as usize) }
    };
    if callbacks::are_running() && physical::is_in(address, bytes as u64) {
        return CUresult::NOT_PERMITTED;
    }
    physical::unmap(address, bytes as u64, drivers)
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn set_access(
    real: signatures::cuMemSetAccess,
    address: CUdeviceptr,
    bytes: usize,
    access: *const c_void,
    count: usize,
) -> CUresult {
    let drivers = |address, bytes: u64| {
        // SAFETY: the caller's range or a part of it, and its access.
        unsafe { real(address, bytes as usize, access, count) }
    };
    if access.is_null() || count == 0 || !physical::is_in(address, bytes as u64) {
        return drivers(address, bytes as u64);
    }
    if callbacks::are_running() {
        return CUresult::NOT_PERMITTED;
    }
    // SAFETY: the caller's list, which has `count` entries.
    let wanted = unsafe { std::slice::from_raw_parts(access.cast::<CUmemAccessDesc>(), count) };
    let set = || physical::set_access(address, bytes as u64, wanted, drivers);
    match physical::access_needs(address, bytes as u64, wanted) {
        Access::Drivers => drivers(address, bytes as u64),
        Access::Noted => set(),
        Access::Present => pass_gate_for_addresses(set),
    }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn reserve(
    real: signatures::cuMemAddressReserve,
    place: *mut CUdeviceptr,
    bytes: usize,
    alignment: usize,
    address: CUdeviceptr,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(place, bytes, alignment, address, flags) };
    if result == CUresult::SUCCESS && !place.is_null() {
        // SAFETY: the driver wrote it.
        physical::note_reserved(unsafe { *place }, bytes as u64);
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn free_addresses(
    real: signatures::cuMemAddressFree,
    address: CUdeviceptr,
    bytes: usize,
) -> CUresult {
    physical::free_addresses(address, bytes as u64, || {
        // SAFETY: the caller's arguments.
        unsafe { real(address, bytes) }
    })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn retain(
    real: signatures::cuMemRetainAllocationHandle,
    handle: *mut Handle,
    address: *mut c_void,
) -> CUresult {
    // Memory of `cuMemAlloc`, also of another process, has no such handle. Memory that a handle holds could not leave the card.
    let address_of = address as CUdeviceptr;
    if allocations::mapped_at(address_of).is_some() || imports::range_of(address_of).is_some() {
        return CUresult::INVALID_VALUE;
    }
    if !handle.is_null()
        && !callbacks::are_running()
        && let Some(ours) = physical::retain(address as CUdeviceptr)
    {
        // SAFETY: not null, and where the driver would write.
        unsafe { *handle = ours };
        return CUresult::SUCCESS;
    }
    // SAFETY: the caller's arguments.
    let result = unsafe { real(handle, address) };
    if result == CUresult::SUCCESS && !handle.is_null() {
        // SAFETY: the driver wrote it.
        drivers::retain(unsafe { *handle }, address as CUdeviceptr);
    }
    result
}
