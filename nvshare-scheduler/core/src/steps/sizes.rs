//! How large each GPU is, from what NVML measured, clients say, or an administrator has set.

use nvshare_proto::units::Bytes;
use nvshare_proto::{Amount, GpuUuid, SchedulerMessage};

use crate::report::warnings::Topic;
use crate::state::client::ClientId;
use crate::state::gpu::{CapacityFigures, CapacitySource, Gpu};
use crate::steps::books::Books;

/// Beyond this number of GPUs, the core forgets those that no client uses. No machine has as many: most are
/// invented by a client.
const PRUNE_UNUSED_ABOVE: usize = 256;

impl Books {
    /// Makes known the GPUs that a client is about to use. It comes before the client's accounts there, so
    /// that each GPU of an account is known.
    pub(crate) fn know_gpus_of(&mut self, uuids: &[GpuUuid]) {
        if self.state().gpus().count() >= PRUNE_UNUSED_ABOVE {
            self.forget_unused_gpus();
        }
        for &uuid in uuids {
            self.know_gpu(uuid, |config| Gpu::new(uuid, 0, CapacitySource::Clients, config.rule(uuid)));
        }
        self.queue(uuids.iter().copied());
    }

    /// Tells a client how much it may fill of a GPU that it has begun to use.
    pub(crate) fn greet(&mut self, id: ClientId, uuid: GpuUuid) {
        self.agree_on_size(uuid);
        self.tell_capacity(id, uuid);
    }

    fn tell_capacity(&mut self, id: ClientId, uuid: GpuUuid) {
        let bytes = self.state().gpu(uuid).map_or(0, |gpu| self.state().capacity(gpu, id));
        self.send(id, SchedulerMessage::Capacity(Amount { gpu: uuid, bytes }));
    }

    /// Sets the size of a GPU by what its clients say, without NVML and `--gpu-memory`. While they agree,
    /// that size holds for all of them. When they differ, each client is believed for itself, and they run
    /// one at a time.
    pub(crate) fn agree_on_size(&mut self, uuid: GpuUuid) {
        // Nobody disputes the size that NVML has measured, or that of a GPU which is not known.
        let Some(gpu) = self.state().gpu(uuid).filter(|gpu| gpu.source != CapacitySource::Certain) else {
            return;
        };
        let was = gpu.source;
        // None: its last client is gone.
        let Some((most, all_agree)) = gpu.ledger.stated_size() else { return };
        if self.state().config().fixed_memory(uuid).is_some() {
            self.set_size_by_client(uuid, most);
        } else if all_agree {
            self.set_size(
                uuid,
                CapacityFigures { available: most, ..CapacityFigures::default() },
                CapacitySource::Clients,
            );
        } else if was != CapacitySource::Disputed {
            self.change_gpu(uuid, |gpu| gpu.source = CapacitySource::Disputed);
            self.queue([uuid]);
            self.reenter(uuid);
            let text = format!(
                "clients report different sizes of {uuid}: they run one at a time; set --gpu-memory, or give the scheduler NVML"
            );
            self.warn_of_gpu(Topic::Disputed, uuid, &text);
        }
    }

    /// Writes all clients of a GPU into its ledger, and tells them what they may fill.
    fn reenter(&mut self, uuid: GpuUuid) {
        let entries = self.state().gpu(uuid).into_iter().flat_map(|gpu| gpu.ledger.entries());
        let ids: Vec<ClientId> = entries.map(|(id, _)| id).collect();
        for id in ids {
            if self.state().client(id).is_some() {
                self.rewrite_entry_on(id, uuid);
                self.tell_capacity(id, uuid);
            }
        }
    }

    /// Sets a GPU's size and source, and the capacity that follows from them.
    pub(crate) fn set_size(&mut self, uuid: GpuUuid, size: CapacityFigures, source: CapacitySource) {
        self.set_capacity(uuid, self.state().config().usable(uuid, size), source);
        self.change_gpu(uuid, |gpu| gpu.size = size);
    }

    fn set_capacity(&mut self, uuid: GpuUuid, bytes: u64, source: CapacitySource) {
        let gpu = self.know_gpu(uuid, |config| Gpu::new(uuid, bytes, source, config.rule(uuid)));
        let was = std::mem::replace(&mut gpu.source, source);
        if gpu.capacity == bytes && (was == CapacitySource::Disputed) == (source == CapacitySource::Disputed)
        {
            return;
        }
        gpu.capacity = bytes;
        self.queue_with_watchers(uuid);
        self.reenter(uuid);
    }

    /// Sets the size of a GPU, of which clients may fill a fixed number of bytes, by what a client says. The
    /// largest size that a client says bounds that number.
    pub(crate) fn set_size_by_client(&mut self, uuid: GpuUuid, total: u64) {
        let known = self.state().gpu(uuid).map(|gpu| gpu.size.available);
        if known.is_some_and(|known| known >= total) {
            return;
        }
        if let Some(fixed) = self.state().config().fixed_memory(uuid).filter(|&fixed| fixed > total) {
            let text = format!(
                "clients may fill {} of {uuid}, which has {}: more than that is not given away",
                Bytes(fixed),
                Bytes(total)
            );
            self.warn_of_gpu(Topic::TooMuch, uuid, &text);
        }
        self.set_size(
            uuid,
            CapacityFigures { available: total, ..CapacityFigures::default() },
            CapacitySource::Clients,
        );
    }
}

#[cfg(test)]
mod tests {
    use nvshare_proto::units::GIB;

    use super::*;
    use crate::state::config::Config;

    const ONE: GpuUuid = GpuUuid([1; 16]);

    #[test]
    fn a_fixed_number_is_bounded_by_the_largest_claim() {
        let mut books = Books::new(Config { gpu_memory: Some(80 * GIB), ..Config::default() });
        let mut capacity = |total| {
            books.set_size_by_client(ONE, total);
            books.state().gpu(ONE).map_or(0, |gpu| gpu.capacity)
        };
        assert_eq!(capacity(1), 1);
        assert_eq!(capacity(16 * GIB), 16 * GIB);
        assert_eq!(capacity(GIB), 16 * GIB);
    }
}
