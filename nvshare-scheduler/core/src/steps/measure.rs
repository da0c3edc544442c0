//! Measures whether the jobs of a GPU get more done side by side or by turns: what the core does for a [`Trial`](crate::state::trial).

use nvshare_proto::{GpuUuid, SchedulerMessage};

use crate::state::client::ClientId;
use crate::state::config::Together;
use crate::state::trial::Sight;
use crate::steps::books::Books;

impl Books {
    /// Goes on with the trial of a GPU, if it is time.
    pub(crate) fn measure(&mut self, uuid: GpuUuid) {
        let now = self.state.now;
        let Some(gpu) = self.state.gpus.get_mut(&uuid) else { return };
        if let Some(until) = gpu.trial.rests_until() {
            if gpu.shares.holding() < 2 || self.state.config.together == Together::Always {
                return;
            }
            if now < until {
                gpu.wake_at(until);
                return;
            }
        }
        let set = self.state.gpus.get(&uuid).and_then(|gpu| self.state.measured_set(gpu));
        let Some(gpu) = self.state.gpus.get_mut(&uuid) else { return };
        let is_gone = gpu.trial.clients().any(|id| gpu.ledger.entry(id).is_none());
        let is_free = gpu.ledger.holders().is_empty();
        let cannot_drain = gpu.waits_to_drain(now);
        let todo = gpu.trial.go_on(Sight { set: set.as_ref(), is_free, cannot_drain, is_gone, now });
        if let Some(wake) = todo.wake.filter(|&wake| wake > now) {
            gpu.wake_at(wake);
        }
        if todo.begin {
            gpu.turn_started = None;
        }
        if let Some(ticket) = todo.ask {
            for id in gpu.trial.clients() {
                self.report.send(id, SchedulerMessage::AskProgress { ticket });
            }
        }
        if todo.separate {
            for id in gpu.ledger.holders().clone() {
                self.ask_to_leave(id);
            }
        }
        if let Some(note) = todo.note {
            self.report.note(format!("{uuid}: {note}"));
        }
    }

    /// So much of a client's work is complete: a trial may have waited for it.
    pub(crate) fn note_progress(&mut self, id: ClientId, ticket: u64, submissions: u64) {
        let now = self.state.now;
        self.state.on_each_gpu_of(id, |gpu, _| {
            if gpu.trial.completed(id, ticket, submissions, now) {
                self.agenda.dirty.insert(gpu.uuid);
            }
        });
    }

    /// A client gives the lock back, and has said its counters before.
    pub(crate) fn note_turn(&mut self, id: ClientId) {
        let (now, client) = (self.state.now, self.state.clients.get(&id));
        if let Some(gated) = client.map(|client| client.counters.gated) {
            self.state.on_each_gpu_of(id, |gpu, _| gpu.trial.given_back(id, gated, now));
        }
    }

    /// A client has nothing to do.
    pub(crate) fn note_sleep(&mut self, id: ClientId) {
        self.state.on_each_gpu_of(id, |gpu, _| gpu.trial.fall_asleep(id));
    }

    /// Asks a client for its counters, unless it still has to answer.
    pub(crate) fn ask_for_counters(&mut self, id: ClientId) {
        if let Some(client) = self.state.clients.get_mut(&id)
            && !std::mem::replace(&mut client.asked_counters, true)
        {
            self.report.send(id, SchedulerMessage::AskCounters);
        }
    }
}
