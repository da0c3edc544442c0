//! Memory that the driver has at hand for physical memory, where the card is full.
//!
//! What managed memory of any program has given up stays with the driver, and does not count as free. The driver takes it back when physical
//! memory is asked for, at a price for each call: 38 ms for 32 MiB, 60 ms for 2 GiB (measured, `tests/gpu/probes/full_probe.py`).
//! So where several chunks lack memory, one call asks for all of it, and gives it back: the chunks find it free.

use nvshare_proto::units::MIB;

use crate::driver;
use crate::driver::types::{CUdevice, CUmemAllocationProp, CUresult};
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
            if self.0 < bytes {
                self.0 = ask_for(bytes, coming, device);
            }
        }
        self.0 = self.0.saturating_sub(bytes);
    }
}

/// Has the driver make as many of the bytes that come free as it can, if that is more than one chunk. Returns how many.
fn ask_for(chunk: u64, coming: u64, device: CUdevice) -> u64 {
    let mut bytes = coming;
    while bytes > chunk {
        let Some(_running) = lifecycle::hold_off_exit() else { return 0 };
        match driver::create_physical(&CUmemAllocationProp::on(device), bytes) {
            Ok(physical) => {
                let released = driver::release_physical(physical);
                log::debug(format_args!(
                    "{} of {} MiB are free again: {released:?}",
                    bytes / MIB,
                    coming / MIB
                ));
                return if released.is_ok() { bytes } else { 0 };
            }
            // It has less than the account says, and may have a part.
            Err(CUresult::OUT_OF_MEMORY) => bytes = (bytes / 2).next_multiple_of(chunk),
            Err(_) => return 0,
        }
    }
    log::debug(format_args!("of {} MiB no two chunks are free at once", coming / MIB));
    0
}
