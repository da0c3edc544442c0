//! The page of limits that this process shares with the other processes of its tenant. It comes with the scheduler's first
//! frame. Without a scheduler, each process enforces the limit alone.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nvshare_client::TenantQuota;
use nvshare_proto::GpuUuid;
use nvshare_proto::quota::Page;

use crate::process::lifecycle;

/// This process's place in its tenant's page, for one GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QuotaCell {
    page: &'static Page,
    row: usize,
    column: usize,
}

impl QuotaCell {
    /// The tenant's processes that have memory on the GPU, by their own process numbers, and the bytes of each.
    pub(crate) fn processes(&self) -> Vec<(u32, u64)> {
        self.page.processes(self.column).collect()
    }
}

impl TenantQuota for QuotaCell {
    fn used(&self) -> u64 {
        self.page.used(self.column)
    }

    fn charge(&self, bytes: u64, limit: u64) -> Result<(), u64> {
        // A forked child has the row of its parent, and none of its memory.
        if lifecycle::is_forked() { Ok(()) } else { self.page.charge(self.row, self.column, bytes, limit) }
    }

    fn discharge(&self, bytes: u64) {
        if !lifecycle::is_forked() {
            self.page.discharge(self.row, self.column, bytes);
        }
    }
}

/// A tenant's page, mapped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MappedPage {
    page: &'static Page,
    row: usize,
}

impl MappedPage {
    /// Maps the page that the scheduler sent. The page of a session stays mapped, as a thread may be reading it at any time.
    /// There is one such page for each connection to a scheduler.
    pub(crate) fn map(descriptor: &OwnedFd, row: usize) -> io::Result<Self> {
        let size = size_of::<Page>();
        // The file must be sealed against shrinking, as the scheduler's pages are: reading beyond its end would be fatal.
        // SAFETY: an open descriptor.
        let seals = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: zeroes are a valid `stat`, which the call fills.
        let length = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            if libc::fstat(descriptor.as_raw_fd(), &raw mut stat) == 0 { stat.st_size } else { 0 }
        };
        if length < size as libc::off_t {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let fd = descriptor.as_raw_fd();
        // SAFETY: a new mapping of a file of this size at least.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), size, protection, libc::MAP_SHARED, fd, 0) };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: mapped with this size until `unmap`, whose caller promises that the page is not in use. It consists of
        // atomics, for which all bytes are valid.
        let page = unsafe { &*page.cast::<Page>() };
        page.enter(row, std::process::id());
        Ok(Self { page, row })
    }

    /// Unmaps the page.
    ///
    /// # Safety
    /// Neither the page nor a seat of it is used any more.
    pub(crate) unsafe fn unmap(self) {
        let page: *const Page = self.page;
        // SAFETY: mapped by `map` with this size; promised by the caller.
        unsafe { libc::munmap(page.cast_mut().cast(), size_of::<Page>()) };
    }

    /// The seat for a GPU.
    pub(crate) fn cell(&self, gpu: GpuUuid) -> Option<QuotaCell> {
        Some(QuotaCell { page: self.page, row: self.row, column: self.page.column(gpu)? })
    }
}
