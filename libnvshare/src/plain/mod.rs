//! Memory that stays the driver's own: counted, and immovable.
//!
//! Physical memory of the VMM calls, arrays, what graphs allocate, and stream-ordered allocations where the driver has no
//! managed pools ([`pools`]). None of it can be handed out as managed memory without becoming something else than the
//! program asked for, so the limits hold for it, the scheduler keeps room for it, and it stays on the card.

pub(crate) mod arrays;
pub(crate) mod graphs;
pub(crate) mod kept;
pub(crate) mod later;
pub(crate) mod ordered;
pub(crate) mod physical;
pub(crate) mod pools;

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::cuda::{CU_MEM_LOCATION_TYPE_DEVICE, CUdevice, CUmemLocation, CUresult};
use crate::devices::{self, Device};
use crate::ledger::Kind;
use crate::{callbacks, memory, session};

/// What was charged for something that is no allocation by address; given back when it is dropped.
#[derive(Debug)]
struct Charge {
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
fn charged<T>(
    device: &'static Device,
    bytes: u64,
    make: impl Fn() -> Result<T, CUresult>,
) -> Result<(T, Charge), CUresult> {
    memory::admitted(device, bytes, Kind::Plain, make, |made, charged| {
        (made, Charge { device: device.ordinal, bytes, charged })
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The beginning of `CUmemPoolProps`, and of `CUmemAllocationProp`.
#[repr(C)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: CUmemLocation,
}

impl Properties {
    /// The device that memory with these properties is on; `None`: it is on none.
    ///
    /// # Safety
    /// Null, or what the driver's contract says.
    unsafe fn device(properties: *const c_void) -> Option<&'static Device> {
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
