//! How much of the host's memory one client may have: as much as may have to leave its GPUs, and a little more.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nvshare_proto::units::MIB;
use nvshare_proto::{GpuUuid, SEGMENT};

use super::worker::GRANULE;

/// Bytes that a client may have allocated and not said yet.
const UNSAID: u64 = 64 * MIB;

/// As many bytes as a client may have. Its connection writes it, and the thread that hands out memory reads it.
#[derive(Debug, Clone)]
pub(super) struct MovableBytes(Arc<AtomicU64>);

/// Every process has a granule that is for none of its memory.
impl Default for MovableBytes {
    fn default() -> Self {
        Self(Arc::new(GRANULE.into()))
    }
}

impl MovableBytes {
    /// These bytes may leave each GPU. The pool of each keeps up to a segment for which it has no use.
    pub(super) fn set(&self, movable: &BTreeMap<GpuUuid, u64>) {
        let with_spare = |bytes: &u64| bytes.saturating_add(SEGMENT.min(*bytes));
        let most = movable.values().map(with_spare).fold(UNSAID, u64::saturating_add);
        // The question that depends on it goes to the thread later, through a channel.
        self.0.store(most, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
