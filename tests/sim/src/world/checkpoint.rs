//! Blocks of a process that is off the cards: the process keeps their bytes itself.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use super::{Block, MAX_GPUS, POISON, Place, Sort, Why, World};
use crate::process::{Failure, INVALID_VALUE};

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

    /// The card behind a number that this process has for a card.
    pub(crate) fn card(&self, gpu: usize) -> usize {
        self.cards.get(gpu).map_or(gpu, |card| card.load(Ordering::Relaxed))
    }

    /// The number that this process has for a card that it sees.
    pub(crate) fn own_number(&self, card: usize) -> Option<usize> {
        self.config.visible.iter().copied().find(|&gpu| self.card(gpu) == card)
    }

    /// The UUID of the card behind a number.
    pub(crate) fn uuid(&self, gpu: usize) -> Uuid {
        let mut uuid = *b"\x51\x60\0\0\0\0\x40\0\x80\0\0\0\0\0\0\0";
        uuid[15] = self.card(gpu) as u8;
        uuid
    }

    /// The cards behind the numbers of this process, if those that it sees change places like this.
    pub(crate) fn places_by(&self, pairs: &[[Uuid; 2]]) -> Result<Cards, Failure> {
        let seen = &self.config.visible;
        let number = |uuid: &Uuid| seen.iter().copied().find(|&gpu| self.uuid(gpu) == *uuid);
        let mut cards: Cards = std::array::from_fn(|gpu| self.card(gpu));
        let mut named = [0; 2].map(|_: u8| BTreeSet::new());
        for [old, new] in pairs {
            let (Some(from), Some(to)) = (number(old), number(new)) else { return Err(INVALID_VALUE) };
            named[0].insert(from);
            named[1].insert(to);
            cards[from] = self.card(to);
        }
        let are_all = named.iter().all(|named| named.len() == seen.len()) && pairs.len() == seen.len();
        if are_all && !self.config.fixed_cards { Ok(cards) } else { Err(INVALID_VALUE) }
    }

    pub(crate) fn set_cards(&self, cards: Cards) {
        self.cards.iter().zip(cards).for_each(|(place, card)| place.store(card, Ordering::Relaxed));
    }

    /// A block that was taken off its card is not this process's any more.
    pub(crate) fn leave_card(&self, gpu: usize, index: u32) -> Kind {
        let _held = self.hold(gpu, false);
        // SAFETY: an existing block of this process, under the card's lock.
        let Block { pinned, real, .. } = unsafe { *self.block(gpu, index) };
        self.leave(gpu, index, std::process::id());
        Kind { pinned, real }
    }

    /// Takes blocks that have nothing on the card yet; `None`: there are none left.
    pub(crate) fn enter_card(&self, gpu: usize, kinds: &[Kind]) -> Option<Vec<u32>> {
        let blocks = self.allocate(gpu, kinds.len(), Sort::Managed)?;
        let _held = self.hold(gpu, false);
        for (&index, &Kind { pinned, real }) in blocks.iter().zip(kinds) {
            // SAFETY: an existing block of this process, under the card's lock.
            unsafe {
                let block = self.block(gpu, index);
                ((*block).pinned, (*block).real) = (pinned, real);
            }
        }
        Some(blocks)
    }
}

/// A block that is taken off its card, without its place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind {
    pinned: u32,
    real: u32,
}

pub(crate) type Uuid = [u8; 16];

/// The card behind each number that a process has for a card.
pub(crate) type Cards = [usize; MAX_GPUS];
