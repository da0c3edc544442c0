//! Memory of the driver's. Managed memory is moved to the host and back by prefetches; plain memory stays on the card.
//!
//! Each piece is moved by one prefetch call, in a context that lives. A program that frees an allocation, or ends a context,
//! waits for at most the piece that is under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nvshare_client::residency::{Piece, RESTORE_PIECE};
use nvshare_proto::{HandOverPhase, ThrottledLine};

use super::{AllocationRequest, Backing, Evicted, Freed, Made, Moving, Restored, WithoutRoom, Work};
use crate::driver;
use crate::driver::types::{CU_DEVICE_CPU, CU_MEM_ATTACH_GLOBAL, CUdevice, CUdeviceptr, CUresult};
use crate::memory::allocations::{self, Allocation, Kind, SMALLEST_MANAGED};
use crate::memory::devices::Device;
use crate::process::phases::Laps;
use crate::process::{config, host_memory, log};
use crate::work::contexts::{self, Context};

/// Smaller allocations of the program's own managed memory are not evicted, as they share pages with others.
const SMALLEST_EVICTED: u64 = SMALLEST_MANAGED;

/// Whether memory of a pool has been moved to the host. The pool may hand it out again while it is there.
static POOLED_MOVED: AtomicBool = AtomicBool::new(false);

/// Memory of the driver's, as a [`Backing`].
#[derive(Debug)]
pub(super) struct Managed;

impl Backing for Managed {
    fn allocate(
        &self,
        request: &AllocationRequest,
        _charged: u64,
        call: &dyn Fn() -> Result<CUdeviceptr, CUresult>,
    ) -> Result<Made, CUresult> {
        let base = if request.kind == Kind::DeviceAsManaged {
            driver::allocate_managed(request.bytes, CU_MEM_ATTACH_GLOBAL)?
        } else {
            call()?
        };
        if request.kind == Kind::ManagedPool {
            bring(base, request);
        }
        Ok(Made { base, mapped: None })
    }

    /// Gives new managed memory its pages on the card at once. First touches by a kernel would take ten times as long.
    /// Called within the program's own call in the context.
    fn populate(&self, allocation: &Allocation, charged: u64) {
        let Allocation { base, kind: Kind::DeviceAsManaged, device, ref context, .. } = *allocation else {
            return;
        };
        if charged > 0
            && let Err(Stop::Failed(error)) = prefetch(context, base, charged, device)
        {
            log::debug(format_args!("populate {charged} bytes: {error:?}; they come by faults"));
        }
    }

    /// The driver's free waits for the work that uses the memory.
    fn free(&self, allocation: &Arc<Allocation>, _work: Work, call: &dyn Fn() -> CUresult) -> Freed {
        // This waits for a piece that is being moved.
        let mut residency = allocation.residency();
        match call() {
            CUresult::SUCCESS => {
                residency.free();
                Freed::Now
            }
            error => Freed::Not(error),
        }
    }
}

impl Moving for Managed {
    fn evict(&self, device: &'static Device, wanted: u64, report: &mut dyn FnMut(u64)) -> Evicted {
        let mut laps = Laps::begin(device.uuid());
        let mut host = host_memory::room();
        let mut moved = 0;
        for allocation in allocations::of_device(device.ordinal) {
            while moved < wanted {
                contexts::let_them_end(|| false);
                let piece = match evict_piece(&allocation, wanted - moved, &mut host, device) {
                    Ok(piece) => piece,
                    Err(Stop::Failed(error)) => {
                        static FAILS: ThrottledLine = ThrottledLine::new(log::warn);
                        FAILS.say(format_args!("eviction at {:#x}: {error:?}", allocation.base));
                        0
                    }
                    Err(_) => 0,
                };
                if piece == 0 {
                    break;
                }
                moved += piece;
                laps.end(HandOverPhase::CopyOut);
                report(piece);
            }
        }
        Evicted { left: moved, copied: moved }
    }

    fn restore(
        &self,
        device: &'static Device,
        _without_room: WithoutRoom,
        cancelled: &dyn Fn() -> bool,
    ) -> Restored {
        let mut laps = Laps::begin(device.uuid());
        let mut all = Restored::default();
        for allocation in allocations::of_device(device.ordinal) {
            if cancelled() {
                break;
            }
            let restored = bring_back(&allocation, device, cancelled);
            if restored.back > 0 {
                laps.end(HandOverPhase::CopyIn);
            }
            all += restored;
        }
        all
    }
}

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
fn context_to_move_in(allocation: &Allocation) -> Option<Arc<Context>> {
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

fn bring_back(allocation: &Allocation, device: &Device, cancelled: &dyn Fn() -> bool) -> Restored {
    // An allocation that is being freed waits in the driver for work of the program. The next restore looks at it again.
    let Some(mut residency) = allocation.try_residency() else { return Restored::default() };
    let absent = residency.absent_bytes();
    if residency.is_freed() || absent == 0 || allocation.kind == Kind::Mapped {
        return Restored::default();
    }
    let charged = device.update(|account| account.charge(absent));
    let mut back = Restored { lacks: absent - charged, back: charged, ..Restored::default() };
    if charged == 0 {
        return back;
    }
    if allocation.is_movable() && config::get().is_ok_and(|config| config.restore) {
        let std::ops::Range { start: mut at, end: until } = residency.next_in(charged);
        while at < until {
            contexts::let_them_end(|| cancelled() || allocation.is_leaving());
            let piece = RESTORE_PIECE.min(until - at);
            let stopped = match context_to_move_in(allocation) {
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
                    back.back -= until - at;
                    break;
                }
                Err(Stop::Gone) => {
                    at = until;
                }
                // Page faults will bring the pages. This is slower, and correct.
                Err(Stop::Failed(error)) => {
                    static FAILS: ThrottledLine = ThrottledLine::new(log::warn);
                    FAILS.say(format_args!(
                        "restore of {} bytes at {:#x}: {error:?}",
                        until - at,
                        allocation.base + at
                    ));
                    at = until;
                }
            }
        }
        back.had_contents = if residency.has_contents() { back.back } else { 0 };
        back.copied = back.had_contents;
    }
    residency.restored(back.back);
    back
}

/// Evicts the last resident piece of an allocation. Returns its bytes; 0 if there is none, or the host cannot take it.
fn evict_piece(allocation: &Allocation, wanted: u64, host: &mut u64, device: &Device) -> Result<u64, Stop> {
    let mut residency = allocation.residency();
    if !allocation.is_movable() || allocation.kind == Kind::Mapped || allocation.size < SMALLEST_EVICTED {
        return Ok(0);
    }
    if residency.resident_bytes() > 0 {
        // Another thread, or another process of the control group, takes of it as well.
        *host = (*host).min(host_memory::room());
    }
    let Some(piece) = residency.next_out(wanted, *host) else { return Ok(0) };
    let Piece { from, fresh, .. } = piece;
    // Pages that page faults have brought beyond that leave with it.
    let until = if device.account().may_spill(allocation.kind) { allocation.size } else { piece.until };
    let context = context_to_move_in(allocation).ok_or(Stop::Gone)?;
    prefetch(&context, allocation.base + from, until - from, CU_DEVICE_CPU)?;
    residency.evicted(piece);
    if allocation.kind.is_pools() {
        POOLED_MOVED.store(true, Ordering::Relaxed);
    }
    *host -= fresh;
    device.update(|account| account.discharge(piece.bytes()));
    Ok(piece.bytes())
}

/// Brings new memory of a pool to the card. It may have been moved to the host when it belonged to another allocation. The move
/// is not on the program's stream. If that is busy, the move would wait in the driver's queue, behind a host function that may
/// wait for later work of the stream.
fn bring(base: CUdeviceptr, request: &AllocationRequest) {
    if !POOLED_MOVED.load(Ordering::Relaxed) {
        return;
    }
    if let Err(Stop::Failed(error)) = prefetch(&request.context, base, request.bytes, request.device.ordinal)
    {
        log::debug(format_args!("bring {} bytes of a pool: {error:?}; they come by faults", request.bytes));
    }
}
