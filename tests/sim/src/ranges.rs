//! Descriptors by which other devices reach memory of a card: dma-bufs. The answers were measured (`tests/gpu/probes/replace_probe.cpp`).
//!
//! A descriptor is a file that names the memory which is in the range when it is made. Unlike a card's, it does not keep the memory alive.

use std::ffi::{c_int, c_ulonglong, c_void};
use std::sync::Arc;

use crate::memory::{self, Allocation};
use crate::process::{Failure, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, Process};

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`
const DMA_BUF: c_int = 1;
/// The host's page.
const PAGE: u64 = 4096;
const MAGIC: u64 = 0x6e76_7369_6d5f_646d;

/// A page of a range: a magic number, the card, the number of the block, and where in the block the page begins.
type Record = [u64; 4];
const RECORD_BYTES: usize = size_of::<Record>();

impl Process {
    /// A descriptor of a range of whole pages.
    pub(crate) fn export_range(
        &self,
        address: u64,
        bytes: u64,
        kind: c_int,
        flags: c_ulonglong,
    ) -> Result<c_int, Failure> {
        let is_whole = bytes > 0 && address.is_multiple_of(PAGE) && bytes.is_multiple_of(PAGE);
        let found = self.find(address, bytes).ok().filter(|found| is_whole && !found.allocation.managed);
        let found = found.filter(|_| kind == DMA_BUF).ok_or(INVALID_VALUE)?;
        if flags != 0 {
            return Err(NOT_SUPPORTED);
        }
        let record = |page| {
            let (gpu, block, in_block) = found.place(page * PAGE, bytes)?;
            Some([MAGIC, gpu as u64, block.into(), in_block])
        };
        let records = (0..bytes / PAGE).map(record).collect::<Option<Vec<Record>>>().ok_or(INVALID_VALUE)?;
        let file: Vec<u8> = records.into_iter().flatten().flat_map(u64::to_ne_bytes).collect();
        // SAFETY: a name that lives through the call, and bytes of the given length.
        unsafe {
            let descriptor = libc::memfd_create(c"nvsim-range".as_ptr(), libc::MFD_CLOEXEC);
            let written = libc::write(descriptor, file.as_ptr().cast(), file.len());
            if written == file.len() as isize { Ok(descriptor) } else { Err(INVALID_VALUE) }
        }
    }

    /// Another device reads memory by a descriptor, within a page. INVALID_HANDLE: the process does not have that memory any more.
    pub(crate) fn read_range(&self, descriptor: c_int, offset: u64, to: &mut [u8]) -> Result<(), Failure> {
        let mut record = [0u8; RECORD_BYTES];
        let place = offset / PAGE * RECORD_BYTES as u64;
        // SAFETY: writable bytes of the given length.
        let read = unsafe {
            libc::pread(descriptor, record.as_mut_ptr().cast::<c_void>(), RECORD_BYTES, place as libc::off_t)
        };
        let (words, _) = record.as_chunks::<8>();
        let [magic, gpu, block, in_block] =
            <[[u8; 8]; 4]>::try_from(words).map_err(|_| INVALID_VALUE)?.map(u64::from_ne_bytes);
        if read != RECORD_BYTES as isize || magic != MAGIC || offset % PAGE + to.len() as u64 > PAGE {
            return Err(INVALID_VALUE);
        }
        let (gpu, block) = (gpu as usize, block as u32);
        let is_there = |of: &Arc<Allocation>| of.gpu == gpu && of.blocks.all().contains(&block);
        if !self.tables().memory.values().any(is_there) {
            return Err(INVALID_HANDLE);
        }
        let piece = memory::Piece::of(gpu, block, in_block + offset % PAGE, to.len() as u64);
        self.world.with_device_bytes(gpu, block, |store| memory::read(store, piece, to)).ok_or(INVALID_HANDLE)
    }
}
