//! Gangs: processes that wait for each other on the GPU, as the ranks of a collective do. A member that runs
//! alone keeps a GPU busy with waiting, and cannot drain; so all members are granted at once, or none is.
//!
//! - A gang wants the lock as soon as one member does, and every member gets it, whether it requested it or
//!   not.
//! - When one member has to leave, all are asked. A member that has drained, or is idle, keeps its place until
//!   the others have: if one of them cannot, all go on (two phases).
//! - A member that comes while the others hold the lock joins them if it fits; else they leave and come back
//!   together.
//! - Where jobs run one after the other, a gang is one job, though its members may belong to several. The
//!   time of each member is charged to the member's own job.
//! - While the job of one member is paused, the whole gang is.
//! - Members on one GPU that do not fit it together do not wait for each other in kernels. Two programs have
//!   one name by mistake. After [`PATIENCE`] each goes on by itself. Members on several GPUs may be ranks, of
//!   which none can go on alone: they wait.
//! - A gang that has said how many members it will have waits until they are there, for at most [`PATIENCE`].
//! - Clients of one owner that share memory are a gang as well for as long as they do, unless they have named
//!   one: kernels of one may wait for words of another. One that does not fit goes on one by one, and soon:
//!   nobody asked for it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use nvshare_proto::{GpuUuid, MAX_GANG_MEMBERS};

use crate::Time;
use crate::state::State;
use crate::state::circles::Circle;
use crate::state::client::{Client, ClientId, Gang, GangId, Job, Phase};
use crate::state::virtual_time::OncePerEvent;

/// How long a gang waits for members that have not come, or have gone.
const PATIENCE: Duration = Duration::from_secs(30);

/// The same for a gang of clients that share memory, which may be on several GPUs.
const PATIENCE_OF_SHARERS: Duration = Duration::from_secs(2);

/// The members of one gang that are connected.
#[derive(Debug, Default)]
pub(crate) struct Members {
    ids: BTreeSet<ClientId>,
    /// The same, as the clients that are granted together.
    roster: Arc<Roster>,
    /// How far the gang is ahead of the clocks.
    pub(crate) lead: OncePerEvent,
    /// The job as which the whole gang takes its turn: that of the member that came first, even after it has
    /// gone.
    job: Option<Job>,
    /// They share memory, and have named no gang.
    are_sharers: bool,
    /// How many members there are to be, as they say; 0: as many as come.
    size: u32,
    /// From this time on, the gang goes on without its missing members.
    waits_until: Time,
    /// The log says that the gang goes on without them.
    reported: bool,
    /// Since when the gang has waited though it does not fit the one GPU of its members.
    too_large_since: Option<Time>,
}

/// Whether a gang still has to wait for members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Muster {
    /// All are there, or it was said that the gang goes on without the others.
    Complete,
    /// Some have not come, or have gone.
    Waits,
    /// It has waited long enough: from now on it goes on with `there` of its `size` members.
    GoesOn { there: usize, size: usize },
}

impl Members {
    pub(crate) fn ids(&self) -> impl Iterator<Item = ClientId> {
        self.ids.iter().copied()
    }

    /// Adds a client of a job. Returns whether it counts as a member: a gang has a largest size, so that the
    /// cost of an event has a bound.
    pub(crate) fn join(&mut self, id: ClientId, gang: Gang, job: Job, now: Time) -> bool {
        if self.ids.len() >= MAX_GANG_MEMBERS as usize {
            return false;
        }
        if self.ids.is_empty() {
            self.waits_until = now.saturating_add(PATIENCE);
        }
        self.job.get_or_insert(job);
        self.ids.insert(id);
        self.size = self.size.max(gang.size.min(MAX_GANG_MEMBERS));
        true
    }

    /// Removes a member that is gone. Returns one of those that are left.
    pub(crate) fn leave(&mut self, id: ClientId, now: Time) -> Option<ClientId> {
        self.ids.remove(&id);
        self.waits_until = now.saturating_add(PATIENCE);
        self.reported = false;
        self.ids.first().copied()
    }

    /// Notes the members and the GPUs that they use, after one of them has changed that.
    pub(crate) fn gather(&mut self, clients: &BTreeMap<ClientId, Client>) {
        let mut roster = Roster { ids: self.ids.iter().copied().collect(), on: BTreeMap::new() };
        for &id in &self.ids {
            for &uuid in clients.get(&id).into_iter().flat_map(|client| client.accounts.keys()) {
                roster.on.entry(uuid).or_default().push(id);
            }
        }
        self.roster = Arc::new(roster);
        self.lead.forget();
    }

    /// Returns the GPUs of all members.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = GpuUuid> {
        self.roster.on.keys().copied()
    }

    /// Whether the gang still has to wait for members.
    pub(crate) fn muster(&mut self, now: Time) -> Muster {
        let (there, size) = (self.ids.len(), self.size as usize);
        if there >= size {
            Muster::Complete
        } else if now < self.waits_until {
            Muster::Waits
        } else if std::mem::replace(&mut self.reported, true) {
            Muster::Complete
        } else {
            Muster::GoesOn { there, size }
        }
    }

    /// Returns the next time at which the gang goes on without its missing members, or each member of one that is too
    /// large by itself.
    pub(crate) fn waits_until(&self, now: Time) -> Option<Time> {
        let musters = (self.ids.len() < self.size as usize).then_some(self.waits_until);
        let disbands = self.too_large_since.map(|since| since.saturating_add(self.patience()));
        [musters, disbands].into_iter().flatten().filter(|&time| time > now).min()
    }

    /// Notes whether the gang lacks room though its members could go on one by one. Returns whether they do:
    /// it has lacked room for as long as it waits.
    pub(crate) fn note_too_large(&mut self, is_so_now: bool, now: Time) -> bool {
        let since = self.too_large_since.filter(|_| is_so_now).unwrap_or(now);
        self.too_large_since = is_so_now.then_some(since);
        is_so_now && now >= since.saturating_add(self.patience())
    }

    fn patience(&self) -> Duration {
        if self.are_sharers { PATIENCE_OF_SHARERS } else { PATIENCE }
    }

    /// Whether the members share memory, and have named no gang.
    pub(crate) fn are_sharers(&self) -> bool {
        self.are_sharers
    }
}

/// The members of a gang, and those on each of their GPUs.
#[derive(Debug, Default)]
struct Roster {
    ids: Vec<ClientId>,
    on: BTreeMap<GpuUuid, Vec<ClientId>>,
}

/// Clients that are granted together or not at all: a gang's members, else one client.
#[derive(Debug, Clone)]
pub(crate) struct Unit(Mates);

/// One client needs no list.
#[derive(Debug, Clone)]
enum Mates {
    None([ClientId; 1]),
    Gang(Arc<Roster>),
}

impl Unit {
    /// Returns a client by itself.
    pub(crate) fn alone(id: ClientId) -> Self {
        Self(Mates::None([id]))
    }

    /// Returns the first of the clients: it stands for all of them where any one does.
    pub(crate) fn first(&self) -> ClientId {
        debug_assert!(!self.is_empty(), "a gang without members is forgotten");
        self.iter().copied().next().unwrap_or_default()
    }

    /// Returns those of the clients that may be on a GPU.
    pub(crate) fn on(&self, gpu: GpuUuid) -> &[ClientId] {
        match &self.0 {
            Mates::None(one) => one,
            Mates::Gang(roster) => roster.on.get(&gpu).map_or(&[], Vec::as_slice),
        }
    }
}

impl Deref for Unit {
    type Target = [ClientId];

    fn deref(&self) -> &[ClientId] {
        match &self.0 {
            Mates::None(one) => one,
            Mates::Gang(roster) => &roster.ids,
        }
    }
}

/// Changes of gangs.
impl State {
    /// Notes the members of a client's gang and the GPUs that they use, after one of them has changed that.
    pub(crate) fn gather_gang(&mut self, id: ClientId) {
        let gang = self.gang_of(id);
        if let Some(members) = gang.and_then(|gang| self.gangs.get_mut(&gang)) {
            members.gather(&self.clients);
        }
    }

    /// Adds a client to its gang. Returns whether it counts as a member.
    pub(crate) fn add_member(&mut self, client: &Client, gang: Gang) -> bool {
        self.gangs.entry(gang.id()).or_default().join(client.id, gang, client.job, self.now)
    }

    /// Makes clients that share memory members of one gang. Some of them may be members already, and gangs of the others end. Returns
    /// the gang.
    pub(crate) fn add_sharers(&mut self, circle: &Circle) -> GangId {
        let id = circle.gang.unwrap_or_else(|| self.free_name(circle.made_by.unwrap_or_default()));
        for client in &circle.ids {
            let Some(&Client { gang: old, job, .. }) = self.clients.get(client) else { continue };
            if let Some(old) = old.filter(|&old| old != id) {
                self.gangs.remove(&old);
            }
            let members = self.gangs.entry(id).or_default();
            members.are_sharers = true;
            members.join(*client, Gang { number: id.0, size: 0 }, job, self.now);
        }
        id
    }

    /// Returns a name for a gang of clients that share memory of this number. Others may have it still that share that no more, and stay
    /// together by other memory.
    fn free_name(&self, number: u64) -> GangId {
        let mut names = (number..=u64::MAX).chain(0..number).map(GangId);
        names.find(|name| !self.gangs.contains_key(name)).unwrap_or(GangId(number))
    }

    /// The client of those that are one gang by a number of shared memory which has said it first: this one, if no other has.
    pub(crate) fn first_sharer(&mut self, number: u64, id: ClientId) -> ClientId {
        if !self.clients.get(&id).is_some_and(Client::joins_sharers) {
            return id;
        }
        *self.sharers.entry(number).or_insert(id)
    }

    /// Removes a member that is gone. Returns one of those that are left; without any, the gang is removed as
    /// well.
    pub(crate) fn remove_member(&mut self, id: ClientId, gang: GangId) -> Option<ClientId> {
        let other = self.gangs.get_mut(&gang)?.leave(id, self.now);
        if other.is_none() {
            self.gangs.remove(&gang);
        }
        other
    }

    pub(crate) fn gang_mut(&mut self, gang: GangId) -> Option<&mut Members> {
        self.gangs.get_mut(&gang)
    }

    /// Removes the gang: its members go on one by one.
    pub(crate) fn remove_gang(&mut self, gang: GangId) {
        self.gangs.remove(&gang);
    }
}

impl State {
    /// Returns the clients that are granted together with a client.
    pub(crate) fn unit(&self, id: ClientId) -> Unit {
        self.clients.get(&id).map_or(Unit::alone(id), |client| self.unit_of(client))
    }

    /// Returns the clients that are granted together with a client that is there.
    pub(crate) fn unit_of(&self, client: &Client) -> Unit {
        match client.gang.and_then(|gang| self.gangs.get(&gang)) {
            Some(members) => Unit(Mates::Gang(Arc::clone(&members.roster))),
            None => Unit::alone(client.id),
        }
    }

    /// Iterates over the gangs that have members on a GPU.
    pub(crate) fn units_of_gangs(&self, uuid: GpuUuid) -> impl Iterator<Item = Unit> {
        let here = self.gangs.values().filter(move |members| members.roster.on.contains_key(&uuid));
        here.map(|members| Unit(Mates::Gang(Arc::clone(&members.roster))))
    }

    pub(crate) fn gang_of(&self, id: ClientId) -> Option<GangId> {
        self.clients.get(&id)?.gang
    }

    /// Whether the members of a gang share memory, and have named no gang.
    pub(crate) fn are_sharers(&self, gang: GangId) -> bool {
        self.gangs.get(&gang).is_some_and(Members::are_sharers)
    }

    /// Whether each of several clients shares memory with another one, and all of them with each other by way of others.
    pub(crate) fn hangs_together(&self, unit: &Unit) -> bool {
        let mut sharers: BTreeMap<u64, Vec<&Client>> = BTreeMap::new();
        for client in self.clients_of(unit) {
            client.shares.iter().for_each(|&number| sharers.entry(number).or_default().push(client));
        }
        let mut queue: Vec<&Client> = self.clients_of(unit).take(1).collect();
        let mut apart: BTreeSet<ClientId> = self.clients_of(unit).skip(1).map(|client| client.id).collect();
        let has_mates = !apart.is_empty();
        while let Some(client) = queue.pop() {
            let mates = client.shares.iter().filter_map(|number| sharers.remove(number)).flatten();
            queue.extend(mates.filter(|mate| apart.remove(&mate.id)));
        }
        has_mates && apart.is_empty()
    }

    /// Returns the members of a gang.
    pub(crate) fn members(&self, gang: GangId) -> Vec<ClientId> {
        self.gangs.get(&gang).into_iter().flat_map(Members::ids).collect()
    }

    /// Returns the GPUs of all members of a gang.
    pub(crate) fn gpus_of_gang(&self, gang: GangId) -> impl Iterator<Item = GpuUuid> {
        self.gangs.get(&gang).into_iter().flat_map(Members::gpus)
    }

    /// Returns when a client's gang goes on without its missing members, or each member of one that is too
    /// large by itself.
    pub(crate) fn gang_waits_until(&self, id: ClientId) -> Option<Time> {
        self.gangs.get(&self.gang_of(id)?)?.waits_until(self.now())
    }

    /// Returns the job as which a client takes its turn where jobs run one after the other. The members of a
    /// gang run together, though each one's time is charged to its own job: two `nvshare-ctl run` may start
    /// one gang.
    pub(crate) fn takes_turns_as(&self, client: &Client) -> Job {
        let gang = client.gang.and_then(|gang| self.gangs.get(&gang));
        gang.and_then(|members| members.job).unwrap_or(client.job)
    }

    /// Returns clients, and all other members of their gangs.
    pub(crate) fn with_their_gangs(&self, ids: Vec<ClientId>) -> Vec<ClientId> {
        if ids.iter().all(|&id| self.gang_of(id).is_none()) {
            return ids;
        }
        if let [one] = ids[..] {
            return self.unit(one).to_vec();
        }
        let mut all: BTreeSet<ClientId> = BTreeSet::new();
        for &id in &ids {
            if !all.contains(&id) {
                all.extend(self.unit(id).iter());
            }
        }
        all.into_iter().collect()
    }

    /// Returns the GPUs that a unit uses, each once.
    pub(crate) fn gpus_of(&self, unit: &Unit) -> Vec<GpuUuid> {
        self.each_gpu_of(unit).collect()
    }

    /// Iterates over the GPUs that a unit uses, each once.
    pub(crate) fn each_gpu_of<'a>(&'a self, unit: &'a Unit) -> impl Iterator<Item = GpuUuid> {
        let (alone, gang) = match &unit.0 {
            Mates::None([id]) => (self.clients.get(id), None),
            Mates::Gang(roster) => (None, Some(roster)),
        };
        let own = alone.into_iter().flat_map(|client| client.accounts.keys());
        own.chain(gang.into_iter().flat_map(|roster| roster.on.keys())).copied()
    }

    /// Returns the GPUs of a unit's clients that do not have the lock, each once and in order.
    pub(crate) fn gpus_wanted_by(&self, unit: &Unit) -> Vec<GpuUuid> {
        let parked = self.clients_of(unit).filter(|client| client.phase() == Phase::Parked);
        let mut gpus: Vec<GpuUuid> = parked.flat_map(|client| client.accounts.keys().copied()).collect();
        if unit.len() > 1 {
            gpus.sort_unstable();
            gpus.dedup();
        }
        gpus
    }

    /// Whether some members give the lock back: until they have, no member gets it.
    pub(crate) fn is_leaving(&self, unit: &Unit) -> bool {
        let leaves = |client: &Client| client.phase() == Phase::Drained || client.is_draining();
        self.clients_of(unit).any(leaves)
    }
}
