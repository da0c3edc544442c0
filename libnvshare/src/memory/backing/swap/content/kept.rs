//! Copies of memory that is on the card. They are kept because an unchanged piece need not be copied again when it leaves. They
//! are the first to go where the host has too little memory: a piece without its copy is only copied once more.

use std::collections::BTreeSet;
use std::sync::Arc;

use nvshare_client::content::ContentCheck;
use nvshare_proto::units::MIB;

use super::{LOOKS, Looked};
use crate::memory::allocations;
use crate::memory::mapping::copies::{self, HostCopy};
use crate::memory::mapping::host_pool::{self, Slot};
use crate::memory::mapping::{Chunk, GRANULE};
use crate::process::log;
use crate::work::contexts::Context;

/// A chunk is on the card again. Returns the host's copies that stay, and the slots that are not needed any more.
pub(in super::super) fn keep(copies: Vec<HostCopy>) -> (Vec<HostCopy>, Vec<Slot>) {
    let mut free = Vec::new();
    let keep = |copy| match copy {
        // A piece that was zero is expected to be zero again.
        HostCopy::Data { hash: Some(_), .. } | HostCopy::Zero => copy,
        HostCopy::Data { slot, hash: None } => {
            free.push(slot);
            HostCopy::None
        }
        HostCopy::None => HostCopy::None,
    };
    (copies.into_iter().map(keep).collect(), free)
}

/// Whether copies of the chunk may go: it is on the card, and nothing reads them.
fn may_go(chunk: &Chunk) -> bool {
    chunk.physical.is_some() && !chunk.moving
}

/// Gives up copies of chunks that are on the card, up to `bytes`. Returns whether there were any.
///
/// Pieces that leave now and have become zero need none. After these go the copies of memory that stays, beginning with the
/// memory that leaves last. Pieces that leave now and have not changed keep their copies: they would need as much memory of the
/// host again.
pub(super) fn drop_kept(context: &Arc<Context>, bytes: u64, looked: &Looked) -> bool {
    let mut dropped = 0;
    let all = allocations::of_device(context.device());
    'all: for leaves in [true, false] {
        for allocation in all.iter().rev() {
            let of_context =
                allocation.mapped.as_ref().filter(|_| Arc::ptr_eq(&allocation.context_to_move_in(), context));
            let Some(mapped) = of_context else { continue };
            for chunk in mapped.lock().iter_mut().filter(|chunk| may_go(chunk)) {
                if dropped >= bytes {
                    break 'all;
                }
                let seen = looked.of(allocation.base + chunk.offset);
                if seen.is_empty() == leaves {
                    continue;
                }
                let goes = |index: usize, _| is_spare(leaves, seen.get(index).copied().flatten());
                let slots = copies::drop_data(&mut chunk.host, goes);
                dropped += slots.len() as u64 * GRANULE;
                host_pool::give_back(slots);
            }
        }
    }
    log_dropped(dropped);
    dropped > 0
}

/// Other programs lack `bytes` of the scheduler's memory. Gives back segments of it that only hold copies of memory that is on
/// the card. While memory leaves, it needs its memory of the host itself.
pub(in super::super) fn give_way(bytes: u64) {
    let Ok(alone) = LOOKS.try_write() else { return };
    let mut copies = BTreeSet::new();
    each_on_card(|chunk| copies.extend(chunk.host.iter().filter_map(|copy| copy.slot())));
    let going = host_pool::that_free_segments(&copies, bytes);
    let mut slots = Vec::new();
    each_on_card(|chunk| slots.extend(copies::drop_data(&mut chunk.host, |_, slot| going.contains(&slot))));
    log_dropped(slots.len() as u64 * GRANULE);
    host_pool::give_back(slots);
    drop(alone);
    host_pool::give_up_unused(bytes);
}

/// Calls `each` for the chunks whose copies may go.
fn each_on_card(mut each: impl FnMut(&mut Chunk)) {
    allocations::each_mapped(|allocation| {
        let Some(mapped) = &allocation.mapped else { return };
        mapped.lock().iter_mut().filter(|chunk| may_go(chunk)).for_each(&mut each);
    });
}

/// Whether the chunks that leave now do not need the copy of a piece. `seen` is the answer about the piece, if its chunk
/// leaves.
fn is_spare(leaves: bool, seen: Option<ContentCheck>) -> bool {
    !leaves || seen == Some(ContentCheck::Zero)
}

fn log_dropped(bytes: u64) {
    if bytes > 0 {
        log::debug(format_args!("gave up {} MiB of copies of memory that is on the card", bytes / MIB));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leaves_keeps_its_copies_unless_it_is_zero() {
        assert!(is_spare(false, None) && is_spare(true, Some(ContentCheck::Zero)));
        assert!(!is_spare(true, Some(ContentCheck::Data(None))) && !is_spare(true, None));
    }
}
