//! `cuGetProcAddress`: returns the hook where the driver returns its own function.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::Table;
use crate::driver::functions::signatures;
use crate::driver::types::CUresult;
use crate::process::counters;

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
    unsafe { swap_answer(table, result, symbol, pfn) };
    result
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
    unsafe { swap_answer(table, result, symbol, pfn) };
    result
}

/// # Safety
/// The driver answered `result` for this symbol and this place.
unsafe fn swap_answer(table: &'static Table, result: CUresult, symbol: *const c_char, pfn: *mut *mut c_void) {
    if result != CUresult::SUCCESS || pfn.is_null() || symbol.is_null() {
        return;
    }
    // SAFETY: the driver succeeded, so it wrote here.
    let found = unsafe { *pfn };
    // SAFETY: the driver read it as a C string.
    let given = unsafe { super::swap(table, found, symbol) };
    if given != found {
        // SAFETY: as above.
        unsafe { *pfn = given };
    } else if !found.is_null() {
        // SAFETY: the driver read it as a C string.
        note_unknown(table, unsafe { CStr::from_ptr(symbol) });
    }
}

/// A newer driver may return a function that is not in the table. Work that it submits passes no gate; this is counted.
fn note_unknown(table: &Table, symbol: &CStr) {
    let Ok(name) = symbol.to_str() else { return };
    if !super::is_known(table, name) {
        counters::unknown_entry_point(name);
    }
}
