//! What clients have on one GPU, in sums: what an event asks of a GPU does not cost more when there are more clients.
//!
//! The ledger has an [`Entry`] for each client, and for each process that has left while it still has memory there.
//! [`Ledger::set`] is the only way to change one, and keeps every sum and every order in step.
//!
//! Invariant: each sum is the sum over the entries, and each set holds exactly those entries that its comment says. The
//! tests recompute all of it from the entries ([`Ledger::audit`]) after each random change.

use std::collections::{BTreeMap, BTreeSet};

use crate::Time;
use crate::client::{ClientId, Job};
use crate::shares::{Part, Virtual};

/// The place of a client in the order of turns: the smallest virtual time first, then who has waited longest.
pub(crate) type Key = (Virtual, Time, ClientId);

/// Where an entry's client stands, as far as the ledger has to tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Standing {
    /// It does not run and does not ask to.
    Parked,
    /// It waits for the lock.
    Waits,
    /// It is next.
    Next,
    /// It holds the lock and was not asked to leave.
    Holds,
    /// It holds the lock and was asked to leave.
    Leaves,
    /// Scheduling is off.
    Free,
    /// Its connection has ended and its process has not.
    Departed,
}

impl Standing {
    pub(crate) fn holds(self) -> bool {
        matches!(self, Self::Holds | Self::Leaves)
    }

    pub(crate) fn stays(self) -> bool {
        matches!(self, Self::Holds | Self::Next)
    }
}

/// What one client has on the GPU, in bytes, and where it stands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Entry {
    pub(crate) standing: Standing,
    /// What it may have resident.
    pub(crate) charged: u64,
    /// What of that cannot be had by asking.
    pub(crate) pinned: u64,
    /// What it wants resident when it runs.
    pub(crate) demand: u64,
    pub(crate) allocated: u64,
    pub(crate) overhead: u64,
    /// What it was told to give back and has not.
    pub(crate) ordered: Option<u64>,
    /// An allocation waits for room.
    pub(crate) needs: bool,
    /// Its open gate lets work through.
    pub(crate) runs: bool,
    /// It is next and others leave for it.
    pub(crate) claims: bool,
    /// What it asks of its job's share.
    pub(crate) part: Part,
    /// Whose time it uses.
    pub(crate) job: Job,
    /// Its place among those who wait.
    pub(crate) key: Key,
    /// Its place moves while it waits: it uses several GPUs, or its job holds this one.
    pub(crate) moves: bool,
    /// When something about it is overdue.
    pub(crate) due: Option<Time>,
}

impl Entry {
    /// What it lacks to have all resident that it demands, in bytes.
    pub(crate) fn deficit(&self) -> u64 {
        self.demand.saturating_sub(self.charged)
    }
}

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
    /// Whose they are, or one of those.
    job: Option<Job>,
    /// They are of several jobs.
    pub(crate) mixed: bool,
}

impl Group {
    fn count_in(&mut self, entry: &Entry) {
        self.count += 1;
        self.demand += u128::from(entry.demand);
        self.pinned += u128::from(entry.pinned);
        self.mixed |= self.job.is_some_and(|job| job != entry.job);
        self.job = self.job.or(Some(entry.job));
    }

    /// Whose they all are, as counted.
    fn are_of(&mut self, jobs: &BTreeMap<Job, usize>) {
        self.job = jobs.keys().next().copied();
        self.mixed = jobs.len() > 1;
    }

    fn count_out(&mut self, entry: &Entry) {
        self.count -= 1;
        self.demand -= u128::from(entry.demand);
        self.pinned -= u128::from(entry.pinned);
    }

    /// The group with one more.
    #[must_use]
    pub(crate) fn with(mut self, entry: &Entry) -> Self {
        self.count_in(entry);
        self
    }
}

/// See the module's documentation.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Ledger {
    entries: BTreeMap<ClientId, Entry>,
    sums: Sums,
    /// Who holds or is next, and was not asked to leave.
    members: BTreeSet<ClientId>,
    /// Who holds the lock.
    holders: BTreeSet<ClientId>,
    /// How many of them each job has.
    member_jobs: BTreeMap<Job, usize>,
    holder_jobs: BTreeMap<Job, usize>,
    next: BTreeSet<Key>,
    waiting: BTreeSet<Key>,
    /// What those who wait demand: how many of each.
    waiting_demands: BTreeMap<u64, usize>,
    /// What those who are next lack: how many of each.
    next_deficits: BTreeMap<u64, usize>,
    /// Who waits and moves.
    moving: BTreeSet<ClientId>,
    /// Whose allocation waits for room.
    needy: BTreeSet<ClientId>,
    departed: BTreeSet<ClientId>,
    due: BTreeSet<(Time, ClientId)>,
}

/// Sums over all entries, in bytes but for the counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sums {
    pub(crate) charged: u128,
    pub(crate) pinned: u128,
    pub(crate) allocated: u128,
    pub(crate) overhead: u128,
    pub(crate) ordered: u128,
    /// Orders that are not answered.
    pub(crate) orders: usize,
    /// Who was asked to leave and has not.
    pub(crate) leaving: usize,
    /// Whose gate is open.
    pub(crate) running: usize,
    /// Who is next and makes others leave.
    pub(crate) claiming: usize,
    /// What those who are next lack together.
    pub(crate) next_deficit: u128,
    /// Who holds or is next.
    pub(crate) members: Group,
    /// Who holds.
    pub(crate) holders: Group,
}

impl Ledger {
    /// Writes an entry, or takes it out. Whether anything but its place in the order is another now.
    pub(crate) fn set(&mut self, id: ClientId, entry: Option<Entry>) -> bool {
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
            (Some(before), Some(entry)) => Entry { key: entry.key, ..before } != entry,
            _ => true,
        }
    }

    fn put_in(&mut self, id: ClientId, entry: &Entry) {
        let sums = &mut self.sums;
        sums.charged += u128::from(entry.charged);
        sums.pinned += u128::from(entry.pinned);
        sums.allocated += u128::from(entry.allocated);
        sums.overhead += u128::from(entry.overhead);
        sums.ordered += u128::from(entry.ordered.unwrap_or(0));
        sums.orders += usize::from(entry.ordered.is_some());
        sums.leaving += usize::from(entry.standing == Standing::Leaves);
        sums.running += usize::from(entry.runs);
        sums.claiming += usize::from(entry.claims);
        if entry.standing.stays() {
            sums.members.count_in(entry);
            *self.member_jobs.entry(entry.job).or_default() += 1;
            sums.members.are_of(&self.member_jobs);
            self.members.insert(id);
        }
        if entry.standing.holds() {
            sums.holders.count_in(entry);
            *self.holder_jobs.entry(entry.job).or_default() += 1;
            sums.holders.are_of(&self.holder_jobs);
            self.holders.insert(id);
        }
        match entry.standing {
            Standing::Next => {
                self.next.insert(entry.key);
                sums.next_deficit += u128::from(entry.deficit());
                *self.next_deficits.entry(entry.deficit()).or_default() += 1;
            }
            Standing::Waits => {
                self.waiting.insert(entry.key);
                *self.waiting_demands.entry(entry.demand).or_default() += 1;
                if entry.moves {
                    self.moving.insert(id);
                }
            }
            Standing::Departed => {
                self.departed.insert(id);
            }
            _ => {}
        }
        if entry.needs {
            self.needy.insert(id);
        }
        if let Some(due) = entry.due {
            self.due.insert((due, id));
        }
    }

    fn take_out(&mut self, id: ClientId, entry: &Entry) {
        let sums = &mut self.sums;
        sums.charged -= u128::from(entry.charged);
        sums.pinned -= u128::from(entry.pinned);
        sums.allocated -= u128::from(entry.allocated);
        sums.overhead -= u128::from(entry.overhead);
        sums.ordered -= u128::from(entry.ordered.unwrap_or(0));
        sums.orders -= usize::from(entry.ordered.is_some());
        sums.leaving -= usize::from(entry.standing == Standing::Leaves);
        sums.running -= usize::from(entry.runs);
        sums.claiming -= usize::from(entry.claims);
        if entry.standing.stays() {
            sums.members.count_out(entry);
            one_less(&mut self.member_jobs, entry.job);
            sums.members.are_of(&self.member_jobs);
            self.members.remove(&id);
        }
        if entry.standing.holds() {
            sums.holders.count_out(entry);
            one_less(&mut self.holder_jobs, entry.job);
            sums.holders.are_of(&self.holder_jobs);
            self.holders.remove(&id);
        }
        match entry.standing {
            Standing::Next => {
                self.next.remove(&entry.key);
                sums.next_deficit -= u128::from(entry.deficit());
                one_less(&mut self.next_deficits, entry.deficit());
            }
            Standing::Waits => {
                self.waiting.remove(&entry.key);
                one_less(&mut self.waiting_demands, entry.demand);
                self.moving.remove(&id);
            }
            Standing::Departed => {
                self.departed.remove(&id);
            }
            _ => {}
        }
        if entry.needs {
            self.needy.remove(&id);
        }
        if let Some(due) = entry.due {
            self.due.remove(&(due, id));
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

    pub(crate) fn members(&self) -> &BTreeSet<ClientId> {
        &self.members
    }

    pub(crate) fn holders(&self) -> &BTreeSet<ClientId> {
        &self.holders
    }

    /// Who is next, in the order of turns.
    pub(crate) fn next(&self) -> &BTreeSet<Key> {
        &self.next
    }

    /// Who waits, in the order of turns.
    pub(crate) fn waiting(&self) -> &BTreeSet<Key> {
        &self.waiting
    }

    pub(crate) fn moving(&self) -> &BTreeSet<ClientId> {
        &self.moving
    }

    pub(crate) fn needy(&self) -> &BTreeSet<ClientId> {
        &self.needy
    }

    pub(crate) fn departed(&self) -> &BTreeSet<ClientId> {
        &self.departed
    }

    /// The least that anybody demands who waits.
    pub(crate) fn least_waiting_demand(&self) -> Option<u64> {
        self.waiting_demands.keys().next().copied()
    }

    /// The least that anybody lacks who is next.
    pub(crate) fn least_next_deficit(&self) -> Option<u64> {
        self.next_deficits.keys().next().copied()
    }

    /// What is overdue first, and when.
    pub(crate) fn first_due(&self) -> Option<(Time, ClientId)> {
        self.due.first().copied()
    }

    /// What cannot be moved of those who are not in the group.
    pub(crate) fn pinned_beside(&self, group: Group) -> u128 {
        self.sums.pinned - group.pinned
    }

    /// Recomputes everything from the entries.
    ///
    /// # Errors
    /// What is not as it should be.
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
    use proptest::prelude::*;

    use super::*;

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

    fn entry() -> impl Strategy<Value = Entry> {
        let bytes = || prop_oneof![0..64u64, Just(u64::MAX)];
        let sizes = (bytes(), bytes(), bytes(), bytes(), bytes(), prop::option::of(bytes()));
        let due = prop::option::of((0..9u64).prop_map(Time::from_secs));
        (standing(), sizes, any::<[bool; 3]>(), -4..4i64, due, 0..3u64).prop_map(
            |(standing, sizes, [needs, runs, moves], time, due, job)| {
                let job = Job::Tenant(job);
                let (charged, pinned, demand, allocated, overhead, ordered) = sizes;
                let key = (time, Time::ZERO, 0);
                let (part, claims) = (Part::default(), needs);
                Entry {
                    standing,
                    charged,
                    pinned,
                    demand,
                    allocated,
                    overhead,
                    ordered,
                    needs,
                    runs,
                    claims,
                    part,
                    job,
                    key,
                    moves,
                    due,
                }
            },
        )
    }

    /// The sums of a group, by brute force.
    fn group(entries: &BTreeMap<ClientId, Entry>, which: impl Fn(Standing) -> bool) -> Group {
        let chosen: Vec<&Entry> = entries.values().filter(|e| which(e.standing)).collect();
        Group {
            count: chosen.len(),
            demand: chosen.iter().map(|e| u128::from(e.demand)).sum(),
            pinned: chosen.iter().map(|e| u128::from(e.pinned)).sum(),
            job: chosen.iter().map(|e| e.job).min(),
            mixed: chosen.iter().map(|e| e.job).collect::<BTreeSet<_>>().len() > 1,
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
                let change = change.map(|entry| Entry { key: (entry.key.0, entry.key.1, id), ..entry });
                let before = model.get(&id).copied();
                match change {
                    Some(entry) => model.insert(id, entry),
                    None => model.remove(&id),
                };
                let moved = |e: Entry| Entry { key: (0, Time::ZERO, 0), ..e };
                prop_assert_eq!(ledger.set(id, change), before.map(moved) != change.map(moved));
                ledger.audit().map_err(TestCaseError::fail)?;
                let all = |what: fn(&Entry) -> u64| model.values().map(|e| u128::from(what(e))).sum::<u128>();
                prop_assert_eq!(ledger.sums().charged, all(|e| e.charged));
                prop_assert_eq!(ledger.sums().pinned, all(|e| e.pinned));
                prop_assert_eq!(ledger.sums().allocated, all(|e| e.allocated));
                prop_assert_eq!(ledger.sums().ordered, all(|e| e.ordered.unwrap_or(0)));
                prop_assert_eq!(ledger.sums().members, group(&model, Standing::stays));
                prop_assert_eq!(ledger.sums().holders, group(&model, Standing::holds));
                let mut waiting: Vec<Key> =
                    model.values().filter(|e| e.standing == Standing::Waits).map(|e| e.key).collect();
                waiting.sort_unstable();
                prop_assert!(ledger.waiting().iter().copied().eq(waiting));
                let least = model.values().filter(|e| e.standing == Standing::Waits).map(|e| e.demand).min();
                prop_assert_eq!(ledger.least_waiting_demand(), least);
                let next = || model.values().filter(|e| e.standing == Standing::Next).map(Entry::deficit);
                prop_assert_eq!(ledger.sums().next_deficit, next().map(u128::from).sum::<u128>());
                prop_assert_eq!(ledger.least_next_deficit(), next().min());
                let due = model.iter().filter_map(|(&id, e)| Some((e.due?, id))).min();
                prop_assert_eq!(ledger.first_due(), due);
            }
        }
    }
}
