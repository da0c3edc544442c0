//! Handles by which other processes reach memory (CUDA IPC).

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;

use nvshare_proto::MemoryMode;

use super::pointers;
use super::target::{answer, pass_gate_and_pin, pass_gate_for_addresses, target};
use crate::driver::functions::signatures;
use crate::driver::types::{CUdeviceptr, CUipcMemHandle, CUresult};
use crate::memory::allocations::{self, Allocation};
use crate::memory::sharing::{self, Room};
use crate::memory::{deferred_free, devices, imports, physical, plain};
use crate::process::{bell, lifecycle, log};
use crate::work::callbacks;

/// The smallest page of the host that the driver supports; ranges for other devices consist of pages.
const HOST_PAGE: u64 = 4096;

/// Memory that the library maps gets a handle of the library's own. The driver knows no handle of such memory.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_mem_handle(
    real: signatures::cuIpcGetMemHandle,
    handle: *mut CUipcMemHandle,
    pointer: CUdeviceptr,
) -> CUresult {
    if !handle.is_null()
        && is_for_library()
        && let Some(allocation) = allocations::mapped_at(pointer).filter(|of| sharing::is_possible(of))
    {
        let shared = sharing::handle_of(&allocation).unwrap_or_else(|| share(&allocation));
        // SAFETY: not null, and where the driver would write.
        return unsafe { answer(shared, handle) };
    }
    // SAFETY: the caller's arguments.
    let result = unsafe { real(handle, pointer) };
    if result != CUresult::SUCCESS {
        note_refusal(pointer, "with another process (CUDA IPC)");
    }
    result
}

/// A callback must not wait, and in a forked child the driver refuses all calls.
fn is_for_library() -> bool {
    !callbacks::are_running() && !lifecycle::is_forked()
}

fn share(allocation: &Arc<Allocation>) -> Result<CUipcMemHandle, CUresult> {
    let _one = sharing::one_at_a_time();
    let share_in = |room| {
        let mut shared = Err(CUresult::NOT_READY);
        let passed = pass_gate_for_addresses(|| {
            shared = sharing::share(allocation, room);
            CUresult::SUCCESS
        });
        passed.ok().and(shared)
    };
    match share_in(None) {
        // Room for the exchange comes while the thread is outside the gate.
        Err(CUresult::OUT_OF_MEMORY) => share_in(Some(Room::get(allocation)?)),
        shared => shared,
    }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn open_mem_handle(
    real: signatures::cuIpcOpenMemHandle_v2,
    place: *mut CUdeviceptr,
    handle: CUipcMemHandle,
    flags: c_uint,
) -> CUresult {
    if !place.is_null()
        && is_for_library()
        && let Some(opened) = imports::open(&handle, flags, || Some(target()?.1))
    {
        // SAFETY: not null, and where the driver would write.
        return unsafe { answer(opened, place) };
    }
    // SAFETY: the caller's arguments.
    unsafe { real(place, handle, flags) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn close_mem_handle(
    real: signatures::cuIpcCloseMemHandle,
    pointer: CUdeviceptr,
) -> CUresult {
    if is_for_library() && imports::close(pointer).is_some() {
        // Where work still runs, the memory ends later.
        deferred_free::free_without_waiting();
        return CUresult::SUCCESS;
    }
    // SAFETY: the caller's argument.
    unsafe { real(pointer) }
}

/// A descriptor of an address range (dma-buf), as network cards use it: the memory stays where it is then.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_handle_for_range(
    real: signatures::cuMemGetHandleForAddressRange,
    handle: *mut c_void,
    base: CUdeviceptr,
    size: usize,
    kind: c_int,
    flags: c_ulonglong,
) -> CUresult {
    let call = || {
        // SAFETY: the caller's arguments.
        unsafe { real(handle, base, size, kind, flags) }
    };
    let bytes = size as u64;
    // The driver gives none of memory of another process (measured).
    if imports::range_of(base).is_some() {
        return CUresult::INVALID_VALUE;
    }
    let allocated = allocations::mapped_at(base);
    if callbacks::are_running() || allocated.is_none() && !physical::is_in(base, bytes) {
        let result = call();
        if result == CUresult::SUCCESS {
            physical::note_reached();
        } else {
            note_refusal(base, "with another device (dma-buf)");
        }
        return result;
    }
    // Chunks and slabs may go on behind the allocation. The driver counts in pages of the host.
    let is_beyond = |allocation: &Arc<Allocation>| {
        let end = allocation.asked().map(|asked| (allocation.base + asked).next_multiple_of(HOST_PAGE));
        end.is_some_and(|end| base.saturating_add(bytes) > end)
    };
    if allocated.as_ref().is_some_and(is_beyond) {
        return CUresult::INVALID_VALUE;
    }
    pass_gate_and_pin(allocated.as_deref(), (base, bytes), "other devices can reach them", call)
}

/// The driver has refused a handle. If the memory moves, memory that the program allocates from now on can be shared, and does not move.
fn note_refusal(pointer: CUdeviceptr, with: &str) {
    let Some(refused) = pointers::ours_at(pointer) else { return };
    let is_swap = devices::get(refused.device).is_some_and(|device| device.memory == MemoryMode::Swap);
    if !is_swap && !refused.kind.is_pools() {
        plain::note_lost_handle();
        bell::ring();
    }
    if is_swap && refused.kind.is_pools() {
        if plain::note_refusal_of_pools() {
            log::warn(format_args!(
                "the program shares memory of a pool {with}, but memory that moves cannot be shared; memory of pools \
                 from now on is not moved"
            ));
        }
    } else if plain::note_refusal() {
        log::warn(format_args!(
            "the program shares memory {with}, but memory that moves cannot be shared; memory that it allocates from \
             now on can be shared and is not moved. NVSHARE_PLAIN=all, or the sizes in question, makes such memory \
             plain from the start. With NVSHARE_MEMORY=swap, memory moves while no other process has it."
        ));
    }
}
