//! Clients come and go, and GPUs become known.

use nvshare_proto::{Epoch, Gate, GpuUuid, Hold, Register, Room, SchedulerMessage, Usage};

use crate::state::{Client, ClientId, Departed, Gpu, Identity, MOST_OVERHEAD, Phase, Size, Time};
use crate::{Core, MOST_GPUS, Measured};

impl Core {
    pub(crate) fn on_registered(&mut self, id: ClientId, identity: Identity, register: Register, now: Time) {
        let gate = register.gate;
        let was_here = register.returns || gate == Gate::Open;
        let client = Client::new(identity, register, now);
        self.note(format!("client {id} is {} (pid {})", client.name, client.pid));
        let usage: Vec<Usage> = client.accounts.values().map(|a| a.usage).collect();
        if was_here && usage.iter().any(|usage| usage.allocated > 0) {
            // It was there before this scheduler, and others may have been as well.
            self.settled_at = self.config.settle;
        }
        self.clients.insert(id, client);
        let epoch = self.new_epoch();
        let hold = match gate {
            _ if !self.scheduling => Hold::Free,
            Gate::Open => Hold::Running(epoch),
            Gate::Closed => Hold::Parked,
        };
        self.send(id, SchedulerMessage::Registered { client: id, hold });
        for usage in usage {
            self.meet_gpu(id, usage);
            if let Some(gpu) = self.gpus.get_mut(&usage.gpu) {
                // The same process is back: what was charged to it is what it says now.
                gpu.departed.retain(|_, departed| !departed.identity.is_same_process(identity));
            }
            self.with_account(id, usage.gpu, |account| account.budget = account.resident());
        }
        match hold {
            Hold::Free => self.with(id, |client| client.phase = Phase::Free),
            Hold::Running(epoch) => self.adopt(id, epoch),
            Hold::Parked => {}
        }
        self.wake(id);
    }

    /// Takes a client that runs already as a holder.
    pub(crate) fn adopt(&mut self, id: ClientId, epoch: Epoch) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.phase = Phase::Running { epoch };
        client.wants = false;
        for account in client.accounts.values_mut() {
            account.budget = account.resident();
            account.order = None;
            account.promised = None;
        }
    }

    /// A client uses a GPU from now on.
    pub(crate) fn meet_gpu(&mut self, id: ClientId, usage: Usage) {
        if self.gpus.len() >= MOST_GPUS {
            // A machine has no more: most of these are somebody's invention.
            let clients = &self.clients;
            self.gpus.retain(|uuid, _| clients.values().any(|client| client.accounts.contains_key(uuid)));
        }
        let bytes = self.size_by_client(usage.gpu, usage.total);
        self.send(id, SchedulerMessage::Capacity(Room { gpu: usage.gpu, bytes }));
    }

    pub(crate) fn on_measured(&mut self, measured: &Measured) {
        let gpu = measured.gpu;
        let (mut overhead, mut largest) = (0, 0);
        for (id, client) in &mut self.clients {
            let used = measured.used.get(id).copied().unwrap_or(0);
            let Some(account) = client.accounts.get_mut(&gpu) else {
                // It has a context there and has not asked for anything.
                overhead += used.min(MOST_OVERHEAD);
                continue;
            };
            account.measure(used);
            overhead += account.overhead();
            // Room that it was given it may have used by now.
            largest = largest.max(account.wanted()).max(account.budget);
        }
        self.size(gpu, Size { available: measured.available, overhead, largest });
    }

    pub(crate) fn on_capacity(&mut self, uuid: GpuUuid, bytes: u64) {
        let quantum = self.config.quantum(uuid);
        let gpu = self.gpus.entry(uuid).or_insert_with(|| Gpu::new(bytes, quantum));
        if gpu.capacity == bytes {
            return;
        }
        gpu.capacity = bytes;
        let users: Vec<ClientId> =
            self.clients.iter().filter(|(_, c)| c.accounts.contains_key(&uuid)).map(|(id, _)| *id).collect();
        for id in users {
            self.send(id, SchedulerMessage::Capacity(Room { gpu: uuid, bytes }));
        }
    }

    pub(crate) fn on_disconnected(&mut self, id: ClientId, process_remains: bool, now: Time) {
        let Some(mut client) = self.clients.remove(&id) else { return };
        if client.phase.holds() {
            for uuid in client.accounts.keys() {
                if let Some(gpu) = self.gpus.get_mut(uuid) {
                    gpu.freed_at = Some(now);
                }
            }
        }
        // It may have come back before we heard that it was gone: it has said by then what it has.
        let is_back = self.clients.values().any(|other| other.identity.is_same_process(client.identity));
        if process_remains && !is_back {
            for (uuid, account) in &client.accounts {
                if let Some(gpu) = self.gpus.get_mut(uuid)
                    && account.budget > 0
                {
                    let departed = Departed { identity: client.identity, bytes: account.budget };
                    gpu.departed.insert(id, departed);
                }
            }
        }
        for gpu in self.gpus.values_mut() {
            gpu.released.remove(&id);
        }
        self.note(format!("client {id} is gone ({}, pid {})", client.name, client.pid));
        client.accounts.values_mut().for_each(|account| account.budget = 0);
        self.remember(id, &client);
    }
}
