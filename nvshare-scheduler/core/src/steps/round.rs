//! One round of looks: it chooses the clients that are next on each GPU, and those that get room.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use nvshare_proto::{EventKind, GpuUuid};

use crate::judge::waiter::Case;
use crate::report::warnings::Topic;
use crate::state::State;
use crate::state::client::{Client, ClientId};
use crate::state::gangs::{Members, Unit};
use crate::steps::books::Books;

/// The books, and what was judged in this round: the next one begins without it.
#[derive(Debug)]
pub(crate) struct Round<'a> {
    pub(crate) books: &'a mut Books,
    /// Waiters that use several GPUs, by the first of each gang.
    waiters: BTreeMap<ClientId, Arc<Case>>,
    /// Waiters that watch the GPUs where something is in their way, since they were judged last; by the first
    /// of each gang.
    pub(crate) watching: BTreeSet<ClientId>,
    /// Waiters whose full GPUs are noted since they were judged last; by the first of each gang.
    pub(crate) noted: BTreeSet<ClientId>,
    /// The clients that are next, use several GPUs and were considered for a grant, by the first of each
    /// gang.
    pub(crate) considered: BTreeSet<ClientId>,
}

impl<'a> Round<'a> {
    pub(crate) fn new(books: &'a mut Books) -> Self {
        let (watching, noted, considered) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        Self { books, waiters: BTreeMap::new(), watching, noted, considered }
    }

    pub(crate) fn state(&self) -> &State {
        self.books.state()
    }

    /// Returns a waiter's case, with its gang.
    pub(crate) fn open_case(&mut self, id: ClientId) -> Arc<Case> {
        let (state, agenda) = (self.state(), self.books.agenda());
        let known = self.waiters.get(&state.unit(id).first());
        // A change on its GPUs since then may concern it.
        let holds = |case: &&Arc<Case>| {
            case.changes == agenda.changes()
                || !state.gpus_of(&case.unit).iter().any(|uuid| agenda.gpus().contains(uuid))
        };
        if let Some(case) = known.filter(holds) {
            return Arc::clone(case);
        }
        self.books.count_work(1);
        let is_must_wait = self.settle_must_wait(id);
        let state = self.books.state();
        let unit = state.unit(id);
        let is_leaving = state.is_leaving(&unit);
        let first = unit.first();
        self.watching.remove(&first);
        self.noted.remove(&first);
        let case = Arc::new(Case::new(unit, is_must_wait, is_leaving, self.books.agenda().changes()));
        if state.client(id).is_some_and(Client::uses_several) {
            self.waiters.insert(first, Arc::clone(&case));
        }
        case
    }

    /// Settles whether a client must wait as things are, and returns that. It must if no room can be made for
    /// it, its gang lacks members, or it is stopped. The gang may disband, all of it is marked, and the log
    /// says once why there is no room.
    pub(crate) fn settle_must_wait(&mut self, id: ClientId) -> bool {
        let mut full = self.state().gpu_without_room_for(id);
        if self.disband_if_too_large(id, full) {
            full = self.state().gpu_without_room_for(id);
        }
        let must_wait =
            full.is_some() || self.books.muster_gang(id) || self.state().is_stopped(&self.state().unit(id));
        if let Some(uuid) = full {
            self.books.warn_no_room_once(id, uuid);
        }
        self.books.set_unit_must_wait(id, must_wait);
        must_wait
    }

    /// Disbands a gang that has waited long enough for room on a GPU, if its members could go on one by one.
    /// `full`: the GPU on which it has no room, or `None` if it has room on all. Returns whether the gang was
    /// disbanded.
    fn disband_if_too_large(&mut self, id: ClientId, full: Option<GpuUuid>) -> bool {
        let state = self.books.state();
        let Some(gang) = state.gang_of(id) else { return false };
        let unit = state.unit(id);
        let full = full.filter(|_| unit.len() > 1).and_then(|uuid| state.gpu(uuid));
        let are_sharers = state.are_sharers(gang);
        let lacks = full.filter(|gpu| {
            let fits_alone = |&id: &ClientId| state.fits_alone(gpu, &Unit::alone(id));
            let uses_no_other = state.gpus_of(&unit) == [gpu.uuid];
            (are_sharers || uses_no_other) && unit.on(gpu.uuid).iter().all(fits_alone)
        });
        let lacks = lacks.map(|gpu| gpu.uuid);
        let now = state.now();
        let note = |members: &mut Members| members.note_too_large(lacks.is_some(), now);
        let is_over = self.books.change_gang(gang, note) == Some(true);
        let Some(uuid) = lacks.filter(|_| is_over) else { return false };
        self.waiters.clear();
        self.considered.clear();
        self.books.disband(id, gang, uuid);
        true
    }
}

impl Books {
    /// Says once why there is no room for a client on a GPU.
    fn warn_no_room_once(&mut self, id: ClientId, uuid: GpuUuid) {
        let state = self.state();
        let there = state.gpu(uuid).zip(state.client(id));
        // There is nothing to say while a process that has just ended still frees its memory.
        let Some(why) = there.and_then(|(gpu, client)| state.why_no_room(gpu, client)) else { return };
        let was_said = self.change_notes(id, |notes| std::mem::replace(&mut notes.reported_no_room, true));
        if was_said == Some(false) {
            self.emit(EventKind::Blocked, id, None);
            self.warn_of_client(Topic::Blocked, id, Some(uuid), &format!("client {id} waits: {why}"));
        }
    }

    /// Notes whether a client, and its gang with it, must wait as things are.
    fn set_unit_must_wait(&mut self, id: ClientId, must_wait: bool) {
        // A member that has joined since then does not know it.
        for &member in self.state().unit(id).iter() {
            if self.state().client(member).is_some_and(|client| client.must_wait != must_wait) {
                self.set_must_wait(member, must_wait);
            }
        }
    }
}
