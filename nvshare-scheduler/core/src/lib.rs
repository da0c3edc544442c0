//! Decides who holds each GPU's lock and whose memory is on the card.
//!
//! A pure state machine: events and the time come in, outputs go out, nothing else is touched. Each event is
//! applied to the state and then the state is looked at as a whole (`reconcile`): there is one place
//! that grants, one that asks for the lock back, one that makes room. A lost or late event can therefore delay
//! a decision and not derail it.
//!
//! Invariants, each with a property test in `tests/core/properties.rs`:
//! - clients that hold a GPU at the same time fit it together;
//! - what clients may have resident on a GPU never exceeds its capacity, once they registered in time;
//! - who wants the lock gets it;
//! - a client that is gone holds nothing.

#![forbid(unsafe_code)]

mod admin;
mod arrivals;
mod configure;
mod messages;
pub mod policy;
mod reconcile;
mod room;
mod state;
mod status;
mod turns;
mod views;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use nvshare_proto::units::MIB;
use nvshare_proto::{ClientMessage, Epoch, GpuUuid, Register, SchedulerMessage};

pub use configure::GpuConfig;
use policy::next;
use state::{Account, Client, Gpu};
pub use state::{ClientId, Identity, Time};

/// What an administrator chose at the start.
#[derive(Debug, Clone)]
pub struct Config {
    /// Names this run of the scheduler in its grants.
    pub boot: u64,
    /// How long a client keeps the lock while somebody waits.
    pub quantum: Duration,
    /// What clients may fill on each GPU together, in bytes, as far as the GPU has it; none: what the GPU has, less the
    /// reserve.
    pub gpu_memory: Option<u64>,
    /// Bytes of each GPU that are left to contexts, modules and the driver; none: 1536 MiB, and of a small GPU an
    /// eighth at most.
    pub reserve: Option<u64>,
    /// What differs on single GPUs.
    pub gpus: BTreeMap<GpuUuid, GpuConfig>,
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
            gpus: BTreeMap::new(),
            exclusive: false,
            grace: Duration::from_secs(10),
            settle: Duration::ZERO,
        }
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
