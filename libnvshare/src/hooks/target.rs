//! The device and context that a call of the program allocates in.

use std::ffi::c_void;
use std::sync::Arc;

use crate::driver;
use crate::driver::types::{CUdevice, CUdeviceptr, CUresult, CUstream, MemoryProperties};
use crate::memory::allocations::Allocation;
use crate::memory::devices::{self, Device};
use crate::memory::{physical, sharing};
use crate::session;
use crate::work::contexts::{self, Context};
use crate::work::gate::{self, FrameMark};
use crate::work::stream_key::StreamKey;
use crate::work::{callbacks, used_devices};

/// The device of the calling thread, and the context that memory belongs to which it allocates. `None`: the driver has to report why there
/// is none.
pub(crate) fn target() -> Option<(&'static Device, Arc<Context>)> {
    // A callback must not wait, so the driver answers.
    if callbacks::are_running() {
        return None;
    }
    // This also learns a context that a function without a hook has created.
    let context = contexts::current()?.of_memory();
    session::start();
    let device = devices::get(context.device())?;
    device.note_free_at_first();
    used_devices::add(device.ordinal);
    Some((device, context))
}

/// The same for a stream-ordered allocation, which is on the device of the stream.
pub(crate) fn target_of(stream: CUstream) -> Option<(&'static Device, Arc<Context>)> {
    let current = target()?;
    if devices::all().nth(1).is_none() && devices::are_complete() {
        return Some(current);
    }
    match driver::context_of(stream).ok()? {
        context if context == current.1.handle() => Some(current),
        context => driver::with_current(context, || Ok(target())).ok()?,
    }
}

/// The device of an ordinal. Starts the session, as the program may ask before it uses any device.
pub(crate) fn device_of(ordinal: CUdevice) -> Option<&'static Device> {
    // A callback must not wait, so the driver answers.
    if callbacks::are_running() {
        return None;
    }
    session::start();
    devices::get(ordinal)
}

/// Makes a call that submits work on a stream, like a hook whose row names that stream.
pub(crate) fn pass_gate_on(stream: StreamKey, call: impl FnOnce() -> CUresult) -> CUresult {
    let mark = FrameMark::new();
    let pass = match gate::enter(stream, &mark, session::start) {
        Ok(pass) => pass,
        Err(error) => return error,
    };
    let result = call();
    gate::leave(pass, &mark, result);
    result
}

/// Makes a call that submits nothing while the gate is open, like a hook whose row says `addresses`. All memory is on the card then,
/// or the call answers why it is not.
pub(crate) fn pass_gate_for_addresses(call: impl FnOnce() -> CUresult) -> CUresult {
    let mark = FrameMark::new();
    let pass = match gate::enter_for_addresses(&mark, session::start) {
        Ok(pass) => pass,
        Err(error) => return error,
    };
    let result = call();
    gate::leave(pass, &mark, CUresult::NOT_READY);
    result
}

/// Makes a call after which devices that are no GPUs may reach memory: an allocation, or what is mapped in a range. It stays on the
/// card then. An allocation that can get a handle (CUDA IPC) is made ready for that before.
pub(crate) fn pass_gate_and_pin(
    allocated: Option<&Allocation>,
    (at, bytes): (CUdeviceptr, u64),
    why: &str,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let due = allocated.filter(|allocation| sharing::is_exchange_due(allocation));
    let _one = due.map(|_| sharing::one_at_a_time());
    pass_gate_for_addresses(|| {
        due.into_iter().for_each(sharing::exchange_before_reach);
        let result = call();
        if result == CUresult::SUCCESS {
            match allocated {
                Some(allocation) => physical::pin_allocated(allocation, why),
                None => physical::pin_range(at, bytes, why),
            }
        }
        result
    })
}

/// Writes the result of an allocation to the caller's place.
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

/// The device of memory with these properties. `None`: it is not on a device.
///
/// # Safety
/// Null, or what the driver's contract says.
pub(crate) unsafe fn device_of_properties(properties: *const c_void) -> Option<&'static Device> {
    // SAFETY: promised by the caller.
    let properties = unsafe { properties.cast::<MemoryProperties>().as_ref() }?;
    let device = device_of(properties.location.device()?)?;
    used_devices::add(device.ordinal);
    Some(device)
}
