//! The GPUs that have labels of their own. A client can name any GPU: one that the machine has always has its labels, and the others as
//! long as clients use them.

use std::collections::{BTreeMap, BTreeSet};

use nvshare_core::{MAX_GPUS_PER_CLIENT, Time};
use nvshare_proto::GpuUuid;

use super::OfGpu;
use super::tenants::{OTHER, SHOWN_AFTER_END};

#[derive(Debug, Default)]
pub(super) struct Gpus {
    /// Those of the machine: others than its clients know them.
    certain: BTreeSet<GpuUuid>,
    /// Those that only clients have named.
    named: BTreeMap<GpuUuid, Named>,
}

#[derive(Debug, Default)]
struct Named {
    clients: usize,
    ended: Time,
}

impl Gpus {
    /// Notes that the machine has a GPU. Returns whether that is news.
    pub(super) fn know(&mut self, gpu: GpuUuid) -> bool {
        self.named.remove(&gpu);
        self.certain.insert(gpu)
    }

    /// The labels of a GPU that one more client uses.
    pub(super) fn join(&mut self, gpu: GpuUuid) -> OfGpu {
        let has_place = self.named.len() < MAX_GPUS_PER_CLIENT || self.named.contains_key(&gpu);
        if !self.certain.contains(&gpu) && has_place {
            self.named.entry(gpu).or_default().clients += 1;
        }
        self.shown(gpu)
    }

    /// A client that was counted there under these labels has gone.
    pub(super) fn leave(&mut self, gpu: GpuUuid, labels: &OfGpu, now: Time) {
        if let Some(named) = self.named.get_mut(&gpu).filter(|_| labels.gpu_uuid != OTHER) {
            named.clients = named.clients.saturating_sub(1);
            named.ended = now;
        }
    }

    /// The labels under which a GPU is shown.
    pub(super) fn shown(&self, gpu: GpuUuid) -> OfGpu {
        let is_known = self.certain.contains(&gpu) || self.named.contains_key(&gpu);
        let is_other = !is_known && self.named.len() >= MAX_GPUS_PER_CLIENT;
        if is_other { OfGpu { gpu_uuid: OTHER.to_owned() } } else { OfGpu::new(gpu) }
    }

    /// Forgets a GPU that only clients had named, and that none has used for long. Returns its labels.
    pub(super) fn forget_one(&mut self, now: Time) -> Option<OfGpu> {
        let is_old = |named: &Named| named.clients == 0 && named.ended + SHOWN_AFTER_END < now;
        let gpu = *self.named.iter().find(|(_, named)| is_old(named))?.0;
        self.named.remove(&gpu);
        Some(OfGpu::new(gpu))
    }
}
