//! Other functions that take a handle of physical memory. Memory that others can reach by them stays on the card. A call
//! that lets others reach it waits at the gate, so the memory is there.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use crate::driver::functions::signatures;
use crate::driver::types::{
    CUdevice, CUdeviceptr, CUmemAllocationProp, CUmemHandle, CUmemoryPool, CUresult, CUstream,
};
use crate::hooks::target::pass_gate_for_addresses;
use crate::memory::physical::{self, Handle};
use crate::work::callbacks;

/// Makes a call with the driver's handles of memory of the library's, which stays on the card if the call succeeds.
fn with_handles(
    handle: Handle,
    why: &str,
    call: impl FnOnce(&[(u64, u64, CUmemHandle)]) -> CUresult,
) -> CUresult {
    if callbacks::are_running() {
        return CUresult::NOT_PERMITTED;
    }
    pass_gate_for_addresses(|| match physical::handles(handle) {
        Some(handles) => {
            let result = call(&handles);
            if result == CUresult::SUCCESS {
                physical::pin(handle, why);
            }
            result
        }
        None => CUresult::INVALID_VALUE,
    })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn export(
    real: signatures::cuMemExportToShareableHandle,
    place: *mut c_void,
    handle: Handle,
    kind: c_int,
    flags: c_ulonglong,
) -> CUresult {
    if !physical::is_ours(handle) {
        // SAFETY: the caller's arguments.
        return note_reached(|| unsafe { real(place, handle, kind, flags) });
    }
    // Memory that can be shared is one chunk; the driver refuses the others.
    with_handles(handle, "other processes can reach them", |handles| match handles {
        // SAFETY: the caller's arguments, with a handle of the driver's that lives: the gate is open.
        [(.., only)] => unsafe { real(place, only.0, kind, flags) },
        _ => CUresult::INVALID_VALUE,
    })
}

/// Makes a call after which others reach memory that is the driver's own, or the process reaches theirs.
fn note_reached(call: impl FnOnce() -> CUresult) -> CUresult {
    let result = call();
    if result == CUresult::SUCCESS {
        physical::note_reached();
    }
    result
}

/// Shares a pool with other processes. A pool that can be shared is the driver's own.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn export_pool(
    real: signatures::cuMemPoolExportToShareableHandle,
    place: *mut c_void,
    pool: CUmemoryPool,
    kind: c_int,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the caller's arguments.
    note_reached(|| unsafe { real(place, pool, kind, flags) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn export_pointer(
    real: signatures::cuMemPoolExportPointer,
    place: *mut c_void,
    pointer: CUdeviceptr,
) -> CUresult {
    // SAFETY: the caller's arguments.
    note_reached(|| unsafe { real(place, pointer) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn import_pool(
    real: signatures::cuMemPoolImportFromShareableHandle,
    place: *mut CUmemoryPool,
    handle: *mut c_void,
    kind: c_int,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the caller's arguments.
    note_reached(|| unsafe { real(place, handle, kind, flags) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn import_pointer(
    real: signatures::cuMemPoolImportPointer,
    place: *mut CUdeviceptr,
    pool: CUmemoryPool,
    data: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    note_reached(|| unsafe { real(place, pool, data) })
}

/// Memory of Vulkan and others.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn import_external(
    real: signatures::cuImportExternalMemory,
    place: *mut *mut c_void,
    described: *const c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    note_reached(|| unsafe { real(place, described) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_properties(
    real: signatures::cuMemGetAllocationPropertiesFromHandle,
    place: *mut c_void,
    handle: Handle,
) -> CUresult {
    if !physical::is_ours(handle) {
        // SAFETY: the caller's arguments.
        return unsafe { real(place, handle) };
    }
    match physical::properties(handle) {
        Some(properties) if !place.is_null() => {
            // SAFETY: not null, and where the driver would write as much.
            unsafe { place.cast::<CUmemAllocationProp>().write_unaligned(properties) };
            CUresult::SUCCESS
        }
        _ => CUresult::INVALID_VALUE,
    }
}

/// Binds memory to an object that other devices reach, by `call` with the driver's handle.
fn bind_memory(handle: Handle, call: impl Fn(Handle) -> CUresult) -> CUresult {
    if !physical::is_ours(handle) {
        return call(handle);
    }
    with_handles(handle, "other devices can reach them", |handles| match handles {
        // It lives: the gate is open.
        [(.., only)] => call(only.0),
        // Memory that others reach can be shared, and so is one chunk.
        _ => CUresult::INVALID_VALUE,
    })
}

/// Binds memory at addresses to an object that other devices reach, by `call`.
fn bind_addresses(memory: CUdeviceptr, bytes: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    if callbacks::are_running() || !physical::is_in(memory, bytes) {
        return call();
    }
    pass_gate_for_addresses(|| {
        let result = call();
        if result == CUresult::SUCCESS {
            physical::pin_range(memory, bytes, "other devices can reach them");
        }
        result
    })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn bind(
    real: signatures::cuMulticastBindMem,
    multicast: c_ulonglong,
    at: usize,
    handle: Handle,
    offset: usize,
    bytes: usize,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the caller's arguments, with a handle of the driver's that lives in place of the library's.
    bind_memory(handle, |handle| unsafe { real(multicast, at, handle, offset, bytes, flags) })
}

/// # Safety
/// As for the driver's function.
#[expect(clippy::too_many_arguments, reason = "the driver's own")]
pub(crate) unsafe fn bind_v2(
    real: signatures::cuMulticastBindMem_v2,
    multicast: c_ulonglong,
    device: CUdevice,
    at: usize,
    handle: Handle,
    offset: usize,
    bytes: usize,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the caller's arguments, with a handle of the driver's that lives in place of the library's.
    bind_memory(handle, |handle| unsafe { real(multicast, device, at, handle, offset, bytes, flags) })
}

/// # Safety
/// As for the driver's function.
#[expect(clippy::too_many_arguments, reason = "the driver's own")]
pub(crate) unsafe fn bind_endpoint(
    real: signatures::cuLogicalEndpointBindMem,
    endpoint: c_uint,
    device: CUdevice,
    at: u64,
    handle: Handle,
    offset: u64,
    bytes: u64,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the caller's arguments, with a handle of the driver's that lives in place of the library's.
    bind_memory(handle, |handle| unsafe { real(endpoint, device, at, handle, offset, bytes, flags) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn bind_range(
    real: signatures::cuMulticastBindAddr,
    multicast: c_ulonglong,
    at: usize,
    memory: CUdeviceptr,
    bytes: usize,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the caller's arguments.
    bind_addresses(memory, bytes as u64, || unsafe { real(multicast, at, memory, bytes, flags) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn bind_range_v2(
    real: signatures::cuMulticastBindAddr_v2,
    multicast: c_ulonglong,
    device: CUdevice,
    at: usize,
    memory: CUdeviceptr,
    bytes: usize,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the caller's arguments.
    bind_addresses(memory, bytes as u64, || unsafe { real(multicast, device, at, memory, bytes, flags) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn bind_endpoint_range(
    real: signatures::cuLogicalEndpointBindAddr,
    endpoint: c_uint,
    device: CUdevice,
    at: u64,
    memory: CUdeviceptr,
    bytes: u64,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the caller's arguments.
    bind_addresses(memory, bytes, || unsafe { real(endpoint, device, at, memory, bytes, flags) })
}

/// `CUarrayMapInfo`, as far as it names memory.
#[repr(C)]
struct MapInfo {
    resource: [u64; 3],
    subresource: [u32; 8],
    operation: c_int,
    handle_type: c_int,
    handle: Handle,
    offset: u64,
    rest: [u32; 4],
}

const _: () = assert!(size_of::<MapInfo>() == 96);

/// `cuMemMapArrayAsync`. Memory for sparse arrays is created for them, and is the driver's: other memory is refused.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn map_arrays(
    real: signatures::cuMemMapArrayAsync,
    list: *mut c_void,
    count: c_uint,
    stream: CUstream,
) -> CUresult {
    for index in 0..if list.is_null() { 0 } else { count as usize } {
        // SAFETY: the caller's list has `count` entries.
        if physical::is_ours(unsafe { (*list.cast::<MapInfo>().add(index)).handle }) {
            return CUresult::INVALID_VALUE;
        }
    }
    // SAFETY: the caller's arguments.
    unsafe { real(list, count, stream) }
}
