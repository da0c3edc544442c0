//! Device memory that the library maps.
//!
//! An allocation is a range of reserved addresses. The physical memory behind it comes in chunks, each mapped as a whole. A
//! chunk that leaves is copied to page-locked memory of the host, unmapped and released. A chunk that comes back is created,
//! mapped at the same addresses, and copied in. Programs see no difference: they know the memory by its addresses alone, also
//! in graphs (measured). A program must not touch, or name to the driver, addresses without memory: the gate is closed while
//! there are any.
//!
//! State belongs to the chunk. A chunk that is being copied is *moving*: an allocation is freed only when none of its
//! chunks moves.

pub(super) mod at_hand;
pub(super) mod copies;
mod exportable;
pub(super) mod host_pool;
pub(crate) mod peers;
mod segment;
pub(crate) mod supply;
mod views;

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nvshare_client::slabs::SLAB;
use nvshare_proto::units::MIB;

use crate::driver::types::{CUdevice, CUdeviceptr, CUmemAllocationProp, CUmemHandle, CUresult};
use crate::driver::{self, Relaxed};
use crate::process::lock::lock;
use crate::process::{lifecycle, log, threads};
use crate::work::contexts::Context;
use at_hand::AtHand;
use copies::HostCopy;
pub(crate) use host_pool::forget_context;
use views::Program;

/// The driver's granularity of physical memory, in bytes.
pub(crate) const GRANULE: u64 = 2 * MIB;
/// The largest size of a chunk, in bytes. Larger ones are hardly faster (measured: 47 GiB/s in pieces of 20 MiB, 50 in pieces of 128). A
/// program that frees an allocation waits for one.
const CHUNK: u64 = 32 * MIB;
/// Time that the driver may take to give back memory that another process has just released.
pub(crate) const DRIVER_IS_LATE: Duration = Duration::from_millis(250);

/// A part of an allocation that moves as one.
#[derive(Debug)]
pub(super) struct Chunk {
    /// The chunk's begin, from the base of the allocation.
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// The memory behind the chunk; none: the chunk is not on the card.
    pub(super) physical: Option<CUmemHandle>,
    /// The chunk's contents on the host, granule by granule; none: it has no contents there. A chunk that is on the card
    /// may have copies there too.
    pub(super) host: Vec<HostCopy>,
    /// A copy of the chunk is under way, or a look at it.
    pub(super) moving: bool,
    /// The look is one at memory that stays, beside the program's work: it may take as long as that work.
    pub(super) guessed: bool,
    /// Descriptors can be made of the memory behind the chunk: since an [exchange](Mapped::make_exportable), it is created so.
    pub(super) exportable: bool,
    /// The [closed period](crate::work::gate::closed_period) of the gate in which the chunk came to the card without contents. Until the
    /// gate opens, no work can have written there.
    pub(super) untouched_in: Option<u64>,
}

impl Chunk {
    /// A chunk that is not on the card and has no contents.
    pub(super) fn absent(offset: u64, bytes: u64) -> Self {
        let (physical, host, untouched_in) = (None, Vec::new(), None);
        Self { offset, bytes, physical, host, moving: false, guessed: false, exportable: false, untouched_in }
    }
}

/// The physical side of an allocation.
#[derive(Debug)]
pub(crate) struct Mapped {
    /// Bytes that the program asked for; the allocation consists of whole granules.
    pub(crate) asked: u64,
    pub(super) chunks: Mutex<Vec<Chunk>>,
    /// Notified when a chunk stops moving.
    pub(super) stopped: Condvar,
    /// The reasons for which nothing of the allocation moves.
    pins: AtomicU8,
    /// Descriptors can be made of all memory that is created from now on.
    is_shared: AtomicBool,
    /// The program's knowledge of memory that it created itself.
    program: Option<Program>,
    /// Small allocations share the memory.
    is_slab: bool,
}

/// Why nothing of an allocation moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Pin {
    /// Its context is broken, or others can reach its memory.
    ForGood = 1,
    /// Other processes have its memory.
    Lent = 2,
}

/// Bytes that an allocation takes.
pub(crate) fn span(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(GRANULE)
}

/// The begin and the length of each chunk of an allocation.
fn split(span: u64, chunk: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..span).step_by(chunk as usize).map(move |offset| (offset, chunk.min(span - offset)))
}

impl Mapped {
    /// Reserves addresses for an allocation, without memory behind them.
    pub(crate) fn reserve(asked: u64) -> Result<(CUdeviceptr, Self), CUresult> {
        Self::reserve_in(asked, CHUNK, None)
    }

    /// Reserves addresses for a slab.
    pub(crate) fn reserve_slab() -> Result<(CUdeviceptr, Self), CUresult> {
        let (base, mapped) = Self::reserve(SLAB)?;
        Ok((base, Self { is_slab: true, ..mapped }))
    }

    /// Reserves addresses, unknown to the program, for memory that it creates with such properties, and that is moved in
    /// this context at first. Memory that can be shared has one handle of the driver, and so is one chunk.
    pub(crate) fn reserve_for_program(
        bytes: u64,
        properties: CUmemAllocationProp,
        context: &Arc<Context>,
    ) -> Result<(CUdeviceptr, Self), CUresult> {
        let chunk = if properties.handle_types() == 0 { CHUNK } else { bytes };
        let place = Mutex::new(Arc::clone(context));
        Self::reserve_in(bytes, chunk, Some(Program { properties, views: Mutex::default(), place }))
    }

    fn reserve_in(asked: u64, chunk: u64, program: Option<Program>) -> Result<(CUdeviceptr, Self), CUresult> {
        let span = span(asked).ok_or(CUresult::OUT_OF_MEMORY)?;
        let base = driver::reserve_addresses(span)?;
        let new = |(offset, bytes)| Chunk::absent(offset, bytes);
        let chunks = Mutex::new(split(span, chunk).map(new).collect());
        let (pins, is_shared) = (AtomicU8::new(0), AtomicBool::new(false));
        Ok((base, Self { asked, chunks, stopped: Condvar::new(), pins, is_shared, program, is_slab: false }))
    }

    /// Whether the program does not know the addresses.
    pub(crate) fn is_hidden(&self) -> bool {
        self.is_slab || self.program.is_some()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Vec<Chunk>> {
        lock(&self.chunks)
    }

    /// The same when no chunk moves any more, or the process ends.
    fn lock_still(&self) -> MutexGuard<'_, Vec<Chunk>> {
        let mut chunks = self.lock();
        while chunks.iter().any(|chunk| chunk.moving) && !lifecycle::is_exiting() {
            let wait = self.stopped.wait_timeout(chunks, Duration::from_millis(1));
            (chunks, _) = wait.unwrap_or_else(PoisonError::into_inner);
        }
        chunks
    }

    /// Maps memory behind all addresses of a new allocation, or behind none.
    pub(crate) fn fill(&self, base: CUdeviceptr, device: CUdevice) -> Result<(), CUresult> {
        let _relaxed = Relaxed::begin();
        let mut chunks = self.lock();
        let deadline = Instant::now() + DRIVER_IS_LATE;
        let span: u64 = chunks.iter().map(|chunk| chunk.bytes).sum();
        let (mut at_hand, mut coming) = (AtHand::default(), span);
        let filled = chunks.iter_mut().try_for_each(|chunk| {
            at_hand.prepare(chunk.bytes, coming, device);
            coming -= chunk.bytes;
            loop {
                match self.create(base + chunk.offset, chunk.bytes, device) {
                    Ok(physical) => {
                        chunk.physical = Some(physical);
                        return Ok(());
                    }
                    Err(CUresult::OUT_OF_MEMORY) if Instant::now() < deadline => threads::pause(),
                    Err(error) => return Err(error),
                }
            }
        });
        let allowed = filled.and_then(|()| peers::allow(self, base, span, device));
        if allowed.is_err() {
            chunks.iter_mut().for_each(|chunk| self.destroy(base, chunk));
        }
        allowed
    }

    /// Ends an allocation whose work is complete. Waits for the chunk that is being moved. The addresses are freed
    /// too, unless a chunk cannot be unmapped.
    pub(crate) fn end(&self, base: CUdeviceptr) {
        let mut chunks = self.lock_still();
        if lifecycle::is_exiting() {
            return;
        }
        let _relaxed = Relaxed::begin();
        let span = chunks.iter().map(|chunk| chunk.bytes).sum();
        for chunk in chunks.iter_mut() {
            self.destroy(base, chunk);
            host_pool::give_back(copies::slots(std::mem::take(&mut chunk.host)));
        }
        if chunks.iter().all(|chunk| chunk.physical.is_none())
            && let Err(error) = driver::free_addresses(base, span)
        {
            log::debug(format_args!("addresses of {span} bytes at {base:#x}: {error:?}"));
        }
    }

    /// Whether a chunk is looked at beside the program's work.
    pub(super) fn is_guessed(&self) -> bool {
        self.lock().iter().any(|chunk| chunk.guessed)
    }

    /// Whether a chunk has no memory on the card. Then no work uses any chunk. One leaves when all work is complete and the
    /// gate is closed, and the gate opens when all are back.
    pub(super) fn is_away(&self) -> bool {
        self.lock().iter().any(|chunk| chunk.physical.is_none())
    }

    /// Notes a reason for which nothing of the allocation moves. Returns whether it is the only one.
    pub(super) fn pin(&self, why: Pin) -> bool {
        self.pins.fetch_or(why as u8, Ordering::SeqCst) == 0
    }

    /// Notes that a reason is gone. Returns whether it was the only one.
    pub(super) fn unpin(&self, why: Pin) -> bool {
        self.pins.fetch_and(!(why as u8), Ordering::SeqCst) == why as u8
    }

    /// Whether nothing of the allocation moves.
    pub(crate) fn is_pinned(&self) -> bool {
        self.pins.load(Ordering::SeqCst) != 0
    }

    /// Creates memory and maps it at an address. The caller gives access to it, and makes it [visible](Self::show).
    pub(super) fn create(
        &self,
        address: CUdeviceptr,
        bytes: u64,
        device: CUdevice,
    ) -> Result<CUmemHandle, CUresult> {
        let Some(_running) = lifecycle::hold_off_exit() else { return Err(CUresult::OUT_OF_MEMORY) };
        let ordinary = || {
            let is_shared = self.is_shared.load(Ordering::Relaxed);
            if is_shared { CUmemAllocationProp::shared_on(device) } else { CUmemAllocationProp::on(device) }
        };
        let properties = self.properties().unwrap_or_else(ordinary);
        let physical = driver::create_physical(&properties, bytes)?;
        driver::map(address, bytes, physical).inspect_err(|_| {
            let _ = driver::release_physical(physical);
        })?;
        Ok(physical)
    }

    /// Unmaps and releases the memory behind all chunks; the addresses stay.
    pub(super) fn empty(&self, base: CUdeviceptr) {
        let _relaxed = Relaxed::begin();
        let mut chunks = self.lock_still();
        chunks.iter_mut().filter(|chunk| !chunk.moving).for_each(|chunk| self.destroy(base, chunk));
    }

    /// Unmaps and releases the memory behind a chunk, unless a mapping of it cannot be unmapped.
    pub(super) fn destroy(&self, base: CUdeviceptr, chunk: &mut Chunk) {
        // The memory ends with the program.
        let Some(_running) = lifecycle::hold_off_exit() else { return };
        if self.hide(chunk) {
            destroy(base, chunk);
            // If it cannot be unmapped, it stays where the program has mapped it, too.
            let stays = chunk.physical.map(|physical| self.show(chunk.offset, chunk.bytes, physical));
            if let Some(Err(error)) = stays {
                log::error(format_args!(
                    "{} bytes of the program's cannot be mapped again: {error:?}",
                    chunk.bytes
                ));
            }
        }
    }
}

#[cfg(test)]
impl Mapped {
    /// An allocation without addresses.
    pub(crate) fn of_nothing() -> Self {
        Self {
            asked: 0,
            chunks: Mutex::default(),
            stopped: Condvar::new(),
            pins: AtomicU8::new(0),
            is_shared: AtomicBool::new(false),
            program: None,
            is_slab: false,
        }
    }
}

/// Unmaps and releases the memory behind a chunk that no view shows.
pub(super) fn destroy(base: CUdeviceptr, chunk: &mut Chunk) {
    let Some(physical) = chunk.physical else { return };
    // The memory ends with the program.
    let Some(_running) = lifecycle::hold_off_exit() else { return };
    let at = base + chunk.offset;
    match driver::unmap(at, chunk.bytes) {
        Ok(()) => {
            (chunk.physical, chunk.exportable) = (None, false);
            if let Err(error) = driver::release_physical(physical) {
                log::warn(format_args!("release of {} bytes at {at:#x}: {error:?}", chunk.bytes));
            }
        }
        // The memory stays mapped, and its addresses are not used again.
        Err(error) => log::warn(format_args!("unmapping {} bytes at {at:#x}: {error:?}", chunk.bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_is_split_into_chunks_of_whole_granules() {
        let chunks = |bytes: u64| {
            split(span(bytes).unwrap(), CHUNK).map(|(at, n)| (at / MIB, n / MIB)).collect::<Vec<_>>()
        };
        assert_eq!(chunks(1), [(0, 2)]);
        assert_eq!(chunks(2 * MIB), [(0, 2)]);
        assert_eq!(chunks(33 * MIB), [(0, 32), (32, 2)]);
        assert_eq!(chunks(64 * MIB), [(0, 32), (32, 32)]);
        assert_eq!(span(u64::MAX), None);
    }
}
