//! Contexts that come and go.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

use crate::cuda::{CUcontext, CUdevice, CUresult};
use crate::plain::kept;
use crate::{devices, driver, memory, mover, streams};

/// Primary contexts, by device.
static PRIMARY: Mutex<Vec<(CUdevice, CUcontext)>> = Mutex::new(Vec::new());

type Create = unsafe extern "C-unwind" fn(*mut CUcontext, c_uint, CUdevice) -> CUresult;
type CreateV3 = unsafe extern "C-unwind" fn(*mut CUcontext, *mut c_void, c_int, c_uint, CUdevice) -> CUresult;
type CreateV4 = unsafe extern "C-unwind" fn(*mut CUcontext, *mut c_void, c_uint, CUdevice) -> CUresult;
type Retain = unsafe extern "C-unwind" fn(*mut CUcontext, CUdevice) -> CUresult;
type OfContext = unsafe extern "C-unwind" fn(CUcontext) -> CUresult;
type OfDevice = unsafe extern "C-unwind" fn(CUdevice) -> CUresult;
type Pop = unsafe extern "C-unwind" fn(*mut CUcontext) -> CUresult;

/// Whatever is current now may get work.
fn met(result: CUresult) -> CUresult {
    if result == CUresult::SUCCESS
        && let Ok(context) = driver::current_context()
    {
        streams::meet_context(context);
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create(
    real: Create,
    context: *mut CUcontext,
    flags: c_uint,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    met(unsafe { real(context, flags, device) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create_v3(
    real: CreateV3,
    context: *mut CUcontext,
    params: *mut c_void,
    count: c_int,
    flags: c_uint,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    met(unsafe { real(context, params, count, flags, device) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create_v4(
    real: CreateV4,
    context: *mut CUcontext,
    params: *mut c_void,
    flags: c_uint,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    met(unsafe { real(context, params, flags, device) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn set_current(real: OfContext, context: CUcontext) -> CUresult {
    // SAFETY: the caller's arguments.
    met(unsafe { real(context) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn pop_current(real: Pop, context: *mut CUcontext) -> CUresult {
    // SAFETY: the caller's arguments.
    met(unsafe { real(context) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn retain_primary(real: Retain, context: *mut CUcontext, device: CUdevice) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(context, device) };
    if result == CUresult::SUCCESS && !context.is_null() {
        // SAFETY: the driver wrote it.
        let context = unsafe { *context };
        let mut primary = PRIMARY.lock().unwrap_or_else(PoisonError::into_inner);
        if !primary.contains(&(device, context)) {
            primary.retain(|&(of, _)| of != device);
            primary.push((device, context));
        }
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn destroy(real: OfContext, context: CUcontext) -> CUresult {
    // Nothing of ours may be under way in it, and nothing of ours may be left in it.
    let _still = mover::hold_still();
    let taken = streams::take_context(context);
    // SAFETY: the caller's arguments.
    let result = unsafe { real(context) };
    if result == CUresult::SUCCESS {
        memory::forget_context(context, false);
    } else {
        taken.put_back();
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn release_primary(real: OfDevice, device: CUdevice) -> CUresult {
    // Somebody else may still retain it.
    // SAFETY: promised by the caller.
    unsafe { end_primary(real, device, || driver::primary_is_active(device)) }
}

/// Whoever retains it, what was in it is gone.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn reset_primary(real: OfDevice, device: CUdevice) -> CUresult {
    // SAFETY: promised by the caller.
    unsafe { end_primary(real, device, || false) }
}

/// # Safety
/// As for the driver's function.
unsafe fn end_primary(real: OfDevice, device: CUdevice, lives_on: impl FnOnce() -> bool) -> CUresult {
    let _still = mover::hold_still();
    let primary =
        PRIMARY.lock().unwrap_or_else(PoisonError::into_inner).iter().find(|(of, _)| *of == device).copied();
    let taken = primary.map(|(_, context)| (context, streams::take_context(context)));
    // SAFETY: the caller's arguments.
    let result = unsafe { real(device) };
    if let Some((context, taken)) = taken {
        if result != CUresult::SUCCESS || lives_on() {
            taken.put_back();
        } else {
            memory::forget_context(context, true);
            devices::get(device).into_iter().for_each(kept::forget);
        }
    }
    result
}
