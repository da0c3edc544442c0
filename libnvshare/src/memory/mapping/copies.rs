//! What the host has of a chunk, granule by granule.

use nvshare_client::content::Hash;

use super::host_pool::Slot;

/// What the host has of a granule.
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

/// The copies without contents, and the slots that the contents were in.
pub(in crate::memory) fn without_data(mut copies: Vec<HostCopy>) -> (Vec<HostCopy>, Vec<Slot>) {
    let mut slots = Vec::new();
    for copy in &mut copies {
        if let Some(slot) = copy.slot() {
            slots.push(slot);
            *copy = HostCopy::None;
        }
    }
    (copies, slots)
}
