//! Moves a device's memory to the host and back to the card.
//!
//! Each piece is moved by one prefetch call, in a context that lives. A program that frees an allocation, or ends a context,
//! waits for at most the piece that is under way. Memory that the library maps is moved by its [backing](swap).

mod waiting;

use std::sync::Arc;
use std::time::{Duration, Instant};

use nvshare_client::residency::{Piece, RESTORE_PIECE};
use nvshare_proto::units::{MIB, gib_per_second};

use crate::driver::types::{CU_DEVICE_CPU, CUdevice, CUdeviceptr, CUresult};
use crate::driver::{self, Relaxed};
use crate::memory::allocations::{self, Allocation, SMALLEST_MANAGED};
use crate::memory::backing::swap;
use crate::memory::devices::Device;
use crate::memory::{driver_reserve, pools};
use crate::process::{config, counters, host_memory, lifecycle, log};
use crate::work::contexts::{self, Context};

/// An eviction is reported each time that this many bytes are on the host.
const REPORT: u64 = 256 * MIB;
/// Smaller allocations of the program's own managed memory are not evicted, as they share pages with others.
const SMALLEST_EVICTED: u64 = SMALLEST_MANAGED;

/// Why a move stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// The program exits, or the memory's context ends. The memory ends with it.
    Gone,
    /// The move was given up.
    Cancelled,
    Failed(CUresult),
}

/// A context in which an allocation can be moved: its own, or another of the device if the memory has outlived its own.
fn place_to_move(allocation: &Allocation) -> Option<Arc<Context>> {
    if allocation.context.life().is_alive() {
        return Some(Arc::clone(&allocation.context));
    }
    let mut others = contexts::of_device(allocation.device);
    others.find(|other| allocation.kind.is_pools() && other.life().is_alive())
}

/// Moves a range of an allocation by one call.
fn prefetch(context: &Context, address: CUdeviceptr, bytes: u64, to: CUdevice) -> Result<(), Stop> {
    let moved = context.with(|| context.move_in_order(|stream| driver::prefetch(address, bytes, to, stream)));
    moved.map_err(|_| Stop::Gone)?.map_err(Stop::Failed)
}

/// The result of the restore of a device.
#[derive(Debug, Default)]
pub(super) struct Restored {
    /// Bytes to ask for: see [`Account::to_ask_for`](nvshare_client::Account::to_ask_for).
    pub(super) lacking: u64,
    /// Whether anything was restored.
    pub(super) moved: bool,
}

/// Restores a device's allocations, largest first, as far as there is room. Stops soon when it is `cancelled`.
pub(super) fn restore(device: &'static Device, cancelled: &dyn Fn() -> bool) -> Restored {
    let begin = Instant::now();
    let mut result = Restored::default();
    let (mut restored, mut lacks) = (0, 0);
    let swapped = swap::restore(device, cancelled);
    result.moved |= swapped.back > 0;
    restored += swapped.copied;
    for allocation in allocations::of_device(device.ordinal) {
        if cancelled() {
            break;
        }
        let back = bring_back(&allocation, device, cancelled);
        result.moved |= back.bytes > 0;
        lacks += back.lacks;
        restored += back.restored;
    }
    if restored > 0 {
        let took = begin.elapsed();
        counters::restored(restored, took.as_nanos() as u64);
        log_moved("restored", restored, took);
    }
    let account = device.account();
    result.lacking = account.to_ask_for_after_restore(lacks, swapped.lacks);
    if account.unmapped() == 0 || result.moved {
        waiting::is_over();
    } else if !cancelled() {
        waiting::for_memory(account.unmapped());
    }
    result
}

/// The result of the restore of an allocation.
#[derive(Debug, Default)]
struct Back {
    bytes: u64,
    /// Of these, bytes with contents, which were moved.
    restored: u64,
    /// Bytes that had no room.
    lacks: u64,
}

fn bring_back(allocation: &Allocation, device: &Device, cancelled: &dyn Fn() -> bool) -> Back {
    // An allocation that is being freed waits in the driver for work of the program. The next restore looks at it again.
    let Some(mut residency) = allocation.try_residency() else { return Back::default() };
    let absent = residency.absent_bytes();
    if residency.is_freed() || absent == 0 || allocation.mapped.is_some() {
        return Back::default();
    }
    let charged = device.update(|account| account.charge(absent));
    let mut back = Back { bytes: charged, restored: 0, lacks: absent - charged };
    if charged == 0 {
        return back;
    }
    if allocation.is_movable() && config::get().is_ok_and(|config| config.restore) {
        let std::ops::Range { start: mut at, end: until } = residency.next_in(charged);
        while at < until {
            let piece = RESTORE_PIECE.min(until - at);
            let stopped = match place_to_move(allocation) {
                _ if cancelled() => Err(Stop::Cancelled),
                _ if allocation.is_leaving() => Err(Stop::Gone),
                None => Err(Stop::Gone),
                Some(context) => prefetch(&context, allocation.base + at, piece, device.ordinal),
            };
            match stopped {
                Ok(()) => at += piece,
                Err(Stop::Cancelled) => {
                    // The rest is still absent.
                    device.update(|account| account.uncharge(until - at));
                    back.bytes -= until - at;
                    break;
                }
                Err(Stop::Gone) => {
                    at = until;
                }
                // Page faults will bring the pages. This is slower, and correct.
                Err(Stop::Failed(error)) => {
                    log::warn(format_args!(
                        "restore of {} bytes at {:#x}: {error:?}",
                        until - at,
                        allocation.base + at
                    ));
                    at = until;
                }
            }
        }
        back.restored = if residency.has_contents() { back.bytes } else { 0 };
    }
    residency.restored(back.bytes);
    back
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
    let mut host = host_memory::room();
    let mut moved = 0;
    let mut unreported = 0;
    moved += swap::evict(device, bytes, &mut |piece| {
        unreported += piece;
        if unreported >= REPORT {
            report();
            unreported = 0;
        }
    });
    for allocation in allocations::of_device(device.ordinal) {
        while moved < bytes {
            let piece = match evict_piece(&allocation, bytes - moved, &mut host, device) {
                Ok(piece) => piece,
                Err(Stop::Failed(error)) => {
                    log::warn(format_args!("eviction at {:#x}: {error:?}", allocation.base));
                    0
                }
                Err(_) => 0,
            };
            if piece == 0 {
                break;
            }
            moved += piece;
            unreported += piece;
            if unreported >= REPORT {
                report();
                unreported = 0;
            }
        }
    }
    if unreported > 0 {
        report();
    }
    let took = begin.elapsed();
    counters::evicted(moved, took.as_nanos() as u64);
    log_moved("evicted", moved, took);
    bytes.saturating_sub(moved)
}

/// Evicts the last resident piece of an allocation. Returns its bytes; 0 if there is none, or the host cannot take it.
fn evict_piece(allocation: &Allocation, wanted: u64, host: &mut u64, device: &Device) -> Result<u64, Stop> {
    let mut residency = allocation.residency();
    if !allocation.is_movable() || allocation.mapped.is_some() || allocation.size < SMALLEST_EVICTED {
        return Ok(0);
    }
    let Some(piece) = residency.next_out(wanted, *host) else { return Ok(0) };
    let Piece { from, fresh, .. } = piece;
    // Pages that page faults have brought beyond that leave with it.
    let until = if device.account().may_spill(allocation.kind) { allocation.size } else { piece.until };
    let context = place_to_move(allocation).ok_or(Stop::Gone)?;
    prefetch(&context, allocation.base + from, until - from, CU_DEVICE_CPU)?;
    residency.evicted(piece);
    if allocation.kind.is_pools() {
        pools::moved();
    }
    *host -= fresh;
    device.update(|account| account.discharge(piece.bytes()));
    Ok(piece.bytes())
}

/// Gives new managed memory its pages on the card at once. First touches by a kernel would take ten times as long. Called
/// within the program's own call in the context.
pub(crate) fn populate(base: CUdeviceptr, bytes: u64, device: &Device, context: &Context) {
    if lifecycle::is_exiting() {
        return;
    }
    let _relaxed = Relaxed::begin();
    let populated = context.move_in_order(|stream| driver::prefetch(base, bytes, device.ordinal, stream));
    if let Err(error) = populated {
        log::debug(format_args!("populate {bytes} bytes: {error:?}; they come by faults"));
    }
}

fn log_moved(what: &str, bytes: u64, took: Duration) {
    log::info(format_args!(
        "{what} {} MiB in {:.3} s ({:.1} GiB/s)",
        bytes / MIB,
        took.as_secs_f64(),
        gib_per_second(bytes, took)
    ));
}
