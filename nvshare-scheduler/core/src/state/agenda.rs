//! The GPUs and clients that are to be looked at again, and the times.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use nvshare_proto::GpuUuid;

use crate::Time;
use crate::state::client::{ClientId, GangId};
use crate::state::gpu::Gpu;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Agenda {
    /// GPUs of which something has changed since the core last looked at them.
    gpus: BTreeSet<GpuUuid>,
    /// Gangs of which a member has changed since the core last looked at their GPUs.
    gangs: BTreeSet<GangId>,
    /// Waiters for which something that was in the way has changed since the core last looked at their GPUs.
    woken: BTreeSet<ClientId>,
    /// Clients that are to sleep, or to wake, of which something has changed.
    sleepers: BTreeSet<ClientId>,
    /// When such clients, and those that may have rested for long enough, are looked at if nothing of them has changed.
    sleepers_due: BTreeSet<(Time, ClientId)>,
    /// The same, by client.
    times_of_sleepers: BTreeMap<ClientId, BTreeSet<Time>>,
    /// The client that was last told to go off the card by itself.
    going_by_itself: Option<ClientId>,
    /// Clients for which the answer whether a client waits for what they hold may have changed.
    to_tell: BTreeSet<ClientId>,
    /// Clients that wait and whose place moves by itself, and in which event it was brought up to date.
    moving: BTreeMap<ClientId, u64>,
    /// The last of them that was brought up to date in round robin.
    refresh_cursor: ClientId,
    /// When the core looks at each GPU again if no event comes before.
    deadlines: BTreeSet<(Time, GpuUuid)>,
    /// Counts the changes of entries in ledgers.
    changes: u64,
    /// Work that the last event took: clients and GPUs that were looked at, and entries written, counted each
    /// time.
    work: u64,
}

/// GPUs and clients to look at.
impl Agenda {
    /// Forgets all that is to be looked at, when scheduling is off, but for times at which sleepers are.
    pub(crate) fn forget(&mut self) {
        self.gpus.clear();
        self.gangs.clear();
        self.woken.clear();
        self.sleepers.clear();
        self.to_tell.clear();
    }

    /// Queues a GPU of which something has changed, and the waiters that watch it.
    pub(crate) fn queue_with_watchers(&mut self, gpu: &mut Gpu) {
        self.gpus.insert(gpu.uuid);
        self.woken.append(&mut gpu.watched_by);
    }

    /// Queues these GPUs, without the waiters that watch them.
    pub(crate) fn queue(&mut self, gpus: impl IntoIterator<Item = GpuUuid>) {
        self.gpus.extend(gpus);
    }

    /// Queues the GPUs of a gang of which a member has changed.
    pub(crate) fn look_at_gang(&mut self, gang: GangId) {
        self.gangs.insert(gang);
    }

    pub(crate) fn gpus(&self) -> &BTreeSet<GpuUuid> {
        &self.gpus
    }

    pub(crate) fn take_gpus(&mut self) -> BTreeSet<GpuUuid> {
        std::mem::take(&mut self.gpus)
    }

    pub(crate) fn take_gang(&mut self) -> Option<GangId> {
        self.gangs.pop_first()
    }

    pub(crate) fn take_woken(&mut self) -> Option<ClientId> {
        self.woken.pop_first()
    }

    /// Follows a client that is to sleep, or to wake, of which something has changed.
    pub(crate) fn follow_sleeper(&mut self, id: ClientId) {
        self.sleepers.insert(id);
    }

    /// The same at a time, whether anything has changed or not.
    pub(crate) fn follow_sleeper_at(&mut self, time: Time, id: ClientId) {
        self.sleepers_due.insert((time, id));
        self.times_of_sleepers.entry(id).or_default().insert(time);
    }

    /// Forgets a client that is gone. Its times may be far away, and processes come and go.
    pub(crate) fn forget_client(&mut self, id: ClientId) {
        self.forget_place(id);
        self.sleepers.remove(&id);
        for time in self.times_of_sleepers.remove(&id).unwrap_or_default() {
            self.sleepers_due.remove(&(time, id));
        }
    }

    /// Takes one of which something has changed, or whose time has come.
    pub(crate) fn take_sleeper(&mut self, now: Time) -> Option<ClientId> {
        self.sleepers.pop_first().or_else(|| {
            let &(time, id) = self.sleepers_due.first().filter(|(time, _)| *time <= now)?;
            self.forget_time(time, id);
            Some(id)
        })
    }

    fn forget_time(&mut self, time: Time, id: ClientId) {
        self.sleepers_due.remove(&(time, id));
        if let Entry::Occupied(mut times) = self.times_of_sleepers.entry(id) {
            times.get_mut().remove(&time);
            if times.get().is_empty() {
                times.remove();
            }
        }
    }

    pub(crate) fn going_by_itself(&self) -> Option<ClientId> {
        self.going_by_itself
    }

    pub(crate) fn set_going_by_itself(&mut self, id: ClientId) {
        self.going_by_itself = Some(id);
    }

    /// Queues WAITERS for these clients until the end of the event. They are told whether a client waits for
    /// what they hold, if that is news.
    pub(crate) fn tell_later(&mut self, clients: impl IntoIterator<Item = ClientId>) {
        self.to_tell.extend(clients);
    }

    pub(crate) fn take_clients_to_tell(&mut self) -> Vec<ClientId> {
        std::mem::take(&mut self.to_tell).into_iter().collect()
    }
}

/// Places that move by themselves.
impl Agenda {
    /// Follows the place of a client, which moves. `refreshed`: the event that has just brought it up to date
    /// on all of its GPUs.
    pub(crate) fn follow_place(&mut self, id: ClientId, refreshed: Option<u64>) {
        let last = self.moving.entry(id).or_default();
        *last = refreshed.unwrap_or(*last);
    }

    pub(crate) fn forget_place(&mut self, id: ClientId) {
        self.moving.remove(&id);
    }

    /// Whether a client's place moves, and this event has not brought it up to date yet.
    pub(crate) fn is_place_stale(&self, id: ClientId, event: u64) -> bool {
        self.moving.get(&id).is_some_and(|&refreshed| refreshed != event)
    }

    /// Returns the clients whose places move, beginning behind the cursor of the round robin.
    pub(crate) fn moving_from_cursor(&self) -> impl Iterator<Item = ClientId> {
        let behind = self.moving.range((Bound::Excluded(self.refresh_cursor), Bound::Unbounded));
        behind.chain(self.moving.range(..=self.refresh_cursor)).map(|(&id, _)| id)
    }

    /// Moves the cursor of the round robin to a client.
    pub(crate) fn set_refresh_cursor(&mut self, id: ClientId) {
        self.refresh_cursor = id;
    }
}

/// Deadlines, and counts.
impl Agenda {
    /// `is_on`: whether scheduling is on. If not, sleepers alone are looked at.
    pub(crate) fn next_deadline(&self, is_on: bool) -> Option<Time> {
        let gpus = self.deadlines.first().filter(|_| is_on).map(|&(time, _)| time);
        let sleepers = self.sleepers_due.first().map(|&(time, _)| time);
        [gpus, sleepers].into_iter().flatten().min()
    }

    /// Takes a GPU whose deadline has come.
    pub(crate) fn take_due(&mut self, now: Time) -> Option<GpuUuid> {
        let &(time, uuid) = self.deadlines.first().filter(|(time, _)| *time <= now)?;
        self.deadlines.remove(&(time, uuid));
        Some(uuid)
    }

    /// Replaces the deadline of a GPU.
    pub(crate) fn change_deadline(&mut self, uuid: GpuUuid, before: Option<Time>, after: Option<Time>) {
        if let Some(before) = before {
            self.deadlines.remove(&(before, uuid));
        }
        self.deadlines.extend(after.map(|after| (after, uuid)));
    }

    /// Counts a change of an entry in a ledger.
    pub(crate) fn count_change(&mut self) {
        self.changes += 1;
    }

    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    pub(crate) fn count_work(&mut self, looks: u64) {
        self.work += looks;
    }

    /// Returns the work that the last event took.
    #[cfg(feature = "test-api")]
    pub(crate) fn work(&self) -> u64 {
        self.work
    }

    pub(crate) fn forget_work(&mut self) {
        self.work = 0;
    }
}
