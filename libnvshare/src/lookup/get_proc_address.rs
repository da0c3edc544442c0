//! `cuGetProcAddress`, and the swap of addresses that all doors share.
//!
//! Every address that the driver's own look-up hands out is that of an exported symbol, so the real look-up
//! decides about versions and flags, and its answer is swapped by address: no table of versions is needed.

use std::collections::HashSet;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use crate::driver;
use crate::driver::types::CUresult;
use crate::entry_points::{ENTRIES, FORWARDED};
use crate::hooks::macros::Entry;
use crate::process::counters;

/// Whether a name has a hook.
pub(crate) fn is_hooked(name: &str) -> bool {
    static NAMES: OnceLock<Vec<&str>> = OnceLock::new();
    let names = NAMES.get_or_init(|| {
        let mut names: Vec<&str> = ENTRIES.iter().filter(|e| e.hook.is_some()).map(|e| e.name).collect();
        names.sort_unstable();
        names
    });
    names.binary_search(&name).is_ok()
}

/// Whether an address is that of the hook of a name, and not of the driver's function.
pub(crate) fn is_hook_of(found: *mut c_void, name: &[u8]) -> bool {
    let of_name = |entry: &&Entry| entry.name.as_bytes() == name;
    let hook = ENTRIES.iter().find(of_name).and_then(|entry| entry.hook);
    hook.is_some_and(|hook| hook.0.cast::<c_void>() == found.cast_const())
}

/// The hook for a driver's address that was found under a name, or the address itself.
///
/// # Safety
/// The name is a C string.
pub(crate) unsafe fn swap(found: *mut c_void, name: *const c_char) -> *mut c_void {
    if found.is_null() {
        return found;
    }
    // SAFETY: promised by the caller.
    let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default();
    driver::hook_of(found, |of| of == name || base(of) == base(name)).unwrap_or(found)
}

type GetProcAddress = unsafe extern "C-unwind" fn(*const c_char, *mut *mut c_void, c_int, u64) -> CUresult;
type GetProcAddressV2 =
    unsafe extern "C-unwind" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> CUresult;

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_proc_address(
    real: GetProcAddress,
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(symbol, pfn, version, flags) };
    // SAFETY: the driver accepted them.
    unsafe { swap_answer(result, symbol, pfn) };
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_proc_address_v2(
    real: GetProcAddressV2,
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(symbol, pfn, version, flags, status) };
    // SAFETY: the driver accepted them.
    unsafe { swap_answer(result, symbol, pfn) };
    result
}

/// # Safety
/// The driver answered `result` for this symbol and this place.
unsafe fn swap_answer(result: CUresult, symbol: *const c_char, pfn: *mut *mut c_void) {
    if result != CUresult::SUCCESS || pfn.is_null() || symbol.is_null() {
        return;
    }
    // SAFETY: the driver succeeded, so it wrote here.
    let found = unsafe { *pfn };
    // SAFETY: the driver read it as a C string.
    let given = unsafe { swap(found, symbol) };
    if given != found {
        // SAFETY: as above.
        unsafe { *pfn = given };
    } else if !found.is_null() {
        // SAFETY: the driver read it as a C string.
        note_unknown(unsafe { CStr::from_ptr(symbol) });
    }
}

/// A driver newer than the table hands out functions that submit work past the gate: count that.
fn note_unknown(symbol: &CStr) {
    static KNOWN: OnceLock<HashSet<&str>> = OnceLock::new();
    let known = KNOWN
        .get_or_init(|| ENTRIES.iter().map(|e| e.name).chain(FORWARDED.iter().copied()).map(base).collect());
    let Ok(name) = symbol.to_str() else { return };
    if !known.contains(base(name)) {
        counters::unknown_entry_point(name);
    }
}

/// A name without its version and its twin's suffix: `cuMemcpyHtoD` for `cuMemcpyHtoD_v2_ptds`.
fn base(name: &str) -> &str {
    let name = name.strip_suffix("_ptds").or_else(|| name.strip_suffix("_ptsz")).unwrap_or(name);
    match name.rsplit_once("_v") {
        Some((base, version)) if version.len() == 1 && version.as_bytes().iter().all(u8::is_ascii_digit) => {
            base
        }
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_names_only() {
        for name in ["cuLaunchKernel", "cuMemAlloc_v2", "cuMemcpyHtoD_v2_ptds", "cuGetProcAddress_v2"] {
            assert!(is_hooked(name), "{name}");
        }
        for name in
            ["", "cu", "cuLaunchKernel2", "cudnnCreate", "cublasCreate_v2", "cuEventQuery", "cuDeviceGet"]
        {
            assert!(!is_hooked(name), "{name}");
        }
    }

    #[test]
    fn bases() {
        for (name, expected) in [
            ("cuMemcpyHtoD_v2_ptds", "cuMemcpyHtoD"),
            ("cuGraphLaunch_ptsz", "cuGraphLaunch"),
            ("cuCtxCreate_v4", "cuCtxCreate"),
            ("cuInit", "cuInit"),
        ] {
            assert_eq!(base(name), expected);
        }
    }

    /// The page about the table; `NVSHARE_UPDATE=1 cargo test -p libnvshare` writes it anew.
    #[test]
    fn the_page_is_of_this_table() {
        let deeds: std::collections::BTreeMap<&str, &str> =
            crate::entry_points::DEEDS.iter().copied().collect();
        let mut page = include_str!("../hooks/entry-points.head.md").to_owned();
        for (name, deed) in deeds {
            let done = match deed {
                "submit" | "copy" | "fill" => "gated",
                "forward" => "left alone",
                _ => "handled",
            };
            page.push_str(&format!("| `{name}` | {deed} | {done} |\n"));
        }
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/entry-points.md");
        if std::env::var_os("NVSHARE_UPDATE").is_some() {
            std::fs::write(path, &page).unwrap();
        }
        assert!(std::fs::read_to_string(path).unwrap() == page, "docs/entry-points.md is of another table");
    }

    #[test]
    fn no_name_is_in_the_table_twice() {
        let mut seen = HashSet::new();
        for name in ENTRIES.iter().map(|e| e.name).chain(FORWARDED.iter().copied()) {
            assert!(seen.insert(name), "{name}");
        }
    }
}
