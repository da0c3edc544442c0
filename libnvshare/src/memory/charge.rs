//! Memory that stays the driver's own: counted, and immovable.
//!
//! Physical memory of the VMM calls, arrays, what graphs allocate, and stream-ordered allocations where the driver has no
//! managed pools ([`pools`](crate::hooks::pools)). None of it can be handed out as managed memory without becoming something else than the
//! program asked for, so the limits hold for it, the scheduler keeps room for it, and it stays on the card.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::driver::types::{CU_MEM_LOCATION_TYPE_DEVICE, CUdevice, CUmemLocation, CUresult};
use crate::hooks::{callbacks, memory};
use crate::memory::allocations::Kind;
use crate::memory::devices::{self, Device};
use crate::session;

/// What was charged for something that is no allocation by address; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    device: CUdevice,
    bytes: u64,
    /// Of these, on the card: all, unless one program may have more than fits.
    charged: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        if let Some(device) = devices::get(self.device) {
            device.release(self.bytes, self.charged, Kind::Plain);
            session::freed(device);
        }
    }
}

/// Makes something of `bytes` bytes on a device, under the limits.
pub(crate) fn charged<T>(
    device: &'static Device,
    bytes: u64,
    make: impl Fn() -> Result<T, CUresult>,
) -> Result<(T, Charge), CUresult> {
    memory::admitted(device, bytes, Kind::Plain, make, |made, charged| {
        (made, Charge { device: device.ordinal, bytes, charged })
    })
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The beginning of `CUmemPoolProps`, and of `CUmemAllocationProp`.
#[repr(C)]
pub(crate) struct Properties {
    pub(crate) kind: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location: CUmemLocation,
}

impl Properties {
    /// The device that memory with these properties is on; `None`: it is on none.
    ///
    /// # Safety
    /// Null, or what the driver's contract says.
    pub(crate) unsafe fn device(properties: *const c_void) -> Option<&'static Device> {
        // SAFETY: promised by the caller.
        let properties = unsafe { properties.cast::<Self>().as_ref() }?;
        // What the driver's own thread asks for, the driver answers.
        if properties.location.kind != CU_MEM_LOCATION_TYPE_DEVICE || callbacks::running() {
            return None;
        }
        session::start();
        let device = devices::get(properties.location.id)?;
        session::uses(device);
        Some(device)
    }
}
