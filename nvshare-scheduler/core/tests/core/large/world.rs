//! Delivers messages between a core and clients, and looks after each event whether the rules hold.

use std::collections::BTreeMap;
use std::time::Duration;

use nvshare_core::{Config, Core, Event, Output};
use nvshare_proto::SchedulerMessage;

use super::{Act, Behaviour, Plan, Seen};
use crate::table::{CAPACITY, MS};

/// The whole state is recomputed by brute force after every so many events.
const AUDITS_EVERY: u64 = 257;

/// Far more than any of the worlds has.
const MOST_EVENTS: u64 = 2_000_000;

/// Steps that one event may take for each client that is there, and for a handful that are not.
const MOST_STEPS_EACH: f64 = 20.0;

enum Later {
    Begin(usize),
    /// For the client of this number alone: one that has come since hears nothing of it.
    Deliver(usize, u64, SchedulerMessage),
    Act(usize, u64, Act),
}

/// One place in the world: a behaviour, and the client that it is at present.
struct Place {
    behaviour: Box<dyn Behaviour>,
    /// Its client, if it is connected.
    client: Option<u64>,
    held: Duration,
    longest_wait: Duration,
    was: Seen,
}

pub(crate) struct World {
    pub(crate) core: Core,
    pub(crate) now: Duration,
    places: Vec<Place>,
    of_client: BTreeMap<u64, usize>,
    clients: u64,
    agenda: BTreeMap<(Duration, u64), Later>,
    sequence: u64,
    pub(crate) events: u64,
    /// Most steps that one event took, and of those how many for each client that was there.
    pub(crate) most_steps: u64,
    pub(crate) most_steps_each: f64,
}

impl World {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            core: Core::new(config),
            now: Duration::ZERO,
            places: Vec::new(),
            of_client: BTreeMap::new(),
            clients: 0,
            agenda: BTreeMap::new(),
            sequence: 0,
            events: 0,
            most_steps: 0,
            most_steps_each: 0.0,
        }
    }

    /// Somebody comes at this time, in milliseconds.
    pub(crate) fn add(&mut self, at: u64, behaviour: impl Behaviour + 'static) -> usize {
        let was = behaviour.seen();
        self.places.push(Place {
            behaviour: Box::new(behaviour),
            client: None,
            held: Duration::ZERO,
            longest_wait: Duration::ZERO,
            was,
        });
        self.at(MS(at), Later::Begin(self.places.len() - 1));
        self.places.len() - 1
    }

    fn at(&mut self, time: Duration, what: Later) {
        self.sequence += 1;
        self.agenda.insert((time, self.sequence), what);
    }

    /// For how long somebody had the lock, from grant to drained.
    pub(crate) fn held(&self, place: usize) -> Duration {
        let place = &self.places[place];
        place.held
    }

    pub(crate) fn longest_wait(&self, place: usize) -> Duration {
        let place = &self.places[place];
        let waits = place.was.waits_since.map_or(Duration::ZERO, |since| self.now.saturating_sub(since));
        place.longest_wait.max(waits)
    }

    /// Runs until this time, and calls `watch` after each event.
    pub(crate) fn run(&mut self, until: Duration, mut watch: impl FnMut(&Self)) {
        loop {
            let next = self.agenda.first_key_value().map(|(key, _)| key.0);
            let deadline = self.core.next_deadline();
            let Some(time) = next.into_iter().chain(deadline).min().filter(|&time| time <= until) else {
                break;
            };
            self.pass(time);
            if deadline.is_some_and(|deadline| deadline <= time) {
                self.event(Event::Deadline);
            } else if let Some((_, what)) = self.agenda.pop_first() {
                self.happen(what);
            }
            watch(self);
        }
        self.pass(until);
        self.core.audit().unwrap_or_else(|wrong| panic!("at {:?}: {wrong}", self.now));
    }

    fn pass(&mut self, time: Duration) {
        let passed = time.saturating_sub(self.now);
        self.now = self.now.max(time);
        for place in self.places.iter_mut().filter(|place| place.was.holds) {
            place.held += passed;
        }
    }

    fn happen(&mut self, what: Later) {
        let now = self.now;
        match what {
            Later::Begin(at) => {
                let client = self.clients;
                self.clients += 1;
                self.of_client.insert(client, at);
                let place = &mut self.places[at];
                place.client = Some(client);
                let (identity, register, plan) = place.behaviour.begins(client, now);
                self.event(Event::Registered { client, identity, register });
                self.plan(at, client, plan);
            }
            Later::Deliver(at, client, message) if self.places[at].client == Some(client) => {
                let plan = self.places[at].behaviour.hears(message, now);
                self.plan(at, client, plan);
            }
            Later::Act(at, client, act) if self.places[at].client == Some(client) => match act {
                Act::Say(message) => self.event(Event::Message { client, message }),
                Act::Own(what) => {
                    let plan = self.places[at].behaviour.does(what, now);
                    self.plan(at, client, plan);
                }
                Act::End(again) => {
                    self.places[at].client = None;
                    self.of_client.remove(&client);
                    self.event(Event::Disconnected { client, process_remains: false });
                    if let Some(again) = again {
                        self.at(now + again, Later::Begin(at));
                    }
                }
            },
            Later::Deliver(..) | Later::Act(..) => {}
        }
    }

    fn plan(&mut self, at: usize, client: u64, plan: Plan) {
        for (after, act) in plan {
            self.at(self.now + after, Later::Act(at, client, act));
        }
        self.see(at);
    }

    fn see(&mut self, at: usize) {
        let place = &mut self.places[at];
        let seen = if place.client.is_some() { place.behaviour.seen() } else { Seen::default() };
        if let (Some(since), true) = (place.was.waits_since, seen.waits_since.is_none()) {
            place.longest_wait = place.longest_wait.max(self.now.saturating_sub(since));
        }
        place.was = seen;
    }

    fn event(&mut self, event: Event) {
        let kind = std::mem::discriminant(&event);
        self.core.handle(event, self.now);
        let steps = self.core.steps();
        self.most_steps = self.most_steps.max(steps);
        let each = steps as f64 / (self.of_client.len() + 8) as f64;
        self.most_steps_each = self.most_steps_each.max(each);
        assert!(each <= MOST_STEPS_EACH, "{steps} steps for {kind:?} at {:?}", self.now);
        while let Some(output) = self.core.poll_output() {
            let Output::Send { client, message } = output else { continue };
            if let Some(&at) = self.of_client.get(&client) {
                // One channel: what is sent first arrives first.
                self.at(self.now + Duration::from_micros(50), Later::Deliver(at, client, message));
            }
        }
        self.events += 1;
        assert!(self.events < MOST_EVENTS, "one message follows another without end at {:?}", self.now);
        if self.events.is_multiple_of(AUDITS_EVERY) {
            self.core.audit().unwrap_or_else(|wrong| panic!("at {:?}: {wrong}", self.now));
        }
        self.check();
    }

    /// What honest clients have on each GPU fits it, and who runs there has the GPU with such as fit beside it.
    fn check(&self) {
        let mut resident = [0u64; 8];
        for place in self.places.iter().filter(|place| place.client.is_some()) {
            let seen = place.behaviour.seen();
            resident[usize::from(seen.gpu)] += seen.resident.unwrap_or(0);
        }
        for (gpu, resident) in resident.into_iter().enumerate() {
            assert!(resident <= CAPACITY, "{resident} on {gpu} at {:?}", self.now);
        }
    }
}
