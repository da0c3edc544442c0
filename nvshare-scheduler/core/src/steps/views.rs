//! Questions about the state that several parts of the core ask, and the one way to change a client.

use std::ops::Bound;

use nvshare_proto::GpuUuid;

use crate::policy::{next, together};
use crate::report::happened::Glance;
use crate::state::account::Account;
use crate::state::client::{Client, ClientId, Phase, Why};
use crate::state::gpu::{Gpu, Size, Source};
use crate::state::ledger::{Entry, Group, Key, Standing};
use crate::state::shares::Part;
use crate::state::virtual_time::Virtual;
use crate::steps::gangs::Unit;
use crate::{Core, Time};

/// Places of waiting clients, each on one GPU, that one event brings up to date: few enough to cost some microseconds.
const PLACES_REFRESHED: usize = 16;

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
                (false, true) => client.rhythm.fall_asleep(now),
                (true, false) => client.rhythm.wake(now),
                _ => {}
            }
            self.enter(id);
            self.tell_changes(id, before);
        }
    }

    pub(crate) fn with_account(&mut self, id: ClientId, gpu: GpuUuid, change: impl FnOnce(&mut Account)) {
        let now = self.now;
        let Some(client) = self.clients.get_mut(&id) else { return };
        let seen = |client: &Client| (part(client), client.is_interactive());
        let was = seen(client);
        client.count(now);
        let is_same = seen(client) == was;
        let Some(account) = client.accounts.get_mut(&gpu) else { return };
        let before = **account;
        change(account);
        // Nothing changes on the client's other GPUs, unless its work counts as another kind from now on.
        self.enter_on(id, Some(gpu).filter(|_| is_same));
        self.tell_account_changes(id, gpu, &before);
    }

    /// Writes a client into the ledgers of its GPUs. A GPU whose entry changed is looked at again.
    pub(crate) fn enter(&mut self, id: ClientId) {
        self.enter_on(id, None);
    }

    /// The same for one GPU, or for all.
    pub(crate) fn enter_on(&mut self, id: ClientId, only: Option<GpuUuid>) {
        let now = self.now;
        let Some(client) = self.clients.get(&id) else { return };
        let (from, to) = only
            .map_or((Bound::Unbounded, Bound::Unbounded), |gpu| (Bound::Included(gpu), Bound::Included(gpu)));
        let part = part(client);
        for uuid in client.accounts.range((from, to)).map(|(uuid, _)| uuid) {
            let Some(gpu) = self.gpus.get_mut(uuid) else { continue };
            gpu.shares.advance(now);
            let before = gpu.ledger.entry(id).map(|entry| entry.part);
            if before != Some(part) {
                let bound = gpu.most_kept();
                gpu.shares.change(client.job, before, Some(part), bound);
            }
        }
        let standing = standing(client);
        let several = client.uses_several();
        let ordered = matches!(standing, Standing::Waits | Standing::Next);
        client.ahead.forget();
        let ahead = if several && ordered { self.ahead_on_all(client) } else { 0 };
        let job = self.takes_turns_as(client);
        let has_mates = self.jobs.get(&client.job).is_some_and(|of_job| of_job.clients.len() > 1);
        let mut moves = several || has_mates;
        let mut changed = false;
        for (uuid, account) in client.accounts.range((from, to)) {
            let Some(gpu) = self.gpus.get_mut(uuid) else { continue };
            self.steps += 1;
            moves |= gpu.goes_ahead(id, client);
            let floats = several && standing == Standing::Waits;
            let time = match several {
                true if floats => ahead,
                true => gpu.shares.clock().saturating_add(ahead),
                false => gpu.shares.time(client.job),
            };
            let time = time.saturating_sub(gpu.lent_to(id, client));
            let entry = Entry {
                standing,
                room: account.room,
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
                needs: account.needs > 0 && !client.stopped,
                runs: client.phase.runs(),
                stuck: client.is_silent(),
                claims: client.phase == Phase::Next(Why::Claims),
                part,
                payer: client.job,
                job,
                key: if ordered { (time, client.waiting_since, id) } else { (0, Time::ZERO, id) },
                floats,
                total: Some(account.usage.total),
                due: self.config.first_due(client, account),
            };
            let held = gpu.ledger.entry(id).is_some_and(|entry| entry.standing.holds());
            // With the rest of its gang.
            if standing.holds() != held {
                self.untold.insert(id);
            }
            if gpu.ledger.set(id, Some(entry)) {
                self.dirty.insert(*uuid);
                self.woken.append(&mut gpu.watched_by);
                self.cases.changes += 1;
                changed = true;
            }
        }
        // The other members of its gang depend on it.
        self.dirty_gangs.extend(client.gang.filter(|_| changed));
        if standing == Standing::Waits && moves {
            let refreshed = self.moving.entry(id).or_default();
            *refreshed = if only.is_none() { self.events } else { *refreshed };
        } else if standing != Standing::Waits {
            self.moving.remove(&id);
        }
    }

    /// Brings the places of waiting clients up to date that move without an event of their own: those of clients that use
    /// several GPUs follow all of their clocks, and those of a job's processes what the others of the job get. Where many wait,
    /// each event brings some up to date, in turn, so that its cost has a bound.
    pub(crate) fn refresh_places(&mut self) {
        let mut left = PLACES_REFRESHED;
        let behind = self.moving.range((Bound::Excluded(self.refreshed), Bound::Unbounded));
        let around = self.moving.range(..=self.refreshed);
        let mut ids = Vec::new();
        for (&id, _) in behind.chain(around) {
            let Some(client) = self.clients.get(&id) else { continue };
            ids.push(id);
            left = left.saturating_sub(client.accounts.len());
            if left == 0 {
                break;
            }
        }
        for id in ids {
            self.refreshed = id;
            self.refresh_place(id);
        }
    }

    /// The same for one client.
    pub(crate) fn refresh_place(&mut self, id: ClientId) {
        if self.moving.get(&id).is_some_and(|&refreshed| refreshed != self.events) {
            self.enter(id);
        }
    }

    /// The same for the first waiter of a GPU.
    pub(crate) fn refresh_first(&mut self, uuid: GpuUuid) {
        let first = self.gpus.get(&uuid).and_then(|gpu| gpu.waiting().next());
        if let Some((_, _, id)) = first {
            self.refresh_place(id);
        }
    }

    /// How far a client's job is ahead of the clock on each GPU that the client uses.
    pub(crate) fn ahead_on_each(&self, client: &Client) -> impl Iterator<Item = Virtual> {
        client.accounts.keys().filter_map(|uuid| {
            let shares = &self.gpus.get(uuid)?.shares;
            Some(shares.time(client.job) - shares.clock())
        })
    }

    /// How far a client is ahead of the clock on the GPU where it is furthest ahead, of all that it uses, or its gang.
    fn ahead_on_all(&self, client: &Client) -> Virtual {
        let of_gang = client.gang.and_then(|gang| self.gangs.get(&gang));
        let known = of_gang.map_or(&client.ahead, |members| &members.ahead);
        known.get_or_compute(self.events, || match of_gang {
            Some(members) => {
                let clients = members.ids().filter_map(|id| self.clients.get(&id));
                next::ahead_on_all(clients.flat_map(|client| self.ahead_on_each(client)))
            }
            None => next::ahead_on_all(self.ahead_on_each(client)),
        })
    }

    /// A client's place in the order of turns on a GPU, as it is now.
    pub(crate) fn key(&self, uuid: GpuUuid, id: ClientId) -> Option<Key> {
        self.key_on(self.gpus.get(&uuid)?, id)
    }

    fn key_on(&self, gpu: &Gpu, id: ClientId) -> Option<Key> {
        let client = self.clients.get(&id)?;
        let time = if client.uses_several() {
            gpu.shares.clock() + self.ahead_on_all(client)
        } else {
            gpu.shares.time(client.job)
        };
        Some((time.saturating_sub(gpu.lent_to(id, client)), client.waiting_since, id))
    }

    /// A client's place in a GPU's queue; that of a client which is not in it, as it is now.
    pub(crate) fn place_on(&self, uuid: GpuUuid, id: ClientId) -> Option<Key> {
        let gpu = self.gpus.get(&uuid)?;
        gpu.ledger.place(gpu.shares.clock(), id).or_else(|| self.key_on(gpu, id))
    }

    /// Clients in the order of their turn on a GPU.
    pub(crate) fn by_turn(&self, uuid: GpuUuid, ids: impl Iterator<Item = ClientId>) -> Vec<ClientId> {
        let Some(gpu) = self.gpus.get(&uuid) else { return Vec::new() };
        let ids: Vec<ClientId> = ids.collect();
        if ids.len() < 2 {
            return ids;
        }
        let mut keys: Vec<Key> = ids.into_iter().filter_map(|id| self.key_on(gpu, id)).collect();
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
        let given = self.gpus.get(&uuid).map_or(0, |gpu| gpu.ledger.sums().room);
        let free = u128::from(self.capacity(uuid, id)).saturating_sub(given);
        u64::try_from(free).unwrap_or(u64::MAX)
    }

    /// Bytes that other clients have beyond all that this client may fill, since it may see less of the GPU than they do. Until
    /// they have given these bytes back, nothing else that they give back makes room for it.
    pub(crate) fn overfull(&self, uuid: GpuUuid, id: ClientId) -> u64 {
        let given = self.gpus.get(&uuid).map_or(0, |gpu| gpu.ledger.sums().room);
        u64::try_from(given.saturating_sub(u128::from(self.capacity(uuid, id)))).unwrap_or(u64::MAX)
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
    fn with_unit(uuid: GpuUuid, gpu: &Gpu, group: Group, unit: &Unit, is_in: fn(Standing) -> bool) -> Group {
        let entries = unit.on(uuid).iter().filter_map(|&id| gpu.ledger.entry(id));
        entries.filter(|entry| !is_in(entry.standing)).fold(group, Group::with)
    }

    /// Any client of a unit that has an entry on the GPU.
    fn one_on(uuid: GpuUuid, gpu: &Gpu, unit: &Unit) -> Option<ClientId> {
        unit.on(uuid).iter().copied().find(|&id| gpu.ledger.entry(id).is_some())
    }

    pub(crate) fn fits_alone(&self, uuid: GpuUuid, unit: &Unit) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        let Some(one) = Self::one_on(uuid, gpu, unit) else { return true };
        self.fit(uuid, Self::with_unit(uuid, gpu, Group::default(), unit, |_| false), one)
    }

    pub(crate) fn demand(&self, uuid: GpuUuid, id: ClientId) -> u128 {
        let entry = self.gpus.get(&uuid).and_then(|gpu| gpu.ledger.entry(id));
        entry.map_or(0, |entry| u128::from(entry.demand))
    }

    /// Bytes that a unit demands of a GPU.
    pub(crate) fn demand_of(&self, uuid: GpuUuid, unit: &Unit) -> u128 {
        unit.on(uuid).iter().map(|&id| self.demand(uuid, id)).sum()
    }

    /// Whether a client, with its gang, would fit if all others had drained: then only memory that cannot be moved is in
    /// its way.
    pub(crate) fn fits_in_the_end(&self, uuid: GpuUuid, id: ClientId) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        let unit = self.unit(id);
        // A program can be told that an allocation failed, but not that the memory which it has does not come back.
        let restores = matches!(self.phase(id), Some(Phase::Granted { .. }));
        let stays = |other, entry: &Entry| match self.clients.get(&other) {
            Some(client) => client.accounts.get(&uuid).map_or(0, |account| {
                let is_lost = client.stopped && client.may_go_on_until.is_none() && !restores;
                if is_lost { client.pinned(account) } else { account.pinned(client.memory) }
            }),
            None => entry.pinned,
        };
        let others = gpu.ledger.entries().filter(|(other, _)| !unit.contains(other));
        let pinned = others.fold(0, |sum, (other, entry)| sum + u128::from(stays(other, entry)));
        together::fits(self.capacity(uuid, id), pinned, self.demand_of(uuid, &unit), 1, false)
    }

    pub(crate) fn fits_beside_members(&self, uuid: GpuUuid, unit: &Unit) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        let Some(one) = Self::one_on(uuid, gpu, unit) else { return true };
        let members = gpu.ledger.sums().members;
        self.fit(uuid, Self::with_unit(uuid, gpu, members, unit, Standing::stays), one)
    }

    /// Whether the clients that still hold a GPU leave no place for a unit that is next.
    pub(crate) fn is_in_the_way(&self, uuid: GpuUuid, unit: &Unit) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return false };
        let Some(one) = Self::one_on(uuid, gpu, unit) else { return false };
        let holders = gpu.ledger.sums().holders;
        let is_not_next = |standing| standing != Standing::Next;
        holders.count > 0 && !self.fit(uuid, Self::with_unit(uuid, gpu, holders, unit, is_not_next), one)
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
            kept = Self::with_unit(uuid, gpu, kept, first, |_| false);
        }
        // Where clients say different capacities, no two of them fit, whoever is asked.
        let seen_by = first.and_then(|first| Self::one_on(uuid, gpu, first)).or(members.first().copied());
        let capacity = seen_by.map_or(0, |id| self.capacity(uuid, id));
        // The gangs that were judged, by their first members.
        let mut judged: Vec<ClientId> = Vec::new();
        for id in members {
            let unit = self.unit(id);
            if first.is_some_and(|first| first.contains(&id)) {
                continue;
            }
            if let Unit::Gang(_) = &unit {
                if unit.first().is_none_or(|first| judged.contains(first)) {
                    continue;
                }
                judged.extend(unit.first());
            }
            let staying = |id: &ClientId| gpu.ledger.entry(*id).filter(|entry| entry.standing.stays());
            let more = unit.on(uuid).iter().filter_map(staying).fold(kept, Group::with);
            if kept.count == 0 || self.fit_within(gpu, capacity, more) {
                kept = more;
            } else {
                leavers.extend(unit.on(uuid).iter().copied().filter(|id| staying(id).is_some()));
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
