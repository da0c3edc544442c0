//! What the members of a gang do together: see [`state::gangs`](crate::state::gangs).

use nvshare_proto::MOST_MEMBERS;

use crate::state::client::{Client, ClientId, Gang, Job, Phase};
use crate::state::gangs::Muster;
use crate::steps::books::Books;

impl Books {
    /// Notes who the members of a client's gang are, and which GPUs they use, after one of them has changed that.
    pub(crate) fn gather_gang(&mut self, id: ClientId) {
        let gang = self.state.gang_of(id);
        if let Some(members) = gang.and_then(|gang| self.state.gangs.get_mut(&gang)) {
            members.gather(&self.state.clients);
        }
    }

    /// A client of a job comes. Returns whether it counts as a member of its gang.
    pub(crate) fn join_gang(&mut self, id: ClientId, gang: Gang, job: Job) -> bool {
        let joins = self.state.gangs.entry(gang.number).or_default().join(id, gang, job, self.state.now);
        if !joins {
            let text = format!("client {id}: its gang has {MOST_MEMBERS} members already; it is by itself");
            self.report.warn(text);
        }
        joins
    }

    /// Whether a client still has to wait for members of its gang. A gang that has waited long enough goes on, which is logged once.
    pub(crate) fn waits_for_members(&mut self, id: ClientId) -> bool {
        let gang = self.state.gang_of(id).and_then(|gang| self.state.gangs.get_mut(&gang));
        match gang.map_or(Muster::Complete, |members| members.muster(self.state.now)) {
            Muster::Complete => false,
            Muster::Waits => true,
            Muster::GoesOn { there, size } => {
                self.report.warn(format!(
                    "the gang of client {id} goes on with {there} of {size} members: the others have not come, or have gone"
                ));
                false
            }
        }
    }

    /// A member wants the lock: so do all members that do not have it.
    pub(crate) fn want_together(&mut self, id: ClientId) {
        let now = self.state.now;
        if self.state.gang_of(id).is_none() {
            return;
        }
        for other in self.state.unit(id).iter().copied() {
            let sits = |client: &Client| client.phase == Phase::Parked && !client.wants;
            if self.state.clients.get(&other).is_some_and(sits) {
                self.with(other, |client| {
                    client.wants = true;
                    client.waiting_since = now;
                });
            }
        }
    }

    /// A member that comes wants the lock if another member has it, or wants it.
    pub(crate) fn follow_gang(&mut self, id: ClientId) {
        let unit = self.state.unit(id);
        if self.state.clients_of(&unit).any(|client| client.phase.holds()) {
            self.want_together(id);
        }
        self.wait_with_gang(id);
    }

    /// A member whose gate is closed waits for the lock if another one does.
    pub(crate) fn wait_with_gang(&mut self, id: ClientId) {
        let unit = self.state.unit(id);
        if self.state.clients_of(&unit).any(Client::waits) {
            self.want_together(id);
        }
    }
}
