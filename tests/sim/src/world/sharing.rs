//! Blocks that several processes have. A block lives until the last of them gives it back, or is gone, and no descriptor of it is open.
//!
//! A descriptor is a file of the world, with a lock that ends when no process has it open any more. So it may be on its way from one
//! process to another.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Place, World};

/// The owner of blocks that only descriptors keep.
const DESCRIPTORS: u32 = u32::MAX;

impl World {
    /// The number under which other processes get an allocation of this process: the same each time.
    pub(crate) fn share(&self, gpu: usize, blocks: &[u32]) -> u64 {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let _held = self.hold(gpu, false);
        // SAFETY: existing blocks, under the card's lock.
        let block = |index: u32| unsafe { &mut *self.block(gpu, index) };
        if let Some(known) = blocks.first().map(|&index| block(index).shared).filter(|&number| number != 0) {
            return known;
        }
        let mine = u64::from(LAST.fetch_add(1, Ordering::Relaxed)) + 1;
        let number = u64::from(std::process::id()) << 32 | mine;
        blocks.iter().for_each(|&index| block(index).shared = number);
        number
    }

    /// The number under which other processes get an allocation; 0: they do not.
    pub(crate) fn number_of(&self, gpu: usize, blocks: &[u32]) -> u64 {
        let _held = self.hold(gpu, false);
        // SAFETY: an existing block, under the card's lock.
        blocks.first().map_or(0, |&index| unsafe { (*self.block(gpu, index)).shared })
    }

    /// The blocks that are shared under a number, which this process has from now on; `None`: there are none any more, or too many
    /// processes have them.
    pub(crate) fn join(&self, gpu: usize, number: u64) -> Option<Vec<u32>> {
        self.reap(gpu);
        let _held = self.hold(gpu, false);
        let me = std::process::id();
        self.own(gpu, me)?;
        // SAFETY: the card's field and existing blocks, under its lock.
        let (high, block) = unsafe { ((*self.gpu(gpu)).high, |index: u32| &mut *self.block(gpu, index)) };
        let is_it = |index: &u32| block(*index).place != Place::Free && block(*index).shared == number;
        let found: Vec<u32> = (0..high).filter(is_it).collect();
        let has_place = |index: &u32| block(*index).sharers.contains(&0);
        if number == 0 || found.is_empty() || !found.iter().all(has_place) {
            return None;
        }
        for &index in &found {
            let free = block(index).sharers.iter_mut().find(|sharer| **sharer == 0);
            free.into_iter().for_each(|sharer| *sharer = me);
        }
        Some(found)
    }

    fn descriptor_of(&self, number: u64) -> PathBuf {
        self.config.dir.join(format!("shared-{number:016x}"))
    }

    /// A new descriptor of the blocks that are shared under a number.
    pub(crate) fn describe(&self, number: u64) -> std::io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(self.descriptor_of(number))?;
        // SAFETY: a descriptor.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_SH) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(file)
    }

    /// Whether a descriptor of the blocks that are shared under a number is open.
    fn is_described(&self, number: u64) -> bool {
        if number == 0 {
            return false;
        }
        // It was never made, or this process has no descriptors left, which is not known of others.
        let Ok(file) = File::open(self.descriptor_of(number)) else { return false };
        // SAFETY: a descriptor.
        unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) != 0 }
    }

    /// Frees blocks that descriptors have kept. Under the card's lock.
    pub(super) fn free_undescribed(&self, gpu: usize) {
        // SAFETY: the card's fields and existing blocks, under its lock.
        let (count, high, block) = unsafe {
            ((*self.gpu(gpu)).described, (*self.gpu(gpu)).high, |index: u32| *self.block(gpu, index))
        };
        if count == 0 {
            return;
        }
        // SAFETY: the card's field, under its lock. Those that are kept are counted again.
        unsafe { (*self.gpu(gpu)).described = 0 };
        let kept = |index: &u32| block(*index).place != Place::Free && block(*index).owner == DESCRIPTORS;
        (0..high).filter(kept).for_each(|index| self.leave(gpu, index, DESCRIPTORS));
    }

    /// A process gives a block back, if it has it. Under the card's lock.
    pub(super) fn leave(&self, gpu: usize, index: u32, process: u32) {
        // SAFETY: an existing block, under the card's lock.
        let block = unsafe { &mut *self.block(gpu, index) };
        if block.place == Place::Free {
            return;
        }
        if block.owner != process {
            let its = block.sharers.iter_mut().find(|sharer| **sharer == process);
            its.into_iter().for_each(|sharer| *sharer = 0);
        } else if let Some(heir) = block.sharers.iter_mut().find(|sharer| **sharer != 0) {
            block.owner = std::mem::take(heir);
            // It opens no more.
            block.shared = 0;
        } else if self.is_described(block.shared) {
            block.owner = DESCRIPTORS;
            // SAFETY: the card's field, under its lock.
            unsafe { (*self.gpu(gpu)).described += 1 };
        } else {
            self.free_block(gpu, index);
        }
    }
}
