//! Physical memory that the program creates and maps itself (CUDA's virtual memory management).

use std::ffi::{c_ulonglong, c_void};
use std::sync::Arc;

use super::target::{answer, device_of_properties};
use crate::driver::functions::signatures;
use crate::driver::types::{CUdeviceptr, CUresult};
use crate::memory::allocations;
use crate::memory::charge::charged;
use crate::memory::vmm::{self, Handle};

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
    let made = charged(device, bytes as u64, || {
        let mut made = 0;
        // SAFETY: a place for the handle, and the caller's arguments.
        unsafe { real(&raw mut made, bytes, properties, flags) }.ok()?;
        Ok(made)
    });
    let made = made.map(|(made, charge)| {
        vmm::insert(made, Arc::new(charge));
        made
    });
    // SAFETY: not null, and where the driver would write.
    unsafe { answer(made, handle) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn release(real: signatures::cuMemRelease, handle: Handle) -> CUresult {
    // Remove the charge first: once the handle is released, the driver may give it to another thread.
    let charge = vmm::remove(handle);
    // SAFETY: the caller's argument.
    let result = unsafe { real(handle) };
    if let (true, Some(charge)) = (result != CUresult::SUCCESS, charge) {
        vmm::insert(handle, charge);
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
    // SAFETY: the caller's arguments.
    let result = unsafe { real(address, bytes, offset, handle, flags) };
    if result == CUresult::SUCCESS {
        vmm::map(handle, address, bytes as u64);
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn unmap(real: signatures::cuMemUnmap, address: CUdeviceptr, bytes: usize) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(address, bytes) };
    if result == CUresult::SUCCESS {
        vmm::unmap(address, bytes as u64);
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn retain(
    real: signatures::cuMemRetainAllocationHandle,
    handle: *mut Handle,
    address: *mut c_void,
) -> CUresult {
    // Memory of `cuMemAlloc` has no such handle, and memory that a handle holds could not leave the card.
    if allocations::mapped_at(address as CUdeviceptr).is_some() {
        return CUresult::INVALID_VALUE;
    }
    // SAFETY: the caller's arguments.
    let result = unsafe { real(handle, address) };
    if result == CUresult::SUCCESS && !handle.is_null() {
        // SAFETY: the driver wrote it.
        vmm::retain(unsafe { *handle }, address as CUdeviceptr);
    }
    result
}
