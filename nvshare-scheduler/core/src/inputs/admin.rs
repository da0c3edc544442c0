//! The requests of administrators.

use std::collections::BTreeSet;

use nvshare_proto::units::Bytes;
use nvshare_proto::{EventKind, GpuUuid, SchedulerMessage};

use crate::state::client::{ClientId, Phase};
use crate::state::gpu::Gpu;
use crate::{Core, Time};

impl Core {
    /// Switches scheduling on: every client that runs becomes a holder, and clients that do not fit are asked to leave.
    pub fn switch_on(&mut self, now: Time) -> String {
        self.begin_event(now);
        if self.scheduling {
            return "scheduling was on".to_owned();
        }
        self.scheduling = true;
        self.tell_setting(EventKind::On, None, None);
        for id in self.clients.keys().copied().collect::<Vec<_>>() {
            let epoch = self.new_epoch();
            self.adopt(id, epoch);
            self.send(id, SchedulerMessage::SchedOn { epoch });
        }
        self.reconcile();
        "scheduling is on".to_owned()
    }

    /// Switches scheduling off: every client runs.
    ///
    /// # Errors
    /// When not everything fits, unless `force` is set: page faults would then move memory.
    pub fn switch_off(&mut self, force: bool, now: Time) -> Result<String, String> {
        self.begin_event(now);
        for (uuid, gpu) in &self.gpus {
            let demand = gpu.ledger.sums().allocated;
            if demand > u128::from(gpu.capacity) && !force {
                return Err(format!(
                    "{uuid}: clients have {} together and {} fit; page faults would move the rest (--force does it anyway)",
                    Bytes(u64::try_from(demand).unwrap_or(u64::MAX)),
                    Bytes(gpu.capacity)
                ));
            }
        }
        self.scheduling = false;
        self.tell_setting(EventKind::Off, None, None);
        for id in self.clients.keys().copied().collect::<Vec<_>>() {
            self.with(id, |client| {
                client.phase = Phase::Free;
                client.wants = false;
            });
            self.send(id, SchedulerMessage::SchedOff);
        }
        self.reconcile();
        Ok("scheduling is off".to_owned())
    }

    /// Asks every client for its counters, unless it still has to answer.
    pub fn ask_counters(&mut self) -> Vec<ClientId> {
        let ids: Vec<ClientId> = self.clients.keys().copied().collect();
        for &id in &ids {
            self.ask_for_counters(id);
        }
        ids
    }

    /// The GPUs that clients use.
    #[must_use]
    pub fn gpus_in_use(&self) -> BTreeSet<GpuUuid> {
        let used = |gpu: &Gpu| gpu.ledger.entries().any(|(id, _)| self.clients.contains_key(&id));
        self.gpus.iter().filter(|(_, gpu)| used(gpu)).map(|(&uuid, _)| uuid).collect()
    }
}
