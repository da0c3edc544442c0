//! Segments of the host's memory, mapped at multiples of the granule: of this process, or of the scheduler.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use nvshare_proto::HostSegment;

use super::{GRANULE, supply};
use crate::driver;
use crate::driver::types::CUresult;
use crate::work::contexts::Context;
use crate::work::life::Gone;

/// Threads that touch a segment, at most.
const MOST_THREADS: usize = 8;

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
        // SAFETY: a mapping of ours that no copy uses. A segment is taken out of its pool only while none of its slots is taken. A pool
        // goes off the list only so, after its context has ended, and hands out no slots from then on. Nor does the driver know the
        // addresses any more: a segment that it does not let go is not unmapped.
        unsafe { libc::munmap(self.address as *mut c_void, self.bytes) };
        if let Some(number) = self.number {
            supply::queue_return(number);
        }
    }
}

impl Segment {
    /// Has the driver page-lock the memory in a context, or says why it does not.
    ///
    /// # Errors
    /// The context ends, or has ended.
    pub(super) fn page_lock(&mut self, context: &Arc<Context>) -> Result<Result<(), CUresult>, Gone> {
        let locked =
            context.with(|| driver::register_host(self.address as *mut c_void, self.bytes as u64))?;
        if locked.is_ok() {
            self.locked_in = Some(Arc::clone(context));
        }
        Ok(locked)
    }

    /// Has the driver forget the memory, or says why it does not.
    ///
    /// # Errors
    /// The context ends.
    pub(super) fn unlock(&mut self) -> Result<Result<(), CUresult>, Gone> {
        let Some(context) = self.locked_in.clone().filter(|_| self.is_known_to_driver()) else {
            return Ok(Ok(()));
        };
        let unlocked = match context.with(|| driver::unregister_host(self.address as *mut c_void)) {
            Err(Gone::Over) => Ok(()),
            unlocked => unlocked?,
        };
        if unlocked.is_ok() {
            self.locked_in = None;
        }
        Ok(unlocked)
    }

    /// Whether the driver has page-locked the memory in a context that has not ended.
    fn is_known_to_driver(&self) -> bool {
        self.locked_in.as_ref().is_some_and(|context| !context.life().is_over())
    }

    pub(super) fn has(&self, address: usize) -> bool {
        (self.address..self.address + self.bytes).contains(&address)
    }

    /// Memory that the scheduler has made. The file may be closed afterwards.
    pub(super) fn of_scheduler(HostSegment { number, bytes }: HostSegment, file: &OwnedFd) -> Option<Self> {
        // The scheduler counts it as this process's until it is told.
        let Some(mut segment) = Self::new(bytes) else {
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
        segment.keep_private();
        segment.number = Some(number);
        supply::note_mapped(HostSegment { number, bytes });
        Some(segment)
    }

    /// Neither forked children nor core dumps contain it.
    fn keep_private(&self) {
        for advice in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
            // SAFETY: a mapping of ours.
            unsafe { libc::madvise(self.address as *mut c_void, self.bytes, advice) };
        }
    }

    /// Memory at a multiple of the granule.
    pub(super) fn new(bytes: u64) -> Option<Self> {
        let granule = GRANULE as usize;
        let length = bytes as usize + granule;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, wherever the kernel puts it.
        let raw = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
        if raw == libc::MAP_FAILED {
            return None;
        }
        let (raw, address) = (raw as usize, (raw as usize).next_multiple_of(granule));
        let end = address + bytes as usize;
        // SAFETY: the parts before and behind the aligned part of the mapping just made.
        unsafe {
            if address > raw {
                libc::munmap(raw as *mut c_void, address - raw);
            }
            if raw + length > end {
                libc::munmap(end as *mut c_void, raw + length - end);
            }
        }
        let segment = Self { address, bytes: bytes as usize, number: None, locked_in: None };
        segment.keep_private();
        Some(segment)
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

    /// Makes the kernel find the pages, by several threads if there are processors for them; the driver does it with one.
    pub(super) fn touch(&self) {
        const PAGE: usize = 4096;
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (processors / 2).min(MOST_THREADS);
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
                let _ = std::thread::Builder::new().name("nvshare-host".to_owned()).spawn_scoped(scope, work);
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
        assert!(Segment::of_scheduler(segment, &file).is_none());
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
        segment.touch();
        // SAFETY: within the segment.
        unsafe { (segment.address as *mut u8).add(segment.bytes - 1).write_volatile(7) };
    }
}
