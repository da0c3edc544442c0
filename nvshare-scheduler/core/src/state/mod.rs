//! The state: the clients and GPUs that are there, and all that each has.
//!
//! Nothing in this room decides anything or says anything to anybody: [`steps`](crate::steps) change the
//! state. The rooms above have methods of [`State`] too: questions in [`judge`](crate::judge), and what is
//! shown of it in [`report`](crate::report). They only read, and nothing here calls them.

pub(crate) mod account;
pub(crate) mod agenda;
pub(crate) mod circles;
pub(crate) mod client;
pub(crate) mod config;
pub(crate) mod cost;
pub(crate) mod departed;
pub(crate) mod entries;
pub(crate) mod entry;
pub(crate) mod gangs;
pub(crate) mod gpu;
pub(crate) mod ledger;
pub(crate) mod overdue;
pub(crate) mod place;
pub(crate) mod rest;
pub(crate) mod rule;
pub(crate) mod share;
pub(crate) mod shares;
pub(crate) mod sleep;
pub(crate) mod terms;
pub(crate) mod turn_clock;
pub(crate) mod virtual_time;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nvshare_proto::{ClientMessage, Epoch, GpuUuid};

use crate::Time;
use account::Account;
use client::{Client, ClientId, GangId, Notes, Phase};
use config::Config;
use gangs::Members;
use gpu::Gpu;
use rest::Rest;
use terms::Jobs;

/// See the module's documentation. All can be read by everybody. Changes go through the methods of this room,
/// and only the [books](crate::steps::books) can call them: nobody else has a `&mut State`.
#[derive(Debug)]
pub(crate) struct State {
    config: Config,
    scheduling: bool,
    /// Nothing is granted before this time: see [`Config::settle`].
    settled_at: Time,
    clients: BTreeMap<ClientId, Client>,
    gpus: BTreeMap<GpuUuid, Gpu>,
    gangs: BTreeMap<GangId, Members>,
    /// For each number of shared memory, the client that said it first.
    sharers: BTreeMap<u64, ClientId>,
    jobs: Jobs,
    last_epoch: u64,
    /// The time of the current event, or of the last one.
    now: Time,
    /// Counts the events.
    events: u64,
    /// Clients that the last event's judgements looked at, besides those that they were about.
    looks: Cell<u64>,
}

/// Everybody may read this.
impl State {
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Whether scheduling is on.
    pub(crate) fn is_scheduling(&self) -> bool {
        self.scheduling
    }

    /// Returns the time of the current event, or of the last one.
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// Returns the time before which nothing is granted: see [`Config::settle`].
    pub(crate) fn settled_at(&self) -> Time {
        self.settled_at
    }

    pub(crate) fn is_settled(&self) -> bool {
        self.now >= self.settled_at
    }

    /// Returns a client, or `None` if it is gone or never came.
    pub(crate) fn client(&self, id: ClientId) -> Option<&Client> {
        self.clients.get(&id)
    }

    pub(crate) fn clients(&self) -> impl Iterator<Item = &Client> {
        self.clients.values()
    }

    pub(crate) fn client_ids(&self) -> Vec<ClientId> {
        self.clients.keys().copied().collect()
    }

    /// Returns a GPU, or `None` if no client uses it and NVML has not measured it.
    pub(crate) fn gpu(&self, uuid: GpuUuid) -> Option<&Gpu> {
        self.gpus.get(&uuid)
    }

    /// Returns a GPU that a step looks at, or of an account. One that is not known is left out before (see
    /// `reconcile.rs`), and none is forgotten while a client uses it.
    pub(crate) fn known_gpu(&self, uuid: GpuUuid) -> Option<&Gpu> {
        let gpu = self.gpus.get(&uuid);
        debug_assert!(gpu.is_some(), "{uuid} is looked at, and not known");
        gpu
    }

    pub(crate) fn gpus(&self) -> impl Iterator<Item = &Gpu> {
        self.gpus.values()
    }

    pub(crate) fn gpu_uuids(&self) -> Vec<GpuUuid> {
        self.gpus.keys().copied().collect()
    }

    pub(crate) fn jobs(&self) -> &Jobs {
        &self.jobs
    }

    pub(crate) fn account(&self, id: ClientId, uuid: GpuUuid) -> Option<&Account> {
        self.clients.get(&id)?.accounts.get(&uuid).map(Box::as_ref)
    }

    pub(crate) fn gpus_used_by(&self, id: ClientId) -> Vec<GpuUuid> {
        self.clients.get(&id).map(Client::gpus).unwrap_or_default()
    }

    pub(crate) fn phase(&self, id: ClientId) -> Option<Phase> {
        self.clients.get(&id).map(|client| client.phase())
    }

    /// Returns those of the clients that are there.
    pub(crate) fn clients_of<'a>(&'a self, ids: &'a [ClientId]) -> impl Iterator<Item = &'a Client> {
        ids.iter().filter_map(|id| self.clients.get(id))
    }

    /// Returns those of the GPUs that are known.
    pub(crate) fn gpus_among<'a>(&'a self, uuids: &'a [GpuUuid]) -> impl Iterator<Item = &'a Gpu> {
        uuids.iter().filter_map(|uuid| self.gpus.get(uuid))
    }
}

/// Only the books call this.
impl State {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            settled_at: if config.restarted { config.settle } else { Time::ZERO },
            config,
            scheduling: true,
            clients: BTreeMap::new(),
            gpus: BTreeMap::new(),
            gangs: BTreeMap::new(),
            sharers: BTreeMap::new(),
            jobs: Jobs::default(),
            last_epoch: 0,
            now: Time::ZERO,
            events: 0,
            looks: Cell::new(0),
        }
    }

    /// Sets the time when an event, or the request of an administrator, begins. Counts the event.
    pub(crate) fn begin_event(&mut self, now: Time) {
        self.now = self.now.max(now);
        self.events += 1;
        self.looks.set(0);
    }

    /// Counts a look at a client, as a part of the event's work.
    pub(crate) fn count_look(&self) {
        self.looks.set(self.looks.get() + 1);
    }

    /// Returns how many such looks the last event took.
    #[cfg(feature = "test-api")]
    pub(crate) fn looks(&self) -> u64 {
        self.looks.get()
    }

    pub(crate) fn new_epoch(&mut self) -> Epoch {
        self.last_epoch += 1;
        Epoch { boot: self.config.boot, counter: self.last_epoch }
    }

    pub(crate) fn set_scheduling(&mut self, is_on: bool) {
        self.scheduling = is_on;
    }

    /// Applies another configuration. The number that names this run of the scheduler stays, and the settings
    /// of its start.
    pub(crate) fn replace_config(&mut self, config: Config) {
        let Config { boot, settle, restarted, .. } = self.config;
        self.config = Config { boot, settle, restarted, ..config };
    }

    /// Waits for clients that may come back, after one has come that was there before this scheduler.
    pub(crate) fn wait_for_returns(&mut self) {
        self.settled_at = self.settled_at.max(self.config.settle);
    }

    /// Adds a client, without ledger entries.
    pub(crate) fn add_client(&mut self, client: Client) {
        self.clients.insert(client.id, client);
    }

    /// Removes a client that is gone, and leaves its ledger entries.
    pub(crate) fn remove_client(&mut self, id: ClientId) -> Option<Client> {
        let client = self.clients.remove(&id)?;
        self.forget_sharer(id, &client.shares);
        Some(client)
    }

    /// A client is not united any more with those that share memory of these numbers: another one counts as the first.
    pub(crate) fn forget_sharer(&mut self, id: ClientId, numbers: &[u64]) {
        let is_first = |number: &u64| self.sharers.get(number) == Some(&id);
        let mut left: BTreeSet<u64> = numbers.iter().copied().filter(is_first).collect();
        for number in &left {
            self.sharers.remove(number);
        }
        for other in self.clients.values().filter(|other| other.id != id && other.joins_sharers()) {
            let next = other.shares.iter().filter(|&number| left.remove(number));
            self.sharers.extend(next.map(|&number| (number, other.id)));
        }
    }

    pub(crate) fn jobs_mut(&mut self) -> &mut Jobs {
        &mut self.jobs
    }

    pub(crate) fn gpu_mut(&mut self, uuid: GpuUuid) -> Option<&mut Gpu> {
        self.gpus.get_mut(&uuid)
    }

    /// Makes a GPU known, if it is not yet. Returns it.
    pub(crate) fn know_gpu(&mut self, uuid: GpuUuid, gpu: impl FnOnce(&Config) -> Gpu) -> &mut Gpu {
        let config = &self.config;
        self.gpus.entry(uuid).or_insert_with(|| gpu(config))
    }

    /// Forgets the GPUs that no client uses.
    pub(crate) fn forget_unused_gpus(&mut self) {
        self.gpus.retain(|_, gpu| gpu.ledger.entries().next().is_some());
    }

    /// Changes what is noted of a client. Returns what the change returns, or `None` if the client is gone.
    pub(crate) fn change_notes<T>(&mut self, id: ClientId, note: impl FnOnce(&mut Notes) -> T) -> Option<T> {
        self.clients.get_mut(&id).map(|client| note(&mut client.notes))
    }

    /// Changes the rest of a client, on which no ledger depends. Returns what the change returns, or `None` if the client is gone.
    pub(crate) fn change_rest<T>(&mut self, id: ClientId, change: impl FnOnce(&mut Rest) -> T) -> Option<T> {
        self.clients.get_mut(&id).map(|client| change(&mut client.rest))
    }

    /// Lets the rest of a client hear what the client says.
    pub(crate) fn note_message(&mut self, id: ClientId, message: &ClientMessage) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.rest.hear(message, &client.notes.counters, self.now);
        }
    }

    /// Notes that a client is told whether others wait for what it holds. Returns whether that is news.
    pub(crate) fn note_waiting(&mut self, id: ClientId, waiting: bool) -> bool {
        let now = self.now;
        self.clients.get_mut(&id).is_some_and(|client| client.note_told_waiting(waiting, now))
    }

    /// Records how long the drain of a client took.
    pub(crate) fn record_drain(&mut self, id: ClientId, took: Duration) {
        let accounts = self.clients.get_mut(&id).map(|client| &mut client.accounts);
        for (uuid, account) in accounts.into_iter().flatten() {
            account.cost.drain.record(took);
            if let Some(gpu) = self.gpus.get_mut(uuid) {
                gpu.record_drain(took);
                gpu.cost.drain.record(took);
            }
        }
    }

    /// Changes each GPU that a client uses, with its account there. The account's entry in the GPU's ledger
    /// is not written: this is for figures that no entry has.
    pub(crate) fn change_each_gpu_of(
        &mut self,
        id: ClientId,
        mut change: impl FnMut(&mut Gpu, &mut Account),
    ) {
        let accounts = self.clients.get_mut(&id).map(|client| &mut client.accounts);
        for (uuid, account) in accounts.into_iter().flatten() {
            if let Some(gpu) = self.gpus.get_mut(uuid) {
                change(gpu, account);
            }
        }
    }
}
