//! The books: the state, what is to be looked at again, and what goes out. Steps change the state through
//! them alone.
//!
//! A change of a client is complete when the method returns. Its entries in ledgers have changed with it, the
//! differences are reported, and all that depends on it is looked at again. A step that changes a GPU, a job
//! or a gang must itself queue all that depends on it. No step can change a GPU's ledger.

use std::collections::BTreeSet;
use std::time::Duration;

use nvshare_proto::{ClientMessage, ClientStatus, Epoch, EventKind, GpuUuid, SchedulerMessage};

use crate::Time;
use crate::report::Report;
use crate::report::incidents::Glance;
use crate::report::warnings::Topic;
use crate::state::State;
use crate::state::account::Account;
use crate::state::agenda::Agenda;
use crate::state::circles::Circle;
use crate::state::client::{Client, ClientId, Gang, GangId, Notes};
use crate::state::config::Config;
use crate::state::gangs::Members;
use crate::state::gpu::Gpu;
use crate::state::rest::Rest;
use crate::state::terms::Jobs;

/// See the module's documentation. The other steps read the [`State`], and get at all that they change by the
/// methods below.
#[derive(Debug)]
pub(crate) struct Books {
    state: State,
    agenda: Agenda,
    report: Report,
}

/// The three parts of the books.
impl Books {
    pub(crate) fn new(config: Config) -> Self {
        Self { state: State::new(config), agenda: Agenda::default(), report: Report::default() }
    }

    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    pub(crate) fn agenda(&self) -> &Agenda {
        &self.agenda
    }

    pub(crate) fn agenda_mut(&mut self) -> &mut Agenda {
        &mut self.agenda
    }

    /// Counts clients and GPUs that were looked at.
    pub(crate) fn count_work(&mut self, looks: u64) {
        self.agenda.count_work(looks);
    }

    pub(crate) fn report_mut(&mut self) -> &mut Report {
        &mut self.report
    }

    /// Returns the jobs, to be changed. The steps of `terms.rs` see to what follows.
    pub(crate) fn jobs_mut(&mut self) -> &mut Jobs {
        self.state.jobs_mut()
    }
}

/// Changes of one client.
impl Books {
    /// Changes a client, with its entries in the ledgers of its GPUs, and emits an event for each difference.
    /// Returns what the change returns, or `None` if the client is gone. [`State::change_client`] says what
    /// follows a change of its phase.
    pub(crate) fn change_client<T>(
        &mut self,
        id: ClientId,
        change: impl FnOnce(&mut Client) -> T,
    ) -> Option<T> {
        let before = Glance::of(self.state.client(id)?);
        let changed = self.state.change_client(&mut self.agenda, id, change);
        if let Some(client) = self.state.client(id) {
            self.report.emit_client_changes(client, before, self.state.now());
        }
        changed
    }

    /// Changes a client's account on one GPU in the same way. Returns `None` if the client is gone, or does
    /// not use the GPU.
    pub(crate) fn change_account<T>(
        &mut self,
        id: ClientId,
        gpu: GpuUuid,
        change: impl FnOnce(&mut Account) -> T,
    ) -> Option<T> {
        let (changed, [before, after]) = self.state.change_account(&mut self.agenda, id, gpu, change)?;
        self.report.emit_account_changes(id, gpu, [&before, &after], self.state.now());
        Some(changed)
    }

    /// Corrects a client's account by what was measured: see [`State::correct_account`].
    pub(crate) fn correct_account<T>(
        &mut self,
        id: ClientId,
        gpu: GpuUuid,
        correct: impl FnOnce(&mut Account) -> T,
    ) -> Option<T> {
        self.state.correct_account(&mut self.agenda, id, gpu, correct)
    }

    /// Sets whether a client must wait as things are.
    pub(crate) fn set_must_wait(&mut self, id: ClientId, must_wait: bool) {
        self.state.set_must_wait(&mut self.agenda, id, must_wait);
    }

    /// Changes the notes of a client: what it says of itself, or what was said of it, and no ledger has.
    pub(crate) fn change_notes<T>(&mut self, id: ClientId, note: impl FnOnce(&mut Notes) -> T) -> Option<T> {
        self.state.change_notes(id, note)
    }

    /// Changes the rest of a client, which no ledger has.
    pub(crate) fn change_rest<T>(&mut self, id: ClientId, change: impl FnOnce(&mut Rest) -> T) -> Option<T> {
        self.state.change_rest(id, change)
    }

    /// Notes what a message of a client means for its rest.
    pub(crate) fn note_message(&mut self, id: ClientId, message: &ClientMessage) {
        self.state.note_message(id, message);
    }

    /// Tells a client whether others wait for what it holds, if that is news.
    pub(crate) fn tell_waiting(&mut self, id: ClientId, waiting: bool) {
        if self.state.note_waiting(id, waiting) {
            self.report.send(id, SchedulerMessage::Waiters { waiting });
        }
    }

    /// Adds a client, without ledger entries. It has entries as soon as the core knows its GPUs.
    pub(crate) fn add_client(&mut self, client: Client) {
        self.state.add_client(client);
    }

    /// Removes a client that is gone, and leaves its ledger entries.
    pub(crate) fn remove_client(&mut self, id: ClientId) -> Option<Client> {
        self.report.forget_client(id);
        self.agenda.forget_client(id);
        self.state.remove_client(id)
    }

    /// Lists a client that is gone for a while.
    pub(crate) fn remember(&mut self, client: &Client) {
        self.report.remember(&self.state, client);
    }

    /// Rewrites a client's ledger entries because another client changed.
    pub(crate) fn rewrite_entries(&mut self, id: ClientId) {
        self.state.enter(&mut self.agenda, id);
    }

    /// Rewrites a client's entry on one GPU.
    pub(crate) fn rewrite_entry_on(&mut self, id: ClientId, gpu: GpuUuid) {
        self.state.rewrite_entry_on(&mut self.agenda, id, Some(gpu));
    }

    /// Brings the places of some clients up to date: see [`State::refresh_places`].
    pub(crate) fn refresh_places(&mut self) {
        self.state.refresh_places(&mut self.agenda);
    }

    /// Brings one client's place up to date.
    pub(crate) fn refresh_place(&mut self, id: ClientId) {
        self.state.refresh_place(&mut self.agenda, id);
    }
}

/// Changes of GPUs.
impl Books {
    /// Changes a GPU; no event follows, and nothing is looked at again. Returns what the change returns, or
    /// `None` if the GPU is not known.
    pub(crate) fn change_gpu<T>(&mut self, uuid: GpuUuid, change: impl FnOnce(&mut Gpu) -> T) -> Option<T> {
        self.state.gpu_mut(uuid).map(change)
    }

    /// Changes each GPU that a client uses, with figures of its account there: see
    /// [`State::change_each_gpu_of`].
    pub(crate) fn change_each_gpu_of(&mut self, id: ClientId, change: impl FnMut(&mut Gpu, &mut Account)) {
        self.state.change_each_gpu_of(id, change);
    }

    /// Records how long the drain of a client took.
    pub(crate) fn record_drain(&mut self, id: ClientId, took: Duration) {
        self.state.record_drain(id, took);
    }

    /// Makes a GPU known, if it is not yet. Returns it.
    pub(crate) fn know_gpu(&mut self, uuid: GpuUuid, new: impl FnOnce(&Config) -> Gpu) -> &mut Gpu {
        self.state.know_gpu(uuid, new)
    }

    /// Forgets the GPUs that no client uses.
    pub(crate) fn forget_unused_gpus(&mut self) {
        self.state.forget_unused_gpus();
        self.report.forget_gpus(&self.state);
    }

    /// Lets the GPU be looked at again then, if not before.
    pub(crate) fn wake_at(&mut self, uuid: GpuUuid, time: Time) {
        self.change_gpu(uuid, |gpu| gpu.wake_at(time));
    }

    /// Queues a GPU of which something has changed, and the waiters that watch it.
    pub(crate) fn queue_with_watchers(&mut self, uuid: GpuUuid) {
        if let Some(gpu) = self.state.gpu_mut(uuid) {
            self.agenda.queue_with_watchers(gpu);
        }
    }

    /// Queues these GPUs, without the waiters that watch them.
    pub(crate) fn queue(&mut self, gpus: impl IntoIterator<Item = GpuUuid>) {
        self.agenda.queue(gpus);
    }
}

/// Changes of gangs: see [`state::gangs`](crate::state::gangs).
impl Books {
    /// Notes the members of a client's gang and the GPUs that they use, after one of them has changed that.
    pub(crate) fn gather_gang(&mut self, id: ClientId) {
        self.state.gather_gang(id);
    }

    /// Adds a client to its gang. Returns whether it counts as a member.
    pub(crate) fn add_member(&mut self, client: &Client, gang: Gang) -> bool {
        self.state.add_member(client, gang)
    }

    /// Makes clients that share memory members of one gang: see [`State::add_sharers`](crate::state::State).
    pub(crate) fn add_sharers(&mut self, circle: &Circle) -> GangId {
        self.state.add_sharers(circle)
    }

    /// See [`State::first_sharer`](crate::state::State).
    pub(crate) fn first_sharer(&mut self, number: u64, id: ClientId) -> ClientId {
        self.state.first_sharer(number, id)
    }

    /// See [`State::forget_sharer`](crate::state::State).
    pub(crate) fn forget_sharer(&mut self, id: ClientId, numbers: &[u64]) {
        self.state.forget_sharer(id, numbers);
    }

    /// Removes a member that is gone. Returns one of those that are left.
    pub(crate) fn remove_member(&mut self, id: ClientId, gang: GangId) -> Option<ClientId> {
        self.state.remove_member(id, gang)
    }

    /// Changes a gang. Returns what the change returns, or `None` if there is no such gang.
    pub(crate) fn change_gang<T>(
        &mut self,
        gang: GangId,
        change: impl FnOnce(&mut Members) -> T,
    ) -> Option<T> {
        self.state.gang_mut(gang).map(change)
    }

    /// Removes the gang: its members go on one by one.
    pub(crate) fn remove_gang(&mut self, gang: GangId) {
        self.state.remove_gang(gang);
    }
}

/// Events, and the scheduler as a whole.
impl Books {
    /// Sets the time when an event, or the request of an administrator, begins. Counts the event.
    pub(crate) fn begin_event(&mut self, now: Time) {
        self.state.begin_event(now);
    }

    /// Forgets the last event: the incidents that nobody took, and the work that it needed.
    pub(crate) fn forget_last_event(&mut self) {
        self.report.forget_incidents();
        self.agenda.forget_work();
    }

    pub(crate) fn new_epoch(&mut self) -> Epoch {
        self.state.new_epoch()
    }

    pub(crate) fn set_scheduling(&mut self, is_on: bool) {
        self.state.set_scheduling(is_on);
    }

    /// Applies another configuration, but for what was chosen at the start.
    pub(crate) fn replace_config(&mut self, config: Config) {
        self.state.replace_config(config);
    }

    /// Waits for clients that may come back, after one has come that was there before this scheduler.
    pub(crate) fn wait_for_returns(&mut self) {
        self.state.wait_for_returns();
    }
}

/// Messages, events and warnings.
impl Books {
    /// Sends a message to a client.
    pub(crate) fn send(&mut self, id: ClientId, message: SchedulerMessage) {
        self.report.send(id, message);
    }

    /// Queues WAITERS for these clients until the end of the event. They are told whether a client waits for
    /// what they hold, if that is news.
    pub(crate) fn tell_later(&mut self, clients: impl IntoIterator<Item = ClientId>) {
        self.agenda.tell_later(clients);
    }

    /// Reports an event of a client that is there.
    pub(crate) fn emit(&mut self, kind: EventKind, id: ClientId, bytes: Option<u64>) {
        if let Some(client) = self.state.client(id) {
            self.report.emit(kind, client, bytes, None);
        }
    }

    /// Reports an event of a client that is there, and the time that it ends.
    pub(crate) fn emit_with(
        &mut self,
        kind: EventKind,
        id: ClientId,
        bytes: Option<u64>,
        took: Option<Duration>,
    ) {
        if let Some(client) = self.state.client(id) {
            self.report.emit(kind, client, bytes, took);
        }
    }

    /// Warns of something about a client, on one GPU or in all.
    pub(crate) fn warn_of_client(&mut self, topic: Topic, id: ClientId, uuid: Option<GpuUuid>, text: &str) {
        self.report.warn_of_client(topic, id, uuid, self.state.now(), text);
    }

    /// Warns of something about a GPU.
    pub(crate) fn warn_of_gpu(&mut self, topic: Topic, uuid: GpuUuid, text: &str) {
        self.report.warn_of_gpu(topic, uuid, self.state.now(), text);
    }

    /// Returns a row for each client: see [`Report::client_status_at`].
    pub(crate) fn client_status_at(&self, now: Time) -> Vec<ClientStatus> {
        self.report.client_status_at(&self.state, now)
    }

    /// Returns the clients that have a row in [`Self::client_status_at`].
    pub(crate) fn listed(&self) -> BTreeSet<ClientId> {
        self.report.listed(&self.state)
    }
}
