//! The books: the state, and what follows from each change of it. Here is the one way to change a client: its entries in ledgers
//! change with it, what is different is told, and what depends on it is looked at again.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use nvshare_proto::{EventKind, GpuUuid};

use crate::Time;
use crate::report::Report;
use crate::report::happened::Glance;
use crate::report::warnings::Topic;
use crate::state::State;
use crate::state::account::Account;
use crate::state::client::{Client, ClientId, Job, Phase, Why};
use crate::state::config::Config;
use crate::state::gpu::{Gpu, Size, Source};
use crate::state::ledger::{Entry, Standing};
use crate::state::share::Activity;
use crate::state::virtual_time::Virtual;

/// Places of waiting clients, each on one GPU, that one event brings up to date: few enough to cost some microseconds.
const PLACES_REFRESHED: usize = 16;

/// What is to be looked at again, and when.
#[derive(Debug, Default)]
pub(crate) struct Agenda {
    /// GPUs of which something has changed since the core last looked at them.
    pub(crate) dirty: BTreeSet<GpuUuid>,
    /// Gangs of which a member has changed since the core last looked at their GPUs.
    pub(crate) dirty_gangs: BTreeSet<u64>,
    /// Waiters for which something that was in the way has changed since the core last looked at their GPUs.
    pub(crate) woken: BTreeSet<ClientId>,
    /// Clients for which the answer whether a client waits for what they hold may have changed.
    pub(crate) to_tell: BTreeSet<ClientId>,
    /// Clients that wait and whose place moves by itself, and in which event it was brought up to date; and the one whose turn that
    /// was last.
    pub(crate) moving: BTreeMap<ClientId, u64>,
    refreshed: ClientId,
    /// Counts the changes of entries in ledgers.
    pub(crate) changes: u64,
    /// When the core looks at each GPU again if no event comes before.
    pub(crate) deadlines: BTreeSet<(Time, GpuUuid)>,
}

impl Agenda {
    /// Nothing is to be looked at: scheduling is off.
    pub(crate) fn forget(&mut self) {
        self.dirty.clear();
        self.dirty_gangs.clear();
        self.woken.clear();
        self.to_tell.clear();
    }

    /// Something about a GPU has changed: it is looked at again, and with it those who wait for that.
    pub(crate) fn look_again(&mut self, gpu: &mut Gpu) {
        self.dirty.insert(gpu.uuid);
        self.woken.append(&mut gpu.watched_by);
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Books {
    pub(crate) state: State,
    pub(crate) agenda: Agenda,
    pub(crate) report: Report,
    /// Work that the last event took: clients and GPUs that were looked at, and entries written, counted each time.
    pub(crate) work: u64,
}

impl Books {
    pub(crate) fn new(config: Config) -> Self {
        let (agenda, report) = (Agenda::default(), Report::default());
        Self { state: State::new(config), agenda, report, work: 0 }
    }

    /// Changes a client, and its entries in the ledgers of its GPUs.
    pub(crate) fn with(&mut self, id: ClientId, change: impl FnOnce(&mut Client)) {
        let now = self.state.now;
        let Some(client) = self.state.clients.get_mut(&id) else { return };
        client.count(now);
        let (before, slept, was_next) = (Glance::of(client), client.is_asleep(), client.phase.is_next());
        let was_granted = client.phase.is_granted();
        change(client);
        if was_next && client.phase == Phase::Parked {
            client.accounts.values_mut().for_each(|account| account.early = None);
        }
        match (slept, client.is_asleep()) {
            (false, true) => client.rhythm.fall_asleep(now),
            (true, false) => client.rhythm.wake(now),
            _ => {}
        }
        if client.phase.is_granted() && !was_granted {
            client.note_what_is_to_come_back();
        }
        self.enter(id);
        if let Some(client) = self.state.clients.get(&id) {
            self.report.tell_changes(client, before, now);
        }
    }

    pub(crate) fn with_account(&mut self, id: ClientId, gpu: GpuUuid, change: impl FnOnce(&mut Account)) {
        let now = self.state.now;
        let Some(client) = self.state.clients.get_mut(&id) else { return };
        let seen = |client: &Client| (activity(client), client.is_interactive());
        let was = seen(client);
        client.count(now);
        let is_same = seen(client) == was;
        let Some(account) = client.accounts.get_mut(&gpu) else { return };
        let before = **account;
        change(account);
        let after = **account;
        // Nothing changes on the client's other GPUs, unless its work counts as another kind from now on.
        self.enter_on(id, Some(gpu).filter(|_| is_same));
        self.report.tell_account_changes(id, gpu, [&before, &after], now);
    }

    /// Writes a client into the ledgers of its GPUs. A GPU whose entry changed is looked at again.
    pub(crate) fn enter(&mut self, id: ClientId) {
        self.enter_on(id, None);
    }

    /// The same for one GPU, or for all.
    pub(crate) fn enter_on(&mut self, id: ClientId, only: Option<GpuUuid>) {
        let now = self.state.now;
        let Some(client) = self.state.clients.get(&id) else { return };
        let (from, to) = only
            .map_or((Bound::Unbounded, Bound::Unbounded), |gpu| (Bound::Included(gpu), Bound::Included(gpu)));
        let activity = activity(client);
        for uuid in client.accounts.range((from, to)).map(|(uuid, _)| uuid) {
            let Some(gpu) = self.state.gpus.get_mut(uuid) else { continue };
            gpu.shares.advance(now);
            let before = gpu.ledger.entry(id).map(|entry| entry.activity);
            if before != Some(activity) {
                let bound = gpu.most_kept();
                gpu.shares.change(client.job, before, Some(activity), bound);
            }
        }
        client.ahead.forget();
        let stands = Stands::of(client, activity, &self.state);
        let has_mates = self.state.jobs.get(&client.job).is_some_and(|of_job| of_job.clients.len() > 1);
        let mut moves = stands.several || has_mates;
        let mut changed = false;
        for (uuid, account) in client.accounts.range((from, to)) {
            let Some(gpu) = self.state.gpus.get_mut(uuid) else { continue };
            self.work += 1;
            moves |= gpu.goes_ahead(client);
            let entry = stands.entry(client, account, gpu, &self.state.config);
            let held = gpu.ledger.entry(id).is_some_and(|entry| entry.standing.holds());
            // With the rest of its gang.
            if entry.standing.holds() != held {
                self.agenda.to_tell.insert(id);
            }
            if gpu.ledger.set(id, Some(entry)) {
                self.agenda.look_again(gpu);
                self.agenda.changes += 1;
                changed = true;
            }
        }
        // The other members of its gang depend on it.
        self.agenda.dirty_gangs.extend(client.gang.filter(|_| changed));
        let waits = stands.standing == Standing::Waits;
        if waits && moves {
            let refreshed = self.agenda.moving.entry(id).or_default();
            *refreshed = if only.is_none() { self.state.events } else { *refreshed };
        } else if !waits {
            self.agenda.moving.remove(&id);
        }
    }

    /// Brings the places of waiting clients up to date that move without an event of their own: those of clients that use
    /// several GPUs follow all of their clocks, and those of a job's processes what the others of the job get. Where many wait,
    /// each event brings some up to date, in turn, so that its cost has a bound.
    pub(crate) fn refresh_places(&mut self) {
        let mut left = PLACES_REFRESHED;
        let behind = self.agenda.moving.range((Bound::Excluded(self.agenda.refreshed), Bound::Unbounded));
        let around = self.agenda.moving.range(..=self.agenda.refreshed);
        let mut ids = Vec::new();
        for (&id, _) in behind.chain(around) {
            let Some(client) = self.state.clients.get(&id) else { continue };
            ids.push(id);
            left = left.saturating_sub(client.accounts.len());
            if left == 0 {
                break;
            }
        }
        for id in ids {
            self.agenda.refreshed = id;
            self.refresh_place(id);
        }
    }

    /// The same for one client.
    pub(crate) fn refresh_place(&mut self, id: ClientId) {
        if self.agenda.moving.get(&id).is_some_and(|&refreshed| refreshed != self.state.events) {
            self.enter(id);
        }
    }

    /// Changes a GPU, if it is known.
    pub(crate) fn on_gpu(&mut self, uuid: GpuUuid, change: impl FnOnce(&mut Gpu)) {
        if let Some(gpu) = self.state.gpus.get_mut(&uuid) {
            change(gpu);
        }
    }

    /// The GPU is looked at again then, if not before.
    pub(crate) fn wake_at(&mut self, uuid: GpuUuid, time: Time) {
        self.on_gpu(uuid, |gpu| gpu.wake_at(time));
    }

    /// Reports an event of a client.
    pub(crate) fn tell(&mut self, kind: EventKind, id: ClientId, bytes: Option<u64>) {
        if let Some(client) = self.state.clients.get(&id) {
            self.report.tell(kind, client, bytes, None);
        }
    }

    /// Warns of something about a client, on one GPU or in all.
    pub(crate) fn warn_of_client(&mut self, topic: Topic, id: ClientId, uuid: Option<GpuUuid>, text: &str) {
        self.report.warn_of_client(topic, id, uuid, self.state.now, text);
    }
}

/// How a client stands: what its entries have in common.
#[derive(Debug, Clone, Copy)]
struct Stands {
    standing: Standing,
    activity: Activity,
    job: Job,
    /// Its turn comes on several GPUs at once.
    several: bool,
    /// How far it is ahead of the clocks of its GPUs then.
    ahead: Virtual,
}

impl Stands {
    fn of(client: &Client, activity: Activity, state: &State) -> Self {
        let (standing, several) = (standing(client), client.uses_several());
        let ahead = if several && is_ordered(standing) { state.ahead_on_all(client) } else { 0 };
        Self { standing, activity, job: state.takes_turns_as(client), several, ahead }
    }

    /// The client's entry on one GPU.
    fn entry(self, client: &Client, account: &Account, gpu: &Gpu, config: &Config) -> Entry {
        let floats = self.several && self.standing == Standing::Waits;
        let time = match self.several {
            true if floats => self.ahead,
            true => gpu.shares.clock().saturating_add(self.ahead),
            false => gpu.shares.time(client.job),
        };
        let time = time.saturating_sub(gpu.lent_to(client));
        let ordered = is_ordered(self.standing);
        Entry {
            standing: self.standing,
            room: account.room,
            pinned: client.pinned(account),
            demand: account.demand(match gpu.source {
                Source::Disputed => {
                    config.usable(gpu.uuid, Size { available: account.usage.total, ..Size::default() })
                }
                _ => gpu.capacity,
            }),
            allocated: account.usage.allocated,
            overhead: account.overhead(),
            ordered: account.order.map(|order| order.bytes),
            needs: account.needs > 0 && !client.stopped,
            runs: client.phase.runs(),
            stuck: client.is_silent(),
            claims: client.phase == Phase::Next(Why::Claims),
            activity: self.activity,
            payer: client.job,
            job: self.job,
            place: if ordered { (time, client.waiting_since, client.id) } else { (0, Time::ZERO, client.id) },
            floats,
            total: Some(account.usage.total),
            due: config.first_due(client, account),
        }
    }
}

/// Whether those who stand so have a place in the order of turns.
fn is_ordered(standing: Standing) -> bool {
    matches!(standing, Standing::Waits | Standing::Next)
}

fn standing(client: &Client) -> Standing {
    match client.phase {
        Phase::Parked if client.waits() => Standing::Waits,
        Phase::Parked => Standing::Parked,
        Phase::Next(_) => Standing::Next,
        Phase::Dropping { .. } | Phase::Drained => Standing::Leaves,
        Phase::Granted { .. } | Phase::Running { .. } | Phase::Idle { .. } => Standing::Holds,
        Phase::Free => Standing::Free,
    }
}

/// What a client does for its job's share: nothing while it does not answer, so that nobody waits for a turn of a process that is stopped.
fn activity(client: &Client) -> Activity {
    if client.stuck {
        return Activity::default();
    }
    let (holds, counts) = (client.phase.uses_a_turn(), client.phase.counts());
    let waits = client.waits() && !client.hopeless;
    let active = holds || waits || client.phase.is_next();
    Activity { active, holds, counts, runs: client.phase.runs(), long: active && !client.is_interactive() }
}
