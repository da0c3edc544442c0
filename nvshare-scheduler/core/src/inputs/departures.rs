//! Clients go, and processes end.

use nvshare_proto::{EventKind, GpuUuid};

use crate::state::client::{Client, ClientId, Identity};
use crate::steps::books::Books;
use crate::steps::departed::leave_behind;

impl Books {
    pub(crate) fn on_disconnected(&mut self, id: ClientId, process_remains: bool) {
        let now = self.state.now;
        let Some(mut client) = self.state.clients.remove(&id) else { return };
        self.report.forget_client(id);
        self.agenda.moving.remove(&id);
        client.count(now);
        // The process may have come back before we heard that it was gone: it has reported by then what it has.
        let is_back = process_remains
            && self.state.clients.values().any(|other| other.identity.is_same_process(client.identity));
        let left = self.take_off_gpus(&client, process_remains && !is_back);
        self.report.note(format!("client {id} is gone ({}, pid {})", client.name, client.pid));
        let (kind, bytes) = if left > 0 { (EventKind::Left, Some(left)) } else { (EventKind::Gone, None) };
        self.report.tell(kind, &client, bytes, None);
        client.accounts.values_mut().for_each(|account| account.room = 0);
        self.report.remember(&self.state, &client);
        self.leave_job(&client);
        for uuid in client.gpus() {
            self.agree_on_size(uuid);
        }
        if let Some(gang) = client.gang {
            self.leave_gang(id, gang);
        }
    }

    /// Takes a client that is gone out of the ledgers of its GPUs. What it `leaves` there stays charged to its process. Returns
    /// these bytes.
    fn take_off_gpus(&mut self, client: &Client, leaves: bool) -> u64 {
        let (now, grace) = (self.state.now, self.state.config.grace);
        let mut left: u64 = 0;
        for (uuid, account) in &client.accounts {
            let Some(gpu) = self.state.gpus.get_mut(uuid) else { continue };
            if client.phase.holds() {
                gpu.freed_at = Some(now);
            }
            gpu.released.remove(&client.id);
            gpu.shares.advance(now);
            let activity = gpu.ledger.entry(client.id).map(|entry| entry.activity);
            let bound = gpu.most_kept();
            gpu.shares.change(client.job, activity, None, bound);
            gpu.ledger.set(client.id, None);
            self.agenda.look_again(gpu);
            if leaves && account.room > 0 {
                leave_behind(gpu, client, account.room, now + grace);
                left = left.saturating_add(account.room);
            }
        }
        left
    }

    /// A client that was in a gang is gone.
    fn leave_gang(&mut self, id: ClientId, gang: u64) {
        let Some(members) = self.state.gangs.get_mut(&gang) else { return };
        let Some(other) = members.leave(id, self.state.now) else {
            self.state.gangs.remove(&gang);
            return;
        };
        self.gather_gang(other);
        self.release_drained(other);
        let unit = self.state.unit(other);
        self.apply_pauses(unit.to_vec());
        for &other in unit.iter() {
            self.enter(other);
            self.agenda.to_tell.insert(other);
        }
        // Members may not have had their turn because of the client that is gone.
        self.agenda.dirty.extend(self.state.gpus_of(&unit));
    }

    /// A process has ended, or runs another program. It may have left memory each time that it disconnected, on different GPUs.
    pub(crate) fn on_exited(&mut self, id: ClientId, identity: Identity) {
        for uuid in self.state.gpus.keys().copied().collect::<Vec<GpuUuid>>() {
            self.forget_departed(uuid, |other, departed| {
                // Later ones of the process are of another program, which has left memory since.
                other == id || other < id && departed.identity.is_same_process(identity)
            });
        }
    }
}
