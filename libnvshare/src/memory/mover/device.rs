//! Moves a device's memory to the host and back to the card, by the [backings](backing) that it has.

mod waiting;

use std::time::{Duration, Instant};

use nvshare_proto::ROOM_PIECE;
use nvshare_proto::units::{MIB, gib_per_second};

use crate::memory::backing::{self, WithoutRoom};
use crate::memory::devices::Device;
use crate::memory::{deferred_free, driver_reserve, free, pool_frees};
use crate::process::{bell, counters, lifecycle, log};

/// The result of the restore of a device.
#[derive(Debug, Default)]
pub(super) struct AfterRestore {
    /// Bytes to ask for: see [`Account::to_ask_for`](nvshare_client::Account::to_ask_for).
    pub(super) to_ask_for: u64,
    /// Whether anything was restored.
    pub(super) moved: bool,
    /// It went ahead of the lock, and not all of the room came.
    pub(super) is_partial: bool,
}

/// Restores a device's allocations, largest first, as far as there is room. Stops soon when it is `cancelled`.
pub(super) fn restore(
    device: &'static Device,
    without_room: WithoutRoom,
    cancelled: &dyn Fn() -> bool,
) -> AfterRestore {
    let begin = Instant::now();
    // The gate would stay closed for memory that the program has freed, if it was on its way out at that time.
    free::finish_late_frees();
    if let Some(_call) = lifecycle::hold_off_exit() {
        free::end_spare_slabs(device);
    }
    let mut result = AfterRestore::default();
    let all = backing::restore(device, without_room, cancelled);
    result.moved = all.back > 0;
    if all.had_contents > 0 {
        let took = begin.elapsed();
        counters::restored(all.had_contents, all.copied, took.as_nanos() as u64);
        log_moved("restored", all.had_contents, all.copied, took);
    }
    if without_room == WithoutRoom::Wait {
        // More room is on its way, and the lock comes with the last of it.
        result.is_partial = all.lacks_mapped > 0 || all.is_full;
        return result;
    }
    let account = device.account();
    result.to_ask_for = account.to_ask_for_after_restore(all.lacks, all.lacks_mapped);
    if result.to_ask_for > 0 && account.has_outgrown_card() {
        waiting::say_outgrown(&account);
    }
    if account.unmapped() == 0 || result.moved {
        waiting::forget_wait(device.ordinal);
    } else if !cancelled()
        && waiting::pause_and_ask_if_late(device.ordinal, account.unmapped())
        && all.is_full
    {
        // The driver has nothing more, however much room there is on paper.
        device.lose_room(device.account().unused_room(), bell::ring);
        result.to_ask_for = device.account().to_ask_for_after_restore(all.lacks, account.unmapped());
    }
    result
}

/// Evicts memory of a device, from the ends of the largest allocations, and calls `report` whenever more is on the host.
/// Returns the bytes that could not be evicted.
pub(super) fn evict(device: &'static Device, bytes: u64, report: &dyn Fn()) -> u64 {
    let begin = Instant::now();
    // Freed memory, spare slabs and the unused part of the driver's reserve go first, as this costs nothing. An idle process has not
    // drained, and frees in the order of streams may be due.
    deferred_free::free_all_due();
    free::finish_late_frees();
    pool_frees::see();
    let unused = || free::end_spare_slabs(device) | driver_reserve::release_unused(device);
    let is_smaller = lifecycle::hold_off_exit().is_some_and(|_call| unused());
    // Room that came for a waiting allocation stays with it: `unused` leaves it out.
    let given = device.update(|account| account.evict_unused(bytes.min(account.unused())));
    if is_smaller || given > 0 {
        report();
    }
    let bytes = bytes - given;
    let mut unreported = 0;
    let mut gone = |piece: u64| {
        unreported += piece;
        if unreported >= ROOM_PIECE {
            report();
            unreported = 0;
        }
    };
    let moved = backing::evict(device, bytes, &mut gone);
    let lost = device.update(|account| account.evict_lost(bytes.saturating_sub(moved.left)));
    if unreported > 0 || lost > 0 {
        report();
    }
    let took = begin.elapsed();
    counters::evicted(moved.left, moved.copied, took.as_nanos() as u64);
    log_moved("evicted", moved.left, moved.copied, took);
    bytes.saturating_sub(moved.left + lost)
}

/// The rate counts the copied bytes alone.
fn log_moved(what: &str, bytes: u64, copied: u64, took: Duration) {
    let (mib, seconds, rate) = (bytes / MIB, took.as_secs_f64(), gib_per_second(copied, took));
    if copied == bytes {
        log::info(format_args!("{what} {mib} MiB in {seconds:.3} s ({rate:.1} GiB/s)"));
    } else {
        let copied = copied / MIB;
        log::info(format_args!("{what} {mib} MiB in {seconds:.3} s ({copied} MiB copied, {rate:.1} GiB/s)"));
    }
}
