//! The program's view of a pointer.
//!
//! Memory that the program asked for as device memory looks like device memory, since programs' libraries treat
//! managed memory differently. Operations that managed memory does not support still fail
//! ([`plain`](crate::memory::plain)).

mod mapped;

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;

use super::target::pass_gate_and_pin;
use crate::driver;
use crate::driver::functions::signatures;
use crate::driver::types::{CU_POINTER_ATTRIBUTE_IS_MANAGED, CUdeviceptr, CUmemLocation, CUresult};
use crate::memory::allocations::{self, Allocation, Kind};
use crate::memory::{imports, physical};
use crate::process::{config, lifecycle};
use crate::work::{callbacks, captures};

const CU_POINTER_ATTRIBUTE_HOST_POINTER: c_int = 4;
const CU_POINTER_ATTRIBUTE_BUFFER_ID: c_int = 7;

/// Whether a pointer points into managed memory that has to look like device memory.
fn is_in_disguise(pointer: CUdeviceptr) -> bool {
    config::get().is_ok_and(|config| config.disguise)
        && allocation_of(pointer).is_some_and(|allocation| allocation.kind.is_in_disguise())
}

/// The allocation that a pointer points into, if the program asked for it as device memory and it is not plain.
pub(super) fn ours_at(pointer: CUdeviceptr) -> Option<Arc<Allocation>> {
    let is_ours = |kind: Kind| kind == Kind::Mapped || kind.is_in_disguise();
    allocation_of(pointer).filter(|allocation| is_ours(allocation.kind))
}

/// The allocation of ours that a pointer points into.
pub(super) fn allocation_of(pointer: CUdeviceptr) -> Option<Arc<Allocation>> {
    // The driver knows the base of each allocation, but not of memory that is away.
    allocations::mapped_at(pointer)
        .or_else(|| allocations::find(pointer))
        .or_else(|| allocations::find(driver::base_of(pointer).ok()?))
}

/// The number of memory that the program has freed and allocated again. The driver's is the one that it had before.
fn id_of_reuse(pointer: CUdeviceptr) -> Option<u64> {
    allocation_of(pointer)?.id_of_reuse()
}

/// Whether a fill or a copy has to return before it is done. With device memory the driver returns at once; with managed memory
/// it waits. So at least one pointer has to point into managed memory that stands for device memory. All of them have to point
/// into device memory of the current device. For other memory, another GPU's or memory that the host sees, the driver waits in
/// any case, and programs rely on that. In a capture the driver refuses functions that are not stream-ordered, so nothing is
/// changed there.
pub(crate) fn are_prompt(pointers: &[CUdeviceptr]) -> bool {
    if captures::open() != 0 || lifecycle::is_exiting() || lifecycle::is_forked() {
        return false;
    }
    let is_managed =
        |pointer| allocation_of(pointer).is_some_and(|allocation| allocation.kind.is_in_disguise());
    if !pointers.iter().any(|&pointer| is_managed(pointer)) {
        return false;
    }
    let Ok(here) = driver::current_device() else { return false };
    pointers.iter().all(|&pointer| match allocation_of(pointer) {
        Some(allocation) => allocation.kind != Kind::ProgramsManaged && allocation.device == here,
        None => driver::is_device_memory(pointer, here),
    })
}

/// The answer about memory of another process that the program has opened. The driver's is about the library's mapping.
fn value_of_opened(pointer: CUdeviceptr, attribute: c_int) -> Option<u64> {
    match attribute {
        mapped::CONTEXT => imports::context_of(pointer).map(|context| context.0 as u64),
        mapped::RANGE_START_ADDR => imports::range_of(pointer).map(|(begin, _)| begin),
        mapped::RANGE_SIZE => imports::range_of(pointer).map(|(_, bytes)| bytes),
        _ => None,
    }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_attribute(
    real: signatures::cuPointerGetAttribute,
    data: *mut c_void,
    attribute: c_int,
    pointer: CUdeviceptr,
) -> CUresult {
    if let Some(mapped) = mapped::attributes_of(pointer) {
        // SAFETY: the caller's place, where the driver would write an answer of the attribute's size.
        return unsafe { mapped.get(data, attribute) }.unwrap_or_else(|| {
            // SAFETY: the caller's arguments.
            unsafe { real(data, attribute, pointer) }
        });
    }
    if attribute == CU_POINTER_ATTRIBUTE_HOST_POINTER && is_in_disguise(pointer) {
        // For device memory the driver writes nothing.
        return CUresult::INVALID_VALUE;
    }
    // SAFETY: the caller's arguments.
    let result = unsafe { real(data, attribute, pointer) };
    if result != CUresult::SUCCESS {
        return result;
    }
    if let Some(value) = value_of_opened(pointer, attribute) {
        // SAFETY: the driver wrote an answer of as many bytes.
        unsafe { data.cast::<u64>().write_unaligned(value) };
        return result;
    }
    // SAFETY: the driver wrote an answer of the attribute's size.
    unsafe {
        match attribute {
            CU_POINTER_ATTRIBUTE_IS_MANAGED if is_in_disguise(pointer) => {
                data.cast::<c_uint>().write_unaligned(0);
            }
            CU_POINTER_ATTRIBUTE_BUFFER_ID => {
                id_of_reuse(pointer).into_iter().for_each(|id| data.cast::<u64>().write_unaligned(id));
            }
            _ => {}
        }
    }
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
    if !attributes.is_null()
        && !data.is_null()
        && let Some(mapped) = mapped::attributes_of(pointer)
    {
        // SAFETY: the driver has read this many of both, and writes an answer of each attribute's size.
        return unsafe { mapped.overwrite(count as usize, attributes, data, result) };
    }
    if result != CUresult::SUCCESS || attributes.is_null() || data.is_null() {
        return result;
    }
    if imports::range_of(pointer).is_some() {
        for i in 0..count as usize {
            // SAFETY: the driver accepted this many of both, and wrote an answer of as many bytes.
            unsafe {
                if let Some(value) = value_of_opened(pointer, *attributes.add(i)) {
                    (*data.add(i)).cast::<u64>().write_unaligned(value);
                }
            }
        }
        return result;
    }
    if !is_in_disguise(pointer) {
        return result;
    }
    for i in 0..count as usize {
        // SAFETY: the driver accepted this many of both, and wrote an answer of the attribute's size.
        unsafe {
            let place = *data.add(i);
            match *attributes.add(i) {
                CU_POINTER_ATTRIBUTE_IS_MANAGED => place.cast::<c_uint>().write_unaligned(0),
                CU_POINTER_ATTRIBUTE_BUFFER_ID => {
                    id_of_reuse(pointer).into_iter().for_each(|id| place.cast::<u64>().write_unaligned(id));
                }
                CU_POINTER_ATTRIBUTE_HOST_POINTER => {
                    place.cast::<*mut c_void>().write_unaligned(std::ptr::null_mut());
                }
                _ => {}
            }
        }
    }
    result
}

/// `cuPointerSetAttribute`: memory with a setting of the driver's stays on the card, where it has it.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn set_attribute(
    real: signatures::cuPointerSetAttribute,
    value: *const c_void,
    attribute: c_int,
    pointer: CUdeviceptr,
) -> CUresult {
    let call = || {
        // SAFETY: the caller's arguments.
        unsafe { real(value, attribute, pointer) }
    };
    if callbacks::are_running() {
        return call();
    }
    let allocated = allocations::mapped_at(pointer);
    if allocated.is_none() && !physical::is_in(pointer, 1) {
        let result = call();
        if result == CUresult::SUCCESS {
            physical::note_reached();
            allocation_of(pointer).iter().for_each(|allocation| allocation.set_attributed());
        }
        return result;
    }
    let set = || {
        let result = call();
        if result == CUresult::SUCCESS {
            allocated.iter().for_each(|allocation| allocation.set_attributed());
        }
        result
    };
    let why = "the program has set an attribute of theirs";
    pass_gate_and_pin(allocated.as_deref(), (pointer, 1), why, set)
}

/// `cuMemGetAddressRange`: the driver does not know memory that is away, and takes chunks for allocations.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_address_range(
    real: signatures::cuMemGetAddressRange_v2,
    base: *mut CUdeviceptr,
    size: *mut usize,
    pointer: CUdeviceptr,
) -> CUresult {
    let mapped = mapped::attributes_of(pointer).map(|mapped| (mapped.base(), mapped.asked()));
    let Some((begin, bytes)) = mapped.or_else(|| imports::range_of(pointer)) else {
        // SAFETY: the caller's arguments.
        return unsafe { real(base, size, pointer) };
    };
    // SAFETY: null, or the caller's places.
    unsafe {
        if let Some(base) = base.as_mut() {
            *base = begin;
        }
        if let Some(size) = size.as_mut() {
            *size = bytes as usize;
        }
    }
    CUresult::SUCCESS
}

/// `cuMemGetAccess`. For memory of `cuMemAlloc`, also of another process, the driver says that no access was given to it (measured).
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_access(
    real: signatures::cuMemGetAccess,
    flags: *mut c_ulonglong,
    location: *const c_void,
    pointer: CUdeviceptr,
) -> CUresult {
    let is_asked = !flags.is_null() && !location.is_null();
    let access = is_asked.then(|| {
        // SAFETY: not null: the caller's location.
        let location = unsafe { location.cast::<CUmemLocation>().read_unaligned() };
        let mapped = mapped::attributes_of(pointer).map(|mapped| mapped.access_of(location));
        mapped.or_else(|| imports::range_of(pointer).map(|_| 0))
    });
    let Some(access) = access.flatten() else {
        // SAFETY: the caller's arguments.
        return unsafe { real(flags, location, pointer) };
    };
    // SAFETY: not null, and where the driver would write.
    unsafe { *flags = access };
    CUresult::SUCCESS
}
