//! A program whose memory cannot come back yet.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nvshare_proto::ThrottledLine;
use nvshare_proto::units::MIB;

use crate::driver::types::CUdevice;
use crate::memory::devices::Account;
use crate::memory::mapping::DRIVER_IS_LATE;
use crate::process::lock::lock;
use crate::process::{log, threads};

/// Time between two attempts.
const AGAIN: Duration = Duration::from_millis(5);
/// A shorter wait is not reported: the driver is still releasing another process's memory.
const SOON: Duration = Duration::from_secs(1);

/// A wait.
#[derive(Debug)]
struct Wait {
    since: Instant,
    /// The wait was reported.
    is_reported: bool,
    /// How often the driver was found to be late.
    late: u32,
}

/// The waits of devices, by their ordinals.
static WAITS: Mutex<BTreeMap<CUdevice, Wait>> = Mutex::new(BTreeMap::new());

/// Waits a moment for memory on the card. A long wait is reported once. Returns true once per [`DRIVER_IS_LATE`] of waiting: by
/// then the driver should have the memory that others have given back.
pub(super) fn pause_and_ask_if_late(device: CUdevice, bytes: u64) -> bool {
    let mut waits = lock(&WAITS);
    let first = || Wait { since: Instant::now(), is_reported: false, late: 0 };
    let wait_now = waits.entry(device).or_insert_with(first);
    let waited = wait_now.since.elapsed();
    let is_late = waited >= DRIVER_IS_LATE * (wait_now.late + 1);
    wait_now.late += u32::from(is_late);
    if !wait_now.is_reported && waited >= SOON {
        wait_now.is_reported = true;
        log::warn(format_args!(
            "{} MiB of the program's memory wait for room on the card, and its work waits for them",
            bytes / MIB
        ));
    }
    drop(waits);
    threads::sleep(AGAIN);
    is_late
}

/// Says that a card has become too small for the program: its work waits until the scheduler has more of the card.
pub(super) fn say_outgrown(account: &Account) {
    static OUTGROWN: ThrottledLine = ThrottledLine::new(log::warn);
    let (needs, has) = (account.needed_at_once(), account.capacity().unwrap_or_default());
    OUTGROWN.say(format_args!(
        "the program waits: its memory needs {} MiB of the GPU at once, and other processes leave {} MiB of it",
        needs.div_ceil(MIB),
        has / MIB
    ));
}

/// Memory of a device came back, or none is missing.
pub(super) fn forget_wait(device: CUdevice) {
    lock(&WAITS).remove(&device);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_lacks_nothing_does_not_end_the_wait_of_another() {
        let is_late = (0..1000).any(|_| {
            forget_wait(1);
            pause_and_ask_if_late(0, MIB)
        });
        assert!(is_late, "the wait begins anew each time");
        forget_wait(0);
    }
}
