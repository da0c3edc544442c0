//! Allocations: of the cards, of the host, physical memory, arrays; and attributes of addresses.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{api, give, give_new, status};
use crate::config::Held;
use crate::memory;
use crate::process::{self, Failure, INVALID_VALUE, OUT_OF_MEMORY, Process, SUCCESS};
use crate::stream::Point;
use crate::world::BLOCK;

/// Bytes per second at which the driver makes page-locked memory, as on a T4's host.
const PIN: f64 = 2.7e9;

api! {
    fn cuMemAlloc_v2(place: *mut u64, bytes: usize) { unsafe { give_new(place, || process::get()?.allocate(bytes as u64, false)) } }
    fn cuMemAllocManaged(place: *mut u64, bytes: usize, _flags: c_uint) { unsafe { give_new(place, || process::get()?.allocate(bytes as u64, true)) } }
    fn cuMemAllocPitch_v2(place: *mut u64, pitch: *mut usize, width: usize, height: usize, _element: c_uint) {
        let row = width.next_multiple_of(512);
        if pitch.is_null() { return INVALID_VALUE }
        unsafe { match give_new(place, || process::get()?.allocate((row * height) as u64, false)) { SUCCESS => give(pitch, Ok(row)), failure => failure } }
    }
    fn cuMemFree_v2(base: u64) { status(process::get().and_then(|p| {
        if base == 0 { return Ok(()) }
        p.world.config().wait_once_while_held(Held::Free);
        if p.tables().shared.is_of_another(base) { return Err(INVALID_VALUE) }
        if p.is_pooled(base) { p.free_pooled(base) } else { p.free(base) }
    })) }
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let known = process::get().and_then(|p| p.current_gpu().map(|gpu| (p.world.free_bytes(gpu) as usize, p.world.config().memory as usize)));
        unsafe { match known { Ok((f, t)) => { give(free, Ok(f)); give(total, Ok(t)) } Err(failure) => failure } }
    }
    fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: u64) {
        match process::get().and_then(|p| p.find(address, 1)) {
            // SAFETY: each may be null.
            Ok(found) => unsafe {
                if let Some(base) = base.as_mut() { *base = address - found.offset }
                if let Some(bytes) = bytes.as_mut() { *bytes = found.allocation.bytes() as usize }
                SUCCESS
            },
            Err(failure) => failure,
        }
    }

    fn cuMemHostAlloc(place: *mut usize, bytes: usize, _flags: c_uint) { unsafe { give_new(place, || allocate_on_host(bytes)) } }
    fn cuMemAllocHost_v2(place: *mut usize, bytes: usize) { unsafe { give_new(place, || allocate_on_host(bytes)) } }
    fn cuMemFreeHost(memory: usize) { status(process::get().and_then(|p| {
        end_page_lock(p, memory, true)?;
        // SAFETY: what `allocate_on_host` got, and gave nobody else.
        unsafe { libc::free(memory as *mut c_void) };
        Ok(())
    })) }
    fn cuMemHostRegister_v2(memory: usize, bytes: usize, _flags: c_uint) { status(process::get().and_then(|p| {
        p.sticky()?;
        let mut tables = p.tables();
        tables.unsafe_call()?;
        tables.register_host(memory, bytes, false)?;
        drop(tables);
        take_time(bytes, p.world.config().register);
        Ok(())
    })) }
    fn cuMemHostUnregister(memory: usize) { status(process::get().and_then(|p| {
        p.world.config().wait_while_held(Held::Unregister);
        end_page_lock(p, memory, false)
    })) }
    fn cuMemHostGetDevicePointer_v2(place: *mut u64, memory: usize, flags: c_uint) {
        unsafe { give(place, process::get().and_then(|p| if flags == 0 && p.tables().is_host(memory, 1) { Ok(memory as u64) } else { Err(INVALID_VALUE) })) }
    }

    fn cuArray3DCreate_v2(place: *mut u64, descriptor: *const usize) {
        if descriptor.is_null() { return INVALID_VALUE }
        // SAFETY: three extents, a format (one byte here) and the channels.
        let bytes = unsafe { *descriptor * (*descriptor.add(1)).max(1) * (*descriptor.add(2)).max(1) };
        unsafe { give_new(place, || process::get()?.allocate(bytes as u64, false)) }
    }
    fn cuArrayDestroy(array: u64) { status(process::get().and_then(|p| p.free(array))) }
    fn cuIpcGetMemHandle(handle: *mut [u8; 64], address: u64) {
        unsafe { give(handle, process::get().and_then(|p| p.ipc_handle(address))) }
    }
    fn cuIpcOpenMemHandle_v2(place: *mut u64, handle: Handle, flags: c_uint) { unsafe { give_new(place, || process::get()?.open_ipc(&handle.0, flags)) } }
    fn cuIpcCloseMemHandle(address: u64) { status(process::get().and_then(|p| p.close_ipc(address))) }
    fn cuMemGetHandleForAddressRange(handle: *mut c_int, address: u64, bytes: usize, kind: c_int, flags: c_ulonglong) {
        unsafe { give(handle, process::get().and_then(|p| p.export_range(address, bytes as u64, kind, flags))) }
    }
    fn cuPointerGetAttribute(place: *mut c_void, attribute: c_int, address: u64) { unsafe { attribute_of(place, attribute, address) } }
    fn cuPointerSetAttribute(value: *const c_void, attribute: c_int, address: u64) {
        if value.is_null() || attribute != SYNC_MEMOPS { return INVALID_VALUE }
        // SAFETY: not null, and of the attribute's size.
        let value = unsafe { value.cast::<c_uint>().read_unaligned() };
        status(process::get().and_then(|p| {
            p.find(address, 1)?.allocation.attributes.synchronous.store(value, Ordering::Relaxed);
            Ok(())
        }))
    }
    fn cuPointerGetAttributes(count: c_uint, attributes: *const c_int, places: *const *mut c_void, address: u64) {
        if attributes.is_null() || places.is_null() { return INVALID_VALUE }
        for i in 0..count as usize {
            // SAFETY: this many of both.
            let failure = unsafe { attribute_of(*places.add(i), *attributes.add(i), address) };
            if failure != SUCCESS { return failure }
        }
        SUCCESS
    }

    // Another device reads memory of a card by the descriptor of a range, where nothing of the process notices.
    fn nvsimDeviceRead(to: *mut u8, descriptor: c_int, offset: u64, bytes: usize) {
        if to.is_null() { return INVALID_VALUE }
        // SAFETY: the caller's memory of this length.
        let to = unsafe { std::slice::from_raw_parts_mut(to, bytes) };
        status(process::get().and_then(|p| p.read_range(descriptor, offset, to)))
    }

    // The host's own touches of managed memory, whose addresses are no memory of this process. The touched memory comes to
    // the host, as by a page fault of the processor.
    fn nvsimHostRead(to: *mut u8, from: u64, bytes: usize) {
        if to.is_null() { return INVALID_VALUE }
        // SAFETY: the caller's memory of this length.
        let to = unsafe { std::slice::from_raw_parts_mut(to, bytes) };
        status(process::get().and_then(|p| { managed(from, bytes)?; p.host_touch(from, bytes as u64, |store, piece| memory::read(store, piece, to)) }))
    }
    fn nvsimHostWrite(to: u64, from: *const u8, bytes: usize) {
        if from.is_null() { return INVALID_VALUE }
        // SAFETY: the caller's memory of this length.
        let from = unsafe { std::slice::from_raw_parts(from, bytes) };
        status(process::get().and_then(|p| { managed(to, bytes)?; p.host_touch(to, bytes as u64, |store, piece| memory::write(store, piece, from)) }))
    }
}

/// `CUipcMemHandle`, which is passed by value.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Handle([u8; 64]);

/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`
const SYNC_MEMOPS: c_int = 6;

fn managed(address: u64, bytes: usize) -> Result<(), Failure> {
    if process::get()?.find(address, bytes as u64)?.allocation.managed { Ok(()) } else { Err(INVALID_VALUE) }
}

/// Ends the page-lock of memory, of the driver's own or of the program's, when all work is complete: copies may be under way.
fn end_page_lock(p: &Process, memory: usize, is_drivers: bool) -> Result<(), Failure> {
    let mut tables = p.tables();
    tables.unsafe_call()?;
    tables.unregister_host(memory, is_drivers)?;
    let points = tables.ends(|_| true);
    drop(tables);
    let _alone = p.creation();
    points.iter().for_each(Point::wait);
    Ok(())
}

fn allocate_on_host(bytes: usize) -> Result<usize, Failure> {
    let p = process::get()?;
    p.sticky()?;
    let mut tables = p.tables();
    tables.unsafe_call()?;
    // SAFETY: an allocation of this size, or null.
    let memory = unsafe { libc::calloc(1, bytes.max(1)) } as usize;
    if memory == 0 {
        return Err(OUT_OF_MEMORY);
    }
    // Memory of malloc overlaps with nothing, unless it was registered and freed.
    tables.register_host(memory, bytes.max(1), true).inspect_err(|_| {
        // SAFETY: allocated above.
        unsafe { libc::free(memory as *mut c_void) };
    })?;
    drop(tables);
    take_time(bytes, PIN);
    Ok(memory)
}

/// Pinning takes time; for a page, the time is too short for a sleep.
fn take_time(bytes: usize, rate: f64) {
    if bytes as u64 >= BLOCK {
        std::thread::sleep(Duration::from_secs_f64(bytes as f64 / rate));
    }
}

/// # Safety
/// The place is null or fits the attribute.
unsafe fn attribute_of(place: *mut c_void, attribute: c_int, address: u64) -> c_int {
    const HOST: c_uint = 1;
    const DEVICE: c_uint = 2;
    let Ok(p) = process::get() else { return process::NOT_INITIALIZED };
    if attribute == 2 && p.tables().is_host(address as usize, 1) {
        return unsafe { give(place.cast::<c_uint>(), Ok(HOST)) };
    }
    if let Some(around) = p.tables().vmm.around(address)
        && let Some(value) = match attribute {
            // It is of no context.
            1 => Some(0),
            11 => Some(around.reserved.0),
            12 => Some(around.reserved.1),
            14 => Some(around.shared_as as u64),
            18 => Some(around.bytes),
            19 => Some(around.at),
            _ => None,
        }
    {
        return unsafe { give(place.cast::<u64>(), Ok(value)) };
    }
    match (attribute, p.find(address, 1).map(|found| found.allocation)) {
        (_, Err(failure)) => failure,
        (2, Ok(_)) => unsafe { give(place.cast::<c_uint>(), Ok(DEVICE)) },
        (4, Ok(allocation)) if allocation.managed => unsafe { give(place.cast::<u64>(), Ok(address)) },
        (SYNC_MEMOPS, Ok(allocation)) => unsafe {
            give(place.cast::<c_uint>(), Ok(allocation.attributes.synchronous.load(Ordering::Relaxed)))
        },
        (7, Ok(allocation)) => unsafe { give(place.cast::<u64>(), Ok(allocation.attributes.id)) },
        // Memory of another process is of the context in which it was opened.
        (1, Ok(allocation)) if p.tables().shared.is_of_another(allocation.base) => unsafe {
            give(place.cast::<u64>(), Ok(p.current_handle() as u64))
        },
        (11, Ok(allocation)) => unsafe { give(place.cast::<u64>(), Ok(allocation.base)) },
        (12, Ok(allocation)) => unsafe { give(place.cast::<u64>(), Ok(allocation.bytes())) },
        (9, Ok(allocation)) => unsafe { give(place.cast::<c_uint>(), Ok(allocation.gpu as c_uint)) },
        (8, Ok(allocation)) => unsafe { give(place.cast::<c_uint>(), Ok(c_uint::from(allocation.managed))) },
        _ => INVALID_VALUE,
    }
}

const _: () = assert!(BLOCK.is_multiple_of(4096));
