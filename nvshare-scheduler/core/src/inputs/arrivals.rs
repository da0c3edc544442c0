//! Clients come and go, and GPUs become known.

use nvshare_proto::units::Bytes;
use nvshare_proto::{Amount, Epoch, EventKind, Gate, GpuUuid, Hold, Register, SchedulerMessage, Usage};

use crate::inputs::Measured;
use crate::report::happened::Happened;
use crate::report::warnings::Topic;
use crate::state::account::MOST_OVERHEAD;
use crate::state::client::{Client, ClientId, Identity, Job, Phase};
use crate::state::gpu::{Departed, Gpu, Size, Source};
use crate::state::ledger::{Entry, Standing};
use crate::state::shares::Part;
use crate::{Core, Time};

/// GPUs that the core remembers when no client uses them.
const MOST_GPUS: usize = 256;

/// A process counts as having nothing on a GPU after so many looks of NVML in a row that do not show it.
const LOOKS_WITHOUT_A_SIGN: u32 = 2;

impl Core {
    pub(crate) fn on_registered(&mut self, id: ClientId, identity: Identity, register: Register) {
        let gate = register.gate;
        let was_here = register.returns || gate == Gate::Open;
        let mut client = Client::new(id, identity, register, self.now);
        let joins = |gang: &_| self.join_gang(id, *gang, client.job);
        client.gang = identity.gang.filter(joins).map(|gang| gang.number);
        self.note(format!("client {id} is {} (pid {})", client.name, client.pid));
        let usage: Vec<Usage> = client.accounts.values().map(|a| a.usage).collect();
        if was_here && usage.iter().any(|usage| usage.allocated > 0) {
            // The client was there before this scheduler, and others may have been as well.
            self.settled_at = self.settled_at.max(self.config.settle);
        }
        let epoch = self.new_epoch();
        let hold = match gate {
            _ if !self.scheduling => Hold::Free,
            Gate::Open => Hold::Running(epoch),
            Gate::Closed => Hold::Parked,
        };
        for account in client.accounts.values_mut() {
            account.room = account.resident();
        }
        if hold == Hold::Free {
            client.phase = Phase::Free;
        }
        self.clients.insert(id, client);
        self.gather_gang(id);
        self.send(id, SchedulerMessage::Registered { client: id, hold });
        for usage in &usage {
            // The same process is back: what it reports now replaces what stayed charged to it.
            self.forget_departed(usage.gpu, |_, departed| departed.identity.is_same_process(identity));
            self.know_gpu(usage.gpu);
        }
        self.join_job(id);
        self.enter(id);
        self.settle_job(id);
        for usage in usage {
            self.greet(id, usage.gpu);
        }
        let allocated = |client: &Client| {
            client.accounts.values().map(|account| account.usage.allocated).fold(0, u64::saturating_add)
        };
        let bytes = self.clients.get(&id).map(allocated);
        self.tell(EventKind::Registered, id, bytes, None);
        if hold == Hold::Free {
            self.tell(EventKind::Free, id, None, None);
        }
        if let Hold::Running(epoch) = hold {
            self.adopt(id, epoch);
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
        self.settle_job(id);
        self.greet(id, uuid);
    }

    /// A GPU that a client uses has its place among those that the core knows.
    fn know_gpu(&mut self, uuid: GpuUuid) {
        if self.gpus.len() >= MOST_GPUS {
            // No machine has more GPUs: most of these are invented by a client.
            self.gpus.retain(|_, gpu| gpu.ledger.entries().next().is_some());
            self.warnings.forget_gpus(&self.gpus);
        }
        let rule = self.config.rule(uuid);
        self.gpus.entry(uuid).or_insert_with(|| Gpu::new(0, Source::Clients, rule));
        self.dirty.insert(uuid);
    }

    /// Tells a client how much it may fill of a GPU that it has begun to use.
    fn greet(&mut self, id: ClientId, uuid: GpuUuid) {
        self.settle_disputes(uuid);
        let bytes = self.capacity(uuid, id);
        self.send(id, SchedulerMessage::Capacity(Amount { gpu: uuid, bytes }));
    }

    /// Without NVML and `--gpu-memory`, a GPU is as large as its clients say. While they agree, that size holds for all of
    /// them; when they differ, each client is believed for itself, and they run one at a time.
    pub(crate) fn settle_disputes(&mut self, uuid: GpuUuid) {
        let Some(gpu) = self.gpus.get(&uuid) else { return };
        if gpu.source == Source::Certain {
            return;
        }
        let was = gpu.source;
        let Some((most, all_agree)) = gpu.ledger.stated_size() else { return };
        if self.config.fixed_memory(uuid).is_some() {
            self.size_by_client(uuid, most);
        } else if all_agree {
            self.size(uuid, Size { available: most, ..Size::default() }, Source::Clients);
        } else if was != Source::Disputed {
            if let Some(gpu) = self.gpus.get_mut(&uuid) {
                gpu.source = Source::Disputed;
            }
            self.dirty.insert(uuid);
            self.reenter(uuid);
            let text = format!(
                "clients report different sizes of {uuid}: they run one at a time; set --gpu-memory, or give the scheduler NVML"
            );
            self.warn_of_gpu(Topic::Disputed, uuid, &text);
        }
    }

    /// Writes all clients of a GPU into its ledger, and tells them what they may fill.
    fn reenter(&mut self, uuid: GpuUuid) {
        let entries = self.gpus.get(&uuid).into_iter().flat_map(|gpu| gpu.ledger.entries());
        let ids: Vec<ClientId> = entries.map(|(id, _)| id).collect();
        for id in ids {
            if self.clients.contains_key(&id) {
                self.enter_on(id, Some(uuid));
                let bytes = self.capacity(uuid, id);
                self.send(id, SchedulerMessage::Capacity(Amount { gpu: uuid, bytes }));
            }
        }
    }

    pub(crate) fn on_measured(&mut self, measured: &Measured) {
        let uuid = measured.gpu;
        let (mut overhead, mut largest) = (0, 0);
        let users: Vec<ClientId> = match self.gpus.get(&uuid) {
            Some(gpu) => gpu.ledger.entries().map(|(id, _)| id).collect(),
            None => Vec::new(),
        };
        for (&id, &used) in &measured.used {
            // The client has a context on the GPU and has not allocated anything there.
            let idle = self.clients.get(&id).is_some_and(|client| !client.accounts.contains_key(&uuid));
            overhead += if idle { used.min(MOST_OVERHEAD) } else { 0 };
        }
        for id in users {
            let Some(client) = self.clients.get_mut(&id) else { continue };
            let listed = measured.used.get(&id).copied();
            // A client that is not listed where others are has nothing there.
            let seen = match listed {
                None if client.identity.pid.is_some() && !measured.used.is_empty() => Some(0),
                listed => listed,
            };
            let (memory, name) = (client.memory, client.name.clone());
            let is_moving = client.phase.is_next()
                || matches!(client.phase, Phase::Granted { .. } | Phase::Dropping { .. });
            let Some(account) = client.accounts.get_mut(&uuid) else { continue };
            account.measure(listed.unwrap_or(0), memory, !is_moving && account.order.is_none());
            let unseen = seen.map_or(0, |seen| account.disbelieve(seen, memory));
            overhead += account.overhead();
            // The client may have used all the room that it was given by now.
            largest = largest.max(account.wanted()).max(account.room);
            self.enter(id);
            if unseen > 0 {
                let text = format!(
                    "client {id} ({name}) reports {} on {uuid} which NVML does not see: they are no longer charged to it",
                    Bytes(unseen)
                );
                self.warn_of_client(Topic::Unseen, id, Some(uuid), &text);
            }
        }
        self.look_for_departed(uuid, measured);
        self.size(uuid, Size { available: measured.available, overhead, largest }, Source::Certain);
    }

    /// Whether a client that could be measured has not been measured often enough for its contexts to count.
    #[must_use]
    pub fn is_measuring(&self) -> bool {
        let clients = self.clients.values().filter(|client| client.identity.pid.is_some());
        clients.flat_map(|client| client.accounts.values()).any(|account| !account.is_measured())
    }

    pub(crate) fn on_capacity(&mut self, uuid: GpuUuid, bytes: u64, source: Source) {
        let rule = self.config.rule(uuid);
        let gpu = self.gpus.entry(uuid).or_insert_with(|| Gpu::new(bytes, source, rule));
        let was = std::mem::replace(&mut gpu.source, source);
        if gpu.capacity == bytes && (was == Source::Disputed) == (source == Source::Disputed) {
            return;
        }
        gpu.capacity = bytes;
        self.dirty.insert(uuid);
        self.woken.append(&mut gpu.watched_by);
        self.reenter(uuid);
    }

    pub(crate) fn on_disconnected(&mut self, id: ClientId, process_remains: bool) {
        let now = self.now;
        let Some(mut client) = self.clients.remove(&id) else { return };
        self.warnings.forget_client(id);
        self.moving.remove(&id);
        client.count(now);
        // The process may have come back before we heard that it was gone: it has reported by then what it has.
        let is_back = process_remains
            && self.clients.values().any(|other| other.identity.is_same_process(client.identity));
        let mut left: u64 = 0;
        for (&uuid, account) in &client.accounts {
            let Some(gpu) = self.gpus.get_mut(&uuid) else { continue };
            if client.phase.holds() {
                gpu.freed_at = Some(now);
            }
            gpu.released.remove(&id);
            gpu.shares.advance(now);
            let part = gpu.ledger.entry(id).map(|entry| entry.part);
            let bound = gpu.most_kept();
            gpu.shares.change(client.job, part, None, bound);
            gpu.ledger.set(id, None);
            self.dirty.insert(uuid);
            self.woken.append(&mut gpu.watched_by);
            if process_remains && !is_back && account.room > 0 {
                let departed = Departed {
                    identity: client.identity,
                    pid: client.pid,
                    name: client.name.clone(),
                    bytes: account.room,
                    reported: false,
                    unseen: 0,
                };
                gpu.ledger.set(id, Some(departed_entry(id, account.room, Some(now + self.config.grace))));
                gpu.departed.insert(id, departed);
                left = left.saturating_add(account.room);
            }
        }
        self.note(format!("client {id} is gone ({}, pid {})", client.name, client.pid));
        let gpus: Vec<GpuUuid> = client.accounts.keys().copied().collect();
        let kind = if left > 0 { EventKind::Left } else { EventKind::Gone };
        let bytes = (left > 0).then_some(left);
        self.happened.push_back(Happened { kind, client: Some(id), gpus: gpus.clone(), bytes, took: None });
        client.accounts.values_mut().for_each(|account| account.room = 0);
        self.remember(id, &client);
        self.leave_job(id, &client);
        for uuid in gpus {
            self.settle_disputes(uuid);
        }
        if let Some(gang) = client.gang {
            self.leave_gang(id, gang);
        }
    }

    /// A process has ended, or runs another program. It may have left memory each time that it disconnected, on different GPUs.
    pub(crate) fn on_exited(&mut self, id: ClientId, identity: Identity) {
        for uuid in self.gpus.keys().copied().collect::<Vec<_>>() {
            self.forget_departed(uuid, |other, departed| {
                // Later ones of the process are of another program, which has left memory since.
                other == id || other < id && departed.identity.is_same_process(identity)
            });
        }
    }

    fn forget_departed(
        &mut self,
        uuid: GpuUuid,
        which: impl Fn(ClientId, &Departed) -> bool,
    ) -> Vec<Departed> {
        let Some(gpu) = self.gpus.get_mut(&uuid) else { return Vec::new() };
        let gone = gpu.departed.extract_if(.., |id, departed| which(*id, departed));
        let gone: Vec<(ClientId, Departed)> = gone.collect();
        for (id, _) in &gone {
            gpu.ledger.set(*id, None);
        }
        if !gone.is_empty() {
            self.dirty.insert(uuid);
            self.woken.append(&mut gpu.watched_by);
        }
        for (id, departed) in &gone {
            self.tell_on(EventKind::Ended, *id, uuid, departed.bytes);
        }
        gone.into_iter().map(|(_, departed)| departed).collect()
    }

    /// Frees the memory of departed processes that live on and have nothing on the GPU any more: they run another program
    /// now.
    fn look_for_departed(&mut self, uuid: GpuUuid, measured: &Measured) {
        if let Some(gpu) = self.gpus.get_mut(&uuid) {
            for (id, departed) in &mut gpu.departed {
                // NVML cannot see a process that has no number here.
                let unseen = departed.identity.pid.is_some() && !measured.used.contains_key(id);
                departed.unseen = if unseen { departed.unseen + 1 } else { 0 };
            }
        }
        for gone in self.forget_departed(uuid, |_, departed| departed.unseen >= LOOKS_WITHOUT_A_SIGN) {
            self.note(format!(
                "process {} ({}) lives on and has nothing of {uuid} any more: {} are free",
                gone.pid,
                gone.name,
                Bytes(gone.bytes)
            ));
        }
    }

    /// Reports a process that has left, and lives on for longer than its end should take.
    pub(crate) fn report_departed(&mut self, id: ClientId, uuid: GpuUuid) {
        let Some(gpu) = self.gpus.get_mut(&uuid) else { return };
        let Some(departed) = gpu.departed.get_mut(&id) else {
            gpu.ledger.set(id, None);
            return;
        };
        departed.reported = true;
        let text = format!(
            "process {} ({}) has left and lives on: {} of {uuid} stay charged to it until it ends or runs another program",
            departed.pid,
            departed.name,
            Bytes(departed.bytes)
        );
        gpu.ledger.set(id, Some(departed_entry(id, departed.bytes, None)));
        self.dirty.insert(uuid);
        self.woken.append(&mut gpu.watched_by);
        self.warn(text);
    }
}

fn departed_entry(id: ClientId, bytes: u64, due: Option<Time>) -> Entry {
    Entry {
        standing: Standing::Departed,
        room: bytes,
        pinned: bytes,
        demand: 0,
        allocated: 0,
        overhead: 0,
        ordered: None,
        needs: false,
        runs: false,
        stuck: false,
        claims: false,
        part: Part::default(),
        payer: Job::Connection(id),
        job: Job::Connection(id),
        key: (0, Time::ZERO, id),
        floats: false,
        total: None,
        due,
    }
}
