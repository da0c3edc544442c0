//! Measures whether the jobs of a GPU get more done side by side or by turns: what the core does for a [`Trial`](crate::state::trial).

use std::collections::{BTreeMap, BTreeSet};

use nvshare_proto::{GpuUuid, SchedulerMessage};

use crate::Core;
use crate::policy::{progress, together};
use crate::state::client::{Client, ClientId, Job};
use crate::state::config::Together;
use crate::state::gpu::Source;
use crate::state::ledger::Group;
use crate::state::trial::Sight;

/// Clients of a set that is measured.
const MOST_CLIENTS: usize = 32;

impl Core {
    /// Goes on with the trial of a GPU, if it is time.
    pub(crate) fn measure(&mut self, uuid: GpuUuid) {
        let now = self.now;
        let Some(gpu) = self.gpus.get_mut(&uuid) else { return };
        if let Some(until) = gpu.trial.rests_until() {
            if gpu.shares.holding() < 2 || self.config.together == Together::Always {
                return;
            }
            if now < until {
                gpu.wake_at(until);
                return;
            }
        }
        let set = self.measured_set(uuid);
        let Some(gpu) = self.gpus.get_mut(&uuid) else { return };
        let is_gone = gpu.trial.clients().any(|id| gpu.ledger.entry(id).is_none());
        let is_free = gpu.ledger.holders().is_empty();
        let cannot_drain = gpu.waits_to_drain(now);
        let todo = gpu.trial.go_on(Sight { set: set.as_ref(), is_free, cannot_drain, is_gone, now });
        if let Some(wake) = todo.wake.filter(|&wake| wake > now) {
            gpu.wake_at(wake);
        }
        if todo.begin {
            gpu.turn_started = None;
        }
        if let Some(ticket) = todo.ask {
            for id in gpu.trial.clients().collect::<Vec<_>>() {
                self.send(id, SchedulerMessage::AskProgress { ticket });
            }
        }
        if todo.part {
            let holders = self.gpus.get(&uuid).map(|gpu| gpu.ledger.holders().clone()).unwrap_or_default();
            for id in holders {
                self.ask_to_leave(id);
            }
        }
        if let Some(note) = todo.note {
            self.note(format!("{uuid}: {note}"));
        }
    }

    /// The clients that hold a GPU or wait for it, and their jobs, if these may run side by side there and nothing but what they
    /// get done speaks against it.
    fn measured_set(&self, uuid: GpuUuid) -> Option<BTreeMap<ClientId, Job>> {
        let gpu = self.gpus.get(&uuid)?;
        let asked_for_turns = gpu.shares.are_unequal() || !gpu.shares.paced().is_empty();
        let one_at_a_time = self.config.exclusive || gpu.source == Source::Disputed;
        // Nobody waits for jobs that fit, so a drain that was given up is tried again by the next trial alone.
        let cannot_drain = gpu.waits_to_drain(self.now);
        if self.config.together == Together::Always || asked_for_turns || one_at_a_time || cannot_drain {
            return None;
        }
        let waiting = gpu.waiting().chain(gpu.ledger.next().iter().copied()).map(|key| key.2);
        let ids: BTreeSet<ClientId> =
            gpu.ledger.holders().iter().copied().chain(waiting).take(MOST_CLIENTS + 1).collect();
        let of_one_gpu =
            |client: &&Client| client.accounts.len() == 1 && client.gang.is_none() && !client.stuck;
        let client = |id: &ClientId| self.clients.get(id).filter(of_one_gpu).map(|client| (*id, client.job));
        let set: BTreeMap<ClientId, Job> = ids.iter().map(client).collect::<Option<_>>()?;
        let jobs = set.values().collect::<BTreeSet<_>>().len();
        if set.len() > MOST_CLIENTS || jobs > progress::MOST_JOBS {
            return None;
        }
        let all: BTreeSet<ClientId> = ids.into_iter().chain(gpu.trial.clients()).collect();
        let entries = all.iter().filter_map(|&id| gpu.ledger.entry(id));
        let group = entries.fold(Group::default(), Group::with);
        together::fits(gpu.capacity, gpu.ledger.pinned_beside(group), group.demand, group.count, false)
            .then_some(set)
    }

    /// So much of a client's work is complete: a trial may have waited for it.
    pub(crate) fn note_progress(&mut self, id: ClientId, ticket: u64, submissions: u64) {
        let now = self.now;
        let Some(client) = self.clients.get(&id) else { return };
        for uuid in client.accounts.keys() {
            let gpu = self.gpus.get_mut(uuid);
            if gpu.is_some_and(|gpu| gpu.trial.completed(id, ticket, submissions, now)) {
                self.dirty.insert(*uuid);
            }
        }
    }

    /// A client gives the lock back, and has said its counters before.
    pub(crate) fn note_turn(&mut self, id: ClientId) {
        let now = self.now;
        let Some(client) = self.clients.get(&id) else { return };
        for uuid in client.accounts.keys() {
            if let Some(gpu) = self.gpus.get_mut(uuid) {
                gpu.trial.given_back(id, client.counters.gated, now);
            }
        }
    }

    /// A client has nothing to do.
    pub(crate) fn note_sleep(&mut self, id: ClientId) {
        let Some(client) = self.clients.get(&id) else { return };
        for uuid in client.accounts.keys() {
            if let Some(gpu) = self.gpus.get_mut(uuid) {
                gpu.trial.fall_asleep(id);
            }
        }
    }

    /// Asks a client for its counters, unless it still has to answer.
    pub(crate) fn ask_for_counters(&mut self, id: ClientId) {
        if let Some(client) = self.clients.get_mut(&id)
            && !std::mem::replace(&mut client.asked_counters, true)
        {
            self.send(id, SchedulerMessage::AskCounters);
        }
    }
}
