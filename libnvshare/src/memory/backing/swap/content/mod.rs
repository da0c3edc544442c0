//! Pieces that need not be copied, because they are all zero or the host has them already.
//!
//! Before chunks leave, a [kernel] looks at each granule of them, at the speed of the card's memory. A granule of zeros is
//! neither copied nor stored, and comes back as a fill. A piece is not copied again if its [hash](nvshare_client::content) is
//! that of the host's copy. The copy of a chunk that comes back is kept for that, as long as the host has memory for it. Where
//! the kernel cannot be had, everything is copied.
//!
//! Nothing can change a granule between the look and its end. The gate is closed and work is complete when memory leaves, and
//! no gate opens before the eviction is over. Other processes cannot get the memory from the look on. Chunks count as moving during
//! the look, so that none is freed meanwhile.

mod kept;
mod kernel;
mod leaving;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use nvshare_client::content::ContentCheck;
use nvshare_proto::units::MIB;

use super::chunks::take;
use crate::driver::types::CUdeviceptr;
use crate::memory::allocations::{self, Allocation};
use crate::memory::devices::Device;
use crate::memory::exports;
use crate::memory::mapping::copies::HostCopy;
use crate::memory::mapping::{Chunk, GRANULE, Mapped};
use crate::process::config::{self, Content};
use crate::process::lock::lock;
use crate::process::{counters, log};
use crate::work::contexts::Context;
pub(super) use kept::{give_way, keep};
pub(super) use kernel::{forget_context, is_loading, prepare};
pub(in crate::memory) use kernel::{has_kernel, launch_kernel};
pub(super) use leaving::Leaving;

/// Which pieces are not copied.
fn mode() -> Content {
    config::get().map_or(Content::Off, |config| config.content)
}

/// The knowledge of one eviction.
#[derive(Debug)]
pub(super) struct Looked {
    /// The answers about chunks that are about to leave, by their addresses.
    seen: HashMap<CUdeviceptr, Vec<Option<ContentCheck>>>,
    /// Contexts, and the bytes that the host had no memory for there.
    refused: Mutex<Vec<(Arc<Context>, u64)>>,
    /// The counters before the eviction.
    before: (u64, u64),
    /// No chunk is held for a [guess] while chunks leave: it would be passed over.
    _alone: RwLockReadGuard<'static, ()>,
}

/// Held for reading while chunks leave, and for writing while memory is looked at that stays.
static LOOKS: RwLock<()> = RwLock::new(());

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
    let alone = LOOKS.read().unwrap_or_else(PoisonError::into_inner);
    let (refused, before) = (Mutex::default(), counters::not_copied());
    let mut looked = Looked { seen: HashMap::new(), refused, before, _alone: alone };
    if mode() == Content::Off || wanted == 0 {
        return looked;
    }
    // From here on no other process gets the memory, and none that is looked at has it.
    let held = hold(device, wanted, |allocation, _| exports::withdraw(allocation.id));
    each_seen(&held, |held, seen| {
        looked.seen.insert(held.at, seen);
    });
    let_go(held);
    looked
}

/// Looks at memory of a device of which nothing is known, while the program runs. Memory that is zero now is expected to be
/// zero when it leaves, and needs no memory of the host. Memory that leaves is looked at again.
pub(super) fn guess(device: &Device) {
    if mode() == Content::Off {
        return;
    }
    // Memory that leaves at this moment is looked at for itself.
    let Ok(_alone) = LOOKS.try_write() else { return };
    let guessed = |allocation: &Allocation, chunk: &mut Chunk| {
        let is_programs = allocation.mapped.as_ref().is_some_and(Mapped::is_programs);
        // The program can unmap its own while its work goes on, and does not wait for that.
        chunk.guessed = chunk.host.is_empty() && !is_programs;
        chunk.guessed
    };
    let held = hold(device, u64::MAX, guessed);
    each_seen(&held, |held, seen| {
        let guess = |seen: Option<ContentCheck>| {
            if seen == Some(ContentCheck::Zero) { HostCopy::Zero } else { HostCopy::None }
        };
        let guesses: Vec<HostCopy> = seen.into_iter().map(guess).collect();
        if let Some(mapped) = held.allocation.mapped.as_ref()
            && let Some(chunk) = mapped.lock().get_mut(held.index)
        {
            chunk.host = guesses;
        }
    });
    let_go(held);
}

/// Holds chunks on the card that are `wanted`, in the order in which they leave, up to `bytes`.
fn hold(device: &Device, bytes: u64, wanted: impl Fn(&Allocation, &mut Chunk) -> bool) -> Vec<Held> {
    let mut held = Vec::new();
    let mut left = bytes;
    'all: for allocation in allocations::of_device(device.ordinal) {
        let Some(mapped) = allocation.mapped.as_ref().filter(|mapped| !mapped.is_pinned()) else { continue };
        for index in (0..mapped.count()).rev() {
            if left == 0 {
                break 'all;
            }
            let on_card = |chunk: &mut Chunk| {
                chunk.physical.filter(|_| wanted(&allocation, chunk)).map(|_| (chunk.offset, chunk.bytes))
            };
            if let Some((offset, bytes)) = take(&allocation, mapped, index, on_card) {
                let at = allocation.base + offset;
                let (allocation, context) = (Arc::clone(&allocation), allocation.context_to_move_in());
                held.push(Held { allocation, context, index, at, bytes });
                left = left.saturating_sub(bytes);
            }
        }
    }
    // Chunks of one context are looked at together.
    held.sort_by_key(|held| Arc::as_ptr(&held.context));
    held
}

/// Looks at the chunks that are held, and calls `each` with what is seen of the granules of one.
fn each_seen(held: &[Held], mut each: impl FnMut(&Held, Vec<Option<ContentCheck>>)) {
    for chunks in held.chunk_by(|one, other| Arc::ptr_eq(&one.context, &other.context)) {
        let Some(first) = chunks.first() else { continue };
        let granules = |held: &Held| (held.at..held.at + held.bytes).step_by(GRANULE as usize);
        // Memory of an ended context may have moved over to this one.
        prepare(&first.context);
        let pieces: Vec<CUdeviceptr> = chunks.iter().flat_map(granules).collect();
        if let Some(seen) = kernel::look(&first.context, &pieces) {
            let mut seen = seen.into_iter();
            for held in chunks {
                each(held, seen.by_ref().take((held.bytes / GRANULE) as usize).collect());
            }
        }
    }
}

fn let_go(held: Vec<Held>) {
    for held in held {
        held.allocation.mapped.as_ref().and_then(|mapped| mapped.settle(held.index, |_| ()));
    }
}

impl Looked {
    /// The answers about the granules of a chunk.
    fn of(&self, at: CUdeviceptr) -> &[Option<ContentCheck>] {
        self.seen.get(&at).map_or(&[], Vec::as_slice)
    }

    /// Whether any chunk was looked at.
    pub(super) fn is_any(&self) -> bool {
        !self.seen.is_empty()
    }

    /// Bytes of a chunk that have to be copied, if the host has these copies of it.
    pub(super) fn to_copy(&self, at: CUdeviceptr, bytes: u64, had: &[HostCopy]) -> u64 {
        leaving::to_copy(self.of(at), (bytes / GRANULE) as usize, had)
    }

    /// Whether the host had no memory for as many bytes, or fewer, in a context.
    fn was_refused(&self, context: &Arc<Context>, bytes: u64) -> bool {
        lock(&self.refused).iter().any(|(of, least)| Arc::ptr_eq(of, context) && *least <= bytes)
    }

    /// Notes that the host has no memory for bytes in a context.
    fn note_refused(&self, context: &Arc<Context>, bytes: u64) {
        lock(&self.refused).push((Arc::clone(context), bytes));
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
