//! A driver that answers at once and does nothing.

#![allow(non_snake_case, reason = "the driver's own names")]
#![allow(clippy::missing_safety_doc, reason = "each is the driver's function of that name")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "answers go where the driver's contract says that there is a place"
)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

static NEXT: AtomicU64 = AtomicU64::new(1 << 40);

macro_rules! stub {
    ($( fn $name:ident ($($arg:ident : $ty:ty),*) $body:block )*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> c_int $body
    )*
        /// The address behind a name, whatever stands before this library in the search order.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn stubAddress(name: *const c_char) -> *const c_void {
            match unsafe { CStr::from_ptr(name) }.to_bytes() {
                $( name if name == stringify!($name).as_bytes() => $name as *const c_void, )*
                _ => std::ptr::null(),
            }
        }
    };
}

unsafe fn give<T>(place: *mut T, value: T) -> c_int {
    unsafe { place.write(value) };
    0
}

stub! {
    fn cuInit(_flags: c_uint) { 0 }
    fn cuDeviceGetCount(count: *mut c_int) { unsafe { give(count, 1) } }
    fn cuDeviceGet(device: *mut c_int, _ordinal: c_int) { unsafe { give(device, 0) } }
    fn cuDeviceGetUuid(uuid: *mut [u8; 16], _device: c_int) { unsafe { give(uuid, [7; 16]) } }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) { unsafe { give(bytes, 1 << 45) } }
    fn cuDeviceGetAttribute(value: *mut c_int, _attribute: c_int, _device: c_int) { unsafe { give(value, 1) } }
    fn cuCtxGetCurrent(context: *mut usize) { unsafe { give(context, 0x10) } }
    fn cuCtxGetDevice(device: *mut c_int) { unsafe { give(device, 0) } }
    fn cuCtxSetCurrent(_context: usize) { 0 }
    fn cuMemAllocManaged(place: *mut u64, bytes: usize, _flags: c_uint) {
        unsafe { give(place, NEXT.fetch_add((bytes as u64).next_multiple_of(512), Ordering::Relaxed)) }
    }
    fn cuMemAlloc_v2(place: *mut u64, bytes: usize) {
        unsafe { give(place, NEXT.fetch_add((bytes as u64).next_multiple_of(512), Ordering::Relaxed)) }
    }
    fn cuMemFree_v2(_base: u64) { 0 }
    fn cuMemAllocAsync(place: *mut u64, bytes: usize, _stream: usize) {
        unsafe { give(place, NEXT.fetch_add((bytes as u64).next_multiple_of(512), Ordering::Relaxed)) }
    }
    fn cuMemFreeAsync(_base: u64, _stream: usize) { 0 }
    fn cuMemCreate(place: *mut u64, _bytes: usize, _properties: *const c_void, _flags: u64) {
        unsafe { give(place, NEXT.fetch_add(512, Ordering::Relaxed)) }
    }
    fn cuMemMap(_address: u64, _bytes: usize, _offset: usize, _handle: u64, _flags: u64) { 0 }
    fn cuMemAddressReserve(place: *mut u64, bytes: usize, _alignment: usize, _address: u64, _flags: u64) {
        // Ranges begin at multiples of the granularity of physical memory, as in the driver.
        const GRANULE: u64 = 2 << 20;
        let begin = NEXT.fetch_add((bytes as u64).next_multiple_of(GRANULE) + GRANULE, Ordering::Relaxed);
        unsafe { give(place, begin.next_multiple_of(GRANULE)) }
    }
    fn cuMemAddressFree(_address: u64, _bytes: usize) { 0 }
    fn cuMemSetAccess(_address: u64, _bytes: usize, _access: *const c_void, _count: usize) { 0 }
    fn cuMemUnmap(_address: u64, _bytes: usize) { 0 }
    fn cuMemRelease(_handle: u64) { 0 }
    fn cuArray3DCreate_v2(place: *mut u64, _descriptor: *const c_void) {
        unsafe { give(place, NEXT.fetch_add(512, Ordering::Relaxed)) }
    }
    fn cuArrayDestroy(_array: u64) { 0 }
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) { unsafe { give(free, 1 << 45); give(total, 1 << 45) } }
    fn cuMemPrefetchAsync(_address: u64, _bytes: usize, _device: c_int, _stream: usize) { 0 }
    fn cuStreamCreate(stream: *mut usize, _flags: c_uint) { unsafe { give(stream, 0x2000) } }
    fn cuStreamQuery(_stream: usize) { 0 }
    fn cuStreamIsCapturing(_stream: usize, status: *mut c_int) { unsafe { give(status, 0) } }
    fn cuEventCreate(event: *mut usize, _flags: c_uint) { unsafe { give(event, 0x4000) } }
    fn cuEventRecord(_event: usize, _stream: usize) { 0 }
    fn cuEventQuery(_event: usize) { 0 }
    fn cuEventDestroy_v2(_event: usize) { 0 }
    fn cuCtxRecordEvent(_context: usize, _event: usize) { 0 }
    fn cuStreamGetCtx(_stream: usize, context: *mut usize) { unsafe { give(context, 0x10) } }
    fn cuStreamSynchronize(_stream: usize) { 0 }
    fn cuThreadExchangeStreamCaptureMode(_mode: *mut c_int) { 0 }
    fn cuLaunchKernel(_f: usize, _gx: c_uint, _gy: c_uint, _gz: c_uint, _bx: c_uint, _by: c_uint, _bz: c_uint, _s: c_uint, _stream: usize, _params: *mut c_void, _extra: *mut c_void) { 0 }
    fn cuMemcpyHtoDAsync_v2(_to: u64, _from: *const c_void, _bytes: usize, _stream: usize) { 0 }
    fn cuGetProcAddress_v2(symbol: *const c_char, place: *mut *const c_void, _version: c_int, _flags: u64, _status: *mut c_int) {
        let name = unsafe { CStr::from_ptr(symbol) }.to_bytes();
        let known = ["_v2", ""].iter().map(|version| [name, version.as_bytes(), b"\0"].concat()).find_map(|full| {
            let address = unsafe { stubAddress(full.as_ptr().cast()) };
            (!address.is_null()).then_some(address)
        });
        unsafe { give(place, known.unwrap_or(std::ptr::null())) };
        if known.is_some() { 0 } else { 500 }
    }
}
