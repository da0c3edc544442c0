//! Looks at the state as a whole and does what it asks for.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nvshare_proto::units::{Bytes, GIB};
use nvshare_proto::{GpuUuid, Room, SchedulerMessage};

use super::policy::turn::Turn;
use super::policy::victims::Candidate;
use super::policy::{next, together, turn, victims};
use super::state::{Account, ClientId, Order, Phase, Promise, Time};
use super::{Core, PROMISE, RETRY, patience, sum};

/// Room given, or made, beyond what an allocation asked for, so that not each one asks. Of free memory, a quarter
/// at most is given so.
const SPARE_ROOM: u64 = GIB;

impl Core {
    pub(super) fn reconcile(&mut self, now: Time) {
        self.deadline = None;
        if !self.scheduling {
            return;
        }
        self.see_to_turns(now);
        if now < self.settled_at {
            self.wake_at(self.settled_at);
            return;
        }
        self.ask_hosts_again(now);
        self.end_promises(now);
        self.split_sets_that_outgrew(now);
        let mut contested = self.choose(now);
        self.make_room(now);
        contested.extend(self.gpus_of(|phase| phase == Phase::Chosen));
        self.tell_who_waits(&contested);
        self.report_stuck(now);
    }

    /// A GPU that nobody holds or is about to has no turn; one that somebody runs on has one.
    fn see_to_turns(&mut self, now: Time) {
        let held = self.gpus_of(|phase| phase.holds() || phase == Phase::Chosen);
        let run_on = self.gpus_of(Phase::runs);
        for (uuid, gpu) in &mut self.gpus {
            if !held.contains(uuid) {
                gpu.turn_started = None;
            } else if run_on.contains(uuid) {
                gpu.turn_started.get_or_insert(now);
            }
        }
    }

    /// A host that had no memory may have some by now.
    fn ask_hosts_again(&mut self, now: Time) {
        let mut next: Option<Time> = None;
        for account in self.clients.values_mut().flat_map(|c| c.accounts.values_mut()) {
            if account.stays_until.is_some_and(|until| until <= now) {
                account.stays_until = None;
            }
            next = next.into_iter().chain(account.stays_until).min();
        }
        if let Some(next) = next {
            self.wake_at(next);
        }
    }

    /// Room that an allocation waited for and did not use is room like any other.
    fn end_promises(&mut self, now: Time) {
        let mut next: Option<Time> = None;
        for account in self.clients.values_mut().flat_map(|c| c.accounts.values_mut()) {
            account.promised = account.promised.filter(|promise| promise.until > now);
            next = next.into_iter().chain(account.promised.map(|promise| promise.until)).min();
        }
        if let Some(next) = next {
            self.wake_at(next);
        }
    }

    /// Members whose demand grew until they no longer fit: those least behind leave.
    fn split_sets_that_outgrew(&mut self, now: Time) {
        for uuid in self.gpus.keys().copied().collect::<Vec<_>>() {
            let members = self.by_turn(|c| c.phase.stays() && c.accounts.contains_key(&uuid));
            if self.fit(uuid, &members) {
                continue;
            }
            let not_before = self.gpus.get(&uuid).map_or(Time::ZERO, |gpu| gpu.not_before);
            if now < not_before {
                self.wake_at(not_before);
                continue;
            }
            let mut kept: Vec<ClientId> = Vec::new();
            let mut asked = false;
            for id in members {
                kept.push(id);
                if self.fit(uuid, &kept) || kept.len() == 1 {
                    continue;
                }
                kept.pop();
                self.ask_to_leave(id, now);
                asked = true;
            }
            if let (true, Some(gpu)) = (asked, self.gpus.get_mut(&uuid)) {
                gpu.turn_started = gpu.turn_started.map(|_| now);
            }
        }
    }

    /// Makes waiters next: those who fit beside the others at once, those who do not when the turn is over.
    /// Returns the GPUs on which somebody has to wait.
    fn choose(&mut self, now: Time) -> BTreeSet<GpuUuid> {
        let mut contested_gpus = BTreeSet::new();
        // GPUs that a waiter further ahead will take when it can.
        let mut spoken_for: BTreeSet<GpuUuid> = BTreeSet::new();
        for id in self.by_turn(super::Client::waits) {
            let gpus = self.gpus_used_by(id);
            if self.is_hopeless(id) {
                continue;
            }
            let contested: Vec<GpuUuid> =
                gpus.iter().copied().filter(|&gpu| !self.fits_beside_members(gpu, id)).collect();
            if contested.is_empty() {
                self.with(id, |client| client.phase = Phase::Chosen);
                continue;
            }
            contested_gpus.extend(contested.iter().copied());
            let taken = contested.iter().any(|gpu| spoken_for.contains(gpu));
            match (!taken).then(|| self.turns_end(id, &contested)).flatten() {
                Some(ends) if ends <= now => self.claim(id, &contested, now),
                Some(ends) => self.wake_at(ends),
                None => {}
            }
            spoken_for.extend(gpus);
        }
        contested_gpus
    }

    /// When the turns on these GPUs are over for a waiter; `None` while that is not known.
    fn turns_end(&self, id: ClientId, contested: &[GpuUuid]) -> Option<Time> {
        let mut ends = Time::ZERO;
        for &uuid in contested {
            let gpu = self.gpus.get(&uuid)?;
            let leavers = self.leavers(uuid, id);
            // A turn that has not begun cannot be over.
            if leavers
                .iter()
                .any(|id| self.clients.get(id).is_some_and(|c| c.phase == Phase::Chosen || c.claims))
            {
                return None;
            }
            let mut idle_since = Some(Time::ZERO);
            for leaver in &leavers {
                let since = match self.clients.get(leaver).map(|c| c.phase) {
                    Some(Phase::Idle { since, .. }) => Some(since),
                    _ => None,
                };
                idle_since = idle_since.zip(since).map(|(a, b)| a.max(b));
            }
            let to_move = self.deficit(uuid, id).saturating_sub(self.free(uuid));
            let turn = Turn {
                started: gpu.turn_started,
                quantum: gpu.quantum,
                not_before: gpu.not_before,
                idle_since,
                move_cost: if to_move == 0 { Duration::ZERO } else { gpu.move_cost(to_move) },
            };
            ends = ends.max(turn::ends(&turn)?);
        }
        Some(ends)
    }

    /// The turn passes to a waiter: who does not fit beside it leaves.
    fn claim(&mut self, id: ClientId, contested: &[GpuUuid], now: Time) {
        for &uuid in contested {
            for leaver in self.leavers(uuid, id) {
                self.ask_to_leave(leaver, now);
            }
            if let Some(gpu) = self.gpus.get_mut(&uuid) {
                gpu.released.clear();
            }
        }
        self.with(id, |client| {
            client.phase = Phase::Chosen;
            client.claims = true;
        });
    }

    /// Members of a GPU that cannot stay beside a waiter: all but the first, in the order of their turn, that fit.
    fn leavers(&self, uuid: GpuUuid, id: ClientId) -> Vec<ClientId> {
        let mut kept = vec![id];
        let mut leavers = Vec::new();
        for member in self.by_turn(|c| c.phase.stays() && c.accounts.contains_key(&uuid)) {
            kept.push(member);
            if !self.fit(uuid, &kept) {
                kept.pop();
                leavers.push(member);
            }
        }
        leavers
    }

    fn ask_to_leave(&mut self, id: ClientId, now: Time) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        match client.phase {
            Phase::Chosen => {
                client.phase = Phase::Parked;
                client.claims = false;
            }
            // Its gate is closed and its work complete: there is nothing to ask.
            Phase::Idle { .. } => {
                client.phase = Phase::Parked;
                for uuid in client.accounts.keys() {
                    if let Some(gpu) = self.gpus.get_mut(uuid) {
                        gpu.freed_at = Some(now);
                    }
                }
            }
            Phase::Granted { epoch, .. } | Phase::Running { epoch } => {
                client.phase = Phase::Dropping { epoch, since: now };
                let patience_ms = self.patience_with(id).as_millis() as u32;
                self.send(id, SchedulerMessage::DropLock { epoch, patience_ms });
            }
            Phase::Parked | Phase::Dropping { .. } | Phase::Free => {}
        }
    }

    /// How long this client's drain may make no progress.
    fn patience_with(&self, id: ClientId) -> Duration {
        let gpus = self.gpus_used_by(id);
        let deferrals = gpus.iter().filter_map(|uuid| self.gpus.get(uuid)).map(|gpu| gpu.deferrals).max();
        patience(deferrals.unwrap_or(0))
    }

    /// Gives room to those who are next and to allocations that wait, and takes it from those who do not run.
    fn make_room(&mut self, now: Time) {
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

    fn serve_needs(
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
    fn take_back_what_is_too_much(&mut self, now: Time) {
        for uuid in self.gpus.keys().copied().collect::<Vec<_>>() {
            let too_much = self.charged(uuid).saturating_sub(self.capacity(uuid));
            if too_much > 0 {
                self.order_evictions(uuid, too_much, None, now);
            }
        }
    }

    fn serve_need(&mut self, id: ClientId, uuid: GpuUuid, now: Time, reserved: &mut BTreeMap<GpuUuid, u64>) {
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
            |c: &super::Client| matches!(c.phase, Phase::Dropping { .. }) && c.accounts.contains_key(&uuid);
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
    fn want_turn(&mut self, id: ClientId, now: Time) {
        if let Some(client) = self.clients.get_mut(&id)
            && client.phase == Phase::Parked
            && !std::mem::replace(&mut client.wants, true)
        {
            client.waiting_since = now;
            self.wake_at(now);
        }
    }

    fn grant_or_evict(&mut self, id: ClientId, now: Time, reserved: &mut BTreeMap<GpuUuid, u64>) {
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

    /// Whether no room can be made for a client, as things are: it waits until that changes. Who looks at the log reads
    /// why, once; that a process which has ended still gives its memory back is nothing to read about.
    fn is_hopeless(&mut self, id: ClientId) -> bool {
        let full = self.gpus_used_by(id).into_iter().find(|&uuid| !self.fit(uuid, &[id]));
        let passing = full.and_then(|uuid| self.gpus.get(&uuid)).is_some_and(|gpu| gpu.departed() > 0);
        let why = full
            .filter(|_| !passing)
            .map(|uuid| format!("what others have on {uuid} cannot be moved and leaves no room for it"));
        let Some(client) = self.clients.get_mut(&id) else { return true };
        client.blocked.clone_from(&why);
        if let Some(why) = why
            && !std::mem::replace(&mut client.reported_blocked, true)
        {
            self.warn(format!("client {id} waits: {why}"));
        }
        full.is_some()
    }

    fn grant(&mut self, id: ClientId, gpus: &[GpuUuid], now: Time) {
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
    pub(super) fn send_grant(&mut self, id: ClientId, until: Time, room: Vec<Room>) {
        let epoch = self.new_epoch();
        self.with(id, |client| client.phase = Phase::Granted { epoch, until });
        let gpus = self.gpus_used_by(id);
        let quantum = gpus.iter().filter_map(|uuid| self.gpus.get(uuid)).map(|gpu| gpu.quantum).min();
        let quantum_ms = quantum.map_or(u64::MAX, |quantum| quantum.as_millis() as u64);
        self.send(id, SchedulerMessage::LockOk { epoch, quantum_ms, room });
    }

    /// Orders as much as is needed beyond what is on its way. False: it cannot be had, and for a client that needs all
    /// of it nothing is ordered then.
    fn order_evictions(
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

    /// Holders learn whether somebody waits for what they hold.
    fn tell_who_waits(&mut self, contested: &BTreeSet<GpuUuid>) {
        for id in self.ids(|c| c.phase.holds()) {
            let waiting = self.gpus_used_by(id).iter().any(|gpu| contested.contains(gpu));
            let Some(client) = self.clients.get_mut(&id) else { continue };
            if client.told_waiting != waiting {
                client.told_waiting = waiting;
                self.send(id, SchedulerMessage::Waiters { waiting });
            }
        }
    }

    /// Who does not answer in time is reported, and no longer waited for where others can do without.
    fn report_stuck(&mut self, now: Time) {
        let grace = self.config.grace;
        for id in self.ids(|c| !c.reported_stuck) {
            let (due, what) = match self.clients.get(&id).map(|c| c.phase) {
                Some(Phase::Dropping { since, .. }) => {
                    (since + grace.max(self.patience_with(id)), "give the lock back")
                }
                Some(Phase::Granted { until, .. }) => (until, "run under its grant"),
                _ => continue,
            };
            if now < due {
                self.wake_at(due);
                continue;
            }
            self.with(id, |client| {
                client.reported_stuck = true;
                // Its turn counts as begun, so that it can be over.
                client.claims = false;
            });
            for uuid in self.gpus_used_by(id) {
                if let Some(gpu) = self.gpus.get_mut(&uuid) {
                    gpu.turn_started.get_or_insert(now);
                }
            }
            self.wake_at(now);
            self.warn(format!("client {id} does not answer: it should {what} and keeps the GPU"));
        }
        for id in self.ids(|c| c.accounts.values().any(|account| account.order.is_some())) {
            for uuid in self.gpus_used_by(id) {
                let Some(Order { since, .. }) = self.account(id, uuid).and_then(|a| a.order) else {
                    continue;
                };
                if now < since + grace {
                    self.wake_at(since + grace);
                    continue;
                }
                self.with_account(id, uuid, |account| {
                    account.order = None;
                    account.stays_until = Some(now + RETRY);
                });
                self.wake_at(now);
                self.warn(format!(
                    "client {id} was asked for memory of {uuid} and does not answer; others go on without it"
                ));
            }
        }
    }

    fn wake_at(&mut self, time: Time) {
        self.deadline = Some(self.deadline.map_or(time, |deadline| deadline.min(time)));
    }

    /// What a client wants resident when it runs: all that it has allocated, or what one client may have.
    fn demand(&self, uuid: GpuUuid, id: ClientId) -> u64 {
        let Some(account) = self.account(id, uuid) else { return 0 };
        // Room that does not come back is as good as used.
        let stuck = if account.stays_until.is_some() { account.budget } else { 0 };
        account.wanted().max(stuck).min(self.capacity(uuid))
    }

    fn capacity(&self, uuid: GpuUuid) -> u64 {
        self.gpus.get(&uuid).map_or(0, |gpu| gpu.capacity)
    }

    /// What it lacks for that.
    fn deficit(&self, uuid: GpuUuid, id: ClientId) -> u64 {
        self.demand(uuid, id).saturating_sub(self.account(id, uuid).map_or(0, |account| account.budget))
    }

    /// What nobody may fill, in bytes.
    pub(super) fn free(&self, uuid: GpuUuid) -> u64 {
        let Some(gpu) = self.gpus.get(&uuid) else { return 0 };
        gpu.capacity.saturating_sub(self.charged(uuid))
    }

    /// What clients may have resident, and what those who are gone have left, in bytes.
    pub(super) fn charged(&self, uuid: GpuUuid) -> u64 {
        let departed = self.gpus.get(&uuid).map_or(0, super::Gpu::departed);
        let budgets = self.clients.values().filter_map(|c| c.accounts.get(&uuid)).map(|a| a.budget);
        sum(budgets.chain([departed]))
    }

    /// Room to give a client beyond what it asks for: none while others wait.
    fn spare(&self, uuid: GpuUuid, free: u64, id: ClientId) -> u64 {
        let contested = self.clients.iter().any(|(&other, c)| {
            other != id && (c.waits() || c.phase == Phase::Chosen) && c.accounts.contains_key(&uuid)
        });
        if contested { 0 } else { SPARE_ROOM.min(free / 4) }
    }

    /// Whether these clients fit a GPU together, beside what others have there and cannot be moved.
    fn fit(&self, uuid: GpuUuid, members: &[ClientId]) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        let pinned = self
            .clients
            .iter()
            .filter(|(id, _)| !members.contains(id))
            .filter_map(|(_, client)| Some(client.accounts.get(&uuid)?.pinned(client.memory)))
            .chain([gpu.departed()]);
        let pinned = sum(pinned);
        let demands: Vec<u64> = members.iter().map(|&id| self.demand(uuid, id)).collect();
        together::fits(gpu.capacity, pinned, &demands, self.config.exclusive)
    }

    fn fits_beside_members(&self, uuid: GpuUuid, id: ClientId) -> bool {
        let mut members = self.ids(|c| c.phase.stays() && c.accounts.contains_key(&uuid));
        members.push(id);
        self.fit(uuid, &members)
    }

    fn account(&self, id: ClientId, uuid: GpuUuid) -> Option<&Account> {
        self.clients.get(&id)?.accounts.get(&uuid)
    }

    fn gpus_used_by(&self, id: ClientId) -> Vec<GpuUuid> {
        self.clients.get(&id).map(|c| c.accounts.keys().copied().collect()).unwrap_or_default()
    }

    fn gpus_of(&self, phase: impl Fn(Phase) -> bool) -> BTreeSet<GpuUuid> {
        self.clients.values().filter(|c| phase(c.phase)).flat_map(|c| c.accounts.keys().copied()).collect()
    }

    fn ids(&self, which: impl Fn(&super::Client) -> bool) -> Vec<ClientId> {
        self.clients.iter().filter(|(_, c)| which(c)).map(|(id, _)| *id).collect()
    }

    /// Clients in the order of their turn.
    pub(super) fn by_turn(&self, which: impl Fn(&super::Client) -> bool) -> Vec<ClientId> {
        let mut ids = self.ids(which);
        ids.sort_by_key(|id| self.clients.get(id).map(|c| next::key(c.virtual_time, c.waiting_since, *id)));
        ids
    }
}

fn add(to: &mut u64, bytes: u64) {
    *to = to.saturating_add(bytes);
}
