//! The host's copies of a chunk, granule by granule.

use nvshare_client::content::Hash;

use super::host_pool::Slot;

/// The host's copy of a granule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::memory) enum HostCopy {
    /// Nothing.
    None,
    /// The granule is all zero: nothing is stored. While the granule is on the card, it was so when it was last looked at.
    Zero,
    /// Its contents. While the granule is on the card, the copy is current only if the granule still has this hash.
    Data { slot: Slot, hash: Option<Hash> },
}

impl HostCopy {
    pub(in crate::memory) fn slot(self) -> Option<Slot> {
        match self {
            Self::Data { slot, .. } => Some(slot),
            Self::None | Self::Zero => None,
        }
    }
}

/// The slots that copies are in.
pub(in crate::memory) fn slots(copies: Vec<HostCopy>) -> Vec<Slot> {
    copies.into_iter().filter_map(HostCopy::slot).collect()
}

/// Gives up contents: those of the granules that `goes` names, which is told the granule's place in the chunk and the slot. Returns the slots.
pub(in crate::memory) fn drop_data(copies: &mut [HostCopy], goes: impl Fn(usize, Slot) -> bool) -> Vec<Slot> {
    let mut slots = Vec::new();
    for (index, copy) in copies.iter_mut().enumerate() {
        if let Some(slot) = copy.slot().filter(|slot| goes(index, *slot)) {
            slots.push(slot);
            *copy = HostCopy::None;
        }
    }
    slots
}
