//! The state as an administrator sees it.

use std::collections::BTreeMap;

use nvshare_proto::{ClientState, ClientStatus, GpuStatus, SchedulerStatus};

use crate::state::{Account, Client, ClientId, Gpu, Phase, Time};
use crate::{Core, sum};

/// Clients that are gone and still shown.
const GONE_KEPT: usize = 32;

impl Core {
    /// About the scheduler itself, whose process it is that the core runs in.
    #[must_use]
    pub fn status(&self, now: Time, pid: u32) -> SchedulerStatus {
        SchedulerStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid,
            uptime_s: now.as_secs(),
            scheduling: self.scheduling,
            quantum_ms: self.config.quantum.as_millis() as u64,
            restricted: false,
        }
    }

    /// A row for each GPU.
    #[must_use]
    pub fn gpu_status(&self) -> Vec<GpuStatus> {
        let row = |(&uuid, gpu): (_, &Gpu)| GpuStatus {
            gpu: uuid,
            index: None,
            name: None,
            capacity: gpu.capacity,
            allocated: sum(self
                .clients
                .values()
                .filter_map(|c| c.accounts.get(&uuid))
                .map(|a| a.usage.allocated)),
            resident: self.charged(uuid),
            overhead: sum(self.clients.values().filter_map(|c| c.accounts.get(&uuid)).map(Account::overhead)),
            quantum_ms: gpu.quantum.as_millis() as u64,
            holders: self
                .by_turn(|c| (c.phase.holds() || c.phase == Phase::Free) && c.accounts.contains_key(&uuid)),
            waiters: self
                .by_turn(|c| (c.waits() || c.phase == Phase::Chosen) && c.accounts.contains_key(&uuid)),
            turns: gpu.turns,
            switch_us: gpu.switch_summary(),
            others: None,
        };
        self.gpus.iter().map(row).collect()
    }

    /// A row for each client, and for the last few that are gone.
    #[must_use]
    pub fn client_status(&self) -> Vec<ClientStatus> {
        let gone: BTreeMap<_, _> = self.gone.iter().map(|status| (status.client, status.clone())).collect();
        gone.into_values().chain(self.clients.iter().map(|(&id, client)| describe(id, client))).collect()
    }

    pub(crate) fn remember(&mut self, id: ClientId, client: &Client) {
        if self.gone.len() == GONE_KEPT {
            self.gone.pop_front();
        }
        let row = describe(id, client);
        self.gone.push_back(ClientStatus { gone: true, state: ClientState::Gone, blocked_on: None, ..row });
    }
}

fn describe(id: ClientId, client: &Client) -> ClientStatus {
    let blocked_on = client.blocked.filter(|_| client.waits());
    ClientStatus {
        client: id,
        pid: client.pid,
        name: client.name.clone(),
        process: None,
        state: if blocked_on.is_some() { ClientState::Blocked } else { client.phase.shown(client.wants) },
        blocked_on,
        stuck: client.reported_stuck,
        gone: false,
        usage: client.accounts.values().map(|a| a.usage).collect(),
        resident: sum(client.accounts.values().map(|a| a.budget)),
        overhead: sum(client.accounts.values().map(Account::overhead)),
        held_ms: client.held.as_millis() as u64,
        waited_ms: client.waited.as_millis() as u64,
        counters: client.counters,
    }
}
