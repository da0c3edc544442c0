//! The shell around the core: connections become events, outputs become frames.
//!
//! One task owns the core and is the only one that touches it. Each connection has a task of its own, which reads
//! frames into events and writes what the core has for it. A connection that does not read is cut off; nothing
//! that a client does or does not do holds up the others.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use nvshare_proto::codec::Frames;
use nvshare_proto::units::{MAX_QUANTUM, MIN_QUANTUM};
use nvshare_proto::{
    AdminReply, AdminRequest, ClientMessage, GpuStatus, GpuUuid, ProcessInfo, Register, Reply, Request,
    SchedulerMessage,
};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::codec::Framed;
use tracing::{debug, info, warn};

use crate::identity::Peer;
use crate::limits;
use crate::nvml::{Seen, Watch};
use crate::settings::Store;
use crate::sockets::Sockets;
use crate::tenants::{Seat, Tenant, Tenants};
use crate::view::{self, Viewer};
use crate::{gpus, processes};
use nvshare_core::{ClientId, Config, Core, Event, Identity, MOST_GPUS_EACH, Measured, Output, Time};

/// Frames that wait for a client that does not read, before it is cut off.
const BACKLOG: usize = 256;
/// A connection that says nothing for this long is closed, unless it is a registered client's.
const FIRST_FRAME_PATIENCE: Duration = Duration::from_secs(10);
/// A client that reads nothing for this long, with its socket full, is cut off.
const WRITE_PATIENCE: Duration = Duration::from_secs(10);
/// How long the socket of a process that is gone is read on.
const LAST_WORDS: Duration = Duration::from_millis(2);
/// How long `status` waits for clients' counters.
const COUNTERS_PATIENCE: Duration = Duration::from_millis(100);
/// How often strangers on the GPUs are looked for.
const LOOK_AROUND_EVERY: Duration = Duration::from_secs(5);
/// Longest name of a program that is shown.
const LONGEST_NAME: usize = 64;

/// What connections tell the core's task.
#[derive(Debug)]
enum Command {
    /// A process registers; frames for it go here.
    Register {
        client: ClientId,
        identity: Identity,
        process: Option<ProcessInfo>,
        register: Register,
        frames: mpsc::Sender<Reply>,
    },
    /// From a registered process.
    Message { client: ClientId, message: ClientMessage },
    /// A registered process's connection ended.
    Disconnected { client: ClientId, process_remains: bool },
    /// The process of a client that had disconnected is gone.
    Exited { client: ClientId },
    /// A GPU was looked at: what NVML has seen, if anything.
    Looked { gpu: GpuUuid, seen: Option<Seen> },
    /// An administrator asks.
    Admin { request: AdminRequest, answer: oneshot::Sender<Vec<Reply>> },
    /// Somebody asks for the status on the clients' socket.
    Look { viewer: Viewer, answer: oneshot::Sender<Vec<Reply>> },
    /// The configuration was read again.
    Configure(Config),
}

/// What a scheduler is started with.
#[derive(Debug)]
pub struct Setup {
    /// The configuration.
    pub config: Config,
    /// The configuration, each time that it is read again.
    pub changes: mpsc::Receiver<Config>,
    /// What was set at run time.
    pub store: Store,
    /// Where the kernel module describes the GPUs.
    pub gpu_descriptions: PathBuf,
}

/// Serves until `shutdown` is done.
///
/// # Errors
/// When the core's task ends by itself, which is a defect: better to be started anew than to accept connections
/// that nobody serves.
pub async fn run(
    sockets: Sockets,
    mut setup: Setup,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Stopped> {
    let (commands, received) = mpsc::channel(1024);
    let answers = commands.clone();
    let nvml = Watch::start(move |gpu, seen| {
        let _ = answers.blocking_send(Command::Looked { gpu, seen });
    });
    let (_, none) = mpsc::channel(1);
    let mut changes = std::mem::replace(&mut setup.changes, none);
    let configured = commands.clone();
    tokio::spawn(async move {
        while let Some(config) = changes.recv().await {
            let _ = configured.send(Command::Configure(config)).await;
        }
    });
    let mut keeper = tokio::spawn(Keeper::new(setup, nvml).run(received));
    // What clients open must leave descriptors for administrators.
    let clients = Arc::new(Semaphore::new(limits::clients()));
    let tenants = Arc::new(Tenants::default());
    tokio::pin!(shutdown);
    loop {
        let (accepted, may_change) = tokio::select! {
            accepted = sockets.clients().accept() => (accepted, false),
            accepted = sockets.admin().accept() => (accepted, true),
            () = &mut shutdown => break,
            _ = &mut keeper => return Err(Stopped),
        };
        match accepted {
            Ok((stream, _)) => {
                let place = if may_change { None } else { Some(Arc::clone(&clients).try_acquire_owned()) };
                let (commands, tenants) = (commands.clone(), Arc::clone(&tenants));
                tokio::spawn(async move {
                    match place {
                        Some(Err(_)) => refuse_one_more(stream).await,
                        _ => connection(stream, may_change, &tenants, commands).await,
                    }
                    drop(place);
                });
            }
            Err(error) => {
                // Out of descriptors, say: that passes, and must not become a busy loop.
                warn!("a connection cannot be accepted: {error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
    keeper.abort();
    Ok(())
}

/// The core's task has ended.
#[derive(Debug, thiserror::Error)]
#[error("the scheduler's core has stopped; this is a defect")]
pub struct Stopped;

async fn refuse_one_more(stream: UnixStream) {
    warn!("too many connections: one more is refused");
    let mut framed = Framed::new(stream, Frames::<Request, Reply>::default());
    let reason = "too many connections".to_owned();
    let _ = timeout(FIRST_FRAME_PATIENCE, framed.send(Reply::Refused { reason })).await;
}

/// One connection, from its first frame to its end.
async fn connection(
    stream: UnixStream,
    may_change: bool,
    tenants: &Tenants,
    commands: mpsc::Sender<Command>,
) {
    let peer = Peer::of(&stream);
    let mut framed = Framed::new(stream, Frames::<Request, Reply>::default());
    loop {
        let request = match timeout(FIRST_FRAME_PATIENCE, framed.next()).await {
            // It says nothing.
            Err(_) => return,
            Ok(Some(Ok(request))) => request,
            Ok(Some(Err(error))) => {
                debug!("a connection is refused: {error}");
                let _ = framed.send(Reply::Refused { reason: error.to_string() }).await;
                return;
            }
            Ok(None) => return,
        };
        match request {
            Request::Admin(request) => {
                let viewer = (!may_change).then(|| process(framed.get_ref(), &peer));
                for reply in administer(request, viewer, &commands).await {
                    if framed.send(reply).await.is_err() {
                        return;
                    }
                }
            }
            Request::Register(register) => return client(framed, peer, register, tenants, commands).await,
            Request::Look { run } => {
                let user = framed.get_ref().peer_cred().ok().map(|cred| cred.uid());
                let shown = match Tenant::of(peer.identity.pid, user, run) {
                    Some(tenant) => tenants.show(&tenant, framed.get_ref()).await,
                    None => Err(std::io::ErrorKind::NotFound.into()),
                };
                if shown.is_err() {
                    let reason = "there is no tenant to look at".to_owned();
                    let _ = framed.send(Reply::Refused { reason }).await;
                }
                return;
            }
            Request::Client(_) => {
                let reason = "a process registers before it says anything else".to_owned();
                let _ = framed.send(Reply::Refused { reason }).await;
                return;
            }
        }
    }
}

/// Answers a request; on the clients' socket, `viewer` is who asks.
async fn administer(
    request: AdminRequest,
    viewer: Option<Viewer>,
    commands: &mpsc::Sender<Command>,
) -> Vec<Reply> {
    let (answer, answered) = oneshot::channel();
    let command = match viewer {
        None => Command::Admin { request, answer },
        Some(viewer) if request == AdminRequest::Status => Command::Look { viewer, answer },
        Some(_) => {
            let reason = "changes are accepted on the administrators' socket only".to_owned();
            return vec![Reply::Refused { reason }];
        }
    };
    let sent = commands.send(command).await;
    match (sent, answered.await) {
        (Ok(()), Ok(replies)) => replies,
        _ => vec![Reply::Refused { reason: "the scheduler is stopping".to_owned() }],
    }
}

/// What the kernel tells of the process at the other end.
fn process(stream: &UnixStream, peer: &Peer) -> Option<ProcessInfo> {
    processes::describe(peer.identity.pid?, stream.peer_cred().ok()?.uid())
}

/// A registered process's connection.
async fn client(
    mut framed: Framed<UnixStream, Frames<Request, Reply>>,
    peer: Peer,
    mut register: Register,
    tenants: &Tenants,
    commands: mpsc::Sender<Command>,
) {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let client = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    let user = framed.get_ref().peer_cred().ok().map(|cred| cred.uid());
    let tenant = Tenant::of(peer.identity.pid, user, register.run);
    let identity = Identity { tenant: tenant.as_ref().map(Tenant::number), ..peer.identity };
    let (frames, mut outgoing) = mpsc::channel(BACKLOG);
    // It is shown to people and sent in frames.
    register.name = register.name.chars().filter(|c| !c.is_control()).take(LONGEST_NAME).collect();
    if register.usage.len() > MOST_GPUS_EACH {
        let reason = format!("{} GPUs in one registration; at most {MOST_GPUS_EACH}", register.usage.len());
        let _ = framed.send(Reply::Refused { reason }).await;
        return;
    }
    // Held for as long as the connection is: what its process had is free then.
    let seat = seat(&framed, tenant, tenants).await;
    let process = process(framed.get_ref(), &peer);
    if commands.send(Command::Register { client, identity, process, register, frames }).await.is_err() {
        return;
    }
    let mut process_gone = false;
    loop {
        let refusal = tokio::select! {
            // What the core has to say goes first: it may be the reason for the end.
            biased;
            reply = outgoing.recv() => match reply {
                Some(reply) => {
                    let last = matches!(reply, Reply::Refused { .. });
                    let sent = timeout(WRITE_PATIENCE, framed.send(reply)).await;
                    if sent.is_err() {
                        warn!("client {client} does not read; it is cut off");
                    }
                    if !matches!(sent, Ok(Ok(()))) || last { break }
                    None
                }
                // The core cut it off.
                None => break,
            },
            () = peer.gone(), if !process_gone => {
                // A child may have inherited the socket; the process that registered is gone. Its last words, if
                // any, are here already.
                process_gone = true;
                while let Ok(Some(Ok(Request::Client(message)))) = timeout(LAST_WORDS, framed.next()).await {
                    let _ = commands.send(Command::Message { client, message }).await;
                }
                break;
            }
            request = framed.next() => match request {
                Some(Ok(Request::Client(message))) => {
                    if commands.send(Command::Message { client, message }).await.is_err() { break }
                    None
                }
                Some(Ok(Request::Register(_) | Request::Look { .. })) => Some("this connection is registered already".to_owned()),
                Some(Ok(Request::Admin(_))) => Some("an administrator's request on a client's connection".to_owned()),
                Some(Err(error)) => Some(error.to_string()),
                None => break,
            },
        };
        if let Some(reason) = refusal {
            warn!("client {client} is refused: {reason}");
            let _ = framed.send(Reply::Refused { reason }).await;
            break;
        }
    }
    // It may come back at once, on another connection, and is counted anew then.
    drop(seat);
    let process_remains = !process_gone && peer.lives();
    let _ = commands.send(Command::Disconnected { client, process_remains }).await;
    if process_remains {
        drop(framed);
        peer.gone().await;
        let _ = commands.send(Command::Exited { client }).await;
    }
}

/// The process's place in its tenant, if it has one; it is told of it. Without, its limits are its own.
async fn seat(
    framed: &Framed<UnixStream, Frames<Request, Reply>>,
    tenant: Option<Tenant>,
    tenants: &Tenants,
) -> Option<Seat> {
    let joined = match tenants.join(tenant?) {
        Ok(seat) => seat.tell(framed.get_ref()).await.map(|()| seat),
        Err(error) => Err(error),
    };
    joined.inspect_err(|error| warn!("a process keeps its limits for itself: {error}")).ok()
}

/// Somebody who waits for fresh counters.
struct Waiting {
    /// Who asked on the clients' socket; none: an administrator.
    viewer: Option<Viewer>,
    clients: BTreeSet<ClientId>,
    until: Instant,
    answer: oneshot::Sender<Vec<Reply>>,
}

/// Owns the core.
struct Keeper {
    core: Core,
    nvml: Watch,
    /// As it was read; what was set at run time stands above it.
    config: Config,
    store: Store,
    gpu_descriptions: PathBuf,
    started: Instant,
    frames: BTreeMap<ClientId, mpsc::Sender<Reply>>,
    pids: BTreeMap<ClientId, u32>,
    /// What the kernel told of clients' processes when they registered.
    processes: BTreeMap<ClientId, ProcessInfo>,
    gpus: BTreeSet<GpuUuid>,
    waiting: Vec<Waiting>,
}

impl Keeper {
    fn new(setup: Setup, nvml: Watch) -> Self {
        let mut core = Core::new(setup.store.over(&setup.config));
        if !setup.store.scheduling() {
            // Nobody is there whom it could do harm.
            let _ = core.switch_off(true, Time::ZERO);
            warn!("scheduling is off, as an administrator left it");
        }
        Self {
            core,
            nvml,
            config: setup.config,
            store: setup.store,
            gpu_descriptions: setup.gpu_descriptions,
            started: Instant::now(),
            processes: BTreeMap::new(),
            frames: BTreeMap::new(),
            pids: BTreeMap::new(),
            gpus: BTreeSet::new(),
            waiting: Vec::new(),
        }
    }

    fn now(&self) -> Time {
        self.started.elapsed()
    }

    async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let mut look_around = tokio::time::interval(LOOK_AROUND_EVERY);
        look_around.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            // One that is too far away to be told is none.
            let deadline = self.core.next_deadline().and_then(|time| self.started.checked_add(time));
            let counters = self.waiting.iter().map(|waiting| waiting.until).min();
            tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => self.obey(command),
                    None => return,
                },
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    let now = self.now();
                    self.core.handle(Event::Deadline, now);
                }
                () = sleep_until(counters.unwrap_or_else(Instant::now)), if counters.is_some() => {}
                _ = look_around.tick() => self.look_around(),
            }
            self.deliver();
            self.answer_status();
        }
    }

    fn obey(&mut self, command: Command) {
        let now = self.now();
        match command {
            Command::Register { client, identity, process, register, frames } => {
                self.frames.insert(client, frames);
                self.processes.extend(process.map(|process| (client, process)));
                // What it says of itself is not asked for: another's memory would be taken for its own.
                self.pids.extend(identity.pid.map(|pid| (client, pid)));
                self.core.handle(Event::Registered { client, identity, register }, now);
                self.look_at_new_gpus();
            }
            Command::Message { client, message } => {
                if !self.frames.contains_key(&client) {
                    return;
                }
                if let ClientMessage::Counters(_) = message {
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
            Command::Looked { gpu, seen } => {
                self.nvml.answered(gpu);
                if let Some(seen) = seen {
                    let measured = self.attribute(gpu, seen);
                    self.core.handle(Event::Measured(measured), now);
                }
            }
            Command::Disconnected { client, process_remains } => {
                self.frames.remove(&client);
                if !process_remains {
                    self.pids.remove(&client);
                }
                self.core.handle(Event::Disconnected { client, process_remains }, now);
            }
            Command::Exited { client } => {
                self.pids.remove(&client);
                self.core.handle(Event::Exited { client }, now);
            }
            Command::Admin { request, answer } => self.administer(request, answer, now),
            Command::Look { viewer, answer } => self.wait_for_counters(Some(viewer), answer),
            Command::Configure(config) => {
                self.config = config;
                self.core.configure(self.store.over(&self.config), now);
                self.look_around();
            }
        }
    }

    /// Shows the state as soon as the clients' counters are there.
    fn wait_for_counters(&mut self, viewer: Option<Viewer>, answer: oneshot::Sender<Vec<Reply>>) {
        let clients = self.core.ask_counters().into_iter().collect();
        self.waiting.push(Waiting { viewer, clients, until: Instant::now() + COUNTERS_PATIENCE, answer });
    }

    fn administer(&mut self, request: AdminRequest, answer: oneshot::Sender<Vec<Reply>>, now: Time) {
        let outcome = match request {
            AdminRequest::Status => return self.wait_for_counters(None, answer),
            AdminRequest::SetQuantum { gpu, millis } => {
                let quantum = Duration::from_millis(millis);
                if !(MIN_QUANTUM..=MAX_QUANTUM).contains(&quantum) {
                    Err(format!("a quantum of {} s is out of range", quantum.as_secs_f64()))
                } else if let Some(gpu) = gpu.filter(|&gpu| !self.is_known(gpu)) {
                    Err(format!("unknown GPU {gpu}: this machine does not list it and no client has used it"))
                } else {
                    let text = self.core.set_quantum(gpu, quantum, now);
                    Ok(kept(text, self.store.set_quantum(gpu, quantum)))
                }
            }
            AdminRequest::On => {
                let text = self.core.switch_on(now);
                Ok(kept(text, self.store.set_scheduling(true)))
            }
            AdminRequest::Off { force } => {
                let text = self.core.switch_off(force, now);
                text.map(|text| kept(text, self.store.set_scheduling(false)))
            }
            AdminRequest::Reset => {
                let done = self.store.reset();
                self.core.configure(self.config.clone(), now);
                self.core.switch_on(now);
                let quantum = self.config.quantum.as_secs_f64();
                let text = format!("the configuration is in force: TQ {quantum} s, scheduling is on");
                Ok(kept(text, done))
            }
        };
        let reply = match outcome {
            Ok(text) => {
                info!("{text}");
                Reply::Admin(AdminReply::Done { text })
            }
            Err(reason) => Reply::Refused { reason },
        };
        let _ = answer.send(vec![reply]);
    }

    /// Answers administrators whose counters are there, or late.
    fn answer_status(&mut self) {
        let now = Instant::now();
        let ready = self.waiting.extract_if(.., |waiting| waiting.clients.is_empty() || waiting.until <= now);
        for waiting in ready {
            let mut scheduler = self.core.status(self.started.elapsed(), std::process::id());
            let mut clients = self.core.client_status();
            self.processes.retain(|id, _| clients.iter().any(|row| row.client == *id));
            for row in &mut clients {
                row.process = self.processes.get(&row.client).cloned();
            }
            let mut gpus = self.core.gpu_status();
            let config = self.store.over(&self.config);
            let idle = |gpu| GpuStatus {
                quantum_ms: config.quantum(gpu).as_millis() as u64,
                ..GpuStatus::idle(gpu)
            };
            view::list_all(&mut gpus, &gpus::list(&self.gpu_descriptions), idle);
            if let Some(viewer) = &waiting.viewer {
                scheduler.restricted = true;
                view::restrict(viewer, &mut gpus, &mut clients);
            }
            let rows = std::iter::once(AdminReply::Scheduler(scheduler))
                .chain(gpus.into_iter().map(AdminReply::Gpu))
                .chain(clients.into_iter().map(|row| AdminReply::Client(Box::new(row))))
                .chain(std::iter::once(AdminReply::End));
            let _ = waiting.answer.send(rows.map(Reply::Admin).collect());
        }
    }

    /// Whether a client has used a GPU, or the machine lists it.
    fn is_known(&self, gpu: GpuUuid) -> bool {
        self.core.gpu_status().iter().any(|row| row.gpu == gpu)
            || gpus::list(&self.gpu_descriptions).iter().any(|listed| listed.gpu == gpu)
    }

    /// Sends what the core has for clients, and logs what it has for administrators.
    fn deliver(&mut self) {
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
        if frames.try_send(Reply::Client(message)).is_err() {
            warn!("client {client} does not read; it is cut off");
            // Its task ends with its channel, and says that it is gone.
            self.frames.remove(&client);
        }
    }

    /// GPUs that clients use from now on.
    fn look_at_new_gpus(&mut self) {
        let in_use = self.core.gpus_in_use();
        for &gpu in in_use.difference(&self.gpus) {
            if self.config.fixed_memory(gpu).is_none() {
                self.nvml.ask(gpu);
            }
        }
        self.gpus = in_use;
    }

    fn look_around(&mut self) {
        self.gpus.clear();
        self.look_at_new_gpus();
    }

    /// Whose memory it is that NVML has seen. Who registers after NVML was asked, or has gone and not ended yet, is no
    /// stranger.
    fn attribute(&self, gpu: GpuUuid, mut seen: Seen) -> Measured {
        // A process that has come back is a client for each time; the last of them lives.
        let last_first = self.pids.iter().rev();
        let used = last_first.filter_map(|(&client, pid)| Some((client, seen.used.remove(pid)?))).collect();
        let strangers = seen.used.into_values().fold(0, u64::saturating_add);
        Measured { gpu, available: seen.total.saturating_sub(strangers), used }
    }
}

/// What was done, and whether it survives a restart of the scheduler.
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
