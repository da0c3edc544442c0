//! Memory that stays the driver's own: counted, and immovable.
//!
//! Physical memory of the VMM calls, arrays, what graphs allocate, and stream-ordered allocations where the driver has no
//! managed pools ([`pools`](super::pools)). None of it can be handed out as managed memory without becoming something else than the
//! program asked for, so the limits hold for it, the scheduler keeps room for it, and it stays on the card.

use super::allocations::Kind;
use super::devices::{self, Device};
use super::{admission, free};
use crate::driver::types::{CUdevice, CUresult};

/// What was charged for something that is no allocation by address; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    device: CUdevice,
    bytes: u64,
    /// Of these, on the card: all, unless one program may have more than fits.
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

/// Makes something of `bytes` bytes on a device, under the limits.
pub(crate) fn charged<T>(
    device: &'static Device,
    bytes: u64,
    make: impl Fn() -> Result<T, CUresult>,
) -> Result<(T, Charge), CUresult> {
    admission::admitted(
        device,
        bytes,
        Kind::Plain,
        |_| make(),
        |made, charged| (made, Charge { device: device.ordinal, bytes, charged }),
    )
}
