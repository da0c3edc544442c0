//! Clients come, and begin to use GPUs.

use nvshare_proto::{Epoch, EventKind, Gate, GpuUuid, InitialState, Register, SchedulerMessage};

use crate::state::client::{Client, ClientId, Gang, Identity};
use crate::steps::books::Books;

impl Books {
    /// Takes in a client that has registered, and tells it whether it may run.
    pub(crate) fn on_registered(&mut self, id: ClientId, identity: Identity, register: Register) {
        let gate = register.gate;
        let was_here = register.returns || gate == Gate::Open;
        let mut client = Client::new(id, identity, register, self.state().now());
        let gang = identity.gang.filter(|&gang| self.join_gang(&client, gang));
        client.gang = gang.map(Gang::id);
        self.report_mut().info(format!("client {id} is {} (pid {})", client.name, client.pid));
        if was_here && client.allocated() > 0 {
            // The client was there before this scheduler, and others may have been as well.
            self.wait_for_returns();
        }
        let hold = self.hold_for(gate);
        if hold == InitialState::Free {
            client.set_free();
        }
        self.admit(client, identity, hold);
        self.follow_gang(id);
        self.follow_rest(id);
    }

    /// The state in which a client begins, by the gate that it has.
    fn hold_for(&mut self, gate: Gate) -> InitialState {
        let epoch = self.new_epoch();
        match gate {
            _ if !self.state().is_scheduling() => InitialState::Free,
            Gate::Open => InitialState::Running(epoch),
            Gate::Closed => InitialState::Parked,
        }
    }

    /// Adds a client, writes it into the ledgers of its GPUs, and announces it.
    fn admit(&mut self, client: Client, identity: Identity, hold: InitialState) {
        let (id, gpus, allocated) = (client.id, client.gpus(), client.allocated());
        self.know_gpus_of(&gpus);
        self.jobs_mut().join(&client);
        self.add_client(client);
        self.gather_gang(id);
        self.send(id, SchedulerMessage::Registered { client: id, hold });
        for &gpu in &gpus {
            self.forget_what_was_left(identity, gpu);
        }
        self.rewrite_entries(id);
        self.apply_terms_of(id);
        for &gpu in &gpus {
            self.greet(id, gpu);
        }
        self.emit(EventKind::Registered, id, Some(allocated));
        match hold {
            InitialState::Free => self.emit(EventKind::Free, id, None),
            InitialState::Running(epoch) => self.adopt(id, epoch),
            InitialState::Parked => {}
        }
    }

    /// Takes a client that runs already as a holder.
    pub(crate) fn adopt(&mut self, id: ClientId, epoch: Epoch) {
        self.change_client(id, |client| {
            client.run(epoch);
            client.wants = false;
            client.adopted = Some(epoch);
            client.accounts.values_mut().for_each(|account| account.adopt(epoch));
        });
    }

    /// Forgets what the same process had on a GPU when an earlier connection ended: its report replaces that.
    pub(crate) fn forget_what_was_left(&mut self, identity: Identity, uuid: GpuUuid) {
        self.forget_departed(uuid, |_, departed| departed.identity.is_same_process(identity));
    }

    /// Enters a client, which has an account there, as one that uses a GPU.
    pub(crate) fn meet_gpu(&mut self, id: ClientId, uuid: GpuUuid) {
        if let Some((job, identity)) = self.state().client(id).map(|client| (client.job, client.identity)) {
            self.jobs_mut().count_gpu(job, uuid);
            self.forget_what_was_left(identity, uuid);
        }
        self.gather_gang(id);
        self.rewrite_entries(id);
        self.apply_terms_of(id);
        self.greet(id, uuid);
    }
}
