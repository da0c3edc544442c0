//! Room: given with grants and to allocations that wait, made by evictions.

use std::collections::BTreeMap;

use nvshare_proto::units::{Bytes, GIB};
use nvshare_proto::{GpuUuid, Room, SchedulerMessage};

use crate::policy::victims::{self, Candidate};
use crate::state::{Client, ClientId, Order, Phase, Promise, Time};
use crate::{Core, PROMISE, sum};

/// Room given, or made, beyond what an allocation asked for, so that not each one asks. Of free memory, a quarter
/// at most is given so.
const SPARE_ROOM: u64 = GIB;

impl Core {
    /// Gives room to those who are next and to allocations that wait, and takes it from those who do not run.
    pub(crate) fn make_room(&mut self, now: Time) {
        self.take_back_what_is_too_much(now);
        // What those further ahead will take as soon as the rest of it is there.
        let mut reserved: BTreeMap<GpuUuid, u64> = BTreeMap::new();
        self.serve_needs(now, &mut reserved, |phase| phase != Phase::Parked);
        for id in self.by_turn(|c| c.phase == Phase::Chosen) {
            self.grant_or_evict(id, now, &mut reserved);
        }
        // Last: a need that is parked may have to wait for a turn, and nobody who is next waits for it meanwhile.
        self.serve_needs(now, &mut reserved, |phase| phase == Phase::Parked);
    }

    pub(crate) fn serve_needs(
        &mut self,
        now: Time,
        reserved: &mut BTreeMap<GpuUuid, u64>,
        whose: impl Fn(Phase) -> bool,
    ) {
        for id in self.by_turn(|c| whose(c.phase) && c.accounts.values().any(|account| account.needs > 0)) {
            for uuid in self.gpus_used_by(id) {
                self.serve_need(id, uuid, now, reserved);
            }
        }
    }

    /// A capacity that became smaller holds for memory that is there already, as far as that can leave.
    pub(crate) fn take_back_what_is_too_much(&mut self, now: Time) {
        for uuid in self.gpus.keys().copied().collect::<Vec<_>>() {
            let too_much = self.charged(uuid).saturating_sub(self.capacity(uuid));
            if too_much > 0 {
                self.order_evictions(uuid, too_much, None, now);
            }
        }
    }

    pub(crate) fn serve_need(
        &mut self,
        id: ClientId,
        uuid: GpuUuid,
        now: Time,
        reserved: &mut BTreeMap<GpuUuid, u64>,
    ) {
        let Some(account) = self.account(id, uuid) else { return };
        if account.needs == 0 {
            return;
        }
        // One that crossed with room for it asks for more than one client can have: that it has, or gets now.
        let needs = account.needs.min(self.capacity(uuid).saturating_sub(account.budget));
        let free = self.free(uuid).saturating_sub(reserved.get(&uuid).copied().unwrap_or(0));
        if needs <= free {
            let bytes = needs + self.spare(uuid, free - needs, id);
            self.with_account(id, uuid, |account| {
                let allocated = account.wanted();
                account.promised = Some(Promise { allocated, until: now + PROMISE });
                account.needs = 0;
                add(&mut account.budget, bytes);
            });
            self.send(id, SchedulerMessage::Room(Room { gpu: uuid, bytes }));
            return;
        }
        add(reserved.entry(uuid).or_default(), needs);
        // Who is leaving is about to be asked for room.
        let leaving =
            |c: &Client| matches!(c.phase, Phase::Dropping { .. }) && c.accounts.contains_key(&uuid);
        if self.clients.values().any(leaving) {
            return;
        }
        // A program that grows will grow more: room is made in large pieces, as far as there is any.
        let ahead = (needs - free)
            .saturating_add(SPARE_ROOM.min(self.capacity(uuid).saturating_sub(self.demand(uuid, id))));
        let ordered = self.order_evictions(uuid, ahead, Some(id), now)
            || self.order_evictions(uuid, needs - free, Some(id), now);
        // Who is dying makes room as well, in its time.
        let dying = self.gpus.get(&uuid).is_some_and(|gpu| gpu.departed() > 0);
        if !ordered && !dying && self.fit(uuid, &[id]) {
            // Who is in the way gives it back when its turn is over.
            self.want_turn(id, now);
        } else if !ordered && !dying {
            self.with_account(id, uuid, |account| account.needs = 0);
            self.send(id, SchedulerMessage::NoRoom { gpu: uuid });
            self.warn(format!("client {id}: no room for {} more on {uuid}", Bytes(needs)));
        }
    }

    /// Memory that is parked waits for its turn like work does.
    pub(crate) fn want_turn(&mut self, id: ClientId, now: Time) {
        if let Some(client) = self.clients.get_mut(&id)
            && client.phase == Phase::Parked
            && !std::mem::replace(&mut client.wants, true)
        {
            client.waiting_since = now;
            self.wake_at(now);
        }
    }

    pub(crate) fn grant_or_evict(&mut self, id: ClientId, now: Time, reserved: &mut BTreeMap<GpuUuid, u64>) {
        let gpus = self.gpus_used_by(id);
        let leaving = gpus.iter().any(|&uuid| {
            let mut members = self.ids(|c| c.phase.holds() && c.accounts.contains_key(&uuid));
            members.push(id);
            members.len() > 1 && !self.fit(uuid, &members)
        });
        let own_move = gpus.iter().any(|&uuid| self.account(id, uuid).is_some_and(|a| a.order.is_some()));
        if leaving || own_move {
            return;
        }
        if self.is_hopeless(id) {
            self.with(id, |client| {
                client.phase = Phase::Parked;
                client.claims = false;
            });
            // It was to be next: somebody else is now.
            self.wake_at(now);
            return;
        }
        let mut complete = true;
        for &uuid in &gpus {
            let deficit = self.deficit(uuid, id);
            let reserved = reserved.entry(uuid).or_default();
            let free = self.free(uuid).saturating_sub(*reserved);
            add(reserved, deficit);
            if deficit <= free {
                continue;
            }
            complete = false;
            // If this is not possible, what others were promised, or are about to give back, is in the way.
            self.order_evictions(uuid, deficit - free, Some(id), now);
        }
        if complete {
            self.grant(id, &gpus, now);
        }
    }

    pub(crate) fn grant(&mut self, id: ClientId, gpus: &[GpuUuid], now: Time) {
        let mut room = Vec::new();
        let mut until = now + self.config.grace;
        let mut moved = false;
        let mut freed_at = None;
        for &uuid in gpus {
            let deficit = self.deficit(uuid, id);
            let bytes = deficit + self.spare(uuid, self.free(uuid).saturating_sub(deficit), id);
            moved |= self.account(id, uuid).is_some_and(|a| a.usage.absent > 0);
            let absent = self.account(id, uuid).map_or(0, |account| account.usage.absent);
            if let Some(gpu) = self.gpus.get_mut(&uuid) {
                until = until.saturating_add(gpu.move_cost(absent));
                freed_at = freed_at.max(gpu.freed_at.take());
            }
            self.with_account(id, uuid, |account| add(&mut account.budget, bytes));
            room.push(Room { gpu: uuid, bytes });
        }
        self.with(id, |client| {
            client.wants = false;
            client.reported_blocked = false;
            client.switch_from =
                freed_at.filter(|&freed| !moved && client.waiting_since < freed && freed <= now);
        });
        self.send_grant(id, until, room);
    }

    /// The lock is the client's, with so much room; it should run by `until`.
    pub(crate) fn send_grant(&mut self, id: ClientId, until: Time, room: Vec<Room>) {
        let epoch = self.new_epoch();
        self.with(id, |client| client.phase = Phase::Granted { epoch, until });
        let gpus = self.gpus_used_by(id);
        let quantum = gpus.iter().filter_map(|uuid| self.gpus.get(uuid)).map(|gpu| gpu.quantum).min();
        let quantum_ms = quantum.map_or(u64::MAX, |quantum| quantum.as_millis() as u64);
        self.send(id, SchedulerMessage::LockOk { epoch, quantum_ms, room });
    }

    /// Orders as much as is needed beyond what is on its way. False: it cannot be had, and for a client that needs all
    /// of it nothing is ordered then.
    pub(crate) fn order_evictions(
        &mut self,
        uuid: GpuUuid,
        needed: u64,
        for_client: Option<ClientId>,
        now: Time,
    ) -> bool {
        let orders = || self.clients.values().filter_map(|c| c.accounts.get(&uuid)?.order);
        let on_its_way = sum(orders().map(|order| order.bytes));
        let unanswered = orders().next().is_some();
        let missing = needed.saturating_sub(on_its_way);
        if missing == 0 {
            return true;
        }
        let queue = self.by_turn(|c| c.waits());
        let candidates: Vec<Candidate> = self
            .clients
            .iter()
            .filter(|(id, _)| Some(**id) != for_client)
            .filter_map(|(&id, client)| {
                let account = client.accounts.get(&uuid)?;
                if account.order.is_some() || account.stays_until.is_some() {
                    return None;
                }
                // Who holds the lock needs the room for all that it has allocated.
                let parked = client.phase == Phase::Parked;
                let kept = if parked { account.resident() } else { account.wanted() };
                let unused = account.budget.saturating_sub(kept);
                let resident = account.budget - unused;
                let movable = if parked { resident.saturating_sub(account.pinned(client.memory)) } else { 0 };
                Some(Candidate {
                    id,
                    unused,
                    movable,
                    turns_ahead: queue.iter().position(|&waiter| waiter == id),
                })
            })
            .collect();
        let orders = victims::choose(missing, &candidates);
        let possible = sum(orders.iter().map(|&(_, bytes)| bytes));
        if possible < missing && for_client.is_some() {
            return unanswered;
        }
        for (victim, bytes) in orders {
            self.with_account(victim, uuid, |account| {
                account.order = Some(Order { bytes, since: now });
            });
            self.send(victim, SchedulerMessage::Evict(Room { gpu: uuid, bytes }));
        }
        possible >= missing
    }

    /// Room to give a client beyond what it asks for: none while others wait.
    pub(crate) fn spare(&self, uuid: GpuUuid, free: u64, id: ClientId) -> u64 {
        let contested = self.clients.iter().any(|(&other, c)| {
            other != id && (c.waits() || c.phase == Phase::Chosen) && c.accounts.contains_key(&uuid)
        });
        if contested { 0 } else { SPARE_ROOM.min(free / 4) }
    }
}

fn add(to: &mut u64, bytes: u64) {
    *to = to.saturating_add(bytes);
}
