//! Segments of host memory, from this process or from the scheduler, aligned to the granule.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use nvshare_proto::HostSegment;

use super::{GRANULE, supply};
use crate::driver;
use crate::driver::types::CUresult;
use crate::process::threads;
use crate::work::contexts::Context;
use crate::work::life::Gone;

/// Bytes behind each segment at which there is nothing else. Segments that lay side by side would be one range of slots. The driver
/// refuses a copy that spans two ranges, if each was page-locked by itself (measured).
const GUARD: usize = 4096;

/// Threads that prefault a segment, at most.
const MAX_THREADS: usize = 8;

/// Memory from the system. It is given back when it is dropped, unless the driver still knows the addresses.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) address: usize,
    pub(super) bytes: usize,
    /// The scheduler's number for it, if it comes from there.
    pub(super) number: Option<u64>,
    /// The context in which the driver has page-locked the memory. The page-lock ends with the context (measured).
    locked_in: Option<Arc<Context>>,
}

impl Drop for Segment {
    fn drop(&mut self) {
        if self.is_known_to_driver() {
            return;
        }
        // SAFETY: the mapping is ours and no copy uses it: a segment leaves its pool only when none of its slots is taken. A pool
        // leaves the list only after its context has ended, and then hands out no slots. The driver has forgotten the addresses,
        // or its context has ended.
        unsafe { libc::munmap(self.address as *mut c_void, self.bytes + GUARD) };
        if let Some(number) = self.number {
            supply::queue_return(number);
        }
    }
}

/// The reason why memory is not page-locked, or stays page-locked.
#[derive(Debug)]
pub(super) enum PageLockError {
    /// The driver refuses.
    Driver(CUresult),
    /// The context ends, or has ended.
    Gone,
}

impl Segment {
    /// Has the driver page-lock the memory in a context.
    ///
    /// # Errors
    /// The driver refuses; or the context ends, or has ended.
    pub(super) fn page_lock(&mut self, context: &Arc<Context>) -> Result<(), PageLockError> {
        let locked = context.with(|| driver::register_host(self.address as *mut c_void, self.bytes as u64));
        locked.map_err(|_| PageLockError::Gone)?.map_err(PageLockError::Driver)?;
        self.locked_in = Some(Arc::clone(context));
        Ok(())
    }

    /// Has the driver forget the memory.
    ///
    /// # Errors
    /// The driver refuses, or the context ends.
    pub(super) fn unlock(&mut self) -> Result<(), PageLockError> {
        let Some(context) = self.locked_in.clone().filter(|_| self.is_known_to_driver()) else {
            return Ok(());
        };
        match context.with(|| driver::unregister_host(self.address as *mut c_void)) {
            // The page-lock has ended with the context.
            Ok(Ok(())) | Err(Gone::Over) => {
                self.locked_in = None;
                Ok(())
            }
            Ok(Err(refused)) => Err(PageLockError::Driver(refused)),
            Err(Gone::Ending) => Err(PageLockError::Gone),
        }
    }

    /// Whether the driver has page-locked the memory in a context that has not ended.
    fn is_known_to_driver(&self) -> bool {
        self.locked_in.as_ref().is_some_and(|context| !context.life().is_over())
    }

    pub(super) fn contains(&self, address: usize) -> bool {
        (self.address..self.address + self.bytes).contains(&address)
    }

    /// Maps memory that the scheduler has made. The file may be closed afterwards.
    pub(super) fn map_from_scheduler(
        HostSegment { number, bytes }: HostSegment,
        file: &OwnedFd,
    ) -> Option<Self> {
        // The scheduler charges it to this process until it is given back.
        let Some(mut segment) = Self::reserve(bytes) else {
            supply::queue_return(number);
            return None;
        };
        // SAFETY: in place of the mapping just made, which nobody has yet.
        let mapped = unsafe {
            libc::mmap(
                segment.address as *mut c_void,
                segment.bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
                file.as_raw_fd(),
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            supply::queue_return(number);
            return None;
        }
        segment.advise();
        segment.number = Some(number);
        supply::note_mapped(HostSegment { number, bytes });
        Some(segment)
    }

    /// Asks for huge pages, and keeps the memory out of forked children and core dumps.
    fn advise(&self) {
        for advice in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
            // SAFETY: a mapping of ours.
            unsafe { libc::madvise(self.address as *mut c_void, self.bytes, advice) };
        }
    }

    /// Maps memory of this process.
    pub(super) fn new(bytes: u64) -> Option<Self> {
        Self::reserve(bytes).inspect(Self::advise)
    }

    /// Maps memory at a multiple of the granule, and its guard, without advice: another mapping in its place would lose it.
    fn reserve(bytes: u64) -> Option<Self> {
        let granule = GRANULE as usize;
        let length = bytes as usize + GUARD + granule;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, wherever the kernel puts it.
        let raw = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
        if raw == libc::MAP_FAILED {
            return None;
        }
        let (raw, address) = (raw as usize, (raw as usize).next_multiple_of(granule));
        let end = address + bytes as usize + GUARD;
        // SAFETY: the parts before and behind the aligned part of the mapping just made.
        unsafe {
            if address > raw {
                libc::munmap(raw as *mut c_void, address - raw);
            }
            if raw + length > end {
                libc::munmap(end as *mut c_void, raw + length - end);
            }
        }
        Some(Self { address, bytes: bytes as usize, number: None, locked_in: None })
    }

    /// A segment that is nowhere.
    #[cfg(test)]
    pub(super) fn at(address: usize, bytes: usize, number: Option<u64>) -> Self {
        Self { address, bytes, number, locked_in: None }
    }

    /// The segment as if the driver had page-locked it.
    #[cfg(test)]
    pub(super) fn with_page_lock(self, context: &Arc<Context>) -> Self {
        let mut segment = self;
        segment.locked_in = Some(Arc::clone(context));
        segment
    }

    /// Overwrites each page's first byte, so that the kernel finds the pages before the driver does. Several threads do it, if there
    /// are processors for them; the driver has one thread.
    pub(super) fn prefault(&self) {
        const PAGE: usize = 4096;
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (processors / 2).min(MAX_THREADS);
        if threads < 2 {
            return;
        }
        let share = (self.bytes / threads).next_multiple_of(GRANULE as usize);
        std::thread::scope(|scope| {
            for begin in (0..self.bytes).step_by(share) {
                let (from, until) = (self.address + begin, self.address + (begin + share).min(self.bytes));
                let work = move || {
                    for page in (from..until).step_by(PAGE) {
                        // SAFETY: within the mapping, which nobody else has yet.
                        unsafe { (page as *mut u8).write_volatile(0) };
                    }
                };
                // If a thread cannot be started, the driver does it.
                let _ = threads::spawn_scoped(scope, "nvshare-host", work);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvshare_proto::units::MIB;

    #[test]
    fn a_segment_for_which_there_are_no_addresses_is_given_back() {
        let file = std::fs::File::open("/dev/null").unwrap().into();
        let segment = HostSegment { number: 7_000_001, bytes: 1 << 60 };
        assert!(Segment::map_from_scheduler(segment, &file).is_none());
        assert!(supply::is_given_back(segment.number));
    }

    #[test]
    fn a_segment_that_the_driver_knows_is_not_unmapped() {
        let context = crate::work::contexts::learn(crate::driver::types::CUcontext(0x51_0000 as *mut _), 0);
        let mut segment = Segment::new(4 * MIB).unwrap();
        segment.number = Some(7_000_003);
        let (address, segment) = (segment.address, segment.with_page_lock(&context));
        drop(segment);
        assert!(!supply::is_given_back(7_000_003));
        // SAFETY: the mapping has stayed.
        unsafe { (address as *mut u8).write_volatile(7) };
        let segment = Segment::at(address, 4 * 1024 * 1024, Some(7_000_003)).with_page_lock(&context);
        context.life().over();
        drop(segment);
        assert!(supply::is_given_back(7_000_003), "the page-lock has ended with the context");
    }

    #[test]
    fn a_segment_is_aligned_and_can_be_written() {
        let segment = Segment::new(4 * MIB).unwrap();
        assert!(segment.address.is_multiple_of(GRANULE as usize));
        segment.prefault();
        // SAFETY: within the segment.
        unsafe { (segment.address as *mut u8).add(segment.bytes - 1).write_volatile(7) };
        // SAFETY: the kernel says whether something is mapped there.
        let is_mapped = |at: usize| unsafe { libc::msync(at as *mut c_void, GUARD, libc::MS_ASYNC) } == 0;
        let guard = segment.address + segment.bytes;
        assert!(is_mapped(guard), "the next segment could lie side by side with it");
        drop(segment);
        assert!(!is_mapped(guard));
    }
}
