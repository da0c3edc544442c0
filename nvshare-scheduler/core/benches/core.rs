//! The cost of events, in worlds of up to 1,000 clients. Prints a table: `cargo bench -p nvshare-core`.
//!
//! Clients answer at once. A tick of virtual time passes between events, so that turns begin and end.

#![expect(clippy::disallowed_methods, reason = "what is measured here is time")]

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use nvshare_core::{Config, Core, Event, Identity, Measured, Output};
use nvshare_proto::{
    Asked, ClientMessage, Gate, GpuUuid, MemoryMode, Register, Room, SchedulerMessage, Usage,
};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
const CAPACITY: u64 = 16 * GIB;

fn gpu(n: u64) -> GpuUuid {
    GpuUuid([n as u8; 16])
}

struct World {
    core: Core,
    now: Duration,
    tick: Duration,
    bytes: u64,
    gpus: u64,
    resident: BTreeMap<u64, u64>,
    pending: VecDeque<(u64, ClientMessage)>,
    /// What each event took, in nanoseconds, and its steps, by the event.
    times: BTreeMap<&'static str, Vec<(u32, u64)>>,
    granted: usize,
}

impl World {
    fn new(gpus: u64, bytes: u64, tick: Duration) -> Self {
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
            bytes,
            gpus,
            resident: BTreeMap::new(),
            pending: VecDeque::new(),
            times: BTreeMap::new(),
            granted: 0,
        }
    }

    fn usage(&self, client: u64, bytes: u64) -> Usage {
        let resident = self.resident.get(&client).copied().unwrap_or(0);
        let gpu = gpu(client % self.gpus);
        Usage {
            gpu,
            total: CAPACITY,
            limit: 0,
            allocated: bytes,
            absent: bytes - resident.min(bytes),
            immovable: 0,
        }
    }

    fn register(&mut self, client: u64) {
        let register = Register {
            pid: client as u32,
            name: "bench".into(),
            memory: MemoryMode::Managed,
            gate: Gate::Closed,
            returns: false,
            run: None,
            usage: vec![self.usage(client, self.bytes)],
            asked: Asked::default(),
        };
        let identity = Identity { pid: Some(client as u32), process: Some(client), tenant: None, gang: None };
        self.event("register", Event::Registered { client, identity, register });
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
            let uuid = gpu(client % self.gpus);
            match message {
                SchedulerMessage::LockOk { epoch, .. } => {
                    self.granted += 1;
                    self.resident.insert(client, self.bytes);
                    self.pending.push_back((client, ClientMessage::Running { epoch }));
                    self.pending.push_back((client, ClientMessage::Usage(self.usage(client, self.bytes))));
                }
                SchedulerMessage::DropLock { epoch, .. } => {
                    self.pending.push_back((client, ClientMessage::Usage(self.usage(client, self.bytes))));
                    self.pending.push_back((client, ClientMessage::LockReleased { epoch }));
                    self.pending.push_back((client, ClientMessage::ReqLock));
                }
                SchedulerMessage::Evict(Room { bytes, .. }) => {
                    let resident = self.resident.entry(client).or_default();
                    *resident = resident.saturating_sub(bytes);
                    self.pending.push_back((client, ClientMessage::Usage(self.usage(client, self.bytes))));
                    self.pending.push_back((client, ClientMessage::Room(Room { gpu: uuid, bytes })));
                    self.pending.push_back((client, ClientMessage::Evicted { gpu: uuid, short: 0 }));
                }
                _ => {}
            }
        }
    }

    /// The next event: a deadline, an answer, or else a client's usage, so that time passes.
    fn step(&mut self, n: u64, clients: u64) {
        if self.core.next_deadline().is_some_and(|deadline| deadline <= self.now) {
            return self.event("deadline", Event::Deadline);
        }
        match self.pending.pop_front() {
            Some((client, message)) => {
                let name = match message {
                    ClientMessage::Running { .. } => "RUNNING",
                    ClientMessage::LockReleased { .. } => "LOCK_RELEASED",
                    ClientMessage::ReqLock => "REQ_LOCK",
                    ClientMessage::Room(_) => "ROOM",
                    ClientMessage::Evicted { .. } => "EVICTED",
                    _ => "USAGE",
                };
                self.event(name, Event::Message { client, message });
            }
            None => {
                let client = n % clients;
                let usage = self.usage(client, self.bytes + n % 2 * MIB);
                self.event("USAGE", Event::Message { client, message: ClientMessage::Usage(usage) });
            }
        }
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
        "{what:<44} {:>9} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8}",
        events.len(),
        sum * 1e6 / events.len() as f64,
        at(0.5),
        at(0.99),
        at(0.999),
        sum,
        events.iter().map(|&(_, steps)| steps).max().unwrap_or(0)
    );
}

fn turns(clients: u64, gpus: u64, bytes: u64, events: u64, what: &str) {
    let mut world = World::new(gpus, bytes, Duration::from_micros(20));
    for client in 0..clients {
        world.register(client);
    }
    for client in 0..clients {
        world.pending.push_back((client, ClientMessage::ReqLock));
    }
    for n in 0..events {
        world.step(n, clients);
    }
    world.report(what);
}

fn all_at_once() {
    let mut world = World::new(1, MIB, Duration::from_micros(1));
    for client in 0..1000 {
        world.register(client);
    }
    for client in 0..1000 {
        world.pending.push_back((client, ClientMessage::ReqLock));
    }
    let begin = Instant::now();
    while !world.pending.is_empty() {
        world.step(0, 1000);
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

fn switches() {
    let mut world = World::new(8, 64 * MIB, Duration::from_micros(20));
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
        world.core.handle(Event::Measured(Measured { gpu: gpu(n), available: 15 * GIB, used }), world.now);
    }
    timed("a look of NVML at each of 8 GPUs", begin);
}

fn main() {
    // `cargo bench -- --test` and the like run a little of everything.
    let events = if std::env::args().any(|arg| arg == "--test") { 20_000 } else { 1_000_000 };
    println!(
        "{:<44} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
        "µs an event", "events", "mean", "median", "p99", "p99.9", "sum s", "steps"
    );
    turns(1000, 8, 64 * MIB, events, "1000 clients, 8 GPUs, all fit");
    turns(1000, 8, 12 * GIB, events, "1000 clients, 8 GPUs, 12 GiB each");
    turns(1000, 8, GIB, events, "1000 clients, 8 GPUs, 1 GiB each");
    turns(200, 8, 12 * GIB, events, "200 clients, 8 GPUs, 12 GiB each");
    all_at_once();
    switches();
}
