//! Delivers messages between a core and clients, and looks after each event whether the rules hold.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nvshare_core::{Config, Core, Event, Identity, Output};
use nvshare_proto::{ClientMessage, SchedulerMessage};

use super::{Act, Behaviour, Plan, Seen};
use crate::table::{CAPACITY, MS, gpu};

/// The whole state is recomputed by brute force each time that this number of events has happened.
const AUDITS_EVERY: u64 = 257;

/// Far more than any of the worlds has.
const MAX_EVENTS: u64 = 2_000_000;

/// Steps that one event may take for each client that is there, and for a handful that are not.
const MAX_STEPS_EACH: f64 = 20.0;

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

/// One role in the world: a behaviour, and the client that it is at present.
struct Role {
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
    /// The time that the jobs that go first have had less than the waiter, together.
    catch_up: Duration,
    /// Jobs that go first, by GPU.
    jobs: BTreeSet<(u8, (u8, u64))>,
}

pub(crate) struct World {
    pub(crate) core: Core,
    pub(crate) now: Duration,
    /// When the scheduler started.
    started: Duration,
    roles: Vec<Role>,
    of_client: BTreeMap<u64, usize>,
    clients: u64,
    agenda: BTreeMap<(Duration, u64), Later>,
    sequence: u64,
    pub(crate) events: u64,
    /// The largest number of steps that one event took, and of those how many for each client that was there.
    pub(crate) most_steps: u64,
    pub(crate) most_steps_each: f64,
}

impl World {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            core: Core::new(config),
            now: Duration::ZERO,
            started: Duration::ZERO,
            roles: Vec::new(),
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
        self.roles.push(Role {
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
        self.at(MS(at), Later::Begin(self.roles.len() - 1));
        self.roles.len() - 1
    }

    fn at(&mut self, time: Duration, what: Later) {
        self.sequence += 1;
        self.agenda.insert((time, self.sequence), what);
    }

    /// Each role that has a client: the client, its job, and how it was seen last.
    pub(crate) fn who_is_there(&self) -> impl Iterator<Item = (u64, (u8, u64), Seen)> {
        self.roles.iter().filter_map(|role| Some((role.client?, role.job, role.was)))
    }

    /// For how long somebody had the lock, from grant to drained.
    pub(crate) fn held(&self, role: usize) -> Duration {
        let role = &self.roles[role];
        role.held
    }

    /// For how long somebody's gate was open, or its work completed.
    pub(crate) fn computed(&self, role: usize) -> Duration {
        let role = &self.roles[role];
        role.computed
    }

    pub(crate) fn longest_wait(&self, role: usize) -> Duration {
        let role = &self.roles[role];
        let waits = role.was.waits_since.map_or(Duration::ZERO, |since| self.now.saturating_sub(since));
        role.longest_wait.max(waits)
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
    /// back one after the other. Clients that ran go on meanwhile.
    pub(crate) fn restart(&mut self, config: Config) {
        while self.roles.iter().any(|role| role.was.restores) {
            self.run(self.now + MS(1), |_| {});
        }
        self.core = Core::new(config);
        self.started = self.now;
        self.of_client.clear();
        for at in 0..self.roles.len() {
            if self.roles[at].client.take().is_some() {
                self.roles[at].returns = true;
                self.at(self.now + MS(20 + at as u64 * 37 % 1000), Later::Return(at));
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        let passed = time.saturating_sub(self.now);
        self.now = self.now.max(time);
        for role in self.roles.iter_mut().filter(|role| role.was.holds) {
            role.held += passed;
            role.computed += if role.was.restores { Duration::ZERO } else { passed };
        }
    }

    fn happen(&mut self, what: Later) {
        let now = self.now;
        match what {
            Later::Begin(at) | Later::Return(at) => {
                let client = self.clients;
                self.clients += 1;
                self.of_client.insert(client, at);
                let role = &mut self.roles[at];
                role.client = Some(client);
                let (identity, register, plan) = if std::mem::take(&mut role.returns) {
                    role.behaviour.returns(client, now)
                } else {
                    role.behaviour.begins(client, now)
                };
                role.job = job(identity, client);
                role.wait = None;
                self.event(Event::Registered { client, identity, register });
                // Its gang has waited for it, and waits for its turn from now on.
                for rank in self.ranks_of(self.roles[at].job) {
                    if let (Some(client), Some(_)) = (self.roles[rank].client, &self.roles[rank].wait) {
                        self.roles[rank].wait = Some(self.wait_of(rank, client));
                    }
                }
                self.plan(at, client, plan);
            }
            Later::Deliver(at, client, message) if self.roles[at].client == Some(client) => {
                let plan = self.roles[at].behaviour.hears(message, now);
                self.plan(at, client, plan);
            }
            Later::Act(at, client, act) if self.roles[at].client == Some(client) => match act {
                Act::Say(message) => {
                    let asks = message == ClientMessage::ReqLock;
                    self.event(Event::Message { client, message });
                    if asks {
                        self.begins_to_wait(at);
                    }
                }
                Act::Own(what) => {
                    let plan = self.roles[at].behaviour.does(what, now);
                    self.plan(at, client, plan);
                }
                Act::End(again) => {
                    self.roles[at].client = None;
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
        let Some(client) = self.roles[at].client else { return };
        let (own, on) = (self.roles[at].job, self.roles[at].behaviour.seen().gpu);
        if self.roles[at].wait.is_none() {
            self.roles[at].wait = Some(self.wait_of(at, client));
        }
        for waiter in 0..self.roles.len() {
            if self.roles[waiter].job == own {
                continue;
            }
            let (Some(mut wait), Some(client)) = (self.roles[waiter].wait.take(), self.roles[waiter].client)
            else {
                continue;
            };
            self.allow_before(&self.roles[at], on, client, &mut wait);
            self.roles[waiter].wait = Some(wait);
        }
    }

    /// The roles of a gang; of another job none.
    fn ranks_of(&self, job: (u8, u64)) -> Vec<usize> {
        (0..self.roles.len()).filter(|&at| job.0 == 2 && self.roles[at].job == job).collect()
    }

    /// The wait of a role's client that begins now.
    fn wait_of(&self, at: usize, client: u64) -> Wait {
        let own = self.roles[at].job;
        let mut wait = Wait { since: self.now, catch_up: Duration::ZERO, jobs: BTreeSet::new() };
        let ranks = self.ranks_of(own).into_iter().map(|at| &self.roles[at]);
        let there = ranks.filter(|rank| rank.client.is_some());
        let mut gpus: BTreeSet<u8> = there.map(|rank| rank.behaviour.seen().gpu).collect();
        gpus.insert(self.roles[at].behaviour.seen().gpu);
        for on in gpus {
            for other in self.roles.iter().filter(|other| other.job != own) {
                self.allow_before(other, on, client, &mut wait);
            }
        }
        wait
    }

    fn allow_before(&self, other: &Role, on: u8, waiter: u64, wait: &mut Wait) {
        let Some(id) = other.client.filter(|_| other.behaviour.seen().gpu == on) else { return };
        let times = self.core.virtual_time(gpu(on), waiter).zip(self.core.virtual_time(gpu(on), id));
        let Some((own, time)) = times else { return };
        let wants = other.was.holds || other.was.waits_since.is_some();
        if wants && (time <= own || other.was.holds) && wait.jobs.insert((on, other.job)) {
            wait.catch_up += Duration::from_nanos(own.saturating_sub(time).max(0) as u64);
        }
    }

    /// The longest wait of a role, as a part of how long it may have been; the wait that is not over included.
    pub(crate) fn worst_wait(&self, role: usize) -> f64 {
        let role = &self.roles[role];
        role.wait.as_ref().map_or(0.0, |wait| self.part_of(role, wait)).max(role.worst_wait)
    }

    fn part_of(&self, role: &Role, wait: &Wait) -> f64 {
        // The processes of a tenant have one share: those that do not fit together wait for each other too.
        let mates = |other: &&Role| other.job == role.job && role.job.0 == 1 && other.was.gpu == role.was.gpu;
        let own = self.roles.iter().filter(mates).count().max(1) as f64;
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
        let role = &mut self.roles[at];
        let seen = if role.client.is_some() { role.behaviour.seen() } else { Seen::default() };
        if let (Some(since), true) = (role.was.waits_since, seen.waits_since.is_none()) {
            role.longest_wait = role.longest_wait.max(self.now.saturating_sub(since));
            if let Some(wait) = role.wait.take() {
                let part = self.part_of(&self.roles[at], &wait);
                let role = &mut self.roles[at];
                role.worst_wait = role.worst_wait.max(part);
            }
        }
        let role = &mut self.roles[at];
        role.was = seen;
    }

    fn event(&mut self, event: Event) {
        let kind = std::mem::discriminant(&event);
        self.core.handle(event, self.now - self.started);
        let steps = self.core.steps();
        self.most_steps = self.most_steps.max(steps);
        let each = steps as f64 / (self.of_client.len() + 8) as f64;
        self.most_steps_each = self.most_steps_each.max(each);
        assert!(each <= MAX_STEPS_EACH, "{steps} steps for {kind:?} at {:?}", self.now);
        while let Some(output) = self.core.poll_output() {
            let Output::Send { client, message } = output else { continue };
            if let Some(&at) = self.of_client.get(&client) {
                // One channel: what is sent first arrives first.
                self.at(self.now + Duration::from_micros(50), Later::Deliver(at, client, message));
            }
        }
        self.events += 1;
        assert!(self.events < MAX_EVENTS, "one message follows another without end at {:?}", self.now);
        if self.events.is_multiple_of(AUDITS_EVERY) {
            self.core.audit().unwrap_or_else(|wrong| panic!("at {:?}: {wrong}", self.now));
        }
        self.check();
    }

    /// Honest clients have no more memory on each GPU than fits.
    fn check(&self) {
        let mut resident = [0u64; 8];
        for role in self.roles.iter().filter(|role| role.client.is_some() || role.returns) {
            let seen = role.behaviour.seen();
            resident[usize::from(seen.gpu)] += seen.resident.unwrap_or(0);
        }
        for (gpu, resident) in resident.into_iter().enumerate() {
            assert!(resident <= CAPACITY, "{resident} on {gpu} at {:?}", self.now);
        }
    }
}
