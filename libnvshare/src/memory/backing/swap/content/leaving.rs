//! A chunk that leaves: which of its granules are copied, and where.

use std::ops::Range;
use std::sync::Arc;

use nvshare_client::content::{ContentCheck, Hash};

use super::kept::drop_kept;
use super::{Looked, mode};
use crate::driver;
use crate::driver::types::{CUdeviceptr, CUresult, CUstream};
use crate::memory::backing::swap::chunks::{Part, copy_parts};
use crate::memory::mapping::GRANULE;
use crate::memory::mapping::copies::{self, HostCopy};
use crate::memory::mapping::host_pool::{self, NoSlots, Slot};
use crate::process::config::Content;
use crate::process::{counters, log};
use crate::work::contexts::Context;

/// The fate of a granule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Zero,
    /// The host's copy is current.
    Unchanged(Slot, Hash),
    Copied(Option<Hash>),
}

fn fate(had: HostCopy, seen: Option<ContentCheck>) -> Fate {
    match (had, seen) {
        (_, Some(ContentCheck::Zero)) => Fate::Zero,
        (HostCopy::Data { slot, hash: Some(hash) }, Some(ContentCheck::Data(Some(now)))) if hash == now => {
            Fate::Unchanged(slot, hash)
        }
        (_, Some(ContentCheck::Data(hash))) => Fate::Copied(hash),
        (_, None) => Fate::Copied(None),
    }
}

/// The fate of each of a chunk's granules.
fn fates(seen: &[Option<ContentCheck>], count: usize, had: &[HostCopy]) -> Vec<Fate> {
    let fate_of = |index| {
        let had = had.get(index).copied().unwrap_or(HostCopy::None);
        fate(had, seen.get(index).copied().flatten())
    };
    (0..count).map(fate_of).collect()
}

/// Bytes of a chunk that have to be copied.
pub(super) fn to_copy(seen: &[Option<ContentCheck>], count: usize, had: &[HostCopy]) -> u64 {
    let copied = fates(seen, count, had).into_iter().filter(|fate| matches!(fate, Fate::Copied(_)));
    copied.count() as u64 * GRANULE
}

/// A granule on its way out.
#[derive(Debug, Clone, Copy)]
struct Granule {
    fate: Fate,
    /// Where it is copied to, if it is. A granule that need not be is copied all the same in a test, to be compared.
    to: Option<Slot>,
}

/// A chunk on its way out, granule by granule.
#[derive(Debug)]
pub(in super::super) struct Leaving {
    granules: Vec<Granule>,
}

impl Leaving {
    /// A chunk of `bytes` at an address begins to leave; `had` are the host's copies of it. If the host has no room for the
    /// copies, those that are current are returned with the reason.
    pub(in super::super) fn begin(
        context: &Arc<Context>,
        at: CUdeviceptr,
        bytes: u64,
        had: Vec<HostCopy>,
        looked: &Looked,
    ) -> Result<Self, (Vec<HostCopy>, NoSlots)> {
        let fates = fates(looked.of(at), (bytes / GRANULE) as usize, &had);
        let is_current = |slot: &Slot| {
            fates.iter().any(|fate| matches!(fate, Fate::Unchanged(current, _) if current == slot))
        };
        let stale = copies::slots(had).into_iter().filter(|slot| !is_current(slot)).collect();
        host_pool::give_back(stale);
        let is_copied = |fate: &Fate| matches!(fate, Fate::Copied(_)) || mode() == Content::Check;
        let wanted = fates.iter().filter(|fate| is_copied(fate)).count() as u64 * GRANULE;
        let slots = match slots(context, wanted, looked) {
            Ok(slots) => slots,
            Err(why) => {
                let current = |fate| match fate {
                    Fate::Unchanged(slot, hash) => HostCopy::Data { slot, hash: Some(hash) },
                    Fate::Zero | Fate::Copied(_) => HostCopy::None,
                };
                return Err((fates.into_iter().map(current).collect(), why));
            }
        };
        let mut slots = slots.into_iter();
        let granule = |fate| Granule { fate, to: if is_copied(&fate) { slots.next() } else { None } };
        Ok(Self { granules: fates.into_iter().map(granule).collect() })
    }

    /// A chunk that has no contents begins to leave.
    pub(in super::super) fn without_contents() -> Self {
        Self { granules: Vec::new() }
    }

    /// Whether anything is copied.
    pub(in super::super) fn is_copied(&self) -> bool {
        self.granules.iter().any(|granule| granule.to.is_some())
    }

    /// Bytes that are copied.
    pub(in super::super) fn copied_bytes(&self) -> u64 {
        self.granules.iter().filter(|granule| granule.to.is_some()).count() as u64 * GRANULE
    }

    /// Begins the copies of some granules, which are at this address, on a stream.
    pub(in super::super) fn copy(
        &self,
        granules: Range<usize>,
        at: CUdeviceptr,
        stream: CUstream,
    ) -> Result<(), CUresult> {
        let granules = self.granules.get(granules).unwrap_or_default();
        let part = |granule: &Granule| granule.to.map_or(Part::Nothing, Part::Copied);
        copy_parts(at, granules.iter().map(part), |part, at, bytes| match part {
            Part::Copied(slot) => driver::copy_out(slot.memory(), at, bytes, stream),
            Part::Nothing | Part::Zero => Ok(()),
        })
    }

    /// The chunk stays on the card: its copies on the host are given up.
    pub(in super::super) fn give_up(self) {
        let current = |granule: &Granule| match granule.fate {
            Fate::Unchanged(slot, _) => Some(slot),
            Fate::Zero | Fate::Copied(_) => None,
        };
        let slots = self.granules.iter().flat_map(|granule| [granule.to, current(granule)]);
        host_pool::give_back(slots.flatten().collect());
    }

    /// The host's copies of the chunk, after its copies are complete.
    pub(in super::super) fn landed(self) -> Vec<HostCopy> {
        let mut spare = Vec::new();
        let (mut zeros, mut unchanged) = (0, 0);
        let land = |Granule { fate, to }: Granule| match (fate, to) {
            (Fate::Copied(hash), Some(slot)) => HostCopy::Data { slot, hash },
            // Not possible: each granule that is copied has a slot.
            (Fate::Copied(_), None) => HostCopy::None,
            (Fate::Zero, Some(slot)) if !is_zero(slot) => wrong("of zeros", slot),
            (Fate::Unchanged(old, _), Some(slot)) if !is_same(old, slot) => {
                spare.push(old);
                wrong("that had not changed", slot)
            }
            (Fate::Zero, checked) => {
                spare.extend(checked);
                zeros += GRANULE;
                HostCopy::Zero
            }
            (Fate::Unchanged(slot, hash), checked) => {
                spare.extend(checked);
                unchanged += GRANULE;
                HostCopy::Data { slot, hash: Some(hash) }
            }
        };
        let copies = self.granules.into_iter().map(land).collect();
        host_pool::give_back(spare);
        counters::left_out(zeros, unchanged);
        copies
    }
}

/// Slots for `bytes`. Copies of memory that is on the card make room for them.
///
/// Bytes that were refused in this eviction only get slots that have become free since. To ask the scheduler, and to look at all copies,
/// takes too long for each of thousands of allocations.
fn slots(context: &Arc<Context>, bytes: u64, looked: &Looked) -> Result<Vec<Slot>, NoSlots> {
    let pool = host_pool::of(context);
    if looked.was_refused(context, bytes) {
        return pool.take_free(bytes);
    }
    let slots = match pool.take(bytes) {
        Err(NoSlots::Full) if drop_kept(context, bytes, looked) => pool.take(bytes),
        answer => answer,
    };
    if slots == Err(NoSlots::Full) {
        looked.note_refused(context, bytes);
    }
    slots
}

/// A test has found that a granule was not what it was taken for. Its copy is what counts.
fn wrong(what: &str, slot: Slot) -> HostCopy {
    log::error(format_args!("a piece {what} was not what it seemed: it would have lost its contents"));
    HostCopy::Data { slot, hash: None }
}

/// The contents of a slot.
fn contents<'a>(slot: Slot) -> &'a [u8] {
    // SAFETY: a granule of page-locked memory that the caller has, and that nothing writes: its copy is complete.
    unsafe { std::slice::from_raw_parts(slot.memory().cast::<u8>(), GRANULE as usize) }
}

fn is_zero(slot: Slot) -> bool {
    contents(slot).iter().all(|byte| *byte == 0)
}

fn is_same(one: Slot, other: Slot) -> bool {
    contents(one) == contents(other)
}
