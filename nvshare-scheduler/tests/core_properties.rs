//! The core with clients that behave, that do not, and that die, in virtual time.
//!
//! A world of model clients answers the core's messages after delays drawn from a seed. After every event the
//! invariants are checked against what the clients *do*, not against what the core believes.

use std::collections::BTreeMap;
use std::time::Duration;

use nvshare_proto::{
    ClientMessage, Epoch, Gate, GpuUuid, Hold, MemoryMode, Register, Room, SchedulerMessage, Usage,
};
use nvshare_scheduler::core::{Config, Core, Event, Identity, Measured, Output};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

const CAPACITY: u64 = 16 << 30;
const GIB: u64 = 1 << 30;
const MS: fn(u64) -> Duration = Duration::from_millis;

fn gpu(n: u8) -> GpuUuid {
    GpuUuid([n; 16])
}

/// What a model client is doing.
#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    Parked,
    Restoring(Epoch),
    Running(Epoch),
    Draining(Epoch),
    /// Asked to leave before it ran.
    Withdrawing(Epoch),
    Idle(Epoch),
}

/// How a model client behaves.
#[derive(Debug, Clone)]
struct Plan {
    gpus: Vec<GpuUuid>,
    gib: u64,
    /// GPU time that it wants, in ms; 0: it only sits there.
    work: u64,
    /// It pauses for this long after each 100 ms of work.
    pause: u64,
    /// Allocates one more GiB every so many ms of work, up to the GPU's capacity.
    grows_every: Option<u64>,
    /// Every so many drains is deferred.
    defers_every: Option<u64>,
    /// Its work cannot be interrupted for so many ms: with less patience, its drain is deferred.
    drains_in: u64,
    /// Its host has no memory for evictions.
    cannot_evict: bool,
    /// It runs when it registers: it was there before its scheduler.
    runs_already: bool,
    starts_at: u64,
    dies_at: Option<u64>,
}

#[derive(Debug)]
struct Model {
    plan: Plan,
    state: State,
    connected: bool,
    dead: bool,
    allocated: u64,
    /// What it may have, as the scheduler says.
    capacity: BTreeMap<GpuUuid, u64>,
    resident: BTreeMap<GpuUuid, u64>,
    room: BTreeMap<GpuUuid, u64>,
    asked: bool,
    /// Its last grant called it back from leaving.
    recalled: bool,
    waiters: bool,
    needs: bool,
    served: Duration,
    since: Duration,
    drains: u64,
    paused_until: Duration,
    grown_at: Duration,
    wanted_since: Option<Duration>,
    longest_wait: Duration,
}

impl Model {
    fn may_grow(&self) -> bool {
        self.capacity.values().all(|&capacity| self.allocated + GIB <= capacity)
    }
}

/// Something that happens later.
#[derive(Debug, Clone)]
enum Later {
    Start(usize),
    Die(usize),
    Exited(usize),
    Deliver(usize, SchedulerMessage),
    Say(usize, ClientMessage),
    Restored(usize, Epoch),
    Drained(usize, Epoch),
    GivenUp(usize, Epoch),
    Work(usize),
    Measure(Measured),
}

struct World {
    core: Core,
    models: Vec<Model>,
    now: Duration,
    agenda: Vec<(Duration, u64, Later)>,
    sequence: u64,
    seed: u64,
    exclusive: bool,
    /// No model grows beyond this.
    most: u64,
    /// A client that is no model and never answers.
    silent: Option<u64>,
    notes: Vec<String>,
    /// When a channel delivers next: messages of one direction keep their order.
    busy: BTreeMap<(usize, bool), Duration>,
}

impl World {
    fn new(plans: Vec<Plan>, config: Config, seed: u64) -> Self {
        let exclusive = config.exclusive;
        let mut world = Self {
            core: Core::new(config),
            models: Vec::new(),
            now: Duration::ZERO,
            agenda: Vec::new(),
            sequence: 0,
            seed: seed | 1,
            exclusive,
            most: CAPACITY,
            silent: None,
            notes: Vec::new(),
            busy: BTreeMap::new(),
        };
        for (i, plan) in plans.into_iter().enumerate() {
            world.at(MS(plan.starts_at), Later::Start(i));
            if let Some(dies) = plan.dies_at {
                world.at(MS(dies), Later::Die(i));
            }
            let zero = |value| plan.gpus.iter().map(|&g| (g, value)).collect();
            world.models.push(Model {
                state: State::Parked,
                connected: false,
                dead: false,
                allocated: plan.gib * GIB,
                capacity: zero(CAPACITY),
                resident: zero(0),
                room: zero(0),
                asked: false,
                recalled: false,
                waiters: false,
                needs: false,
                served: Duration::ZERO,
                since: Duration::ZERO,
                drains: 0,
                paused_until: Duration::ZERO,
                grown_at: Duration::ZERO,
                wanted_since: None,
                longest_wait: Duration::ZERO,
                plan,
            });
        }
        world
    }

    fn random(&mut self, below: u64) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed % below.max(1)
    }

    fn at(&mut self, time: Duration, what: Later) {
        self.sequence += 1;
        self.agenda.push((time, self.sequence, what));
    }

    fn after(&mut self, least: u64, most: u64, what: Later) {
        let delay = least + self.random(most - least + 1);
        self.at(self.now + Duration::from_micros(delay), what);
    }

    /// A message of a client, behind those that it sent before.
    fn say(&mut self, i: usize, message: ClientMessage) {
        let delay = Duration::from_micros(20 + self.random(200));
        let time = (self.now + delay).max(self.busy.get(&(i, true)).copied().unwrap_or_default());
        self.busy.insert((i, true), time);
        self.at(time, Later::Say(i, message));
    }

    fn deliver(&mut self, i: usize, message: SchedulerMessage) {
        let delay = Duration::from_micros(20 + self.random(200));
        let time = (self.now + delay).max(self.busy.get(&(i, false)).copied().unwrap_or_default());
        self.busy.insert((i, false), time);
        self.at(time, Later::Deliver(i, message));
    }

    fn usage(&self, i: usize, gpu: GpuUuid) -> Usage {
        let model = &self.models[i];
        let absent = model.allocated - model.resident[&gpu];
        Usage { gpu, total: CAPACITY, limit: 0, allocated: model.allocated, absent, immovable: 0 }
    }

    fn tell_usage(&mut self, i: usize) {
        for gpu in self.models[i].plan.gpus.clone() {
            let usage = self.usage(i, gpu);
            self.say(i, ClientMessage::Usage(usage));
        }
    }

    fn event(&mut self, event: Event) {
        self.core.handle(event, self.now);
        while let Some(output) = self.core.poll_output() {
            match output {
                Output::Send { client, .. } if Some(client) == self.silent => {}
                Output::Send { client, message } => self.deliver(client as usize, message),
                Output::Note { text, .. } => self.notes.push(text),
            }
        }
        self.check();
    }

    /// The invariants, by what the clients do.
    fn check(&mut self) {
        for g in 0..4 {
            let gpu = gpu(g);
            let users = |m: &&Model| !m.dead && m.connected && m.plan.gpus.contains(&gpu);
            // A process that is dying has its memory until it is gone.
            let owners = |m: &&Model| !m.dead && m.plan.gpus.contains(&gpu);
            let resident: u64 =
                self.models.iter().filter(owners).map(|m| m.resident[&gpu] + m.room[&gpu]).sum();
            assert!(resident <= CAPACITY, "{} GiB resident on {gpu}", resident as f64 / GIB as f64);
            let running: Vec<&Model> = self
                .models
                .iter()
                .filter(users)
                .filter(|m| matches!(m.state, State::Running(_) | State::Draining(_)))
                .collect();
            assert!(!self.exclusive || running.len() <= 1, "{} run where one may", running.len());
            if running.len() > 1 {
                let demand: u64 = running.iter().map(|m| m.resident[&gpu]).sum();
                assert!(demand <= CAPACITY, "a run set of {} GiB", demand / GIB);
                for model in running {
                    assert_eq!(model.resident[&gpu], model.allocated, "a member runs with memory absent");
                }
            }
        }
    }

    /// Runs for as long as it takes to serve everybody, and looks whether that was so.
    fn serves_everybody(&mut self) {
        let total: u64 = self.models.iter().map(|m| m.plan.work + m.plan.work / 100 * m.plan.pause).sum();
        // Everybody's work one after the other, its pauses, and as much again and more for hand-overs.
        self.run(MS(60_000 + total * 6));
        for (i, model) in self.models.iter().enumerate() {
            if model.connected && !model.dead && model.plan.dies_at.is_none() {
                assert!(
                    model.served >= MS(model.plan.work),
                    "client {i} got {:?} of {} ms: {:?}; {:?}",
                    model.served,
                    model.plan.work,
                    model.state,
                    self.core.client_status()
                );
            }
        }
    }

    /// Runs until all work is done or time is over; who is not done then starved.
    fn run(&mut self, limit: Duration) {
        let mut events = 0;
        loop {
            events += 1;
            assert!(
                events < 200_000,
                "one message follows another without end at {:?}: {:?}",
                self.now,
                self.core.client_status()
            );
            let next = self.agenda.iter().map(|(time, sequence, _)| (*time, *sequence)).min();
            let deadline = self.core.next_deadline();
            if next.map(|(time, _)| time).into_iter().chain(deadline).min().is_none_or(|time| time > limit) {
                return;
            }
            match (next, deadline) {
                (Some((time, _)), Some(deadline)) if deadline < time => {
                    self.now = self.now.max(deadline);
                    self.event(Event::Deadline);
                }
                (None, Some(deadline)) => {
                    self.now = self.now.max(deadline);
                    self.event(Event::Deadline);
                }
                (Some((time, sequence)), _) => {
                    self.now = time;
                    let at = self.agenda.iter().position(|(_, s, _)| *s == sequence).unwrap();
                    let (_, _, what) = self.agenda.swap_remove(at);
                    self.happen(what);
                }
                (None, None) => return,
            }
        }
    }

    fn happen(&mut self, what: Later) {
        match what {
            Later::Start(i) => {
                let now = self.now;
                let model = &mut self.models[i];
                model.connected = true;
                if model.plan.runs_already {
                    model.resident.values_mut().for_each(|bytes| *bytes = model.allocated);
                    model.state = State::Running(Epoch { boot: 0, counter: 0 });
                    model.since = now;
                }
                let gate = if model.plan.runs_already { Gate::Open } else { Gate::Closed };
                let register = Register {
                    pid: 1000 + i as u32,
                    name: format!("model{i}"),
                    memory: MemoryMode::Managed,
                    gate,
                    returns: false,
                    run: None,
                    usage: self.models[i].plan.gpus.clone().into_iter().map(|g| self.usage(i, g)).collect(),
                };
                let identity = Identity { pid: Some(register.pid), process: Some(i as u64) };
                self.event(Event::Registered { client: i as u64, identity, register });
                self.at(self.now, Later::Work(i));
            }
            Later::Die(i) => {
                self.models[i].connected = false;
                self.event(Event::Disconnected { client: i as u64, process_remains: true });
                self.after(100, 50_000, Later::Exited(i));
            }
            Later::Exited(i) => {
                self.models[i].dead = true;
                self.event(Event::Exited { client: i as u64 });
            }
            Later::Say(i, message) => {
                if self.models[i].connected {
                    self.event(Event::Message { client: i as u64, message });
                }
            }
            Later::Deliver(i, message) => {
                if self.models[i].connected {
                    self.obey(i, message);
                    self.check();
                }
            }
            Later::Restored(i, epoch) => {
                if self.models[i].connected && self.models[i].state == State::Restoring(epoch) {
                    self.begin(i, epoch);
                }
            }
            Later::Drained(i, epoch) => {
                let leaving = [State::Draining(epoch), State::Withdrawing(epoch)];
                if self.models[i].connected && leaving.contains(&self.models[i].state) {
                    self.drained(i, epoch);
                }
            }
            Later::GivenUp(i, epoch) => {
                if self.models[i].connected && self.models[i].state == State::Draining(epoch) {
                    self.account(i);
                    self.models[i].state = State::Running(epoch);
                    self.say(i, ClientMessage::DropDeferred { epoch });
                    self.at(self.now, Later::Work(i));
                }
            }
            Later::Work(i) => {
                if self.models[i].connected {
                    self.work(i);
                }
            }
            Later::Measure(measured) => self.event(Event::Measured(measured)),
        }
    }

    fn begin(&mut self, i: usize, epoch: Epoch) {
        let mut lacking = Vec::new();
        for gpu in self.models[i].plan.gpus.clone() {
            let model = &mut self.models[i];
            let absent = model.allocated - model.resident[&gpu];
            let room = model.room.get_mut(&gpu).unwrap();
            let brought = absent.min(*room);
            *room -= brought;
            *model.resident.get_mut(&gpu).unwrap() += brought;
            if brought < absent {
                lacking.push(ClientMessage::NeedRoom(Room { gpu, bytes: absent - brought }));
            }
        }
        if !lacking.is_empty() {
            // Only who had begun to leave when it was told to go on has given some of its room back.
            assert!(self.models[i].recalled, "granted without the room for what is absent");
            self.models[i].needs = true;
            self.tell_usage(i);
            lacking.into_iter().for_each(|message| self.say(i, message));
            return;
        }
        let now = self.now;
        let model = &mut self.models[i];
        model.needs = false;
        model.state = State::Running(epoch);
        model.since = now;
        if let Some(since) = model.wanted_since.take() {
            model.longest_wait = model.longest_wait.max(now - since);
        }
        self.say(i, ClientMessage::Running { epoch });
        self.at(self.now, Later::Work(i));
    }

    fn drained(&mut self, i: usize, epoch: Epoch) {
        self.account(i);
        self.models[i].state = State::Parked;
        self.models[i].needs = false;
        self.tell_usage(i);
        for gpu in self.models[i].plan.gpus.clone() {
            let unused = std::mem::take(self.models[i].room.get_mut(&gpu).unwrap());
            if unused > 0 {
                self.say(i, ClientMessage::Room(Room { gpu, bytes: unused }));
            }
        }
        self.say(i, ClientMessage::LockReleased { epoch });
        self.at(self.now, Later::Work(i));
    }

    /// Time on the GPU counts as work done.
    fn account(&mut self, i: usize) {
        let now = self.now;
        let model = &mut self.models[i];
        if matches!(model.state, State::Running(_)) {
            model.served += now - model.since;
            model.since = now;
        }
    }

    /// The program's own life.
    fn work(&mut self, i: usize) {
        self.account(i);
        let now = self.now;
        let model = &mut self.models[i];
        let has_work = model.served < MS(model.plan.work) && now >= model.paused_until;
        match model.state {
            State::Parked | State::Idle(_) if has_work && !model.asked => {
                model.asked = true;
                model.wanted_since.get_or_insert(now);
                self.tell_usage(i);
                self.say(i, ClientMessage::ReqLock);
            }
            State::Parked | State::Idle(_) if now < model.paused_until => {
                let until = model.paused_until;
                self.at(until, Later::Work(i));
            }
            State::Running(epoch) => {
                if !has_work {
                    if model.waiters && !model.needs {
                        model.state = State::Idle(epoch);
                        self.say(i, ClientMessage::Idle { epoch });
                        if now < self.models[i].paused_until {
                            let until = self.models[i].paused_until;
                            self.at(until, Later::Work(i));
                        }
                    } else if now < model.paused_until {
                        let until = model.paused_until;
                        self.at(until, Later::Work(i));
                    }
                    return;
                }
                if let Some(every) = model.plan.grows_every
                    && model.served >= model.grown_at + MS(every)
                    && model.may_grow()
                {
                    model.grown_at = model.served;
                    self.grow(i);
                }
                let model = &mut self.models[i];
                if model.plan.pause > 0 {
                    model.paused_until = now + MS(100 + model.plan.pause);
                }
                self.at(now + MS(100), Later::Work(i));
            }
            _ => {}
        }
    }

    fn grow(&mut self, i: usize) {
        let gpus = self.models[i].plan.gpus.clone();
        if gpus.iter().all(|g| self.models[i].room[g] >= GIB) {
            self.models[i].allocated += GIB;
            for g in gpus {
                *self.models[i].room.get_mut(&g).unwrap() -= GIB;
                *self.models[i].resident.get_mut(&g).unwrap() += GIB;
            }
        } else {
            self.models[i].needs = true;
            self.tell_usage(i);
            for gpu in gpus {
                if self.models[i].room[&gpu] < GIB {
                    let bytes = GIB - self.models[i].room[&gpu];
                    self.say(i, ClientMessage::NeedRoom(Room { gpu, bytes }));
                }
            }
        }
    }

    fn obey(&mut self, i: usize, message: SchedulerMessage) {
        self.account(i);
        match message {
            SchedulerMessage::Registered { hold: Hold::Running(epoch), .. } => {
                assert!(self.models[i].plan.runs_already);
                self.models[i].state = State::Running(epoch);
            }
            SchedulerMessage::Registered { hold, .. } => assert_eq!(hold, Hold::Parked),
            SchedulerMessage::LockOk { epoch, room, .. } => {
                self.models[i].recalled = room.is_empty();
                for Room { gpu, bytes } in room {
                    *self.models[i].room.get_mut(&gpu).unwrap() += bytes;
                }
                self.models[i].asked = false;
                self.models[i].state = State::Restoring(epoch);
                self.after(10, 400_000, Later::Restored(i, epoch));
            }
            SchedulerMessage::DropLock { epoch, patience_ms } => match self.models[i].state {
                State::Running(current) | State::Restoring(current) if current == epoch => {
                    self.models[i].drains += 1;
                    let defers = self.models[i]
                        .plan
                        .defers_every
                        .is_some_and(|n| self.models[i].drains.is_multiple_of(n));
                    let takes = self.models[i].plan.drains_in;
                    if defers && matches!(self.models[i].state, State::Running(_)) {
                        self.say(i, ClientMessage::DropDeferred { epoch });
                    } else if takes > 0 && matches!(self.models[i].state, State::Running(_)) {
                        self.models[i].state = State::Draining(epoch);
                        let patience = u64::from(patience_ms);
                        if takes > patience {
                            self.at(self.now + MS(patience), Later::GivenUp(i, epoch));
                        } else {
                            self.at(self.now + MS(takes), Later::Drained(i, epoch));
                        }
                    } else {
                        let ran = matches!(self.models[i].state, State::Running(_));
                        self.models[i].state =
                            if ran { State::Draining(epoch) } else { State::Withdrawing(epoch) };
                        self.after(10, 60_000, Later::Drained(i, epoch));
                    }
                }
                _ => {}
            },
            SchedulerMessage::Evict(Room { gpu, bytes }) => {
                if let State::Idle(_) = self.models[i].state {
                    self.models[i].state = State::Parked;
                }
                let parked = self.models[i].state == State::Parked;
                let model = &mut self.models[i];
                let room = model.room.get_mut(&gpu).unwrap();
                let unused = bytes.min(*room);
                *room -= unused;
                let resident = model.resident.get_mut(&gpu).unwrap();
                let moved =
                    if parked && !model.plan.cannot_evict { (bytes - unused).min(*resident) } else { 0 };
                *resident -= moved;
                let short = if parked { bytes - unused - moved } else { 0 };
                self.tell_usage(i);
                for bytes in [unused, moved / 2, moved - moved / 2] {
                    if bytes > 0 {
                        self.say(i, ClientMessage::Room(Room { gpu, bytes }));
                    }
                }
                self.say(i, ClientMessage::Evicted { gpu, short });
            }
            SchedulerMessage::Room(Room { gpu, bytes }) => {
                *self.models[i].room.get_mut(&gpu).unwrap() += bytes;
                if self.models[i].needs {
                    self.models[i].needs = false;
                    match self.models[i].state {
                        // It may have less than when it asked.
                        State::Running(_) if !self.models[i].may_grow() => {}
                        State::Running(_) => self.grow(i),
                        State::Restoring(epoch) => self.begin(i, epoch),
                        _ => {}
                    }
                }
            }
            SchedulerMessage::NoRoom { gpu } => {
                let model = &mut self.models[i];
                let restored = model.resident[&gpu] == model.allocated || !model.recalled;
                assert!(restored || !model.needs, "called back where there is no room");
                model.needs = false;
                let excused = |m: &Model| m.plan.cannot_evict || m.plan.dies_at.is_some();
                assert!(self.models.iter().any(excused), "no room, though everybody gives way");
            }
            SchedulerMessage::Waiters { waiting } => {
                self.models[i].waiters = waiting;
                self.at(self.now, Later::Work(i));
            }
            SchedulerMessage::Capacity(Room { gpu, bytes }) => {
                self.models[i].capacity.insert(gpu, bytes.min(self.most));
            }
            SchedulerMessage::Quota { .. } | SchedulerMessage::AskCounters | SchedulerMessage::Pong => {}
            SchedulerMessage::SchedOff | SchedulerMessage::SchedOn { .. } => {
                unreachable!("nobody switches here")
            }
        }
    }
}

fn config(exclusive: bool) -> Config {
    Config { quantum: MS(1000), gpu_memory: Some(CAPACITY), exclusive, ..Config::default() }
}

fn plan() -> impl Strategy<Value = Plan> {
    (
        prop_oneof![4 => Just(vec![gpu(0)]), 2 => Just(vec![gpu(1)]), 1 => Just(vec![gpu(0), gpu(1)])],
        1..=16u64,
        prop_oneof![1 => Just(0u64), 5 => 100..6000u64],
        prop_oneof![2 => Just(0u64), 1 => 10..800u64],
        proptest::option::weighted(0.3, 200..2000u64),
        proptest::option::weighted(0.2, 1..4u64),
        0..3000u64,
        proptest::option::weighted(0.2, 0..9000u64),
    )
        .prop_map(|(gpus, gib, work, pause, grows_every, defers_every, starts_at, dies_at)| Plan {
            gpus,
            gib,
            work,
            pause,
            grows_every,
            // Who defers each time keeps the GPU: that is tested on its own.
            defers_every: defers_every.filter(|&n| n > 1),
            drains_in: 0,
            cannot_evict: false,
            runs_already: false,
            starts_at,
            dies_at: dies_at.filter(|&dies| dies > starts_at),
        })
}

/// The same worlds each time, so that a change is judged by what it changes. Who explores says how far and finds others:
/// `PROPTEST_CASES=500000 cargo test --release -p nvshare-scheduler`; what is found is kept in the file beside this one.
fn worlds() -> ProptestConfig {
    let mut config = ProptestConfig { max_shrink_iters: 2000, ..ProptestConfig::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.rng_seed = RngSeed::Fixed(1);
    }
    config
}

proptest! {
    #![proptest_config(worlds())]

    #[test]
    fn invariants_hold_and_nobody_starves(
        mut plans in prop::collection::vec(plan(), 1..7),
        first_runs_already in prop::bool::weighted(0.2),
        exclusive in prop::bool::weighted(0.2),
        seed in any::<u64>(),
    ) {
        if first_runs_already {
            plans[0] = Plan { runs_already: true, starts_at: 0, dies_at: None, ..plans[0].clone() };
        }
        World::new(plans, config(exclusive), seed).serves_everybody();
    }

    /// Strangers come and go, and contexts grow: there is always room for who comes, and for the largest.
    #[test]
    fn nobody_starves_whatever_is_measured(
        mut plans in prop::collection::vec(plan(), 1..6),
        measured in prop::collection::vec((0..20_000u64, 0..2u8, 12..=16u64, prop::collection::vec(0..5 * GIB / 8, 6)), 0..9),
        seed in any::<u64>(),
    ) {
        plans.iter_mut().for_each(|plan| plan.gib = plan.gib.min(8));
        let config = Config { gpu_memory: None, reserve: Some(GIB / 2), ..config(false) };
        let mut world = World::new(plans, config, seed);
        world.most = 12 * GIB;
        for (at, on, available, used) in measured {
            let used = (0..).zip(used).collect();
            let measured = Measured { gpu: gpu(on), available: available * GIB + GIB / 2, used };
            world.at(MS(at), Later::Measure(measured));
        }
        world.serves_everybody();
        for gpu in world.core.gpu_status() {
            prop_assert!(gpu.resident <= gpu.capacity, "{gpu:?} {:?}", world.core.client_status());
        }
    }
}

/// Plans that differ in little from this one.
fn steady(gib: u64, work: u64) -> Plan {
    Plan {
        gpus: vec![gpu(0)],
        gib,
        work,
        pause: 0,
        grows_every: None,
        defers_every: None,
        drains_in: 0,
        cannot_evict: false,
        runs_already: false,
        starts_at: 0,
        dies_at: None,
    }
}

/// A client of 12 GiB, so much of them absent, registers.
fn registered(client: u64, gate: Gate, absent: u64) -> Event {
    let usage = vec![twelve_gib(absent)];
    let register = Register {
        pid: 9,
        name: "x".into(),
        memory: MemoryMode::Managed,
        gate,
        returns: true,
        run: None,
        usage,
    };
    Event::Registered { client, identity: Identity::default(), register }
}

fn twelve_gib(absent: u64) -> Usage {
    Usage { gpu: gpu(0), total: CAPACITY, limit: 0, allocated: 12 * GIB, absent, immovable: 0 }
}

#[test]
fn a_need_that_crossed_with_its_room_holds_nobody_up() {
    // It grows on two GPUs; the room for one arrives first, and it asks for the other once more.
    let grows = Plan { gpus: vec![gpu(0), gpu(1)], grows_every: Some(401), ..steady(14, 845) };
    let other = Plan { pause: 10, starts_at: 501, ..steady(2, 301) };
    let plans = vec![Plan { runs_already: true, ..grows }, other];
    let mut world = World::new(plans, config(false), 4_477_790_973_996_748_370);
    world.run(MS(80_000));
    assert!(world.models.iter().all(|m| m.served >= MS(m.plan.work)), "{:?}", world.models);
}

#[test]
fn two_that_do_not_fit_take_equal_turns() {
    let mut world = World::new(vec![steady(12, 20_000), steady(12, 20_000)], config(false), 7);
    world.run(MS(20_000));
    let [a, b] = [world.models[0].served, world.models[1].served];
    assert!(a.abs_diff(b) <= MS(1500), "{a:?} and {b:?}");
    assert!(a + b >= MS(12_000), "{a:?} and {b:?} of 20 s");
    // A quantum of the other, and the hand-overs around it.
    assert!(world.models.iter().all(|m| m.longest_wait <= MS(2200)), "{:?}", world.models);
}

#[test]
fn a_slow_drain_is_waited_for_in_the_end_whoever_runs_beside_it() {
    // Two run together; one gives the lock back at once, and the other after a second.
    let slow = Plan { drains_in: 1000, ..steady(4, 60_000) };
    let mut world = World::new(vec![steady(4, 60_000), slow, steady(14, 2_000)], config(false), 7);
    world.run(MS(30_000));
    assert!(world.models[2].served >= MS(2_000), "{:?}", world.models[2]);
}

/// A client that a test speaks for.
fn say(core: &mut Core, client: u64, message: ClientMessage) -> Vec<Output> {
    core.handle(Event::Message { client, message }, MS(1));
    std::iter::from_fn(|| core.poll_output()).collect()
}

#[test]
fn a_capacity_that_became_smaller_holds_for_what_is_there() {
    let mut core = Core::new(Config { gpu_memory: None, reserve: Some(0), ..config(false) });
    core.handle(registered(0, Gate::Closed, 0), MS(0));
    while core.poll_output().is_some() {}
    let measured = Measured { gpu: gpu(0), available: 9 * GIB, used: BTreeMap::new() };
    core.handle(Event::Measured(measured), MS(1));
    let evict = SchedulerMessage::Evict(Room { gpu: gpu(0), bytes: 3 * GIB });
    let outputs: Vec<Output> = std::iter::from_fn(|| core.poll_output()).collect();
    assert!(outputs.contains(&Output::Send { client: 0, message: evict }), "{outputs:?}");
    say(&mut core, 0, ClientMessage::Room(Room { gpu: gpu(0), bytes: 3 * GIB }));
    say(&mut core, 0, ClientMessage::Evicted { gpu: gpu(0), short: 0 });
    assert_eq!(core.gpu_status()[0].resident, 9 * GIB);
}

#[test]
fn who_runs_beyond_the_capacity_is_asked_for_nothing_that_it_uses() {
    let mut core = Core::new(Config { gpu_memory: None, reserve: Some(0), ..config(false) });
    core.handle(registered(0, Gate::Open, 0), MS(0));
    core.handle(Event::Measured(Measured { gpu: gpu(0), available: 9 * GIB, used: BTreeMap::new() }), MS(1));
    let evict = |output: &Output| matches!(output, Output::Send { message: SchedulerMessage::Evict(_), .. });
    let outputs: Vec<Output> = std::iter::from_fn(|| core.poll_output()).collect();
    assert!(!outputs.iter().any(evict), "{outputs:?}");
}

#[test]
fn who_is_back_before_it_is_known_to_be_gone_is_charged_once() {
    let mut core = Core::new(config(false));
    let again = |client| match registered(client, Gate::Closed, 0) {
        Event::Registered { register, .. } => {
            let identity = Identity { pid: Some(9), process: Some(77) };
            Event::Registered { client, identity, register }
        }
        other => other,
    };
    core.handle(again(0), MS(0));
    core.handle(again(1), MS(1));
    core.handle(Event::Disconnected { client: 0, process_remains: true }, MS(2));
    assert_eq!(core.gpu_status()[0].resident, 12 * GIB);
}

#[test]
fn what_nobody_ordered_is_no_news() {
    let mut core = Core::new(config(false));
    core.handle(registered(0, Gate::Closed, 0), MS(0));
    while core.poll_output().is_some() {}
    assert_eq!(say(&mut core, 0, ClientMessage::Evicted { gpu: gpu(0), short: GIB }), []);
}

#[test]
fn two_that_fit_are_never_interrupted() {
    let mut world = World::new(vec![steady(8, 5_000), steady(8, 5_000)], config(false), 7);
    world.run(MS(20_000));
    assert!(world.models.iter().all(|m| m.drains == 0 && m.served >= MS(5000)));
}

#[test]
fn a_small_one_runs_beside_whoever_has_the_turn() {
    let mut world =
        World::new(vec![steady(2, 20_000), steady(12, 20_000), steady(12, 20_000)], config(false), 9);
    world.run(MS(20_000));
    assert_eq!(world.models[0].drains, 0);
    assert!(world.models[0].served >= MS(19_000), "{:?}", world.models[0].served);
}

#[test]
fn who_has_work_in_bursts_is_not_moved_out_at_each_pause() {
    // 60 ms of host work in each 160 ms; moving 8 GiB costs seconds at the rates assumed at first.
    let mut world =
        World::new(vec![Plan { pause: 60, ..steady(12, 60_000) }, steady(12, 60_000)], config(false), 3);
    world.run(MS(10_000));
    assert!(world.models[0].drains <= 8, "{} drains in 10 s of quanta of 1 s", world.models[0].drains);
}

#[test]
fn an_idle_holder_gives_way_before_its_quantum_is_over() {
    let config = Config { quantum: MS(60_000), exclusive: true, ..config(true) };
    // Exclusive: nothing has to move.
    let mut world = World::new(vec![steady(1, 300), Plan { starts_at: 100, ..steady(1, 300) }], config, 3);
    world.run(MS(5_000));
    assert!(world.models[1].served >= MS(300));
    assert!(world.models[1].longest_wait <= MS(700), "{:?}", world.models[1].longest_wait);
}

#[test]
fn who_was_there_before_its_scheduler_gives_way_when_its_quantum_is_over() {
    let there = Plan { runs_already: true, ..steady(12, 60_000) };
    let mut world = World::new(vec![there, Plan { starts_at: 100, ..steady(12, 500) }], config(false), 3);
    world.run(MS(5_000));
    assert!(world.models[1].served >= MS(500), "{:?}", world.models[1].served);
}

#[test]
fn who_never_runs_under_its_grant_does_not_keep_the_gpu_from_others() {
    // A client that registers, asks, and is never heard of again.
    let mut world =
        World::new(vec![steady(12, 60_000), Plan { starts_at: 3_000, ..steady(2, 500) }], config(false), 3);
    world.core.handle(registered(77, Gate::Closed, 12 * GIB), MS(0));
    world.core.handle(Event::Message { client: 77, message: ClientMessage::ReqLock }, MS(0));
    let granted = std::iter::from_fn(|| world.core.poll_output())
        .any(|o| matches!(o, Output::Send { client: 77, message: SchedulerMessage::LockOk { .. } }));
    assert!(granted);
    world.silent = Some(77);
    world.run(MS(30_000));
    assert!(world.models[1].served >= MS(500), "the small one fits beside it");
    assert!(world.notes.iter().any(|note| note.contains("client 77 does not answer")), "{:?}", world.notes);
}

#[test]
fn who_always_defers_keeps_the_gpu_and_nothing_else() {
    let deferring = Plan { defers_every: Some(1), ..steady(12, 60_000) };
    let mut world = World::new(
        vec![deferring, Plan { starts_at: 300, ..steady(12, 500) }, steady(2, 500)],
        config(false),
        5,
    );
    world.run(MS(30_000));
    assert_eq!(world.models[1].served, Duration::ZERO);
    assert!(world.models[2].served >= MS(500));
}

#[test]
fn who_cannot_evict_keeps_others_waiting_until_it_is_gone() {
    let stuck = Plan { cannot_evict: true, work: 500, dies_at: Some(8_000), ..steady(12, 500) };
    let mut world = World::new(vec![stuck, Plan { starts_at: 200, ..steady(12, 500) }], config(false), 5);
    world.run(MS(7_500));
    assert_eq!(world.models[1].served, Duration::ZERO);
    assert!(
        world.core.client_status().iter().any(|c| c.state.starts_with("waiting: ")),
        "{:?}",
        world.core.client_status()
    );
    world.run(MS(20_000));
    assert!(world.models[1].served >= MS(500));
}

#[test]
fn a_grant_comes_with_all_the_room_or_not_at_all() {
    // The messages of one hand-over, in their order.
    let mut core = Core::new(config(false));
    let mut sent = Vec::new();
    let mut handle = |core: &mut Core, client: u64, message: ClientMessage, now: u64| {
        core.handle(Event::Message { client, message }, MS(now));
        while let Some(output) = core.poll_output() {
            if let Output::Send { client, message } = output {
                sent.push((client, message));
            }
        }
        std::mem::take(&mut sent)
    };
    for client in [1, 2] {
        core.handle(registered(client, Gate::Closed, 12 * GIB), MS(0));
    }
    while core.poll_output().is_some() {}
    let first = handle(&mut core, 1, ClientMessage::ReqLock, 1);
    let Some((1, SchedulerMessage::LockOk { epoch: one, .. })) = first.first().cloned() else {
        panic!("{first:?}")
    };
    handle(&mut core, 1, ClientMessage::Running { epoch: one }, 2);
    handle(&mut core, 1, ClientMessage::Usage(twelve_gib(0)), 2);
    assert_eq!(
        handle(&mut core, 2, ClientMessage::ReqLock, 3),
        [(1, SchedulerMessage::Waiters { waiting: true })]
    );
    core.handle(Event::Deadline, MS(1002));
    let mut drop = Vec::new();
    while let Some(Output::Send { client, message }) = core.poll_output() {
        drop.push((client, message));
    }
    assert_eq!(drop, [(1, SchedulerMessage::DropLock { epoch: one, patience_ms: 200 })]);
    // Spare room that client 1 never used goes back with the lock.
    let spare = Room { gpu: gpu(0), bytes: GIB };
    handle(&mut core, 1, ClientMessage::Room(spare), 1010);
    let released = handle(&mut core, 1, ClientMessage::LockReleased { epoch: one }, 1010);
    let [(1, SchedulerMessage::Evict(Room { bytes, .. }))] = released[..] else { panic!("{released:?}") };
    assert_eq!(bytes, 8 * GIB);
    let half = Room { gpu: gpu(0), bytes: 4 * GIB };
    assert!(handle(&mut core, 1, ClientMessage::Room(half), 1200).is_empty(), "half the room is not enough");
    let granted = handle(&mut core, 1, ClientMessage::Room(half), 1400);
    assert!(
        matches!(&granted[0], (2, SchedulerMessage::LockOk { room, .. }) if room[0].bytes == 12 * GIB),
        "{granted:?}"
    );
}

#[test]
fn an_eviction_stands_until_it_is_answered() {
    let mut core = Core::new(config(false));
    let mut now = 0;
    let mut say = |core: &mut Core, client: u64, message: ClientMessage| {
        now += 1;
        core.handle(Event::Message { client, message }, MS(now));
        let sends = std::iter::from_fn(|| core.poll_output());
        sends
            .filter_map(|output| match output {
                Output::Send { client, message } => Some((client, message)),
                Output::Note { .. } => None,
            })
            .collect::<Vec<_>>()
    };
    let epoch = |sent: &[(u64, SchedulerMessage)], to: u64| {
        sent.iter().find_map(|(client, message)| match message {
            SchedulerMessage::LockOk { epoch, .. } if *client == to => Some(*epoch),
            _ => None,
        })
    };
    for client in [1, 2] {
        core.handle(registered(client, Gate::Closed, 12 * GIB), MS(0));
    }
    while core.poll_output().is_some() {}
    let one = epoch(&say(&mut core, 1, ClientMessage::ReqLock), 1).expect("a grant");
    say(&mut core, 1, ClientMessage::Running { epoch: one });
    say(&mut core, 1, ClientMessage::Usage(twelve_gib(0)));
    say(&mut core, 2, ClientMessage::ReqLock);
    say(&mut core, 1, ClientMessage::LockReleased { epoch: one });
    say(&mut core, 1, ClientMessage::ReqLock);
    // Room that it gave back by itself, its spare among it, crosses the order; what was ordered is still to leave.
    let granted = say(&mut core, 1, ClientMessage::Room(Room { gpu: gpu(0), bytes: 9 * GIB }));
    let two = epoch(&granted, 2).unwrap_or_else(|| panic!("{granted:?}; {:?}", core.client_status()));
    say(&mut core, 2, ClientMessage::Running { epoch: two });
    say(&mut core, 2, ClientMessage::Usage(twelve_gib(0)));
    say(&mut core, 2, ClientMessage::LockReleased { epoch: two });
    say(&mut core, 2, ClientMessage::Room(Room { gpu: gpu(0), bytes: 12 * GIB }));
    let sent = say(&mut core, 2, ClientMessage::Evicted { gpu: gpu(0), short: 0 });
    assert_eq!(epoch(&sent, 1), None, "granted while its memory is leaving");
    let sent = say(&mut core, 1, ClientMessage::Evicted { gpu: gpu(0), short: 0 });
    assert!(epoch(&sent, 1).is_some(), "{sent:?}");
}

#[test]
fn who_cannot_have_its_room_holds_nobody_up() {
    let mut core = Core::new(config(false));
    for client in [1, 2] {
        core.handle(registered(client, Gate::Closed, 12 * GIB), MS(0));
    }
    let mut say = |client: u64, message: ClientMessage, at: u64| {
        core.handle(Event::Message { client, message }, MS(at));
        if core.next_deadline().is_some_and(|deadline| deadline <= MS(at)) {
            core.handle(Event::Deadline, MS(at));
        }
        std::iter::from_fn(|| core.poll_output()).find_map(|output| match output {
            Output::Send { client, message: SchedulerMessage::LockOk { epoch, .. } } => Some((client, epoch)),
            _ => None,
        })
    };
    let Some((1, epoch)) = say(1, ClientMessage::ReqLock, 1) else { panic!("a grant") };
    say(1, ClientMessage::Running { epoch }, 2);
    say(1, ClientMessage::Usage(twelve_gib(0)), 2);
    say(2, ClientMessage::ReqLock, 3);
    say(1, ClientMessage::LockReleased { epoch }, 1010);
    say(1, ClientMessage::ReqLock, 1011);
    // Nothing of what the first has can leave, and so the second cannot be next.
    let next = say(1, ClientMessage::Evicted { gpu: gpu(0), short: 8 * GIB }, 1012);
    assert!(matches!(next, Some((1, _))), "{next:?}; {:?}", core.client_status());
}

#[test]
fn who_was_parked_before_its_scheduler_waits_for_those_who_run() {
    let mut core = Core::new(Config { settle: MS(1300), ..config(false) });
    let granted = |core: &mut Core| {
        std::iter::from_fn(|| core.poll_output())
            .any(|o| matches!(o, Output::Send { client: 1, message: SchedulerMessage::LockOk { .. } }))
    };
    core.handle(registered(1, Gate::Closed, 8 * GIB), MS(100));
    core.handle(Event::Message { client: 1, message: ClientMessage::ReqLock }, MS(101));
    assert!(!granted(&mut core), "what the other fills is not known yet");
    assert_eq!(core.next_deadline(), Some(MS(1300)));
    core.handle(registered(2, Gate::Open, 0), MS(900));
    core.handle(Event::Deadline, MS(1300));
    assert!(!granted(&mut core), "the other runs");
    // The other is gone, with what it had.
    core.handle(Event::Disconnected { client: 2, process_remains: false }, MS(1400));
    assert!(granted(&mut core));
}

/// A core whose clients a test speaks for, in virtual time.
struct Table {
    core: Core,
    now: u64,
}

impl Table {
    fn new(config: Config) -> Self {
        Self { core: Core::new(config), now: 0 }
    }

    /// What the core sends, in its order.
    fn sent(&mut self) -> Vec<(u64, SchedulerMessage)> {
        let outputs = std::iter::from_fn(|| self.core.poll_output());
        outputs
            .filter_map(|output| match output {
                Output::Send { client, message } => Some((client, message)),
                Output::Note { .. } => None,
            })
            .collect()
    }

    fn register(&mut self, client: u64, gate: Gate, allocated: u64, absent: u64) {
        let usage = Usage { gpu: gpu(0), total: CAPACITY, limit: 0, allocated, absent, immovable: 0 };
        let register = Register {
            pid: 9,
            name: "x".into(),
            memory: MemoryMode::Managed,
            gate,
            returns: false,
            run: None,
            usage: vec![usage],
        };
        let identity = Identity { pid: Some(9), process: Some(client) };
        self.core.handle(Event::Registered { client, identity, register }, MS(self.now));
        self.sent();
    }

    fn say(&mut self, client: u64, message: ClientMessage) -> Vec<(u64, SchedulerMessage)> {
        self.core.handle(Event::Message { client, message }, MS(self.now));
        self.sent()
    }

    /// What the core sends by itself until then.
    fn wait_until(&mut self, time: u64) -> Vec<(u64, SchedulerMessage)> {
        let mut sent = Vec::new();
        while let Some(deadline) = self.core.next_deadline().filter(|&deadline| deadline <= MS(time)) {
            self.core.handle(Event::Deadline, deadline.max(MS(self.now)));
            sent.append(&mut self.sent());
        }
        self.now = time;
        sent
    }
}

fn granted(sent: &[(u64, SchedulerMessage)], to: u64) -> Option<Epoch> {
    sent.iter().find_map(|(client, message)| match message {
        SchedulerMessage::LockOk { epoch, .. } if *client == to => Some(*epoch),
        _ => None,
    })
}

fn asked_to_leave(sent: &[(u64, SchedulerMessage)], whom: u64) -> Option<Epoch> {
    sent.iter().find_map(|(client, message)| match message {
        SchedulerMessage::DropLock { epoch, .. } if *client == whom => Some(*epoch),
        _ => None,
    })
}

#[test]
fn room_is_not_kept_for_a_parked_need_while_who_is_next_waits_for_it() {
    const MIB: u64 = 1 << 20;
    let (holder, parked, small) = (1, 2, 3);
    let config = Config { quantum: MS(8000), gpu_memory: Some(GIB), ..config(false) };
    let mut table = Table::new(config);
    table.register(holder, Gate::Open, 512 * MIB, 0);
    table.register(parked, Gate::Closed, 0, 0);
    table.register(small, Gate::Closed, 384 * MIB, 384 * MIB);
    // It has to have its room at once, as memory that is allocated in stream order does.
    table.say(parked, ClientMessage::NeedRoom(Room { gpu: gpu(0), bytes: 768 * MIB }));
    table.now = 100;
    let sent = table.say(small, ClientMessage::ReqLock);
    let epoch = granted(&sent, small).expect("it fits beside the holder");
    table.say(small, ClientMessage::Running { epoch });
    // The need is served when the holder's turn is over.
    let asked = table.wait_until(8000);
    let mut sent = Vec::new();
    for member in [holder, small] {
        let epoch = asked_to_leave(&asked, member).unwrap_or_else(|| panic!("{asked:?}"));
        sent.append(&mut table.say(member, ClientMessage::LockReleased { epoch }));
    }
    let mut room = 0;
    for _ in 0..4 {
        let mut answers = Vec::new();
        for (client, message) in sent {
            match message {
                SchedulerMessage::Evict(Room { gpu, bytes }) => {
                    answers.append(&mut table.say(client, ClientMessage::Room(Room { gpu, bytes })));
                    answers.append(&mut table.say(client, ClientMessage::Evicted { gpu, short: 0 }));
                }
                SchedulerMessage::Room(Room { bytes, .. }) if client == parked => room += bytes,
                SchedulerMessage::LockOk { room: given, .. } if client == parked => room += given[0].bytes,
                _ => {}
            }
        }
        sent = answers;
    }
    assert!(room >= 768 * MIB, "{:?}", table.core.client_status());
}

#[test]
fn who_waited_for_memory_that_could_not_move_goes_on_when_it_can() {
    let (silent, waiter) = (1, 2);
    let mut table = Table::new(config(false));
    table.register(silent, Gate::Closed, 12 * GIB, 0);
    table.register(waiter, Gate::Closed, 12 * GIB, 12 * GIB);
    let sent = table.say(waiter, ClientMessage::ReqLock);
    let evict = (silent, SchedulerMessage::Evict(Room { gpu: gpu(0), bytes: 8 * GIB }));
    assert_eq!(sent, [evict]);
    // Nothing is heard of it for longer than anybody waits for an answer; then it answers after all.
    table.wait_until(10_001);
    assert!(table.core.client_status()[1].state.starts_with("waiting: "), "{:?}", table.core.client_status());
    table.say(silent, ClientMessage::Room(Room { gpu: gpu(0), bytes: 4 * GIB }));
    let sent = table.say(silent, ClientMessage::Evicted { gpu: gpu(0), short: 0 });
    let evict = (silent, SchedulerMessage::Evict(Room { gpu: gpu(0), bytes: 4 * GIB }));
    assert_eq!(sent, [evict], "{:?}", table.core.client_status());
}
