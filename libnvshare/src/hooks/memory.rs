//! `cuMemAlloc` and its kin, and `cuMemFree`.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::sync::Mutex;

use super::target::{answer, target};
use crate::driver;
use crate::driver::functions::{self, signatures};
use crate::driver::types::{CUdevice, CUdeviceptr, CUdeviceptrV1, CUresult};
use crate::memory::admission::allocate;
use crate::memory::allocations::{self, Kind};
use crate::memory::backing::{AllocationRequest, Work};
use crate::memory::devices::Device;
use crate::memory::{deferred_free, free};
use crate::process::lock::lock;
use crate::work::contexts::Context;

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn alloc(
    real: signatures::cuMemAlloc_v2,
    place: *mut CUdeviceptr,
    bytes: usize,
) -> CUresult {
    // The driver itself refuses invalid arguments.
    let Some((device, context)) = (!place.is_null() && bytes > 0).then(target).flatten() else {
        // SAFETY: the caller's arguments.
        return unsafe { real(place, bytes) };
    };
    let made = allocate(AllocationRequest::for_device_memory(device, context, bytes as u64), || {
        let mut base = 0;
        // SAFETY: a place for the address, and a value.
        unsafe { real(&raw mut base, bytes) }.ok()?;
        Ok(base)
    });
    // SAFETY: not null, and where the driver would write.
    unsafe { answer(made, place) }
}

/// The 32-bit function of CUDA 3.1. Its addresses cannot reach managed memory, so the memory stays plain.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn alloc_v1(
    real: signatures::cuMemAlloc,
    place: *mut CUdeviceptrV1,
    bytes: c_uint,
) -> CUresult {
    let Some((device, context)) = (!place.is_null() && bytes > 0).then(target).flatten() else {
        // SAFETY: the caller's arguments.
        return unsafe { real(place, bytes) };
    };
    let made = allocate(AllocationRequest::new(device, context, Kind::Plain, u64::from(bytes)), || {
        let mut base = 0;
        // SAFETY: a place for the address, and a value.
        unsafe { real(&raw mut base, bytes) }.ok()?;
        Ok(CUdeviceptr::from(base))
    });
    // SAFETY: not null, and where the driver would write; the address came from 32 bits.
    unsafe { answer(made.map(|base| base as CUdeviceptrV1), place) }
}

/// Frees plain memory that no work has used, without a wait for the program's work: `cuMemFree` would wait for that of the whole device
/// (measured; in the order of an idle stream it does not).
fn free_unused(context: &Context, base: CUdeviceptr) {
    let in_order = |stream| {
        // SAFETY: memory of the caller's, which nothing uses; a stream of the context, which is current.
        functions::cuMemFreeAsync
            .get()
            .map_or(Err(CUresult::NOT_SUPPORTED), |free| unsafe { free(base, stream) }.ok())
    };
    let freed = context.with(|| context.begin_move(in_order));
    if !matches!(freed, Ok(Ok(())))
        && let Some(free) = functions::cuMemFree_v2.get()
    {
        // SAFETY: memory of the caller's, which has not been freed.
        unsafe { free(base) };
    }
}

/// The pitch that the driver chooses for a width. The first call allocates a single row to find out; the result is kept. `None`: the list
/// of known pitches is full, or so is the card at this moment.
fn pitch_of(
    real: signatures::cuMemAllocPitch_v2,
    device: &Device,
    context: &Context,
    width: usize,
    element: c_uint,
) -> Result<Option<usize>, CUresult> {
    static KNOWN: Mutex<BTreeMap<(CUdevice, usize, c_uint), usize>> = Mutex::new(BTreeMap::new());
    const MAX_LENGTH: usize = 4096;
    let known = || lock(&KNOWN);
    let key = (device.ordinal, width, element);
    if let Some(&pitch) = known().get(&key) {
        return Ok(Some(pitch));
    }
    if known().len() >= MAX_LENGTH {
        return Ok(None);
    }
    let (mut row, mut pitch) = (0, 0);
    // SAFETY: places for both answers, and values.
    match unsafe { real(&raw mut row, &raw mut pitch, width, 1, element) } {
        // The memory itself is admitted in its own way.
        CUresult::OUT_OF_MEMORY => return Ok(None),
        result => result.ok()?,
    }
    free_unused(context, row);
    known().insert(key, pitch);
    Ok(Some(pitch))
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn alloc_pitch(
    real: signatures::cuMemAllocPitch_v2,
    place: *mut CUdeviceptr,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> CUresult {
    let valid = !place.is_null() && !pitch.is_null() && width > 0 && height > 0;
    let Some((device, context)) = valid.then(target).flatten() else {
        // SAFETY: the caller's arguments.
        return unsafe { real(place, pitch, width, height, element) };
    };
    let known_pitch = match pitch_of(real, device, &context, width, element) {
        Ok(pitch) => pitch,
        Err(error) => return error,
    };
    let Some(bytes) = known_pitch.unwrap_or(width).checked_mul(height) else {
        return CUresult::OUT_OF_MEMORY;
    };
    // Without the pitch, the padding of rows is not known in advance, and the memory stays plain.
    let request = if known_pitch.is_some() {
        AllocationRequest::for_device_memory(device, context, bytes as u64)
    } else {
        AllocationRequest::new(device, context, Kind::Plain, bytes as u64)
    };
    let made_pitch = Cell::new(known_pitch.unwrap_or(0));
    let made = allocate(request, || {
        let (mut base, mut row) = (0, 0);
        // SAFETY: places for both answers, and values.
        unsafe { real(&raw mut base, &raw mut row, width, height, element) }.ok()?;
        made_pitch.set(row);
        Ok(base)
    });
    // SAFETY: neither is null, and both are where the driver would write.
    unsafe {
        let result = answer(made, place);
        if result == CUresult::SUCCESS {
            *pitch = made_pitch.get();
        }
        result
    }
}

/// The 32-bit function of CUDA 3.1. See [`alloc_v1`].
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn alloc_pitch_v1(
    real: signatures::cuMemAllocPitch,
    place: *mut CUdeviceptrV1,
    pitch: *mut c_uint,
    width: c_uint,
    height: c_uint,
    element: c_uint,
) -> CUresult {
    let valid = !place.is_null() && !pitch.is_null() && width > 0 && height > 0;
    let Some((device, context)) = valid.then(target).flatten() else {
        // SAFETY: the caller's arguments.
        return unsafe { real(place, pitch, width, height, element) };
    };
    // The padding of rows is not known in advance. It is small compared with the memory of such a program.
    let bytes = u64::from(width) * u64::from(height);
    let made = allocate(AllocationRequest::new(device, context, Kind::Plain, bytes), || {
        let mut base = 0;
        // SAFETY: a place for the address, the caller's for the pitch, and values.
        unsafe { real(&raw mut base, pitch, width, height, element) }.ok()?;
        Ok(CUdeviceptr::from(base))
    });
    // SAFETY: not null, and where the driver would write; the address came from 32 bits.
    unsafe { answer(made.map(|base| base as CUdeviceptrV1), place) }
}

/// The program's own managed memory is charged, evicted and restored like device memory. It may exceed the card: the driver
/// moves the part beyond it.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn alloc_managed(
    real: signatures::cuMemAllocManaged,
    place: *mut CUdeviceptr,
    bytes: usize,
    flags: c_uint,
) -> CUresult {
    let Some((device, context)) = (!place.is_null() && bytes > 0).then(target).flatten() else {
        // SAFETY: the caller's arguments.
        return unsafe { real(place, bytes, flags) };
    };
    let made = allocate(AllocationRequest::new(device, context, Kind::ProgramsManaged, bytes as u64), || {
        driver::allocate_managed(bytes as u64, flags)
    });
    // SAFETY: not null, and where the driver would write.
    unsafe { answer(made, place) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn free(real: signatures::cuMemFree_v2, base: CUdeviceptr) -> CUresult {
    free_that_waits(base, || {
        // SAFETY: the caller's argument.
        unsafe { real(base) }
    })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn free_v1(real: signatures::cuMemFree, base: CUdeviceptrV1) -> CUresult {
    free_that_waits(CUdeviceptr::from(base), || {
        // SAFETY: the caller's argument.
        unsafe { real(base) }
    })
}

/// Frees by `call`. The program may have freed the memory in stream order already: then it is not an allocation any more.
pub(crate) fn free_unless_freed(base: CUdeviceptr, call: impl Fn() -> CUresult) -> CUresult {
    if deferred_free::is_freed(base) { CUresult::INVALID_VALUE } else { free::free(base, Work::MayRun, call) }
}

/// The same for a call that waits for the work of the memory's context.
fn free_that_waits(base: CUdeviceptr, call: impl Fn() -> CUresult) -> CUresult {
    if let Some(allocation) = allocations::find(base) {
        deferred_free::free_due_of_context(&allocation.context);
    }
    free_unless_freed(base, call)
}
