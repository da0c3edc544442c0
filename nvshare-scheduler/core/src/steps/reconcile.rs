//! Looks at each GPU of which something has changed, or whose deadline has come, and does what is due.
//!
//! The looks come in rounds, since a decision on one GPU may change another. A round first brings each GPU up
//! to date: overdue answers, limits, sets that outgrew it. Then it decides on each who is next, and who gets
//! room. After the last round, holders are told whether a client waits.

use std::collections::{BTreeMap, BTreeSet};

use nvshare_proto::GpuUuid;

use crate::state::client::{ClientId, GangId};
use crate::state::gpu::Gpu;
use crate::steps::books::Books;
use crate::steps::round::Round;

/// How many rounds of looks one event may need: each that changes something asks for one more. Only a defect
/// would need this many; then other events get their turn first.
const MAX_ROUNDS: usize = 64;

impl Books {
    pub(crate) fn reconcile(&mut self) {
        if !self.state().is_scheduling() {
            self.queue_gpus_of_sleepers();
            for uuid in self.agenda_mut().take_gpus() {
                self.wake_next(uuid);
            }
            return self.agenda_mut().forget();
        }
        self.queue_due_gpus();
        self.follow_sleepers();
        self.queue_gangs_and_watchers();
        if !self.agenda().gpus().is_empty() {
            self.refresh_places();
        }
        let mut looked_at = BTreeSet::new();
        for _ in 0..MAX_ROUNDS {
            if self.agenda().gpus().is_empty() {
                break;
            }
            looked_at.append(&mut self.look_at_all());
            self.follow_sleepers();
            self.queue_gangs_and_watchers();
        }
        if self.state().is_settled() {
            self.tell_holders();
        }
        let now = self.state().now();
        for uuid in self.agenda().gpus().clone() {
            self.wake_at(uuid, now);
            looked_at.insert(uuid);
        }
        for uuid in looked_at {
            self.note_deadline(uuid);
        }
    }

    /// Queues the GPUs whose deadline has come. One that has been forgotten since has no deadline.
    fn queue_due_gpus(&mut self) {
        let now = self.state().now();
        while let Some(uuid) = self.agenda_mut().take_due(now) {
            if self.change_gpu(uuid, |gpu| gpu.deadline = None).is_some() {
                self.queue([uuid]);
            }
        }
    }

    /// Queues the GPUs of gangs and watchers: a change of one member may concern the others, and waiters that
    /// watch for it.
    fn queue_gangs_and_watchers(&mut self) {
        while let Some(id) = self.agenda_mut().take_woken() {
            self.queue(self.state().gpus_of(&self.state().unit(id)));
        }
        while let Some(gang) = self.agenda_mut().take_gang() {
            self.wait_together(gang);
            let gpus: Vec<GpuUuid> = self.state().gpus_of_gang(gang).collect();
            self.queue(gpus);
        }
    }

    /// Looks once at all GPUs of which something has changed. Each is brought up to date before clients are
    /// chosen on any, since a client may use several. Returns the GPUs.
    fn look_at_all(&mut self) -> BTreeSet<GpuUuid> {
        for uuid in self.agenda().gpus().clone() {
            let first = self.state().gpu(uuid).and_then(|gpu| gpu.waiting().next());
            if let Some(first) = first {
                self.refresh_place(first.client);
            }
        }
        let mut gpus = self.agenda_mut().take_gpus();
        self.count_work(gpus.len() as u64);
        // This event may have forgotten some.
        gpus.retain(|&uuid| self.state().gpu(uuid).is_some());
        for &uuid in &gpus {
            self.bring_up_to_date(uuid);
        }
        if self.state().is_settled() {
            self.decide_on(&gpus);
        }
        gpus
    }

    /// Does what is due on one GPU as time passes.
    fn bring_up_to_date(&mut self, uuid: GpuUuid) {
        let (now, settled_at) = (self.state().now(), self.state().settled_at());
        self.change_gpu(uuid, |gpu| gpu.bring_up_to_date(now));
        self.clear_finished_deferrals(uuid);
        if now < settled_at {
            return self.wake_at(uuid, settled_at);
        }
        self.expire_overdue(uuid);
        self.note_without_place(uuid);
        self.set_aside_for_sleepers(uuid);
        self.wake_next(uuid);
        self.enforce_limits(uuid);
        self.shrink_outgrown_set(uuid);
    }

    /// Chooses the clients that are next on each of these GPUs, and makes room.
    fn decide_on(&mut self, gpus: &BTreeSet<GpuUuid>) {
        let mut round = Round::new(self);
        for &uuid in gpus {
            // A GPU that has changed meanwhile is brought up to date first, in the next round.
            if round.books.agenda().gpus().contains(&uuid) {
                continue;
            }
            round.judge_waiters(uuid);
            round.make_room(uuid);
            round.books.make_way(uuid);
            round.books.update_bounding(uuid);
        }
    }

    /// Forgets deferred drains when the clients that deferred them have left, or their work is complete. The
    /// turns of others are no longer for it then.
    fn clear_finished_deferrals(&mut self, uuid: GpuUuid) {
        let gpu = self.state().gpu(uuid).filter(|gpu| gpu.deferrals > 0);
        let deferred = |id: &ClientId| {
            let unit = self.state().unit(*id);
            self.state().clients_of(&unit).any(|client| client.deferrals > 0)
        };
        let is_over = |gpu: &Gpu| !gpu.ledger.staying().iter().chain(gpu.ledger.holders()).any(deferred);
        if gpu.is_some_and(is_over) {
            self.change_gpu(uuid, |gpu| gpu.deferrals = 0);
        }
    }

    /// Notes whether a client waits for what is held of a GPU.
    fn update_bounding(&mut self, uuid: GpuUuid) {
        let now = self.state().now();
        let note = |gpu: &mut Gpu| {
            if gpu.update_bounding(now) { gpu.ledger.holders().clone() } else { BTreeSet::new() }
        };
        let holders = self.change_gpu(uuid, note).unwrap_or_default();
        self.tell_later(holders);
    }

    /// Tells holders whether a client waits for what they hold, once in an event. A client that waits for one
    /// member of a gang waits for the whole gang.
    fn tell_holders(&mut self) {
        let now = self.state().now();
        let to_tell = self.agenda_mut().take_clients_to_tell();
        let mut of_gangs: BTreeMap<GangId, bool> = BTreeMap::new();
        for id in self.state().with_their_gangs(to_tell) {
            self.count_work(1);
            let state = self.state();
            // It may be gone by now.
            let Some(client) = state.client(id) else { continue };
            let known = client.gang.and_then(|gang| of_gangs.get(&gang)).copied();
            let waited_for = known.unwrap_or_else(|| {
                let gpus = state.gpus_of(&state.unit_of(client));
                state.gpus_among(&gpus).any(|gpu| gpu.bounds_submissions(now))
            });
            of_gangs.extend(client.gang.map(|gang| (gang, waited_for)));
            let waiting = waited_for || state.is_bounded(client) || client.sleep.is_ordered();
            if client.phase().holds() {
                self.tell_waiting(id, waiting);
            }
        }
    }

    /// Records when a GPU is looked at again if no event comes before.
    fn note_deadline(&mut self, uuid: GpuUuid) {
        let settled_at = self.state().settled_at();
        let note = |gpu: &mut Gpu| {
            let overdue = gpu.ledger.first_due().map(|(due, _)| due.max(settled_at));
            let deadline = [gpu.wake, overdue].into_iter().flatten().min();
            (std::mem::replace(&mut gpu.deadline, deadline), deadline)
        };
        if let Some((before, after)) = self.change_gpu(uuid, note)
            && before != after
        {
            self.agenda_mut().change_deadline(uuid, before, after);
        }
    }
}
