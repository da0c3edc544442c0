//! What a call of the program is about: the device and context that it allocates in.

use std::ffi::c_void;
use std::sync::Arc;

use crate::driver;
use crate::driver::types::{CU_MEM_LOCATION_TYPE_DEVICE, CUdevice, CUresult, CUstream, MemoryProperties};
use crate::memory::devices::{self, Device};
use crate::session;
use crate::work::contexts::{self, Context};
use crate::work::{callbacks, used_devices};

/// The device and context that the calling thread would allocate in; `None`: the driver has to say why not.
pub(crate) fn target() -> Option<(&'static Device, Arc<Context>)> {
    // What the driver's own thread asks for, the driver answers.
    if callbacks::are_running() {
        return None;
    }
    // Its creation may have gone by a way that is not seen, and its memory is to be moved.
    let context = contexts::current()?;
    session::start();
    let device = devices::get(context.device())?;
    device.note_free_at_first();
    used_devices::add(device.ordinal);
    Some((device, context))
}

/// The same for what is ordered in a stream: the device is the stream's.
pub(crate) fn target_of(stream: CUstream) -> Option<(&'static Device, Arc<Context>)> {
    let current = target()?;
    if devices::all().nth(1).is_none() {
        return Some(current);
    }
    match driver::context_of(stream).ok()? {
        context if context == current.1.handle() => Some(current),
        context => driver::with_current(context, || Ok(target())).ok()?,
    }
}

/// A device that the program asks about, perhaps before it uses any.
pub(crate) fn device_of(ordinal: CUdevice) -> Option<&'static Device> {
    // What the driver's own thread asks for, the driver answers.
    if callbacks::are_running() {
        return None;
    }
    session::start();
    devices::get(ordinal)
}

/// Writes an address where the caller wants it.
///
/// # Safety
/// `place` is writable.
pub(crate) unsafe fn answer<T>(made: Result<T, CUresult>, place: *mut T) -> CUresult {
    match made {
        Ok(value) => {
            // SAFETY: promised by the caller.
            unsafe { *place = value };
            CUresult::SUCCESS
        }
        Err(error) => error,
    }
}

/// The device that memory with these properties is on; `None`: it is on none.
///
/// # Safety
/// Null, or what the driver's contract says.
pub(crate) unsafe fn device_of_properties(properties: *const c_void) -> Option<&'static Device> {
    // SAFETY: promised by the caller.
    let properties = unsafe { properties.cast::<MemoryProperties>().as_ref() }?;
    if properties.location.kind != CU_MEM_LOCATION_TYPE_DEVICE {
        return None;
    }
    let device = device_of(properties.location.id)?;
    used_devices::add(device.ordinal);
    Some(device)
}
