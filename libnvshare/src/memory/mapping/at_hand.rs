//! Memory that the driver has at hand for physical memory, where the card is full.
//!
//! Memory that managed memory of any program has given up stays with the driver, and does not count as free. The driver takes
//! it back for physical memory, at a price for each call. That is 38 ms for 32 MiB, 60 ms for 2 GiB (measured,
//! `tests/gpu/probes/full_probe.py`). So where several chunks lack memory, one call asks for all of it, and gives it back: the
//! chunks find it free. Room that is still being made is taken in large parts there.

use std::time::{Duration, Instant};

use nvshare_proto::units::{GIB, MIB};

use super::GRANULE;
use crate::driver;
use crate::driver::types::{CUdevice, CUmemAllocationProp, CUresult};
use crate::process::{lifecycle, log};

/// Where each call has its price, memory comes in parts of this size while room is still being made.
const PART: u64 = GIB;
/// One part in this many is asked for in addition. Without it, the last 3 % of all that came at once were not there for the
/// chunks. Each of those had its price (measured: four to six of 208 chunks; with it, one).
const LOST_OF: u64 = 32;
/// No more than this is asked for in addition, in bytes: others may want it.
const MAX_MORE: u64 = 256 * MIB;
/// How long a part is waited for: then what has room comes. Managed memory leaves at 16 GiB/s.
const PATIENCE: Duration = Duration::from_millis(100);

/// The memory that the driver has at hand for the chunks of one device that come.
#[derive(Debug, Default)]
pub(crate) struct AtHand {
    /// Bytes that the driver was seen to have, less those that were taken since.
    bytes: u64,
    /// Whether the driver had too little for a part when that was first asked.
    is_full: Option<bool>,
    /// Since when a part is waited for.
    waits_since: Option<Instant>,
}

impl AtHand {
    /// Whether chunks that could come are to wait for more room, since a large part costs as much as one of them. `room` is what they have, and
    /// `lacking` all that is to come. The device's context is current.
    pub(crate) fn waits_for_more(&mut self, room: u64, lacking: u64, now: Instant) -> bool {
        let part = lacking.min(PART);
        if room == 0 || room >= part || self.bytes > 0 {
            self.waits_since = None;
            return false;
        }
        let has_too_little = || driver::free_memory().is_ok_and(|free| free < part);
        if !*self.is_full.get_or_insert_with(has_too_little) {
            return false;
        }
        if now.saturating_duration_since(*self.waits_since.get_or_insert(now)) < PATIENCE {
            return true;
        }
        self.waits_since = None;
        false
    }

    /// Prepares for a chunk of `bytes`, the first of chunks that take `coming` bytes in all. The device's context is current. A failure costs
    /// time later: each chunk asks for itself.
    pub(crate) fn prepare(&mut self, bytes: u64, coming: u64, device: CUdevice) {
        // The driver refuses other sizes, and room has any.
        let coming = coming / GRANULE * GRANULE;
        if self.bytes < bytes && coming > bytes {
            self.bytes = driver::free_memory().unwrap_or(coming);
            // Of less, even what it calls free may have its price: chunk after chunk took 38 ms (measured).
            if self.bytes < coming {
                let more = (coming / LOST_OF).next_multiple_of(GRANULE).min(MAX_MORE);
                self.bytes = ask_for(bytes, coming + more, coming, device);
            }
        }
        self.bytes = self.bytes.saturating_sub(bytes + bytes / LOST_OF);
    }
}

/// Has the driver free as many of the `wanted` bytes as it can, or else of those that are `coming`. One chunk is not worth a
/// call. Returns how many.
fn ask_for(chunk: u64, wanted: u64, coming: u64, device: CUdevice) -> u64 {
    let mut bytes = wanted;
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
            Err(CUresult::OUT_OF_MEMORY) if bytes > coming => bytes = coming,
            Err(CUresult::OUT_OF_MEMORY) => bytes = (bytes / 2).next_multiple_of(chunk),
            Err(_) => return 0,
        }
    }
    log::debug(format_args!("of {} MiB no two chunks are free at once", coming / MIB));
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_of_a_full_card_is_taken_in_large_parts() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let mut at_hand = AtHand { is_full: Some(true), ..AtHand::default() };
        for (ms, room, lacking, waits) in [
            (0, 0, 8 * GIB, false),
            (10, 64 * MIB, 8 * GIB, true),
            (60, 512 * MIB, 8 * GIB, true),
            (80, GIB, 8 * GIB, false),
            // The last part is as large as what is left.
            (90, 64 * MIB, 256 * MIB, true),
            (95, 256 * MIB, 256 * MIB, false),
            // Room that comes slowly is not waited for without end.
            (200, 64 * MIB, 4 * GIB, true),
            (299, 96 * MIB, 4 * GIB, true),
            (300, 96 * MIB, 4 * GIB, false),
            (310, 64 * MIB, 4 * GIB, true),
        ] {
            assert_eq!(at_hand.waits_for_more(room, lacking, at(ms)), waits, "{ms} ms");
        }
        at_hand.bytes = MIB;
        assert!(!at_hand.waits_for_more(64 * MIB, 4 * GIB, at(320)), "the driver has it at hand");
        let mut free = AtHand { is_full: Some(false), ..AtHand::default() };
        assert!(!free.waits_for_more(64 * MIB, 4 * GIB, begin));
    }
}
