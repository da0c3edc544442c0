//! The core: events come in, and outputs go out.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use nvshare_proto::{Epoch, GpuUuid, SchedulerMessage};

use crate::Time;
use crate::inputs::Event;
use crate::report::Output;
use crate::report::happened::Happened;
use crate::report::warnings::Warnings;
use crate::state::client::{Client, ClientId, Job};
use crate::state::config::Config;
use crate::state::gpu::Gpu;
use crate::steps::gangs::Members;
use crate::steps::terms::{JobTerms, OfJob};
use crate::steps::turns::case::Cases;

/// The scheduler's decisions. See the module's documentation.
#[derive(Debug)]
pub struct Core {
    pub(crate) config: Config,
    pub(crate) scheduling: bool,
    /// Nothing is granted before this time: see [`Config::settle`].
    pub(crate) settled_at: Time,
    pub(crate) clients: BTreeMap<ClientId, Client>,
    pub(crate) gpus: BTreeMap<GpuUuid, Gpu>,
    pub(crate) gangs: BTreeMap<u64, Members>,
    /// The clients of each job: their time is counted together.
    pub(crate) jobs: BTreeMap<Job, OfJob>,
    /// Terms that administrators gave to jobs.
    pub(crate) given: BTreeMap<Job, JobTerms>,
    pub(crate) gone: VecDeque<nvshare_proto::ClientStatus>,
    pub(crate) last_epoch: u64,
    /// The time of the current event, or of the last one.
    pub(crate) now: Time,
    /// GPUs of which something has changed since the core last looked at them.
    pub(crate) dirty: BTreeSet<GpuUuid>,
    /// Gangs of which a member has changed since the core last looked at their GPUs.
    pub(crate) dirty_gangs: BTreeSet<u64>,
    /// Waiters for which something that was in the way has changed since the core last looked at their GPUs.
    pub(crate) woken: BTreeSet<ClientId>,
    /// Clients for which the answer whether a client waits for what they hold may have changed.
    pub(crate) untold: BTreeSet<ClientId>,
    /// How clients of several GPUs stand, in this round of looks.
    pub(crate) cases: Cases,
    /// Clients that wait and whose place moves by itself, and in which event it was brought up to date; and the one whose turn that
    /// was last.
    pub(crate) moving: BTreeMap<ClientId, u64>,
    pub(crate) refreshed: ClientId,
    /// Counts the events.
    pub(crate) events: u64,
    /// Work that the last event took: clients and GPUs that were looked at, and entries written, counted each time.
    pub(crate) steps: u64,
    /// When the core looks at each GPU again if no event comes before.
    pub(crate) deadlines: BTreeSet<(Time, GpuUuid)>,
    pub(crate) outputs: VecDeque<Output>,
    pub(crate) warnings: Warnings,
    /// Events for those who watch the scheduler, since the last call of [`Core::handle`].
    pub(crate) happened: VecDeque<Happened>,
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
    pub(crate) fn begin_event(&mut self, now: Time) {
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

    pub(crate) fn new_epoch(&mut self) -> Epoch {
        self.last_epoch += 1;
        Epoch { boot: self.config.boot, counter: self.last_epoch }
    }

    pub(crate) fn send(&mut self, client: ClientId, message: SchedulerMessage) {
        self.outputs.push_back(Output::Send { client, message });
    }

    pub(crate) fn note(&mut self, text: String) {
        self.outputs.push_back(Output::Note { warning: false, text });
    }

    pub(crate) fn warn(&mut self, text: String) {
        self.outputs.push_back(Output::Note { warning: true, text });
    }
}
