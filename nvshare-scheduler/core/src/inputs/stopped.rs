//! Processes that are stopped, as by Ctrl-Z. They answer nothing until they go on: they get nothing, and nobody waits for them.

use std::collections::BTreeSet;

use nvshare_proto::GpuUuid;
use nvshare_proto::units::Bytes;

use crate::Core;
use crate::report::warnings::Topic;
use crate::state::client::{Client, ClientId, Phase};

impl Core {
    /// Clients whose processes may be stopped to the harm of others, and those that are: the caller looks at them now and then.
    #[must_use]
    pub fn suspects(&self) -> Vec<ClientId> {
        let is_wanted = |uuid: &GpuUuid| {
            self.gpus.get(uuid).is_some_and(|gpu| {
                gpu.ledger.count_waiting() + gpu.ledger.next().len() + gpu.ledger.needy().len() > 0
            })
        };
        let wanted: BTreeSet<GpuUuid> = self.gpus.keys().copied().filter(is_wanted).collect();
        let is_near = |client: &Client| client.accounts.keys().any(|uuid| wanted.contains(uuid));
        let near = self.clients.iter().filter(|(_, client)| client.stopped || is_near(client));
        near.map(|(&id, _)| id).collect()
    }

    /// A client's process was stopped, or goes on.
    pub(crate) fn on_stopped(&mut self, id: ClientId, stopped: bool) {
        let (now, until) = (self.now, self.now + self.config.grace);
        if self.clients.get(&id).is_none_or(|client| client.stopped == stopped) {
            return;
        }
        self.with(id, |client| {
            client.stopped = stopped;
            client.may_go_on_until = Some(until).filter(|_| stopped);
            match &mut client.phase {
                // The answer that is due does not come.
                Phase::Granted { until: due, .. } | Phase::Dropping { due, .. } if stopped => *due = now,
                _ => {}
            }
            if !stopped {
                // It can be asked again.
                client.accounts.values_mut().for_each(|account| account.stays = None);
            }
        });
        for &member in self.unit(id).iter() {
            self.enter(member);
        }
        // Its gang waits with it.
        self.dirty.extend(self.gpus_of(&self.unit(id)));
        if let Some(Client { name, pid, accounts, .. }) = self.clients.get(&id).filter(|_| stopped) {
            let keeps = Bytes(accounts.values().map(|account| account.room).fold(0, u64::saturating_add));
            let text = format!(
                "client {id} ({name}, pid {pid}) is stopped, and keeps {keeps}; `kill -CONT {pid}` lets it go on, and \
                 `kill -KILL {pid}` frees its memory"
            );
            self.warn_of_client(Topic::Stuck, id, None, &text);
        }
    }

    /// Whether a process of a unit is stopped: the others would wait for it on the GPU.
    pub(crate) fn is_stopped(&self, unit: &[ClientId]) -> bool {
        unit.iter().any(|id| self.clients.get(id).is_some_and(|client| client.stopped))
    }
}
