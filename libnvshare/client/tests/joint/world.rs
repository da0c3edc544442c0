//! Processes and a core, and the messages between them, in virtual time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use nvshare_client::Session;
use nvshare_client::account::DeviceFacts;
use nvshare_core::{Config, Core, Event, Identity, Output};
use nvshare_proto::{ClientMessage, Gate, GpuUuid, Register, SchedulerMessage, TenantSettings, Usage};

use crate::agenda::{Later, Planned};
use crate::follower::Follower;
use crate::library::{GateState, Library};
use crate::mover::Lane;
use crate::plan::Plan;
use crate::program::Program;
use crate::returned::Returned;

pub(crate) const CAPACITY: u64 = 16 << 30;
pub(crate) const GIB: u64 = 1 << 30;
pub(crate) const MS: fn(u64) -> Duration = Duration::from_millis;
/// The most GPUs that a world has.
pub(crate) const GPUS: u8 = 4;

pub(crate) fn gpu(n: u8) -> GpuUuid {
    GpuUuid([n; 16])
}

pub(crate) fn config(exclusive: bool) -> Config {
    Config { quantum: MS(1000), gpu_memory: Some(CAPACITY), exclusive, ..Config::default() }
}

/// A connection of a process to the scheduler.
#[derive(Debug)]
struct Connection {
    process: usize,
    is_open: bool,
    /// When each direction delivers next: messages keep their order.
    up: Duration,
    down: Duration,
}

#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) plan: Plan,
    pub(crate) session: Session,
    pub(crate) library: Library,
    pub(crate) program: Program,
    pub(crate) lanes: Vec<Lane>,
    /// Reports of the mover keep their order: none comes before this.
    pub(crate) reported_at: Duration,
    pub(crate) connection: Option<u64>,
    pub(crate) has_started: bool,
    /// Killed: it does nothing any more, and has its memory until it is gone.
    pub(crate) is_dying: bool,
    pub(crate) is_dead: bool,
    /// Until then it does nothing, since it is stopped.
    pub(crate) stopped_until: Duration,
    /// Its events until then, which come afterwards.
    put_off: Vec<Later>,
    /// It was refused room, and has had no grant since then.
    pub(crate) is_refused: bool,
    /// Its last grant called it back from leaving.
    pub(crate) is_recalled: bool,
    /// Bytes on each device that the core knows it has allocated: now, and when the core granted last.
    known: Vec<u64>,
    pub(crate) known_at_grant: Vec<u64>,
    /// Room that it has given back: see [`Returned`].
    pub(crate) returned: Returned,
    has_registered: bool,
    /// Its connection, or the last one that it had.
    pub(crate) client: Option<u64>,
    /// The tick that counts, and when it is.
    tick: (u64, Option<Duration>),
}

impl Process {
    pub(crate) fn is_over(&self) -> bool {
        !self.has_started || self.is_dying || self.is_dead
    }

    /// Whether it runs without a scheduler, before it registers.
    pub(crate) fn was_there(&self) -> bool {
        self.plan.runs_already && !self.has_registered
    }

    /// The core is told what it has on a device.
    fn knows(&mut self, usage: &Usage) {
        if let Some(device) = self.library.devices.iter().position(|device| device.gpu == usage.gpu) {
            self.known[device] = usage.allocated;
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        !self.is_over() && self.library.runs()
    }
}

pub(crate) struct World {
    pub(crate) core: Core,
    pub(crate) processes: Vec<Process>,
    connections: Vec<Connection>,
    pub(crate) now: Duration,
    agenda: BinaryHeap<Reverse<Planned>>,
    sequence: u64,
    seed: u64,
    pub(crate) config: Config,
    is_up: bool,
    /// The scheduler was killed: processes that ran alone may have more on a card than it holds.
    pub(crate) was_killed: bool,
    /// A client that is no process of this world and never answers.
    pub(crate) silent: Option<u64>,
    trace: bool,
    pub(crate) notes: Vec<String>,
    pub(crate) follower: Follower,
}

impl World {
    pub(crate) fn new(plans: Vec<Plan>, config: Config, seed: u64) -> Self {
        Self::with_limit(plans, config, seed, None)
    }

    /// A world whose GPUs are measured. No process may allocate more than is there for the largest at any time.
    pub(crate) fn measured(plans: Vec<Plan>, seed: u64) -> Self {
        let config = Config { gpu_memory: None, reserve: Some(GIB / 2), ..config(false) };
        Self::with_limit(plans, config, seed, Some(12 * GIB))
    }

    /// A world in which each process has a limit of its own.
    fn with_limit(plans: Vec<Plan>, config: Config, seed: u64, limit: Option<u64>) -> Self {
        let mut world = Self {
            core: Core::new(config.clone()),
            config,
            is_up: true,
            was_killed: false,
            processes: Vec::new(),
            connections: Vec::new(),
            now: Duration::ZERO,
            agenda: BinaryHeap::new(),
            sequence: 0,
            seed: seed | 1,
            silent: None,
            trace: false,
            notes: Vec::new(),
            follower: Follower::default(),
        };
        for (i, plan) in plans.into_iter().enumerate() {
            if plan.after.is_none() {
                world.at(MS(plan.starts_at), Later::Start(i));
            }
            if let Some(dies) = plan.dies_at {
                world.at(MS(dies), Later::Die(i));
            }
            if let Some((number, at)) = plan.shares {
                world.at(MS(at), Later::Shares(i, number));
            }
            if let Some(at) = plan.closes_at {
                world.at(MS(at), Later::Closes(i));
            }
            let terms =
                |&gpu| DeviceFacts { gpu, total: CAPACITY, limit, is_of_seat: false, oversubscribe: false };
            let lanes = if plan.gpus.len() > 1 { 1 + plan.gpus.len() } else { 1 };
            world.processes.push(Process {
                session: Session::new(Duration::ZERO),
                library: Library::new(plan.gpus.iter().map(terms)),
                program: Program::new(&plan),
                lanes: (0..lanes).map(|_| Lane::default()).collect(),
                reported_at: Duration::ZERO,
                connection: None,
                has_started: false,
                is_dying: false,
                is_dead: false,
                stopped_until: Duration::ZERO,
                put_off: Vec::new(),
                is_refused: false,
                is_recalled: false,
                known: vec![0; plan.gpus.len()],
                known_at_grant: vec![0; plan.gpus.len()],
                returned: Returned::default(),
                has_registered: false,
                client: None,
                tick: (0, None),
                plan,
            });
        }
        world
    }

    pub(crate) fn random(&mut self, below: u64) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed % below.max(1)
    }

    pub(crate) fn at(&mut self, time: Duration, what: Later) {
        self.sequence += 1;
        self.agenda.push(Reverse(Planned(time, self.sequence, what)));
    }

    /// The process that does something; none: others do.
    fn doer(&self, what: &Later) -> Option<usize> {
        let process = match what {
            Later::Start(i) | Later::Connect(i) | Later::Done(i, _) => *i,
            Later::Shares(i, _) | Later::Closes(i) => *i,
            Later::Move(i, ..) | Later::Program(i, _) | Later::Tick(i, _) => *i,
            Later::Deliver(connection, _) => self.connections[*connection as usize].process,
            _ => return None,
        };
        Some(process)
    }

    /// One function, as it is the list of all things that happen: one arm for each.
    fn happen(&mut self, what: Later) {
        if let Some(i) = self.doer(&what)
            && self.processes[i].stopped_until > self.now
        {
            return self.processes[i].put_off.push(what);
        }
        match what {
            Later::Stop(i, lasts, seen) => {
                let until = self.processes[i].stopped_until.max(self.now + MS(lasts));
                self.processes[i].stopped_until = until;
                self.at(until, Later::GoOn(i));
                seen.into_iter().for_each(|seen| self.at(self.now + MS(seen), Later::Look(i)));
            }
            // It was stopped once more.
            Later::GoOn(i) if self.processes[i].stopped_until > self.now => {}
            Later::GoOn(i) => {
                for what in std::mem::take(&mut self.processes[i].put_off) {
                    self.at(self.now, what);
                }
            }
            Later::Look(i) => {
                let stopped = self.processes[i].stopped_until > self.now;
                if let Some(client) = self.processes[i].connection.filter(|_| self.is_up) {
                    self.event(Event::Stopped { client, stopped });
                }
                if stopped {
                    self.at(self.now + MS(1000), Later::Look(i));
                }
            }
            Later::Start(i) => self.start(i),
            Later::Connect(i) => self.connect(i),
            Later::Die(i) => {
                if !self.processes[i].is_over() {
                    self.processes[i].is_dead = self.processes[i].connection.is_none();
                    self.disconnect(i, true);
                    self.processes[i].is_dying = true;
                }
            }
            Later::Shares(i, _) | Later::Closes(i) => {
                let shared = if let Later::Shares(_, number) = what { Some(number) } else { None };
                self.processes[i].library.shares = shared.into_iter().collect();
                if !self.processes[i].is_over() {
                    self.tell(i, |session, library, now| session.look(library, now));
                }
            }
            Later::Exited(client) => {
                let process = self.connections[client as usize].process;
                self.processes[process].is_dead = true;
                let identity = Identity { process: Some(process as u64), ..Identity::default() };
                self.event(Event::Exited { client, identity });
            }
            Later::Disconnected { connection, process_remains } => {
                let process = self.connections[connection as usize].process;
                if self.processes[process].is_dying {
                    let gone = self.now + Duration::from_micros(100 + self.random(50_000));
                    self.at(gone, Later::Exited(connection));
                }
                if std::mem::take(&mut self.connections[connection as usize].is_open) {
                    self.event(Event::Disconnected { client: connection, process_remains });
                }
            }
            Later::Registers(connection, register) => {
                if self.connections[connection as usize].is_open {
                    let i = self.connections[connection as usize].process;
                    register.usage.iter().for_each(|usage| self.processes[i].knows(usage));
                    let identity = Identity {
                        pid: Some(register.pid),
                        process: Some(i as u64),
                        tenant: self.processes[i].plan.tenant,
                        gang: self.processes[i].plan.gang,
                    };
                    self.event(Event::Registered { client: connection, identity, register: *register });
                }
            }
            Later::Says(connection, message) => {
                let Connection { is_open, process, .. } = self.connections[connection as usize];
                if is_open {
                    self.processes[process].returned.hear(&message);
                    if let ClientMessage::Usage(usage) = &message {
                        self.processes[process].knows(usage);
                    }
                    self.event(Event::Message { client: connection, message });
                }
            }
            Later::Deliver(connection, message) => {
                let i = self.connections[connection as usize].process;
                if self.processes[i].connection == Some(connection) {
                    match &message {
                        SchedulerMessage::LockOk { room, .. } => {
                            self.processes[i].is_recalled = room.is_empty();
                            self.processes[i].is_refused &= room.is_empty();
                            self.processes[i].returned.grant_arrives();
                        }
                        SchedulerMessage::NoRoom { .. } => self.processes[i].is_refused = true,
                        _ => {}
                    }
                    self.check_message(i, &message);
                    self.tell(i, |session, library, now| session.hear(library, message, now));
                }
            }
            Later::Done(i, done) => {
                if !self.processes[i].is_over() {
                    self.tell(i, |session, library, now| session.done(library, done, now));
                }
            }
            Later::Move(i, lane, planned) => {
                let process = &mut self.processes[i];
                if !process.is_over() && process.lanes[lane].planned == planned {
                    process.library.now = self.now;
                    self.go_on(i, lane);
                }
            }
            Later::Program(i, planned) => {
                if self.processes[i].program.planned == planned && !self.processes[i].is_over() {
                    self.processes[i].library.now = self.now;
                    if self.advance(i) {
                        self.tell(i, |_, _, _| ());
                    } else {
                        self.settle(i);
                    }
                }
            }
            Later::Tick(i, number) => {
                if self.processes[i].tick.0 == number && !self.processes[i].is_over() {
                    self.tell(i, |_, _, _| ());
                }
            }
            Later::Measure(measured) => self.event(Event::Measured(measured)),
            Later::Restart(down) => self.restart(down),
            Later::IsUp => self.is_up = true,
        }
    }

    /// The scheduler is killed, and another starts after `down` milliseconds.
    fn restart(&mut self, down: u64) {
        (self.is_up, self.was_killed) = (false, true);
        let boot = self.config.boot + 1;
        self.config = Config { boot, restarted: true, settle: MS(1300), ..self.config.clone() };
        self.core = Core::new(self.config.clone());
        self.follower = Follower::default();
        self.at(self.now + MS(down), Later::IsUp);
        self.connections.iter_mut().for_each(|connection| connection.is_open = false);
        for i in 0..self.processes.len() {
            let process = &mut self.processes[i];
            if process.connection.take().is_some() {
                process.library.is_connected = false;
                self.tell(i, Session::lost);
                self.at(self.now + MS(100), Later::Connect(i));
            }
            // Nobody waits for the end of a process that the scheduler does not know.
            self.processes[i].is_dead |= self.processes[i].is_dying;
        }
    }

    fn start(&mut self, i: usize) {
        self.processes[i].has_started = true;
        if self.processes[i].plan.runs_already {
            self.tell(i, Session::found_nobody);
        }
        self.connect(i);
    }

    fn connect(&mut self, i: usize) {
        if self.processes[i].is_over() || self.processes[i].connection.is_some() {
            return;
        }
        if !self.is_up {
            self.tell(i, Session::found_nobody);
            self.at(self.now + MS(1000), Later::Connect(i));
            return;
        }
        let connection = self.connections.len() as u64;
        let open = Connection { process: i, is_open: true, up: self.now, down: self.now };
        self.connections.push(open);
        let process = &mut self.processes[i];
        process.returned = Returned::default();
        (process.connection, process.client) = (Some(connection), Some(connection));
        process.library.is_connected = true;
        process.library.now = self.now;
        let (gate, usage) = process.session.register(&mut process.library, self.now);
        let register = Register {
            pid: 1000 + i as u32,
            name: format!("program{i}"),
            memory: process.plan.memory,
            gate,
            returns: std::mem::replace(&mut process.has_registered, true),
            run: None,
            asked: process.plan.asked.clone(),
            usage,
        };
        // A process that runs already was there before its scheduler, and is the first to be known.
        let is_first = gate == Gate::Open && connection == 0;
        let time = if is_first { self.now } else { self.channel(connection, true) };
        self.at(time, Later::Registers(connection, Box::new(register)));
        self.tell(i, |_, _, _| ());
    }

    /// The connection of a process ends.
    pub(crate) fn disconnect(&mut self, i: usize, process_remains: bool) {
        let Some(connection) = self.processes[i].connection.take() else { return };
        self.processes[i].library.is_connected = false;
        // Its earlier messages are read first.
        let time = self.channel(connection, true);
        self.at(time, Later::Disconnected { connection, process_remains });
    }

    /// The connection of a process breaks, and it comes back.
    pub(crate) fn break_connection(&mut self, i: usize) {
        if self.processes[i].connection.is_some() {
            self.disconnect(i, true);
            self.tell(i, Session::lost);
            self.at(self.now + MS(100), Later::Connect(i));
        }
    }

    /// When a message arrives that is sent now. `up`: to the scheduler.
    fn channel(&mut self, connection: u64, up: bool) -> Duration {
        let delay = Duration::from_micros(20 + self.random(200));
        let connection = &mut self.connections[connection as usize];
        let before = if up { &mut connection.up } else { &mut connection.down };
        *before = (self.now + delay).max(*before);
        *before
    }

    /// Tells a process's session something, and has it look.
    fn tell<T>(&mut self, i: usize, what: impl FnOnce(&mut Session, &mut Library, Duration) -> T) -> T {
        let now = self.now;
        let process = &mut self.processes[i];
        process.library.now = now;
        let told = what(&mut process.session, &mut process.library, now);
        process.session.look(&mut process.library, now);
        self.settle(i);
        told
    }

    /// Carries out what a process's session has ordered and said, until nothing follows from it.
    fn settle(&mut self, i: usize) {
        loop {
            let said = std::mem::take(&mut self.processes[i].library.said);
            if let Some(connection) = self.processes[i].connection {
                for message in said {
                    if self.trace {
                        println!("{:?} process {i} says {message:?}", self.now);
                    }
                    self.processes[i].returned.say(&message);
                    let time = self.channel(connection, true);
                    self.at(time, Later::Says(connection, message));
                }
            }
            if std::mem::take(&mut self.processes[i].library.reconnects) {
                self.disconnect(i, true);
                self.at(self.now + MS(1), Later::Connect(i));
            }
            self.start_lanes(i);
            if !self.advance(i) {
                break;
            }
            let process = &mut self.processes[i];
            process.session.look(&mut process.library, self.now);
        }
        self.plan_tick(i);
    }

    /// Plans the next time that the session looks though nothing happens.
    fn plan_tick(&mut self, i: usize) {
        let process = &mut self.processes[i];
        let every = process.session.next_look(&process.library, self.now).filter(|_| !process.is_over());
        let Some(every) = every else {
            process.tick = (process.tick.0 + 1, None);
            return;
        };
        let mut time = self.now + every;
        if let Some(since) = process.library.submits_since
            && process.library.gate != GateState::Closed
        {
            // While it submits something each millisecond, a look finds nothing but that.
            time = time.max(since + MS(100));
        }
        if process.tick.1.is_some_and(|planned| planned > self.now && planned <= time) {
            return;
        }
        process.tick = (process.tick.0 + 1, Some(time));
        let number = process.tick.0;
        self.at(time, Later::Tick(i, number));
    }

    pub(crate) fn event(&mut self, event: Event) {
        if self.trace {
            println!("{:?} {event:?}", self.now);
        }
        self.core.handle(event, self.now);
        while let Some(output) = self.core.poll_output() {
            if self.trace {
                println!("    {output:?}");
            }
            match output {
                Output::Send { client, .. } if Some(client) == self.silent => {}
                Output::Send { client, message } => {
                    let Connection { is_open, process, .. } = self.connections[client as usize];
                    if is_open {
                        if matches!(message, SchedulerMessage::LockOk { .. }) {
                            let process = &mut self.processes[process];
                            process.known_at_grant.clone_from(&process.known);
                            process.returned.grant_leaves();
                        }
                        let time = self.channel(client, false);
                        self.at(time, Later::Deliver(client, message));
                    }
                }
                Output::Log { text, .. } => self.notes.push(text),
                Output::Measure { .. } => {}
            }
        }
        self.follower.follow(&mut self.core);
        self.audit();
    }

    /// An administrator gives a process's tenant something.
    pub(crate) fn give(&mut self, i: usize, given: TenantSettings) -> String {
        self.try_to_give(i, given).expect("it is there")
    }

    /// The same, unless the process has not come or has gone.
    pub(crate) fn try_to_give(&mut self, i: usize, given: TenantSettings) -> Result<String, String> {
        let client = self.processes.get(i).and_then(|process| process.client);
        let client = client.ok_or("it has not registered")?;
        let told = self.core.give(client, None, given, self.now)?;
        self.follower.follow(&mut self.core);
        self.event(Event::Deadline);
        Ok(told)
    }

    /// Runs until nothing is left to happen, or time is over.
    pub(crate) fn run(&mut self, limit: Duration) {
        let mut events = 0;
        loop {
            events += 1;
            self.trace |= events > 1_999_980;
            assert!(
                events < 2_000_000,
                "one event follows another without end at {:?}: {:?}",
                self.now,
                self.core.client_status()
            );
            let next = self.agenda.peek().map(|Reverse(planned)| planned.0);
            let deadline = self.core.next_deadline();
            match (next, deadline) {
                (next, Some(deadline)) if next.is_none_or(|next| deadline < next) => {
                    if deadline > limit {
                        return;
                    }
                    self.now = self.now.max(deadline);
                    self.event(Event::Deadline);
                }
                (Some(next), _) if next <= limit => {
                    self.now = next;
                    if let Some(Reverse(Planned(_, _, what))) = self.agenda.pop() {
                        self.happen(what);
                    }
                }
                _ => return,
            }
            self.check();
        }
    }
}
