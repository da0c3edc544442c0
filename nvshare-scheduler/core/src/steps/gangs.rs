//! Gangs: processes that wait for each other on the GPU, as the ranks of a collective do. A member that runs alone keeps a
//! GPU busy with waiting, and cannot drain; so all members are granted at once, or none is.
//!
//! - A gang wants the lock as soon as one member does, and every member gets it, whether it requested it or not.
//! - When one member has to leave, all are asked. A member that has drained keeps its place until the others have: if one
//!   of them cannot, all go on (two phases).
//! - A member that comes while the others hold the lock joins them if it fits; else they leave and come back together.
//! - Where jobs run one after the other, a gang is one job, though its members may belong to several.
//! - While the job of one member is paused, the whole gang is.
//! - Members on one GPU that do not fit it together do not wait for each other in kernels: two programs have one name by mistake. After
//!   [`PATIENCE`] each goes on by itself. Members on several GPUs may be ranks, of which none can go on alone: they wait.
//! - A gang that has said how many members it will have waits until they are there, for at most [`PATIENCE`].

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use nvshare_proto::{GpuUuid, MOST_MEMBERS};

use crate::state::client::{Client, ClientId, Gang, Job, Phase};
use crate::state::virtual_time::OncePerEvent;
use crate::{Core, Time};

/// How long a gang waits for members that have not come, or have gone.
const PATIENCE: Duration = Duration::from_secs(30);

/// The members of one gang that are connected.
#[derive(Debug, Default)]
pub(crate) struct Members {
    ids: BTreeSet<ClientId>,
    /// The same, as those who are granted together.
    together: Arc<Together>,
    /// How far the gang is ahead of the clocks.
    pub(crate) ahead: OncePerEvent,
    /// The job as which the whole gang takes its turn: that of the member that came first, even after it has gone.
    job: Option<Job>,
    /// How many members there are to be, as they say; 0: as many as come.
    size: u32,
    /// From this time on, the gang goes on without its missing members.
    waits_until: Time,
    /// The log says that the gang goes on without them.
    reported: bool,
    /// Since when the gang has waited though it does not fit the one GPU of its members.
    too_large_since: Option<Time>,
}

impl Members {
    /// The GPUs of all members.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = GpuUuid> {
        self.together.on.keys().copied()
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = ClientId> {
        self.ids.iter().copied()
    }
}

/// The members of a gang, and those on each of their GPUs.
#[derive(Debug, Default)]
pub(crate) struct Together {
    ids: Vec<ClientId>,
    on: BTreeMap<GpuUuid, Vec<ClientId>>,
}

/// Clients that are granted together or not at all: a gang's members, else one client.
#[derive(Debug, Clone)]
pub(crate) enum Unit {
    One([ClientId; 1]),
    Gang(Arc<Together>),
}

impl Unit {
    /// Those of the clients that may be on a GPU.
    pub(crate) fn on(&self, gpu: GpuUuid) -> &[ClientId] {
        match self {
            Self::One(one) => one,
            Self::Gang(members) => members.on.get(&gpu).map_or(&[], Vec::as_slice),
        }
    }
}

impl Deref for Unit {
    type Target = [ClientId];

    fn deref(&self) -> &[ClientId] {
        match self {
            Self::One(one) => one,
            Self::Gang(members) => &members.ids,
        }
    }
}

impl Core {
    /// The clients that are granted together with a client.
    pub(crate) fn unit(&self, id: ClientId) -> Unit {
        match self.gang_of(id).and_then(|gang| self.gangs.get(&gang)) {
            Some(members) => Unit::Gang(Arc::clone(&members.together)),
            None => Unit::One([id]),
        }
    }

    pub(crate) fn gang_of(&self, id: ClientId) -> Option<u64> {
        self.clients.get(&id)?.gang
    }

    /// The job as which a client takes its turn where jobs run one after the other. The members of a gang run together, though
    /// each one's time is charged to the job of its own: two `nvshare-ctl run` may start one gang.
    pub(crate) fn takes_turns_as(&self, client: &Client) -> Job {
        let gang = client.gang.and_then(|gang| self.gangs.get(&gang));
        gang.and_then(|members| members.job).unwrap_or(client.job)
    }

    /// Clients, and all other members of their gangs.
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

    /// The GPUs that a unit uses, each once.
    pub(crate) fn gpus_of(&self, unit: &Unit) -> Vec<GpuUuid> {
        match unit {
            Unit::One([id]) => self.gpus_used_by(*id),
            Unit::Gang(members) => members.on.keys().copied().collect(),
        }
    }

    /// Notes who the members of a client's gang are, and which GPUs they use, after one of them has changed that.
    pub(crate) fn gather_gang(&mut self, id: ClientId) {
        let Some(members) = self.gang_of(id).and_then(|gang| self.gangs.get_mut(&gang)) else { return };
        let mut together = Together { ids: members.ids.iter().copied().collect(), on: BTreeMap::new() };
        for &id in &members.ids {
            for &uuid in self.clients.get(&id).into_iter().flat_map(|client| client.accounts.keys()) {
                together.on.entry(uuid).or_default().push(id);
            }
        }
        members.together = Arc::new(together);
        members.ahead.forget();
    }

    /// A client of a job comes. Returns whether it counts as a member of its gang.
    pub(crate) fn join_gang(&mut self, id: ClientId, gang: Gang, job: Job) -> bool {
        let now = self.now;
        let members = self.gangs.entry(gang.number).or_default();
        // So the cost of an event has a bound.
        if members.ids.len() >= MOST_MEMBERS as usize {
            self.warn(format!("client {id}: its gang has {MOST_MEMBERS} members already; it is by itself"));
            return false;
        }
        if members.ids.is_empty() {
            members.waits_until = now.saturating_add(PATIENCE);
        }
        members.job.get_or_insert(job);
        members.ids.insert(id);
        members.size = members.size.max(gang.size.min(MOST_MEMBERS));
        true
    }

    /// A client that was in a gang is gone.
    pub(crate) fn leave_gang(&mut self, id: ClientId, gang: u64) {
        let now = self.now;
        let Some(members) = self.gangs.get_mut(&gang) else { return };
        members.ids.remove(&id);
        members.waits_until = now.saturating_add(PATIENCE);
        members.reported = false;
        let Some(&other) = members.ids.first() else {
            self.gangs.remove(&gang);
            return;
        };
        self.gather_gang(other);
        self.release_drained(other);
        let unit = self.unit(other);
        self.settle_pauses(unit.to_vec());
        for &other in unit.iter() {
            self.enter(other);
            self.untold.insert(other);
        }
        // Members may not have had their turn because of the client that is gone.
        let gpus = self.gpus_of(&unit);
        self.dirty.extend(gpus);
    }

    /// Whether a unit still has to wait for members. A gang that has waited long enough goes on, which is logged once.
    pub(crate) fn waits_for_members(&mut self, id: ClientId) -> bool {
        let now = self.now;
        let Some(gang) = self.gang_of(id) else { return false };
        let Some(members) = self.gangs.get_mut(&gang) else { return false };
        let (there, size) = (members.ids.len(), members.size as usize);
        if there >= size {
            return false;
        }
        if now < members.waits_until {
            return true;
        }
        if !std::mem::replace(&mut members.reported, true) {
            self.warn(format!(
                "the gang of client {id} goes on with {there} of {size} members: the others have not come, or have gone"
            ));
        }
        false
    }

    /// When a gang goes on without its missing members, or each member of one that is too large by itself.
    pub(crate) fn waits_for_members_until(&self, id: ClientId) -> Option<Time> {
        let members = self.gangs.get(&self.gang_of(id)?)?;
        let parts = members.too_large_since.map(|since| since.saturating_add(PATIENCE));
        (members.ids.len() < members.size as usize).then_some(members.waits_until).or(parts)
    }

    /// A gang has no room on a GPU, or has it on all (`None`). If it has waited long enough, and its members could go on one by one,
    /// they do: then they are no gang any more. Returns whether that is so.
    pub(crate) fn part_if_too_large(&mut self, id: ClientId, full: Option<GpuUuid>) -> bool {
        let now = self.now;
        let Some(gang) = self.gang_of(id) else { return false };
        let unit = self.unit(id);
        let fits_alone = |uuid, id: &ClientId| self.fits_alone(uuid, &Unit::One([*id]));
        let parts = full.filter(|&uuid| {
            unit.len() > 1 && self.gpus_of(&unit) == [uuid] && unit.iter().all(|id| fits_alone(uuid, id))
        });
        let Some(members) = self.gangs.get_mut(&gang) else { return false };
        let Some(uuid) = parts else {
            members.too_large_since = None;
            return false;
        };
        if now < members.too_large_since.get_or_insert(now).saturating_add(PATIENCE) {
            return false;
        }
        self.gangs.remove(&gang);
        self.cases.clear();
        for &member in unit.iter() {
            self.with(member, |client| client.gang = None);
        }
        self.warn(format!(
            "the gang of client {id} does not fit {uuid}: its {} members go on, each by itself",
            unit.len()
        ));
        true
    }

    /// Whether another member of a client's gang still drains: until it has, the client keeps its place.
    pub(crate) fn has_drained_before_others(&self, id: ClientId) -> bool {
        let drains = |other: &ClientId| *other != id && self.is_draining(*other);
        self.gang_of(id).is_some() && self.unit(id).iter().any(drains)
    }

    fn is_draining(&self, id: ClientId) -> bool {
        self.clients.get(&id).is_some_and(|client| client.phase.drops() && !client.stuck)
    }

    /// When no member of a gang drains any more, the members that have drained give up their places.
    pub(crate) fn release_drained(&mut self, id: ClientId) {
        if self.gang_of(id).is_none() || self.unit(id).iter().any(|&other| self.is_draining(other)) {
            return;
        }
        for other in self.unit(id).iter().copied() {
            if self.phase(other).is_some_and(|phase| phase == Phase::Drained) {
                self.give_up_place(other);
            }
        }
    }

    /// A member wants the lock: so do all members that do not have it.
    pub(crate) fn want_together(&mut self, id: ClientId) {
        let now = self.now;
        if self.gang_of(id).is_none() {
            return;
        }
        for other in self.unit(id).iter().copied() {
            let sits = |client: &Client| client.phase == Phase::Parked && !client.wants;
            if self.clients.get(&other).is_some_and(sits) {
                self.with(other, |client| {
                    client.wants = true;
                    client.waiting_since = now;
                });
            }
        }
    }

    /// A member that comes wants the lock if another member has it, or wants it.
    pub(crate) fn follow_gang(&mut self, id: ClientId) {
        if self.gang_of(id).is_some()
            && self.unit(id).iter().any(|&other| self.phase(other).is_some_and(Phase::holds))
        {
            self.want_together(id);
        }
        self.wait_with_gang(id);
    }

    /// A member whose gate is closed waits for the lock if another one does.
    pub(crate) fn wait_with_gang(&mut self, id: ClientId) {
        let waits = |other: &ClientId| self.clients.get(other).is_some_and(Client::waits);
        if self.gang_of(id).is_some() && self.unit(id).iter().any(waits) {
            self.want_together(id);
        }
    }

    /// Whether some members give the lock back: until they have, no member gets it.
    pub(crate) fn is_leaving(&self, unit: &Unit) -> bool {
        let leaves = |id: &ClientId| {
            let client = self.clients.get(id)?;
            Some(client.phase == Phase::Drained || client.phase.drops() && !client.stuck)
        };
        matches!(unit, Unit::Gang(_)) && unit.iter().filter_map(leaves).any(|leaves| leaves)
    }

    /// The GPUs of a unit's clients that do not have the lock.
    pub(crate) fn gpus_wanted_by(&self, unit: &Unit) -> Vec<GpuUuid> {
        match unit {
            Unit::One([id]) => self.gpus_used_by(*id),
            Unit::Gang(members) => {
                let clients = members.ids.iter().filter_map(|id| self.clients.get(id));
                let parked = clients.filter(|client| client.phase == Phase::Parked);
                let gpus: BTreeSet<GpuUuid> = parked.flat_map(|c| c.accounts.keys().copied()).collect();
                gpus.into_iter().collect()
            }
        }
    }

    /// If members hold the lock while others of their gang have to wait for it, asks them to leave, so that they come back
    /// together. Returns whether it did.
    pub(crate) fn recall_part_of_gang(&mut self, unit: &Unit) -> bool {
        if let Unit::One(_) = unit {
            return false;
        }
        let holds = |id: &ClientId| {
            // A member that deferred a drain lately, or was asked along with one that did, is not asked again and again.
            let client = self.clients.get(id)?;
            (client.phase.holds() && !client.stuck).then_some(client.deferrals == 0)
        };
        let holders: Vec<bool> = unit.iter().filter_map(holds).collect();
        if holders.is_empty() || holders.contains(&false) {
            return false;
        }
        if let Some(&one) = unit.first() {
            self.ask_to_leave(one);
        }
        true
    }
}
