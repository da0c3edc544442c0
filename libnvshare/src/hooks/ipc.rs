//! Handles by which other processes reach memory (CUDA IPC).

use std::ffi::{c_int, c_ulonglong, c_void};

use super::pointers;
use super::target::pass_gate_for_addresses;
use crate::driver::functions::signatures;
use crate::driver::types::{CUdeviceptr, CUresult};
use crate::memory::{allocations, physical, plain};
use crate::process::log;
use crate::work::callbacks;

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_mem_handle(
    real: signatures::cuIpcGetMemHandle,
    handle: *mut c_void,
    pointer: CUdeviceptr,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(handle, pointer) };
    if result != CUresult::SUCCESS && pointers::is_ours(pointer) {
        warn_once("with another process (CUDA IPC)");
    }
    result
}

/// A handle of an address range, as NICs use it, would keep the memory on the card that it was made for.
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
    if allocations::mapped_at(base).is_some() {
        warn_once("with another device (dma-buf)");
        return CUresult::NOT_SUPPORTED;
    }
    let call = || {
        // SAFETY: the caller's arguments.
        unsafe { real(handle, base, size, kind, flags) }
    };
    if callbacks::are_running() || !physical::is_in(base, size as u64) {
        return call();
    }
    pass_gate_for_addresses(|| {
        let result = call();
        if result == CUresult::SUCCESS {
            physical::pin_range(base, size as u64, "other devices can reach them");
        }
        result
    })
}

/// The program shares memory that moves: memory that it allocates from now on can be shared, and does not move.
fn warn_once(with: &str) {
    if plain::was_refused() {
        log::warn(format_args!(
            "the program shares memory {with}, but memory that moves cannot be shared; memory that it allocates from \
             now on can be shared and is not moved. NVSHARE_PLAIN=all, or the sizes in question, makes such memory \
             plain from the start"
        ));
    }
}
