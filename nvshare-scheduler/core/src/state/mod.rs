//! Who is there, and what each has.
//!
//! Nothing here decides anything or says anything to anybody: [`judge`](crate::judge) asks about it, and
//! [`steps`](crate::steps) change it.

pub(crate) mod account;
pub(crate) mod client;
pub(crate) mod config;
pub(crate) mod cost;
pub(crate) mod gangs;
pub(crate) mod gpu;
pub(crate) mod ledger;
pub(crate) mod rule;
pub(crate) mod share;
pub(crate) mod shares;
pub(crate) mod terms;
pub(crate) mod trial;
pub(crate) mod virtual_time;

use std::collections::BTreeMap;

use nvshare_proto::{Epoch, GpuUuid};

use crate::Time;
use account::Account;
use client::{Client, ClientId, Job, Phase};
use config::Config;
use gangs::Members;
use gpu::Gpu;
use terms::{JobTerms, OfJob};

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) config: Config,
    pub(crate) scheduling: bool,
    /// Nothing is granted before this time: see [`Config::settle`].
    pub(crate) settled_at: Time,
    pub(crate) clients: BTreeMap<ClientId, Client>,
    pub(crate) gpus: BTreeMap<GpuUuid, Gpu>,
    pub(crate) gangs: BTreeMap<u64, Members>,
    /// The clients of each job: their time is counted together.
    pub(crate) jobs: BTreeMap<Job, OfJob>,
    /// Terms that administrators gave to jobs.
    pub(crate) given: BTreeMap<Job, JobTerms>,
    last_epoch: u64,
    /// The time of the current event, or of the last one.
    pub(crate) now: Time,
    /// Counts the events.
    pub(crate) events: u64,
}

impl State {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            settled_at: if config.restarted { config.settle } else { Time::ZERO },
            config,
            scheduling: true,
            clients: BTreeMap::new(),
            gpus: BTreeMap::new(),
            gangs: BTreeMap::new(),
            jobs: BTreeMap::new(),
            given: BTreeMap::new(),
            last_epoch: 0,
            now: Time::ZERO,
            events: 0,
        }
    }

    /// An event begins, or the request of an administrator.
    pub(crate) fn begin_event(&mut self, now: Time) {
        self.now = self.now.max(now);
        self.events += 1;
    }

    pub(crate) fn new_epoch(&mut self) -> Epoch {
        self.last_epoch += 1;
        Epoch { boot: self.config.boot, counter: self.last_epoch }
    }

    pub(crate) fn account(&self, id: ClientId, uuid: GpuUuid) -> Option<&Account> {
        self.clients.get(&id)?.accounts.get(&uuid).map(Box::as_ref)
    }

    pub(crate) fn gpus_used_by(&self, id: ClientId) -> Vec<GpuUuid> {
        self.clients.get(&id).map(Client::gpus).unwrap_or_default()
    }

    /// Changes each GPU that a client uses, with its account there.
    pub(crate) fn on_each_gpu_of(&mut self, id: ClientId, mut change: impl FnMut(&mut Gpu, &mut Account)) {
        let accounts = self.clients.get_mut(&id).map(|client| &mut client.accounts);
        for (uuid, account) in accounts.into_iter().flatten() {
            if let Some(gpu) = self.gpus.get_mut(uuid) {
                change(gpu, account);
            }
        }
    }

    pub(crate) fn phase(&self, id: ClientId) -> Option<Phase> {
        self.clients.get(&id).map(|client| client.phase)
    }

    /// Those of the clients that are there.
    pub(crate) fn clients_of<'a>(&'a self, ids: &'a [ClientId]) -> impl Iterator<Item = &'a Client> {
        ids.iter().filter_map(|id| self.clients.get(id))
    }

    /// Those of the GPUs that are known.
    pub(crate) fn gpus_among<'a>(&'a self, uuids: &'a [GpuUuid]) -> impl Iterator<Item = &'a Gpu> {
        uuids.iter().filter_map(|uuid| self.gpus.get(uuid))
    }
}
