//! Memory that the driver has at hand for physical memory, where the card is full.
//!
//! What managed memory of any program has given up stays with the driver, and does not count as free. The driver takes it back when physical
//! memory is asked for, at a price for each call: 38 ms for 32 MiB, 60 ms for 2 GiB (measured, `tests/gpu/probes/full_probe.py`).
//! So where several chunks lack memory, one call asks for all of it, and gives it back: the chunks find it free.

use nvshare_proto::units::MIB;

use crate::driver;
use crate::driver::types::{CUdevice, CUmemAllocationProp};
use crate::process::{lifecycle, log};

/// Bytes of a device that the driver was seen to have, less those that were taken since.
#[derive(Debug, Default)]
pub(crate) struct AtHand(u64);

impl AtHand {
    /// Prepares for a chunk of `bytes`, the first of chunks that take `coming` bytes in all. The device's context is current. A failure costs
    /// time later: each chunk asks for itself.
    pub(crate) fn prepare(&mut self, bytes: u64, coming: u64, device: CUdevice) {
        if self.0 < bytes && coming > bytes {
            self.0 = driver::free_memory().unwrap_or(coming);
            if self.0 < bytes && ask_for(coming, device) {
                self.0 = coming;
            }
        }
        self.0 = self.0.saturating_sub(bytes);
    }
}

/// Has the driver make so many bytes free. Returns whether it could.
fn ask_for(bytes: u64, device: CUdevice) -> bool {
    let Some(_running) = lifecycle::hold_off_exit() else { return false };
    let Ok(physical) = driver::create_physical(&CUmemAllocationProp::on(device), bytes) else { return false };
    log::debug(format_args!("the driver has {} MiB free that it had kept", bytes / MIB));
    driver::release_physical(physical).is_ok()
}
