//! Terms of jobs: what they ask for of the GPUs' time, what they are given, and what follows from both.

use std::collections::{BTreeMap, BTreeSet};

use nvshare_proto::{
    Asked, ComputeLimit, Enforcement, Given, GpuUuid, MOST_WEIGHT, Priority, Room, SchedulerMessage,
    ShareStatus, USUAL_WEIGHT,
};

use crate::client::{ClientId, Job};
use crate::policy::entitled::Terms;
use crate::virtual_time::FINER;
use crate::{Core, Time};

/// Most jobs without a process whose terms are kept.
const MOST_ABSENT: usize = 256;

/// The terms that a job was given.
#[derive(Debug, Clone, Default)]
pub(crate) struct JobTerms {
    weight: Option<u32>,
    priority: Option<Priority>,
    enforcement: Option<Enforcement>,
    /// Limits on every GPU, and on single ones: in per cent, and in bytes; 0: no limit, whatever the job asks for.
    compute: Option<u8>,
    compute_on: BTreeMap<GpuUuid, u8>,
    memory: Option<u64>,
    memory_on: BTreeMap<GpuUuid, u64>,
    pub(crate) paused: bool,
}

impl JobTerms {
    fn take(&mut self, gpu: Option<GpuUuid>, given: Given) {
        self.weight = given.weight.or(self.weight);
        self.priority = given.priority.or(self.priority);
        self.enforcement = given.enforcement.or(self.enforcement);
        self.paused = given.paused.unwrap_or(self.paused);
        match gpu {
            Some(gpu) => {
                self.compute_on.extend(given.compute.map(|percent| (gpu, percent)));
                self.memory_on.extend(given.memory.map(|bytes| (gpu, bytes)));
            }
            None => {
                if given.compute.is_some() {
                    self.compute = given.compute;
                    self.compute_on.clear();
                }
                if given.memory.is_some() {
                    self.memory = given.memory;
                    self.memory_on.clear();
                }
            }
        }
    }

    fn compute(&self, gpu: GpuUuid) -> Option<u8> {
        self.compute_on.get(&gpu).copied().or(self.compute)
    }

    fn memory(&self, gpu: GpuUuid) -> Option<u64> {
        self.memory_on.get(&gpu).copied().or(self.memory)
    }
}

/// The factor by which a priority changes the weight, in parts of [`FINER`].
fn factor(priority: Priority) -> u64 {
    match priority {
        Priority::Low => FINER / 8,
        Priority::Normal => FINER,
        Priority::High => FINER * 8,
    }
}

/// The terms of a job, from what it was given and what all of its processes ask for: each process may ask for less.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Has {
    weight: u32,
    priority: Priority,
    enforcement: Enforcement,
    limit: Option<u8>,
}

/// The terms of jobs, in all and on single GPUs.
pub(crate) type Known = BTreeMap<(Job, Option<GpuUuid>), Has>;

/// The least that the processes of a job ask for.
#[derive(Debug, Clone, Default)]
struct Least {
    weight: Option<u32>,
    priority: Option<Priority>,
    /// The strictest enforcement that a process with a limit asks for.
    enforcement: Option<Enforcement>,
    compute: BTreeMap<GpuUuid, u8>,
}

impl Least {
    /// Looks at each process once: a job may have a thousand, on many GPUs.
    fn of<'a>(asked: impl Iterator<Item = &'a Asked>) -> Self {
        let mut least = Self::default();
        for asked in asked {
            least.weight = least.weight.into_iter().chain(asked.weight).min();
            least.priority = least.priority.into_iter().chain(asked.priority).min();
            if !asked.compute.is_empty() {
                let both = least.enforcement.into_iter().chain([asked.enforcement]);
                least.enforcement = both.max_by_key(|&enforcement| strictness(enforcement));
            }
            // A limit of nothing is none: it must not stand for the limits that others of the job ask for.
            for limit in asked.compute.iter().filter(|limit| limit.percent > 0) {
                let percent = least.compute.entry(limit.gpu).or_insert(limit.percent);
                *percent = limit.percent.min(*percent);
            }
        }
        least
    }
}

fn strictness(enforcement: Enforcement) -> u8 {
    match enforcement {
        Enforcement::Disable => 0,
        Enforcement::Default => 1,
        Enforcement::Force => 2,
    }
}

fn has(given: &JobTerms, least: &Least, gpu: Option<GpuUuid>) -> Has {
    let weight =
        least.weight.into_iter().fold(given.weight.unwrap_or(USUAL_WEIGHT), u32::min).clamp(1, MOST_WEIGHT);
    let priority = least.priority.into_iter().fold(given.priority.unwrap_or_default(), Priority::min);
    let enforcement = given.enforcement.or(least.enforcement).unwrap_or_default();
    let limit = |gpu| given.compute(gpu).or_else(|| least.compute.get(&gpu).copied());
    let limit = gpu.and_then(limit).filter(|&percent| percent > 0);
    Has { weight, priority, enforcement, limit: limit.map(|percent| percent.min(100)) }
}

impl Core {
    /// Applies a job's terms after they changed, or after processes came and went.
    pub(crate) fn settle_terms(&mut self, job: Job) {
        let now = self.now;
        let members: Vec<ClientId> = self.jobs.get(&job).into_iter().flatten().copied().collect();
        let none = JobTerms::default();
        let given = self.given.get(&job).unwrap_or(&none);
        let asked = members.iter().filter_map(|id| self.clients.get(id)).map(|client| &client.asked);
        let least = Least::of(asked);
        let there = members.iter().filter_map(|id| self.clients.get(id));
        let gpus: BTreeSet<GpuUuid> = there.flat_map(|client| client.accounts.keys().copied()).collect();
        for uuid in gpus {
            let Some(gpu) = self.gpus.get_mut(&uuid) else { continue };
            let has = has(given, &least, Some(uuid));
            let terms = Terms {
                weight: u64::from(has.weight) * factor(has.priority),
                limit: has.limit.filter(|_| has.enforcement != Enforcement::Disable),
                forced: has.enforcement == Enforcement::Force,
            };
            gpu.shares.advance(now);
            if gpu.shares.set_terms(job, terms) {
                gpu.told = None;
                self.dirty.insert(uuid);
            }
        }
        self.settle_pauses(members);
    }

    /// Pauses these clients and their gangs, or lets them go on. A gang is granted together or not at all, so all of it is
    /// paused while the job of one of its members is.
    pub(crate) fn settle_pauses(&mut self, clients: Vec<ClientId>) {
        for id in self.with_their_gangs(clients) {
            let unit = self.unit(id);
            let jobs = unit.iter().filter_map(|id| self.clients.get(id)).map(|client| client.job);
            let paused = jobs.filter_map(|job| self.given.get(&job)).any(|given| given.paused);
            if self.clients.get(&id).is_some_and(|client| client.paused != paused) {
                self.with(id, |client| client.paused = paused);
                // A client that runs has to be asked to leave, though nothing in its ledger entries changed.
                self.dirty.extend(self.gpus_used_by(id));
            }
        }
    }

    /// An administrator gives terms to a client's job. Returns words for the clients that they apply to.
    ///
    /// # Errors
    /// When there is no such client, or it does not use the GPU.
    pub fn give(
        &mut self,
        client: ClientId,
        gpu: Option<GpuUuid>,
        given: Given,
        now: Time,
    ) -> Result<String, String> {
        self.now = self.now.max(now);
        let Some(there) = self.clients.get(&client) else {
            return Err(format!("there is no client {client}; `nvshare-ctl clients` shows who is there"));
        };
        let (job, name) = (there.job, there.name.clone());
        if let Some(gpu) = gpu.filter(|gpu| !there.accounts.contains_key(gpu)) {
            return Err(format!("client {client} ({name}) does not use {gpu}"));
        }
        self.given.entry(job).or_default().take(gpu, given);
        let members: Vec<ClientId> = self.jobs.get(&job).into_iter().flatten().copied().collect();
        if given.memory.is_some() {
            for &id in &members {
                self.tell_limits(id);
            }
        }
        self.settle_terms(job);
        self.reconcile();
        let whom = match members.len() {
            0 | 1 => format!("client {client} ({name})"),
            several => format!("the {several} processes of client {client} ({name})"),
        };
        Ok(whom)
    }

    /// An administrator gives terms to a tenant that is about to come.
    pub fn give_tenant(&mut self, tenant: u64, given: Given, now: Time) {
        self.now = self.now.max(now);
        let job = Job::Tenant(tenant);
        if self.given.len() >= MOST_ABSENT + self.jobs.len() {
            let jobs = &self.jobs;
            self.given.retain(|job, _| jobs.contains_key(job));
        }
        self.given.entry(job).or_default().take(None, given);
        self.settle_terms(job);
        self.reconcile();
    }

    /// Tells a client what an administrator lets it allocate.
    pub(crate) fn tell_limits(&mut self, id: ClientId) {
        let Some(client) = self.clients.get(&id) else { return };
        let Some(given) = self.given.get(&client.job) else { return };
        let limit = |&gpu: &GpuUuid| Some(Room { gpu, bytes: given.memory(gpu)? });
        let limits: Vec<Room> = client.accounts.keys().filter_map(limit).collect();
        for limit in limits {
            self.send(id, SchedulerMessage::Limit(limit));
        }
    }

    /// Adds a client to its job.
    pub(crate) fn join_job(&mut self, id: ClientId) {
        let Some(job) = self.clients.get(&id).map(|client| client.job) else { return };
        self.jobs.entry(job).or_default().insert(id);
        self.settle_terms(job);
        self.tell_limits(id);
    }

    /// A client is gone. Its job's terms are kept while the job has processes, and a tenant's terms until other jobs need
    /// the place: a program that ends and starts again is the same tenant.
    pub(crate) fn leave_job(&mut self, id: ClientId, job: Job) {
        let Some(members) = self.jobs.get_mut(&job) else { return };
        members.remove(&id);
        if members.is_empty() {
            self.jobs.remove(&job);
            if !matches!(job, Job::Tenant(_)) {
                self.given.remove(&job);
            }
        }
        self.settle_terms(job);
    }

    /// The share of a client, as it is shown. The terms of a job follow from all of its processes: `known` keeps them, by job
    /// and GPU, for the other clients of the same list.
    pub(crate) fn share_status(&self, id: ClientId, known: &mut Known) -> ShareStatus {
        let Some(client) = self.clients.get(&id) else { return ShareStatus::default() };
        let none = JobTerms::default();
        let given = self.given.get(&client.job).unwrap_or(&none);
        let members = self.jobs.get(&client.job);
        let asked =
            members.into_iter().flatten().filter_map(|id| self.clients.get(id)).map(|client| &client.asked);
        let mut terms = |gpu| {
            *known.entry((client.job, gpu)).or_insert_with(|| has(given, &Least::of(asked.clone()), gpu))
        };
        let all = terms(None);
        let limit = |&gpu: &GpuUuid| Some(ComputeLimit { gpu, percent: terms(Some(gpu)).limit? });
        ShareStatus {
            weight: all.weight,
            priority: all.priority,
            enforcement: all.enforcement,
            compute: client.accounts.keys().filter_map(limit).collect(),
            paused: client.paused,
            processes: members.map_or(0, |members| members.len() as u32),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: GpuUuid = GpuUuid([1; 16]);
    const OTHER: GpuUuid = GpuUuid([2; 16]);

    fn asks(
        weight: Option<u32>,
        priority: Option<Priority>,
        percent: &[u8],
        enforcement: Enforcement,
    ) -> Asked {
        let compute = percent.iter().map(|&percent| ComputeLimit { gpu: GPU, percent }).collect();
        Asked { weight, priority, enforcement, compute, gang: None }
    }

    #[test]
    fn a_program_may_ask_for_less_than_its_tenant_was_given() {
        use Enforcement::{Default, Disable, Force};
        let given = |weight, priority| JobTerms { weight, priority, ..JobTerms::default() };
        for (given, asked, expected) in [
            (given(None, None), vec![], (100, Priority::Normal, Default, None)),
            (
                given(None, None),
                vec![asks(Some(20), None, &[], Default)],
                (20, Priority::Normal, Default, None),
            ),
            (
                given(None, None),
                vec![asks(Some(500), Some(Priority::High), &[], Default)],
                (100, Priority::Normal, Default, None),
            ),
            (
                given(Some(400), Some(Priority::High)),
                vec![asks(Some(300), None, &[], Default), asks(Some(500), None, &[], Default)],
                (300, Priority::High, Default, None),
            ),
            (
                given(None, None),
                vec![asks(None, Some(Priority::Low), &[60, 30], Disable), asks(None, None, &[50], Force)],
                (100, Priority::Low, Force, Some(30)),
            ),
            (
                given(None, None),
                vec![asks(None, None, &[60], Disable)],
                (100, Priority::Normal, Disable, Some(60)),
            ),
            // What a library never sends.
            (
                given(Some(u32::MAX), None),
                vec![asks(Some(u32::MAX), Some(Priority::High), &[255], Force)],
                (10_000, Priority::Normal, Force, Some(100)),
            ),
            (
                given(None, None),
                vec![asks(None, None, &[30], Default), asks(Some(0), None, &[0], Default)],
                (1, Priority::Normal, Default, Some(30)),
            ),
            (
                given(Some(0), None),
                vec![asks(Some(0), None, &[0], Default)],
                (1, Priority::Normal, Default, None),
            ),
        ] {
            let least = Least::of(asked.iter());
            let got = has(&given, &least, Some(GPU));
            assert_eq!(
                (got.weight, got.priority, got.enforcement, got.limit),
                expected,
                "{given:?} {asked:?}"
            );
            assert_eq!(has(&given, &least, Some(OTHER)).limit, None);
        }
    }

    #[test]
    fn an_administrators_word_stands_above_the_environment() {
        let mut given = JobTerms::default();
        let asked = [asks(None, None, &[20], Enforcement::Force)];
        let limit = |given: &JobTerms, gpu| has(given, &Least::of(asked.iter()), Some(gpu)).limit;
        given.take(Some(GPU), Given { compute: Some(60), memory: Some(7), ..Given::default() });
        assert_eq!((limit(&given, GPU), limit(&given, OTHER)), (Some(60), None));
        assert_eq!((given.memory(GPU), given.memory(OTHER)), (Some(7), None));
        given.take(None, Given { compute: Some(0), ..Given::default() });
        assert_eq!(
            (limit(&given, GPU), given.memory(GPU)),
            (None, Some(7)),
            "no limit, whatever it asks for"
        );
        given.take(None, Given { paused: Some(true), ..Given::default() });
        assert!(given.paused);
        given.take(None, Given { weight: Some(5), ..Given::default() });
        assert!(given.paused && given.weight == Some(5));
    }
}
