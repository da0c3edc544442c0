//! Looks at each GPU of which something has changed, or whose deadline has come, and does what is due.

use nvshare_proto::{GpuUuid, SchedulerMessage};

use crate::client::ClientId;
use crate::gangs::Members;
use crate::rule::Rule;
use crate::{Core, Time};

/// How often one event may make the core look at GPUs, for each GPU that it changed: each look that changes something asks
/// for one more. Only a defect would need so many; then other events get their turn first.
const MOST_LOOKS: usize = 64;

impl Core {
    pub(crate) fn reconcile(&mut self) {
        if !self.scheduling {
            self.dirty.clear();
            self.dirty_gangs.clear();
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
        self.spread_to_gangs();
        if !self.dirty.is_empty() {
            self.refresh_places();
        }
        let mut looks = MOST_LOOKS * self.dirty.len().max(1);
        let mut looked_at = Vec::new();
        while looks > 0
            && let Some(uuid) = self.dirty.pop_first()
        {
            looks -= 1;
            self.steps += 1;
            self.look_at(uuid);
            self.spread_to_gangs();
            if looked_at.last() != Some(&uuid) {
                looked_at.push(uuid);
            }
        }
        for &uuid in &self.dirty {
            if let Some(gpu) = self.gpus.get_mut(&uuid) {
                gpu.wake_at(self.now);
                looked_at.push(uuid);
            }
        }
        for uuid in looked_at {
            self.note_deadline(uuid);
        }
    }

    /// A change of one member may concern the others, on their GPUs.
    fn spread_to_gangs(&mut self) {
        while let Some(gang) = self.dirty_gangs.pop_first() {
            self.dirty.extend(self.gangs.get(&gang).into_iter().flat_map(Members::gpus));
        }
    }

    /// Handles one GPU, from overdue things to grants. One place grants, and one asks for the lock back.
    fn look_at(&mut self, uuid: GpuUuid) {
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
        self.choose(uuid);
        self.make_room(uuid);
        self.tell_who_waits(uuid);
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

    /// Tells holders whether a client waits for what they hold.
    fn tell_who_waits(&mut self, uuid: GpuUuid) {
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
        if gpu.told == Some(contested) {
            return;
        }
        gpu.told = Some(contested);
        let holders = gpu.ledger.holders().iter().copied().collect();
        // A client that waits for one member of a gang waits for the whole gang.
        for id in self.with_their_gangs(holders) {
            self.steps += 1;
            let gpus = self.gpus_of(&self.unit(id));
            let waiting = self.is_bounded(id)
                || gpus.iter().filter_map(|uuid| self.gpus.get(uuid)).any(|gpu| gpu.is_contested(now));
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
