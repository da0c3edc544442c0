//! Measures whether the jobs of a GPU get more done side by side or by turns: what the core does for a
//! [`Trial`](crate::state::trial).

use nvshare_proto::{GpuUuid, SchedulerMessage};

use crate::state::client::ClientId;
use crate::state::config::Together;
use crate::state::gpu::Gpu;
use crate::state::trial::Sight;
use crate::steps::books::Books;

impl Books {
    /// Goes on with the trial of a GPU, if it is time.
    pub(crate) fn advance_trial(&mut self, uuid: GpuUuid) {
        let state = self.state();
        let now = state.now();
        let Some(gpu) = state.known_gpu(uuid) else { return };
        if let Some(until) = gpu.trial.rests_until() {
            if gpu.shares.holding() < 2 || state.config().together == Together::Always {
                return;
            }
            if now < until {
                return self.wake_at(uuid, until);
            }
        }
        let set = state.measured_set(gpu);
        let go_on = |gpu: &mut Gpu| {
            let is_gone = gpu.trial.clients().any(|id| gpu.ledger.entry(id).is_none());
            let is_free = gpu.ledger.holders().is_empty();
            let cannot_drain = gpu.deferred.holds_back(now);
            let todo = gpu.trial.go_on(Sight { set: set.as_ref(), is_free, cannot_drain, is_gone, now });
            if todo.begin {
                gpu.turn.end();
            }
            todo
        };
        let Some(todo) = self.change_gpu(uuid, go_on) else { return };
        if let Some(wake) = todo.wake.filter(|&wake| wake > now) {
            self.wake_at(uuid, wake);
        }
        if let Some(ticket) = todo.ask {
            for id in self.clients_in(uuid, |gpu| gpu.trial.clients().collect()) {
                self.send(id, SchedulerMessage::AskProgress { ticket });
            }
        }
        if todo.separate {
            for id in self.clients_in(uuid, |gpu| gpu.ledger.holders().iter().copied().collect()) {
                self.ask_to_leave(id);
            }
        }
        if let Some(note) = todo.note {
            self.report_mut().info(format!("{uuid}: {note}"));
        }
    }

    fn clients_in(&self, uuid: GpuUuid, clients: impl FnOnce(&Gpu) -> Vec<ClientId>) -> Vec<ClientId> {
        self.state().gpu(uuid).map(clients).unwrap_or_default()
    }

    /// Notes how much of a client's work is complete: a trial may have waited for it.
    pub(crate) fn note_progress(&mut self, id: ClientId, ticket: u64, submissions: u64) {
        let now = self.state().now();
        let mut waited_for = Vec::new();
        self.change_each_gpu_of(id, |gpu, _| {
            if gpu.trial.completed(id, ticket, submissions, now) {
                waited_for.push(gpu.uuid);
            }
        });
        self.queue(waited_for);
    }

    /// Counts the turn of a client that gives the lock back, and has said its counters before.
    pub(crate) fn note_turn(&mut self, id: ClientId) {
        let now = self.state().now();
        if let Some(gated) = self.state().client(id).map(|client| client.notes.counters.gated) {
            self.change_each_gpu_of(id, |gpu, _| gpu.trial.given_back(id, gated, now));
        }
    }

    /// Counts a sleep of a client that has nothing to do.
    pub(crate) fn note_sleep(&mut self, id: ClientId) {
        self.change_each_gpu_of(id, |gpu, _| gpu.trial.fall_asleep(id));
    }

    /// Asks a client for its counters, unless it still has to answer.
    pub(crate) fn ask_for_counters(&mut self, id: ClientId) {
        let was_asked = self.change_notes(id, |notes| std::mem::replace(&mut notes.asked_counters, true));
        if was_asked == Some(false) {
            self.send(id, SchedulerMessage::AskCounters);
        }
    }
}
