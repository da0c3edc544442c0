//! In which order chunks move.
//!
//! The list of allocations alone says which chunks leave, so they are the same each time. Their order follows from their
//! contents. A chunk that is zero, or has not changed, makes room at once. The memory of the next client can come while other
//! chunks are copied out, so such a chunk does not wait behind them. Chunks that come back are copied as fast as the link
//! carries them, and chunks that need no copy come meanwhile.

use std::collections::VecDeque;
use std::sync::Arc;

use super::content::Looked;
use crate::memory::allocations::{self, Allocation};
use crate::memory::devices::Device;
use crate::memory::mapping::GRANULE;

/// A chunk that is to move.
#[derive(Debug)]
pub(super) struct ChunkToMove {
    pub(super) allocation: Arc<Allocation>,
    pub(super) index: usize,
    bytes: u64,
    /// Bytes of it that have to be copied.
    copied: u64,
}

/// Chunks that are to move.
#[derive(Debug, Default)]
pub(super) struct MoveQueue {
    copied: VecDeque<ChunkToMove>,
    others: VecDeque<ChunkToMove>,
}

impl MoveQueue {
    fn add(&mut self, place: ChunkToMove) {
        if place.copied > 0 { &mut self.copied } else { &mut self.others }.push_back(place);
    }

    /// The chunk that moves next. While the link is `busy`, a chunk that needs no copy comes first.
    pub(super) fn next(&mut self, busy: bool) -> Option<ChunkToMove> {
        let [first, second] = if busy || self.copied.is_empty() {
            [&mut self.others, &mut self.copied]
        } else {
            [&mut self.copied, &mut self.others]
        };
        first.pop_front().or_else(|| second.pop_front())
    }

    /// Leaves out the chunks that have to be copied.
    pub(super) fn drop_copies(&mut self) {
        self.copied.clear();
    }

    /// Whether all that is left has to be copied.
    pub(super) fn has_only_copies(&self) -> bool {
        self.others.is_empty()
    }
}

/// The chunks that leave if `wanted` bytes of a device have to. Chunks with the least to copy come first, as they make room
/// soonest.
pub(super) fn leaving(device: &Device, wanted: u64, looked: &Looked) -> MoveQueue {
    let (mut order, mut left) = (MoveQueue::default(), wanted);
    'all: for allocation in allocations::of_device(device.ordinal) {
        let Some(mapped) = allocation.mapped.as_ref().filter(|mapped| !mapped.is_pinned()) else { continue };
        for (index, chunk) in mapped.lock().iter().enumerate().rev() {
            if left == 0 {
                break 'all;
            }
            if chunk.physical.is_none() || chunk.moving {
                continue;
            }
            let copied = looked.to_copy(allocation.base + chunk.offset, chunk.bytes, &chunk.host);
            order.add(ChunkToMove { allocation: Arc::clone(&allocation), index, bytes: chunk.bytes, copied });
            left = left.saturating_sub(chunk.bytes);
        }
    }
    let percent_to_copy = |place: &ChunkToMove| place.copied / GRANULE * 100 / (place.bytes / GRANULE).max(1);
    order.copied.make_contiguous().sort_by_key(percent_to_copy);
    order
}

/// The chunks of a device that are not on the card.
pub(super) fn coming(device: &Device) -> MoveQueue {
    let mut order = MoveQueue::default();
    for allocation in allocations::of_device(device.ordinal) {
        let Some(mapped) = &allocation.mapped else { continue };
        // Memory that was given up is not absent any more.
        if allocation.residency().absent_bytes() == 0 {
            continue;
        }
        for (index, chunk) in mapped.lock().iter().enumerate() {
            if chunk.physical.is_none() {
                let copied = chunk.host.iter().filter(|copy| copy.slot().is_some()).count() as u64 * GRANULE;
                order.add(ChunkToMove {
                    allocation: Arc::clone(&allocation),
                    index,
                    bytes: chunk.bytes,
                    copied,
                });
            }
        }
    }
    order
}
