//! What the program sees of a pointer.
//!
//! Memory that the program asked for as device memory looks like device memory, since libraries choose other ways for
//! managed memory. What managed memory cannot do stays visible ([`plain`](crate::memory::plain)).

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use crate::driver;
use crate::driver::functions::signatures;
use crate::driver::types::{CU_POINTER_ATTRIBUTE_IS_MANAGED, CUdeviceptr, CUresult};
use crate::memory::allocations::{self, Allocation, Kind};
use crate::process::{config, lifecycle};
use crate::work::captures;

const CU_POINTER_ATTRIBUTE_HOST_POINTER: c_int = 4;

/// Whether a pointer points into managed memory that has to look like device memory.
fn is_in_disguise(pointer: CUdeviceptr) -> bool {
    config::get().is_ok_and(|config| config.disguise) && is_ours(pointer)
}

/// Whether a pointer points into memory that the program asked for as device memory and that is managed.
pub(crate) fn is_ours(pointer: CUdeviceptr) -> bool {
    allocation_of(pointer).is_some_and(|allocation| allocation.kind.is_in_disguise())
}

fn allocation_of(pointer: CUdeviceptr) -> Option<Arc<Allocation>> {
    // The driver knows the base of each allocation.
    allocations::find(pointer).or_else(|| allocations::find(driver::base_of(pointer).ok()?))
}

/// Whether a fill or a copy has to return before it is done. With device memory the driver returns at once; with managed
/// memory it waits. So this is true if at least one pointer points into managed memory that stands for device memory, and
/// all of them point into device memory of the current device. For other memory, another GPU's or memory that the host sees,
/// the driver waits in any case, and programs rely on that. In a capture the driver refuses functions that are not
/// stream-ordered, so nothing is changed there.
pub(crate) fn are_prompt(pointers: &[CUdeviceptr]) -> bool {
    if captures::open() != 0 || lifecycle::is_exiting() || lifecycle::is_forked() {
        return false;
    }
    if !pointers.iter().any(|&pointer| is_ours(pointer)) {
        return false;
    }
    let Ok(here) = driver::current_device() else { return false };
    pointers.iter().all(|&pointer| match allocation_of(pointer) {
        Some(allocation) => allocation.kind != Kind::Managed && allocation.device == here,
        None => driver::is_device_memory(pointer, here),
    })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_attribute(
    real: signatures::cuPointerGetAttribute,
    data: *mut c_void,
    attribute: c_int,
    pointer: CUdeviceptr,
) -> CUresult {
    if attribute == CU_POINTER_ATTRIBUTE_HOST_POINTER && is_in_disguise(pointer) {
        // For device memory the driver writes nothing.
        return CUresult::INVALID_VALUE;
    }
    // SAFETY: the caller's arguments.
    let result = unsafe { real(data, attribute, pointer) };
    if result != CUresult::SUCCESS || attribute != CU_POINTER_ATTRIBUTE_IS_MANAGED || !is_in_disguise(pointer)
    {
        return result;
    }
    // SAFETY: the driver wrote a `CUdevice_attribute`-sized answer for this attribute: an unsigned integer.
    unsafe { data.cast::<c_uint>().write_unaligned(0) };
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_attributes(
    real: signatures::cuPointerGetAttributes,
    count: c_uint,
    attributes: *const c_int,
    data: *const *mut c_void,
    pointer: CUdeviceptr,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(count, attributes, data, pointer) };
    if result != CUresult::SUCCESS || attributes.is_null() || data.is_null() || !is_in_disguise(pointer) {
        return result;
    }
    for i in 0..count as usize {
        // SAFETY: the driver accepted this many of both, and wrote an answer of the attribute's size.
        unsafe {
            let place = *data.add(i);
            match *attributes.add(i) {
                CU_POINTER_ATTRIBUTE_IS_MANAGED => place.cast::<c_uint>().write_unaligned(0),
                CU_POINTER_ATTRIBUTE_HOST_POINTER => {
                    place.cast::<*mut c_void>().write_unaligned(std::ptr::null_mut());
                }
                _ => {}
            }
        }
    }
    result
}
