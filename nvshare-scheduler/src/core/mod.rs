//! Decides who holds each GPU's lock and whose memory is on the card.
//!
//! A pure state machine: events and the time come in, outputs go out, nothing else is touched. Each event is
//! applied to the state and then the state is looked at as a whole (`reconcile`): there is one place
//! that grants, one that asks for the lock back, one that makes room. A lost or late event can therefore delay
//! a decision and not derail it.
//!
//! Invariants, each with a property test in `tests/core_properties.rs`:
//! - clients that hold a GPU at the same time fit it together;
//! - what clients may have resident on a GPU never exceeds its capacity, once they registered in time;
//! - who wants the lock gets it;
//! - a client that is gone holds nothing.

pub mod policy;
mod reconcile;
mod state;
mod status;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use nvshare_proto::units::{Bytes, MIB};
use nvshare_proto::{ClientMessage, Epoch, Gate, GpuUuid, Hold, Register, Room, SchedulerMessage, Usage};

use policy::{capacity, next};
use state::{Account, Client, Departed, Gpu, MOST_OVERHEAD, Phase};
pub use state::{ClientId, Identity, Time};

/// What an administrator chose at the start.
#[derive(Debug, Clone)]
pub struct Config {
    /// Names this run of the scheduler in its grants.
    pub boot: u64,
    /// How long a client keeps the lock while somebody waits.
    pub quantum: Duration,
    /// What clients may fill on each GPU together, in bytes; none: what the GPU has, less the reserve.
    pub gpu_memory: Option<u64>,
    /// Bytes of each GPU that are left to contexts, modules and the driver; none: 1536 MiB, and of a small GPU an
    /// eighth at most.
    pub reserve: Option<u64>,
    /// One client at a time, even where memory fits.
    pub exclusive: bool,
    /// After this long without an answer, a client is reported as stuck.
    pub grace: Duration,
    /// When clients come back from an earlier scheduler, nobody is granted anything for this long after the start:
    /// those who run must be known before what they fill is given away.
    pub settle: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            boot: 1,
            quantum: Duration::from_secs(30),
            gpu_memory: None,
            reserve: None,
            exclusive: false,
            grace: Duration::from_secs(10),
            settle: Duration::ZERO,
        }
    }
}

impl Config {
    /// What clients may fill together on a GPU: see [`capacity::usable`].
    fn usable(&self, available: u64, overhead: u64, largest: u64) -> u64 {
        let reserve = self.reserve.unwrap_or((1536 * MIB).min(available / 8));
        self.gpu_memory.unwrap_or_else(|| capacity::usable(available, reserve, overhead, largest))
    }
}

/// Something happened.
#[derive(Debug, Clone)]
pub enum Event {
    /// A process registered on its connection.
    Registered {
        /// The connection.
        client: ClientId,
        /// What the kernel says of the process.
        identity: Identity,
        /// What it said.
        register: Register,
    },
    /// A registered process sent a message.
    Message {
        /// Who.
        client: ClientId,
        /// What.
        message: ClientMessage,
    },
    /// A connection ended.
    Disconnected {
        /// Whose.
        client: ClientId,
        /// Whether its process is known to live on, or still to be giving its memory back.
        process_remains: bool,
    },
    /// The process of a client that had disconnected is gone, with everything it had.
    Exited {
        /// Whose process.
        client: ClientId,
    },
    /// A GPU was looked at.
    Measured(Measured),
    /// The time that [`Core::next_deadline`] named has come.
    Deadline,
}

/// What is known of a GPU that clients do not say. In bytes.
#[derive(Debug, Clone)]
pub struct Measured {
    /// The GPU.
    pub gpu: GpuUuid,
    /// Its memory, less what strangers have there.
    pub available: u64,
    /// What clients' processes have there, but for managed memory: their own allocations, contexts and modules. Who is
    /// missing has nothing, or is not to be seen.
    pub used: BTreeMap<ClientId, u64>,
}

/// Something is to be done.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// Send a message.
    Send {
        /// To whom.
        client: ClientId,
        /// What.
        message: SchedulerMessage,
    },
    /// Something that an administrator would want to read in the log.
    Note {
        /// Whether it asks for attention.
        warning: bool,
        /// One line.
        text: String,
    },
}

/// The scheduler's decisions. See the module's documentation.
#[derive(Debug)]
pub struct Core {
    config: Config,
    scheduling: bool,
    /// Nothing is granted before: see [`Config::settle`].
    settled_at: Time,
    clients: BTreeMap<ClientId, Client>,
    gpus: BTreeMap<GpuUuid, Gpu>,
    gone: VecDeque<nvshare_proto::ClientStatus>,
    last_epoch: u64,
    advanced_to: Time,
    deadline: Option<Time>,
    outputs: VecDeque<Output>,
}

impl Core {
    /// A scheduler without clients.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            scheduling: true,
            settled_at: Time::ZERO,
            clients: BTreeMap::new(),
            gpus: BTreeMap::new(),
            gone: VecDeque::new(),
            last_epoch: 0,
            advanced_to: Time::ZERO,
            deadline: None,
            outputs: VecDeque::new(),
        }
    }

    /// Takes in one event. `now` never goes back.
    pub fn handle(&mut self, event: Event, now: Time) {
        self.advance(now);
        match event {
            Event::Registered { client, identity, register } => {
                self.on_registered(client, identity, register, now);
            }
            Event::Message { client, message } => self.on_message(client, message, now),
            Event::Disconnected { client, process_remains } => {
                self.on_disconnected(client, process_remains, now);
            }
            Event::Exited { client } => {
                for gpu in self.gpus.values_mut() {
                    gpu.departed.remove(&client);
                }
            }
            Event::Measured(measured) => self.on_measured(&measured),
            Event::Deadline => {}
        }
        self.reconcile(now);
    }

    /// What is to be done next; call until there is nothing.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When [`Event::Deadline`] is due, if nothing else happens.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        self.deadline
    }

    /// Sets the quantum of one GPU, or of all and of those to come. Returns a line that says what was done.
    ///
    /// # Errors
    /// When no client has used that GPU yet.
    pub fn set_quantum(
        &mut self,
        gpu: Option<GpuUuid>,
        quantum: Duration,
        now: Time,
    ) -> Result<String, String> {
        self.advance(now);
        let text = match gpu {
            Some(uuid) => {
                let gpu = self.gpus.get_mut(&uuid).ok_or_else(|| unknown_gpu(uuid))?;
                gpu.quantum = quantum;
                format!("quantum of {uuid} is {} s", quantum.as_secs_f64())
            }
            None => {
                self.config.quantum = quantum;
                self.gpus.values_mut().for_each(|gpu| gpu.quantum = quantum);
                format!("quantum of every GPU is {} s", quantum.as_secs_f64())
            }
        };
        self.reconcile(now);
        Ok(text)
    }

    /// Switches scheduling on: everybody who runs is taken as a holder, and who does not fit is asked to leave.
    pub fn switch_on(&mut self, now: Time) -> String {
        self.advance(now);
        if self.scheduling {
            return "scheduling was on".to_owned();
        }
        self.scheduling = true;
        for id in self.clients.keys().copied().collect::<Vec<_>>() {
            let epoch = self.new_epoch();
            self.adopt(id, epoch);
            self.send(id, SchedulerMessage::SchedOn { epoch });
        }
        self.reconcile(now);
        "scheduling is on".to_owned()
    }

    /// Switches scheduling off: everybody runs.
    ///
    /// # Errors
    /// When not everything fits, unless `force`d: page faults would then move memory.
    pub fn switch_off(&mut self, force: bool, now: Time) -> Result<String, String> {
        self.advance(now);
        for (uuid, gpu) in &self.gpus {
            let demand =
                sum(self.clients.values().filter_map(|c| c.accounts.get(uuid)).map(|a| a.usage.allocated));
            if demand > gpu.capacity && !force {
                return Err(format!(
                    "{uuid}: clients have {} together and {} fit; page faults would move the rest (--force does it anyway)",
                    Bytes(demand),
                    Bytes(gpu.capacity)
                ));
            }
        }
        self.scheduling = false;
        self.deadline = None;
        for (id, client) in &mut self.clients {
            client.phase = Phase::Free;
            client.wants = false;
            self.outputs.push_back(Output::Send { client: *id, message: SchedulerMessage::SchedOff });
        }
        Ok("scheduling is off".to_owned())
    }

    /// Asks every client for its counters, unless it has still to answer.
    pub fn ask_counters(&mut self) -> Vec<ClientId> {
        let ids: Vec<ClientId> = self.clients.keys().copied().collect();
        for &id in &ids {
            if let Some(client) = self.clients.get_mut(&id)
                && !std::mem::replace(&mut client.asked_counters, true)
            {
                self.send(id, SchedulerMessage::AskCounters);
            }
        }
        ids
    }

    /// The GPUs that clients use.
    #[must_use]
    pub fn gpus_in_use(&self) -> BTreeSet<GpuUuid> {
        self.clients.values().flat_map(|client| client.accounts.keys().copied()).collect()
    }

    fn on_registered(&mut self, id: ClientId, identity: Identity, register: Register, now: Time) {
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
    fn adopt(&mut self, id: ClientId, epoch: Epoch) {
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
    fn meet_gpu(&mut self, id: ClientId, usage: Usage) {
        if self.gpus.len() >= MOST_GPUS {
            // A machine has no more: most of these are somebody's invention.
            let clients = &self.clients;
            self.gpus.retain(|uuid, _| clients.values().any(|client| client.accounts.contains_key(uuid)));
        }
        let capacity = self.config.usable(usage.total, 0, 0);
        let quantum = self.config.quantum;
        let gpu = self.gpus.entry(usage.gpu).or_insert_with(|| Gpu::new(capacity, quantum));
        let bytes = gpu.capacity;
        self.send(id, SchedulerMessage::Capacity(Room { gpu: usage.gpu, bytes }));
    }

    fn on_measured(&mut self, measured: &Measured) {
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
        self.on_capacity(gpu, self.config.usable(measured.available, overhead, largest));
    }

    fn on_capacity(&mut self, uuid: GpuUuid, bytes: u64) {
        let quantum = self.config.quantum;
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

    fn on_message(&mut self, id: ClientId, message: ClientMessage, now: Time) {
        let Some(phase) = self.clients.get(&id).map(|client| client.phase) else { return };
        match message {
            ClientMessage::Usage(usage) => self.on_usage(id, usage),
            ClientMessage::Counters(counters) => self.on_counters(id, counters),
            ClientMessage::ReqLock => self.on_req_lock(id, phase, now),
            ClientMessage::Running { epoch } => match phase {
                Phase::Granted { epoch: current, .. } if current == epoch => self.on_running(id, epoch, now),
                _ => {}
            },
            ClientMessage::LockReleased { epoch } => match phase {
                Phase::Running { epoch: current }
                | Phase::Granted { epoch: current, .. }
                | Phase::Dropping { epoch: current, .. }
                    if current == epoch =>
                {
                    self.park(id, now);
                }
                _ => {}
            },
            ClientMessage::DropDeferred { epoch } => match phase {
                Phase::Dropping { epoch: current, .. } if current == epoch => {
                    self.on_deferred(id, epoch, now)
                }
                _ => {}
            },
            ClientMessage::Idle { epoch } => match phase {
                Phase::Running { epoch: current } if current == epoch => {
                    self.with(id, |client| client.phase = Phase::Idle { epoch, since: now });
                }
                // It was asked to leave meanwhile: an idle client has nothing left to drain.
                Phase::Dropping { epoch: current, .. } if current == epoch => self.park(id, now),
                _ => {}
            },
            ClientMessage::NeedRoom(Room { gpu, bytes }) => {
                self.with_account(id, gpu, |account| account.needs = bytes);
            }
            ClientMessage::Room(Room { gpu, bytes }) => {
                self.with_account(id, gpu, |account| {
                    account.budget = account.budget.saturating_sub(bytes);
                    if let Some(order) = &mut account.order {
                        order.bytes = order.bytes.saturating_sub(bytes);
                        order.since = now;
                    }
                });
            }
            ClientMessage::Evicted { gpu, short } => {
                let mut is_news = false;
                self.with_account(id, gpu, |account| {
                    let ordered = account.order.take().is_some();
                    is_news = ordered && short > 0 && !std::mem::replace(&mut account.reported_short, true);
                    // If the host could not take all of this, it can take nothing more now. What is no longer
                    // there was not short.
                    account.stays_until = (short > 0 && account.budget > 0).then_some(now + RETRY);
                });
                if is_news {
                    self.warn(format!(
                        "client {id}: {} of {gpu} stay where they are: they cannot be moved, or its host has no memory for them",
                        Bytes(short)
                    ));
                }
            }
            ClientMessage::Ping => self.send(id, SchedulerMessage::Pong),
        }
    }

    fn on_usage(&mut self, id: ClientId, usage: Usage) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        if client.accounts.len() >= MOST_GPUS_EACH && !client.accounts.contains_key(&usage.gpu) {
            return;
        }
        let known = client.accounts.contains_key(&usage.gpu);
        let account = client.accounts.entry(usage.gpu).or_insert_with(|| Account::new(usage));
        let changed = account.usage.allocated != usage.allocated;
        if changed {
            account.stays_until = None;
            account.reported_short = false;
        }
        account.told(usage);
        if !known {
            self.meet_gpu(id, usage);
        }
    }

    fn on_counters(&mut self, id: ClientId, counters: nvshare_proto::Counters) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.asked_counters = false;
        let before = std::mem::replace(&mut client.counters, counters);
        let gpus: Vec<GpuUuid> = client.accounts.keys().copied().collect();
        for uuid in gpus {
            let Some(gpu) = self.gpus.get_mut(&uuid) else { continue };
            blend(
                &mut gpu.evict_rate,
                counters.evicted - before.evicted.min(counters.evicted),
                counters.evict_ns.saturating_sub(before.evict_ns),
            );
            blend(
                &mut gpu.restore_rate,
                counters.restored - before.restored.min(counters.restored),
                counters.restore_ns.saturating_sub(before.restore_ns),
            );
        }
    }

    fn on_req_lock(&mut self, id: ClientId, phase: Phase, now: Time) {
        match phase {
            Phase::Parked => {
                self.with(id, |client| {
                    if !client.wants {
                        client.waiting_since = now;
                    }
                    client.wants = true;
                });
                self.wake(id);
            }
            // It kept its place: nobody took it, so it goes on at once.
            Phase::Idle { .. } => self.with(id, |client| {
                client.wants = true;
                client.waiting_since = now;
                client.phase = Phase::Chosen;
            }),
            // It is next already, maybe without having asked (see `on_deferred`), and may yet have to wait.
            Phase::Chosen => self.with(id, |client| client.wants = true),
            // It closed its gate while a grant was on its way, or asks twice.
            Phase::Granted { .. } | Phase::Running { .. } | Phase::Dropping { .. } => {}
            Phase::Free => self.send(id, SchedulerMessage::SchedOff),
        }
    }

    fn on_running(&mut self, id: ClientId, epoch: Epoch, now: Time) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.phase = Phase::Running { epoch };
        client.reported_stuck = false;
        let from = client.switch_from.take();
        let claims = std::mem::take(&mut client.claims);
        for uuid in client.accounts.keys() {
            let Some(gpu) = self.gpus.get_mut(uuid) else { continue };
            if claims || gpu.turn_started.is_none() {
                gpu.turn_started = Some(now);
                gpu.turns += 1;
            }
            if let Some(from) = from {
                gpu.record_switch(now.saturating_sub(from));
            }
        }
    }

    /// The client's gate is closed and its work complete.
    fn park(&mut self, id: ClientId, now: Time) {
        // As long as another one drains, the hand-over may yet be given up.
        let draining: BTreeSet<GpuUuid> = self
            .clients
            .iter()
            .filter(|(other, c)| **other != id && matches!(c.phase, Phase::Dropping { .. }))
            .flat_map(|(_, c)| c.accounts.keys().copied())
            .collect();
        let Some(client) = self.clients.get_mut(&id) else { return };
        let asked = matches!(client.phase, Phase::Dropping { .. });
        client.phase = Phase::Parked;
        client.wants = false;
        client.claims = false;
        client.reported_stuck = false;
        for account in client.accounts.values_mut() {
            account.needs = 0;
            account.promised = None;
        }
        for uuid in client.accounts.keys() {
            if let Some(gpu) = self.gpus.get_mut(uuid) {
                if asked {
                    gpu.released.insert(id);
                }
                gpu.freed_at = Some(now);
                if !draining.contains(uuid) {
                    gpu.deferrals = 0;
                }
            }
        }
    }

    fn on_deferred(&mut self, id: ClientId, epoch: Epoch, now: Time) {
        self.with(id, |client| {
            client.phase = Phase::Running { epoch };
            client.reported_stuck = false;
        });
        let gpus: Vec<GpuUuid> =
            self.clients.get(&id).map(|c| c.accounts.keys().copied().collect()).unwrap_or_default();
        let mut released = BTreeSet::new();
        let mut draining = Vec::new();
        for uuid in gpus {
            let Some(gpu) = self.gpus.get_mut(&uuid) else { continue };
            let retry = patience(gpu.deferrals) * RETRY_FACTOR;
            gpu.deferrals += 1;
            gpu.not_before = now + retry;
            released.append(&mut gpu.released);
            for (&other, client) in &mut self.clients {
                if !client.accounts.contains_key(&uuid) {
                    continue;
                }
                match client.phase {
                    // Who was to come waits on.
                    Phase::Chosen => {
                        client.phase = Phase::Parked;
                        client.claims = false;
                    }
                    Phase::Dropping { .. } => draining.push(other),
                    _ => {}
                }
            }
        }
        // The drain may depend on work of another member that sleeps at its gate by now: all of them go on. Who has
        // given the lock back gets it again; who has not answered yet is told at once, whatever its answer will be.
        for other in released {
            self.with(other, |client| {
                if client.phase == Phase::Parked {
                    client.phase = Phase::Chosen;
                }
            });
        }
        for other in draining {
            self.send_grant(other, now + self.config.grace, Vec::new());
        }
        self.note(format!("client {id} could not drain and goes on; asked again later"));
    }

    fn on_disconnected(&mut self, id: ClientId, process_remains: bool, now: Time) {
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

    /// Charges the time since the last event to those who ran or waited.
    fn advance(&mut self, now: Time) {
        let passed = now.saturating_sub(self.advanced_to);
        self.advanced_to = self.advanced_to.max(now);
        if passed.is_zero() {
            return;
        }
        let mut running: BTreeMap<GpuUuid, u32> = BTreeMap::new();
        for client in self.clients.values().filter(|c| c.phase.runs()) {
            for uuid in client.accounts.keys() {
                *running.entry(*uuid).or_default() += 1;
            }
        }
        for client in self.clients.values_mut() {
            if client.phase.runs() {
                let beside = client.accounts.keys().filter_map(|uuid| running.get(uuid)).max();
                client.held += passed;
                client.virtual_time += passed / beside.copied().unwrap_or(1).max(1);
            } else if client.wants {
                client.waited += passed;
            }
        }
    }

    /// A client asks for the lock after a pause: see [`next::on_wake`].
    fn wake(&mut self, id: ClientId) {
        let Some(client) = self.clients.get(&id) else { return };
        let active = self.clients.iter().filter(|(other, c)| {
            **other != id
                && (c.phase.stays() || c.wants)
                && c.accounts.keys().any(|gpu| client.accounts.contains_key(gpu))
        });
        let virtual_time = next::on_wake(client.virtual_time, active.map(|(_, c)| c.virtual_time));
        self.with(id, |client| client.virtual_time = virtual_time);
    }

    fn new_epoch(&mut self) -> Epoch {
        self.last_epoch += 1;
        Epoch { boot: self.config.boot, counter: self.last_epoch }
    }

    fn with(&mut self, id: ClientId, change: impl FnOnce(&mut Client)) {
        if let Some(client) = self.clients.get_mut(&id) {
            change(client);
        }
    }

    fn with_account(&mut self, id: ClientId, gpu: GpuUuid, change: impl FnOnce(&mut Account)) {
        if let Some(account) = self.clients.get_mut(&id).and_then(|c| c.accounts.get_mut(&gpu)) {
            change(account);
        }
    }

    fn send(&mut self, client: ClientId, message: SchedulerMessage) {
        self.outputs.push_back(Output::Send { client, message });
    }

    fn note(&mut self, text: String) {
        self.outputs.push_back(Output::Note { warning: false, text });
    }

    fn warn(&mut self, text: String) {
        self.outputs.push_back(Output::Note { warning: true, text });
    }
}

/// A deferred drain is tried again after this many times the patience that it used up, so that at most a fifth
/// of a client's time is lost to drains that fail.
const RETRY_FACTOR: u32 = 4;

/// How long a drain may make no progress: 200 ms, doubled by each deferral in a row, so that a kernel of any
/// length is waited for in the end.
fn patience(deferrals: u32) -> Duration {
    Duration::from_millis(200) * 2u32.pow(deferrals.min(8))
}

/// After this long, a client that could not give memory back is asked again.
const RETRY: Duration = Duration::from_secs(10);

/// How long room that an allocation waited for is kept for it.
const PROMISE: Duration = Duration::from_millis(500);

/// GPUs that one client may use.
pub const MOST_GPUS_EACH: usize = 64;
/// GPUs that are remembered when nobody uses them.
const MOST_GPUS: usize = 256;

/// A measured rate moves the known one half of the way. What clients say of it is believed within reason.
fn blend(rate: &mut f64, bytes: u64, nanos: u64) {
    if bytes >= 64 * MIB && nanos > 0 {
        let measured = (bytes as f64 / nanos as f64 * 1e9).clamp(RATES.0, RATES.1);
        *rate = (*rate + measured) / 2.0;
    }
}

/// The slowest and the fastest that memory is moved, in bytes per second: a disk that swaps, and more than any link.
const RATES: (f64, f64) = (1e8, 1e13);

/// What clients say is not to be trusted to add up.
fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

fn unknown_gpu(uuid: GpuUuid) -> String {
    format!("unknown GPU {uuid}: no client has used it")
}
