//! A program whose memory cannot come back yet.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nvshare_proto::units::MIB;

use crate::process::{log, threads};

/// Time between two attempts.
const AGAIN: Duration = Duration::from_millis(5);
/// A shorter wait is not reported: the driver is still releasing another process's memory.
const SOON: Duration = Duration::from_secs(1);

/// Since when the program waits, and whether that was reported.
static SINCE: Mutex<Option<(Instant, bool)>> = Mutex::new(None);

/// Waits a moment for memory on the card. A long wait is reported once.
pub(super) fn for_memory(bytes: u64) {
    let mut since = SINCE.lock().unwrap_or_else(PoisonError::into_inner);
    let (begin, said) = since.get_or_insert_with(|| (Instant::now(), false));
    if !*said && begin.elapsed() >= SOON {
        *said = true;
        log::warn(format_args!(
            "{} MiB of the program's memory wait for room on the card, and its work waits for them",
            bytes / MIB
        ));
    }
    drop(since);
    threads::sleep(AGAIN);
}

/// Memory came back, or none is missing.
pub(super) fn is_over() {
    *SINCE.lock().unwrap_or_else(PoisonError::into_inner) = None;
}
