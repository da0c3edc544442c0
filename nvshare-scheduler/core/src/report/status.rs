//! The state as an administrator sees it.

use std::collections::{BTreeMap, BTreeSet};

use nvshare_proto::units::saturate;
use nvshare_proto::{
    AsleepStatus, ClientState, ClientStatus, GpuStatus, GpuUuid, SchedulerStatus, ShareStatus,
};

use crate::Time;
use crate::report::Report;
use crate::state::State;
use crate::state::account::Account;
use crate::state::client::{Client, ClientId, Phase};
#[cfg(feature = "test-api")]
use crate::state::cost::HandOverCosts;
use crate::state::gpu::Gpu;
use crate::state::sleep::Sleep;

/// Clients that are gone and still listed.
const GONE_KEPT: usize = 32;

impl State {
    /// Returns the status of the scheduler itself, in whose process `pid` the core runs.
    pub(crate) fn status(&self, now: Time, pid: u32) -> SchedulerStatus {
        SchedulerStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid,
            uptime_s: now.as_secs(),
            scheduling: self.is_scheduling(),
            quantum_ms: self.config().quantum.as_millis() as u64,
            restricted: false,
            host_memory: None,
        }
    }

    /// Returns a row for each GPU.
    pub(crate) fn gpu_status(&self) -> Vec<GpuStatus> {
        let row = |gpu: &Gpu| {
            let sums = gpu.ledger.sums();
            let clients_that = |is: fn(&Client) -> bool| {
                let ids = gpu.ledger.entries().map(|(id, _)| id);
                self.by_turn(gpu, ids.filter(|id| self.client(*id).is_some_and(is)))
            };
            GpuStatus {
                gpu: gpu.uuid,
                index: None,
                name: None,
                capacity: gpu.capacity,
                allocated: saturate(sums.allocated),
                resident: saturate(sums.room),
                overhead: saturate(sums.overhead),
                quantum_ms: gpu.quantum.as_millis() as u64,
                holders: clients_that(|client| client.phase().holds() || client.phase() == Phase::Free),
                waiters: clients_that(|client| client.waits() || client.phase().is_next()),
                turns: gpu.turn.count(),
                switch_us: gpu.switch_summary(),
                others: None,
                rule: gpu.rule.said(),
                switch_cost_us: gpu.cost.gap.mean().map_or(0, |cost| cost.as_micros() as u64),
                slices: gpu.takes_slices(),
                by_measure: false,
                side_by_side: 0,
            }
        };
        self.gpus().map(row).collect()
    }

    /// Returns the cost of hand-overs on a GPU, or of one client on it, as far as it is known.
    #[cfg(feature = "test-api")]
    pub(crate) fn switch_cost(&self, gpu: GpuUuid, of: Option<ClientId>) -> Option<HandOverCosts> {
        match of {
            Some(client) => self.account(client, gpu).map(|account| account.cost),
            None => self.gpu(gpu).map(|gpu| gpu.cost),
        }
    }

    fn describe(&self, client: &Client, now: Time) -> ClientStatus {
        let (held, waited) = client.times(now);
        let gpu_without_room = if client.waits() { self.no_room_for(client) } else { None };
        let blocked_on =
            gpu_without_room.filter(|gpu| self.why_no_room(gpu, client).is_some()).map(|gpu| gpu.uuid);
        ClientStatus {
            client: client.id,
            pid: client.pid,
            name: client.name.clone(),
            process: None,
            state: if blocked_on.is_some() {
                ClientState::Blocked
            } else if client.sleep.is_off_card() {
                ClientState::Asleep
            } else {
                client.phase().shown(client.wants)
            },
            blocked_on,
            stuck: client.is_unresponsive || client.stopped,
            gone: false,
            usage: client.accounts.values().map(|a| a.usage).collect(),
            resident: client.room(),
            overhead: if client.sleep.is_off_card() {
                0
            } else {
                client.accounts.values().fold(0, |sum, a| sum.saturating_add(a.overhead()))
            },
            held_ms: held.as_millis() as u64,
            waited_ms: waited.as_millis() as u64,
            counters: client.notes.counters,
            share: self.jobs().share_status(client),
            host_memory: 0,
        }
    }

    /// Returns the GPUs that clients use, or to which they may come from their sleep.
    pub(crate) fn gpus_in_use(&self) -> BTreeSet<GpuUuid> {
        let used = |gpu: &Gpu| gpu.ledger.entries().any(|(id, _)| self.client(id).is_some());
        self.gpus().filter(|gpu| used(gpu)).map(|gpu| gpu.uuid).chain(self.named_by_sleepers()).collect()
    }

    /// Whether a client that could be measured has not been measured often enough for its contexts to count.
    pub(crate) fn is_measuring(&self) -> bool {
        let may_be_seen = |client: &&Client| client.identity.pid.is_some() && !client.sleep.is_off_card();
        let is_news = |client: &Client| {
            let unknown = |account: &Account| match client.sleep {
                Sleep::Ordered { since, .. } => !account.is_seen_since(since),
                _ => !account.is_measured(),
            };
            client.accounts.values().any(|account| unknown(account))
        };
        self.clients().filter(may_be_seen).any(is_news)
            || self.gpus().any(|gpu| gpu.ledger.sleepers().first().is_some())
    }

    /// Returns a row for each client whose process is off the card.
    pub(crate) fn asleep_status(&self) -> Vec<AsleepStatus> {
        let asleep = self.clients().filter(|client| client.sleep.is_off_card());
        let row = |client: &Client| AsleepStatus {
            client: client.id,
            needs: self.each_need_to_return(client.id).collect(),
            wakes: client.sleep != Sleep::Away,
        };
        asleep.map(row).collect()
    }
}

impl Report {
    /// Returns a row for each client, for each departed process that still has memory, and for the last few
    /// clients that are gone. Times are counted up to `now`.
    pub(crate) fn client_status_at(&self, state: &State, now: Time) -> Vec<ClientStatus> {
        let mut rows: BTreeMap<_, _> = self.gone.iter().map(|row| (row.client, row.clone())).collect();
        for (&id, departed) in state.gpus().flat_map(|gpu| &gpu.departed) {
            if let Some(row) = rows.get_mut(&id) {
                row.gone = false;
                row.state = ClientState::Left;
                row.resident = row.resident.saturating_add(departed.bytes);
            }
        }
        let clients = state.clients().map(|client| state.describe(client, now));
        rows.into_values().chain(clients).collect()
    }

    /// Returns the clients that have a row in [`Self::client_status_at`].
    pub(crate) fn listed(&self, state: &State) -> BTreeSet<ClientId> {
        self.gone.iter().map(|row| row.client).chain(state.clients().map(|client| client.id)).collect()
    }

    /// Lists a client that is gone for a while.
    pub(crate) fn remember(&mut self, state: &State, client: &Client) {
        // A client that has left memory behind is listed until that memory is free.
        let is_settled = |row: &ClientStatus| state.gpus().all(|gpu| !gpu.departed.contains_key(&row.client));
        while self.gone.len() >= GONE_KEPT {
            let Some(settled) = self.gone.iter().position(is_settled) else { break };
            self.gone.remove(settled);
        }
        self.gone.push_back(ClientStatus {
            gone: true,
            state: ClientState::Gone,
            blocked_on: None,
            share: ShareStatus::default(),
            ..state.describe(client, state.now())
        });
    }
}
