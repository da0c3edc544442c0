//! Memory that other processes may get: the chunks of an allocation are exchanged, at their addresses, for ones of which
//! descriptors can be made.
//!
//! All memory that could be shared one day is made without: descriptors keep memory alive, and few programs share any. The
//! exchange is done once, by a copy on the card (measured: 1.5 ms for 1 GiB). The new chunks are larger, if there were many:
//! a descriptor is needed for each.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{CHUNK, Chunk, DRIVER_IS_LATE, Mapped, copies, host_pool, peers};
use crate::driver;
use crate::driver::types::{
    CUdevice, CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemHandle, CUresult,
};
use crate::process::{log, passing, threads};
use crate::work::contexts::Context;

/// Fewest bytes of a new chunk where there may be `most`. As many come to the card in addition, for a moment.
fn least_piece(span: u64, most: usize) -> u64 {
    span.div_ceil(most.clamp(1, passing::MAX_DESCRIPTORS) as u64).next_multiple_of(CHUNK).min(span)
}

/// The same for chunks some of which may have been exchanged. A chunk is exchanged as a whole.
fn least_of(chunks: &[Chunk], most: usize) -> u64 {
    let done = chunks.iter().filter(|chunk| chunk.exportable).count();
    let left = || chunks.iter().filter(|chunk| !chunk.exportable).map(|chunk| chunk.bytes);
    let most = most.min(passing::MAX_DESCRIPTORS).saturating_sub(done);
    least_piece(left().sum(), most).max(left().max().unwrap_or(0))
}

/// Whether the chunks that have been exchanged are too many: no message has room for the descriptors of them and of the others.
fn are_too_many(chunks: &[Chunk], most: usize) -> bool {
    let done = chunks.iter().filter(|chunk| chunk.exportable).count();
    done > passing::MAX_DESCRIPTORS || done < chunks.len() && done >= most.min(passing::MAX_DESCRIPTORS)
}

/// The next smaller size of new chunks.
fn halved(piece: u64, least: u64) -> u64 {
    (piece / 2).next_multiple_of(CHUNK).max(least)
}

/// Bytes of a new chunk: as many as half of the card's `free` memory has room for, since others may want that, too.
fn piece(span: u64, least: u64, free: u64) -> u64 {
    let mut piece = span;
    while piece > least && piece > free / 2 {
        piece = halved(piece, least);
    }
    piece
}

/// The number of chunks, of these lengths, that one new chunk takes the place of.
fn taken(lengths: impl Iterator<Item = u64>, piece: u64) -> usize {
    let mut sum = 0;
    lengths
        .take_while(|bytes| {
            sum += bytes;
            sum <= piece
        })
        .count()
        .max(1)
}

/// A part of the allocation that is exchanged.
struct Part<'a> {
    at: CUdeviceptr,
    bytes: u64,
    device: CUdevice,
    old: &'a [Chunk],
    /// There is no smaller part to try.
    is_least: bool,
}

impl Mapped {
    /// Whether each part of the allocation has such memory, and a message has room for their descriptors. A part that is not on the card
    /// has none.
    pub(in crate::memory) fn is_exportable(&self) -> bool {
        let chunks = self.lock();
        chunks.len() <= passing::MAX_DESCRIPTORS && chunks.iter().all(|chunk| chunk.exportable)
    }

    /// Whether the memory behind chunks that come back is such memory.
    pub(in crate::memory) fn is_shared(&self) -> bool {
        self.is_shared.load(Ordering::Relaxed)
    }

    /// The number of parts, each of which needs a descriptor.
    pub(in crate::memory) fn parts(&self) -> usize {
        self.lock().len()
    }

    /// Bytes that the card needs room for in addition while the memory is [exchanged](Self::make_exportable) for `most` parts at most.
    pub(in crate::memory) fn room_to_exchange(&self, most: usize) -> u64 {
        least_of(&self.lock(), most)
    }

    /// Exchanges the memory of an allocation for such memory, as far as it has none. No work of the program may be running, and the
    /// gate has to be shut. With an error all contents are where they were. There are `most` parts at most.
    ///
    /// # Errors
    /// A part is not on the card, the card has no room for one more, or the driver's error.
    pub(in crate::memory) fn make_exportable(
        &self,
        base: CUdeviceptr,
        device: CUdevice,
        context: &Context,
        most: usize,
    ) -> Result<(), CUresult> {
        // The library itself may look at a chunk.
        let mut chunks = self.lock_still();
        if chunks.iter().any(|chunk| chunk.moving || chunk.physical.is_none()) {
            return Err(CUresult::NOT_READY);
        }
        // Such as came back one by one are exchanged for fewer.
        if are_too_many(&chunks, most) {
            chunks.iter_mut().for_each(|chunk| chunk.exportable = false);
        }
        // An exchange that failed may have done a part of them.
        let span = chunks.iter().filter(|chunk| !chunk.exportable).map(|chunk| chunk.bytes).sum();
        let least = least_of(&chunks, most);
        let free = context.with(driver::free_memory).ok().and_then(Result::ok).unwrap_or(0);
        let (mut piece, mut from) = (piece(span, least, free), 0);
        while let Some(first) = chunks.get(from) {
            if first.exportable {
                from += 1;
                continue;
            }
            let next = chunks.iter().skip(from).take_while(|chunk| !chunk.exportable);
            let count = taken(next.map(|chunk| chunk.bytes), piece);
            let old = chunks.get(from..from + count).unwrap_or_default();
            let offset = old.first().map_or(0, |first| first.offset);
            let bytes = old.iter().map(|chunk| chunk.bytes).sum();
            let is_least = piece <= least;
            let part = Part { at: base + offset, bytes, device, old, is_least };
            let exchanged = context.with(|| part.exchange(self, context));
            let physical = match exchanged.unwrap_or(Err(CUresult::DEINITIALIZED)) {
                Err(CUresult::OUT_OF_MEMORY) if !is_least => {
                    piece = halved(piece, least);
                    continue;
                }
                exchanged => Some(exchanged?),
            };
            let new = Chunk { physical, exportable: true, ..Chunk::absent(offset, bytes) };
            for gone in chunks.splice(from..from + count, [new]) {
                // Others write to the memory: what the host has of it is worth nothing.
                host_pool::give_back(copies::slots(gone.host));
            }
            from += 1;
        }
        // From here on, memory that comes back is such memory. Not before: it comes back in as many parts as there are.
        self.is_shared.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Makes a descriptor for each part of such memory: its bytes, and the descriptor.
    ///
    /// # Errors
    /// The driver's.
    pub(in crate::memory) fn describe(&self, context: &Context) -> Result<Vec<(u64, OwnedFd)>, CUresult> {
        let chunks = self.lock();
        let described = |chunk: &Chunk| {
            let physical = chunk.physical.ok_or(CUresult::NOT_READY)?;
            Ok((chunk.bytes, driver::export_physical(physical)?))
        };
        let all = context.with(|| chunks.iter().map(described).collect());
        all.unwrap_or(Err(CUresult::DEINITIALIZED))
    }
}

impl Part<'_> {
    /// Exchanges the memory behind the addresses. The context is current.
    fn exchange(&self, mapped: &Mapped, context: &Context) -> Result<CUmemHandle, CUresult> {
        let new = self.create()?;
        let copied = self.copy_to(new, context).and_then(|()| self.replace(mapped, new));
        copied.inspect_err(|_| _ = driver::release_physical(new))?;
        for chunk in self.old {
            if let Some(Err(error)) = chunk.physical.map(driver::release_physical) {
                log::warn(format_args!("release of {} bytes: {error:?}", chunk.bytes));
            }
        }
        Ok(new)
    }

    fn create(&self) -> Result<CUmemHandle, CUresult> {
        let deadline = Instant::now() + DRIVER_IS_LATE;
        loop {
            match driver::create_physical(&CUmemAllocationProp::shared_on(self.device), self.bytes) {
                Err(CUresult::OUT_OF_MEMORY) if self.is_least && Instant::now() < deadline => {
                    threads::pause()
                }
                made => return made,
            }
        }
    }

    /// Copies the contents, by way of addresses of its own.
    fn copy_to(&self, new: CUmemHandle, context: &Context) -> Result<(), CUresult> {
        let aside = driver::reserve_addresses(self.bytes)?;
        let copied = driver::map(aside, self.bytes, new).and_then(|()| {
            let access = [CUmemAccessDesc::read_and_write(self.device)];
            let copied = driver::set_access(aside, self.bytes, &access).and_then(|()| {
                context.move_in_order(|stream| driver::copy_within(aside, self.at, self.bytes, stream))
            });
            driver::unmap(aside, self.bytes).and(copied)
        });
        let _ = driver::free_addresses(aside, self.bytes);
        copied
    }

    /// Maps the new memory in place of the old.
    fn replace(&self, mapped: &Mapped, new: CUmemHandle) -> Result<(), CUresult> {
        driver::unmap(self.at, self.bytes)?;
        let shown = driver::map(self.at, self.bytes, new).and_then(|()| {
            peers::allow(mapped, self.at, self.bytes, self.device)
                .inspect_err(|_| _ = driver::unmap(self.at, self.bytes))
        });
        shown.inspect_err(|_| {
            let mut at = self.at;
            for chunk in self.old {
                let back = chunk.physical.map(|old| driver::map(at, chunk.bytes, old));
                if !matches!(back, Some(Ok(()))) {
                    log::error(format_args!("{} bytes at {at:#x} cannot be mapped again", chunk.bytes));
                }
                at += chunk.bytes;
            }
            if let Err(error) = peers::allow(mapped, self.at, self.bytes, self.device) {
                log::error(format_args!("{} bytes at {:#x}: {error:?}", self.bytes, self.at));
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use nvshare_proto::units::{GIB, MIB};

    use super::*;

    #[test]
    fn a_message_has_room_for_the_descriptors_of_any_allocation() {
        for span in [2 * MIB, 34 * MIB, 2 * GIB, 2 * GIB + 2 * MIB, 79 * GIB, 500 * GIB] {
            let mut lengths: Vec<u64> = super::super::split(span, CHUNK).map(|(_, bytes)| bytes).collect();
            let mut parts = 0;
            while !lengths.is_empty() {
                let count = taken(lengths.iter().copied(), least_piece(span, passing::MAX_DESCRIPTORS));
                assert!(lengths.drain(..count).sum::<u64>() <= least_piece(span, passing::MAX_DESCRIPTORS));
                parts += 1;
            }
            assert!(parts <= passing::MAX_DESCRIPTORS, "{span}: {parts}");
            assert!(least_piece(span, passing::MAX_DESCRIPTORS) <= CHUNK + span / 64, "{span}");
        }
    }

    #[test]
    fn an_exchange_goes_on_where_one_failed() {
        let chunk = |mib, exportable| Chunk { exportable, ..Chunk::absent(0, mib * MIB) };
        let chunks = |done, left, count| {
            let left = (0..count).map(|_| chunk(left, false));
            [chunk(done, true)].into_iter().chain(left).collect::<Vec<_>>()
        };
        assert_eq!(least_of(&chunks(320, 32, 54), 64) / MIB, 32);
        let many = |done| {
            (0..done).map(|_| chunk(32, true)).chain((0..64).map(|_| chunk(32, false))).collect::<Vec<_>>()
        };
        assert_eq!(least_of(&many(48), 512) / MIB, 128, "what is left has 16 parts");
        assert!(!are_too_many(&many(48), 512) && are_too_many(&many(64), 512) && are_too_many(&many(48), 48));
        let done = |count| (0..count).map(|_| chunk(32, true)).collect::<Vec<_>>();
        assert!(!are_too_many(&done(64), 512) && are_too_many(&done(65), 512) && !are_too_many(&done(3), 3));
        assert_eq!(least_of(&chunks(320, 32, 54), 3) / MIB, 864);
        assert_eq!(least_of(&chunks(320, 32, 54), 1) / MIB, 54 * 32);
        assert_eq!(
            least_of(&chunks(32, 512, 2), 64) / MIB,
            512,
            "a chunk of an exchange that has left since"
        );
        assert_eq!(least_of(&chunks(32, 32, 0), 64), 0);
    }

    #[test]
    fn there_are_as_few_descriptors_as_the_free_memory_allows() {
        let least = least_piece(2 * GIB, passing::MAX_DESCRIPTORS);
        for (free, mib) in [(4 * GIB, 2048), (4 * GIB - 1, 1024), (GIB, 512), (70 * MIB, 32), (0, 32)] {
            assert_eq!(piece(2 * GIB, least, free) / MIB, mib, "{free}");
        }
        assert_eq!(piece(2 * MIB, least_piece(2 * MIB, 1), 0), 2 * MIB);
        assert_eq!(piece(2 * GIB, least_piece(2 * GIB, 3), 0) / MIB, 704);
        assert_eq!(least_piece(2 * GIB, 1), 2 * GIB);
    }
}
