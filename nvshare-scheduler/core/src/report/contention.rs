//! GPUs whose clients have more memory together than fits: some of it will have to leave, though nobody waits yet.

use nvshare_proto::{GpuUuid, MemoryMode};

use crate::state::State;
use crate::state::client::ClientId;
use crate::state::gpu::Gpu;
use crate::state::ledger::Entry;

/// A GPU on which not all memory of its clients fits. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contended {
    /// The GPU.
    pub gpu: GpuUuid,
    /// What clients have beyond its capacity.
    pub beyond: u64,
    /// The most that one client has there: no more has to leave for it at a time.
    pub largest: u64,
    /// What clients have that is copied to the host when it leaves, of each that has any; in the order of their numbers.
    pub movable: Vec<(ClientId, u64)>,
}

impl State {
    /// The GPUs on which memory will have to leave. Looks at all clients of such a GPU.
    pub(crate) fn contended(&self) -> Vec<Contended> {
        let gpus = self.gpus().filter(|gpu| self.is_scheduling() && gpu.capacity > 0);
        gpus.filter_map(|gpu| self.contention_on(gpu)).collect()
    }

    fn contention_on(&self, gpu: &Gpu) -> Option<Contended> {
        let beyond = gpu.ledger.sums().allocated.saturating_sub(u128::from(gpu.capacity));
        if beyond == 0 {
            return None;
        }
        let has_any = |(_, entry): &(ClientId, &Entry)| entry.allocated > 0;
        // Memory of one client that is larger than the GPU leaves for nobody.
        if gpu.ledger.entries().filter(has_any).count() < 2 {
            return None;
        }
        let largest = gpu.ledger.entries().map(|(_, entry)| entry.allocated).max().unwrap_or(0);
        let movable = |(id, _)| {
            let client = self.client(id).filter(|client| client.memory == MemoryMode::Swap)?;
            let usage = client.accounts.get(&gpu.uuid)?.usage;
            Some((id, usage.allocated.saturating_sub(usage.immovable)))
        };
        Some(Contended {
            gpu: gpu.uuid,
            beyond: u64::try_from(beyond).unwrap_or(u64::MAX),
            largest: largest.min(gpu.capacity),
            movable: gpu.ledger.entries().filter_map(movable).filter(|(_, bytes)| *bytes > 0).collect(),
        })
    }
}
