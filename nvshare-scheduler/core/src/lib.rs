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

mod account;
mod admin;
mod arrivals;
mod client;
mod configure;
mod cost;
mod enforce;
mod gangs;
mod gpu;
mod happened;
mod ledger;
mod messages;
mod overdue;
pub mod policy;
mod reconcile;
mod room;
mod shares;
mod status;
mod terms;
mod turns;
mod views;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use nvshare_proto::{ClientMessage, Epoch, GpuUuid, Register, SchedulerMessage};

use client::{Client, Job};
pub use client::{ClientId, Gang, Identity};
pub use configure::{GpuConfig, Rule};
pub use cost::{SwitchCost, Timed};
use gangs::Members;
use gpu::Gpu;
pub use happened::Happened;
pub use policy::quantum::Auto;
use terms::JobTerms;

/// Time since the scheduler started. The core never looks at a clock.
pub type Time = Duration;

/// What an administrator chose at the start.
#[derive(Debug, Clone)]
pub struct Config {
    /// Names this run of the scheduler in its grants.
    pub boot: u64,
    /// How long a client keeps the lock while somebody waits.
    pub quantum: Duration,
    /// That follows from what hand-overs cost instead.
    pub auto: Option<Auto>,
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
    /// Clients of an earlier scheduler are known to be about, though none has come back yet.
    pub restarted: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            boot: 1,
            quantum: Duration::from_secs(30),
            auto: None,
            gpu_memory: None,
            reserve: None,
            gpus: BTreeMap::new(),
            exclusive: false,
            grace: Duration::from_secs(10),
            settle: Duration::ZERO,
            restarted: false,
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
    gangs: BTreeMap<u64, Members>,
    /// Whose time is counted together.
    jobs: BTreeMap<Job, BTreeSet<ClientId>>,
    /// What administrators gave them.
    given: BTreeMap<Job, JobTerms>,
    gone: VecDeque<nvshare_proto::ClientStatus>,
    last_epoch: u64,
    /// The time of the event that is handled, or was last.
    now: Time,
    /// GPUs of which something has changed since they were looked at.
    dirty: BTreeSet<GpuUuid>,
    /// What the last event took: clients and GPUs looked at, each time.
    steps: u64,
    /// When each GPU is to be looked at though nothing happens.
    deadlines: BTreeSet<(Time, GpuUuid)>,
    outputs: VecDeque<Output>,
    /// What happened since the last event, for those who watch.
    happened: VecDeque<Happened>,
}

impl Core {
    /// A scheduler without clients.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            settled_at: if config.restarted { config.settle } else { Time::ZERO },
            config,
            scheduling: true,
            clients: BTreeMap::new(),
            gpus: BTreeMap::new(),
            gangs: BTreeMap::new(),
            jobs: BTreeMap::new(),
            given: BTreeMap::new(),
            gone: VecDeque::new(),
            last_epoch: 0,
            now: Time::ZERO,
            dirty: BTreeSet::new(),
            steps: 0,
            deadlines: BTreeSet::new(),
            outputs: VecDeque::new(),
            happened: VecDeque::new(),
        }
    }

    /// Takes in one event. `now` never goes back.
    pub fn handle(&mut self, event: Event, now: Time) {
        self.now = self.now.max(now);
        self.happened.clear();
        self.steps = 0;
        match event {
            Event::Registered { client, identity, register } => {
                self.on_registered(client, identity, register);
            }
            Event::Message { client, message } => self.on_message(client, message),
            Event::Disconnected { client, process_remains } => {
                self.on_disconnected(client, process_remains);
            }
            Event::Exited { client } => self.on_exited(client),
            Event::Measured(measured) => self.on_measured(&measured),
            Event::Deadline => {}
        }
        self.reconcile();
    }

    /// What is to be done next; call until there is nothing.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When [`Event::Deadline`] is due, if nothing else happens.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        self.deadlines.first().map(|(time, _)| *time).filter(|_| self.scheduling)
    }

    /// What the last event took, in clients and GPUs looked at; for tests, which cannot rely on a clock.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    fn new_epoch(&mut self) -> Epoch {
        self.last_epoch += 1;
        Epoch { boot: self.config.boot, counter: self.last_epoch }
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

/// Who deferred so many drains in a row counts as one that does not leave until the next one is tried.
const STUBBORN: u32 = 3;

/// How long a drain may make no progress: 200 ms, doubled by each deferral in a row, so that a kernel of any
/// length is waited for in the end.
fn patience(deferrals: u32) -> Duration {
    Duration::from_millis(200) * 2u32.pow(deferrals.min(8))
}

/// After this long, a client that could not give memory back is asked again.
const RETRY: Duration = Duration::from_secs(10);

/// How long room that an allocation waited for is kept for it.
const PROMISE: Duration = Duration::from_millis(500);

/// Most time that a restore is given beyond the grace, whatever its client says that is absent.
const LONGEST_RESTORE: Duration = Duration::from_secs(120);

/// GPUs that one client may use.
pub const MOST_GPUS_EACH: usize = 64;
/// GPUs that are remembered when nobody uses them.
const MOST_GPUS: usize = 256;
