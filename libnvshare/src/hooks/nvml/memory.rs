//! Total, free and used bytes.

use std::ffi::{c_uint, c_void};

use super::{Handle, Return, SUCCESS, View};

type Get = unsafe extern "C-unwind" fn(Handle, *mut c_void) -> Return;

/// `nvmlMemory_t`
#[repr(C)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`
#[repr(C)]
struct MemoryV2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// Total and used bytes as the program sees them. `None`: NVML's own answer is right.
fn total_and_used(handle: Handle, nvml: *const c_void, total: u64, used: u64) -> Option<(u64, u64)> {
    let view = View::of(handle, nvml)?;
    let total = view.total.min(total);
    Some((total, view.used().unwrap_or(used).min(total)))
}

/// # Safety
/// As for NVML's function.
pub(super) unsafe fn info(real: Get, device: Handle, memory: *mut c_void) -> Return {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(device, memory) };
    // SAFETY: NVML wrote one.
    let memory = unsafe { memory.cast::<Memory>().as_mut() };
    if let (SUCCESS, Some(memory)) = (result, memory)
        && let Some((total, used)) = total_and_used(device, real as *const c_void, memory.total, memory.used)
    {
        *memory = Memory { total, free: total - used, used };
    }
    result
}

/// # Safety
/// As for NVML's function.
pub(super) unsafe fn info_v2(real: Get, device: Handle, memory: *mut c_void) -> Return {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(device, memory) };
    // SAFETY: NVML wrote one.
    let memory = unsafe { memory.cast::<MemoryV2>().as_mut() };
    if let (SUCCESS, Some(memory)) = (result, memory)
        && let Some((total, used)) = total_and_used(device, real as *const c_void, memory.total, memory.used)
    {
        *memory = MemoryV2 { version: memory.version, total, reserved: 0, free: total - used, used };
    }
    result
}
