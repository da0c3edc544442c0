//! Device memory that we map ourselves.
//!
//! An allocation is a range of reserved addresses. The physical memory behind it comes in chunks, each mapped as a whole:
//! a chunk that leaves is copied to page-locked memory of the host, unmapped and released; one that comes back is created,
//! mapped at the same addresses, and copied in. Programs see no difference: what they have of the memory is its addresses, also
//! in graphs (measured). What a program must not do is to touch, or name to the driver, addresses without memory: the gate is
//! closed while there are any.
//!
//! State belongs to the chunk. A chunk that is being copied is *moving*: its allocation is freed only when nothing of it
//! moves.

pub(super) mod host_pool;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nvshare_proto::units::MIB;

use crate::driver::types::{CUdevice, CUdeviceptr, CUmemHandle, CUresult};
use crate::driver::{self, Relaxed};
use crate::process::{lifecycle, log, threads};
use crate::work::contexts::Context;
use host_pool::Slot;
pub(crate) use host_pool::forget_context;

/// The driver's granularity of physical memory, in bytes.
pub(crate) const GRANULE: u64 = 2 * MIB;
/// Bytes of a chunk at most. Larger ones are hardly faster (measured: 47 GiB/s in pieces of 20 MiB, 50 in pieces of 128), and
/// a program that frees an allocation waits for one.
const CHUNK: u64 = 32 * MIB;
/// Smaller allocations stay the driver's own.
pub(crate) const SMALLEST: u64 = GRANULE;
/// The driver may not have given back yet what another process has just released.
const DRIVER_IS_LATE: Duration = Duration::from_millis(250);

/// A part of an allocation that moves as one.
#[derive(Debug)]
pub(super) struct Chunk {
    /// From the base of the allocation.
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// The memory behind it; none: it is not on the card.
    pub(super) physical: Option<CUmemHandle>,
    /// Its contents on the host, a slot for each granule; none: it has no contents there.
    pub(super) host: Vec<Slot>,
    /// A copy of it is under way.
    pub(super) moving: bool,
}

/// The physical side of an allocation.
#[derive(Debug)]
pub(crate) struct Mapped {
    /// Bytes that the program asked for; the allocation has whole granules.
    pub(crate) asked: u64,
    pub(super) chunks: Mutex<Vec<Chunk>>,
    /// Something of it has stopped moving.
    pub(super) stopped: Condvar,
    /// Its context is broken: nothing of it is copied any more.
    pinned: AtomicBool,
}

/// Bytes that an allocation takes.
pub(crate) fn span(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(GRANULE)
}

/// Where chunks of an allocation begin, and how long they are.
fn split(span: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..span).step_by(CHUNK as usize).map(move |offset| (offset, CHUNK.min(span - offset)))
}

impl Mapped {
    /// Addresses for an allocation, with nothing behind them.
    pub(crate) fn reserve(asked: u64) -> Result<(CUdeviceptr, Self), CUresult> {
        let span = span(asked).ok_or(CUresult::OUT_OF_MEMORY)?;
        let base = driver::reserve_addresses(span)?;
        let chunk =
            |(offset, bytes)| Chunk { offset, bytes, physical: None, host: Vec::new(), moving: false };
        let chunks = Mutex::new(split(span).map(chunk).collect());
        let pinned = AtomicBool::new(false);
        Ok((base, Self { asked, chunks, stopped: Condvar::new(), pinned }))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Vec<Chunk>> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts memory behind all of a new allocation, or behind nothing of it.
    pub(crate) fn fill(&self, base: CUdeviceptr, device: CUdevice) -> Result<(), CUresult> {
        let _relaxed = Relaxed::begin();
        let mut chunks = self.lock();
        let deadline = Instant::now() + DRIVER_IS_LATE;
        let filled = chunks.iter_mut().try_for_each(|chunk| {
            loop {
                match create(base + chunk.offset, chunk.bytes, device) {
                    Ok(physical) => {
                        chunk.physical = Some(physical);
                        return Ok(());
                    }
                    Err(CUresult::OUT_OF_MEMORY) if Instant::now() < deadline => threads::pause(),
                    Err(error) => return Err(error),
                }
            }
        });
        let span = chunks.iter().map(|chunk| chunk.bytes).sum();
        let allowed = filled.and_then(|()| driver::allow_access(base, span, device));
        if allowed.is_err() {
            chunks.iter_mut().for_each(|chunk| destroy(base, chunk));
        }
        allowed
    }

    /// Gives up all of an allocation whose work is complete. Waits for the chunk that is being moved. Its addresses are given up
    /// too, unless something cannot be unmapped.
    pub(crate) fn end(&self, base: CUdeviceptr, context: &Arc<Context>) {
        let mut chunks = self.lock();
        while chunks.iter().any(|chunk| chunk.moving) && !lifecycle::is_exiting() {
            let wait = self.stopped.wait_timeout(chunks, Duration::from_millis(1));
            (chunks, _) = wait.unwrap_or_else(PoisonError::into_inner);
        }
        if lifecycle::is_exiting() {
            return;
        }
        let _relaxed = Relaxed::begin();
        let span = chunks.iter().map(|chunk| chunk.bytes).sum();
        for chunk in chunks.iter_mut() {
            destroy(base, chunk);
            host_pool::give_back(context, std::mem::take(&mut chunk.host));
        }
        if chunks.iter().all(|chunk| chunk.physical.is_none())
            && let Err(error) = driver::free_addresses(base, span)
        {
            log::debug(format_args!("addresses of {span} bytes at {base:#x}: {error:?}"));
        }
    }

    /// Whether nothing of it is copied any more. The first to find out is told so.
    pub(super) fn pin(&self) -> bool {
        !self.pinned.swap(true, Ordering::Relaxed)
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.pinned.load(Ordering::Relaxed)
    }
}

/// Memory at an address, to which access is still to be given.
pub(super) fn create(address: CUdeviceptr, bytes: u64, device: CUdevice) -> Result<CUmemHandle, CUresult> {
    let Some(_running) = lifecycle::hold_off_exit() else { return Err(CUresult::OUT_OF_MEMORY) };
    let physical = driver::create_physical(device, bytes)?;
    driver::map(address, bytes, physical).inspect_err(|_| {
        let _ = driver::release_physical(physical);
    })?;
    Ok(physical)
}

/// Gives up the memory behind a chunk.
pub(super) fn destroy(base: CUdeviceptr, chunk: &mut Chunk) {
    let Some(physical) = chunk.physical else { return };
    // It goes with the program.
    let Some(_running) = lifecycle::hold_off_exit() else { return };
    let at = base + chunk.offset;
    match driver::unmap(at, chunk.bytes) {
        Ok(()) => {
            chunk.physical = None;
            if let Err(error) = driver::release_physical(physical) {
                log::warn(format_args!("release of {} bytes at {at:#x}: {error:?}", chunk.bytes));
            }
        }
        // It stays mapped, and its addresses are not used again.
        Err(error) => log::warn(format_args!("unmapping {} bytes at {at:#x}: {error:?}", chunk.bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_is_split_into_chunks_of_whole_granules() {
        let chunks =
            |bytes: u64| split(span(bytes).unwrap()).map(|(at, n)| (at / MIB, n / MIB)).collect::<Vec<_>>();
        assert_eq!(chunks(1), [(0, 2)]);
        assert_eq!(chunks(2 * MIB), [(0, 2)]);
        assert_eq!(chunks(33 * MIB), [(0, 32), (32, 2)]);
        assert_eq!(chunks(64 * MIB), [(0, 32), (32, 32)]);
        assert_eq!(span(u64::MAX), None);
    }
}
