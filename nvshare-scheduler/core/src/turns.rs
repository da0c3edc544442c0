//! Turns: which client is next, which clients have to leave for it, and when.

use std::collections::BTreeSet;
use std::time::Duration;

use nvshare_proto::units::Bytes;
use nvshare_proto::{EventKind, GpuUuid, SchedulerMessage};

use crate::client::{ClientId, Job, Phase, Why};
use crate::gangs::Unit;
use crate::gpu::{Gpu, Source};
use crate::ledger::{Group, Key};
use crate::policy::turn::{self, Turn};
use crate::policy::{next, quantum, slices};
use crate::rule::Rule;
use crate::short::{self, LongWork, is_short};
use crate::warnings::Topic;
use crate::{Core, Time};

/// Virtual times that differ by no more than this count as equal, in nanoseconds.
const EVEN: i64 = 1_000_000;

/// The first client of a GPU's queue that does not fit beside the others: clients behind it must not delay it.
#[derive(Debug, Clone, Copy)]
struct Head {
    /// The largest demand of the clients whose turn comes before, in bytes.
    ahead: u128,
    /// Bytes that stay when the head comes: members that keep running beside it, and memory that cannot be moved.
    stays: u128,
}

/// When the turns of those who leave for a waiter are over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct End {
    /// When the waiter may have the GPUs.
    at: Time,
    /// When the turns are over for those who wait in turn. The waiter goes ahead of them if this is later.
    in_turn: Time,
}

/// The members of a GPU, by whether they fit it together with a waiter.
#[derive(Debug)]
pub(crate) struct Split {
    gpu: GpuUuid,
    /// The waiter, and those that stay.
    kept: Group,
    leavers: Vec<ClientId>,
}

/// Those who would have to leave a GPU for a waiter.
#[derive(Debug, Default)]
struct Held {
    /// The jobs of those who are not idle.
    by: Vec<Job>,
    work: LongWork,
    /// When the last of them became idle, if all are.
    idle_since: Option<Time>,
    /// How long the idle ones keep their places.
    patience: Duration,
}

impl Core {
    /// Makes waiters next: those that fit beside the others and delay nobody ahead of them, at once; the first that does
    /// not fit, when the turn is over.
    pub(crate) fn choose(&mut self, uuid: GpuUuid) {
        let Some(gpu) = self.gpus.get_mut(&uuid) else { return };
        gpu.contested = false;
        let mut head: Option<Head> = None;
        let mut at: Option<Key> = None;
        let mut judged: Vec<u64> = Vec::new();
        while let Some(key) = self.waiter_behind(uuid, at) {
            at = Some(key);
            self.steps += 1;
            let id = key.2;
            // What others of its job got meanwhile may have moved it behind others: then it is met again.
            self.refresh_place(id);
            if self.place_on(uuid, id).is_some_and(|place| place > key) {
                continue;
            }
            if let Some(gang) = self.gang_of(id) {
                if judged.contains(&gang) {
                    continue;
                }
                judged.push(gang);
            }
            if let Some(head) = &head {
                if self.nobody_else_fits(uuid) {
                    return;
                }
                if self.everybody_else_waits_for(uuid, head) {
                    self.mark_contested(uuid);
                    return;
                }
            }
            let case = self.case_of(id);
            let unit = &case.unit;
            if case.is_hopeless {
                // A client is waited for even if it does not drain, and has to bound its work in flight.
                if self.somebody_defers(uuid) {
                    self.mark_contested(uuid);
                }
                if let (Some(until), Some(gpu)) = (self.waits_for_members_until(id), self.gpus.get_mut(&uuid))
                    && until > self.now
                {
                    gpu.wake_at(until);
                }
                // The room may be lacking on a GPU where a member of its gang runs.
                if case.watches.set(()).is_ok() {
                    self.watch(&self.gpus_of(unit), id);
                }
                continue;
            }
            if case.is_leaving {
                continue;
            }
            if let Some(head) = &mut head
                && !self.delays_nobody(uuid, unit, head)
                && !self.has_its_turn(uuid, id)
            {
                self.mark_contested(uuid);
                head.ahead = head.ahead.max(self.demand_of(uuid, unit));
                continue;
            }
            let outlook = self.outlook(&case);
            if let Some(may) = outlook.paced_until {
                if let Some(gpu) = self.gpus.get_mut(&uuid) {
                    gpu.wake_at(may);
                }
                continue;
            }
            if outlook.is_barred_beside(uuid) {
                // Another client is ahead of it on another GPU: until that is over, the waiter is in nobody's way here.
                if outlook.is_contested(uuid) {
                    self.mark_contested(uuid);
                }
                continue;
            }
            if outlook.contested.is_empty() {
                self.make_next(unit, Why::Joins);
                continue;
            }
            if outlook.marked.set(()).is_ok() {
                for &gpu in &outlook.contested {
                    self.mark_contested(gpu);
                }
            } else if outlook.is_contested(uuid) {
                self.mark_contested(uuid);
            }
            if self.recall_part_of_gang(unit) {
                continue;
            }
            if let Some(head) = &mut head {
                head.ahead = head.ahead.max(self.demand_of(uuid, unit));
                continue;
            }
            let (splits, end) = self.turn_before(&case);
            match end {
                Some(end) if end.at <= self.now => {
                    let mut leavers: Vec<ClientId> =
                        splits.iter().flat_map(|split| &split.leavers).copied().collect();
                    // A client may be in the way on several GPUs.
                    if splits.len() > 1 {
                        leavers.sort_unstable();
                        leavers.dedup();
                    }
                    self.steps += leavers.len() as u64;
                    self.claim(unit, &outlook.contested, leavers, end.in_turn > self.now);
                    continue;
                }
                Some(end) => {
                    if let Some(gpu) = self.gpus.get_mut(&uuid) {
                        gpu.wake_at(end.at);
                    }
                }
                // The turn that it waits for may be on another GPU: when something changes there, its GPUs are looked at
                // again.
                None if case.watches.set(()).is_ok() => self.watch(&outlook.contested, id),
                None => {}
            }
            head = Some(match splits.iter().find(|split| split.gpu == uuid) {
                Some(split) => self.head_beside(uuid, unit, split.kept),
                None => self.head(uuid, unit),
            });
        }
    }

    pub(crate) fn split_for(&self, gpu: GpuUuid, unit: &Unit) -> Split {
        let (kept, leavers) = self.keep_what_fits(gpu, Some(unit), self.members(gpu, false));
        Split { gpu, kept, leavers: self.with_their_gangs(leavers) }
    }

    /// When something changes on one of these GPUs, those of the waiter are looked at again.
    fn watch(&mut self, gpus: &[GpuUuid], by: ClientId) {
        for uuid in gpus {
            if let Some(gpu) = self.gpus.get_mut(uuid) {
                gpu.watched_by.insert(by);
            }
        }
    }

    /// Whether the turn is that of a client's job: it ends for the whole job at once, so a client that joins it delays
    /// nobody.
    fn has_its_turn(&self, uuid: GpuUuid, id: ClientId) -> bool {
        let Some((gpu, client)) = self.gpus.get(&uuid).zip(self.clients.get(&id)) else { return false };
        gpu.ledger.sums().leaving == 0 && gpu.shares.is_holding(client.job)
    }

    /// The clients of a unit whose gate is closed get the lock as soon as there is room.
    fn make_next(&mut self, unit: &Unit, why: Why) {
        let now = self.now;
        for &id in unit.iter() {
            if self.phase(id) == Some(Phase::Parked) {
                self.with(id, |client| {
                    client.phase = Phase::Next(why);
                    // A member for which others of its gang asked waits on with them if it has to step back: a job that
                    // wanted the GPU only while it is next would change the shares each time.
                    if !std::mem::replace(&mut client.wants, true) {
                        client.waiting_since = now;
                    }
                });
            }
        }
    }

    fn somebody_defers(&self, uuid: GpuUuid) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return false };
        let defers = |id| self.clients.get(id).is_some_and(|client| client.stubborn_until.is_some());
        gpu.ledger.holders().iter().any(defers)
    }

    fn waiter_behind(&self, uuid: GpuUuid, at: Option<Key>) -> Option<Key> {
        let gpu = self.gpus.get(&uuid)?;
        gpu.ledger.waiting_behind(gpu.shares.clock(), at)
    }

    fn mark_contested(&mut self, uuid: GpuUuid) {
        if let Some(gpu) = self.gpus.get_mut(&uuid) {
            gpu.contested = true;
        }
    }

    pub(crate) fn demand(&self, uuid: GpuUuid, id: ClientId) -> u128 {
        let entry = self.gpus.get(&uuid).and_then(|gpu| gpu.ledger.entry(id));
        entry.map_or(0, |entry| u128::from(entry.demand))
    }

    fn head(&self, uuid: GpuUuid, unit: &Unit) -> Head {
        let (kept, _) = self.keep_what_fits(uuid, Some(unit), self.members(uuid, false));
        self.head_beside(uuid, unit, kept)
    }

    /// The head of a GPU's queue, beside the members that keep running when it comes.
    fn head_beside(&self, uuid: GpuUuid, unit: &Unit, kept: Group) -> Head {
        let ahead = self.demand_of(uuid, unit);
        let pinned = self.gpus.get(&uuid).map_or(0, |gpu| gpu.ledger.pinned_beside(kept));
        Head { ahead, stays: kept.demand - ahead + pinned }
    }

    /// Whether no waiter is small enough to fit beside the members.
    fn nobody_else_fits(&self, uuid: GpuUuid) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        let Some(least) = gpu.ledger.least_waiting_demand() else { return true };
        let members = gpu.ledger.sums().members;
        members.count > 0 && members.demand + u128::from(least) > u128::from(gpu.capacity)
    }

    /// Whether all other waiters would delay the head: even the smallest, if the turn is not that of its job.
    fn everybody_else_waits_for(&self, uuid: GpuUuid, head: &Head) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        let Some(least) = gpu.ledger.least_waiting_demand() else { return true };
        gpu.source != Source::Disputed
            && (gpu.ledger.sums().leaving > 0 || !gpu.ledger.has_waiter_in_turn())
            && !self.is_in_nobodys_way(gpu, u128::from(least), head, gpu.capacity)
    }

    fn delays_nobody(&self, uuid: GpuUuid, unit: &Unit, head: &Head) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        let capacity = unit.first().map_or(0, |&id| self.capacity(uuid, id));
        self.is_in_nobodys_way(gpu, self.demand_of(uuid, unit), head, capacity)
    }

    fn is_in_nobodys_way(&self, gpu: &Gpu, demand: u128, head: &Head, capacity: u64) -> bool {
        !(self.config.exclusive || gpu.takes_slices())
            && next::delays_nobody(demand, head.ahead, head.stays, capacity)
    }

    /// Whether no client is ahead of a waiter on a GPU, apart from clients that cannot have room, that fit at once, or that
    /// the waiter does not delay.
    pub(crate) fn may_go(&self, uuid: GpuUuid, unit: &Unit) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        let Some(own) = unit.on(uuid).iter().filter_map(|&id| self.place_on(uuid, id)).min() else {
            return true;
        };
        let mut head: Option<Head> = None;
        for key in gpu.waiting() {
            if unit.contains(&key.2) || key >= own {
                break;
            }
            let other = self.unit(key.2);
            if self.no_room_on(key.2).is_some() || self.fits_beside_members(uuid, &other) {
                continue;
            }
            let ahead = self.demand_of(uuid, &other);
            match &mut head {
                Some(head) => head.ahead = head.ahead.max(ahead),
                None => head = Some(self.head(uuid, &other)),
            }
            if head.is_some_and(|head| !self.delays_nobody(uuid, unit, &head)) {
                return false;
            }
        }
        true
    }

    /// When the turns of those who leave for a waiter are over; `None` while that is unknown.
    pub(crate) fn turns_end(&self, unit: &Unit, splits: &[Split]) -> Option<End> {
        let mut ends = End { at: Time::ZERO, in_turn: Time::ZERO };
        for &Split { gpu: uuid, ref leavers, .. } in splits {
            let gpu = self.gpus.get(&uuid)?;
            let mut held = Held { idle_since: Some(Time::ZERO), ..Held::default() };
            let to_move = self.bytes_to_move(uuid, unit);
            // The waiter's turn comes anyhow: what an idle holder saves by keeping its place is its own return.
            let own_return = leavers.iter().map(|&leaver| self.demand(uuid, leaver)).sum::<u128>();
            let to_return = u64::try_from(own_return).unwrap_or(u64::MAX).min(to_move);
            let move_cost = if to_return == 0 { Duration::ZERO } else { gpu.rates.there_and_back(to_return) };
            for leaver in leavers {
                let client = self.clients.get(leaver)?;
                match client.phase {
                    // A turn that has not begun cannot be over.
                    Phase::Next(Why::Claims) | Phase::Granted { begins: true, .. } => return None,
                    Phase::Idle { since, .. } => {
                        held.idle_since = held.idle_since.map(|idle| idle.max(since));
                        let usual = move_cost.saturating_mul(turn::IDLE_FACTOR);
                        held.patience = held.patience.max(client.rhythm.patience(move_cost, usual));
                        continue;
                    }
                    // A gang is idle when all its members are; a parked member does nothing.
                    Phase::Parked => continue,
                    _ => held.idle_since = None,
                }
                held.work.add_holder(client);
                held.by.push(client.job);
            }
            let cost = self.hand_over_cost(gpu, uuid, unit, to_move);
            let sooner = held.work.gives_way_at(&self.clients, gpu, unit, cost);
            let (in_turn, at) = match sooner {
                None => {
                    let in_turn = turn::ends(&self.turn(gpu, uuid, unit, &held)?)?;
                    (in_turn, in_turn)
                }
                // Short work has what it may cost. It takes the turn only when that is over for those who wait in turn:
                // otherwise each hand-over to it would be one that nobody has to pay for.
                Some(sooner) => {
                    gpu.turn_started?;
                    let waiter = self.first_in_turn(gpu, unit);
                    let in_turn =
                        waiter.and_then(|waiter| turn::ends(&self.turn(gpu, uuid, &waiter, &held)?));
                    let in_turn = in_turn.unwrap_or(Time::MAX);
                    (in_turn, in_turn.min(sooner.max(gpu.not_before)))
                }
            };
            ends = End { at: ends.at.max(at), in_turn: ends.in_turn.max(in_turn) };
        }
        Some(ends)
    }

    /// The first waiter besides a unit that is not interactive.
    fn first_in_turn(&self, gpu: &Gpu, unit: &Unit) -> Option<Unit> {
        let others = gpu.waiting().map(|key| key.2).filter(|id| !unit.contains(id));
        others.map(|id| self.unit(id)).find(|unit| !is_short(&self.clients, unit))
    }

    /// The turn of those who hold a GPU, as a waiter sees it.
    fn turn(&self, gpu: &Gpu, uuid: GpuUuid, waiter: &Unit, held: &Held) -> Option<Turn> {
        let one = waiter.iter().copied().find(|&id| gpu.ledger.entry(id).is_some())?;
        let own_job = self.clients.get(&one)?.job;
        let (own, own_weight) = (gpu.shares.time(own_job), gpu.shares.weight(own_job));
        let mut catches_up = Duration::ZERO;
        let mut heaviest = own_weight;
        for &job in &held.by {
            let behind = own.saturating_sub(gpu.shares.time(job));
            let weight = gpu.shares.weight(job);
            heaviest = heaviest.max(weight);
            // A smaller difference does not count. Turns that are measured all have the same length.
            if behind > EVEN && !gpu.trial.takes_turns() {
                catches_up = catches_up.max(gpu.shares.lacks(job, own));
            }
        }
        let beside = u32::try_from(gpu.shares.holding().max(1)).unwrap_or(u32::MAX);
        let ratio = slices::ratio(heaviest, own_weight);
        let quantum = self.owed_quantum(gpu, uuid, waiter, self.bytes_to_move(uuid, waiter));
        let beyond = waiter.iter().filter_map(|&id| Some(self.account(id, uuid)?.cost.beyond(quantum)));
        Some(Turn {
            started: gpu.turn_started,
            quantum,
            most_quanta: slices::most_quanta(ratio, turn::MOST_QUANTA),
            even_at: self.now.saturating_add(catches_up.saturating_mul(beside)),
            beyond: gpu.longest_drain.max(slices::beyond(ratio, quantum, beyond.max().unwrap_or_default())),
            not_before: gpu.not_before,
            idle_since: held.idle_since,
            patience: held.patience,
        })
    }

    /// Clients, and all other members of their gangs.
    pub(crate) fn with_their_gangs(&self, ids: Vec<ClientId>) -> Vec<ClientId> {
        if ids.iter().all(|&id| self.gang_of(id).is_none()) {
            return ids;
        }
        if let [one] = ids[..] {
            return self.unit(one).to_vec();
        }
        let mut all: BTreeSet<ClientId> = BTreeSet::new();
        for &id in &ids {
            if !all.contains(&id) {
                all.extend(self.unit(id).iter());
            }
        }
        all.into_iter().collect()
    }

    /// Bytes that have to leave a GPU so that a unit has its whole demand there.
    fn bytes_to_move(&self, uuid: GpuUuid, unit: &Unit) -> u64 {
        let deficits = unit.on(uuid).iter().map(|&id| self.deficit(uuid, id)).fold(0, u64::saturating_add);
        deficits.saturating_sub(unit.first().map_or(0, |&id| self.free(uuid, id)))
    }

    /// The length of a turn that ends for a waiter, for which `to_move` bytes have to move.
    fn quantum(&self, gpu: &Gpu, uuid: GpuUuid, unit: &Unit, to_move: u64) -> Duration {
        if to_move == 0 && gpu.shares.are_unequal() {
            return slices::length(gpu.cost.idle.mean());
        }
        if to_move == 0 && gpu.trial.takes_turns() {
            return gpu.trial.slice();
        }
        let Rule::Auto(target) = gpu.rule else { return gpu.quantum };
        quantum::auto(target, self.cost_of_moving(gpu, uuid, unit, to_move), gpu.shares.long())
    }

    /// The time of a hand-over to a unit: as measured on average, else estimated from the bytes to move.
    fn hand_over_cost(&self, gpu: &Gpu, uuid: GpuUuid, unit: &Unit, to_move: u64) -> Duration {
        let costs = unit.on(uuid).iter().filter_map(|&id| self.account(id, uuid)?.cost.idle.mean());
        costs.max().unwrap_or_else(|| gpu.rates.there_and_back(to_move))
    }

    /// The same for as many bytes as have to move now.
    fn cost_of_moving(&self, gpu: &Gpu, uuid: GpuUuid, unit: &Unit, to_move: u64) -> Duration {
        let apart = gpu.rates.there_and_back(to_move);
        let costs =
            unit.on(uuid).iter().filter_map(|&id| self.account(id, uuid)?.cost_of_moving(to_move, apart));
        costs.max().unwrap_or(apart)
    }

    /// The same as [`Core::quantum`], and longer while switching has cost more than it may.
    fn owed_quantum(&self, gpu: &Gpu, uuid: GpuUuid, unit: &Unit, to_move: u64) -> Duration {
        let quantum = self.quantum(gpu, uuid, unit, to_move);
        let (Rule::Auto(target), Some(started), 1..) = (gpu.rule, gpu.turn_started, to_move) else {
            return quantum;
        };
        let owed = gpu.budget.settled_at(target.overhead_ppm).saturating_sub(started);
        let longest =
            quantum::longest(target, self.hand_over_cost(gpu, uuid, unit, to_move), gpu.shares.long());
        quantum.max(owed.min(longest))
    }

    /// The turn passes to a waiter: clients that do not fit beside it leave. `ahead`: before their turn is over.
    fn claim(&mut self, unit: &Unit, contested: &[GpuUuid], leavers: Vec<ClientId>, ahead: bool) {
        let (now, short) = (self.now, is_short(&self.clients, unit));
        let noticed = short::noticed(&self.clients, &leavers);
        let left = leavers.iter().flat_map(|&leaver| self.gpus_used_by(leaver));
        let passing: BTreeSet<GpuUuid> = left.chain(contested.iter().copied()).collect();
        for uuid in &passing {
            let to_move = self.bytes_to_move(*uuid, unit);
            let job = unit.first().and_then(|id| self.clients.get(id)).map(|client| client.job);
            let Some(gpu) = self.gpus.get(uuid) else { continue };
            let cost = self.hand_over_cost(gpu, *uuid, unit, to_move);
            let runs = |id: &ClientId| gpu.ledger.entry(*id).is_some_and(|entry| entry.runs);
            let here: Vec<ClientId> = leavers.iter().copied().filter(runs).collect();
            for &id in unit.on(*uuid) {
                self.with_account(id, *uuid, |account| account.claimed = to_move);
            }
            let Some(gpu) = self.gpus.get_mut(uuid) else { continue };
            gpu.budget.spend(noticed);
            match (short, ahead) {
                (true, true) => {
                    gpu.interrupt(&here, now);
                    // The interrupted client must not pay for its return.
                    if let Some(job) = job {
                        gpu.shares.charge(job, cost);
                    }
                }
                // While the turn of others is interrupted, more short work may come.
                (true, false) => {}
                (false, _) => gpu.pass_to(unit),
            }
        }
        // Their gangs are among them.
        for leaver in leavers {
            self.ask_one_to_leave(leaver);
        }
        for uuid in &passing {
            let to_move = self.bytes_to_move(*uuid, unit);
            let quantum = self.gpus.get(uuid).map(|gpu| self.quantum(gpu, *uuid, unit, to_move));
            if let Some(gpu) = self.gpus.get_mut(uuid) {
                gpu.released.clear();
                if matches!(gpu.rule, Rule::Auto(_)) && to_move > 0 && !short {
                    gpu.quantum = quantum.unwrap_or(gpu.quantum);
                }
            }
        }
        self.make_next(unit, Why::Claims);
    }

    /// Asks a client for the lock back, and with it all members of its gang.
    pub(crate) fn ask_to_leave(&mut self, id: ClientId) {
        for &member in self.unit(id).iter() {
            self.ask_one_to_leave(member);
        }
    }

    fn ask_one_to_leave(&mut self, id: ClientId) {
        let now = self.now;
        match self.phase(id) {
            Some(Phase::Next(_)) => self.with(id, |client| client.phase = Phase::Parked),
            // The client's gate is closed and its work is complete: there is nothing to ask.
            Some(Phase::Idle { .. }) => {
                self.with(id, |client| {
                    client.phase = Phase::Parked;
                    client.note_drained();
                });
                self.wait_with_gang(id);
                for uuid in self.gpus_used_by(id) {
                    if let Some(gpu) = self.gpus.get_mut(&uuid) {
                        gpu.freed_at = Some(now);
                    }
                }
            }
            Some(Phase::Granted { epoch, .. } | Phase::Running { epoch }) => {
                let patience = self.patience_with(id);
                let grace = self.config.grace.max(patience);
                self.with(id, |client| {
                    client.phase = Phase::Dropping { epoch, since: now, due: now + client.grace(grace) };
                });
                let patience_ms = patience.as_millis() as u32;
                self.send(id, SchedulerMessage::DropLock { epoch, patience_ms });
            }
            None | Some(Phase::Parked | Phase::Dropping { .. } | Phase::Drained | Phase::Free) => {}
        }
    }

    /// Whether a client must wait as things are: no room can be made for it, or its gang lacks members. The log says once
    /// why there is no room.
    pub(crate) fn judge_hopeless(&mut self, id: ClientId) -> bool {
        let mut full = self.no_room_on(id);
        if self.part_if_too_large(id, full) {
            full = self.no_room_on(id);
        }
        let why = full.and_then(|uuid| self.why_no_room(uuid, id));
        let hopeless = full.is_some() || self.waits_for_members(id) || self.is_stopped(&self.unit(id));
        let Some(client) = self.clients.get_mut(&id) else { return true };
        let is_news = why.is_some() && !std::mem::replace(&mut client.reported_hopeless, true);
        let changed = client.hopeless != hopeless;
        if let (true, Some(why)) = (is_news, why) {
            self.tell(EventKind::Blocked, id, None, None);
            self.warn_of_client(Topic::Blocked, id, full, &format!("client {id} waits: {why}"));
        }
        if changed {
            for &member in self.unit(id).iter() {
                if let Some(client) = self.clients.get_mut(&member) {
                    client.hopeless = hopeless;
                }
                self.enter(member);
            }
        }
        hopeless
    }

    /// The reason why no room can be made on a GPU, for the log. None while a process that has just ended still frees its
    /// memory.
    pub(crate) fn why_no_room(&self, uuid: GpuUuid, id: ClientId) -> Option<String> {
        let gpu = self.gpus.get(&uuid)?;
        let (demand, capacity) = (self.demand_of(uuid, &self.unit(id)), self.capacity(uuid, id));
        if self.gang_of(id).is_some() && demand > u128::from(capacity) {
            let demand = u64::try_from(demand).unwrap_or(u64::MAX);
            return Some(format!(
                "its gang wants {} of {uuid} at once, which has {}",
                Bytes(demand),
                Bytes(capacity)
            ));
        }
        if let Some(departed) = gpu.departed.values().max_by_key(|departed| departed.bytes) {
            let (pid, bytes) = (departed.pid, Bytes(departed.bytes));
            return departed
                .reported
                .then(|| format!("process {pid} has left and lives on, with {bytes} of {uuid}"));
        }
        Some(format!("what others have on {uuid} cannot be moved and leaves no room for it"))
    }
}
