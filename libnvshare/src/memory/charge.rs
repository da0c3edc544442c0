//! Charges for plain memory that is not an allocation by address: physical memory, and arrays.
//!
//! The library cannot replace such memory by managed memory without changing what the program asked for. So the limits hold
//! for it, the scheduler keeps room for it, and it stays on the card.

use super::allocations::Kind;
use super::devices::{self, Device};
use super::{admission, free};
use crate::driver::types::{CUdevice, CUresult};

/// A charge. It is given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    device: CUdevice,
    bytes: u64,
    /// Of these, bytes that took room: all of them, unless the program may exceed the card.
    charged: u64,
}

#[cfg(test)]
impl Charge {
    /// A charge of no device.
    pub(crate) fn of_nothing() -> Self {
        Self { device: -1, bytes: 0, charged: 0 }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if let Some(device) = devices::get(self.device) {
            device.release(self.bytes, self.charged, Kind::Plain);
            free::offer_room(device);
        }
    }
}

/// Makes something that takes `bytes` on a device, under the limits.
pub(crate) fn charged<T>(
    device: &'static Device,
    bytes: u64,
    make: impl Fn() -> Result<T, CUresult>,
) -> Result<(T, Charge), CUresult> {
    admission::admitted(
        device,
        bytes,
        Kind::Plain,
        || 0,
        |_| make(),
        |made, charged| (made, Charge { device: device.ordinal, bytes, charged }),
    )
}
