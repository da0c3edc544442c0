//! Questions about the state that several parts of the core ask, and the one way to change a client.

use nvshare_proto::GpuUuid;

use crate::account::Account;
use crate::client::{Client, ClientId, Phase, Why};
use crate::gangs::Unit;
use crate::gpu::{Gpu, Size, Source};
use crate::happened::Glance;
use crate::ledger::{Entry, Group, Key, Standing};
use crate::policy::{next, together};
use crate::shares::Part;
use crate::virtual_time::Virtual;
use crate::{Core, Time};

impl Core {
    /// Changes a client, and its entries in the ledgers of its GPUs.
    pub(crate) fn with(&mut self, id: ClientId, change: impl FnOnce(&mut Client)) {
        let now = self.now;
        if let Some(client) = self.clients.get_mut(&id) {
            client.count(now);
            let (before, slept, was_next) = (Glance::of(client), client.is_asleep(), client.phase.is_next());
            change(client);
            if was_next && client.phase == Phase::Parked {
                client.accounts.values_mut().for_each(|account| account.ahead = None);
            }
            match (slept, client.is_asleep()) {
                (false, true) => client.rhythm.falls_asleep(now),
                (true, false) => client.rhythm.wakes(now),
                _ => {}
            }
            self.enter(id);
            self.tell_changes(id, before);
        }
    }

    pub(crate) fn with_account(&mut self, id: ClientId, gpu: GpuUuid, change: impl FnOnce(&mut Account)) {
        let Some(before) = self.account(id, gpu).copied() else { return };
        self.with(id, |client| {
            if let Some(account) = client.accounts.get_mut(&gpu) {
                change(account);
            }
        });
        self.tell_account_changes(id, gpu, &before);
    }

    /// Writes a client into the ledgers of its GPUs. A GPU whose entry changed is looked at again.
    pub(crate) fn enter(&mut self, id: ClientId) {
        let now = self.now;
        let Some(client) = self.clients.get(&id) else { return };
        let part = part(client);
        let mut begins_for_its_job = false;
        for uuid in client.accounts.keys() {
            let Some(gpu) = self.gpus.get_mut(uuid) else { continue };
            gpu.shares.advance(now);
            let before = gpu.ledger.entry(id).map(|entry| entry.part);
            if before != Some(part) {
                let bound = gpu.most_kept();
                let held = gpu.shares.is_holding(client.job);
                gpu.shares.change(client.job, before, Some(part), bound);
                begins_for_its_job |= !held && gpu.shares.is_holding(client.job);
            }
        }
        let several = client.accounts.len() > 1 || client.gang.is_some();
        let ahead = if several { self.ahead_on_all(client) } else { 0 };
        let job = self.takes_turns_as(client);
        let mut changed = false;
        for (uuid, account) in &client.accounts {
            let Some(gpu) = self.gpus.get_mut(uuid) else { continue };
            let time = if several { gpu.shares.clock() + ahead } else { gpu.shares.time(client.job) };
            let time = time.saturating_sub(gpu.lent_to(id, client));
            let standing = standing(client);
            let ordered_by_turn = matches!(standing, Standing::Waits | Standing::Next);
            let entry = Entry {
                standing,
                charged: account.budget,
                pinned: client.pinned(account),
                demand: account.demand(match gpu.source {
                    Source::Disputed => {
                        self.config.usable(*uuid, Size { available: account.usage.total, ..Size::default() })
                    }
                    _ => gpu.capacity,
                }),
                allocated: account.usage.allocated,
                overhead: account.overhead(),
                ordered: account.order.map(|order| order.bytes),
                needs: account.needs > 0,
                runs: client.phase.runs(),
                stuck: client.stuck,
                claims: client.phase == Phase::Next(Why::Claims),
                part,
                job,
                key: if ordered_by_turn { (time, client.waiting_since, id) } else { (0, Time::ZERO, id) },
                moves: several || gpu.shares.is_holding(client.job) || gpu.goes_ahead(id, client),
                due: self.config.first_due(client, account),
            };
            let held = gpu.ledger.entry(id).is_some_and(|entry| entry.standing.holds());
            if standing.holds() && !held {
                gpu.told = None;
            }
            if gpu.ledger.set(id, Some(entry)) {
                self.dirty.insert(*uuid);
                self.dirty.append(&mut gpu.watched_by);
                changed = true;
            }
        }
        if changed && client.gang.is_some() {
            // The other members of its gang depend on it.
            let gpus = self.gpus_of(&self.unit(id));
            self.dirty.extend(gpus);
        }
        if begins_for_its_job {
            // From now on the place of those of its job that wait moves: what it gets is theirs as well.
            let job = self.jobs.get(&client.job).into_iter().flatten().copied();
            for mate in job.filter(|&mate| mate != id && self.waits(mate)).collect::<Vec<_>>() {
                self.enter(mate);
            }
        }
    }

    fn waits(&self, id: ClientId) -> bool {
        self.clients
            .get(&id)
            .is_some_and(|client| matches!(standing(client), Standing::Waits | Standing::Next))
    }

    /// How far a client's job is ahead of the clock on the GPU where it is furthest ahead, of all GPUs that its gang, or
    /// the client alone, uses.
    fn ahead_on_all(&self, client: &Client) -> Virtual {
        let ahead = |client: &Client, uuid| {
            let shares = &self.gpus.get(&uuid)?.shares;
            Some(shares.time(client.job) - shares.clock())
        };
        match client.gang.and_then(|gang| self.gangs.get(&gang)) {
            Some(members) => {
                let clients = members.ids().filter_map(|id| self.clients.get(&id));
                next::ahead_on_all(clients.flat_map(|c| c.accounts.keys().filter_map(|&uuid| ahead(c, uuid))))
            }
            None => next::ahead_on_all(client.accounts.keys().filter_map(|&uuid| ahead(client, uuid))),
        }
    }

    /// A client's place in the order of turns on a GPU, as it is now.
    pub(crate) fn key(&self, uuid: GpuUuid, id: ClientId) -> Option<Key> {
        self.key_on(self.gpus.get(&uuid)?, id)
    }

    fn key_on(&self, gpu: &Gpu, id: ClientId) -> Option<Key> {
        let client = self.clients.get(&id)?;
        let time = if client.accounts.len() > 1 || client.gang.is_some() {
            gpu.shares.clock() + self.ahead_on_all(client)
        } else {
            gpu.shares.time(client.job)
        };
        Some((time.saturating_sub(gpu.lent_to(id, client)), client.waiting_since, id))
    }

    /// Clients in the order of their turn on a GPU.
    pub(crate) fn by_turn(&self, uuid: GpuUuid, ids: impl Iterator<Item = ClientId>) -> Vec<ClientId> {
        let Some(gpu) = self.gpus.get(&uuid) else { return Vec::new() };
        let mut keys: Vec<Key> = ids.filter_map(|id| self.key_on(gpu, id)).collect();
        keys.sort_unstable();
        keys.into_iter().map(|key| key.2).collect()
    }

    /// Bytes that a client may fill.
    pub(crate) fn capacity(&self, uuid: GpuUuid, id: ClientId) -> u64 {
        match self.gpus.get(&uuid) {
            Some(Gpu { source: Source::Disputed, .. }) => {
                let said = self.account(id, uuid).map_or(0, |account| account.usage.total);
                self.config.usable(uuid, Size { available: said, ..Size::default() })
            }
            Some(gpu) => gpu.capacity,
            None => 0,
        }
    }

    /// Bytes that a client lacks to have its whole demand resident.
    pub(crate) fn deficit(&self, uuid: GpuUuid, id: ClientId) -> u64 {
        let entry = self.gpus.get(&uuid).and_then(|gpu| gpu.ledger.entry(id));
        entry.map_or(0, Entry::deficit)
    }

    /// Free bytes of the part of a GPU that a client may fill.
    pub(crate) fn free(&self, uuid: GpuUuid, id: ClientId) -> u64 {
        let charged = self.gpus.get(&uuid).map_or(0, |gpu| gpu.ledger.sums().charged);
        let free = u128::from(self.capacity(uuid, id)).saturating_sub(charged);
        u64::try_from(free).unwrap_or(u64::MAX)
    }

    /// Bytes that other clients have beyond all that this client may fill, since it may see less of the GPU than they do. Until
    /// they have given these bytes back, nothing else that they give back makes room for it.
    pub(crate) fn overfull(&self, uuid: GpuUuid, id: ClientId) -> u64 {
        let charged = self.gpus.get(&uuid).map_or(0, |gpu| gpu.ledger.sums().charged);
        u64::try_from(charged.saturating_sub(u128::from(self.capacity(uuid, id)))).unwrap_or(u64::MAX)
    }

    /// Whether a group fits a GPU together, beside the pinned memory of others; judged by the capacity that `seen_by` may
    /// fill.
    pub(crate) fn fit(&self, uuid: GpuUuid, group: Group, seen_by: ClientId) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        self.fit_within(gpu, self.capacity(uuid, seen_by), group)
    }

    fn fit_within(&self, gpu: &Gpu, capacity: u64, group: Group) -> bool {
        if group.mixed && gpu.takes_slices() {
            return false;
        }
        let alone = self.config.exclusive || gpu.source == Source::Disputed;
        together::fits(capacity, gpu.ledger.pinned_beside(group), group.demand, group.count, alone)
    }

    /// A group, and the clients of a unit on a GPU that are not in it yet.
    fn with_unit(gpu: &Gpu, group: Group, unit: &Unit, is_in: fn(Standing) -> bool) -> Group {
        let entries = unit.iter().filter_map(|&id| gpu.ledger.entry(id));
        entries.filter(|entry| !is_in(entry.standing)).fold(group, Group::with)
    }

    /// Any client of a unit that has an entry on the GPU.
    fn one_on(gpu: &Gpu, unit: &Unit) -> Option<ClientId> {
        unit.iter().copied().find(|&id| gpu.ledger.entry(id).is_some())
    }

    pub(crate) fn fits_alone(&self, uuid: GpuUuid, unit: &Unit) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        let Some(one) = Self::one_on(gpu, unit) else { return true };
        self.fit(uuid, Self::with_unit(gpu, Group::default(), unit, |_| false), one)
    }

    /// Bytes that a unit demands of a GPU.
    pub(crate) fn demand_of(&self, uuid: GpuUuid, unit: &Unit) -> u128 {
        unit.iter().map(|&id| self.demand(uuid, id)).sum()
    }

    /// Whether a client, with its gang, would fit if all others had drained: then only memory that cannot be moved is in
    /// its way.
    pub(crate) fn fits_in_the_end(&self, uuid: GpuUuid, id: ClientId) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        let unit = self.unit(id);
        let stays = |other, entry: &Entry| match self.clients.get(&other) {
            Some(client) => client.accounts.get(&uuid).map_or(0, |account| account.pinned(client.memory)),
            None => entry.pinned,
        };
        let others = gpu.ledger.entries().filter(|(other, _)| !unit.contains(other));
        let pinned = others.fold(0, |sum, (other, entry)| sum + u128::from(stays(other, entry)));
        together::fits(self.capacity(uuid, id), pinned, self.demand_of(uuid, &unit), 1, false)
    }

    pub(crate) fn fits_beside_members(&self, uuid: GpuUuid, unit: &Unit) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        let Some(one) = Self::one_on(gpu, unit) else { return true };
        let members = gpu.ledger.sums().members;
        self.fit(uuid, Self::with_unit(gpu, members, unit, Standing::stays), one)
    }

    /// Whether the clients that still hold a GPU leave no place for a unit that is next.
    pub(crate) fn is_in_the_way(&self, uuid: GpuUuid, unit: &Unit) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return false };
        let Some(one) = Self::one_on(gpu, unit) else { return false };
        let holders = gpu.ledger.sums().holders;
        let is_not_next = |standing| standing != Standing::Next;
        holders.count > 0 && !self.fit(uuid, Self::with_unit(gpu, holders, unit, is_not_next), one)
    }

    /// A GPU on which no room can be made for a client and its gang, as things are.
    pub(crate) fn no_room_on(&self, id: ClientId) -> Option<GpuUuid> {
        match self.unit(id) {
            unit @ Unit::One(_) => {
                let client = self.clients.get(&id)?;
                client.accounts.keys().copied().find(|&uuid| !self.fits_alone(uuid, &unit))
            }
            unit @ Unit::Gang(_) => {
                self.gpus_of(&unit).into_iter().find(|&uuid| !self.fits_alone(uuid, &unit))
            }
        }
    }

    pub(crate) fn account(&self, id: ClientId, uuid: GpuUuid) -> Option<&Account> {
        self.clients.get(&id)?.accounts.get(&uuid).map(Box::as_ref)
    }

    pub(crate) fn gpus_used_by(&self, id: ClientId) -> Vec<GpuUuid> {
        self.clients.get(&id).map(|c| c.accounts.keys().copied().collect()).unwrap_or_default()
    }

    pub(crate) fn phase(&self, id: ClientId) -> Option<Phase> {
        self.clients.get(&id).map(|client| client.phase)
    }

    /// Splits the members of a GPU into those that fit it together with a unit, taken in the order of turns, and those that
    /// do not. A gang stays as a whole, or leaves as a whole.
    pub(crate) fn keep_what_fits(
        &self,
        uuid: GpuUuid,
        first: Option<&Unit>,
        members: Vec<ClientId>,
    ) -> (Group, Vec<ClientId>) {
        let mut kept = Group::default();
        let mut leavers = Vec::new();
        let Some(gpu) = self.gpus.get(&uuid) else { return (kept, leavers) };
        if let Some(first) = first {
            kept = Self::with_unit(gpu, kept, first, |_| false);
        }
        // Where clients say different capacities, no two of them fit, whoever is asked.
        let seen_by = first.and_then(|first| Self::one_on(gpu, first)).or(members.first().copied());
        let capacity = seen_by.map_or(0, |id| self.capacity(uuid, id));
        // The gangs that were judged, by their first members.
        let mut judged: Vec<ClientId> = Vec::new();
        for id in members {
            let unit = self.unit(id);
            if first.is_some_and(|first| first.contains(&id)) {
                continue;
            }
            if let Unit::Gang(gang) = &unit {
                if gang.first().is_none_or(|first| judged.contains(first)) {
                    continue;
                }
                judged.extend(gang.first());
            }
            let staying = |id: &ClientId| gpu.ledger.entry(*id).filter(|entry| entry.standing.stays());
            let more = unit.iter().filter_map(staying).fold(kept, Group::with);
            if kept.count == 0 || self.fit_within(gpu, capacity, more) {
                kept = more;
            } else {
                leavers.extend(unit.iter().copied().filter(|id| staying(id).is_some()));
            }
        }
        (kept, leavers)
    }

    /// Members of a GPU, the furthest behind first; with `growers_last`, clients with an allocation that waits for room
    /// come last.
    pub(crate) fn members(&self, uuid: GpuUuid, growers_last: bool) -> Vec<ClientId> {
        let Some(gpu) = self.gpus.get(&uuid) else { return Vec::new() };
        let mut members = self.by_turn(uuid, gpu.ledger.members().iter().copied());
        if growers_last {
            let grew = |id: &ClientId| gpu.ledger.entry(*id).is_some_and(|entry| entry.needs);
            members.sort_by_key(grew);
        }
        members
    }
}

fn standing(client: &Client) -> Standing {
    match client.phase {
        Phase::Parked if client.waits() => Standing::Waits,
        Phase::Parked => Standing::Parked,
        Phase::Next(_) => Standing::Next,
        Phase::Dropping { .. } | Phase::Drained => Standing::Leaves,
        Phase::Granted { .. } | Phase::Running { .. } | Phase::Idle { .. } => Standing::Holds,
        Phase::Free => Standing::Free,
    }
}

/// A client's part in its job's share: none while it does not answer, so that nobody waits for a turn of a process that is stopped.
fn part(client: &Client) -> Part {
    if client.stuck {
        return Part::default();
    }
    let (holds, counts) = (client.phase.uses_a_turn(), client.phase.counts());
    let waits = client.waits() && !client.hopeless;
    let active = holds || waits || client.phase.is_next();
    Part { active, holds, counts, runs: client.phase.runs(), long: active && !client.is_interactive() }
}
