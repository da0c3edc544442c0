//! The driver itself, its devices, and the simulator's own functions.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::{api, give, status};
use crate::exit;
use crate::process::{self, Failure, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, SUCCESS};
use crate::world::Ran;

const VERSION: c_int = 13_000;

fn uuid_of(device: c_int) -> Result<[u8; 16], Failure> {
    let p = process::get()?;
    let gpu = p.gpu_of(device)?;
    if p.world.config().unnamed == Some(device) { Err(NOT_SUPPORTED) } else { Ok(p.world.uuid(gpu)) }
}

api! {
    fn cuInit(_flags: c_uint) { status(process::init()) }
    fn cuDeviceGetCount(count: *mut c_int) { unsafe { give(count, process::get().map(|p| p.world.config().visible.len() as c_int)) } }
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        let known = process::get().and_then(|p| p.gpu_of(ordinal).map(|_| ordinal));
        unsafe { give(device, known) }
    }
    fn cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) {
        let text = c"Simulated GPU".to_bytes_with_nul();
        if name.is_null() || (length as usize) < text.len() { return INVALID_VALUE }
        // SAFETY: checked to be long enough.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len()) };
        SUCCESS
    }
    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) { unsafe { give(uuid, uuid_of(device)) } }
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) { unsafe { give(uuid, uuid_of(device)) } }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) { unsafe { give(bytes, process::get().map(|p| p.world.config().memory as usize)) } }
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) {
        let concurrent = i32::from(std::env::var_os("NVSIM_NO_CONCURRENT_ACCESS").is_none());
        unsafe { give(value, Ok(match attribute { 16 => 40, 41 | 83 | 102 | 103 => 1, 75 => 7, 76 => 5, 89 => concurrent, 91 => 1, _ => 0 })) }
    }
    fn cuGetExportTable(_table: *mut *const c_void, _id: *const c_void) { NOT_FOUND }
}

/// Functions that may be called from anywhere.
macro_rules! anywhere {
    ($( fn $name:ident ($($arg:ident : $ty:ty),*) $body:block )*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $ty),*) -> c_int $body
        )*

        pub(super) static ANYWHERE: &[(&str, crate::Address)] =
            &[$( (stringify!($name), crate::Address($name as *const c_void)) ),*];
    };
}

anywhere! {
    fn cuDriverGetVersion(version: *mut c_int) { unsafe { give(version, Ok(VERSION)) } }
    fn cuGetErrorName(_error: c_int, name: *mut *const c_char) { unsafe { give(name, Ok(c"CUDA_ERROR_SIMULATED".as_ptr())) } }
    fn cuGetErrorString(_error: c_int, text: *mut *const c_char) { unsafe { give(text, Ok(c"simulated error".as_ptr())) } }
    fn cuGetProcAddress(symbol: *const c_char, place: *mut *mut c_void, version: c_int, flags: u64) {
        unsafe { find(symbol, place, version, flags, std::ptr::null_mut()) }
    }
    fn cuGetProcAddress_v2(symbol: *const c_char, place: *mut *mut c_void, version: c_int, flags: u64, found: *mut c_int) {
        unsafe { find(symbol, place, version, flags, found) }
    }
    fn nvsimMoved(device: c_int, moved: *mut [u64; 7]) { unsafe { give(moved, process::get().map(|p| p.world.moved(device as usize))) } }
    fn nvsimTouched(place: *mut u64) { unsafe { give(place, process::get().map(|p| p.world.touched_here())) } }
    fn nvsimLateCalls(calls: *mut u64) { unsafe { give(calls, Ok(exit::late_calls())) } }
    fn nvsimTrace(ran: *mut Ran, most: usize, count: *mut usize) {
        unsafe { give(count, process::get().map(|p| {
            let trace = p.world.trace();
            let kept = trace.len().min(most);
            // SAFETY: the caller's room for `most`.
            std::ptr::copy_nonoverlapping(trace[trace.len() - kept..].as_ptr(), ran, kept);
            kept
        })) }
    }
}

/// Names whose newer form has another signature, and the version since which the bare name means the newer form.
const SINCE: &[(&str, c_int)] = &[
    ("cuGraphInstantiateWithFlags", 12_000),
    ("cuGraphExecUpdate_v2", 12_000),
    ("cuGraphAddNode_v2", 13_000),
];

/// # Safety
/// As for `cuGetProcAddress_v2`; `found` may be null.
unsafe fn find(
    symbol: *const c_char,
    place: *mut *mut c_void,
    version: c_int,
    flags: u64,
    found: *mut c_int,
) -> c_int {
    if symbol.is_null() || place.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: a C string.
    let name = unsafe { CStr::from_ptr(symbol) }.to_string_lossy();
    let twins: &[&str] = if flags & 2 != 0 { &["_ptsz", "_ptds", ""] } else { &[""] };
    let is_hidden =
        name == "cuCtxRecordEvent" && process::get().is_ok_and(|p| !p.world.config().context_record);
    let forms = ["WithFlags", "_v2", ""].map(|form| format!("{name}{form}"));
    let fits = |form: &&String| {
        let since = SINCE.iter().find(|(newer, _)| newer == form);
        since.map_or(!form.ends_with("WithFlags") || name.ends_with("WithFlags"), |&(_, since)| {
            version >= since
        })
    };
    let address = twins
        .iter()
        .flat_map(|twin| forms.iter().filter(fits).map(move |form| format!("{form}{twin}")))
        .filter(|_| !is_hidden)
        .find_map(|full| crate::address_of(&full));
    // SAFETY: not null; the second may be.
    unsafe {
        *place = address.unwrap_or(std::ptr::null_mut());
        if let Some(found) = found.as_mut() {
            *found = c_int::from(address.is_none());
        }
    }
    if address.is_some() { SUCCESS } else { NOT_FOUND }
}
