//! Delivers messages between a core and clients, and looks after each event whether the rules hold.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nvshare_core::{Config, Core, Event, Identity, Output};
use nvshare_proto::{ClientMessage, SchedulerMessage};

use super::{Act, Behaviour, Plan, Seen};
use crate::table::{CAPACITY, MS, gpu};

/// The whole state is recomputed by brute force after every so many events.
const AUDITS_EVERY: u64 = 257;

/// Far more than any of the worlds has.
const MOST_EVENTS: u64 = 2_000_000;

/// Steps that one event may take for each client that is there, and for a handful that are not.
const MOST_STEPS_EACH: f64 = 20.0;

/// A turn and a hand-over in worlds with a quantum of 500 ms: two quanta where a holder has something to catch up; a drain
/// that is given up, and the time until the next one; a restore.
const TURN: Duration = Duration::from_millis(2500);

fn job(identity: Identity, client: u64) -> (u8, u64) {
    match identity {
        Identity { tenant: Some(tenant), .. } => (1, tenant),
        Identity { gang: Some(gang), .. } => (2, gang.number),
        _ => (3, client),
    }
}

enum Later {
    Begin(usize),
    Return(usize),
    /// For the client of this number alone: one that has come since hears nothing of it.
    Deliver(usize, u64, SchedulerMessage),
    Act(usize, u64, Act),
}

/// One place in the world: a behaviour, and the client that it is at present.
struct Place {
    behaviour: Box<dyn Behaviour>,
    /// Its client, if it is connected.
    client: Option<u64>,
    /// Its scheduler has gone, and it comes back to the next one.
    returns: bool,
    held: Duration,
    computed: Duration,
    longest_wait: Duration,
    was: Seen,
    /// Whose time its client uses: a tenant's, a gang's, or its own.
    job: (u8, u64),
    wait: Option<Wait>,
    /// The longest wait of all that were over, as a part of what it may have been.
    worst_wait: f64,
}

/// How long somebody may wait: see [`World::begins_to_wait`].
struct Wait {
    since: Duration,
    /// What the jobs that go first have had less than the waiter, together.
    catch_up: Duration,
    /// Jobs that go first, by GPU.
    jobs: BTreeSet<(u8, (u8, u64))>,
}

pub(crate) struct World {
    pub(crate) core: Core,
    pub(crate) now: Duration,
    /// When the scheduler started.
    started: Duration,
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
            started: Duration::ZERO,
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
            returns: false,
            held: Duration::ZERO,
            computed: Duration::ZERO,
            longest_wait: Duration::ZERO,
            was,
            job: (0, 0),
            wait: None,
            worst_wait: 0.0,
        });
        self.at(MS(at), Later::Begin(self.places.len() - 1));
        self.places.len() - 1
    }

    fn at(&mut self, time: Duration, what: Later) {
        self.sequence += 1;
        self.agenda.insert((time, self.sequence), what);
    }

    /// Who is there: each place that has a client, with its client, its job and what is seen of it.
    pub(crate) fn who_is_there(&self) -> impl Iterator<Item = (u64, (u8, u64), Seen)> {
        self.places.iter().filter_map(|place| Some((place.client?, place.job, place.was)))
    }

    /// For how long somebody had the lock, from grant to drained.
    pub(crate) fn held(&self, place: usize) -> Duration {
        let place = &self.places[place];
        place.held
    }

    /// For how long somebody's gate was open, or its work completed.
    pub(crate) fn computed(&self, place: usize) -> Duration {
        let place = &self.places[place];
        place.computed
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
            let deadline = self.core.next_deadline().map(|deadline| self.started + deadline);
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

    /// Another scheduler takes the place of this one, at a moment when no memory comes back to the card, and its clients come
    /// back one after the other. Who ran goes on meanwhile.
    pub(crate) fn restart(&mut self, config: Config) {
        while self.places.iter().any(|place| place.was.restores) {
            self.run(self.now + MS(1), |_| {});
        }
        self.core = Core::new(config);
        self.started = self.now;
        self.of_client.clear();
        for at in 0..self.places.len() {
            if self.places[at].client.take().is_some() {
                self.places[at].returns = true;
                self.at(self.now + MS(20 + at as u64 * 37 % 1000), Later::Return(at));
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        let passed = time.saturating_sub(self.now);
        self.now = self.now.max(time);
        for place in self.places.iter_mut().filter(|place| place.was.holds) {
            place.held += passed;
            place.computed += if place.was.restores { Duration::ZERO } else { passed };
        }
    }

    fn happen(&mut self, what: Later) {
        let now = self.now;
        match what {
            Later::Begin(at) | Later::Return(at) => {
                let client = self.clients;
                self.clients += 1;
                self.of_client.insert(client, at);
                let place = &mut self.places[at];
                place.client = Some(client);
                let (identity, register, plan) = if std::mem::take(&mut place.returns) {
                    place.behaviour.returns(client, now)
                } else {
                    place.behaviour.begins(client, now)
                };
                place.job = job(identity, client);
                place.wait = None;
                self.event(Event::Registered { client, identity, register });
                self.plan(at, client, plan);
            }
            Later::Deliver(at, client, message) if self.places[at].client == Some(client) => {
                let plan = self.places[at].behaviour.hears(message, now);
                self.plan(at, client, plan);
            }
            Later::Act(at, client, act) if self.places[at].client == Some(client) => match act {
                Act::Say(message) => {
                    let asks = message == ClientMessage::ReqLock;
                    self.event(Event::Message { client, message });
                    if asks {
                        self.begins_to_wait(at);
                    }
                }
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

    /// A job that has had less than a waiter goes first: until it has had as much, and for one turn, which may begin just
    /// before that. This counts for the jobs that are there, and for those that come later and are behind. A gang waits so on
    /// each of its GPUs.
    fn begins_to_wait(&mut self, at: usize) {
        let Some(client) = self.places[at].client else { return };
        let (own, on) = (self.places[at].job, self.places[at].behaviour.seen().gpu);
        if self.places[at].wait.is_none() {
            let mut wait = Wait { since: self.now, catch_up: Duration::ZERO, jobs: BTreeSet::new() };
            let of_gang = |place: &&Place| own.0 == 2 && place.job == own && place.client.is_some();
            let mut gpus: BTreeSet<u8> =
                self.places.iter().filter(of_gang).map(|p| p.behaviour.seen().gpu).collect();
            gpus.insert(on);
            for on in gpus {
                for other in self.places.iter().filter(|other| other.job != own) {
                    self.allow_before(other, on, client, &mut wait);
                }
            }
            self.places[at].wait = Some(wait);
        }
        for waiter in 0..self.places.len() {
            if self.places[waiter].job == own {
                continue;
            }
            let (Some(mut wait), Some(client)) =
                (self.places[waiter].wait.take(), self.places[waiter].client)
            else {
                continue;
            };
            self.allow_before(&self.places[at], on, client, &mut wait);
            self.places[waiter].wait = Some(wait);
        }
    }

    fn allow_before(&self, other: &Place, on: u8, waiter: u64, wait: &mut Wait) {
        let Some(id) = other.client.filter(|_| other.behaviour.seen().gpu == on) else { return };
        let times = self.core.virtual_time(gpu(on), waiter).zip(self.core.virtual_time(gpu(on), id));
        let Some((own, time)) = times else { return };
        let wants = other.was.holds || other.was.waits_since.is_some();
        if wants && (time <= own || other.was.holds) && wait.jobs.insert((on, other.job)) {
            wait.catch_up += Duration::from_nanos(own.saturating_sub(time).max(0) as u64);
        }
    }

    /// The longest wait of a place, as a part of how long it may have been; the wait that is not over included.
    pub(crate) fn worst_wait(&self, place: usize) -> f64 {
        let place = &self.places[place];
        place.wait.as_ref().map_or(0.0, |wait| self.part_of(place, wait)).max(place.worst_wait)
    }

    fn part_of(&self, place: &Place, wait: &Wait) -> f64 {
        // The processes of a tenant have one share: those that do not fit together wait for each other too.
        let mates =
            |other: &&Place| other.job == place.job && place.job.0 == 1 && other.was.gpu == place.was.gpu;
        let own = self.places.iter().filter(mates).count().max(1) as f64;
        let allowed = wait.catch_up.as_secs_f64() + TURN.as_secs_f64() * (wait.jobs.len() + 1) as f64;
        self.now.saturating_sub(wait.since).as_secs_f64() / (allowed * own)
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
            if let Some(wait) = place.wait.take() {
                let part = self.part_of(&self.places[at], &wait);
                let place = &mut self.places[at];
                place.worst_wait = place.worst_wait.max(part);
            }
        }
        let place = &mut self.places[at];
        place.was = seen;
    }

    fn event(&mut self, event: Event) {
        let kind = std::mem::discriminant(&event);
        self.core.handle(event, self.now - self.started);
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
        for place in self.places.iter().filter(|place| place.client.is_some() || place.returns) {
            let seen = place.behaviour.seen();
            resident[usize::from(seen.gpu)] += seen.resident.unwrap_or(0);
        }
        for (gpu, resident) in resident.into_iter().enumerate() {
            assert!(resident <= CAPACITY, "{resident} on {gpu} at {:?}", self.now);
        }
    }
}
