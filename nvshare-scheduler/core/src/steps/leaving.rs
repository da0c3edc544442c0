//! How clients leave: they are asked for the lock, drain, and give up their places. A gang leaves as a whole.

use std::time::Duration;

use nvshare_proto::SchedulerMessage;

use crate::policy::patience;
use crate::state::client::{Client, ClientId, Phase};
use crate::state::gangs::Unit;
use crate::steps::books::Books;

impl Books {
    /// Asks a client for the lock back, and with it all members of its gang.
    pub(crate) fn ask_to_leave(&mut self, id: ClientId) {
        self.ask_these_to_leave(&self.state().unit(id));
    }

    /// Asks these clients for the lock back. Idle ones come last: their places depend on whether others of their gangs drain.
    pub(crate) fn ask_these_to_leave(&mut self, ids: &[ClientId]) {
        let is_idle = |id: &ClientId| self.state().phase(*id).is_some_and(Phase::is_idle);
        let (idle, others): (Vec<ClientId>, Vec<ClientId>) = ids.iter().partition(|id| is_idle(id));
        for id in others.into_iter().chain(idle) {
            self.ask_one_to_leave(id);
        }
    }

    /// Asks one client for the lock back.
    fn ask_one_to_leave(&mut self, id: ClientId) {
        let now = self.state().now();
        match self.state().phase(id) {
            Some(Phase::Next(_)) => {
                self.change_client(id, |client| client.park());
            }
            // The others' kernels may wait for the client's next ones. If they cannot drain, it goes on with them.
            Some(Phase::Idle { .. }) if self.has_draining_mates(id) => {
                self.change_client(id, Client::wait_drained);
            }
            // The client's gate is closed and its work is complete: there is nothing to ask.
            Some(Phase::Idle { .. }) => {
                self.change_client(id, |client| {
                    client.park();
                    client.note_drained();
                });
                self.change_each_gpu_of(id, |gpu, _| gpu.freed_at = Some(now));
            }
            Some(Phase::Granted { epoch, .. } | Phase::Running { epoch }) => {
                let patience = self.patience_with(id);
                let grace = self.state().config().grace.max(patience::answers_within(patience));
                self.change_client(id, |client| {
                    client.drop_lock(epoch, now, now + client.grace(grace));
                });
                let patience_ms = patience.as_millis() as u32;
                self.send(id, SchedulerMessage::DropLock { epoch, patience_ms });
            }
            None | Some(Phase::Parked | Phase::Dropping { .. } | Phase::Drained | Phase::Free) => {}
        }
    }

    /// Returns how long a client's drain may make no progress. Others may have drained since its last one was given up.
    fn patience_with(&self, id: ClientId) -> Duration {
        let gpus = self.state().gpus_used_by(id);
        let of_gpus = self.state().gpus_among(&gpus).map(|gpu| gpu.deferrals).max();
        let own = self.state().client(id).map(|client| client.deferrals);
        patience::drain_patience(of_gpus.max(own).unwrap_or(0))
    }

    /// Asks a gang to leave if some members hold the lock while others have to wait for it, so that they come
    /// back together. Returns whether it did.
    pub(crate) fn recall_part_of_gang(&mut self, unit: &Unit) -> bool {
        let holds = |client: &&Client| client.phase().holds() && !client.is_unresponsive;
        let deferrals: Vec<u32> =
            self.state().clients_of(unit).filter(holds).map(|client| client.deferrals).collect();
        // A member that deferred a drain lately, or was asked along with one that did, is not asked again and
        // again.
        let recalls = !deferrals.is_empty()
            && deferrals.iter().all(|&deferrals| deferrals == 0)
            && self.state().gangs_complete_by(unit) <= self.state().now();
        if recalls {
            self.ask_to_leave(unit.first());
        }
        recalls
    }

    /// Parks a client that has closed its gate and drained; one whose gang still drains stays
    /// [`Phase::Drained`].
    pub(crate) fn park(&mut self, id: ClientId, phase: Phase) {
        if let Phase::Dropping { since, .. } = phase {
            self.record_drain(id, self.state().now().saturating_sub(since));
            if self.has_draining_mates(id) {
                self.change_client(id, |client| {
                    client.wait_drained();
                    client.wants = false;
                    client.note_drained();
                    client.forget_needs();
                });
                return;
            }
        }
        self.leave_gpus(id, phase);
        self.release_drained(id);
    }

    /// Whether another member of a client's gang still drains. Until it has, the client keeps its place.
    fn has_draining_mates(&self, id: ClientId) -> bool {
        let unit = self.state().unit(id);
        self.state().clients_of(&unit).any(|other| other.id != id && other.is_draining())
    }

    /// Parks the members of a gang that have drained, when no member drains any more: they give up their
    /// places.
    pub(crate) fn release_drained(&mut self, id: ClientId) {
        let unit = self.state().unit(id);
        if self.state().clients_of(&unit).any(Client::is_draining) {
            return;
        }
        for &other in unit.iter() {
            if self.state().phase(other) == Some(Phase::Drained) {
                self.leave_gpus(other, Phase::Drained);
            }
        }
    }

    /// Gives up the place of a client on its GPUs, when no work of it runs there any more.
    fn leave_gpus(&mut self, id: ClientId, phase: Phase) {
        let now = self.state().now();
        self.change_client(id, |client| {
            // A client that drained before the others of its gang may have requested the lock again, and told
            // its needs.
            client.wants &= phase == Phase::Drained;
            client.park();
            client.note_drained();
            if phase != Phase::Drained {
                client.forget_needs();
            }
        });
        self.change_each_gpu_of(id, |gpu, _| {
            if phase.is_dropping() || phase == Phase::Drained {
                gpu.released.insert(id);
            }
            gpu.freed_at = Some(now);
            // As long as another client drains, the hand-over may still be given up.
            if gpu.ledger.sums().leaving == 0 {
                gpu.deferrals = 0;
            }
        });
    }

    /// Parks the clients of a unit that were next: they wait on.
    pub(crate) fn step_back(&mut self, unit: &[ClientId]) {
        for &id in unit {
            if self.state().phase(id).is_some_and(Phase::is_next) {
                self.change_client(id, |client| client.park());
            }
        }
    }
}
