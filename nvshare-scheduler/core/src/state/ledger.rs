//! The sums of clients' memory on one GPU: an event does not cost more when a GPU has more clients.
//!
//! The ledger has an [`Entry`] for each client, and for each process that has left while it still has memory
//! there. [`Ledger::set`] is the only way to change one, and keeps every sum and every order in step.
//!
//! Invariant: each sum and set is what its comment says of the entries. `Ledger::audit` recomputes all of it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use crate::Time;
use crate::state::client::{ClientId, Job};
use crate::state::entry::{Entry, Standing};
use crate::state::place::Place;
use crate::state::sleep::Sleepers;
use crate::state::virtual_time::VirtualTime;

fn one_less<K: Ord>(counts: &mut BTreeMap<K, usize>, of: K) {
    if let Some(count) = counts.get_mut(&of) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&of);
        }
    }
}

/// Demand and pinned memory of a group of clients, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) count: usize,
    pub(crate) demand: u128,
    pub(crate) pinned: u128,
    /// The job of the clients that answer, or one of their jobs.
    job: Option<Job>,
    /// The clients that answer belong to several jobs.
    pub(crate) mixed: bool,
}

impl Group {
    fn count_in(&mut self, entry: &Entry) {
        self.count += 1;
        self.demand += u128::from(entry.demand);
        self.pinned += u128::from(entry.pinned);
        if entry.is_silent {
            return;
        }
        self.mixed |= self.job.is_some_and(|job| job != entry.job);
        self.job = self.job.or(Some(entry.job));
    }

    /// Sets the jobs of the group from a count of its clients for each job.
    fn set_jobs(&mut self, jobs: &BTreeMap<Job, usize>) {
        self.job = jobs.keys().next().copied();
        self.mixed = jobs.len() > 1;
    }

    fn count_out(&mut self, entry: &Entry) {
        self.count -= 1;
        self.demand -= u128::from(entry.demand);
        self.pinned -= u128::from(entry.pinned);
    }

    /// Returns the group with one client more.
    #[must_use]
    pub(crate) fn with(mut self, entry: &Entry) -> Self {
        self.count_in(entry);
        self
    }
}

/// How many clients of a job hold the GPU and use a turn, and how many wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Payer {
    holding: usize,
    waiting: usize,
}

impl Payer {
    /// Whether clients wait though their job has the turn.
    fn has_both(self) -> bool {
        self.holding > 0 && self.waiting > 0
    }
}

/// See the module's documentation.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Ledger {
    entries: BTreeMap<ClientId, Entry>,
    sums: Sums,
    /// Clients that hold the lock or are next, and were not asked to leave.
    staying: BTreeSet<ClientId>,
    /// Clients that hold the lock.
    holders: BTreeSet<ClientId>,
    /// For each job, the clients that stay, and the holders among them; both counting those that answer.
    staying_jobs: BTreeMap<Job, usize>,
    holder_jobs: BTreeMap<Job, usize>,
    next: BTreeSet<Place>,
    /// Clients that wait and whose place is a time, and those whose place counts from the GPU's clock.
    waiting: BTreeSet<Place>,
    floating: BTreeSet<Place>,
    /// The clients of each job to which time is charged.
    payers: BTreeMap<Job, Payer>,
    /// How many jobs have the turn, and clients that wait.
    in_turn: usize,
    /// The sizes of the GPU that clients state, and how many clients state each.
    totals: BTreeMap<u64, usize>,
    /// The demands of the clients that wait, and how many clients have each.
    waiting_demands: BTreeMap<u64, usize>,
    /// The deficits of the clients that are next, and how many clients have each.
    next_deficits: BTreeMap<u64, usize>,
    /// Clients with an allocation that waits for room.
    needy: BTreeSet<ClientId>,
    due: BTreeSet<(Time, ClientId)>,
    sleepers: Sleepers,
}

/// Sums over all entries: bytes, and counts of clients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sums {
    pub(crate) room: u128,
    pub(crate) pinned: u128,
    pub(crate) allocated: u128,
    pub(crate) overhead: u128,
    pub(crate) ordered: u128,
    /// Orders to evict that are not answered.
    pub(crate) orders: usize,
    /// Clients that were asked to leave and have not left, except clients that do not answer.
    pub(crate) leaving: usize,
    /// Clients whose gate is open, or whose work completes.
    pub(crate) running: usize,
    /// Clients that are next and make others leave.
    pub(crate) claiming: usize,
    /// Bytes that the clients which are next lack together.
    pub(crate) next_deficit: u128,
    /// Clients that hold the lock or are next, and were not asked to leave.
    pub(crate) staying: Group,
    /// Clients that hold the lock.
    pub(crate) holders: Group,
    /// Those of them that were asked to leave and do not answer.
    stuck: Group,
}

impl Sums {
    /// Returns the clients that hold the lock, but those that were asked to leave and do not answer. Nobody waits
    /// for these to leave: what they keep is pinned.
    pub(crate) fn awaited_holders(&self) -> Group {
        let Self { holders, stuck, .. } = *self;
        Group {
            count: holders.count - stuck.count,
            demand: holders.demand - stuck.demand,
            pinned: holders.pinned - stuck.pinned,
            ..holders
        }
    }
}

impl Ledger {
    /// Writes an entry, or takes it out. Returns whether anything but its place in the order changed.
    pub(in crate::state) fn set(&mut self, id: ClientId, entry: Option<Entry>) -> bool {
        let before = match entry {
            Some(entry) => self.entries.insert(id, entry),
            None => self.entries.remove(&id),
        };
        if before == entry {
            return false;
        }
        if let Some(before) = &before {
            self.take_out(id, before);
        }
        if let Some(entry) = &entry {
            self.put_in(id, entry);
        }
        match (before, entry) {
            (Some(before), Some(entry)) => Entry { place: entry.place, ..before } != entry,
            _ => true,
        }
    }

    fn put_in(&mut self, id: ClientId, entry: &Entry) {
        let sums = &mut self.sums;
        sums.room += u128::from(entry.room);
        sums.pinned += u128::from(entry.pinned);
        sums.allocated += u128::from(entry.allocated);
        sums.overhead += u128::from(entry.overhead);
        sums.ordered += u128::from(entry.bytes_ordered_out.unwrap_or(0));
        sums.orders += usize::from(entry.bytes_ordered_out.is_some());
        sums.leaving += usize::from(entry.is_leaving());
        sums.running += usize::from(entry.is_running);
        sums.claiming += usize::from(entry.is_claiming);
        if entry.standing.is_staying() {
            sums.staying.count_in(entry);
            if !entry.is_silent {
                *self.staying_jobs.entry(entry.job).or_default() += 1;
            }
            sums.staying.set_jobs(&self.staying_jobs);
            self.staying.insert(id);
        }
        if entry.standing.holds() {
            sums.holders.count_in(entry);
            if !entry.is_silent {
                *self.holder_jobs.entry(entry.job).or_default() += 1;
            }
            sums.holders.set_jobs(&self.holder_jobs);
            self.holders.insert(id);
        }
        if entry.has_not_left() {
            sums.stuck.count_in(entry);
        }
        match entry.standing {
            Standing::Next => {
                self.next.insert(entry.place);
                sums.next_deficit += u128::from(entry.deficit());
                *self.next_deficits.entry(entry.deficit()).or_default() += 1;
            }
            Standing::Waits => {
                self.queue(entry).insert(entry.place);
                *self.waiting_demands.entry(entry.demand).or_default() += 1;
            }
            _ => {}
        }
        if entry.has_need {
            self.needy.insert(id);
        }
        if let Some(total) = entry.total {
            *self.totals.entry(total).or_default() += 1;
        }
        self.change_payer(entry, |count| *count += 1);
        if let Some(due) = entry.due {
            self.due.insert((due, id));
        }
        self.sleepers.put_in(id, entry.sleeper, entry.is_silent);
    }

    fn take_out(&mut self, id: ClientId, entry: &Entry) {
        let sums = &mut self.sums;
        sums.room -= u128::from(entry.room);
        sums.pinned -= u128::from(entry.pinned);
        sums.allocated -= u128::from(entry.allocated);
        sums.overhead -= u128::from(entry.overhead);
        sums.ordered -= u128::from(entry.bytes_ordered_out.unwrap_or(0));
        sums.orders -= usize::from(entry.bytes_ordered_out.is_some());
        sums.leaving -= usize::from(entry.is_leaving());
        sums.running -= usize::from(entry.is_running);
        sums.claiming -= usize::from(entry.is_claiming);
        if entry.standing.is_staying() {
            sums.staying.count_out(entry);
            if !entry.is_silent {
                one_less(&mut self.staying_jobs, entry.job);
            }
            sums.staying.set_jobs(&self.staying_jobs);
            self.staying.remove(&id);
        }
        if entry.standing.holds() {
            sums.holders.count_out(entry);
            if !entry.is_silent {
                one_less(&mut self.holder_jobs, entry.job);
            }
            sums.holders.set_jobs(&self.holder_jobs);
            self.holders.remove(&id);
        }
        if entry.has_not_left() {
            sums.stuck.count_out(entry);
        }
        match entry.standing {
            Standing::Next => {
                self.next.remove(&entry.place);
                sums.next_deficit -= u128::from(entry.deficit());
                one_less(&mut self.next_deficits, entry.deficit());
            }
            Standing::Waits => {
                self.queue(entry).remove(&entry.place);
                one_less(&mut self.waiting_demands, entry.demand);
            }
            _ => {}
        }
        if entry.has_need {
            self.needy.remove(&id);
        }
        if let Some(total) = entry.total {
            one_less(&mut self.totals, total);
        }
        self.change_payer(entry, |count| *count -= 1);
        if let Some(due) = entry.due {
            self.due.remove(&(due, id));
        }
        self.sleepers.take_out(id, entry.sleeper);
    }

    fn queue(&mut self, entry: &Entry) -> &mut BTreeSet<Place> {
        if entry.is_floating { &mut self.floating } else { &mut self.waiting }
    }

    /// Changes the count of those of an entry's job that hold the GPU, or wait, as the entry does.
    fn change_payer(&mut self, entry: &Entry, change: fn(&mut usize)) {
        if !entry.activity.holds && entry.standing != Standing::Waits {
            return;
        }
        let payer = self.payers.entry(entry.payer).or_default();
        let before = *payer;
        change(if entry.activity.holds { &mut payer.holding } else { &mut payer.waiting });
        let after = *payer;
        self.in_turn = self.in_turn + usize::from(after.has_both()) - usize::from(before.has_both());
        if after == Payer::default() {
            self.payers.remove(&entry.payer);
        }
    }

    pub(crate) fn entry(&self, id: ClientId) -> Option<&Entry> {
        self.entries.get(&id)
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (ClientId, &Entry)> {
        self.entries.iter().map(|(&id, entry)| (id, entry))
    }

    pub(crate) fn sums(&self) -> &Sums {
        &self.sums
    }

    pub(crate) fn staying(&self) -> &BTreeSet<ClientId> {
        &self.staying
    }

    pub(crate) fn holders(&self) -> &BTreeSet<ClientId> {
        &self.holders
    }

    /// Returns the clients that are next, in the order of turns.
    pub(crate) fn next(&self) -> &BTreeSet<Place> {
        &self.next
    }

    /// Returns the clients that wait, in the order of turns. `clock`: that of the GPU.
    pub(crate) fn waiting(&self, clock: VirtualTime) -> impl Iterator<Item = Place> + '_ {
        let mut at = None;
        std::iter::from_fn(move || {
            at = self.waiting_behind(clock, at);
            at
        })
    }

    /// Returns the first client that waits behind a place.
    pub(crate) fn waiting_behind(&self, clock: VirtualTime, at: Option<Place>) -> Option<Place> {
        let first = |queue: &BTreeSet<Place>, at: Option<Place>| match at {
            Some(at) => queue.range((Bound::Excluded(at), Bound::Unbounded)).next().copied(),
            None => queue.first().copied(),
        };
        let floats = first(&self.floating, at.map(|place| place.relative_to(clock)));
        let floats = floats.map(|place| place.to_absolute(clock));
        first(&self.waiting, at).into_iter().chain(floats).min()
    }

    /// Returns how many clients wait.
    pub(crate) fn count_waiting(&self) -> usize {
        self.waiting.len() + self.floating.len()
    }

    /// Returns the place of a client that waits or is next.
    pub(crate) fn place_of(&self, clock: VirtualTime, id: ClientId) -> Option<Place> {
        let entry = self.entries.get(&id)?;
        match entry.standing {
            Standing::Waits if entry.is_floating => Some(entry.place.to_absolute(clock)),
            Standing::Waits | Standing::Next => Some(entry.place),
            _ => None,
        }
    }

    /// Whether a client waits whose job has the turn.
    pub(crate) fn has_waiter_in_turn(&self) -> bool {
        self.in_turn > 0
    }

    /// Returns the largest size of the GPU that a client states, and whether all state the same, or `None` if
    /// there are no clients.
    pub(crate) fn stated_size(&self) -> Option<(u64, bool)> {
        self.totals.keys().next_back().map(|&most| (most, self.totals.len() == 1))
    }

    pub(crate) fn needy(&self) -> &BTreeSet<ClientId> {
        &self.needy
    }

    /// Returns the clients whose processes are off the card.
    pub(crate) fn sleepers(&self) -> &Sleepers {
        &self.sleepers
    }

    /// Returns the smallest demand of the clients that wait, in bytes.
    pub(crate) fn least_waiting_demand(&self) -> Option<u64> {
        self.waiting_demands.keys().next().copied()
    }

    /// Returns the smallest deficit of the clients that are next, in bytes.
    pub(crate) fn least_next_deficit(&self) -> Option<u64> {
        self.next_deficits.keys().next().copied()
    }

    /// Returns the first time at which something is overdue, and the client that it is about.
    pub(crate) fn first_due(&self) -> Option<(Time, ClientId)> {
        self.due.first().copied()
    }

    /// Returns the clients about which something is overdue at this time.
    pub(crate) fn due_by(&self, now: Time) -> impl Iterator<Item = ClientId> {
        self.due.iter().take_while(move |(due, _)| *due <= now).map(|&(_, id)| id)
    }

    /// Returns the pinned bytes of all clients that are not in the group.
    pub(crate) fn pinned_beside(&self, group: Group) -> u128 {
        self.sums.pinned - group.pinned
    }

    /// Recomputes everything from the entries.
    ///
    /// # Errors
    /// The difference between the ledger and its entries.
    #[cfg(any(test, feature = "test-api"))]
    pub(crate) fn audit(&self) -> Result<(), String> {
        let mut anew = Self::default();
        for (&id, &entry) in &self.entries {
            anew.entries.insert(id, entry);
            anew.put_in(id, &entry);
        }
        if &anew == self { Ok(()) } else { Err(format!("{self:?} should be {anew:?}")) }
    }
}

#[cfg(test)]
mod tests {
    use nvshare_proto::GpuUuid;
    use proptest::prelude::*;

    use super::*;
    use crate::state::share::Activity;
    use crate::state::sleep::{Sleep, Sleeper};

    fn standing() -> impl Strategy<Value = Standing> {
        prop::sample::select(vec![
            Standing::Parked,
            Standing::Waits,
            Standing::Next,
            Standing::Holds,
            Standing::Leaves,
            Standing::Free,
            Standing::Departed,
        ])
    }

    fn sleeper() -> impl Strategy<Value = Sleeper> {
        let time = || (0..4u64).prop_map(Time::from_secs);
        let sleep = prop_oneof![
            Just(Sleep::No),
            time().prop_map(|since| Sleep::Told { since, wakes: false }),
            Just(Sleep::Away),
            time().prop_map(|since| Sleep::Wanted { since }),
            time().prop_map(|until| Sleep::Sent { to: GpuUuid([1; 16]), until }),
            (time(), any::<bool>()).prop_map(|(until, late)| Sleep::Waking { until, late }),
        ];
        (sleep, 0..9u64).prop_map(|(sleep, needs)| Sleeper { sleep, needs })
    }

    fn entry() -> impl Strategy<Value = Entry> {
        let bytes = || prop_oneof![0..64u64, Just(u64::MAX)];
        let sizes = (bytes(), bytes(), bytes(), bytes(), bytes(), prop::option::of(bytes()));
        let due = prop::option::of((0..9u64).prop_map(Time::from_secs));
        (standing(), sizes, any::<[bool; 4]>(), -4..4i64, due, 0..3u64, sleeper()).prop_map(
            |(standing, sizes, [needs, runs, stuck, floats], time, due, job, sleeper)| {
                let job = Job::Tenant(job);
                let (room, pinned, demand, allocated, overhead, ordered) = sizes;
                let place = Place { time, ..Place::nowhere(0) };
                let (activity, claims) =
                    (Activity { holds: runs && standing.holds(), ..Activity::default() }, needs);
                let total = (standing != Standing::Departed).then_some(allocated);
                Entry {
                    standing,
                    room,
                    pinned,
                    demand,
                    allocated,
                    overhead,
                    bytes_ordered_out: ordered,
                    has_need: needs,
                    is_running: runs,
                    is_silent: stuck,
                    is_claiming: claims,
                    activity,
                    payer: job,
                    job,
                    place,
                    is_floating: floats,
                    total,
                    due,
                    sleeper,
                }
            },
        )
    }

    /// Returns the sums of a group, by brute force.
    fn group(entries: &BTreeMap<ClientId, Entry>, which: impl Fn(Standing) -> bool) -> Group {
        let chosen: Vec<&Entry> = entries.values().filter(|e| which(e.standing)).collect();
        Group {
            count: chosen.len(),
            demand: chosen.iter().map(|e| u128::from(e.demand)).sum(),
            pinned: chosen.iter().map(|e| u128::from(e.pinned)).sum(),
            job: chosen.iter().filter(|e| !e.is_silent).map(|e| e.job).min(),
            mixed: chosen.iter().filter(|e| !e.is_silent).map(|e| e.job).collect::<BTreeSet<_>>().len() > 1,
        }
    }

    proptest! {
        #[test]
        fn every_sum_and_order_is_that_of_the_entries(
            changes in prop::collection::vec((0..12u64, prop::option::weighted(0.8, entry())), 1..200),
        ) {
            let mut ledger = Ledger::default();
            let mut model: BTreeMap<ClientId, Entry> = BTreeMap::new();
            for (id, change) in changes {
                let change = change.map(|entry| Entry { place: Place { client: id, ..entry.place }, ..entry });
                let before = model.get(&id).copied();
                match change {
                    Some(entry) => model.insert(id, entry),
                    None => model.remove(&id),
                };
                let moved = |e: Entry| Entry { place: Place::nowhere(0), ..e };
                prop_assert_eq!(ledger.set(id, change), before.map(moved) != change.map(moved));
                ledger.audit().map_err(TestCaseError::fail)?;
                let all = |what: fn(&Entry) -> u64| model.values().map(|e| u128::from(what(e))).sum::<u128>();
                prop_assert_eq!(ledger.sums().room, all(|e| e.room));
                prop_assert_eq!(ledger.sums().pinned, all(|e| e.pinned));
                prop_assert_eq!(ledger.sums().allocated, all(|e| e.allocated));
                prop_assert_eq!(ledger.sums().ordered, all(|e| e.bytes_ordered_out.unwrap_or(0)));
                prop_assert_eq!(ledger.sums().staying, group(&model, Standing::is_staying));
                prop_assert_eq!(ledger.sums().holders, group(&model, Standing::holds));
                let mut answering = model.clone();
                answering.retain(|_, entry| !entry.has_not_left());
                prop_assert_eq!(ledger.sums().awaited_holders(), group(&answering, Standing::holds));
                const CLOCK: VirtualTime = 3;
                let waits = || model.values().filter(|e| e.standing == Standing::Waits);
                let place_now = |e: &Entry| if e.is_floating { e.place.to_absolute(CLOCK) } else { e.place };
                let mut waiting: Vec<Place> = waits().map(place_now).collect();
                waiting.sort_unstable();
                prop_assert!(ledger.waiting(CLOCK).eq(waiting));
                prop_assert_eq!(ledger.count_waiting(), waits().count());
                let in_turn = waits().any(|e| model.values().any(|other| other.activity.holds && other.payer == e.payer));
                prop_assert_eq!(ledger.has_waiter_in_turn(), in_turn);
                let stated: BTreeSet<u64> = model.values().filter_map(|e| e.total).collect();
                prop_assert_eq!(ledger.stated_size(), stated.last().map(|&most| (most, stated.len() == 1)));
                let least = model.values().filter(|e| e.standing == Standing::Waits).map(|e| e.demand).min();
                prop_assert_eq!(ledger.least_waiting_demand(), least);
                let next = || model.values().filter(|e| e.standing == Standing::Next).map(Entry::deficit);
                prop_assert_eq!(ledger.sums().next_deficit, next().map(u128::from).sum::<u128>());
                prop_assert_eq!(ledger.least_next_deficit(), next().min());
                let asleep = |e: &&Entry| e.sleeper.sleep.is_off_card();
                let needs = || model.values().filter(asleep).map(|e| e.sleeper.needs);
                prop_assert_eq!(ledger.sleepers().needed_by_all(), needs().sum::<u64>());
                let not_woken = |e: &&Entry| !matches!(e.sleeper.sleep, Sleep::Waking { .. });
                let left = model.values().filter(asleep).filter(not_woken);
                prop_assert_eq!(ledger.sleepers().largest(), left.map(|e| e.sleeper.needs).max().unwrap_or(0));
                let due = model.iter().filter_map(|(&id, e)| Some((e.due?, id))).min();
                prop_assert_eq!(ledger.first_due(), due);
            }
        }
    }
}
