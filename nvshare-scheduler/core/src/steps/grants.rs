//! Grants: a client that is next gets the lock, with room for all that it has, once there is room on all of
//! its GPUs. All members of a gang get it at once.

use std::collections::BTreeSet;
use std::time::Duration;

use nvshare_proto::units::saturate;
use nvshare_proto::{Amount, GpuUuid, SchedulerMessage};

use crate::Time;
use crate::judge::room::next_behind;
use crate::policy::patience::MAX_RESTORE;
use crate::state::account::EarlyRestore;
use crate::state::client::{Client, ClientId, GangId, HandOver, NextReason, Phase};
use crate::state::entry::Standing;
use crate::state::gangs::Unit;
use crate::state::gpu::Gpu;
use crate::state::place::Place;
use crate::steps::books::Books;
use crate::steps::round::Round;

impl Round<'_> {
    /// Gives room to clients that are next and to allocations that wait, and takes it from clients that do
    /// not run.
    pub(crate) fn make_room(&mut self, uuid: GpuUuid) {
        self.books.reclaim_excess_room(uuid);
        let wants = |gpu: &&Gpu| !gpu.ledger.needy().is_empty() || !gpu.ledger.next().is_empty();
        if self.state().gpu(uuid).filter(wants).is_none() {
            return;
        }
        let is_parked = |standing| standing == Standing::Parked || standing == Standing::Waits;
        self.books.serve_needs(uuid, |standing| !is_parked(standing));
        self.grant_or_evict_for_all(uuid);
        // Last: an allocation of a parked client may have to wait for a turn, and no client that is next
        // waits for it meanwhile.
        self.books.serve_needs(uuid, is_parked);
    }

    /// Goes through the clients that are next, in the order of their turn. It ends when the rest of the free
    /// room is too little for any of them. Then it orders what they lack together, as far as possible.
    fn grant_or_evict_for_all(&mut self, uuid: GpuUuid) {
        let needed = |gpu| self.state().needed_by_holders(gpu);
        let mut reserved = self.state().gpu(uuid).map_or(0, needed);
        let mut at = None;
        let mut judged_gangs: Vec<GangId> = Vec::new();
        while let Some(gpu) = self.state().gpu(uuid)
            && let Some(Place { client: id, .. }) = next_behind(gpu, at)
        {
            at = gpu.ledger.entry(id).map(|entry| entry.place);
            self.books.count_work(1);
            let gang = self.state().gang_of(id);
            if gang.is_none_or(|gang| !judged_gangs.contains(&gang)) {
                judged_gangs.extend(gang);
                self.grant_or_evict(id, uuid, reserved);
            }
            if self.state().phase(id).is_some_and(Phase::is_next) {
                let Some(gpu) = self.state().known_gpu(uuid) else { return };
                reserved = reserved.saturating_add(gpu.deficit(id));
                if self.is_free_room_too_small(gpu, id, reserved) {
                    return self.order_total_deficit(uuid, id);
                }
            }
        }
    }

    /// Whether the free room that is left behind a client is too little for any other that is next.
    fn is_free_room_too_small(&self, gpu: &Gpu, id: ClientId, reserved: u64) -> bool {
        let least = gpu.ledger.least_next_deficit().unwrap_or(0);
        let free = self.state().free(gpu, id);
        gpu.ledger.next().len() > 1 && least > free.saturating_sub(reserved)
    }

    /// Orders what all who are next lack together.
    fn order_total_deficit(&mut self, uuid: GpuUuid, id: ClientId) {
        let Some(gpu) = self.state().known_gpu(uuid) else { return };
        let sums = gpu.ledger.sums();
        if sums.leaving == 0 {
            let together = sums.next_deficit.saturating_sub(u128::from(self.state().free(gpu, id)));
            let together = saturate(together);
            let missing = together.saturating_add(self.state().overfull(gpu, id));
            self.books.order_evictions(uuid, missing, Some(&[id]));
        }
    }

    /// Grants the lock, or makes room for it; to all members of a gang at once. `reserved`: bytes that the
    /// clients ahead lack on the GPU `looked_at`.
    fn grant_or_evict(&mut self, id: ClientId, looked_at: GpuUuid, reserved: u64) {
        let state = self.books.state();
        let unit = state.unit(id);
        if self.considered.contains(&unit.first()) {
            return;
        }
        let is_next = |client: &&Client| client.phase().is_next();
        let next: Vec<ClientId> = state.clients_of(&unit).filter(is_next).map(|client| client.id).collect();
        // Members that run already are on the other GPUs of a gang: nothing there is waited for.
        let gpus: BTreeSet<GpuUuid> =
            state.clients_of(&next).flat_map(|client| client.accounts.keys().copied()).collect();
        let known = || gpus.iter().filter_map(|uuid| state.gpu(*uuid));
        // A rank that was idle and has its memory goes on with others that run: without it they could not drain.
        let lacks = |gpu: &Gpu| next.iter().any(|&id| gpu.deficit(id) > 0);
        let resumes = |client: &Client| client.phase() == Phase::Next(NextReason::Resumes);
        let goes_on = state.clients_of(&unit).any(|client| client.phase().is_running_or_draining())
            && state.clients_of(&next).all(resumes)
            && !known().any(lacks);
        let leaving = !goes_on && known().any(|gpu| state.is_in_the_way(gpu, &unit));
        if gpus.len() > 1 {
            self.considered.insert(unit.first());
        }
        let moves = |uuid, &id: &ClientId| {
            state.account(id, uuid).is_some_and(|account| account.evict_order.is_some())
        };
        let own_move = gpus.iter().any(|&uuid| unit.on(uuid).iter().any(|id| moves(uuid, id)));
        if leaving || own_move {
            return;
        }
        if self.settle_must_wait(id) {
            // The client was to be next: another client is now.
            self.books.step_back(&unit);
            return;
        }
        let grantee = Grantee { id, unit, next, gpus };
        let mut complete = true;
        for &uuid in &grantee.gpus {
            let ahead = (uuid == looked_at).then_some(reserved);
            complete &= self.books.ensure_room(&grantee, uuid, ahead);
        }
        if complete {
            for id in grantee.next {
                self.books.grant(id);
            }
        }
    }
}

/// A client that is next, with its gang.
#[derive(Debug)]
struct Grantee {
    id: ClientId,
    unit: Unit,
    /// Those of the unit that are next.
    next: Vec<ClientId>,
    /// The GPUs that these use.
    gpus: BTreeSet<GpuUuid>,
}

impl Books {
    /// Looks for room on one GPU, and has others give back what is missing. Returns whether there was enough.
    /// `ahead`: bytes that the clients ahead lack there, where they were counted.
    fn ensure_room(&mut self, grantee: &Grantee, uuid: GpuUuid, ahead: Option<u64>) -> bool {
        let Grantee { id, ref unit, ref next, ref gpus } = *grantee;
        let state = self.state();
        let Some(gpu) = state.known_gpu(uuid) else { return true };
        let deficit = next.iter().map(|&id| gpu.deficit(id)).fold(0, u64::saturating_add);
        let ahead = ahead.unwrap_or_else(|| state.reserved_before(gpu, unit));
        let free = state.free(gpu, id).saturating_sub(ahead);
        if deficit <= free {
            return true;
        }
        // If that much cannot be evicted, other clients were promised the room, or are about to give it back.
        let lacking: Vec<ClientId> = next.iter().copied().filter(|&id| gpu.deficit(id) > 0).collect();
        let missing = (deficit - free).saturating_add(state.overfull(gpu, id));
        let leaves = self.order_evictions(uuid, missing, Some(&lacking));
        // One that uses several GPUs, or has a gang, holds nothing while it waits for the others.
        if leaves && unit.len() == 1 && gpus.len() == 1 {
            self.restore_early(id, uuid, free);
        }
        false
    }

    /// Gives a client that is next what is free, while others still make room for it. It brings its memory
    /// back behind its closed gate. The room is its own, whatever becomes of its turn.
    fn restore_early(&mut self, id: ClientId, uuid: GpuUuid, free: u64) {
        let now = self.state().now();
        let client_and_account = self.state().client(id).zip(self.state().account(id, uuid));
        // An allocation that waits is served first.
        let Some((client, _)) = client_and_account.filter(|(_, account)| account.needs == 0) else { return };
        let deficit = self.state().gpu(uuid).map_or(0, |gpu| gpu.deficit(id));
        let bytes = self.state().config().exchange.piece(client.memory, free, deficit);
        if bytes == 0 {
            return;
        }
        self.change_account(id, uuid, |account| {
            let absent = account.usage.absent;
            account.early.get_or_insert(EarlyRestore { since: now, absent });
            account.room = account.room.saturating_add(bytes);
        });
        self.send(id, SchedulerMessage::Restore(Amount { gpu: uuid, bytes }));
    }

    fn grant(&mut self, id: ClientId) {
        let now = self.state().now();
        let mut room = Vec::new();
        let mut restore = Duration::ZERO;
        let mut moved = false;
        let mut freed_at = None;
        for uuid in self.state().gpus_used_by(id) {
            self.serve_need_with_grant(id, uuid);
            let gpu = self.state().gpu(uuid);
            let bytes = gpu.map_or(0, |gpu| self.state().room_to_grant(gpu, id));
            let capacity = gpu.map_or(0, |gpu| self.state().capacity(gpu, id));
            let Some(account) = self.state().account(id, uuid) else {
                debug_assert!(false, "a client has an account on each GPU that it uses");
                continue;
            };
            let absent = account.usage.absent.min(capacity);
            moved |= absent > 0 || account.early.is_some();
            restore += account.rates.there_and_back(absent);
            self.change_gpu(uuid, |gpu| freed_at = freed_at.max(gpu.freed_at.take()));
            self.change_account(id, uuid, |account| account.room = account.room.saturating_add(bytes));
            room.push(Amount { gpu: uuid, bytes });
        }
        let begins = self.state().phase(id) == Some(Phase::Next(NextReason::Claims));
        self.change_client(id, |client| {
            client.notes.reported_no_room = false;
            if !begins {
                client.accounts.values_mut().for_each(|account| account.moved_for_turn = 0);
            }
            let waited = |freed: &Time| client.waiting_since < *freed && *freed <= now;
            client.hand_over = freed_at.filter(waited).map(|freed| HandOver { freed, moves: moved });
        });
        let until = now + self.state().config().grace + restore.min(MAX_RESTORE);
        self.send_grant(id, until, room, begins);
    }

    /// Sends a client the lock with this room, which answers its request; the client should run by `until`. Nothing else sends LOCK_OK.
    pub(crate) fn send_grant(&mut self, id: ClientId, until: Time, room: Vec<Amount>, begins: bool) {
        let (epoch, since) = (self.new_epoch(), self.state().now());
        self.change_client(id, |client| {
            client.wants = false;
            client.grant(epoch, since, until, begins);
        });
        let gpus = self.state().gpus_used_by(id);
        let quantum = self.state().gpus_among(&gpus).map(|gpu| gpu.quantum).min();
        let quantum_ms = quantum.map_or(u64::MAX, |quantum| quantum.as_millis() as u64);
        // WAITERS goes before the grant: the gate may open at once, and work in flight must be bounded from
        // the first launch on.
        let state = self.state();
        let waited_for = state.gpus_among(&gpus).any(|gpu| gpu.bounds_submissions_from_grant(since));
        let bounded = state.client(id).is_some_and(|client| state.is_bounded(client));
        if waited_for || bounded {
            self.tell_waiting(id, true);
        }
        self.send(id, SchedulerMessage::LockOk { epoch, quantum_ms, room });
    }
}
