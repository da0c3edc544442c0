//! `cuInit`: the first word between a program and its GPU.

use std::ffi::c_uint;

use crate::driver::functions::signatures;
use crate::driver::types::CUresult;
use crate::process::config;

/// A limit that cannot be read fails here, before anything could be allocated past it.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn cu_init(real: signatures::cuInit, flags: c_uint) -> CUresult {
    if config::get().is_err() {
        return CUresult::INVALID_VALUE;
    }
    // SAFETY: the caller's argument.
    unsafe { real(flags) }
}
