//! Sleep: what a client that is to go off the card waits for, and whether one may come back.

use std::collections::BTreeSet;
use std::time::Duration;

use nvshare_proto::{Amount, GpuUuid, MemoryMode};

use crate::Time;
use crate::policy::rest::{self, Resting};
use crate::policy::sleep::{self, Candidate, MAX_WAIT_FOR_LOOK, Step};
use crate::state::State;
use crate::state::account::Account;
use crate::state::client::{Client, ClientId, Phase};
use crate::state::gpu::{CapacitySource, Gpu};
use crate::state::sleep::Sleep;

impl State {
    /// Whether a client could go off the card at some time, as far as is known.
    pub(crate) fn may_ever_sleep(&self, client: &Client) -> bool {
        client.memory == MemoryMode::Swap && client.never_sleeps.is_none()
    }

    /// Whether a client of a GPU is to go off the card, or has gone, or one may come to it from its sleep.
    pub(crate) fn has_sleepers(&self, gpu: GpuUuid) -> bool {
        self.clients().any(|client| client.sleep != Sleep::No && client.accounts.contains_key(&gpu))
            || self.named_by_sleepers().any(|named| named == gpu)
    }

    /// Returns the GPUs to which clients that are off their cards may be sent.
    pub(crate) fn named_by_sleepers(&self) -> impl Iterator<Item = GpuUuid> + '_ {
        let clients = self.clients().filter(|_| self.config().wake_elsewhere);
        clients.flat_map(|client| client.elsewhere.iter().copied())
    }

    /// Whether a client was told to go off the card, and may be expected to.
    pub(crate) fn is_going(&self, id: ClientId) -> bool {
        match self.client(id).map(|client| client.sleep) {
            Some(Sleep::Ordered { .. }) => true,
            Some(Sleep::Told { since, .. }) => self.now().saturating_sub(since) < self.config().grace,
            _ => false,
        }
    }

    /// Returns what is done about a client that may have rested for long enough, or `None` if clients do not go by themselves, or this
    /// one never can.
    pub(crate) fn next_step_of_rest(&self, client: &Client, is_another_going: bool) -> Option<rest::Step> {
        let after = self.config().sleep_after.filter(|_| self.may_ever_sleep(client))?;
        // Work that it has or waits for now is heard of later, if at all.
        let may_go = self.why_no_sleep(client).is_none();
        Some(rest::next_step(Resting {
            rested: if may_go { self.now().saturating_sub(client.rest.since) } else { Duration::ZERO },
            after,
            in_vain: client.rest.in_vain,
            is_gate_open: client.phase().is_running_or_draining(),
            is_asked: client.rest.is_asked,
            owes_answer: client.notes.asked_counters,
            is_in_the_way: client
                .accounts
                .keys()
                .filter_map(|uuid| self.gpu(*uuid))
                .any(|gpu| self.is_crowded(gpu)),
            is_another_going,
        }))
    }

    /// Whether not all memory of clients fits a GPU, or their contexts take more of it than is left to them.
    fn is_crowded(&self, gpu: &Gpu) -> bool {
        gpu.ledger.sums().allocated > u128::from(gpu.capacity)
            || self.config().has_many_contexts(gpu.uuid, gpu.size)
    }

    /// Returns the reason why a client cannot be ordered to sleep.
    pub(crate) fn why_no_sleep(&self, client: &Client) -> Option<String> {
        let said = |text: &str| Some(text.to_owned());
        if let Some(reason) = &client.never_sleeps {
            return Some(reason.clone());
        }
        if client.memory != MemoryMode::Swap {
            return said("only programs with NVSHARE_MEMORY=swap can go off the card");
        }
        if !self.is_scheduling() {
            return said("scheduling is off");
        }
        if client.accounts.is_empty() {
            return said("it uses no GPU");
        }
        if client.gang.is_some() {
            return said("it is a member of a gang");
        }
        if client.stopped {
            return said("its process is stopped");
        }
        // A client that nobody waits for has the lock for as long as it likes, whatever it does.
        let may_rest = matches!(client.phase(), Phase::Parked | Phase::Idle { .. } | Phase::Running { .. });
        if !may_rest || client.wants || client.has_need() {
            return said("it is at work");
        }
        None
    }

    /// Returns what is done about a client that is ordered to sleep, or `None` if it is not.
    pub(crate) fn next_step_to_sleep(&self, client: &Client) -> Option<Step> {
        let Sleep::Ordered { since, evicted, looked } = client.sleep else { return None };
        let is_measured = |uuid| self.gpu(uuid).is_some_and(|gpu| gpu.source == CapacitySource::Certain);
        let measured =
            || client.accounts.iter().filter(|(uuid, _)| is_measured(**uuid)).map(|(_, account)| account);
        let is_seen_or_absent =
            |account: &Account| account.is_seen_since(since) || account.is_absent_since(since);
        let is_seen = measured().next().is_none()
            || measured().any(|account| account.is_seen_since(since))
                && measured().all(|account| is_seen_or_absent(account));
        let accounts = || client.accounts.values();
        let phase = client.phase();
        let runs = matches!(phase, Phase::Running { .. } | Phase::Dropping { .. });
        let rests = runs || phase.is_idle() || phase == Phase::Parked;
        Some(sleep::next_step(Candidate {
            has_work: !rests || client.wants || client.has_need(),
            runs,
            is_idle: phase.is_idle(),
            ordered_for: self.now().saturating_sub(since),
            is_asked: accounts().any(|account| account.evict_order.is_some()),
            movable: accounts().fold(0, |sum, account| sum.saturating_add(account.movable())),
            was_asked: evicted,
            is_seen,
            is_looked_at: looked,
            is_visible: client.identity.pid.is_some() || measured().next().is_none(),
        }))
    }

    /// Returns the bytes that a client which is off the card needs to come back, on all of its GPUs.
    pub(crate) fn needs_to_return(&self, id: ClientId) -> u64 {
        let needs = self.each_need_to_return(id);
        needs.fold(0, |sum, Amount { bytes, .. }| sum.saturating_add(bytes))
    }

    /// Returns the bytes that such a client needs on each of its GPUs.
    pub(crate) fn each_need_to_return(&self, id: ClientId) -> impl Iterator<Item = Amount> + '_ {
        let gpus = self.client(id).into_iter().flat_map(|client| client.accounts.keys().copied());
        gpus.filter_map(move |uuid| {
            let entry = self.gpu(uuid)?.ledger.entry(id)?;
            Some(Amount { gpu: uuid, bytes: entry.sleeper.needs })
        })
    }

    /// Whether a client that is to come back is the next on each of its GPUs, and has a place there. One that has found none for a
    /// while keeps no others off the card: what is in its way may stay.
    pub(crate) fn may_wake(&self, client: &Client) -> bool {
        let Sleep::Wanted { since } = client.sleep else { return false };
        let passed_over = self.passed_over();
        // The part of its memory that was given away is not known before.
        let look_awaited =
            client.came_asleep_at.filter(|&at| self.now().saturating_sub(at) < MAX_WAIT_FOR_LOOK);
        client.accounts.keys().filter_map(|uuid| self.gpu(*uuid)).all(|gpu| {
            if look_awaited.is_some_and(|since| gpu.looked_at.is_none_or(|at| at < since)) {
                return false;
            }
            let sleepers = gpu.ledger.sleepers();
            let room = |id| gpu.ledger.entry(id).map_or(0, |entry| entry.room);
            let needs = needs_on(gpu, client.id);
            let own = sleepers.waking().fold(room(client.id), |sum, id| sum.saturating_add(room(id)));
            let card = self.config().card(gpu.uuid, gpu.size, sleepers.needed_by_waking());
            if self.is_scheduling() {
                let is_next = sleepers.is_next(client.id, since, passed_over) && !sleepers.is_one_awaited();
                is_next && card.has_place(needs, own, gpu.ledger.sums().room)
            } else {
                // Room is not counted: there is nothing but the measurement.
                card.has_free(needs, own)
            }
        })
    }

    /// Returns the GPU to which a client is to come back, where others hold memory that it needs, and another one with room for all that
    /// it has: the one where most is left.
    pub(crate) fn place_elsewhere(&self, client: &Client) -> Option<[GpuUuid; 2]> {
        // Before that, a GPU of which nothing is known may be full.
        if !self.is_scheduling() || !self.is_settled() || client.stopped {
            return None;
        }
        let mut accounts = client.accounts.iter();
        let (Some((&from, account)), None) = (accounts.next(), accounts.next()) else { return None };
        let own = self.gpu(from)?;
        let needs = needs_on(own, client.id);
        if account.usage.limit > 0 || self.left_beside_holders(own, client, account, needs).is_some() {
            return None;
        }
        let is_open = |to: GpuUuid| to != from && !self.jobs().has_memory_limit(client, to);
        let elsewhere = client.elsewhere.iter().copied().filter(|&to| is_open(to));
        let places = elsewhere.filter_map(|to| Some((self.left_elsewhere(client, account, needs, to)?, to)));
        let (left, to) = places.max()?;
        let expected = self.clients().filter(|other| other.id != client.id && other.is_expected_on(to));
        let taken = expected.fold(0, |sum: u128, other| sum.saturating_add(other.allocated().into()));
        (taken <= left).then_some([from, to])
    }

    /// Returns the bytes that nobody would use on another GPU if a client came back to it with this memory, and with contexts that take so
    /// much. `None`: it would have to wait there, or nobody has looked at that GPU for a while.
    fn left_elsewhere(&self, client: &Client, account: &Account, needs: u64, uuid: GpuUuid) -> Option<u128> {
        let Some(gpu) = self.gpu(uuid) else {
            // Nobody uses it, and where nothing is measured, nothing else is known.
            let unused = u128::from(account.usage.total).checked_sub(account.usage.allocated.into());
            return unused.filter(|_| needs == 0);
        };
        // As much is kept for it there, since nobody has seen it on that GPU.
        let kept = gpu.needs_to_return(&Account::new(account.usage, gpu.rates));
        let is_fresh =
            needs == 0 || gpu.looked_at.is_some_and(|at| self.now().saturating_sub(at) <= MAX_WAIT_FOR_LOOK);
        let fits = !gpu.has_waiter && needs <= kept && is_fresh;
        self.left_beside_holders(gpu, client, account, kept).filter(|_| fits)
    }

    /// Returns the bytes that nobody would use on a GPU beside its holders, memory that others keep, and a client with this memory. All else
    /// would leave.
    fn left_beside_holders(&self, gpu: &Gpu, client: &Client, account: &Account, needs: u64) -> Option<u128> {
        let sums = gpu.ledger.sums();
        let own = gpu.ledger.entry(client.id).map_or(0, |entry| entry.pinned);
        let pinned_by_others = sums.pinned.saturating_sub(sums.holders.pinned).saturating_sub(own.into());
        let wanted = u128::from(account.demand(u64::MAX, account.unevictable_bytes()));
        let used = sums.holders.demand.saturating_add(pinned_by_others).saturating_add(wanted);
        let card = self.config().card(gpu.uuid, gpu.size, gpu.ledger.sleepers().needed_by_waking());
        let left = u128::from(gpu.capacity).checked_sub(used)?;
        card.has_place(needs, 0, used).then_some(left)
    }

    /// Returns a time. A client that waits for its way back since then, or longer, may be passed over by others.
    fn passed_over(&self) -> Time {
        self.now().checked_sub(self.config().grace).unwrap_or_default()
    }

    /// Returns the bytes of a GPU's capacity that nobody gets, because a process comes back to the card or is
    /// the next to do so. Nothing is kept for one that has found no place for a while, and has none as things are.
    pub(crate) fn to_hold_back(&self, gpu: &Gpu) -> u64 {
        let sleepers = gpu.ledger.sleepers();
        let may_come = |id: &ClientId| !self.is_kept_off(*id);
        let next = sleepers.next(self.passed_over()).filter(may_come).map(|id| needs_on(gpu, id));
        let next = next.max().unwrap_or(0);
        let waking = sleepers.needed_by_waking();
        if next == 0 && (waking == 0 || !sleepers.is_one_awaited()) {
            return 0;
        }
        let most = self.config().card(gpu.uuid, gpu.size, waking).most_room(next);
        gpu.capacity.saturating_sub(most)
    }

    /// Whether a client that is to come back may be passed over by others, and has no place on one of its GPUs. Memory that is free
    /// on any of them would be kept for nothing.
    fn is_kept_off(&self, id: ClientId) -> bool {
        let Some(client) = self.client(id) else { return false };
        let has_waited = matches!(client.sleep, Sleep::Wanted { since } if since <= self.passed_over());
        let mut gpus = client.accounts.keys().filter_map(|uuid| self.gpu(*uuid));
        has_waited && gpus.any(|gpu| gpu.no_place_for.contains(&id))
    }

    /// Returns the clients that are to come back to a GPU and have no place there, even if all memory leaves that can. Memory that
    /// can leave does not count: otherwise two full GPUs would keep no room for a client that uses both.
    pub(crate) fn without_place(&self, gpu: &Gpu) -> BTreeSet<ClientId> {
        let sleepers = gpu.ledger.sleepers();
        let card = self.config().card(gpu.uuid, gpu.size, sleepers.needed_by_waking());
        let stays = gpu.ledger.sums().pinned;
        let is_without = |&id: &ClientId| {
            let needs = needs_on(gpu, id);
            needs > 0 && !card.fits_beside(needs, stays)
        };
        sleepers.wanted().filter(is_without).collect()
    }

    /// Returns when the next client that is to come back to a GPU may be passed over by others.
    pub(crate) fn next_passed_over_at(&self, gpu: &Gpu) -> Option<Time> {
        let &(since, _) = gpu.ledger.sleepers().first_behind(self.passed_over())?;
        Some(since.saturating_add(self.config().grace))
    }
}

/// Returns the bytes that a client needs to come back to a GPU from its sleep, or 0 if it does not use it.
fn needs_on(gpu: &Gpu, id: ClientId) -> u64 {
    gpu.ledger.entry(id).map_or(0, |entry| entry.sleeper.needs)
}
