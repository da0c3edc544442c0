//! Physical memory, addresses and mappings.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::Ordering;

use super::{api, give, give_new, status};
use crate::config::Held;
use crate::process::{self, INVALID_VALUE, PEER_UNSUPPORTED};
use crate::vmm::{GRANULARITY, MAPPED};

/// The beginning of `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
}

/// `CUmemLocation`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAccessDesc`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Access {
    location: Location,
    flags: c_int,
}

const PINNED: c_int = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
const DESCRIPTOR: c_int = 1;
const ON_DEVICE: c_int = 1;
const READ_AND_WRITE: c_int = 3;

api! {
    fn cuMemCreate(handle: *mut u64, bytes: usize, properties: *const Properties, flags: u64) {
        // SAFETY: null, or what the driver would read.
        let Some(properties) = (unsafe { properties.as_ref() }) else { return INVALID_VALUE };
        if bytes == 0 || flags != 0 || properties.kind != PINNED { return INVALID_VALUE }
        let Location { kind, id } = properties.location;
        // Memory of the host is on a card here, too: nothing depends on the difference.
        unsafe { give_new(handle, || { let p = process::get()?; p.create_physical(p.gpu_of(if kind == ON_DEVICE { id } else { 0 })?, bytes as u64, properties.handle_types) }) }
    }
    fn cuMemRelease(handle: u64) { status(process::get().and_then(|p| { p.release_physical(handle)?; p.end_physical(handle); Ok(()) })) }
    fn cuMemGetAllocationPropertiesFromHandle(place: *mut [c_int; 8], handle: u64) {
        unsafe { give(place, process::get().and_then(|p| {
            let (gpu, shared_as) = p.physical_properties(handle)?;
            Ok([PINNED, shared_as, ON_DEVICE, gpu as c_int, 0, 0, 0, 0])
        })) }
    }
    fn cuMemExportToShareableHandle(place: *mut c_int, handle: u64, kind: c_int, flags: u64) {
        unsafe { give_new(place, || {
            if flags != 0 || kind != DESCRIPTOR { return Err(INVALID_VALUE) }
            process::get()?.export_physical(handle, kind)
        }) }
    }
    fn cuMemImportFromShareableHandle(place: *mut u64, descriptor: usize, kind: c_int) {
        if kind != DESCRIPTOR { return INVALID_VALUE }
        unsafe { give_new(place, || process::get()?.import_physical(descriptor as c_int)) }
    }
    // Memory of a graphics library. Nothing maps it here.
    fn cuImportExternalMemory(place: *mut usize, described: *const c_void) {
        if described.is_null() { return INVALID_VALUE }
        unsafe { give_new(place, || process::get().map(|_| 1)) }
    }
    fn cuMemRetainAllocationHandle(place: *mut u64, address: u64) { unsafe { give_new(place, || process::get()?.retain_physical(address)) } }
    fn cuMemGetAllocationGranularity(place: *mut usize, properties: *const c_void, _option: c_uint) {
        if properties.is_null() { return INVALID_VALUE }
        unsafe { give(place, process::get().map(|_| GRANULARITY as usize)) }
    }
    fn cuMemAddressReserve(place: *mut u64, bytes: usize, alignment: usize, _address: u64, _flags: u64) {
        unsafe { give_new(place, || process::get()?.reserve_addresses(bytes as u64, alignment as u64)) }
    }
    fn cuMemAddressFree(address: u64, bytes: usize) { status(process::get().and_then(|p| {
        p.world.config().wait_once_while_held(Held::Free);
        p.free_addresses(address, bytes as u64)
    })) }
    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) {
        if flags != 0 { return INVALID_VALUE }
        status(process::get().and_then(|p| p.map(address, bytes as u64, offset as u64, handle)))
    }
    fn cuMemSetAccess(address: u64, bytes: usize, access: *const Access, count: usize) {
        if access.is_null() || count == 0 { return INVALID_VALUE }
        // SAFETY: this many of them.
        let access = unsafe { std::slice::from_raw_parts(access, count) };
        let is_valid = |access: &Access| matches!(access.flags, 0 | 1 | READ_AND_WRITE);
        if !access.iter().all(is_valid) { return INVALID_VALUE }
        status(process::get().and_then(|p| {
            p.world.config().wait_while_held(Held::Access);
            if count > 1 && p.world.config().refuses_peers() {
                return Err(PEER_UNSUPPORTED);
            }
            let on_devices = access.iter().filter(|access| access.location.kind == ON_DEVICE);
            let cards: Result<Vec<(usize, u64)>, crate::process::Failure> = on_devices.map(|access| Ok((p.gpu_of(access.location.id)?, access.flags as u64))).collect();
            p.set_access(address, bytes as u64, &cards?)
        }))
    }
    fn cuMemGetAccess(place: *mut u64, location: *const Location, address: u64) {
        // SAFETY: null, or readable.
        let Some(location) = (unsafe { location.as_ref() }) else { return INVALID_VALUE };
        unsafe { give(place, process::get().and_then(|p| p.access(address, p.gpu_of(location.id)?))) }
    }
    fn nvsimMapped(place: *mut u64) { unsafe { give(place, process::get().map(|_| MAPPED.load(Ordering::Relaxed))) } }
    fn cuMemUnmap(address: u64, bytes: usize) { status(process::get().and_then(|p| p.unmap(address, bytes as u64))) }
}
