//! Room: given to allocations that wait for it, and made by evictions.

use nvshare_proto::units::{Bytes, saturate};
use nvshare_proto::{Amount, EventKind, GpuUuid, SchedulerMessage};

use crate::judge::room::{SPARE_ROOM, spare};
use crate::policy::patience::{ENDS_WITHIN, PROMISE_LASTS};
use crate::report::warnings::Topic;
use crate::state::account::{EvictOrder, Promise};
use crate::state::client::{ClientId, Phase};
use crate::state::entry::Standing;
use crate::state::gangs::Unit;
use crate::state::gpu::Gpu;
use crate::steps::books::Books;

impl Books {
    /// Evicts the room beyond the capacity, as far as it can leave, if the capacity has become smaller.
    pub(crate) fn reclaim_excess_room(&mut self, uuid: GpuUuid) {
        let excess = |gpu: &Gpu| gpu.ledger.sums().room.saturating_sub(u128::from(gpu.most_room()));
        let too_much = self.state().gpu(uuid).map_or(0, excess);
        if too_much > 0 {
            self.order_evictions(uuid, saturate(too_much), None);
        }
    }

    /// Gives room to allocations of clients that stand like this, in the order of turns, or makes it.
    pub(crate) fn serve_needs(&mut self, uuid: GpuUuid, whose: impl Fn(Standing) -> bool) {
        let Some(gpu) = self.state().known_gpu(uuid) else { return };
        let standing = |id| gpu.ledger.entry(id).map(|entry| entry.standing);
        let needy = gpu.ledger.needy().iter().copied().filter(|&id| standing(id).is_some_and(&whose));
        // Room that clients ahead will take as soon as the rest of what they need is free.
        let mut reserved = 0;
        for id in self.state().by_turn(gpu, needy) {
            self.serve_need(id, uuid, &mut reserved);
        }
    }

    fn serve_need(&mut self, id: ClientId, uuid: GpuUuid, reserved: &mut u64) {
        let gpu_and_account = self.state().gpu(uuid).zip(self.state().account(id, uuid));
        // None: its need is over since this look began.
        let Some((gpu, account)) = gpu_and_account.filter(|(_, account)| account.needs > 0) else { return };
        let parked =
            gpu.ledger.entry(id).is_some_and(|entry| !entry.standing.holds() && !entry.standing.is_staying());
        // One client can have no more than the capacity: a larger need gets only the rest up to that, which
        // may be nothing.
        let capacity = self.state().capacity(gpu, id);
        let needs = account.needs.min(capacity.saturating_sub(account.room));
        let before = if parked { self.state().reserved_before(gpu, &Unit::alone(id)) } else { 0 };
        let (free, ahead) = (self.state().free(gpu, id), reserved.saturating_add(before));
        let available = free.saturating_sub(ahead);
        if needs <= available {
            return self.give_room(id, uuid, needs + spare(gpu, available - needs, id));
        }
        // Freed room goes to the clients ahead first: if less than all of it were ordered, the order would be
        // repeated without end.
        let missing = ahead.saturating_add(needs).saturating_sub(free);
        let missing = missing.saturating_add(self.state().overfull(gpu, id));
        *reserved = reserved.saturating_add(needs);
        // A client that is leaving will be asked for room when it has left.
        if gpu.ledger.sums().leaving > 0 {
            return;
        }
        // A process that is ending makes room as well, in time; not one that has left and lives on.
        let now = self.state().now();
        let ends_by = gpu.departed.values().map(|departed| departed.since.saturating_add(ENDS_WITHIN)).max();
        let ends_by = ends_by.filter(|&by| by > now);
        // A program that grows will grow more: room is made in large pieces, as far as possible.
        let demand = gpu.ledger.entry(id).map_or(0, |entry| entry.demand);
        let with_spare = missing.saturating_add(SPARE_ROOM.min(capacity.saturating_sub(demand)));
        let makes_room = self.order_evictions(uuid, with_spare, Some(&[id]))
            || self.order_evictions(uuid, missing, Some(&[id]));
        match ends_by {
            _ if makes_room => {}
            Some(by) => self.wake_at(uuid, by),
            None => self.wait_or_refuse(id, uuid, needs),
        }
    }

    /// Gives room to an allocation that waits.
    fn give_room(&mut self, id: ClientId, uuid: GpuUuid, bytes: u64) {
        let until = self.state().now() + PROMISE_LASTS;
        self.change_account(id, uuid, |account| {
            let allocated = account.wanted();
            account.promised = Some(Promise { allocated, until });
            account.needs = 0;
            account.room = account.room.saturating_add(bytes);
        });
        self.send(id, SchedulerMessage::Room(Amount { gpu: uuid, bytes }));
    }

    /// Lets an allocation wait for a turn of its client, or refuses it, when nobody can give the room now.
    fn wait_or_refuse(&mut self, id: ClientId, uuid: GpuUuid, needs: u64) {
        if self.state().gpu(uuid).is_some_and(|gpu| self.state().fits_once_all_have_drained(gpu, id)) {
            // The clients in the way give the room back when their turn is over, or when their drain is
            // complete after all.
            return self.want_turn(id);
        }
        // The memory of the others of its gang may be all that is in the way.
        let sharers = self.state().gang_of(id).filter(|&gang| self.state().are_sharers(gang));
        if let Some(gang) = sharers {
            return self.disband(id, gang, uuid);
        }
        self.change_account(id, uuid, |account| account.needs = 0);
        self.send(id, SchedulerMessage::NoRoom { gpu: uuid });
        self.report_mut().emit_on(EventKind::Refused, id, uuid, needs);
        let text = format!("client {id}: no room for {} more on {uuid}", Bytes(needs));
        self.warn_of_client(Topic::Refused, id, Some(uuid), &text);
    }

    /// Requests the lock for a parked client whose allocation needs room: it waits for its turn, as with
    /// work.
    fn want_turn(&mut self, id: ClientId) {
        let now = self.state().now();
        if self.state().client(id).is_some_and(|client| client.phase() == Phase::Parked && !client.wants) {
            self.change_client(id, |client| client.request_lock(now));
        }
    }

    /// Gives room to an allocation that waits, before its client is granted the lock: a grant has room for
    /// the whole demand.
    pub(crate) fn serve_need_with_grant(&mut self, id: ClientId, uuid: GpuUuid) {
        let needs = self.state().account(id, uuid).map_or(0, |account| account.needs);
        if needs > 0 {
            let bytes = needs.min(self.state().gpu(uuid).map_or(0, |gpu| gpu.deficit(id)));
            self.change_account(id, uuid, |account| {
                account.needs = 0;
                account.room = account.room.saturating_add(bytes);
            });
            self.send(id, SchedulerMessage::Room(Amount { gpu: uuid, bytes }));
        }
    }

    /// Orders evictions of `needed` bytes, less what is ordered already: see
    /// [`State::evictions`](crate::state::State::evictions). Returns whether they suffice, or an earlier
    /// order is still unanswered.
    pub(crate) fn order_evictions(
        &mut self,
        uuid: GpuUuid,
        needed: u64,
        beneficiaries: Option<&[ClientId]>,
    ) -> bool {
        let Some(gpu) = self.state().known_gpu(uuid) else { return false };
        let evictions = self.state().evictions(gpu, needed, beneficiaries);
        self.count_work(evictions.clients_seen);
        for (victim, bytes) in evictions.orders {
            self.send_evict_order(victim, uuid, bytes);
        }
        evictions.suffice
    }

    /// Has a client give back this much of its room. Nothing else sends EVICT.
    pub(crate) fn send_evict_order(&mut self, victim: ClientId, uuid: GpuUuid, bytes: u64) {
        let now = self.state().now();
        self.change_account(victim, uuid, |account| {
            account.evict_order = Some(EvictOrder { bytes, came: 0, given: now, since: now });
        });
        self.send(victim, SchedulerMessage::Evict(Amount { gpu: uuid, bytes }));
    }
}
