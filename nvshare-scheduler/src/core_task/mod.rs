//! The task that owns the core, and is the only one that touches it: commands become events, and outputs become frames.

mod administrators;
mod commands;
mod status;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nvshare_core::{ClientId, Config, Core, Event, Measured, Output, Time};
use nvshare_proto::{ClientMessage, GpuUuid, MemoryMode, SchedulerMessage, SeatName, TenantSettings};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, spawn_blocking, yield_now};
use tokio::time::{Instant, sleep_until};
use tracing::{debug, info, warn};

pub(crate) use commands::{Command, Newcomer};

use crate::events::Recorder;
use crate::gpus::{self, NvmlReading, NvmlThread};
use crate::host_memory::HostMemory;
use crate::identity::{Described, Tenant, processes};
use crate::metrics::Question;
use crate::seats::{self, Seats};
use crate::settings::Store;
use crate::setup::Setup;
use status::Waiting;

/// How often NVML is asked about the GPUs at most: as long as the contexts of a new client do not count yet.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Each fifth time, NVML looks for memory on the GPUs that belongs to no client, whoever is new.
const LOOKS: u32 = 5;

/// The reason why the core's task wakes.
enum Woken {
    By(Box<Command>),
    ByDeadline,
    ForStatus,
    ToLookAround,
}

/// Owns the core.
pub(crate) struct CoreTask {
    core: Core,
    /// Where looks that take a while say what they found.
    commands: mpsc::Sender<Command>,
    nvml: NvmlThread,
    /// Memory on each GPU that belongs to no process, as NVML last saw it.
    unowned: BTreeMap<GpuUuid, u64>,
    /// The configuration as it was read; settings made at run time come before it.
    config: Config,
    store: Store,
    /// The machine's GPUs.
    listing: gpus::Listing,
    started: Instant,
    /// Where messages to each client go.
    outgoing: BTreeMap<ClientId, mpsc::Sender<SchedulerMessage>>,
    /// Whether there are messages that the connections' tasks have not been given the time to write.
    has_sent: bool,
    /// The kernel's numbers of clients' processes.
    pids: BTreeMap<ClientId, u32>,
    /// The last look for processes that are stopped.
    look_at_stopped: Option<JoinHandle<()>>,
    /// The kernel's descriptions of clients' processes when they registered.
    processes: BTreeMap<ClientId, Described>,
    seats: Seats,
    /// The seats of clients that came to the socket of one; none: the container has the seat no more.
    seated: BTreeMap<ClientId, Option<SeatName>>,
    /// How clients get device memory.
    memory_modes: BTreeMap<ClientId, MemoryMode>,
    /// The GPUs that clients used when NVML was last asked.
    gpus_in_use: BTreeSet<GpuUuid>,
    /// Requests for the status that are not answered yet.
    waiting: Vec<Waiting>,
    /// When clients were last asked for their counters.
    asked_counters: Option<Instant>,
    recorder: Recorder,
    /// Memory of the host, which is handed out beside the core.
    host: Option<HostMemory>,
}

impl CoreTask {
    pub(crate) fn new(
        setup: Setup,
        nvml: NvmlThread,
        recorder: Recorder,
        host: Option<HostMemory>,
        commands: mpsc::Sender<Command>,
    ) -> Self {
        let mut core = Core::new(setup.store.over(&setup.config));
        if !setup.store.scheduling() {
            // No client is there yet to be harmed.
            let _ = core.switch_off(true, Time::ZERO);
            warn!("scheduling is off, as an administrator left it");
        }
        Self {
            core,
            commands,
            nvml,
            unowned: BTreeMap::new(),
            config: setup.config,
            store: setup.store,
            listing: gpus::Listing::new(setup.descriptions),
            started: Instant::now(),
            processes: BTreeMap::new(),
            seats: setup.seats.seats,
            seated: BTreeMap::new(),
            memory_modes: BTreeMap::new(),
            outgoing: BTreeMap::new(),
            has_sent: false,
            pids: BTreeMap::new(),
            look_at_stopped: None,
            gpus_in_use: BTreeSet::new(),
            waiting: Vec::new(),
            asked_counters: None,
            recorder,
            host,
        }
    }

    fn now(&self) -> Time {
        self.started.elapsed()
    }

    pub(crate) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        self.listing.look_first().await;
        self.know_gpus();
        // Clients of the run before are waited for from now on, as nobody was heard meanwhile.
        self.started = Instant::now();
        let mut looks: u32 = 0;
        let mut look_around = tokio::time::interval(LOOK_EVERY);
        look_around.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            // A deadline too far away for the clock is treated as none.
            let deadline = self.core.next_deadline().and_then(|time| self.started.checked_add(time));
            let counters = self.waiting.iter().map(|waiting| waiting.until).min();
            let woken = tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => Woken::By(Box::new(command)),
                    None => return,
                },
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => Woken::ByDeadline,
                () = sleep_until(counters.unwrap_or_else(Instant::now)), if counters.is_some() => Woken::ForStatus,
                _ = look_around.tick() => Woken::ToLookAround,
            };
            let begin = Instant::now();
            match woken {
                Woken::By(command) => self.obey(*command),
                Woken::ByDeadline => {
                    let now = self.now();
                    self.happens(Event::Deadline, now);
                }
                Woken::ForStatus => {}
                Woken::ToLookAround => {
                    self.look_for_stopped();
                    self.look_for_stuck_question();
                    looks = (looks + 1) % LOOKS;
                    if looks == 0 {
                        self.forget_the_gone();
                    }
                    if looks == 0 || self.core.is_measuring() {
                        self.look_around();
                    }
                }
            }
            self.deliver();
            self.answer_status();
            self.recorder.passed(begin.elapsed());
            // A client that is granted the lock does not wait for what others say meanwhile.
            if std::mem::take(&mut self.has_sent) {
                yield_now().await;
            }
        }
    }

    fn obey(&mut self, command: Command) {
        let now = self.now();
        match command {
            Command::Register(newcomer) => self.register(*newcomer, now),
            Command::Message { client, message } => {
                if !self.outgoing.contains_key(&client) {
                    return;
                }
                match &message {
                    ClientMessage::Counters(counters) => {
                        self.recorder.said(client, counters);
                        for waiting in &mut self.waiting {
                            waiting.clients.remove(&client);
                        }
                    }
                    ClientMessage::Phases(phases) => self.recorder.note_phases(client, phases),
                    _ => {}
                }
                let usage = matches!(message, ClientMessage::Usage(_));
                self.happens(Event::Message { client, message }, now);
                if usage {
                    self.look_at_new_gpus();
                }
            }
            Command::Stopped(looked_at) => {
                for (client, stopped) in looked_at {
                    if self.core.is_stopped(client) != stopped {
                        self.happens(Event::Stopped { client, stopped }, now);
                    }
                }
            }
            Command::Looked { gpu, seen } => {
                let Some(asked_at) = self.nvml.answered(gpu, now) else { return };
                match seen {
                    Some(seen) => {
                        self.recorder.know(gpu, now);
                        self.unowned.insert(gpu, seen.unowned);
                        let measured = self.attribute(gpu, asked_at, seen);
                        self.happens(Event::Measured(measured), now);
                    }
                    None => self.happens(Event::Unmeasured { gpu }, now),
                }
            }
            Command::Described { client, command } => {
                if !self.seated.contains_key(&client) {
                    self.recorder.describe(client, &command);
                }
                if let Some(process) = self.processes.get_mut(&client) {
                    process.info.command = command;
                }
            }
            Command::Disconnected { client, process_remains } => {
                self.outgoing.remove(&client);
                if !process_remains {
                    self.pids.remove(&client);
                }
                self.happens(Event::Disconnected { client, process_remains }, now);
            }
            Command::Exited { client, identity } => {
                // The number may be another process's by now, which registered later.
                self.pids.retain(|&known, pid| known > client || Some(*pid) != identity.pid);
                self.happens(Event::Exited { client, identity }, now);
            }
            Command::Admin { request, answer } => self.administer(request, answer, now),
            Command::Look { viewer, answer } => self.wait_for_counters(Some(viewer), answer),
            Command::Ask(question) => self.answer(question),
            Command::SeatsChanged(names) => names.into_iter().for_each(|name| self.seat_changed(name, now)),
            Command::Configure(config) => {
                self.config = config;
                self.core.configure(self.store.over(&self.config), now);
                self.look_around();
            }
        }
    }

    /// Tells the core of an event. With that it forgets the incidents that nobody took, so they are recorded before: requests have some
    /// too, and one command may be several events.
    fn happens(&mut self, event: Event, now: Time) {
        self.deliver();
        self.core.handle(event, now);
    }

    fn register(&mut self, newcomer: Newcomer, now: Time) {
        let Newcomer { client, identity, process, seat, job, mut register, outgoing } = newcomer;
        self.outgoing.insert(client, outgoing);
        let pid = identity.pid.unwrap_or(register.pid);
        let info = process.as_ref().map(|process| &process.info);
        // A program chooses its own name, and a seat's pod is what its events are about.
        let name = seat.map_or_else(|| register.name.clone(), |seat| self.seats.owner(seat));
        self.recorder.expect(client, pid, &name, info, seat);
        self.processes.extend(process.map(|process| (client, process)));
        // Only the kernel's number counts, not the client's own: with that, it could name another process's
        // memory as its own. Of the clients that a living process has been, the last one is enough.
        self.pids.retain(|known, pid| Some(*pid) != identity.pid || self.outgoing.contains_key(known));
        self.pids.extend(identity.pid.map(|pid| (client, pid)));
        self.memory_modes.insert(client, register.memory);
        if let Some(name) = seat {
            self.pass_on(name, now);
            self.seats.came(name);
            self.seated.insert(client, Some(name));
            seats::keep_own_wishes(&mut register.asked, &self.seats.given(name));
            self.bound(name, now);
        }
        if let Some(job) = job {
            self.bound_job(job, now);
        }
        let before = seat.and_then(|name| self.seats.given_before(name));
        if let Some(before) = &before {
            seats::keep_own_wishes(&mut register.asked, before);
        }
        self.happens(Event::Registered { client, identity, register }, now);
        if let Some(before) = before {
            self.core.replace_limits(client, before.memory.unwrap_or(0), now);
        }
        self.look_at_new_gpus();
    }

    /// A seat may have other limits, or another holder. Its first client learns that when it registers.
    fn seat_changed(&mut self, name: SeatName, now: Time) {
        self.pass_on(name, now);
        let of_seat = self.seated.iter().filter(|&(_, &seat)| seat == Some(name));
        let clients: Vec<ClientId> = of_seat.map(|(&client, _)| client).collect();
        if clients.is_empty() {
            return;
        }
        self.bound(name, now);
        if let Some(occupant) = self.seats.occupant(name) {
            // A client that has disconnected may be one of the last pod's.
            let connected = clients.into_iter().filter(|client| self.outgoing.contains_key(client));
            connected.for_each(|client| self.recorder.rename(client, &occupant.to_string()));
        }
    }

    /// A container that has lost its seat takes its clients with it, and what administrators gave to the seat's tenant.
    fn pass_on(&mut self, name: SeatName, now: Time) {
        if self.seats.take_passed_on(name) {
            self.core.forget_tenant_terms(Tenant::Seat(name).number(), now);
            for (client, seat) in &mut self.seated {
                // A client that is connected may be one of the next container, which is not named yet.
                if *seat == Some(name) && !self.outgoing.contains_key(client) {
                    *seat = None;
                }
            }
        }
    }

    /// The limits of a seat are in force for its tenant from now on.
    fn bound(&mut self, name: SeatName, now: Time) {
        self.core.set_tenant_bounds(Tenant::Seat(name).number(), self.seats.given(name), now);
    }

    /// The settings of one of Slurm's jobs are in force for its tenant from now on.
    fn bound_job(&mut self, job: u32, now: Time) {
        self.core.set_tenant_bounds(Tenant::Job(job).number(), self.store.job(job), now);
    }

    /// An epilog takes all settings of a job back, when its processes have ended. Words of administrators about its clients go with
    /// them: a job that is queued again has the same number.
    fn forget_ended_job(&mut self, job: u32, now: Time) {
        let tenant = Tenant::Job(job).number();
        if self.store.job(job) == TenantSettings::default() && !self.core.has_clients(tenant) {
            self.core.forget_tenant_terms(tenant, now);
        }
    }

    /// Forgets what is known about clients that are not shown any more.
    fn forget_the_gone(&mut self) {
        let shown = self.core.listed();
        self.processes.retain(|id, _| shown.contains(id));
        self.seated.retain(|id, _| shown.contains(id));
        self.memory_modes.retain(|id, _| shown.contains(id));
    }

    /// Tells those who count which GPUs the machine has, or is said to have by an administrator.
    fn know_gpus(&mut self) {
        let up = self.now();
        let listed = self.listing.last().into_iter().map(|listed| listed.gpu);
        listed.chain(self.config.gpus.keys().copied()).for_each(|gpu| self.recorder.know(gpu, up));
    }

    /// Answers a reader of metrics.
    fn answer(&mut self, question: Question) {
        match question {
            Question::Alive(answer) => {
                let _ = answer.send(());
            }
            Question::Snapshot(answer) => {
                self.listing.look();
                self.know_gpus();
                self.recorder.count_all(self.started.elapsed());
                let _ = answer.send(self.snapshot());
            }
        }
    }

    /// Sends the core's messages to clients, and logs its notes for administrators.
    fn deliver(&mut self) {
        while let Some(incident) = self.core.poll_incident() {
            let up = self.now();
            self.recorder.record(incident, up);
        }
        while let Some(output) = self.core.poll_output() {
            match output {
                Output::Send { client, message } => self.send(client, message),
                Output::Log { warning: true, text } => warn!("{text}"),
                Output::Log { warning: false, text } => info!("{text}"),
                Output::Measure { gpu } => self.nvml.ask_anew(gpu, self.now()),
            }
        }
    }

    fn send(&mut self, client: ClientId, message: SchedulerMessage) {
        log_grant(client, &message);
        let Some(outgoing) = self.outgoing.get(&client) else { return };
        self.has_sent = true;
        if outgoing.try_send(message).is_err() {
            warn!("client {client} does not read; it is cut off");
            // The connection's task ends with its channel, and reports that the client is gone.
            self.outgoing.remove(&client);
        }
    }

    /// Asks NVML about GPUs that clients have begun to use. Where clients may fill a fixed amount, only sleepers need its answer: to come
    /// back, they need memory that is free, and those that go by themselves are measured before.
    fn look_at_new_gpus(&mut self) {
        let (in_use, now) = (self.core.gpus_in_use(), self.now());
        for &gpu in in_use.difference(&self.gpus_in_use) {
            let is_known = self.config.fixed_memory(gpu).is_some() && self.config.sleep_after.is_none();
            if !is_known || self.core.has_sleepers(gpu) {
                self.nvml.ask(gpu, now);
            }
        }
        self.gpus_in_use = in_use;
    }

    /// Looks for processes that are stopped, where others may wait for them.
    fn look_for_stopped(&mut self) {
        if self.look_at_stopped.as_ref().is_some_and(|look| !look.is_finished()) {
            return;
        }
        let clients = self.core.suspects().into_iter();
        let of: Vec<(ClientId, u32)> =
            clients.filter_map(|client| Some((client, *self.pids.get(&client)?))).collect();
        let commands = self.commands.clone();
        self.look_at_stopped = (!of.is_empty()).then(|| {
            spawn_blocking(move || {
                let _ = commands.blocking_send(Command::Stopped(processes::stopped(of).collect()));
            })
        });
    }

    /// Warns where NVML does not answer: GPUs stay as large as they were when it last did.
    fn look_for_stuck_question(&mut self) {
        if let Some(gpu) = self.nvml.newly_stuck(self.now()) {
            warn!("NVML does not answer about {gpu}, and nothing is measured on any GPU until it does");
        }
    }

    fn look_around(&mut self) {
        self.gpus_in_use.clear();
        self.look_at_new_gpus();
    }

    /// Divides the memory that NVML has seen among the clients. A process that registered after NVML was asked, or
    /// has disconnected and not ended yet, is no stranger.
    fn attribute(&self, gpu: GpuUuid, asked_at: Time, mut seen: NvmlReading) -> Measured {
        // A process that has come back has been several clients; only the last of them lives.
        let last_first = self.pids.iter().rev();
        let used = last_first.filter_map(|(&client, pid)| Some((client, seen.used.remove(pid)?))).collect();
        let strangers = seen.used.into_values().fold(0, u64::saturating_add);
        Measured { gpu, asked_at, available: seen.total.saturating_sub(strangers), used }
    }
}

fn log_grant(client: ClientId, message: &SchedulerMessage) {
    match message {
        SchedulerMessage::AskCounters => {}
        message => debug!("client {client}: {message:?}"),
    }
}

#[cfg(test)]
mod tests;
