//! The set of a trial: the clients whose progress is measured.

use std::collections::{BTreeMap, BTreeSet};

use crate::policy::{progress, together};
use crate::state::State;
use crate::state::client::{Client, ClientId, Job};
use crate::state::config::Together;
use crate::state::gpu::{CapacitySource, Gpu};
use crate::state::ledger::Group;

/// Clients of a set that is measured.
const MAX_CLIENTS: usize = 32;

impl State {
    /// Returns the clients that hold a GPU or wait for it, and their jobs. Returns `None` if something other
    /// than the work that they get done speaks against running them side by side.
    pub(crate) fn measured_set(&self, gpu: &Gpu) -> Option<BTreeMap<ClientId, Job>> {
        let asked_for_turns = gpu.shares.are_unequal() || !gpu.shares.paced().is_empty();
        let one_at_a_time = self.config.exclusive || gpu.source == CapacitySource::Disputed;
        // Nobody waits for jobs that fit, so a drain that was given up is tried again by the next trial
        // alone.
        let cannot_drain = gpu.deferred.holds_back(self.now);
        if self.config.together == Together::Always || asked_for_turns || one_at_a_time || cannot_drain {
            return None;
        }
        let waiting = gpu.waiting().chain(gpu.ledger.next().iter().copied()).map(|place| place.client);
        let ids: BTreeSet<ClientId> =
            gpu.ledger.holders().iter().copied().chain(waiting).take(MAX_CLIENTS + 1).collect();
        let of_one_gpu =
            |client: &&Client| client.accounts.len() == 1 && client.gang.is_none() && !client.is_unresponsive;
        let client = |id: &ClientId| self.clients.get(id).filter(of_one_gpu).map(|client| (*id, client.job));
        let set: BTreeMap<ClientId, Job> = ids.iter().map(client).collect::<Option<_>>()?;
        let jobs = set.values().collect::<BTreeSet<_>>().len();
        if set.len() > MAX_CLIENTS || jobs > progress::MAX_JOBS {
            return None;
        }
        let all: BTreeSet<ClientId> = ids.into_iter().chain(gpu.trial.clients()).collect();
        let entries = all.iter().filter_map(|&id| gpu.ledger.entry(id));
        let group = entries.fold(Group::default(), Group::with);
        together::fits(gpu.capacity, gpu.ledger.pinned_beside(group), group.demand, group.count, false)
            .then_some(set)
    }
}
