//! The task that owns the core, and is the only one that touches it: commands become events, and outputs become frames.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nvshare_core::{ClientId, Config, Core, Event, Measured, Output, Rule, Time};
use nvshare_proto::units::Bytes;
use nvshare_proto::{
    AdminReply, AdminRequest, Amount, ClientMemory, ClientMessage, ClientStatus, GpuStatus, GpuUuid,
    MemoryMode, MemoryStatus, Reply, SchedulerMessage, SeatName, SeatStatus,
};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep_until};
use tracing::{debug, info, warn};

use crate::commands::Command;
use crate::foresight::Foresight;
use crate::host_memory::HostMemory;
use crate::metrics::{Question, Snapshot};
use crate::nvml::{Seen, Watch};
use crate::processes::{self, Described};
use crate::recorder::Recorder;
use crate::seats::Seats;
use crate::settings::Store;
use crate::setup::Setup;
use crate::tenants::Tenant;
use crate::view::{self, Viewer};
use crate::{gpus, limits, seats};

/// How long `status` waits for clients' counters.
const COUNTERS_PATIENCE: Duration = Duration::from_millis(100);
/// Clients are asked for their counters at most so often for the status on the clients' socket.
const COUNTERS_FRESH: Duration = Duration::from_millis(500);
/// How often NVML is asked about the GPUs at most: as long as the contexts of a new client do not count yet.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Each fifth time, NVML looks for memory on the GPUs that belongs to no client, whoever is new.
const LOOKS: u32 = 5;

/// A request for the status that waits for fresh counters.
struct Waiting {
    /// The process that asked on the clients' socket; none: an administrator.
    viewer: Option<Viewer>,
    clients: BTreeSet<ClientId>,
    until: Instant,
    answer: oneshot::Sender<Vec<Reply>>,
}

/// The reason why the core's task wakes.
enum Woken {
    By(Box<Command>),
    ByDeadline,
    ForStatus,
    ToForesee,
    ToLookAround,
}

/// Owns the core.
pub(crate) struct CoreTask {
    core: Core,
    /// For looks that take a while, to say what they found.
    commands: mpsc::Sender<Command>,
    nvml: Watch,
    /// Memory on each GPU that belongs to no process, as NVML last saw it.
    nobodys: BTreeMap<GpuUuid, u64>,
    /// The configuration as it was read; settings made at run time come before it.
    config: Config,
    store: Store,
    listing: gpus::Listing,
    started: Instant,
    frames: BTreeMap<ClientId, mpsc::Sender<SchedulerMessage>>,
    pids: BTreeMap<ClientId, u32>,
    /// The last look for processes that are stopped.
    stops: Option<JoinHandle<()>>,
    /// The kernel's descriptions of clients' processes when they registered.
    processes: BTreeMap<ClientId, Described>,
    seats: Seats,
    /// The seats of clients that came to the socket of one.
    seated: BTreeMap<ClientId, SeatName>,
    /// How clients get device memory.
    kinds: BTreeMap<ClientId, MemoryMode>,
    gpus: BTreeSet<GpuUuid>,
    waiting: Vec<Waiting>,
    /// When clients were last asked for their counters.
    asked_counters: Option<Instant>,
    recorder: Recorder,
    /// Memory of the host, which is handed out beside the core.
    foresight: Foresight,
}

impl CoreTask {
    pub(crate) fn new(
        setup: Setup,
        nvml: Watch,
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
            nobodys: BTreeMap::new(),
            config: setup.config,
            store: setup.store,
            listing: gpus::Listing::new(setup.descriptions.gpus),
            started: Instant::now(),
            processes: BTreeMap::new(),
            seats: setup.seats.seats,
            seated: BTreeMap::new(),
            kinds: BTreeMap::new(),
            frames: BTreeMap::new(),
            pids: BTreeMap::new(),
            stops: None,
            gpus: BTreeSet::new(),
            waiting: Vec::new(),
            asked_counters: None,
            recorder,
            foresight: Foresight::new(host),
        }
    }

    fn now(&self) -> Time {
        self.started.elapsed()
    }

    pub(crate) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let mut looks: u32 = 0;
        let mut look_around = tokio::time::interval(LOOK_EVERY);
        look_around.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            // A deadline too far away for the clock is treated as none.
            let deadline = self.core.next_deadline().and_then(|time| self.started.checked_add(time));
            let foresees = self.foresight.due();
            let counters = self.waiting.iter().map(|waiting| waiting.until).min();
            let woken = tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => Woken::By(Box::new(command)),
                    None => return,
                },
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => Woken::ByDeadline,
                () = sleep_until(counters.unwrap_or_else(Instant::now)), if counters.is_some() => Woken::ForStatus,
                () = sleep_until(foresees.unwrap_or_else(Instant::now)), if foresees.is_some() => Woken::ToForesee,
                _ = look_around.tick() => Woken::ToLookAround,
            };
            let begin = Instant::now();
            match woken {
                Woken::By(command) => {
                    self.obey(*command);
                    self.foresight.something_happened();
                }
                Woken::ToForesee => self.foresight.look(&self.core),
                Woken::ByDeadline => {
                    let now = self.now();
                    self.core.handle(Event::Deadline, now);
                }
                Woken::ForStatus => {}
                Woken::ToLookAround => {
                    self.look_for_stopped();
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
        }
    }

    fn obey(&mut self, command: Command) {
        let now = self.now();
        match command {
            Command::Register { client, identity, process, seat, mut register, frames } => {
                self.frames.insert(client, frames);
                let pid = identity.pid.unwrap_or(register.pid);
                let info = process.as_ref().map(|process| &process.info);
                self.recorder.expect(client, pid, &register.name, info);
                self.processes.extend(process.map(|process| (client, process)));
                // Only the kernel's number counts, not the client's own: with that, it could name another process's
                // memory as its own.
                self.pids.extend(identity.pid.map(|pid| (client, pid)));
                self.kinds.insert(client, register.memory);
                if let Some(name) = seat {
                    self.seated.insert(client, name);
                    seats::keep_own_wishes(&mut register.asked, &self.seats.given(name));
                    self.bound(name, now);
                }
                self.core.handle(Event::Registered { client, identity, register: *register }, now);
                self.look_at_new_gpus();
            }
            Command::Message { client, message } => {
                if !self.frames.contains_key(&client) {
                    return;
                }
                if let ClientMessage::Counters(counters) = &message {
                    self.recorder.said(client, counters);
                    for waiting in &mut self.waiting {
                        waiting.clients.remove(&client);
                    }
                }
                let usage = matches!(message, ClientMessage::Usage(_));
                self.core.handle(Event::Message { client, message }, now);
                if usage {
                    self.look_at_new_gpus();
                }
            }
            Command::Stopped(looked_at) => {
                for (client, stopped) in looked_at {
                    self.core.handle(Event::Stopped { client, stopped }, now);
                    self.deliver();
                }
            }
            Command::Looked { gpu, seen } => {
                self.nvml.answered(gpu);
                if let Some(seen) = seen {
                    self.nobodys.insert(gpu, seen.nobodys);
                    let measured = self.attribute(gpu, seen);
                    self.core.handle(Event::Measured(measured), now);
                }
            }
            Command::Described { client, command } => {
                if let Some(process) = self.processes.get_mut(&client) {
                    process.info.command = command;
                }
            }
            Command::Disconnected { client, process_remains } => {
                self.frames.remove(&client);
                if !process_remains {
                    self.pids.remove(&client);
                }
                self.core.handle(Event::Disconnected { client, process_remains }, now);
            }
            Command::Exited { client, identity } => {
                // The number may be another process's by now, which registered later.
                self.pids.retain(|&known, pid| known > client || Some(*pid) != identity.pid);
                self.core.handle(Event::Exited { client, identity }, now);
            }
            Command::Admin { request, answer } => self.administer(request, answer, now),
            Command::Look { viewer, answer } => self.wait_for_counters(Some(viewer), answer),
            Command::Ask(question) => self.answer(question),
            // The first client of a seat is bound when it registers.
            Command::SeatChanged(name) if self.seated.values().any(|&seat| seat == name) => {
                self.bound(name, now);
            }
            Command::SeatChanged(_) => {}
            Command::Configure(config) => {
                self.config = config;
                self.core.configure(self.store.over(&self.config), now);
                self.look_around();
            }
        }
    }

    /// What a seat sets is in force for its tenant from now on.
    fn bound(&mut self, name: SeatName, now: Time) {
        self.core.bound_tenant(Tenant::Seat(name).number(), self.seats.given(name), now);
    }

    /// Answers with the state as soon as the clients' counters are there.
    fn wait_for_counters(&mut self, viewer: Option<Viewer>, answer: oneshot::Sender<Vec<Reply>>) {
        let now = Instant::now();
        self.listing.look();
        // Each question of anybody else would be one to all clients.
        let are_fresh = self.asked_counters.is_some_and(|asked| now < asked + COUNTERS_FRESH);
        let clients = if viewer.is_some() && are_fresh {
            BTreeSet::new()
        } else {
            self.asked_counters = Some(now);
            self.core.ask_counters().into_iter().collect()
        };
        self.waiting.push(Waiting { viewer, clients, until: now + COUNTERS_PATIENCE, answer });
    }

    fn administer(&mut self, request: AdminRequest, answer: oneshot::Sender<Vec<Reply>>, now: Time) {
        // What is in force now, and the change that is still to be kept.
        let outcome = match request {
            AdminRequest::Status => return self.wait_for_counters(None, answer),
            AdminRequest::SetQuantum { gpu, quantum } => {
                if let Err(reason) = limits::quantum(quantum) {
                    Err(reason)
                } else if let Some(gpu) = gpu.filter(|&gpu| !self.is_known(gpu)) {
                    // It may have come since the last look.
                    self.listing.look();
                    Err(format!("unknown GPU {gpu}: this machine does not list it and no client has used it"))
                } else {
                    let text = self.core.set_quantum(gpu, quantum.into(), now);
                    Ok((text, Some(self.store.set_quantum(gpu, quantum.into()))))
                }
            }
            AdminRequest::Give { client, gpu, given } => limits::given(given).and_then(|said| {
                let whom = self.core.give(client, gpu, given, now)?;
                let beyond = self.beyond_limit(client, gpu, given.memory).unwrap_or_default();
                Ok((format!("{whom}: {said}{beyond}"), None))
            }),
            AdminRequest::GiveRun { user, run, given } => limits::given(given).map(|said| {
                let tenant = Tenant::Run { user, run };
                self.core.give_tenant(tenant.number(), given, now);
                (format!("what is about to run: {said}"), None)
            }),
            AdminRequest::On => {
                let text = self.core.switch_on(now);
                Ok((text, Some(self.store.set_scheduling(true))))
            }
            AdminRequest::Off { force } => {
                let text = self.core.switch_off(force, now);
                text.map(|text| (text, Some(self.store.set_scheduling(false))))
            }
            AdminRequest::Reset => {
                let change = self.store.reset();
                self.core.configure(self.config.clone(), now);
                self.core.switch_on(now);
                let rule = self.config.auto.map_or(Rule::Fixed(self.config.quantum), Rule::Auto);
                let text = format!(
                    "the configuration is in force: TQ {rule}, scheduling is on; limits and weights of clients stay"
                );
                Ok((text, Some(change)))
            }
            // The connection sends them itself, from the journal.
            AdminRequest::Watch { .. } => Err("events are told on a connection of their own".to_owned()),
            AdminRequest::Seat(seat) => {
                let name = seat.name();
                return self.change_seats(Some(name), answer, move |seats| seats.make(seat));
            }
            AdminRequest::RemoveSeat(name) => {
                return self.change_seats(Some(name), answer, move |seats| seats.remove(name));
            }
            AdminRequest::HoldSeats(holders) => {
                return self.change_seats(None, answer, move |seats| seats.hold(holders));
            }
        };
        match outcome {
            Ok((text, None)) => done(answer, text),
            // The disk may take its time; nobody's grant waits for it.
            Ok((text, Some(change))) => {
                spawn_blocking(move || done(answer, kept(text, change.keep())));
            }
            Err(reason) => refuse(answer, reason),
        }
    }

    /// What to say where a client has more memory than its new limit allows.
    fn beyond_limit(&self, client: ClientId, gpu: Option<GpuUuid>, limit: Option<u64>) -> Option<String> {
        let limit = limit.filter(|&limit| limit > 0)?;
        let rows = self.core.client_status_at(self.started.elapsed());
        let row = rows.iter().find(|row| row.client == client)?;
        let usage = row.usage.iter().filter(|usage| gpu.is_none_or(|gpu| usage.gpu == gpu));
        let has = usage.map(|usage| usage.allocated).max().filter(|&has| has > limit)?;
        Some(format!("; it has {} and keeps them: new allocations fail until it is below", Bytes(has)))
    }

    /// Changes seats, beside this task: the disk may take its time. `name` is a seat that may set something else then.
    fn change_seats(
        &self,
        name: Option<SeatName>,
        answer: oneshot::Sender<Vec<Reply>>,
        change: impl FnOnce(&Seats) -> Result<String, String> + Send + 'static,
    ) {
        let (seats, commands) = (self.seats.clone(), self.commands.clone());
        spawn_blocking(move || {
            let outcome = change(&seats);
            if let Some(name) = name {
                let _ = commands.blocking_send(Command::SeatChanged(name));
            }
            match outcome {
                Ok(text) => done(answer, text),
                Err(reason) => refuse(answer, reason),
            }
        });
    }

    /// Answers requests for the status whose counters are there, or late.
    fn answer_status(&mut self) {
        let now = Instant::now();
        let is_ready = |waiting: &mut Waiting| waiting.clients.is_empty() || waiting.until <= now;
        let ready: Vec<Waiting> = self.waiting.extract_if(.., is_ready).collect();
        if ready.is_empty() {
            return;
        }
        let snapshot = self.snapshot();
        for waiting in ready {
            let Snapshot { mut scheduler, mut gpus, mut clients, mut memory } = snapshot.clone();
            if let Some(viewer) = &waiting.viewer {
                scheduler.restricted = true;
                view::restrict(viewer, &self.processes, &self.seated, &mut gpus, &mut clients);
                memory.clients.retain(|kind| clients.iter().any(|row| row.client == kind.client));
            }
            let seats = self.seat_rows(waiting.viewer.as_ref());
            let rows = std::iter::once(AdminReply::Scheduler(scheduler))
                .chain(gpus.into_iter().map(AdminReply::Gpu))
                .chain(clients.into_iter().map(|row| AdminReply::Client(Box::new(row))))
                .chain(seats.into_iter().map(|row| AdminReply::Seat(Box::new(row))))
                .chain(std::iter::once(AdminReply::Memory(Box::new(memory))))
                .chain(std::iter::once(AdminReply::End));
            let _ = waiting.answer.send(rows.map(Reply::Admin).collect());
        }
    }

    /// The seats that a viewer may see: an administrator sees all, others the one at whose socket they ask.
    fn seat_rows(&self, viewer: Option<&Viewer>) -> Vec<SeatStatus> {
        let is_shown = |name: &SeatName| match viewer {
            None => true,
            Some(Viewer::Seat(own)) => own == name,
            Some(Viewer::Process(_)) => false,
        };
        let mut clients: BTreeMap<SeatName, Vec<ClientId>> = BTreeMap::new();
        for (&client, &name) in &self.seated {
            clients.entry(name).or_default().push(client);
        }
        let shown = self.seats.all().into_iter().filter(|(name, ..)| is_shown(name));
        shown
            .map(|(name, seat, holder)| {
                let clients = clients.remove(&name).unwrap_or_default();
                SeatStatus { name, seat, holder, clients }
            })
            .collect()
    }

    /// Forgets what is known about clients that are not shown any more.
    fn forget_the_gone(&mut self) {
        let rows = self.core.client_status_at(self.started.elapsed());
        let shown: BTreeSet<ClientId> = rows.iter().map(|row| row.client).collect();
        self.processes.retain(|id, _| shown.contains(id));
        self.seated.retain(|id, _| shown.contains(id));
        self.kinds.retain(|id, _| shown.contains(id));
    }

    /// The kinds of memory on the GPUs.
    fn memory_status(&self, clients: &[ClientStatus]) -> MemoryStatus {
        let kept = self.nobodys.iter().map(|(&gpu, &bytes)| Amount {
            gpu,
            bytes: bytes.saturating_sub(view::managed_on(gpu, clients, &self.kinds)),
        });
        let living = clients.iter().filter(|row| !row.gone).map(|row| row.client);
        let kind = |client| Some(ClientMemory { client, memory: *self.kinds.get(&client)? });
        MemoryStatus {
            kept: kept.filter(|kept| kept.bytes > 0).collect(),
            clients: living.filter_map(kind).collect(),
        }
    }

    /// The present state.
    fn snapshot(&mut self) -> Snapshot {
        let mut scheduler = self.core.status(self.started.elapsed(), std::process::id());
        self.forget_the_gone();
        let mut clients = self.core.client_status_at(self.started.elapsed());
        for row in &mut clients {
            row.process = self.processes.get(&row.client).map(|process| process.info.clone());
        }
        if let Some((about, has)) = self.foresight.host().map(HostMemory::status) {
            scheduler.host_memory = Some(about);
            for row in &mut clients {
                row.host_memory = has.get(&row.client).copied().unwrap_or(0);
            }
        }
        let mut gpus = self.core.gpu_status();
        let config = self.store.over(&self.config);
        let idle = |gpu| {
            let rule = config.rule(gpu);
            let quantum = if let Rule::Fixed(quantum) = rule { quantum } else { Duration::ZERO };
            GpuStatus { quantum_ms: quantum.as_millis() as u64, rule: rule.said(), ..GpuStatus::idle(gpu) }
        };
        view::list_all(&mut gpus, &self.listing.last(), idle);
        let memory = self.memory_status(&clients);
        Snapshot { scheduler, gpus, clients, memory }
    }

    /// Answers a reader of metrics.
    fn answer(&mut self, question: Question) {
        match question {
            Question::Alive(answer) => {
                let _ = answer.send(());
            }
            Question::Snapshot(answer) => {
                self.listing.look();
                self.recorder.count_all(self.started.elapsed());
                let _ = answer.send(self.snapshot());
            }
        }
    }

    /// Whether a client has used a GPU, or the machine lists it.
    fn is_known(&self, gpu: GpuUuid) -> bool {
        self.core.gpu_status().iter().any(|row| row.gpu == gpu) || self.listing.has(gpu)
    }

    /// Sends the core's messages to clients, and logs its notes for administrators.
    fn deliver(&mut self) {
        while let Some(happened) = self.core.poll_happened() {
            let up = self.now();
            self.recorder.record(happened, up);
        }
        while let Some(output) = self.core.poll_output() {
            match output {
                Output::Send { client, message } => self.send(client, message),
                Output::Note { warning: true, text } => warn!("{text}"),
                Output::Note { warning: false, text } => info!("{text}"),
            }
        }
    }

    fn send(&mut self, client: ClientId, message: SchedulerMessage) {
        log_grant(client, &message);
        let Some(frames) = self.frames.get(&client) else { return };
        if frames.try_send(message).is_err() {
            warn!("client {client} does not read; it is cut off");
            // The connection's task ends with its channel, and reports that the client is gone.
            self.frames.remove(&client);
        }
    }

    /// Asks NVML about GPUs that clients have begun to use.
    fn look_at_new_gpus(&mut self) {
        let in_use = self.core.gpus_in_use();
        for &gpu in in_use.difference(&self.gpus) {
            if self.config.fixed_memory(gpu).is_none() {
                self.nvml.ask(gpu);
            }
        }
        self.gpus = in_use;
    }

    /// Looks for processes that are stopped, where others may wait for them.
    fn look_for_stopped(&mut self) {
        if self.stops.as_ref().is_some_and(|look| !look.is_finished()) {
            return;
        }
        let clients = self.core.suspects().into_iter();
        let of: Vec<(ClientId, u32)> =
            clients.filter_map(|client| Some((client, *self.pids.get(&client)?))).collect();
        let commands = self.commands.clone();
        self.stops = (!of.is_empty()).then(|| {
            spawn_blocking(move || {
                let _ = commands.blocking_send(Command::Stopped(processes::stopped(of).collect()));
            })
        });
    }

    fn look_around(&mut self) {
        self.gpus.clear();
        self.look_at_new_gpus();
    }

    /// Divides the memory that NVML has seen among the clients. A process that registered after NVML was asked, or
    /// has disconnected and not ended yet, is no stranger.
    fn attribute(&self, gpu: GpuUuid, mut seen: Seen) -> Measured {
        // A process that has come back has been several clients; only the last of them lives.
        let last_first = self.pids.iter().rev();
        let used = last_first.filter_map(|(&client, pid)| Some((client, seen.used.remove(pid)?))).collect();
        let strangers = seen.used.into_values().fold(0, u64::saturating_add);
        Measured { gpu, available: seen.total.saturating_sub(strangers), used }
    }
}

/// Says why nothing was done.
fn refuse(answer: oneshot::Sender<Vec<Reply>>, reason: String) {
    let _ = answer.send(vec![Reply::Refused { reason }]);
}

/// Logs what was done for an administrator, and says so.
fn done(answer: oneshot::Sender<Vec<Reply>>, text: String) {
    info!("{text}");
    let _ = answer.send(vec![Reply::Admin(AdminReply::Done { text })]);
}

/// The text about a change, and whether the change survives a restart of the scheduler.
fn kept(text: String, kept: Result<(), String>) -> String {
    match kept {
        Ok(()) => text,
        Err(error) => format!("{text}; a restart will undo this, because it cannot be kept: {error}"),
    }
}

fn log_grant(client: ClientId, message: &SchedulerMessage) {
    match message {
        SchedulerMessage::AskCounters => {}
        message => debug!("client {client}: {message:?}"),
    }
}
