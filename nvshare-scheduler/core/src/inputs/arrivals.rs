//! Clients come, and begin to use GPUs.

use nvshare_proto::{Epoch, EventKind, Gate, GpuUuid, Hold, Register, SchedulerMessage, Usage};

use crate::state::client::{Client, ClientId, Identity, Phase};
use crate::steps::books::Books;

impl Books {
    pub(crate) fn on_registered(&mut self, id: ClientId, identity: Identity, register: Register) {
        let gate = register.gate;
        let was_here = register.returns || gate == Gate::Open;
        let mut client = Client::new(id, identity, register, self.state.now);
        let joins = |gang: &_| self.join_gang(id, *gang, client.job);
        client.gang = identity.gang.filter(joins).map(|gang| gang.number);
        self.report.note(format!("client {id} is {} (pid {})", client.name, client.pid));
        let usage: Vec<Usage> = client.accounts.values().map(|a| a.usage).collect();
        if was_here && usage.iter().any(|usage| usage.allocated > 0) {
            // The client was there before this scheduler, and others may have been as well.
            self.state.settled_at = self.state.settled_at.max(self.state.config.settle);
        }
        let epoch = self.state.new_epoch();
        let hold = match gate {
            _ if !self.state.scheduling => Hold::Free,
            Gate::Open => Hold::Running(epoch),
            Gate::Closed => Hold::Parked,
        };
        for account in client.accounts.values_mut() {
            account.room = account.resident();
        }
        if hold == Hold::Free {
            client.phase = Phase::Free;
        }
        self.state.clients.insert(id, client);
        self.gather_gang(id);
        self.report.send(id, SchedulerMessage::Registered { client: id, hold });
        for usage in &usage {
            // The same process is back: what it reports now replaces what stayed charged to it.
            self.forget_departed(usage.gpu, |_, departed| departed.identity.is_same_process(identity));
            self.know_gpu(usage.gpu);
        }
        self.join_job(id);
        self.enter(id);
        self.apply_terms_of(id);
        for usage in &usage {
            self.greet(id, usage.gpu);
        }
        let allocated = self.state.clients.get(&id).map(Client::allocated);
        self.tell(EventKind::Registered, id, allocated);
        match hold {
            Hold::Free => self.tell(EventKind::Free, id, None),
            Hold::Running(epoch) => self.adopt(id, epoch),
            Hold::Parked => {}
        }
        self.follow_gang(id);
    }

    /// Takes a client that runs already as a holder.
    pub(crate) fn adopt(&mut self, id: ClientId, epoch: Epoch) {
        self.with(id, |client| {
            client.phase = Phase::Running { epoch };
            client.wants = false;
            for account in client.accounts.values_mut() {
                account.room = account.resident();
                account.order = None;
                account.promised = None;
            }
        });
    }

    /// A client uses a GPU from now on.
    pub(crate) fn meet_gpu(&mut self, id: ClientId, uuid: GpuUuid) {
        self.know_gpu(uuid);
        self.count_gpu(id, uuid);
        self.gather_gang(id);
        self.enter(id);
        self.apply_terms_of(id);
        self.greet(id, uuid);
    }
}
