//! Steps that the members of a gang take together: see [`state::gangs`](crate::state::gangs).

use nvshare_proto::MAX_GANG_MEMBERS;

use crate::Time;
use crate::state::client::{Client, ClientId, Gang, GangId, Phase};
use crate::state::gangs::Muster;
use crate::steps::books::Books;

impl Books {
    /// Adds a client to its gang. Returns whether it counts as a member.
    pub(crate) fn join_gang(&mut self, client: &Client, gang: Gang) -> bool {
        let joins = self.add_member(client, gang);
        if !joins {
            let id = client.id;
            let text =
                format!("client {id}: its gang has {MAX_GANG_MEMBERS} members already; it is by itself");
            self.report_mut().warn(text);
        }
        joins
    }

    /// Looks whether the members of a client's gang are there. Returns whether it still has to wait for some.
    /// A gang that has waited long enough goes on, which is logged once.
    pub(crate) fn muster_gang(&mut self, id: ClientId) -> bool {
        let (now, gang) = (self.state().now(), self.state().gang_of(id));
        match gang.and_then(|gang| self.change_gang(gang, |members| members.muster(now))) {
            None | Some(Muster::Complete) => false,
            Some(Muster::Waits) => true,
            Some(Muster::GoesOn { there, size }) => {
                self.report_mut().warn(format!(
                    "the gang of client {id} goes on with {there} of {size} members: the others have not come, or have gone"
                ));
                false
            }
        }
    }

    /// Requests the lock for a member that comes, if another member has it or waits for it.
    pub(crate) fn follow_gang(&mut self, id: ClientId) {
        let Some(gang) = self.state().gang_of(id) else { return };
        let unit = self.state().unit(id);
        if self.state().clients_of(&unit).any(|client| client.phase().holds()) {
            self.wait_with_gang(id, self.state().now());
        }
        self.wait_together(gang);
    }

    /// The same for all members, of which some come from different gangs.
    pub(crate) fn follow_united(&mut self, gang: GangId) {
        let members = self.state().members(gang);
        if self.state().clients_of(&members).any(|client| client.phase().holds() || client.waits()) {
            let now = self.state().now();
            members.into_iter().for_each(|id| self.wait_with_gang(id, now));
            self.wait_together(gang);
        }
    }

    /// Requests the lock for all members that sit there, if one waits for it. A waiter is looked at when something changes on a GPU
    /// where a member waits, and on no other. All wait since the same moment: two gangs in another order on each GPU would keep each
    /// other off.
    pub(crate) fn wait_together(&mut self, gang: GangId) {
        let members = self.state().members(gang);
        let waiters =
            self.state().clients_of(&members).filter(|client| client.waits() && !client.accounts.is_empty());
        if let Some(since) = waiters.map(|client| client.waiting_since).min() {
            members.into_iter().for_each(|id| self.wait_with_gang(id, since));
        }
    }

    /// Requests the lock for a member that sits there, or has waited for less long.
    fn wait_with_gang(&mut self, id: ClientId, since: Time) {
        let sits = |client: &Client| {
            client.phase() == Phase::Parked && (!client.wants || client.waiting_since > since)
        };
        if self.state().client(id).is_some_and(sits) {
            self.change_client(id, |client| client.request_lock(since));
        }
    }
}
