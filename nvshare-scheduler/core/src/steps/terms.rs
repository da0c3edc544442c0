//! Terms of jobs: what they ask for of the GPUs' time, what they are given, and what follows from both.

use std::collections::{BTreeMap, BTreeSet};

use nvshare_proto::{
    Amount, Asked, ComputeLimit, Enforcement, Given, GpuUuid, MOST_WEIGHT, Priority, SchedulerMessage,
    ShareStatus, USUAL_WEIGHT,
};

use crate::policy::entitled::Terms;
use crate::state::client::{Client, ClientId, Job};
use crate::state::virtual_time::FINER;
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

/// How many processes ask for each value.
type Counts<V> = BTreeMap<V, usize>;

/// The least that the processes of a job ask for. It is kept by counts: a job may have a thousand processes, with limits on many
/// GPUs, and each of them comes and goes.
#[derive(Debug, Clone, Default)]
struct Least {
    weight: Counts<u32>,
    priority: Counts<Priority>,
    /// The enforcements that processes with a limit ask for, by [`strictness`]: the strictest counts.
    enforcement: Counts<u8>,
    compute: BTreeMap<GpuUuid, Counts<u8>>,
}

fn count<V: Copy + Ord>(counts: &mut Counts<V>, value: V, comes: bool) {
    let count = counts.entry(value).or_default();
    *count = if comes { *count + 1 } else { count.saturating_sub(1) };
    if *count == 0 {
        counts.remove(&value);
    }
}

fn first<V: Copy>(counts: &Counts<V>) -> Option<V> {
    counts.keys().next().copied()
}

impl Least {
    /// A process comes, or goes.
    fn count(&mut self, asked: &Asked, comes: bool) {
        if let Some(weight) = asked.weight {
            count(&mut self.weight, weight, comes);
        }
        if let Some(priority) = asked.priority {
            count(&mut self.priority, priority, comes);
        }
        if !asked.compute.is_empty() {
            count(&mut self.enforcement, strictness(asked.enforcement), comes);
        }
        // A limit of nothing is none: it must not stand for the limits that others of the job ask for.
        for limit in asked.compute.iter().filter(|limit| limit.percent > 0) {
            let limits = self.compute.entry(limit.gpu).or_default();
            count(limits, limit.percent, comes);
            if limits.is_empty() {
                self.compute.remove(&limit.gpu);
            }
        }
    }

    fn enforcement(&self) -> Option<Enforcement> {
        let strictest = self.enforcement.keys().next_back().copied()?;
        [Enforcement::Disable, Enforcement::Default, Enforcement::Force]
            .into_iter()
            .find(|&enforcement| strictness(enforcement) == strictest)
    }

    fn compute(&self, gpu: GpuUuid) -> Option<u8> {
        self.compute.get(&gpu).and_then(first)
    }
}

/// The processes of a job that are connected.
#[derive(Debug, Default)]
pub(crate) struct OfJob {
    pub(crate) clients: BTreeSet<ClientId>,
    /// The GPUs that they use.
    gpus: Counts<GpuUuid>,
    least: Least,
}

impl OfJob {
    fn gpus(&self) -> Vec<GpuUuid> {
        self.gpus.keys().copied().collect()
    }
}

/// Whether a process asks for anything that counts for its whole job.
fn asks_for_its_job(asked: &Asked) -> bool {
    asked.weight.is_some() || asked.priority.is_some() || !asked.compute.is_empty()
}

fn strictness(enforcement: Enforcement) -> u8 {
    match enforcement {
        Enforcement::Disable => 0,
        Enforcement::Default => 1,
        Enforcement::Force => 2,
    }
}

fn has(given: &JobTerms, least: &Least, gpu: Option<GpuUuid>) -> Has {
    let weight = first(&least.weight)
        .into_iter()
        .fold(given.weight.unwrap_or(USUAL_WEIGHT), u32::min)
        .clamp(1, MOST_WEIGHT);
    let priority = first(&least.priority).into_iter().fold(given.priority.unwrap_or_default(), Priority::min);
    let enforcement = given.enforcement.or(least.enforcement()).unwrap_or_default();
    let limit = |gpu| given.compute(gpu).or_else(|| least.compute(gpu));
    let limit = gpu.and_then(limit).filter(|&percent| percent > 0);
    Has { weight, priority, enforcement, limit: limit.map(|percent| percent.min(100)) }
}

impl Core {
    /// Applies a job's terms on all of its GPUs, after an administrator changed them.
    fn settle_terms(&mut self, job: Job) {
        let gpus = self.jobs.get(&job).map(OfJob::gpus).unwrap_or_default();
        self.settle_terms_on(job, gpus);
        self.settle_pauses(self.members_of_job(job));
    }

    /// Applies a job's terms on these GPUs.
    fn settle_terms_on(&mut self, job: Job, gpus: Vec<GpuUuid>) {
        let (now, none, nobody) = (self.now, JobTerms::default(), Least::default());
        let mut bounds = false;
        let given = self.given.get(&job).unwrap_or(&none);
        let least = self.jobs.get(&job).map_or(&nobody, |of_job| &of_job.least);
        for uuid in gpus {
            let Some(gpu) = self.gpus.get_mut(&uuid) else { continue };
            self.steps += 1;
            let has = has(given, least, Some(uuid));
            let terms = Terms {
                weight: u64::from(has.weight) * factor(has.priority),
                limit: has.limit.filter(|_| has.enforcement != Enforcement::Disable),
                forced: has.enforcement == Enforcement::Force,
            };
            gpu.shares.advance(now);
            if gpu.shares.set_terms(job, terms) {
                self.dirty.insert(uuid);
                bounds = true;
            }
        }
        if bounds {
            self.untold.extend(self.members_of_job(job));
        }
    }

    fn members_of_job(&self, job: Job) -> Vec<ClientId> {
        self.jobs.get(&job).into_iter().flat_map(|of_job| &of_job.clients).copied().collect()
    }

    /// Pauses these clients and their gangs, or lets them go on. A gang is granted together or not at all, so all of it is
    /// paused while the job of one of its members is.
    pub(crate) fn settle_pauses(&mut self, clients: Vec<ClientId>) {
        for id in self.with_their_gangs(clients) {
            self.steps += 1;
            let unit = self.unit(id);
            let jobs = unit.iter().filter_map(|id| self.clients.get(id)).map(|client| client.job);
            let paused = jobs.filter_map(|job| self.given.get(&job)).any(|given| given.paused);
            if self.clients.get(&id).is_some_and(|client| client.paused != paused) {
                self.with(id, |client| client.paused = paused);
                // A client that runs has to leave, though nothing in its ledger entries changed. Until it can, its work in flight is bounded.
                self.dirty.extend(self.gpus_used_by(id));
                self.untold.insert(id);
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
        self.begin_event(now);
        let Some(there) = self.clients.get(&client) else {
            return Err(format!("there is no client {client}; `nvshare-ctl clients` shows who is there"));
        };
        let (job, name) = (there.job, there.name.clone());
        if let Some(gpu) = gpu.filter(|gpu| !there.accounts.contains_key(gpu)) {
            return Err(format!("client {client} ({name}) does not use {gpu}"));
        }
        self.given.entry(job).or_default().take(gpu, given);
        let members = self.members_of_job(job);
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
        self.begin_event(now);
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
        let limit = |&gpu: &GpuUuid| Some(Amount { gpu, bytes: given.memory(gpu)? });
        let limits: Vec<Amount> = client.accounts.keys().filter_map(limit).collect();
        for limit in limits {
            self.send(id, SchedulerMessage::Limit(limit));
        }
    }

    /// Adds a client to its job.
    pub(crate) fn join_job(&mut self, id: ClientId) {
        let Some(client) = self.clients.get(&id) else { return };
        let of_job = self.jobs.entry(client.job).or_default();
        of_job.clients.insert(id);
        of_job.least.count(&client.asked, true);
        client.accounts.keys().for_each(|&gpu| count(&mut of_job.gpus, gpu, true));
    }

    /// A client of a job uses another GPU.
    pub(crate) fn count_gpu(&mut self, id: ClientId, gpu: GpuUuid) {
        let job = self.clients.get(&id).map(|client| client.job);
        if let Some(of_job) = job.and_then(|job| self.jobs.get_mut(&job)) {
            count(&mut of_job.gpus, gpu, true);
        }
    }

    /// Applies the terms of a client's job after the client came, or began to use a GPU. A wish of one process counts on all GPUs of
    /// its job.
    pub(crate) fn settle_job(&mut self, id: ClientId) {
        let Some(client) = self.clients.get(&id) else { return };
        let job = client.job;
        let gpus = match self.jobs.get(&job) {
            Some(of_job) if asks_for_its_job(&client.asked) => of_job.gpus(),
            _ => self.gpus_used_by(id),
        };
        self.settle_terms_on(job, gpus);
        self.settle_pauses(vec![id]);
        self.tell_limits(id);
    }

    /// A client is gone. Its job's terms are kept while the job has processes, and a tenant's terms until other jobs need
    /// the place: a program that ends and starts again is the same tenant.
    pub(crate) fn leave_job(&mut self, id: ClientId, client: &Client) {
        let job = client.job;
        let Some(of_job) = self.jobs.get_mut(&job) else { return };
        of_job.clients.remove(&id);
        of_job.least.count(&client.asked, false);
        client.accounts.keys().for_each(|&gpu| count(&mut of_job.gpus, gpu, false));
        if of_job.clients.is_empty() {
            self.jobs.remove(&job);
            if !matches!(job, Job::Tenant(_)) {
                self.given.remove(&job);
            }
        } else if asks_for_its_job(&client.asked) {
            let gpus = of_job.gpus();
            self.settle_terms_on(job, gpus);
        }
    }

    /// The share of a client, as it is shown. The terms of a job follow from all of its processes.
    pub(crate) fn share_status(&self, id: ClientId) -> ShareStatus {
        let Some(client) = self.clients.get(&id) else { return ShareStatus::default() };
        let none = JobTerms::default();
        let given = self.given.get(&client.job).unwrap_or(&none);
        let of_job = self.jobs.get(&client.job);
        let nobody = Least::default();
        let least = of_job.map_or(&nobody, |of_job| &of_job.least);
        let terms = |gpu| has(given, least, gpu);
        let all = terms(None);
        let limit = |&gpu: &GpuUuid| Some(ComputeLimit { gpu, percent: terms(Some(gpu)).limit? });
        ShareStatus {
            weight: all.weight,
            priority: all.priority,
            enforcement: all.enforcement,
            compute: client.accounts.keys().filter_map(limit).collect(),
            paused: client.paused,
            processes: of_job.map_or(0, |of_job| of_job.clients.len() as u32),
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

    fn of(asked: &[Asked]) -> Least {
        let mut least = Least::default();
        asked.iter().for_each(|asked| least.count(asked, true));
        least
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
            let least = of(&asked);
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
        let limit = |given: &JobTerms, gpu| has(given, &of(&asked), Some(gpu)).limit;
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
