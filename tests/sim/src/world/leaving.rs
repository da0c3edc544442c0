//! How blocks leave a card, and what the driver keeps of them.
//!
//! With `NVSIM_KEEPS_PAGES=1`, the frame of a block that has moved to the host stays with the driver's managed memory, as on a card (measured): it
//! is not free for anything else. Managed memory uses it again at once. Other memory gets it back at a price for each call that lacks frames, whatever
//! the call's size: so a large call gets as many at once.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::{BLOCK, Place, Way, World};

/// The time of a call that takes frames back (measured for 32 MiB; 60 ms for 2 GiB).
const TAKING_BACK: Duration = Duration::from_millis(38);

/// Memory of a card is moved to the host until this is dropped.
#[derive(Debug)]
pub(crate) struct Leaving<'a>(pub(super) &'a AtomicU32);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl World {
    /// Makes room by moving out the block that was not used for longest. Under the card's lock.
    pub(super) fn push_out(&self, gpu: usize) -> Option<()> {
        let at = self.gpu(gpu);
        let mut oldest: Option<(u64, u32)> = None;
        // SAFETY: the card's field, under its lock.
        for index in 0..unsafe { (*at).high } {
            // SAFETY: an existing block, under the card's lock.
            let block = unsafe { *self.block(gpu, index) };
            if block.place == Place::Device
                && block.pinned == 0
                && oldest.is_none_or(|(use_, _)| block.last_use < use_)
            {
                oldest = Some((block.last_use, index));
            }
        }
        let (_, index) = oldest?;
        // SAFETY: an existing block on the card, under its lock.
        unsafe {
            let block = self.block(gpu, index);
            self.copy(gpu, index, (*block).frame, Way::ToHost);
            self.release_frame(gpu, (*block).frame);
            (*block).place = Place::Host;
            (*at).moved.pushed_out.fetch_add(BLOCK, Ordering::Relaxed);
        }
        Some(())
    }

    /// Moves a block's bytes to the host, where memory never touched gets its pages. False: they are there, or cannot go there.
    ///
    /// # Safety
    /// An existing block, under the card's lock.
    pub(super) unsafe fn move_to_host(&self, gpu: usize, index: u32) -> bool {
        // SAFETY: promised by the caller.
        unsafe {
            let block = self.block(gpu, index);
            match (*block).place {
                Place::Device if (*block).pinned == 0 => {
                    self.copy(gpu, index, (*block).frame, Way::ToHost);
                    self.release_frame(gpu, (*block).frame);
                    self.keep(gpu, index);
                }
                Place::Untouched => std::ptr::write_bytes(self.host_bytes(gpu, index), 0, self.real_block),
                Place::Device | Place::Free | Place::Host => return false,
            }
            (*block).place = Place::Host;
        }
        true
    }

    /// Moves a block to the host. Memory never touched gets its pages there.
    pub(crate) fn evict(&self, gpu: usize, index: u32) -> Duration {
        let _held = self.hold(gpu, false);
        // SAFETY: an existing block, under the card's lock.
        unsafe {
            if !self.move_to_host(gpu, index) {
                return Duration::ZERO;
            }
            let at = &*self.gpu(gpu);
            at.moved.evicted.fetch_add(BLOCK, Ordering::Relaxed);
            if self.here(gpu).running.load(Ordering::SeqCst) {
                at.moved.evicted_in_use.fetch_add(BLOCK, Ordering::Relaxed);
            }
        }
        Duration::from_secs_f64(BLOCK as f64 / self.config.to_host)
    }

    /// The frame that a block has just left stays with the driver.
    ///
    /// # Safety
    /// An existing block, under the card's lock.
    unsafe fn keep(&self, gpu: usize, index: u32) {
        if self.config.keeps_pages {
            // SAFETY: promised by the caller.
            unsafe {
                (*self.block(gpu, index)).keeps = 1;
                (*self.gpu(gpu)).kept_frames += 1;
            }
        }
    }

    /// Nothing is kept for a block any more.
    ///
    /// # Safety
    /// An existing block, under the card's lock.
    pub(super) unsafe fn keep_no_more(&self, gpu: usize, index: u32) {
        // SAFETY: promised by the caller.
        unsafe {
            let block = self.block(gpu, index);
            (*self.gpu(gpu)).kept_frames -= (*block).keeps;
            (*block).keeps = 0;
        }
    }

    /// A frame that was kept for one block may have been taken for another.
    ///
    /// # Safety
    /// Under the card's lock.
    pub(super) unsafe fn keep_no_more_than_free(&self, gpu: usize) {
        let at = self.gpu(gpu);
        let mut index = 0;
        // SAFETY: the card's fields and existing blocks, under its lock.
        unsafe {
            while (*at).kept_frames > (*at).free_frames && index < (*at).high {
                self.keep_no_more(gpu, index);
                index += 1;
            }
        }
    }

    /// Makes `frames` frames free for other than managed memory, as far as they are kept.
    pub(super) fn take_back(&self, gpu: usize, frames: usize) {
        let lacking = |at: *mut super::Gpu| {
            // SAFETY: the card's fields, under its lock.
            let (free, kept) = unsafe { ((*at).free_frames, (*at).kept_frames) };
            (frames as u32).saturating_sub(free - kept).min(kept)
        };
        let at = self.gpu(gpu);
        let held = self.hold(gpu, false);
        if lacking(at) == 0 {
            return;
        }
        drop(held);
        std::thread::sleep(TAKING_BACK);
        let _held = self.hold(gpu, false);
        let (mut left, mut index) = (lacking(at), 0);
        // SAFETY: the card's fields and existing blocks, under its lock.
        unsafe {
            (*at).moved.taken_back.fetch_add(1, Ordering::Relaxed);
            while left > 0 && index < (*at).high {
                left -= (*self.block(gpu, index)).keeps;
                self.keep_no_more(gpu, index);
                index += 1;
            }
        }
    }
}
