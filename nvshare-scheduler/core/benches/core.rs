//! The cost of events, in worlds of up to 1,000 clients. Prints a table: `cargo bench -p nvshare-core --bench core`; with ` -- NAME`, only the
//! worlds whose names contain NAME.
//!
//! Clients answer at once. A tick of virtual time passes between events, so that turns begin and end.

#![expect(clippy::disallowed_methods, reason = "what is measured here is time")]

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use nvshare_core::{Config, Core, Event, Gang, Identity, Measured, Output};
use nvshare_proto::{
    Amount, ClientMessage, ComputeLimit, Epoch, Gate, GpuUuid, MemoryMode, Register, SchedulerMessage, Usage,
    Wishes,
};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
const CAPACITY: u64 = 16 * GIB;

fn gpu(n: u64) -> GpuUuid {
    GpuUuid([n as u8; 16])
}

/// The clients of a world.
#[derive(Debug, Clone, Copy)]
struct Shape {
    clients: u64,
    /// GPUs in all, and of each client.
    gpus: u64,
    each: u64,
    /// Bytes of each client on each of its GPUs.
    bytes: u64,
    /// Members of each gang; 0: there are none.
    gang: u64,
    /// They are one job.
    one_job: bool,
    /// Compute limits that each asks for.
    limits: u64,
    /// A client that runs gives the lock back after a while, and asks for it again.
    restless: bool,
}

const DEFAULT_SHAPE: Shape = Shape {
    clients: 1000,
    gpus: 8,
    each: 1,
    bytes: 64 * MIB,
    gang: 0,
    one_job: false,
    limits: 0,
    restless: false,
};

struct World {
    core: Core,
    now: Duration,
    tick: Duration,
    shape: Shape,
    resident: BTreeMap<(u64, u64), u64>,
    holds: BTreeMap<u64, Epoch>,
    pending: VecDeque<(u64, ClientMessage)>,
    /// The time of each event in nanoseconds, and its steps, by the event.
    times: BTreeMap<&'static str, Vec<(u32, u64)>>,
    granted: usize,
}

impl World {
    fn new(shape: Shape, tick: Duration) -> Self {
        let config = Config {
            gpu_memory: Some(CAPACITY),
            quantum: Duration::from_millis(50),
            grace: Duration::from_secs(3600),
            ..Config::default()
        };
        Self {
            core: Core::new(config),
            now: Duration::ZERO,
            tick,
            shape,
            resident: BTreeMap::new(),
            holds: BTreeMap::new(),
            pending: VecDeque::new(),
            times: BTreeMap::new(),
            granted: 0,
        }
    }

    fn gpus_of(&self, client: u64) -> impl Iterator<Item = u64> + use<> {
        let Shape { gpus, each, .. } = self.shape;
        (0..each).map(move |n| (client + n) % gpus)
    }

    fn usage(&self, client: u64, on: u64, bytes: u64) -> Usage {
        let resident = self.resident.get(&(client, on)).copied().unwrap_or(0);
        Usage {
            gpu: gpu(on),
            total: CAPACITY,
            limit: 0,
            allocated: bytes,
            absent: bytes - resident.min(bytes),
            immovable: 0,
        }
    }

    fn says_usage(&mut self, client: u64, on: u64) {
        let usage = self.usage(client, on, self.shape.bytes);
        self.pending.push_back((client, ClientMessage::Usage(usage)));
    }

    fn register(&mut self, client: u64) {
        let Shape { bytes, gang, one_job, limits, .. } = self.shape;
        let limit = |n: u64| {
            let mut of = [0; 16];
            of[..8].copy_from_slice(&n.to_le_bytes());
            ComputeLimit { gpu: GpuUuid(of), percent: 50 }
        };
        let register = Register {
            pid: client as u32,
            name: "bench".into(),
            memory: MemoryMode::Managed,
            gate: Gate::Closed,
            returns: false,
            run: None,
            usage: self.gpus_of(client).map(|on| self.usage(client, on, bytes)).collect(),
            asked: Wishes { compute: (1..=limits).map(limit).collect(), ..Wishes::default() },
        };
        let identity = Identity {
            pid: Some(client as u32),
            process: Some(client),
            tenant: one_job.then_some(1),
            gang: client.checked_div(gang).map(|number| Gang { number, size: 0 }),
        };
        self.event("register", Event::Registered { client, identity, register });
    }

    fn register_all(&mut self) {
        for client in 0..self.shape.clients {
            self.register(client);
        }
        for client in 0..self.shape.clients {
            self.pending.push_back((client, ClientMessage::ReqLock));
        }
    }

    fn leaves(&mut self, client: u64) {
        self.resident.retain(|(of, _), _| *of != client);
        self.holds.remove(&client);
        self.pending.retain(|(of, _)| *of != client);
        self.event("disconnect", Event::Disconnected { client, process_remains: false });
    }

    fn event(&mut self, name: &'static str, event: Event) {
        self.now += self.tick;
        let begin = Instant::now();
        self.core.handle(event, self.now);
        let took = u32::try_from(begin.elapsed().as_nanos()).unwrap_or(u32::MAX);
        self.times.entry(name).or_default().push((took, self.core.steps()));
        self.answer();
    }

    /// Every client does at once what the scheduler tells it.
    fn answer(&mut self) {
        while let Some(output) = self.core.poll_output() {
            let Output::Send { client, message } = output else { continue };
            match message {
                SchedulerMessage::LockOk { epoch, .. } => {
                    self.granted += 1;
                    self.holds.insert(client, epoch);
                    self.pending.push_back((client, ClientMessage::Running { epoch }));
                    for on in self.gpus_of(client) {
                        self.resident.insert((client, on), self.shape.bytes);
                        self.says_usage(client, on);
                    }
                }
                SchedulerMessage::DropLock { epoch, .. } => self.gives_back(client, epoch),
                SchedulerMessage::Evict(Amount { gpu: uuid, bytes }) => {
                    let on = u64::from(uuid.0[0]);
                    let resident = self.resident.entry((client, on)).or_default();
                    *resident = resident.saturating_sub(bytes);
                    self.says_usage(client, on);
                    self.pending.push_back((client, ClientMessage::Room(Amount { gpu: uuid, bytes })));
                    self.pending.push_back((client, ClientMessage::Evicted { gpu: uuid, short: 0 }));
                }
                _ => {}
            }
        }
    }

    fn gives_back(&mut self, client: u64, epoch: Epoch) {
        self.holds.remove(&client);
        let on = client % self.shape.gpus;
        self.says_usage(client, on);
        self.pending.push_back((client, ClientMessage::LockReleased { epoch }));
        self.pending.push_back((client, ClientMessage::ReqLock));
    }

    /// The next event: a deadline, an answer, or else something that a client does by itself, so that time passes.
    fn step(&mut self, n: u64) {
        if self.core.next_deadline().is_some_and(|deadline| deadline <= self.now) {
            return self.event("deadline", Event::Deadline);
        }
        if let Some((client, message)) = self.pending.pop_front() {
            let name = match message {
                ClientMessage::Running { .. } => "RUNNING",
                ClientMessage::LockReleased { .. } => "LOCK_RELEASED",
                ClientMessage::ReqLock => "REQ_LOCK",
                ClientMessage::Room(_) => "ROOM",
                ClientMessage::Evicted { .. } => "EVICTED",
                _ => "USAGE",
            };
            return self.event(name, Event::Message { client, message });
        }
        let client = n % self.shape.clients;
        if let Some(&epoch) = self.holds.get(&client).filter(|_| self.shape.restless) {
            return self.gives_back(client, epoch);
        }
        let usage = self.usage(client, client % self.shape.gpus, self.shape.bytes + n % 2 * MIB);
        self.event("USAGE", Event::Message { client, message: ClientMessage::Usage(usage) });
    }

    fn report(&self, what: &str) {
        let mut all: Vec<(u32, u64)> = self.times.values().flatten().copied().collect();
        row(what, &mut all);
        for (name, times) in &self.times {
            row(&format!("    {name}"), &mut times.clone());
        }
        println!("    {} grants", self.granted);
    }
}

/// A line about events: how many, microseconds each, and the most steps that one took.
fn row(what: &str, events: &mut [(u32, u64)]) {
    events.sort_unstable();
    let at = |part: f64| f64::from(events[((events.len() - 1) as f64 * part) as usize].0) / 1000.0;
    let sum: f64 = events.iter().map(|&(took, _)| f64::from(took)).sum::<f64>() / 1e9;
    println!(
        "{what:<44} {:>9} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>9.2} {:>8.2} {:>8}",
        events.len(),
        sum * 1e6 / events.len() as f64,
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0),
        sum,
        events.iter().map(|&(_, steps)| steps).max().unwrap_or(0)
    );
}

/// Events of a world, for this long at most: a row says how many there were.
const MAX_TIME: Duration = Duration::from_secs(4);

fn turns(shape: Shape, events: u64, what: &str) {
    let named = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    if named.is_some_and(|name| !what.contains(&name)) {
        return;
    }
    let mut world = World::new(shape, Duration::from_micros(20));
    let begin = Instant::now();
    world.register_all();
    for n in 0..events {
        world.step(n);
        if begin.elapsed() > MAX_TIME {
            break;
        }
    }
    world.report(what);
}

fn all_at_once() {
    let shape = Shape { gpus: 1, bytes: MIB, ..DEFAULT_SHAPE };
    let mut world = World::new(shape, Duration::from_micros(1));
    world.register_all();
    let begin = Instant::now();
    while !world.pending.is_empty() {
        world.step(0);
        if std::env::var_os("AUDIT").is_some() {
            world.core.audit().unwrap_or_else(|wrong| panic!("{} granted: {}", world.granted, &wrong[..600]));
        }
    }
    world.report("1000 small clients that ask at once");
    println!(
        "1000 small clients that ask at once: {} granted in {:.1} ms",
        world.granted,
        begin.elapsed().as_secs_f64() * 1e3
    );
}

/// Processes of one job come and go, each of which asks for many limits.
fn limits() {
    let shape = Shape { clients: 500, gpus: 1, bytes: MIB, one_job: true, limits: 3500, ..DEFAULT_SHAPE };
    let mut world = World::new(shape, Duration::from_micros(20));
    let begin = Instant::now();
    world.register_all();
    for n in 0..2000 {
        world.leaves(n % shape.clients);
        world.register(n % shape.clients);
        if begin.elapsed() > MAX_TIME {
            break;
        }
    }
    world.report("500 clients of a job, 3500 limits each");
}

fn switches() {
    let mut world = World::new(DEFAULT_SHAPE, Duration::from_micros(20));
    for client in 0..1000 {
        world.register(client);
        world.event("REQ_LOCK", Event::Message { client, message: ClientMessage::ReqLock });
    }
    let timed = |name: &str, begin: Instant| {
        println!("{name:<44} {:>8.2} µs a client", begin.elapsed().as_secs_f64() * 1e6 / 1000.0);
    };
    let begin = Instant::now();
    let _ = world.core.switch_off(true, world.now);
    timed("off, 1000 clients", begin);
    world.answer();
    let begin = Instant::now();
    world.core.switch_on(world.now);
    timed("on, 1000 clients", begin);
    world.answer();
    let begin = Instant::now();
    for n in 0..8 {
        let used = BTreeMap::new();
        let measured = Measured { gpu: gpu(n), asked_at: world.now, available: 15 * GIB, used };
        world.core.handle(Event::Measured(measured), world.now);
    }
    timed("a look of NVML at each of 8 GPUs", begin);
}

fn main() {
    // `cargo bench -- --test` and the like run a little of everything.
    let events = if std::env::args().any(|arg| arg == "--test") { 20_000 } else { 1_000_000 };
    println!(
        "{:<44} {:>9} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8} {:>8}",
        "µs an event", "events", "mean", "median", "p99", "p99.9", "max", "sum s", "steps"
    );
    turns(DEFAULT_SHAPE, events, "1000 clients, 8 GPUs, all fit");
    turns(Shape { bytes: 12 * GIB, ..DEFAULT_SHAPE }, events, "1000 clients, 8 GPUs, 12 GiB each");
    turns(Shape { bytes: GIB, ..DEFAULT_SHAPE }, events, "1000 clients, 8 GPUs, 1 GiB each");
    turns(
        Shape { clients: 200, bytes: 12 * GIB, ..DEFAULT_SHAPE },
        events,
        "200 clients, 8 GPUs, 12 GiB each",
    );
    all_at_once();
    switches();
    limits();
    let wide = Shape { clients: 200, each: 8, restless: true, ..DEFAULT_SHAPE };
    let events = events / 10;
    turns(wide, events, "200 clients on each of 8 GPUs, all fit");
    turns(Shape { bytes: 12 * GIB, ..wide }, events, "200 clients on each of 8 GPUs, 12 GiB each");
    turns(Shape { bytes: GIB, ..wide }, events, "200 clients on each of 8 GPUs, 1 GiB each");
    let invented = Shape { gpus: 64, each: 64, ..wide };
    turns(Shape { bytes: MIB, ..invented }, events, "200 clients on each of 64 GPUs, all fit");
    turns(Shape { bytes: 12 * GIB, ..invented }, events, "200 clients on each of 64 GPUs, 12 GiB each");
    let ranks = Shape { clients: 64, gpus: 64, gang: 64, restless: true, ..DEFAULT_SHAPE };
    turns(ranks, events, "a gang of 64, a GPU each, fits");
    let two = Shape { clients: 128, bytes: 12 * GIB, ..ranks };
    turns(two, events, "two gangs of 64, a GPU each, 12 GiB each");
    turns(Shape { each: 64, bytes: MIB, ..ranks }, events, "a gang of 64 on each of 64 GPUs, fits");
}
