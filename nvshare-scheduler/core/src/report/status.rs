//! The state as an administrator sees it, and as a test checks it.

use std::collections::BTreeMap;

use nvshare_proto::{ClientState, ClientStatus, GpuStatus, GpuUuid, SchedulerStatus};

use crate::state::client::{Client, ClientId, Phase};
use crate::state::cost::SwitchCost;
use crate::state::gpu::Gpu;
use crate::state::ledger::Key;
use crate::{Core, Time};

/// Clients that are gone and still listed.
const GONE_KEPT: usize = 32;

impl Core {
    /// The status of the scheduler itself, in whose process `pid` the core runs.
    #[must_use]
    pub fn status(&self, now: Time, pid: u32) -> SchedulerStatus {
        SchedulerStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid,
            uptime_s: now.as_secs(),
            scheduling: self.scheduling,
            quantum_ms: self.config.quantum.as_millis() as u64,
            restricted: false,
            host_memory: None,
        }
    }

    /// A row for each GPU.
    #[must_use]
    pub fn gpu_status(&self) -> Vec<GpuStatus> {
        let row = |(&uuid, gpu): (_, &Gpu)| {
            let sums = gpu.ledger.sums();
            let which = |which: fn(&Client) -> bool| {
                let ids = gpu.ledger.entries().map(|(id, _)| id);
                self.by_turn(uuid, ids.filter(|id| self.clients.get(id).is_some_and(which)))
            };
            GpuStatus {
                gpu: uuid,
                index: None,
                name: None,
                capacity: gpu.capacity,
                allocated: whole(sums.allocated),
                resident: whole(sums.room),
                overhead: whole(sums.overhead),
                quantum_ms: gpu.quantum.as_millis() as u64,
                holders: which(|client| client.phase.holds() || client.phase == Phase::Free),
                waiters: which(|client| client.waits() || client.phase.is_next()),
                turns: gpu.turns,
                switch_us: gpu.switch_summary(),
                others: None,
                rule: gpu.rule.said(),
                switch_cost_us: gpu.cost.idle.mean().map_or(0, |cost| cost.as_micros() as u64),
                slices: gpu.takes_slices(),
                by_measure: gpu.trial.is_decided(),
                side_by_side: gpu.trial.shown().map_or(0, |sum| (sum * 1000.0).round() as u32),
            }
        };
        self.gpus.iter().map(row).collect()
    }

    /// [`Core::client_status_at`] the last event.
    #[must_use]
    pub fn client_status(&self) -> Vec<ClientStatus> {
        self.client_status_at(self.now)
    }

    /// A row for each client, for each process that has left and still has memory, and for the last few that are gone. Times
    /// are counted up to `now`.
    #[must_use]
    pub fn client_status_at(&self, now: Time) -> Vec<ClientStatus> {
        let mut rows: BTreeMap<_, _> = self.gone.iter().map(|row| (row.client, row.clone())).collect();
        for (&id, departed) in self.gpus.values().flat_map(|gpu| &gpu.departed) {
            if let Some(row) = rows.get_mut(&id) {
                row.gone = false;
                row.state = ClientState::Left;
                row.resident = row.resident.saturating_add(departed.bytes);
            }
        }
        let clients = self.clients.iter().map(|(&id, client)| self.describe(id, client, now));
        rows.into_values().chain(clients).collect()
    }

    /// The cost of hand-overs on a GPU, or of one client on it, as far as it is known.
    #[must_use]
    pub fn switch_cost(&self, gpu: GpuUuid, of: Option<ClientId>) -> Option<SwitchCost> {
        match of {
            Some(client) => self.account(client, gpu).map(|account| account.cost),
            None => self.gpus.get(&gpu).map(|gpu| gpu.cost),
        }
    }

    pub(crate) fn remember(&mut self, id: ClientId, client: &Client) {
        if self.gone.len() >= GONE_KEPT {
            // A client that has left memory behind is listed until that memory is free.
            let gpus = &self.gpus;
            let passed = self
                .gone
                .iter()
                .position(|row| gpus.values().all(|gpu| !gpu.departed.contains_key(&row.client)));
            passed.and_then(|at| self.gone.remove(at));
        }
        let row = self.describe(id, client, self.now);
        let row = ClientStatus { gone: true, state: ClientState::Gone, blocked_on: None, ..row };
        self.gone.push_back(row);
    }

    fn describe(&self, id: ClientId, client: &Client, now: Time) -> ClientStatus {
        let (held, waited) = client.times(now);
        let full = if client.waits() { self.no_room_on(id) } else { None };
        let blocked_on = full.filter(|&uuid| self.why_no_room(uuid, id).is_some());
        ClientStatus {
            client: id,
            pid: client.pid,
            name: client.name.clone(),
            process: None,
            state: if blocked_on.is_some() { ClientState::Blocked } else { client.phase.shown(client.wants) },
            blocked_on,
            stuck: client.stuck || client.stopped,
            gone: false,
            usage: client.accounts.values().map(|a| a.usage).collect(),
            resident: client.accounts.values().fold(0, |sum, a| sum.saturating_add(a.room)),
            overhead: client.accounts.values().fold(0, |sum, a| sum.saturating_add(a.overhead())),
            held_ms: held.as_millis() as u64,
            waited_ms: waited.as_millis() as u64,
            counters: client.counters,
            share: self.share_status(id),
            host_memory: 0,
        }
    }

    /// Recomputes the ledgers from the clients and compares; for tests.
    ///
    /// # Errors
    /// The difference, or the client that waits though no event is to come.
    pub fn audit(&self) -> Result<(), String> {
        if let Some(uuid) = self.dirty.first().filter(|_| self.scheduling) {
            return Err(format!("{uuid} does not come to rest: {:?}", self.gpus.get(uuid)));
        }
        for (uuid, gpu) in &self.gpus {
            gpu.ledger.audit()?;
            let clients = self.clients.values().filter_map(|client| client.accounts.get(uuid));
            let departed = gpu.departed.values().map(|departed| departed.bytes);
            let given: u128 = clients.map(|account| account.room).chain(departed).map(u128::from).sum();
            if given != gpu.ledger.sums().room {
                return Err(format!(
                    "{uuid}: {given} bytes of room are given, the ledger says {}",
                    gpu.ledger.sums().room
                ));
            }
            let sums = gpu.ledger.sums();
            // An event is to come: an answer, or a time.
            let elsewhere = |id: ClientId| {
                self.clients.get(&id).is_some_and(|client| client.accounts.len() > 1 || client.gang.is_some())
            };
            let going_on = sums.orders + sums.leaving + sums.holders.count + gpu.ledger.departed().len() > 0
                || gpu.ledger.next().iter().copied().chain(gpu.waiting()).any(|key| elsewhere(key.2));
            let answers = |id: &ClientId| {
                self.unit(*id).iter().any(|&id| {
                    matches!(
                        self.phase(id),
                        Some(Phase::Next(_) | Phase::Granted { .. } | Phase::Dropping { .. })
                    )
                })
            };
            let answers = sums.orders
                + gpu.ledger.departed().len()
                + gpu.ledger.holders().iter().filter(|id| answers(id)).count();
            // A client that uses other GPUs too may wait for those.
            let can_go = |id| self.no_room_on(id).is_none() && !self.is_stopped(&self.unit(id));
            let only_here = |key: &Key| !elsewhere(key.2) && can_go(key.2);
            let waits = gpu.contested && gpu.waiting().any(|key| only_here(&key));
            let others = self.gpus.iter().filter(|(other, _)| *other != uuid);
            let mut watchers = others.flat_map(|(_, other)| &other.watched_by);
            let watches = watchers.any(|&id| self.gpus_of(&self.unit(id)).contains(uuid));
            if self.scheduling
                && waits
                && answers == 0
                && gpu.ledger.next().is_empty()
                && gpu.deadline.is_none()
                && !watches
            {
                return Err(format!("somebody waits for {uuid}, and nothing ends the turn: {gpu:?}"));
            }
            for (_, _, id) in gpu.waiting().chain(gpu.ledger.next().iter().copied()) {
                let elsewhere = elsewhere(id);
                if self.scheduling && !going_on && gpu.deadline.is_none() && !elsewhere && can_go(id) {
                    return Err(format!("client {id} waits for {uuid}, and nothing is to happen: {gpu:?}"));
                }
            }
        }
        Ok(())
    }
}

fn whole(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}
