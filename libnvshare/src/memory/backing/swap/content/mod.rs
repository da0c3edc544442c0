//! What need not be copied: pieces that are all zero, and pieces that the host has already.
//!
//! Before chunks leave, a [kernel] looks at each granule of them, at the speed of the card's memory. A granule of
//! zeros is neither copied nor stored, and comes back as a fill. One whose [hash](nvshare_client::content) is that of the
//! host's copy is not copied again: the copy of a chunk that comes back is kept for that, as long as the host has memory for
//! it. Where the kernel cannot be had, everything is copied.
//!
//! Nothing can change a granule between the look and its end: the gate is closed and work is complete when memory leaves, and
//! no gate opens before the eviction is over. Chunks count as moving during the look, so that none is freed meanwhile.

mod kernel;
mod leaving;

use std::collections::HashMap;
use std::sync::Arc;

use nvshare_client::content::Seen;
use nvshare_proto::units::MIB;

use super::chunks::take;
use crate::driver::types::CUdeviceptr;
use crate::memory::allocations::{self, Allocation};
use crate::memory::devices::Device;
use crate::memory::mapping::copies::HostCopy;
use crate::memory::mapping::host_pool::{self, Slot};
use crate::memory::mapping::{Chunk, GRANULE};
use crate::process::config::{self, Content};
use crate::process::{counters, log};
use crate::work::contexts::Context;
pub(super) use kernel::{forget_context, prepare};
pub(super) use leaving::Leaving;

/// Which pieces are not copied.
fn mode() -> Content {
    config::get().map_or(Content::Off, |config| config.content)
}

/// What is known of chunks that are about to leave, by their addresses.
#[derive(Debug, Default)]
pub(super) struct Looked {
    seen: HashMap<CUdeviceptr, Vec<Option<Seen>>>,
    /// The counters before the eviction.
    before: (u64, u64),
}

/// A chunk that is looked at, and counts as moving meanwhile.
#[derive(Debug)]
struct Held {
    allocation: Arc<Allocation>,
    /// The context in which it moves.
    context: Arc<Context>,
    index: usize,
    at: CUdeviceptr,
    bytes: u64,
}

/// Looks at the chunks that leave first when `wanted` bytes of a device have to leave.
pub(super) fn look(device: &Device, wanted: u64) -> Looked {
    let mut looked = Looked { seen: HashMap::new(), before: counters::not_copied() };
    if mode() == Content::Off || wanted == 0 {
        return looked;
    }
    let mut held = Vec::new();
    let mut left = wanted;
    'all: for allocation in allocations::of_device(device.ordinal) {
        let Some(mapped) = allocation.mapped.as_ref().filter(|mapped| !mapped.is_pinned()) else { continue };
        for index in (0..mapped.count()).rev() {
            if left == 0 {
                break 'all;
            }
            let on_card = |chunk: &mut Chunk| chunk.physical.map(|_| (chunk.offset, chunk.bytes));
            if let Some((offset, bytes)) = take(&allocation, mapped, index, on_card) {
                let at = allocation.base + offset;
                let (allocation, context) = (Arc::clone(&allocation), allocation.place());
                held.push(Held { allocation, context, index, at, bytes });
                left = left.saturating_sub(bytes);
            }
        }
    }
    // Chunks of one context are looked at together.
    let context = |held: &Held| Arc::as_ptr(&held.context);
    held.sort_by_key(context);
    for chunks in held.chunk_by(|one, other| context(one) == context(other)) {
        let Some(first) = chunks.first() else { continue };
        let granules = |held: &Held| (held.at..held.at + held.bytes).step_by(GRANULE as usize);
        // Memory of an ended context may have moved over to this one.
        prepare(&first.context);
        let pieces: Vec<CUdeviceptr> = chunks.iter().flat_map(granules).collect();
        if let Some(seen) = kernel::look(&first.context, &pieces) {
            let mut seen = seen.into_iter();
            for held in chunks {
                let of_chunk = seen.by_ref().take((held.bytes / GRANULE) as usize).collect();
                looked.seen.insert(held.at, of_chunk);
            }
        }
    }
    for held in held {
        held.allocation.mapped.as_ref().and_then(|mapped| mapped.settle(held.index, |_| ()));
    }
    looked
}

impl Looked {
    /// What is known of the granules of a chunk.
    fn of(&self, at: CUdeviceptr) -> &[Option<Seen>] {
        self.seen.get(&at).map_or(&[], Vec::as_slice)
    }

    /// Logs what the eviction did not have to copy.
    pub(super) fn log(&self) {
        let (zeros, unchanged) = counters::not_copied();
        let (zeros, unchanged) = (zeros - self.before.0, unchanged - self.before.1);
        if zeros + unchanged > 0 {
            log::info(format_args!(
                "not copied: {} MiB of zeros, {} MiB that had not changed",
                zeros / MIB,
                unchanged / MIB
            ));
        }
    }
}

/// A chunk is on the card again: what stays of the host's copies, and the slots that are not needed any more.
pub(super) fn keep(copies: Vec<HostCopy>) -> (Vec<HostCopy>, Vec<Slot>) {
    let mut free = Vec::new();
    let keep = |copy| match copy {
        HostCopy::Data { hash: Some(_), .. } => copy,
        HostCopy::Data { slot, hash: None } => {
            free.push(slot);
            HostCopy::None
        }
        HostCopy::None | HostCopy::Zero => HostCopy::None,
    };
    let kept: Vec<HostCopy> = copies.into_iter().map(keep).collect();
    let any = kept.iter().any(|copy| *copy != HostCopy::None);
    (if any { kept } else { Vec::new() }, free)
}

/// Gives up copies of chunks that are on the card, `bytes` of them if there are so many. Those that leave last go first.
/// Returns whether there were any.
fn drop_kept(context: &Arc<Context>, bytes: u64) -> bool {
    let mut dropped = 0;
    for allocation in allocations::of_device(context.device()).iter().rev() {
        let Some(mapped) = allocation.mapped.as_ref().filter(|_| Arc::ptr_eq(&allocation.place(), context))
        else {
            continue;
        };
        for chunk in mapped.lock().iter_mut().filter(|chunk| chunk.physical.is_some() && !chunk.moving) {
            if dropped >= bytes {
                return true;
            }
            let slots = crate::memory::mapping::copies::slots(std::mem::take(&mut chunk.host));
            dropped += slots.len() as u64 * GRANULE;
            host_pool::give_back(slots);
        }
    }
    if dropped > 0 {
        log::debug(format_args!("gave up {} MiB of copies of memory that is on the card", dropped / MIB));
    }
    dropped > 0
}
