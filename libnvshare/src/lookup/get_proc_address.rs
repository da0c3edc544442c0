//! `cuGetProcAddress`: returns the hook where the driver returns its own function.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use super::Table;
use crate::driver::functions::signatures;
use crate::driver::types::CUresult;

/// `CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND`
const SYMBOL_NOT_FOUND: c_int = 1;

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_proc_address(
    real: signatures::cuGetProcAddress,
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    version: c_int,
    flags: u64,
    table: &'static Table,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(symbol, pfn, version, flags) };
    // SAFETY: the driver accepted them.
    unsafe { swap_answer(table, result, symbol, pfn) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_proc_address_v2(
    real: signatures::cuGetProcAddress_v2,
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
    table: &'static Table,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(symbol, pfn, version, flags, status) };
    // SAFETY: the driver accepted them.
    let answer = unsafe { swap_answer(table, result, symbol, pfn) };
    if answer != result {
        // SAFETY: the caller's place, or null; the driver has written there.
        unsafe { status.as_mut() }.into_iter().for_each(|status| *status = SYMBOL_NOT_FOUND);
    }
    answer
}

/// The answer that replaces the driver's.
///
/// # Safety
/// The driver answered `result` for this symbol and this place.
unsafe fn swap_answer(
    table: &'static Table,
    result: CUresult,
    symbol: *const c_char,
    pfn: *mut *mut c_void,
) -> CUresult {
    if result != CUresult::SUCCESS || pfn.is_null() || symbol.is_null() {
        return result;
    }
    // SAFETY: the driver succeeded, so it wrote here.
    let found = unsafe { *pfn };
    // SAFETY: the driver read it as a C string.
    let (given, name) = unsafe { (super::swap(table, found, symbol), CStr::from_ptr(symbol)) };
    let is_refused = given == found
        && !found.is_null()
        && super::refuses(table, found, name.to_str().unwrap_or("a function with an odd name"));
    // SAFETY: as above.
    unsafe { *pfn = if is_refused { ptr::null_mut() } else { given } };
    if is_refused { CUresult::NOT_FOUND } else { result }
}
