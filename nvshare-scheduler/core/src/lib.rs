//! Decides who holds each GPU's lock and whose memory is on the card.
//!
//! The core is a pure state machine: events and the time come in, outputs go out, and it touches nothing else. It applies
//! each event to the state and then looks at the state as a whole (`reconcile`): one place grants, one asks for the lock
//! back, one makes room. A lost or late event can therefore delay a decision and not derail it.
//!
//! Invariants, each with a property test in `tests/core/properties.rs`:
//! - clients that hold a GPU at the same time fit it together;
//! - the memory that clients may have resident on a GPU never exceeds its capacity, once they registered in time;
//! - every client that requests the lock eventually gets it;
//! - a client that is gone holds nothing.

#![forbid(unsafe_code)]

mod account;
mod admin;
mod arrivals;
mod client;
mod configure;
mod contention;
mod cost;
mod enforce;
mod gangs;
mod gpu;
mod happened;
mod ledger;
mod measure;
mod messages;
mod outgrown;
mod overdue;
pub mod policy;
mod reconcile;
mod room;
mod rule;
mod share;
mod shares;
mod short;
mod status;
mod stopped;
mod terms;
mod trial;
mod turns;
mod views;
mod virtual_time;
mod warnings;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use nvshare_proto::{ClientMessage, Epoch, GpuUuid, Register, SchedulerMessage};

use client::{Client, Job};
pub use client::{ClientId, Gang, Identity};
pub use configure::GpuConfig;
pub use contention::Contended;
pub use cost::{SwitchCost, Timed};
use gangs::Members;
use gpu::Gpu;
pub use happened::Happened;
pub use policy::exchange::Exchange;
pub use policy::quantum::Auto;
pub use rule::Rule;
use terms::{JobTerms, OfJob};
use turns::case::Cases;
use warnings::Warnings;

/// Time since the scheduler started. The core never looks at a clock.
pub type Time = Duration;

/// Whether jobs that fit a GPU together run side by side.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Together {
    /// As long as they get no more done by turns: see [`policy::progress`].
    Measure,
    /// Always.
    #[default]
    Always,
}

/// The administrator's choices at the start.
#[derive(Debug, Clone)]
pub struct Config {
    /// Names this run of the scheduler in its grants.
    pub boot: u64,
    /// How long a client keeps the lock while another client waits.
    pub quantum: Duration,
    /// If set, the quantum follows from the cost of hand-overs instead.
    pub auto: Option<Auto>,
    /// Bytes of each GPU that clients may fill together, at most what the GPU has; none: what the GPU has, less the
    /// reserve.
    pub gpu_memory: Option<u64>,
    /// Bytes of each GPU that are left to contexts, modules and the driver; none: 1536 MiB, and of a small GPU an
    /// eighth at most.
    pub reserve: Option<u64>,
    /// Settings that differ on single GPUs.
    pub gpus: BTreeMap<GpuUuid, GpuConfig>,
    /// One client at a time, even where memory fits.
    pub exclusive: bool,
    /// Jobs that fit a GPU together.
    pub together: Together,
    /// Whose memory comes to the card while that of others leaves.
    pub exchange: Exchange,
    /// After this long without an answer, a client is reported as stuck.
    pub grace: Duration,
    /// When clients come back from an earlier scheduler, nobody is granted anything for this long after the start: the
    /// scheduler must know all clients that run before it gives their memory away.
    pub settle: Duration,
    /// Clients of an earlier scheduler are known to exist, though none has come back yet.
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
            together: Together::default(),
            exchange: Exchange::default(),
            grace: Duration::from_secs(10),
            settle: Duration::ZERO,
            restarted: false,
        }
    }
}

/// An event that the core is told of.
#[derive(Debug, Clone)]
pub enum Event {
    /// A process registered on its connection.
    Registered {
        /// The connection.
        client: ClientId,
        /// The process, as the kernel describes it.
        identity: Identity,
        /// The client's REGISTER message.
        register: Register,
    },
    /// A registered process sent a message.
    Message {
        /// The client that sent it.
        client: ClientId,
        /// The message.
        message: ClientMessage,
    },
    /// A connection ended.
    Disconnected {
        /// The client of that connection.
        client: ClientId,
        /// Whether its process is known to live on, or to be still freeing its memory.
        process_remains: bool,
    },
    /// A process of clients that had disconnected has ended, or runs another program: all that it had is free.
    Exited {
        /// The last client of that process.
        client: ClientId,
        /// The process: what its earlier clients had left is free as well.
        identity: Identity,
    },
    /// The process of a client was stopped by a signal, or goes on.
    Stopped {
        /// The client.
        client: ClientId,
        /// Whether the process is stopped.
        stopped: bool,
    },
    /// A GPU was measured.
    Measured(Measured),
    /// The time that [`Core::next_deadline`] named has come.
    Deadline,
}

/// Facts about a GPU from other sources than its clients, in bytes.
#[derive(Debug, Clone)]
pub struct Measured {
    /// The GPU.
    pub gpu: GpuUuid,
    /// Its memory, less what processes without the library have there.
    pub available: u64,
    /// Bytes that clients' processes have there, without managed memory: their own allocations, contexts and modules. A
    /// client that is missing here has nothing, or cannot be seen.
    pub used: BTreeMap<ClientId, u64>,
}

/// A task for the caller of the core.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// Send a message.
    Send {
        /// The client that it goes to.
        client: ClientId,
        /// The message.
        message: SchedulerMessage,
    },
    /// A line for the administrator's log.
    Note {
        /// Whether the line asks for attention.
        warning: bool,
        /// The text of the line.
        text: String,
    },
}

/// The scheduler's decisions. See the module's documentation.
#[derive(Debug)]
pub struct Core {
    config: Config,
    scheduling: bool,
    /// Nothing is granted before this time: see [`Config::settle`].
    settled_at: Time,
    clients: BTreeMap<ClientId, Client>,
    gpus: BTreeMap<GpuUuid, Gpu>,
    gangs: BTreeMap<u64, Members>,
    /// The clients of each job: their time is counted together.
    jobs: BTreeMap<Job, OfJob>,
    /// Terms that administrators gave to jobs.
    given: BTreeMap<Job, JobTerms>,
    gone: VecDeque<nvshare_proto::ClientStatus>,
    last_epoch: u64,
    /// The time of the current event, or of the last one.
    now: Time,
    /// GPUs of which something has changed since the core last looked at them.
    dirty: BTreeSet<GpuUuid>,
    /// Gangs of which a member has changed since the core last looked at their GPUs.
    dirty_gangs: BTreeSet<u64>,
    /// Waiters for which something that was in the way has changed since the core last looked at their GPUs.
    woken: BTreeSet<ClientId>,
    /// Clients for which the answer whether a client waits for what they hold may have changed.
    untold: BTreeSet<ClientId>,
    /// How clients of several GPUs stand, in this round of looks.
    cases: Cases,
    /// Clients that wait and whose place moves by itself, and in which event it was brought up to date; and the one whose turn that
    /// was last.
    moving: BTreeMap<ClientId, u64>,
    refreshed: ClientId,
    /// Counts the events.
    events: u64,
    /// Work that the last event took: clients and GPUs that were looked at, and entries written, counted each time.
    steps: u64,
    /// When the core looks at each GPU again if no event comes before.
    deadlines: BTreeSet<(Time, GpuUuid)>,
    outputs: VecDeque<Output>,
    warnings: Warnings,
    /// Events for those who watch the scheduler, since the last call of [`Core::handle`].
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
            dirty_gangs: BTreeSet::new(),
            woken: BTreeSet::new(),
            untold: BTreeSet::new(),
            cases: Cases::default(),
            moving: BTreeMap::new(),
            refreshed: 0,
            events: 0,
            steps: 0,
            deadlines: BTreeSet::new(),
            outputs: VecDeque::new(),
            warnings: Warnings::default(),
            happened: VecDeque::new(),
        }
    }

    /// An event begins, or the request of an administrator.
    fn begin_event(&mut self, now: Time) {
        self.now = self.now.max(now);
        self.events += 1;
    }

    /// Takes in one event. `now` never goes back.
    pub fn handle(&mut self, event: Event, now: Time) {
        self.begin_event(now);
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
            Event::Exited { client, identity } => self.on_exited(client, identity),
            Event::Stopped { client, stopped } => self.on_stopped(client, stopped),
            Event::Measured(measured) => self.on_measured(&measured),
            Event::Deadline => {}
        }
        self.reconcile();
    }

    /// The next output; call until there is none.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When [`Event::Deadline`] is due if no other event comes before.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        self.deadlines.first().map(|(time, _)| *time).filter(|_| self.scheduling)
    }

    /// Work that the last event took: clients and GPUs looked at, and entries of ledgers written. For tests, which cannot rely on a clock.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The virtual time of a client's job, or of its gang, in nanoseconds: its place in the order of turns on a GPU. For tests,
    /// which derive from it how long a wait may be.
    #[must_use]
    pub fn virtual_time(&self, gpu: GpuUuid, client: ClientId) -> Option<i64> {
        self.key(gpu, client).map(|key| key.0)
    }

    /// The virtual time of a client's job on a GPU, in nanoseconds, and the weight by which its time is shared at present, where
    /// 6400 is usual. For tests, which count the time that jobs get and compare.
    #[must_use]
    pub fn share_of_time(&self, gpu: GpuUuid, client: ClientId) -> Option<(i64, u64)> {
        let shares = &self.gpus.get(&gpu)?.shares;
        let job = self.clients.get(&client)?.job;
        Some((shares.time(job), shares.weight(job)))
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

/// A deferred drain is tried again after this many times the patience that it used up, and a little more, so that a client
/// loses at most a fifth of its time to drains that fail.
const RETRY_FACTOR: u32 = 4;

/// A client that deferred so many drains in a row counts as one that does not leave, until the next drain is tried.
const STUBBORN: u32 = 3;

/// How long a drain may make no progress: 200 ms, doubled by each deferral in a row, so that a kernel of any length gets
/// time to complete.
fn patience(deferrals: u32) -> Duration {
    Duration::from_millis(200) * 2u32.pow(deferrals.min(8))
}

/// How long after a drain was deferred it is tried again. Up to one patience more than the factor says follows from the digits
/// of the time: a program whose drains fail at one beat of its rhythm must not be asked at the same beat each time, as it is
/// when its period goes into each of the waits.
fn retry_after(deferrals: u32, now: Time) -> Duration {
    /// 2⁶⁴ divided by the golden ratio: every digit of a factor changes the upper digits of the product.
    const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
    let part = (now.as_micros() as u64).wrapping_mul(SPREAD) >> 56;
    patience(deferrals) * (RETRY_FACTOR * 256 + part as u32) / 256
}

/// After this long, a client that did not answer an EVICT is asked again, and one that could not give memory back time and again.
const RETRY: Duration = Duration::from_secs(10);

/// How long after so many evictions in a row that left memory where it was the next one is tried. The first reason may be over soon:
/// memory whose context is being ended, a piece that the program is just using.
fn evict_again_after(shorts: u32) -> Duration {
    (Duration::from_millis(125) * 2u32.pow(shorts.min(8))).min(RETRY)
}

/// How long room is kept for the allocation that waited for it.
const PROMISE: Duration = Duration::from_millis(500);

/// The longest time, beyond the grace, that a restore may take, whatever its client says is absent.
const LONGEST_RESTORE: Duration = Duration::from_secs(120);

/// GPUs that one client may use.
pub const MOST_GPUS_EACH: usize = 64;
/// GPUs that the core remembers when no client uses them.
const MOST_GPUS: usize = 256;
