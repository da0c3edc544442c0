//! Moves a device's memory to the host and back to the card, by the [backings](backing) that it has.

mod waiting;

use std::time::{Duration, Instant};

use nvshare_proto::PIECE;
use nvshare_proto::units::{MIB, gib_per_second};

use crate::memory::backing::{self, Lacking};
use crate::memory::devices::Device;
use crate::memory::driver_reserve;
use crate::process::{counters, lifecycle, log};

/// The result of the restore of a device.
#[derive(Debug, Default)]
pub(super) struct Restored {
    /// Bytes to ask for: see [`Account::to_ask_for`](nvshare_client::Account::to_ask_for).
    pub(super) lacking: u64,
    /// Whether anything was restored.
    pub(super) moved: bool,
}

/// Restores a device's allocations, largest first, as far as there is room. Stops soon when it is `cancelled`.
pub(super) fn restore(device: &'static Device, lacking: Lacking, cancelled: &dyn Fn() -> bool) -> Restored {
    let begin = Instant::now();
    let mut result = Restored::default();
    let mut all = backing::Restored::default();
    for backing in backing::ALL {
        all += backing.restore(device, lacking, cancelled);
    }
    result.moved = all.back > 0;
    if all.copied > 0 {
        let took = begin.elapsed();
        counters::restored(all.copied, took.as_nanos() as u64);
        log_moved("restored", all.copied, took);
    }
    if lacking == Lacking::Wait {
        // More room is on its way, and the lock comes with the last of it.
        return result;
    }
    let account = device.account();
    result.lacking = account.to_ask_for_after_restore(all.lacks, all.lacks_mapped);
    if account.unmapped() == 0 || result.moved {
        waiting::is_over();
    } else if !cancelled() {
        waiting::for_memory(account.unmapped());
    }
    result
}

/// Evicts memory of a device, from the ends of the largest allocations, and calls `report` whenever more is on the host.
/// Returns the bytes that could not be evicted.
pub(super) fn evict(device: &'static Device, bytes: u64, report: &dyn Fn()) -> u64 {
    let begin = Instant::now();
    // The unused part of the driver's reserve goes first, as this costs nothing.
    let mut given = 0;
    if lifecycle::hold_off_exit().is_some_and(|_call| driver_reserve::give_up(device)) {
        given = device.update(|account| account.evict_unused(bytes));
        report();
    }
    let bytes = bytes - given;
    let (mut moved, mut unreported) = (0, 0);
    let mut gone = |piece: u64| {
        unreported += piece;
        if unreported >= PIECE {
            report();
            unreported = 0;
        }
    };
    for backing in backing::ALL {
        moved += backing.evict(device, bytes.saturating_sub(moved), &mut gone);
    }
    if unreported > 0 {
        report();
    }
    let took = begin.elapsed();
    counters::evicted(moved, took.as_nanos() as u64);
    log_moved("evicted", moved, took);
    bytes.saturating_sub(moved)
}

fn log_moved(what: &str, bytes: u64, took: Duration) {
    log::info(format_args!(
        "{what} {} MiB in {:.3} s ({:.1} GiB/s)",
        bytes / MIB,
        took.as_secs_f64(),
        gib_per_second(bytes, took)
    ));
}
