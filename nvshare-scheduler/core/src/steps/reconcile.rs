//! Looks at each GPU of which something has changed, or whose deadline has come, and does what is due.

use std::collections::{BTreeMap, BTreeSet};

use nvshare_proto::{GpuUuid, SchedulerMessage};

use crate::state::client::ClientId;
use crate::state::rule::Rule;
use crate::steps::gangs::Members;
use crate::{Core, Time};

/// How many rounds of looks one event may need: each that changes something asks for one more. Only a defect would need so many;
/// then other events get their turn first.
const MOST_ROUNDS: usize = 64;

impl Core {
    pub(crate) fn reconcile(&mut self) {
        if !self.scheduling {
            self.dirty.clear();
            self.dirty_gangs.clear();
            self.woken.clear();
            self.untold.clear();
            return;
        }
        while let Some(&(time, uuid)) = self.deadlines.first()
            && time <= self.now
        {
            self.deadlines.remove(&(time, uuid));
            if let Some(gpu) = self.gpus.get_mut(&uuid) {
                gpu.deadline = None;
                self.dirty.insert(uuid);
            }
        }
        self.spread_to_others();
        if !self.dirty.is_empty() {
            self.refresh_places();
        }
        let mut looked_at = BTreeSet::new();
        for _ in 0..MOST_ROUNDS {
            if self.dirty.is_empty() {
                break;
            }
            looked_at.append(&mut self.look_at_all());
            self.spread_to_others();
        }
        if self.now >= self.settled_at {
            self.tell_holders();
        }
        for &uuid in &self.dirty {
            if let Some(gpu) = self.gpus.get_mut(&uuid) {
                gpu.wake_at(self.now);
                looked_at.insert(uuid);
            }
        }
        for uuid in looked_at {
            self.note_deadline(uuid);
        }
    }

    /// A change of one member may concern the others of its gang, and waiters that watch for it, on their GPUs.
    fn spread_to_others(&mut self) {
        while let Some(id) = self.woken.pop_first() {
            self.dirty.extend(self.gpus_of(&self.unit(id)));
        }
        while let Some(gang) = self.dirty_gangs.pop_first() {
            self.dirty.extend(self.gangs.get(&gang).into_iter().flat_map(Members::gpus));
        }
    }

    /// Looks once at all GPUs of which something has changed: each is brought up to date before clients are chosen on any, since a
    /// client may use several. Returns the GPUs.
    fn look_at_all(&mut self) -> BTreeSet<GpuUuid> {
        for uuid in self.dirty.clone() {
            self.refresh_first(uuid);
        }
        let round = std::mem::take(&mut self.dirty);
        for &uuid in &round {
            self.steps += 1;
            self.bring_up_to_date(uuid);
        }
        self.cases.clear();
        if self.now >= self.settled_at {
            for &uuid in &round {
                // What has changed meanwhile is brought up to date first, in the next round.
                if !self.dirty.contains(&uuid) {
                    self.decide(uuid);
                }
            }
        }
        round
    }

    /// Does what is due on one GPU as time passes.
    fn bring_up_to_date(&mut self, uuid: GpuUuid) {
        let now = self.now;
        let Some(gpu) = self.gpus.get_mut(&uuid) else { return };
        gpu.wake = None;
        gpu.shares.advance(now);
        if let Rule::Auto(target) = gpu.rule {
            gpu.budget.advance(target.overhead_ppm, now);
        }
        self.see_to_turn(uuid);
        self.forget_what_was_deferred(uuid);
        if now < self.settled_at {
            let settled_at = self.settled_at;
            if let Some(gpu) = self.gpus.get_mut(&uuid) {
                gpu.wake_at(settled_at);
            }
            return;
        }
        self.see_to_what_is_overdue(uuid);
        self.enforce_limits(uuid);
        self.measure(uuid);
        self.split_a_set_that_outgrew(uuid);
    }

    /// Chooses who is next on one GPU, and makes room. One place grants, and one asks for the lock back.
    fn decide(&mut self, uuid: GpuUuid) {
        self.choose(uuid);
        self.make_room(uuid);
        self.note_contest(uuid);
    }

    /// A GPU without holders and without a next client has no turn; a GPU on which a client runs has one.
    fn see_to_turn(&mut self, uuid: GpuUuid) {
        let Some(gpu) = self.gpus.get_mut(&uuid) else { return };
        let sums = gpu.ledger.sums();
        if sums.holders.count == 0 && gpu.ledger.next().is_empty() {
            gpu.turn_started = None;
        } else if sums.running > 0 {
            gpu.turn_started.get_or_insert(self.now);
        }
    }

    /// When the clients that deferred a drain have left, or their work is complete, the turns of others are no longer for
    /// it.
    fn forget_what_was_deferred(&mut self, uuid: GpuUuid) {
        let Some(gpu) = self.gpus.get(&uuid).filter(|gpu| gpu.cannot_drain(self.now)) else {
            return;
        };
        let deferred = |id: &ClientId| self.clients.get(id).is_some_and(|client| client.deferrals > 0);
        let of_gang = |id: &ClientId| self.unit(*id).iter().any(deferred);
        let goes_on = gpu.ledger.members().iter().chain(gpu.ledger.holders()).any(of_gang);
        if let (false, Some(gpu)) = (goes_on, self.gpus.get_mut(&uuid)) {
            gpu.not_before = Time::ZERO;
            gpu.deferrals = 0;
        }
    }

    /// Notes whether a client waits for what is held of a GPU.
    fn note_contest(&mut self, uuid: GpuUuid) {
        let now = self.now;
        let Some(gpu) = self.gpus.get_mut(&uuid) else { return };
        gpu.contested |= gpu.ledger.sums().claiming > 0;
        if gpu.contested && gpu.takes_slices() {
            gpu.contested_at = Some(now);
        }
        let contested = gpu.is_contested(now);
        if let Some(until) = gpu.lingers_until().filter(|&until| contested && until > now) {
            gpu.wake_at(until);
        }
        if std::mem::replace(&mut gpu.told, contested) != contested {
            self.untold.extend(gpu.ledger.holders());
        }
    }

    /// Tells holders whether a client waits for what they hold, once in an event. A client that waits for one member of a gang waits
    /// for the whole gang.
    fn tell_holders(&mut self) {
        let now = self.now;
        let untold = std::mem::take(&mut self.untold).into_iter().collect();
        let mut of_gangs: BTreeMap<u64, bool> = BTreeMap::new();
        for id in self.with_their_gangs(untold) {
            self.steps += 1;
            let known = self.gang_of(id).and_then(|gang| of_gangs.get(&gang)).copied();
            let contested = known.unwrap_or_else(|| {
                let unit = self.unit(id);
                let mut gpus = self.gpus_of(&unit).into_iter().filter_map(|uuid| self.gpus.get(&uuid));
                gpus.any(|gpu| gpu.is_contested(now))
            });
            of_gangs.extend(self.gang_of(id).map(|gang| (gang, contested)));
            let waiting = contested || self.is_bounded(id);
            let Some(client) = self.clients.get_mut(&id) else { continue };
            if client.phase.holds() && client.tell_waiting(waiting, now) {
                self.send(id, SchedulerMessage::Waiters { waiting });
            }
        }
    }

    /// Records when a GPU is looked at again if no event comes before.
    fn note_deadline(&mut self, uuid: GpuUuid) {
        let settled_at = self.settled_at;
        let Some(gpu) = self.gpus.get_mut(&uuid) else { return };
        let overdue = gpu.ledger.first_due().map(|(due, _)| due.max(settled_at));
        let deadline = [gpu.wake, overdue].into_iter().flatten().min();
        if deadline != gpu.deadline {
            if let Some(old) = gpu.deadline {
                self.deadlines.remove(&(old, uuid));
            }
            if let Some(new) = deadline {
                self.deadlines.insert((new, uuid));
            }
            gpu.deadline = deadline;
        }
    }
}
