//! Handles by which other processes reach memory (CUDA IPC).

use std::ffi::c_void;

use super::pointers;
use crate::driver::functions::signatures;
use crate::driver::types::{CUdeviceptr, CUresult};
use crate::memory::plain;
use crate::process::log;

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_mem_handle(
    real: signatures::cuIpcGetMemHandle,
    handle: *mut c_void,
    pointer: CUdeviceptr,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(handle, pointer) };
    if result != CUresult::SUCCESS && pointers::is_ours(pointer) && plain::was_refused() {
        log::warn(format_args!(
            "the program shares memory with another process (CUDA IPC), but managed memory cannot be shared; memory \
             that it allocates from now on can be shared and is not moved. NVSHARE_PLAIN=all, or the sizes in \
             question, makes such memory plain from the start"
        ));
    }
    result
}
