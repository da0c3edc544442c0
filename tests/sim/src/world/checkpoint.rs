//! Blocks of a process that is off the cards: the process keeps their bytes itself.

use super::{POISON, Place, Why, World};

impl World {
    /// Takes a block off its card, for as long as the process is away. Returns its bytes; `None`: the block stays, since it is not on
    /// the card, or other processes may have it.
    pub(crate) fn take_off(&self, gpu: usize, index: u32) -> Option<Vec<u8>> {
        let _held = self.hold(gpu, false);
        // SAFETY: an existing block of this process and its frame, under the card's lock.
        unsafe {
            let block = self.block(gpu, index);
            if (*block).place != Place::Device || (*block).shared != 0 {
                return None;
            }
            let (frame, real) = ((*block).frame, (*block).real as usize);
            let bytes = std::slice::from_raw_parts(self.frame_bytes(gpu, frame), real).to_vec();
            std::ptr::write_bytes(self.frame_bytes(gpu, frame), POISON, real);
            self.release_frame(gpu, frame);
            (*block).place = Place::Untouched;
            Some(bytes)
        }
    }

    /// Brings a block back; `None`: the card is full.
    pub(crate) fn put_back(&self, gpu: usize, index: u32, bytes: &[u8]) -> Option<()> {
        self.take_back(gpu, 1);
        self.bring(gpu, index, Why::Prefetch)?;
        self.with_device_bytes(gpu, index, |place| {
            place.iter_mut().zip(bytes).for_each(|(place, byte)| *place = *byte);
        })
    }
}
