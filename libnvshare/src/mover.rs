//! The thread that moves memory: drains, evicts, restores.
//!
//! A prefetch call blocks for its whole length, so it has a thread of its own. It works off a queue of jobs in
//! their order, so that what was ordered out is out before anything comes back in.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nvshare_proto::units::{GIB, MIB, gib_per_second};
use nvshare_proto::{GpuUuid, Room};

use crate::cuda::{CU_DEVICE_CPU, CUdevice, CUdeviceptr, CUresult, CUstream};
use crate::devices::{self, Device};
use crate::driver::{self, Relaxed};
use crate::ledger::Allocation;
use crate::memory::SMALLEST_MANAGED;
use crate::plain::{kept, later, pools};
use crate::streams::{self, Fence};
use crate::{config, counters, exit, gate, hostmem, ledger, log};

/// Ties an answer to its order.
pub(crate) type Ticket = u64;

/// What the session orders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Job {
    /// Wait until all submitted work is complete. The gate is closed.
    Drain(Ticket),
    /// Bring back what is absent, as far as there is room.
    Restore,
    /// Move this much to the host. The gate is closed.
    Evict(Room),
    /// See whether all submitted work is complete, without closing the gate.
    Probe,
}

/// What became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Done {
    /// Everything is complete.
    Drained(Ticket),
    /// What could be restored is; these devices lack room for the rest.
    Restored { lacking: Vec<Room> },
    /// More of what was on this GPU is on the host now.
    Evicted(GpuUuid),
    /// The order is done but for what the host cannot take.
    EvictionEnds { gpu: GpuUuid, short: u64 },
    /// All work is complete that was submitted until this many submissions were counted.
    Quiet { submissions: u64 },
    /// It is not.
    Busy,
}

struct Queue {
    jobs: VecDeque<(Job, u64)>,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue { jobs: VecDeque::new() });
static POSTED: Condvar = Condvar::new();
/// Jobs of an earlier generation are given up, evictions excepted.
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// Grows whenever a drain comes nearer to its end.
static PROGRESS: AtomicU64 = AtomicU64::new(0);
/// Held while a job uses contexts.
static STILL: Mutex<()> = Mutex::new(());
/// A job moves memory.
static MOVES: AtomicBool = AtomicBool::new(false);

/// Pieces that one prefetch call moves. Larger ones are faster, and a free of the allocation waits for one.
const PIECE: u64 = GIB;
/// Evicted memory is reported when this much is on the host.
const REPORT: u64 = 256 * MIB;
/// The driver moves managed memory in blocks of this size.
const BLOCK: u64 = 2 * MIB;
/// Smaller allocations of the program's own managed memory share their pages with others and stay.
const SMALLEST_EVICTED: u64 = SMALLEST_MANAGED;

/// Orders a job.
pub(crate) fn post(job: Job) {
    lock(&QUEUE).jobs.push_back((job, GENERATION.load(Ordering::SeqCst)));
    POSTED.notify_one();
}

/// Gives up what was ordered so far and can be given up.
pub(crate) fn cancel() {
    GENERATION.fetch_add(1, Ordering::SeqCst);
}

/// See [`PROGRESS`].
pub(crate) fn progress() -> u64 {
    PROGRESS.load(Ordering::Relaxed)
}

/// While the answer lives, no job uses a context.
pub(crate) fn hold_still() -> MutexGuard<'static, ()> {
    lock(&STILL)
}

/// Whether no memory is being moved at present.
pub(crate) fn is_still() -> bool {
    !MOVES.load(Ordering::SeqCst)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The thread's life. `report` takes what is done to the session.
pub(crate) fn run(report: impl Fn(Done)) {
    loop {
        let (job, generation) = next();
        let cancelled = || GENERATION.load(Ordering::SeqCst) != generation;
        if !matches!(job, Job::Evict(_)) && cancelled() {
            continue;
        }
        let _still = hold_still();
        if matches!(job, Job::Evict(_)) && exit::has_begun() {
            // The program's memory goes with it; there is nothing to say before that.
            continue;
        }
        let _relaxed = Relaxed::begin();
        MOVES.store(matches!(job, Job::Restore | Job::Evict(_)), Ordering::SeqCst);
        match job {
            Job::Drain(ticket) => {
                if drain(cancelled) {
                    report(Done::Drained(ticket));
                }
            }
            Job::Restore => {
                if let Some(lacking) = restore(cancelled) {
                    report(Done::Restored { lacking });
                }
            }
            Job::Evict(Room { gpu, bytes }) => {
                let short = evict(gpu, bytes, &report);
                report(Done::EvictionEnds { gpu, short });
            }
            Job::Probe => report(probe(cancelled)),
        }
        MOVES.store(false, Ordering::SeqCst);
    }
}

fn next() -> (Job, u64) {
    let mut queue = lock(&QUEUE);
    loop {
        if let Some(job) = queue.jobs.pop_front() {
            return job;
        }
        queue = POSTED.wait(queue).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Waits until nobody is inside the gate and all submitted work is complete. False: given up.
fn drain(cancelled: impl Fn() -> bool) -> bool {
    let begin = Instant::now();
    while !gate::nobody_inside() {
        if cancelled() {
            return false;
        }
        gate::pause();
    }
    PROGRESS.fetch_add(1, Ordering::Relaxed);
    let mut fence = streams::fence();
    if !wait_for(&mut fence, &cancelled) {
        return false;
    }
    let took = begin.elapsed();
    counters::drained(took.as_nanos() as u64);
    later::sweep();
    devices::used().for_each(kept::look);
    log::debug(format_args!("drained in {:.1} ms", took.as_secs_f64() * 1e3));
    true
}

fn wait_for(fence: &mut Fence, given_up: &impl Fn() -> bool) -> bool {
    let mut left = usize::MAX;
    loop {
        let now = fence.poll();
        if now < left {
            left = now;
            PROGRESS.fetch_add(1, Ordering::Relaxed);
        }
        if given_up() {
            return false;
        }
        if left == 0 {
            return true;
        }
        gate::pause();
    }
}

/// Whether the process has nothing to do, as far as one can see without closing the gate.
fn probe(cancelled: impl Fn() -> bool) -> Done {
    let submissions = gate::totals().0;
    if !gate::nobody_inside() {
        return Done::Busy;
    }
    let mut fence = streams::fence();
    if wait_for(&mut fence, &|| cancelled() || gate::totals().0 != submissions) {
        Done::Quiet { submissions }
    } else {
        Done::Busy
    }
}

/// Brings allocations back, largest first, as far as there is room. What lacks room is returned; `None`: given up.
fn restore(cancelled: impl Fn() -> bool) -> Option<Vec<Room>> {
    let mut lacking = Vec::new();
    let mut idle = true;
    for device in devices::used() {
        // Without a context nothing is allocated.
        let Ok(stream) = streams::stream_of_ours(device.ordinal) else { continue };
        let begin = Instant::now();
        let mut restored = 0;
        let mut lacks = 0;
        for allocation in ledger::of_device(device.ordinal) {
            if cancelled() {
                break;
            }
            let back = bring_back(&allocation, device, stream);
            idle &= back.bytes == 0;
            restored += back.restored;
            lacks += back.lacks;
        }
        let _ = driver::synchronize_stream(stream);
        if restored > 0 {
            let took = begin.elapsed();
            counters::restored(restored, took.as_nanos() as u64);
            log_moved("restored", restored, took);
        }
        // What can never be on the card at the same time is not waited for.
        let lacks = lacks.saturating_sub(device.never_fits());
        if lacks > 0 {
            lacking.push(Room { gpu: device.uuid, bytes: lacks });
        }
    }
    if idle {
        // What is absent is not on the list yet: its allocation is under way.
        gate::pause();
    }
    (!cancelled()).then_some(lacking)
}

/// What came back of an allocation.
#[derive(Debug, Default)]
struct Back {
    bytes: u64,
    /// It was on the card before, and so has contents; these moved.
    restored: u64,
    /// There was no room for this much.
    lacks: u64,
}

fn bring_back(allocation: &Allocation, device: &Device, stream: CUstream) -> Back {
    let mut place = allocation.place();
    let absent = allocation.size - place.present;
    if place.freed || absent == 0 {
        return Back::default();
    }
    let bytes = device.charge(absent);
    let mut back = Back { bytes, restored: 0, lacks: absent - bytes };
    if bytes == 0 {
        return back;
    }
    if allocation.is_movable() && config::get().is_ok_and(|config| config.restore) {
        match pieces(allocation, place.present, bytes, device.ordinal, stream) {
            Ok(()) => back.restored = if place.lived { bytes } else { 0 },
            Err(CUresult::DEINITIALIZED) => {}
            // The pages come by faults then: slower, and right.
            Err(error) => {
                log::warn(format_args!("restore of {bytes} bytes at {:#x}: {error:?}", allocation.base))
            }
        }
    }
    place.present += bytes;
    place.lived = true;
    back
}

/// Prefetches a range of an allocation.
fn pieces(
    allocation: &Allocation,
    from: u64,
    bytes: u64,
    to: CUdevice,
    stream: CUstream,
) -> Result<(), CUresult> {
    let mut at = from;
    while at < from + bytes {
        if exit::has_begun() {
            return Err(CUresult::DEINITIALIZED);
        }
        let piece = PIECE.min(from + bytes - at);
        driver::prefetch(allocation.base + at, piece, to, stream)?;
        at += piece;
    }
    Ok(())
}

/// Moves memory to the host, from the ends of the largest allocations. Returns what could not be moved.
fn evict(gpu: GpuUuid, bytes: u64, report: &impl Fn(Done)) -> u64 {
    let Some(device) = devices::by_uuid(gpu) else { return bytes };
    let Ok(stream) = streams::stream_of_ours(device.ordinal) else { return bytes };
    let begin = Instant::now();
    // What the driver keeps and does not use costs nothing to give up.
    let mut given = 0;
    if kept::give_up(device) {
        given = device.evict_unused(bytes);
        report(Done::Evicted(gpu));
    }
    let bytes = bytes - given;
    let mut host = hostmem::room();
    let mut moved = 0;
    let mut unreported = 0;
    for allocation in ledger::of_device(device.ordinal) {
        while moved < bytes {
            let piece = match evict_piece(&allocation, bytes - moved, &mut host, device, stream) {
                Ok(piece) => piece,
                // The program exits, and its memory goes with it.
                Err(CUresult::DEINITIALIZED) => return 0,
                Err(error) => {
                    log::warn(format_args!("eviction at {:#x}: {error:?}", allocation.base));
                    0
                }
            };
            if piece == 0 {
                break;
            }
            moved += piece;
            unreported += piece;
            if unreported >= REPORT {
                report(Done::Evicted(gpu));
                unreported = 0;
            }
        }
    }
    if unreported > 0 {
        report(Done::Evicted(gpu));
    }
    let took = begin.elapsed();
    counters::evicted(moved, took.as_nanos() as u64);
    log_moved("evicted", moved, took);
    bytes.saturating_sub(moved)
}

/// The piece of an allocation that leaves next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    /// It is from here to where what is present ends.
    from: u64,
    /// Bytes that the host has no pages for yet.
    fresh: u64,
}

/// Chooses the end of what is `present`: `wanted` bytes, in whole blocks counted from the base, and so a little more
/// rather than less, but no more than `host` bytes that are not hosted yet. `None`: there is nothing, or no room for it.
fn choose_piece(size: u64, present: u64, hosted: u64, wanted: u64, host: u64) -> Option<Piece> {
    let piece = wanted.min(PIECE).next_multiple_of(BLOCK).min(present);
    let from = (present - piece).next_multiple_of(BLOCK).min(present.checked_sub(1)?);
    let unhosted = present.min(size - hosted);
    // What the host cannot take stays.
    let least = unhosted.saturating_sub(host).next_multiple_of(BLOCK);
    let from = from.max(least);
    (from < present).then(|| Piece { from, fresh: unhosted.saturating_sub(from) })
}

/// Moves the last piece of an allocation that is on the card; 0: there is none, or none that the host can take.
fn evict_piece(
    allocation: &Allocation,
    wanted: u64,
    host: &mut u64,
    device: &Device,
    stream: CUstream,
) -> Result<u64, CUresult> {
    if exit::has_begun() {
        return Err(CUresult::DEINITIALIZED);
    }
    let mut place = allocation.place();
    if place.freed || !place.lived || !allocation.is_movable() || allocation.size < SMALLEST_EVICTED {
        return Ok(0);
    }
    let chosen = choose_piece(allocation.size, place.present, place.hosted, wanted, *host);
    let Some(Piece { from, fresh }) = chosen else { return Ok(0) };
    let piece = place.present - from;
    // What page faults have brought beyond that leaves with it.
    let until = if device.oversubscribe { allocation.size } else { place.present };
    driver::prefetch(allocation.base + from, until - from, CU_DEVICE_CPU, stream)?;
    driver::synchronize_stream(stream)?;
    place.present = from;
    place.hosted = place.hosted.max(allocation.size - from);
    if allocation.kind.is_pools() {
        pools::moved();
    }
    *host -= fresh;
    device.discharge(piece);
    Ok(piece)
}

/// Gives fresh managed memory its pages on the card in one go: first touches by a kernel take ten times as long.
pub(crate) fn populate(base: CUdeviceptr, bytes: u64, device: &Device) {
    if exit::has_begun() {
        return;
    }
    let _relaxed = Relaxed::begin();
    let populated = streams::stream_of_ours_here()
        .and_then(|stream| driver::prefetch(base, bytes, device.ordinal, stream));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_from_the_end_in_whole_blocks_that_the_host_can_take() {
        const NOTHING: Option<Piece> = None;
        let piece = |from, fresh| Some(Piece { from: from * MIB, fresh: fresh * MIB });
        for (size, present, hosted, wanted, host, expected) in [
            (64, 64, 0, 10, 1000, piece(54, 10)),
            (64, 64, 0, 9, 1000, piece(54, 10)),
            (64, 54, 10, 100, 1000, piece(0, 54)),
            (64, 0, 64, 10, 1000, NOTHING),
            // The last block may be a part.
            (63, 63, 0, 1, 1000, piece(62, 1)),
            // The host can take ten.
            (64, 64, 0, 64, 10, piece(54, 10)),
            (64, 64, 0, 64, 11, piece(54, 10)),
            (64, 54, 10, 64, 0, NOTHING),
            // What was there before costs nothing.
            (64, 64, 30, 64, 0, piece(34, 0)),
            (64, 64, 30, 64, 10, piece(24, 10)),
            (64, 20, 64, 64, 0, piece(0, 0)),
            // No more at once than one call is to move.
            (4096, 4096, 0, 4096, 5000, piece(3072, 1024)),
        ] {
            let chosen = choose_piece(size * MIB, present * MIB, hosted * MIB, wanted * MIB, host * MIB);
            assert_eq!(chosen, expected, "{:?}", (size, present, hosted, wanted, host));
        }
    }
}
