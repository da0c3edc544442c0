//! One GPU.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use nvshare_proto::GpuUuid;

use crate::Time;
use crate::policy::ahead;
use crate::policy::budget::Budget;
use crate::policy::quantum::AutoTarget;
use crate::state::account::{Account, Rates};
use crate::state::client::{Client, ClientId, Identity};
use crate::state::cost::HandOverCosts;
use crate::state::entry::{Entry, Standing};
use crate::state::gangs::Unit;
use crate::state::ledger::{Group, Ledger};
use crate::state::place::Place;
use crate::state::rule::Rule;
use crate::state::shares::Shares;
use crate::state::turn_clock::TurnClock;
use crate::state::virtual_time::{VirtualTime, nanos};

/// The memory that a disconnected client has left on a GPU, until its process ends too or comes back.
#[derive(Debug, Clone)]
pub(crate) struct Departed {
    /// The client's process, as the kernel knows it.
    pub(crate) identity: Identity,
    pub(crate) pid: u32,
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// When the client left.
    pub(crate) since: Time,
    /// The process lives on for longer than its end should take, and the log says so.
    pub(crate) reported: bool,
    /// How often in a row NVML saw the GPU and nothing of this process.
    pub(crate) unseen: u32,
}

/// The source of a GPU's capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CapacitySource {
    /// NVML measured it.
    Certain,
    /// The GPU's clients say it, and agree; or an administrator, as far as the GPU has that.
    Clients,
    /// The GPU's clients say different sizes: each is believed for itself, and one runs at a time.
    Disputed,
}

/// The figures that a GPU's capacity follows from, in bytes: see [`crate::policy::capacity::usable`].
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CapacityFigures {
    pub(crate) available: u64,
    pub(crate) overhead: u64,
    pub(crate) largest: u64,
    /// Bytes that are kept for processes that are off the card.
    pub(crate) set_aside: u64,
    /// Bytes that no process had when the GPU was measured, or `None` if it was not.
    pub(crate) free: Option<u64>,
}

/// One GPU.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) uuid: GpuUuid,
    /// The size as last measured, or as clients say.
    pub(crate) size: CapacityFigures,
    /// Bytes that clients may fill together.
    pub(crate) capacity: u64,
    /// Bytes of the capacity that nobody gets while a process comes back to the card.
    pub(crate) held_back: u64,
    /// Clients that are to come back and have no place here, even if all memory leaves that can.
    pub(crate) no_place_for: BTreeSet<ClientId>,
    pub(crate) source: CapacitySource,
    /// When the last look was asked for that NVML has answered, or that nothing answers.
    pub(crate) looked_at: Option<Time>,
    /// How the quantum is chosen.
    pub(crate) rule: Rule,
    /// The quantum; with a rule that chooses it, the last one.
    pub(crate) quantum: Duration,
    pub(crate) ledger: Ledger,
    pub(crate) shares: Shares,
    /// The time that switching may still cost, where an administrator has stated a part.
    pub(crate) budget: Budget,
    pub(crate) turn: TurnClock,
    /// Drains that were given up in a row.
    pub(crate) deferrals: u32,
    /// Clients that gave the lock back in the hand-over under way: those that still drain may give it up.
    pub(crate) released: BTreeSet<ClientId>,
    /// When the lock was last given back.
    pub(crate) freed_at: Option<Time>,
    /// The longest recent drain.
    pub(crate) longest_drain: Duration,
    /// How fast memory moves, as the scheduler timed it.
    pub(crate) rates: Rates,
    /// The cost of hand-overs on this GPU.
    pub(crate) cost: HandOverCosts,
    /// A client waits for what the holders hold.
    pub(crate) has_waiter: bool,
    /// Until then holders expect that another client waits soon; `None` if they never have.
    pub(crate) waiter_expected_until: Option<Time>,
    /// The last answer to all holders whether a client waits.
    pub(crate) told_bounding: bool,
    /// When the GPU is looked at again, without regard to overdue things in its ledger.
    pub(crate) wake: Option<Time>,
    /// Waiters for which something here is in the way: all of their GPUs are looked at when something changes
    /// here.
    pub(crate) watched_by: BTreeSet<ClientId>,
    /// This GPU's entry in the core's list of deadlines.
    pub(crate) deadline: Option<Time>,
    /// The last hand-overs with nothing to move, from drained to open gate.
    pub(crate) switches: VecDeque<Duration>,
    /// Memory of clients that are gone while their process is not.
    pub(crate) departed: BTreeMap<ClientId, Departed>,
}

/// For this long after the last waiter, holders expect another one while jobs take slices.
const LINGERS: Duration = Duration::from_millis(500);

/// More than any two jobs are apart.
const HEAD_START: VirtualTime = 1 << 60;

/// Hand-overs whose duration is kept.
const SWITCHES_KEPT: usize = 4096;

impl Gpu {
    /// Returns when holders stop expecting another waiter, if none comes.
    pub(crate) fn lingers_until(&self) -> Option<Time> {
        self.waiter_expected_until.filter(|_| !self.has_waiter)
    }

    pub(crate) fn new(uuid: GpuUuid, capacity: u64, source: CapacitySource, rule: Rule) -> Self {
        Self {
            uuid,
            size: CapacityFigures::default(),
            capacity,
            held_back: 0,
            no_place_for: BTreeSet::new(),
            source,
            looked_at: None,
            quantum: rule.initial_quantum(),
            rule,
            ledger: Ledger::default(),
            shares: Shares::default(),
            budget: Budget::default(),
            turn: TurnClock::default(),
            deferrals: 0,
            released: BTreeSet::new(),
            freed_at: None,
            longest_drain: Duration::ZERO,
            rates: Rates::default(),
            cost: HandOverCosts::default(),
            has_waiter: false,
            waiter_expected_until: None,
            told_bounding: false,
            wake: None,
            watched_by: BTreeSet::new(),
            deadline: None,
            switches: VecDeque::new(),
            departed: BTreeMap::new(),
        }
    }

    /// Returns how much room clients may have together at present.
    pub(crate) fn most_room(&self) -> u64 {
        self.capacity.saturating_sub(self.held_back)
    }

    /// Returns the bytes that a process which is off the card needs here to come back. Where nobody measures,
    /// nothing that it has left is given away, and it needs nothing more.
    pub(crate) fn needs_to_return(&self, account: &Account) -> u64 {
        if self.source == CapacitySource::Certain { account.needs_to_return() } else { 0 }
    }

    /// Returns the bytes that a client lacks to have its whole demand resident.
    pub(crate) fn deficit(&self, id: ClientId) -> u64 {
        self.ledger.entry(id).map_or(0, Entry::deficit)
    }

    /// Returns the bytes that a client demands.
    pub(crate) fn demand(&self, id: ClientId) -> u128 {
        self.ledger.entry(id).map_or(0, |entry| u128::from(entry.demand))
    }

    /// Returns the bytes that a unit demands.
    pub(crate) fn demand_of(&self, unit: &Unit) -> u128 {
        unit.on(self.uuid).iter().map(|&id| self.demand(id)).sum()
    }

    /// Returns a group, and the clients of a unit that are not in it yet. A member that was asked to leave and
    /// does not answer runs with nobody: what it has is in the way of the others, as that of any such client.
    pub(crate) fn with_unit(&self, group: Group, unit: &Unit, is_in: fn(Standing) -> bool) -> Group {
        let entries = unit.on(self.uuid).iter().filter_map(|&id| self.ledger.entry(id));
        let joins = |entry: &&Entry| !is_in(entry.standing) && !entry.has_not_left();
        entries.filter(joins).fold(group, Group::with)
    }

    /// Returns any client of a unit that has an entry here.
    pub(crate) fn one_of(&self, unit: &Unit) -> Option<ClientId> {
        unit.on(self.uuid).iter().copied().find(|&id| self.ledger.entry(id).is_some())
    }

    /// Returns the clients that wait, in the order of turns.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = Place> + '_ {
        self.ledger.waiting(self.shares.clock())
    }

    /// Returns the clients that wait and may get a turn, in the order of turns: not those for which no room can be made.
    pub(crate) fn active_waiters(&self) -> impl Iterator<Item = Place> + '_ {
        let is_active = |place: &Place| self.ledger.entry(place.client).is_some_and(|e| e.activity.active);
        self.waiting().filter(is_active)
    }

    /// Whether a client may go ahead of others here: its work is short, or its turn was interrupted.
    pub(crate) fn goes_ahead(&self, client: &Client) -> bool {
        matches!(self.rule, Rule::Auto(_)) && (client.is_interactive() || self.turn.is_interrupted(client.id))
    }

    /// Returns how far the place of a client in the order is before that of others whose job has had as much;
    /// in virtual time.
    pub(crate) fn head_start_of(&self, client: &Client) -> VirtualTime {
        let lead = self.shares.time(client.job).saturating_sub(self.shares.clock());
        let Rule::Auto(target) = self.rule else { return 0 };
        let most = ahead::most_ahead(self.quantum, target.max_wait, self.shares.active());
        let most = nanos(most);
        let may_go = self.turn.is_interrupted(client.id) || !self.has_waited_long(target);
        if self.goes_ahead(client) && lead <= most && may_go { HEAD_START } else { 0 }
    }

    /// Whether the first waiter without a head start has waited for half of the time for which work may wait. Its
    /// turn comes in the other half. One for which no room can be made has no turn.
    fn has_waited_long(&self, target: AutoTarget) -> bool {
        let first = self.active_waiters().find(|place| place.time > -HEAD_START / 2);
        first.is_some_and(|place| self.shares.now().saturating_sub(place.since) >= target.max_wait / 2)
    }

    /// Whether jobs take turns though they fit: they are to have different parts of the time.
    pub(crate) fn takes_slices(&self) -> bool {
        self.shares.are_unequal()
    }

    /// Whether holders bound their submissions: a client waits, or is expected to. While jobs take slices, a
    /// client that has just left asks again at once if it has more work, so its successor keeps within bounds
    /// too. Short work comes again by its own rhythm.
    pub(crate) fn bounds_submissions(&self, now: Time) -> bool {
        self.has_waiter || self.waiter_expected_until.is_some_and(|until| now < until)
    }

    /// Notes that another client will wait by then, most likely.
    pub(crate) fn expect_waiter(&mut self, until: Time) {
        self.waiter_expected_until = self.waiter_expected_until.max(Some(until));
    }

    /// Whether a holder bounds its submissions from its grant on: another client is certain to wait soon.
    pub(crate) fn bounds_submissions_from_grant(&self, now: Time) -> bool {
        self.waiter_expected_until.is_some() && self.bounds_submissions(now)
    }

    /// Returns how much of what a job is behind, or ahead, is kept at most when it stops wanting the GPU.
    pub(crate) fn most_kept(&self) -> Duration {
        (self.quantum + self.longest_drain) * 2
    }

    /// Records how long a drain took. A long one is forgotten by and by.
    pub(crate) fn record_drain(&mut self, took: Duration) {
        self.longest_drain = took.max(self.longest_drain - self.longest_drain / 8);
    }

    /// Brings what depends on the time up to date. Ends the turn if no client holds the GPU or is next;
    /// begins one if a client runs.
    pub(crate) fn bring_up_to_date(&mut self, now: Time) {
        self.wake = None;
        self.shares.advance(now);
        if let Rule::Auto(target) = self.rule {
            self.budget.advance(target.overhead_ppm, now);
        }
        let sums = self.ledger.sums();
        // Nobody can give the last hand-over up any more. Another one is none of their business who left then.
        if sums.leaving == 0 {
            self.released.clear();
        }
        if sums.holders.count == 0 && self.ledger.next().is_empty() {
            self.turn.end();
        } else if sums.running > 0 {
            self.turn.begin_if_none(now);
        }
    }

    /// Updates whether holders bound their submissions. Returns whether that is news for them.
    pub(crate) fn update_bounding(&mut self, now: Time) -> bool {
        self.has_waiter |= self.ledger.sums().claiming > 0;
        if self.has_waiter && self.takes_slices() {
            self.expect_waiter(now + LINGERS);
        }
        let bounds = self.bounds_submissions(now);
        if let Some(until) = self.lingers_until().filter(|&until| bounds && until > now) {
            self.wake_at(until);
        }
        std::mem::replace(&mut self.told_bounding, bounds) != bounds
    }

    pub(crate) fn wake_at(&mut self, time: Time) {
        self.wake = Some(self.wake.map_or(time, |wake| wake.min(time)));
    }

    pub(crate) fn record_switch(&mut self, took: Duration) {
        if self.switches.len() == SWITCHES_KEPT {
            self.switches.pop_front();
        }
        self.switches.push_back(took);
    }

    /// Returns the count, median, 99th percentile and longest of the hand-overs kept, in microseconds.
    pub(crate) fn switch_summary(&self) -> [u64; 4] {
        let mut sorted: Vec<Duration> = self.switches.iter().copied().collect();
        sorted.sort_unstable();
        let micros = |d: Option<&Duration>| d.map_or(0, |d| d.as_micros() as u64);
        [
            sorted.len() as u64,
            micros(sorted.get(sorted.len() / 2)),
            micros(sorted.get(sorted.len() * 99 / 100)),
            micros(sorted.last()),
        ]
    }
}
