//! A world of model clients that answer the core's messages after delays drawn from a seed, in virtual time. After each
//! event the invariants are checked against what the clients *do*, not against what the core believes.

use std::collections::BTreeMap;
use std::time::Duration;

use nvshare_core::{Config, Core, Event, Measured, Output};
use nvshare_proto::{ClientMessage, Epoch, Given, GpuUuid, SchedulerMessage, Usage};

use crate::follower::Follower;
use crate::model::{Model, Plan, State};

pub(crate) const CAPACITY: u64 = 16 << 30;
pub(crate) const GIB: u64 = 1 << 30;
pub(crate) const MS: fn(u64) -> Duration = Duration::from_millis;

pub(crate) fn gpu(n: u8) -> GpuUuid {
    GpuUuid([n; 16])
}

pub(crate) fn config(exclusive: bool) -> Config {
    Config { quantum: MS(1000), gpu_memory: Some(CAPACITY), exclusive, ..Config::default() }
}

/// Something that happens later.
#[derive(Debug, Clone)]
pub(crate) enum Later {
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

pub(crate) struct World {
    pub(crate) core: Core,
    pub(crate) models: Vec<Model>,
    pub(crate) now: Duration,
    pub(crate) agenda: Vec<(Duration, u64, Later)>,
    pub(crate) sequence: u64,
    pub(crate) seed: u64,
    pub(crate) exclusive: bool,
    /// No model grows beyond this.
    pub(crate) most: u64,
    /// A client that is no model and never answers.
    pub(crate) silent: Option<u64>,
    pub(crate) trace: bool,
    pub(crate) notes: Vec<String>,
    pub(crate) follower: Follower,
    /// When a channel delivers next: messages of one direction keep their order.
    pub(crate) busy: BTreeMap<(usize, bool), Duration>,
}

impl World {
    pub(crate) fn new(plans: Vec<Plan>, config: Config, seed: u64) -> Self {
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
            trace: false,
            notes: Vec::new(),
            follower: Follower::default(),
            busy: BTreeMap::new(),
        };
        for (i, plan) in plans.into_iter().enumerate() {
            if plan.after.is_none() {
                world.at(MS(plan.starts_at), Later::Start(i));
            }
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

    pub(crate) fn random(&mut self, below: u64) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed % below.max(1)
    }

    pub(crate) fn at(&mut self, time: Duration, what: Later) {
        self.sequence += 1;
        self.agenda.push((time, self.sequence, what));
    }

    pub(crate) fn after(&mut self, least: u64, most: u64, what: Later) {
        let delay = least + self.random(most - least + 1);
        self.at(self.now + Duration::from_micros(delay), what);
    }

    /// A message of a client, behind those that it sent before.
    pub(crate) fn say(&mut self, i: usize, message: ClientMessage) {
        let delay = Duration::from_micros(20 + self.random(200));
        let time = (self.now + delay).max(self.busy.get(&(i, true)).copied().unwrap_or_default());
        self.busy.insert((i, true), time);
        self.at(time, Later::Say(i, message));
    }

    pub(crate) fn deliver(&mut self, i: usize, message: SchedulerMessage) {
        let delay = Duration::from_micros(20 + self.random(200));
        let time = (self.now + delay).max(self.busy.get(&(i, false)).copied().unwrap_or_default());
        self.busy.insert((i, false), time);
        self.at(time, Later::Deliver(i, message));
    }

    pub(crate) fn usage(&self, i: usize, gpu: GpuUuid) -> Usage {
        let model = &self.models[i];
        let absent = model.allocated - model.resident[&gpu];
        Usage { gpu, total: CAPACITY, limit: 0, allocated: model.allocated, absent, immovable: 0 }
    }

    pub(crate) fn tell_usage(&mut self, i: usize) {
        for gpu in self.models[i].plan.gpus.clone() {
            let usage = self.usage(i, gpu);
            self.say(i, ClientMessage::Usage(usage));
        }
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
                Output::Send { client, message } => self.deliver(client as usize, message),
                Output::Note { text, .. } => self.notes.push(text),
            }
        }
        self.follower.follow(&mut self.core);
        self.check();
    }

    /// An administrator gives a client's tenant something.
    pub(crate) fn give(&mut self, client: u64, given: Given) -> String {
        let told = self.core.give(client, None, given, self.now).expect("it is there");
        self.follower.follow(&mut self.core);
        self.event(Event::Deadline);
        told
    }

    /// The invariants, by what the clients do.
    pub(crate) fn check(&mut self) {
        if let Err(wrong) = self.core.audit() {
            panic!("at {:?}: {wrong}", self.now);
        }
        self.follower.agrees(&self.core, self.silent);
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
    pub(crate) fn serves_everybody(&mut self) {
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

    /// How long a client held the lock, by the core's account.
    pub(crate) fn held(&self, i: usize) -> Duration {
        let rows = self.core.client_status();
        rows.iter().find(|row| row.client == i as u64).map_or(Duration::ZERO, |row| MS(row.held_ms))
    }

    /// Runs until all work is done or time is over; who is not done then starved.
    pub(crate) fn run(&mut self, limit: Duration) {
        let mut events = 0;
        loop {
            events += 1;
            self.trace |= events > 799_980;
            assert!(
                events < 800_000,
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
}
