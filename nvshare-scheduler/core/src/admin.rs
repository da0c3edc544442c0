//! What administrators ask for.

use std::collections::BTreeSet;

use nvshare_proto::units::Bytes;
use nvshare_proto::{GpuUuid, SchedulerMessage};

use crate::state::{ClientId, Phase, Time};
use crate::{Core, Output, sum};

impl Core {
    /// Switches scheduling on: everybody who runs is taken as a holder, and who does not fit is asked to leave.
    pub fn switch_on(&mut self, now: Time) -> String {
        self.advance(now);
        if self.scheduling {
            return "scheduling was on".to_owned();
        }
        self.scheduling = true;
        for id in self.clients.keys().copied().collect::<Vec<_>>() {
            let epoch = self.new_epoch();
            self.adopt(id, epoch);
            self.send(id, SchedulerMessage::SchedOn { epoch });
        }
        self.reconcile(now);
        "scheduling is on".to_owned()
    }

    /// Switches scheduling off: everybody runs.
    ///
    /// # Errors
    /// When not everything fits, unless `force`d: page faults would then move memory.
    pub fn switch_off(&mut self, force: bool, now: Time) -> Result<String, String> {
        self.advance(now);
        for (uuid, gpu) in &self.gpus {
            let demand =
                sum(self.clients.values().filter_map(|c| c.accounts.get(uuid)).map(|a| a.usage.allocated));
            if demand > gpu.capacity && !force {
                return Err(format!(
                    "{uuid}: clients have {} together and {} fit; page faults would move the rest (--force does it anyway)",
                    Bytes(demand),
                    Bytes(gpu.capacity)
                ));
            }
        }
        self.scheduling = false;
        self.deadline = None;
        for (id, client) in &mut self.clients {
            client.phase = Phase::Free;
            client.wants = false;
            self.outputs.push_back(Output::Send { client: *id, message: SchedulerMessage::SchedOff });
        }
        Ok("scheduling is off".to_owned())
    }

    /// Asks every client for its counters, unless it has still to answer.
    pub fn ask_counters(&mut self) -> Vec<ClientId> {
        let ids: Vec<ClientId> = self.clients.keys().copied().collect();
        for &id in &ids {
            if let Some(client) = self.clients.get_mut(&id)
                && !std::mem::replace(&mut client.asked_counters, true)
            {
                self.send(id, SchedulerMessage::AskCounters);
            }
        }
        ids
    }

    /// The GPUs that clients use.
    #[must_use]
    pub fn gpus_in_use(&self) -> BTreeSet<GpuUuid> {
        self.clients.values().flat_map(|client| client.accounts.keys().copied()).collect()
    }
}
