//! Clients come, and begin to use GPUs.

use nvshare_proto::{Epoch, EventKind, Gate, GpuUuid, Hold, Register, SchedulerMessage, Usage};

use crate::state::client::{Client, ClientId, Gang, Identity};
use crate::steps::books::Books;

impl Books {
    pub(crate) fn on_registered(&mut self, id: ClientId, identity: Identity, register: Register) {
        let gate = register.gate;
        let was_here = register.returns || gate == Gate::Open;
        let mut client = Client::new(id, identity, register, self.state().now());
        let gang = identity.gang.filter(|&gang| self.join_gang(&client, gang));
        client.gang = gang.map(Gang::id);
        self.report().info(format!("client {id} is {} (pid {})", client.name, client.pid));
        let usage: Vec<Usage> = client.accounts.values().map(|a| a.usage).collect();
        if was_here && usage.iter().any(|usage| usage.allocated > 0) {
            // The client was there before this scheduler, and others may have been as well.
            self.wait_for_returns();
        }
        let epoch = self.new_epoch();
        let hold = match gate {
            _ if !self.state().is_scheduling() => Hold::Free,
            Gate::Open => Hold::Running(epoch),
            Gate::Closed => Hold::Parked,
        };
        if hold == Hold::Free {
            client.set_free();
        }
        self.know_gpus_of(&client.gpus());
        self.jobs_mut().join(&client);
        self.add_client(client);
        self.gather_gang(id);
        self.send(id, SchedulerMessage::Registered { client: id, hold });
        for usage in &usage {
            // The same process is back: its report replaces the bytes that stayed charged to it.
            self.forget_departed(usage.gpu, |_, departed| departed.identity.is_same_process(identity));
        }
        self.enter(id);
        self.apply_terms_of(id);
        for usage in &usage {
            self.greet(id, usage.gpu);
        }
        let allocated = self.state().client(id).map(Client::allocated);
        self.emit(EventKind::Registered, id, allocated);
        match hold {
            Hold::Free => self.emit(EventKind::Free, id, None),
            Hold::Running(epoch) => self.adopt(id, epoch),
            Hold::Parked => {}
        }
        self.follow_gang(id);
    }

    /// Takes a client that runs already as a holder.
    pub(crate) fn adopt(&mut self, id: ClientId, epoch: Epoch) {
        self.change_client(id, |client| {
            client.run(epoch);
            client.wants = false;
            for account in client.accounts.values_mut() {
                account.room = account.resident();
                account.order = None;
                account.promised = None;
            }
        });
    }

    /// Enters a client, which has an account there, as one that uses a GPU.
    pub(crate) fn meet_gpu(&mut self, id: ClientId, uuid: GpuUuid) {
        if let Some(job) = self.state().client(id).map(|client| client.job) {
            self.jobs_mut().count_gpu(job, uuid);
        }
        self.gather_gang(id);
        self.enter(id);
        self.apply_terms_of(id);
        self.greet(id, uuid);
    }
}
