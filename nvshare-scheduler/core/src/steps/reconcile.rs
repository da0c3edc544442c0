//! Looks at each GPU of which something has changed, or whose deadline has come, and does what is due.

use std::collections::{BTreeMap, BTreeSet};

use nvshare_proto::{GpuUuid, SchedulerMessage};

use crate::Time;
use crate::state::client::ClientId;
use crate::state::gangs::Members;
use crate::state::gpu::Gpu;
use crate::steps::books::Books;
use crate::steps::round::Round;

/// How many rounds of looks one event may need: each that changes something asks for one more. Only a defect would need so many;
/// then other events get their turn first.
const MOST_ROUNDS: usize = 64;

impl Books {
    pub(crate) fn reconcile(&mut self) {
        if !self.state.scheduling {
            return self.agenda.forget();
        }
        while let Some(&(time, uuid)) = self.agenda.deadlines.first()
            && time <= self.state.now
        {
            self.agenda.deadlines.remove(&(time, uuid));
            if let Some(gpu) = self.state.gpus.get_mut(&uuid) {
                gpu.deadline = None;
                self.agenda.dirty.insert(uuid);
            }
        }
        self.spread_to_others();
        if !self.agenda.dirty.is_empty() {
            self.refresh_places();
        }
        let mut looked_at = BTreeSet::new();
        for _ in 0..MOST_ROUNDS {
            if self.agenda.dirty.is_empty() {
                break;
            }
            looked_at.append(&mut self.look_at_all());
            self.spread_to_others();
        }
        if self.state.now >= self.state.settled_at {
            self.tell_holders();
        }
        for &uuid in &self.agenda.dirty {
            if let Some(gpu) = self.state.gpus.get_mut(&uuid) {
                gpu.wake_at(self.state.now);
                looked_at.insert(uuid);
            }
        }
        for uuid in looked_at {
            self.note_deadline(uuid);
        }
    }

    /// A change of one member may concern the others of its gang, and waiters that watch for it, on their GPUs.
    fn spread_to_others(&mut self) {
        while let Some(id) = self.agenda.woken.pop_first() {
            self.agenda.dirty.extend(self.state.gpus_of(&self.state.unit(id)));
        }
        while let Some(gang) = self.agenda.dirty_gangs.pop_first() {
            self.agenda.dirty.extend(self.state.gangs.get(&gang).into_iter().flat_map(Members::gpus));
        }
    }

    /// Looks once at all GPUs of which something has changed: each is brought up to date before clients are chosen on any, since a
    /// client may use several. Returns the GPUs.
    fn look_at_all(&mut self) -> BTreeSet<GpuUuid> {
        for uuid in self.agenda.dirty.clone() {
            if let Some((_, _, id)) = self.state.gpus.get(&uuid).and_then(|gpu| gpu.waiting().next()) {
                self.refresh_place(id);
            }
        }
        let gpus = std::mem::take(&mut self.agenda.dirty);
        for &uuid in &gpus {
            self.work += 1;
            self.bring_up_to_date(uuid);
        }
        if self.state.now >= self.state.settled_at {
            self.decide_on(&gpus);
        }
        gpus
    }

    /// Does what is due on one GPU as time passes.
    fn bring_up_to_date(&mut self, uuid: GpuUuid) {
        let (now, settled_at) = (self.state.now, self.state.settled_at);
        self.on_gpu(uuid, |gpu| gpu.bring_up_to_date(now));
        self.forget_what_was_deferred(uuid);
        if now < settled_at {
            return self.wake_at(uuid, settled_at);
        }
        self.see_to_what_is_overdue(uuid);
        self.enforce_limits(uuid);
        self.measure(uuid);
        self.split_a_set_that_outgrew(uuid);
    }

    /// Chooses who is next on each of these GPUs, and makes room. One place grants, and one asks for the lock back.
    fn decide_on(&mut self, gpus: &BTreeSet<GpuUuid>) {
        let mut round = Round::new(self);
        for &uuid in gpus {
            // What has changed meanwhile is brought up to date first, in the next round.
            if round.books.agenda.dirty.contains(&uuid) {
                continue;
            }
            round.choose(uuid);
            round.make_room(uuid);
            round.books.note_contest(uuid);
        }
    }

    /// When the clients that deferred a drain have left, or their work is complete, the turns of others are no longer for
    /// it.
    fn forget_what_was_deferred(&mut self, uuid: GpuUuid) {
        let gpu = self.state.gpus.get(&uuid).filter(|gpu| gpu.cannot_drain(self.state.now));
        let deferred = |id: &ClientId| {
            let unit = self.state.unit(*id);
            self.state.clients_of(&unit).any(|client| client.deferrals > 0)
        };
        let is_over = |gpu: &Gpu| !gpu.ledger.members().iter().chain(gpu.ledger.holders()).any(deferred);
        if gpu.is_some_and(is_over) {
            self.on_gpu(uuid, |gpu| (gpu.not_before, gpu.deferrals) = (Time::ZERO, 0));
        }
    }

    /// Notes whether a client waits for what is held of a GPU.
    fn note_contest(&mut self, uuid: GpuUuid) {
        if let Some(gpu) = self.state.gpus.get_mut(&uuid)
            && gpu.note_contest(self.state.now)
        {
            self.agenda.to_tell.extend(gpu.ledger.holders());
        }
    }

    /// Tells holders whether a client waits for what they hold, once in an event. A client that waits for one member of a gang waits
    /// for the whole gang.
    fn tell_holders(&mut self) {
        let now = self.state.now;
        let to_tell = std::mem::take(&mut self.agenda.to_tell).into_iter().collect();
        let mut of_gangs: BTreeMap<u64, bool> = BTreeMap::new();
        for id in self.state.with_their_gangs(to_tell) {
            self.work += 1;
            let Some(client) = self.state.clients.get(&id) else { continue };
            let known = client.gang.and_then(|gang| of_gangs.get(&gang)).copied();
            let contested = known.unwrap_or_else(|| {
                let gpus = self.state.gpus_of(&self.state.unit_of(client));
                self.state.gpus_among(&gpus).any(|gpu| gpu.is_contested(now))
            });
            of_gangs.extend(client.gang.map(|gang| (gang, contested)));
            let waiting = contested || self.state.is_bounded(client);
            if let Some(client) = self.state.clients.get_mut(&id).filter(|client| client.phase.holds())
                && client.tell_waiting(waiting, now)
            {
                self.report.send(id, SchedulerMessage::Waiters { waiting });
            }
        }
    }

    /// Records when a GPU is looked at again if no event comes before.
    fn note_deadline(&mut self, uuid: GpuUuid) {
        let settled_at = self.state.settled_at;
        let Some(gpu) = self.state.gpus.get_mut(&uuid) else { return };
        let overdue = gpu.ledger.first_due().map(|(due, _)| due.max(settled_at));
        let deadline = [gpu.wake, overdue].into_iter().flatten().min();
        if deadline != gpu.deadline {
            if let Some(old) = gpu.deadline {
                self.agenda.deadlines.remove(&(old, uuid));
            }
            if let Some(new) = deadline {
                self.agenda.deadlines.insert((new, uuid));
            }
            gpu.deadline = deadline;
        }
    }
}
