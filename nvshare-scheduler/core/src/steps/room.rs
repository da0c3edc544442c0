//! Room: given with grants and to allocations that wait for it, and made by evictions.

use std::collections::BTreeSet;

use nvshare_proto::units::{Bytes, GIB};
use nvshare_proto::{Amount, EventKind, GpuUuid, SchedulerMessage};

use crate::policy::patience::{LONGEST_RESTORE, PROMISE};
use crate::policy::victims::{self, Candidate, NextTurn};
use crate::report::warnings::Topic;
use crate::state::account::{Ahead, Order, Promise};
use crate::state::client::{ClientId, HandOver, Phase, Why};
use crate::state::ledger::{Key, Standing};
use crate::steps::gangs::Unit;
use crate::{Core, Time};

/// Room given, or made, beyond what an allocation asked for, so that not every allocation has to ask. At most a quarter of
/// the free memory is given that way.
const SPARE_ROOM: u64 = GIB;

impl Core {
    /// Gives room to clients that are next and to allocations that wait, and takes it from clients that do not run.
    pub(crate) fn make_room(&mut self, uuid: GpuUuid) {
        self.take_back_what_is_too_much(uuid);
        let Some(gpu) = self.gpus.get(&uuid) else { return };
        if gpu.ledger.needy().is_empty() && gpu.ledger.next().is_empty() {
            return;
        }
        self.serve_needs(uuid, |standing| standing != Standing::Parked && standing != Standing::Waits);
        self.grant_or_evict_for_all(uuid);
        // Last: an allocation of a parked client may have to wait for a turn, and no client that is next waits for it
        // meanwhile.
        self.serve_needs(uuid, |standing| standing == Standing::Parked || standing == Standing::Waits);
    }

    /// Goes through the clients that are next, in the order of their turn. It ends when the rest of the free room is too
    /// little for any of them: then it orders what they lack together, as far as possible.
    fn grant_or_evict_for_all(&mut self, uuid: GpuUuid) {
        let mut reserved = self.needed_by_holders(uuid);
        let mut at = None;
        let mut judged: Vec<u64> = Vec::new();
        while let Some((_, _, id)) = self.next_behind(uuid, at) {
            self.steps += 1;
            at = self.gpus.get(&uuid).and_then(|gpu| gpu.ledger.entry(id)).map(|entry| entry.key);
            let gang = self.gang_of(id);
            if gang.is_none_or(|gang| !judged.contains(&gang)) {
                judged.extend(gang);
                self.grant_or_evict(id, uuid, reserved);
            }
            if !self.phase(id).is_some_and(Phase::is_next) {
                continue;
            }
            reserved = reserved.saturating_add(self.deficit(uuid, id));
            let free = self.free(uuid, id);
            let Some(gpu) = self.gpus.get(&uuid) else { return };
            let least = gpu.ledger.least_next_deficit().unwrap_or(0);
            if gpu.ledger.next().len() > 1 && least > free.saturating_sub(reserved) {
                let together = gpu.ledger.sums().next_deficit.saturating_sub(u128::from(free));
                if gpu.ledger.sums().leaving == 0 {
                    let together = u64::try_from(together).unwrap_or(u64::MAX);
                    let missing = together.saturating_add(self.overfull(uuid, id));
                    self.order_evictions(uuid, missing, Some(&[id]));
                }
                return;
            }
        }
    }

    fn next_behind(&self, uuid: GpuUuid, at: Option<Key>) -> Option<Key> {
        let next = self.gpus.get(&uuid)?.ledger.next();
        match at {
            Some(at) => next.range(at..).find(|&&key| key > at).copied(),
            None => next.first().copied(),
        }
    }

    fn serve_needs(&mut self, uuid: GpuUuid, whose: impl Fn(Standing) -> bool) {
        let Some(gpu) = self.gpus.get(&uuid) else { return };
        let standing = |id| gpu.ledger.entry(id).map(|entry| entry.standing);
        let needy = gpu.ledger.needy().iter().copied().filter(|&id| standing(id).is_some_and(&whose));
        // Room that clients ahead will take as soon as the rest of what they need is free.
        let mut reserved = 0;
        for id in self.by_turn(uuid, needy) {
            self.serve_need(id, uuid, &mut reserved);
        }
    }

    /// If the capacity has become smaller than the room that was given, evicts the excess as far as it can leave.
    fn take_back_what_is_too_much(&mut self, uuid: GpuUuid) {
        let Some(gpu) = self.gpus.get(&uuid) else { return };
        let too_much = gpu.ledger.sums().room.saturating_sub(u128::from(gpu.capacity));
        if too_much > 0 {
            self.order_evictions(uuid, u64::try_from(too_much).unwrap_or(u64::MAX), None);
        }
    }

    /// Bytes of a GPU's free room that are reserved before a unit that is next, or parked, may take any.
    fn reserved_before(&self, uuid: GpuUuid, unit: &Unit) -> u64 {
        let Some(gpu) = self.gpus.get(&uuid) else { return 0 };
        let entries = unit.on(uuid).iter().filter_map(|&id| gpu.ledger.entry(id));
        let own = entries.filter(|entry| entry.standing == Standing::Next).map(|entry| entry.key).min();
        let ahead = gpu.ledger.next().iter().take_while(|&&key| own.is_none_or(|own| key < own));
        let deficits = ahead.map(|&(_, _, other)| self.deficit(uuid, other));
        deficits.fold(self.needed_by_holders(uuid), u64::saturating_add)
    }

    /// Bytes that allocations of the GPU's holders wait for.
    fn needed_by_holders(&self, uuid: GpuUuid) -> u64 {
        let Some(gpu) = self.gpus.get(&uuid) else { return 0 };
        let needs = gpu.ledger.needy().iter().filter_map(|&other| {
            let holds = gpu.ledger.entry(other).is_some_and(|entry| entry.standing.holds());
            let account = self.account(other, uuid).filter(|_| holds)?;
            Some(account.needs.min(gpu.capacity.saturating_sub(account.room)))
        });
        needs.fold(0, u64::saturating_add)
    }

    fn serve_need(&mut self, id: ClientId, uuid: GpuUuid, reserved: &mut u64) {
        let now = self.now;
        let Some(account) = self.account(id, uuid).copied().filter(|account| account.needs > 0) else {
            return;
        };
        let Some(gpu) = self.gpus.get(&uuid) else { return };
        let parked =
            gpu.ledger.entry(id).is_some_and(|entry| !entry.standing.holds() && !entry.standing.stays());
        // One client can have no more than the capacity: a larger need gets only the rest up to that, which may be nothing.
        let needs = account.needs.min(self.capacity(uuid, id).saturating_sub(account.room));
        let before = if parked { self.reserved_before(uuid, &Unit::One([id])) } else { 0 };
        let (there, ahead_of) = (self.free(uuid, id), reserved.saturating_add(before));
        let free = there.saturating_sub(ahead_of);
        // Freed room goes to the clients ahead first: if less than all of it were ordered, the order would be repeated
        // without end.
        let missing = ahead_of.saturating_add(needs).saturating_sub(there);
        let missing = missing.saturating_add(self.overfull(uuid, id));
        if needs <= free {
            let bytes = needs + self.spare(uuid, free - needs, id);
            self.with_account(id, uuid, |account| {
                let allocated = account.wanted();
                account.promised = Some(Promise { allocated, until: now + PROMISE });
                account.needs = 0;
                account.room = account.room.saturating_add(bytes);
            });
            self.send(id, SchedulerMessage::Room(Amount { gpu: uuid, bytes }));
            return;
        }
        *reserved = reserved.saturating_add(needs);
        // A client that is leaving will be asked for room when it has left.
        if gpu.ledger.sums().leaving > 0 {
            return;
        }
        // A program that grows will grow more: room is made in large pieces, as far as possible.
        let demand = gpu.ledger.entry(id).map_or(0, |entry| entry.demand);
        let dying = !gpu.ledger.departed().is_empty();
        let ahead = missing.saturating_add(SPARE_ROOM.min(self.capacity(uuid, id).saturating_sub(demand)));
        let ordered = self.order_evictions(uuid, ahead, Some(&[id]))
            || self.order_evictions(uuid, missing, Some(&[id]));
        // A process that is ending makes room as well, in time.
        if !ordered && !dying && self.fits_in_the_end(uuid, id) {
            // The clients in the way give the room back when their turn is over, or when their drain is complete after all.
            self.want_turn(id);
        } else if !ordered && !dying {
            self.with_account(id, uuid, |account| account.needs = 0);
            self.send(id, SchedulerMessage::NoRoom { gpu: uuid });
            self.tell_on(EventKind::Refused, id, uuid, needs);
            let text = format!("client {id}: no room for {} more on {uuid}", Bytes(needs));
            self.warn_of_client(Topic::Refused, id, Some(uuid), &text);
        }
    }

    /// A parked client whose allocation needs room waits for its turn, as with work.
    fn want_turn(&mut self, id: ClientId) {
        let now = self.now;
        if self.clients.get(&id).is_some_and(|client| client.phase == Phase::Parked && !client.wants) {
            self.with(id, |client| {
                client.wants = true;
                client.waiting_since = now;
            });
        }
    }

    /// Grants the lock, or makes room for it; to all members of a gang at once. `reserved`: bytes that the clients ahead
    /// lack on the GPU `looked_at`.
    fn grant_or_evict(&mut self, id: ClientId, looked_at: GpuUuid, reserved: u64) {
        let unit = self.unit(id);
        let first = unit.first().copied().unwrap_or(id);
        if self.cases.lacking.contains(&first) {
            return;
        }
        let next: Vec<ClientId> =
            unit.iter().copied().filter(|&id| self.phase(id).is_some_and(Phase::is_next)).collect();
        // Members that run already are on the other GPUs of a gang: what happens there is not waited for.
        let gpus: BTreeSet<GpuUuid> = next.iter().flat_map(|&id| self.gpus_used_by(id)).collect();
        let leaving = gpus.iter().any(|&uuid| self.is_in_the_way(uuid, &unit));
        if gpus.len() > 1 {
            self.cases.lacking.insert(first);
        }
        let moves =
            |uuid, &id: &ClientId| self.account(id, uuid).is_some_and(|account| account.order.is_some());
        let own_move = gpus.iter().any(|&uuid| unit.on(uuid).iter().any(|id| moves(uuid, id)));
        if leaving || own_move {
            return;
        }
        if self.judge_hopeless(id) {
            // The client was to be next: another client is now.
            self.step_back(&unit);
            return;
        }
        let mut complete = true;
        for &uuid in &gpus {
            let deficit = next.iter().map(|&id| self.deficit(uuid, id)).fold(0, u64::saturating_add);
            let before = if uuid == looked_at { reserved } else { self.reserved_before(uuid, &unit) };
            let free = self.free(uuid, id).saturating_sub(before);
            if deficit <= free {
                continue;
            }
            complete = false;
            // If so much cannot be evicted, other clients were promised the room, or are about to give it back.
            let lacks = |id: &ClientId| self.deficit(uuid, *id) > 0;
            let lacking: Vec<ClientId> = next.iter().copied().filter(lacks).collect();
            let missing = (deficit - free).saturating_add(self.overfull(uuid, id));
            let leaves = self.order_evictions(uuid, missing, Some(&lacking));
            // One that uses several GPUs, or has a gang, holds nothing while it waits for the others.
            if leaves && unit.len() == 1 && gpus.len() == 1 {
                self.restore_ahead(id, uuid, free);
            }
        }
        if complete {
            for id in next {
                self.grant(id, &self.gpus_used_by(id));
            }
        }
    }

    /// A client that is next gets what is free, while others still make room for it: it brings its memory back behind its
    /// closed gate. The room is its own, whatever becomes of its turn.
    fn restore_ahead(&mut self, id: ClientId, uuid: GpuUuid, free: u64) {
        let now = self.now;
        let Some((client, account)) = self.clients.get(&id).zip(self.account(id, uuid)) else { return };
        // An allocation that waits is served first.
        if account.needs > 0 {
            return;
        }
        let bytes = self.config.exchange.piece(client.memory, free, self.deficit(uuid, id));
        if bytes == 0 {
            return;
        }
        self.with_account(id, uuid, |account| {
            let absent = account.usage.absent;
            account.ahead.get_or_insert(Ahead { since: now, absent });
            account.room = account.room.saturating_add(bytes);
        });
        self.send(id, SchedulerMessage::Restore(Amount { gpu: uuid, bytes }));
    }

    /// The clients of a unit that were next wait on.
    pub(crate) fn step_back(&mut self, unit: &Unit) {
        for &id in unit.iter() {
            if self.phase(id).is_some_and(Phase::is_next) {
                self.with(id, |client| client.phase = Phase::Parked);
            }
        }
    }

    fn grant(&mut self, id: ClientId, gpus: &[GpuUuid]) {
        let now = self.now;
        let mut room = Vec::new();
        let mut restore = std::time::Duration::ZERO;
        let mut moved = false;
        let mut freed_at = None;
        for &uuid in gpus {
            self.serve_need_with_grant(id, uuid);
            let deficit = self.deficit(uuid, id);
            let bytes = deficit + self.spare(uuid, self.free(uuid, id).saturating_sub(deficit), id);
            let Some(account) = self.account(id, uuid) else { continue };
            let absent = account.usage.absent.min(self.capacity(uuid, id));
            moved |= absent > 0 || account.ahead.is_some();
            restore += account.rates.there_and_back(absent);
            if let Some(gpu) = self.gpus.get_mut(&uuid) {
                freed_at = freed_at.max(gpu.freed_at.take());
            }
            self.with_account(id, uuid, |account| account.room = account.room.saturating_add(bytes));
            room.push(Amount { gpu: uuid, bytes });
        }
        let begins = self.phase(id) == Some(Phase::Next(Why::Claims));
        self.with(id, |client| {
            client.wants = false;
            client.reported_hopeless = false;
            if !begins {
                client.accounts.values_mut().for_each(|account| account.claimed = 0);
            }
            let waited = |freed: &Time| client.waiting_since < *freed && *freed <= now;
            client.hand_over = freed_at.filter(waited).map(|freed| HandOver { freed, moves: moved });
        });
        let until = now + self.config.grace + restore.min(LONGEST_RESTORE);
        self.send_grant(id, until, room, begins);
    }

    /// Gives room to an allocation that waits, before its client is granted the lock: a grant has room for the whole
    /// demand.
    fn serve_need_with_grant(&mut self, id: ClientId, uuid: GpuUuid) {
        let Some(bytes) = self.account(id, uuid).map(|account| account.needs).filter(|&needs| needs > 0)
        else {
            return;
        };
        let bytes = bytes.min(self.deficit(uuid, id));
        self.with_account(id, uuid, |account| {
            account.needs = 0;
            account.room = account.room.saturating_add(bytes);
        });
        self.send(id, SchedulerMessage::Room(Amount { gpu: uuid, bytes }));
    }

    /// Sends a client the lock with so much room; the client should run by `until`.
    pub(crate) fn send_grant(&mut self, id: ClientId, until: Time, room: Vec<Amount>, begins: bool) {
        let (epoch, since) = (self.new_epoch(), self.now);
        self.with(id, |client| client.phase = Phase::Granted { epoch, since, until, begins });
        let gpus = self.gpus_used_by(id);
        let quantum = gpus.iter().filter_map(|uuid| self.gpus.get(uuid)).map(|gpu| gpu.quantum).min();
        let quantum_ms = quantum.map_or(u64::MAX, |quantum| quantum.as_millis() as u64);
        // WAITERS goes before the grant: the gate may open at once, and work in flight must be bounded from the first
        // launch on.
        let mut shared = gpus.iter().filter_map(|uuid| self.gpus.get(uuid));
        let contested = shared.any(|gpu| gpu.is_contested_from_the_grant(since));
        let waiting = contested || self.is_bounded(id);
        if let Some(client) = self.clients.get_mut(&id).filter(|_| waiting)
            && client.tell_waiting(waiting, since)
        {
            self.send(id, SchedulerMessage::Waiters { waiting });
        }
        self.send(id, SchedulerMessage::LockOk { epoch, quantum_ms, room });
    }

    /// Orders evictions of so many bytes, less what is ordered already. Returns whether they suffice, or an earlier order
    /// is still unanswered. For clients that need all of it (`for_clients`), nothing is ordered if not everything can be
    /// had.
    fn order_evictions(&mut self, uuid: GpuUuid, needed: u64, for_clients: Option<&[ClientId]>) -> bool {
        let now = self.now;
        let Some(gpu) = self.gpus.get(&uuid) else { return false };
        let sums = gpu.ledger.sums();
        let unanswered = sums.orders > 0;
        let missing = u128::from(needed).saturating_sub(sums.ordered);
        let missing = u64::try_from(missing).unwrap_or(u64::MAX);
        if missing == 0 {
            return true;
        }
        let candidates: Vec<Candidate> = gpu
            .ledger
            .entries()
            .filter(|(id, _)| for_clients.is_none_or(|ids| !ids.contains(id)))
            .filter(|(_, entry)| entry.room > 0 && entry.ordered.is_none() && !entry.stuck)
            .filter_map(|(id, entry)| {
                let account = self.account(id, uuid)?;
                // A client that holds the lock needs the room for all that it has allocated.
                let parked = matches!(entry.standing, Standing::Parked | Standing::Waits);
                let kept = if parked { account.resident() } else { account.wanted() };
                let unused = account.room.saturating_sub(kept).min(account.room - account.staying());
                let resident = account.room - unused;
                let movable = if parked { resident.saturating_sub(entry.pinned) } else { 0 };
                Some(Candidate { id, unused, movable, next_turn: self.next_turn(uuid, id)? })
            })
            .collect();
        let looked_at = candidates.len() as u64;
        let orders = victims::choose(missing, &candidates);
        let possible = orders.iter().fold(0, |sum: u64, &(_, bytes)| sum.saturating_add(bytes));
        if possible < missing && for_clients.is_some() {
            return unanswered;
        }
        self.steps += looked_at;
        for (victim, bytes) in orders {
            self.with_account(victim, uuid, |account| {
                account.order = Some(Order { bytes, came: 0, given: now, since: now });
            });
            self.send(victim, SchedulerMessage::Evict(Amount { gpu: uuid, bytes }));
        }
        possible >= missing
    }

    /// When a client needs its memory on a GPU again, as far as that is known.
    fn next_turn(&self, uuid: GpuUuid, id: ClientId) -> Option<NextTurn> {
        let (gpu, client) = self.gpus.get(&uuid).zip(self.clients.get(&id))?;
        if client.waits() {
            let (time, since, _) = self.place_on(uuid, id)?;
            return Some(NextTurn::InOrder { time, since });
        }
        let soon = gpu.goes_ahead(id, client) && client.rhythm.wakes_soon(self.now);
        let asleep_since = client.rhythm.asleep_since().unwrap_or(client.waiting_since);
        Some(NextTurn::Unknown { soon, asleep_since })
    }

    /// Bytes of room that a client gets beyond what it asks for: none while others wait.
    fn spare(&self, uuid: GpuUuid, free: u64, id: ClientId) -> u64 {
        let Some(gpu) = self.gpus.get(&uuid) else { return 0 };
        let own = gpu.ledger.entry(id).map(|entry| entry.standing);
        let own = usize::from(matches!(own, Some(Standing::Waits | Standing::Next)));
        let contested = gpu.ledger.count_waiting() + gpu.ledger.next().len() > own;
        if contested { 0 } else { SPARE_ROOM.min(free / 4) }
    }
}
