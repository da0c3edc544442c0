//! Terms of jobs: what they ask for of the GPUs' time, what they are given, and what follows from both.

use std::collections::{BTreeMap, BTreeSet};

use nvshare_proto::{
    Amount, ComputeLimit, DEFAULT_WEIGHT, Enforcement, GpuUuid, MAX_WEIGHT, Priority, ShareStatus,
    TenantSettings, Wishes,
};

use crate::policy::entitled::Terms;
use crate::state::client::{Client, ClientId, Job};
use crate::state::virtual_time::WEIGHT_SCALE;

/// The terms that a job was given.
#[derive(Debug, Clone, Default)]
pub(crate) struct JobTerms {
    weight: Option<u32>,
    priority: Option<Priority>,
    enforcement: Option<Enforcement>,
    /// Limits on every GPU, and on single ones: in per cent, and in bytes; 0: no limit, whatever the job asks
    /// for.
    compute: Option<u8>,
    compute_on: BTreeMap<GpuUuid, u8>,
    memory: Option<u64>,
    memory_on: BTreeMap<GpuUuid, u64>,
    paused: bool,
    /// The terms that the seat of the job sets, or that were set for it as one of Slurm's, on each GPU. An
    /// administrator's word stands above them, and processes may ask for less.
    seat: TenantSettings,
}

impl JobTerms {
    fn take(&mut self, gpu: Option<GpuUuid>, given: TenantSettings) {
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

    /// Sets what the seat sets. Returns what it did before.
    fn set_seat(&mut self, seat: TenantSettings) -> TenantSettings {
        std::mem::replace(&mut self.seat, seat)
    }

    fn compute(&self, gpu: GpuUuid) -> Option<u8> {
        self.compute_on.get(&gpu).copied().or(self.compute)
    }

    /// Whether an administrator limits the time on a GPU, or on any.
    fn has_compute_limit(&self, gpu: Option<GpuUuid>) -> bool {
        let is_limit = |percent: u8| percent > 0;
        match gpu {
            Some(gpu) => self.compute(gpu).is_some_and(is_limit),
            None => self.compute.into_iter().chain(self.compute_on.values().copied()).any(is_limit),
        }
    }

    /// Returns the limit in bytes that an administrator gave on a GPU; 0: no limit.
    pub(crate) fn memory(&self, gpu: GpuUuid) -> Option<u64> {
        self.memory_on.get(&gpu).copied().or(self.memory)
    }

    /// Returns the limit to tell a process that says that its own is `own`, or `None` if that one is in
    /// force. `before` is what its seat, or an administrator, set until now: that is no wish of the process.
    /// 0: no limit.
    fn limit_to_tell(&self, gpu: GpuUuid, own: u64, before: u64) -> Option<u64> {
        if let Some(bytes) = self.memory(gpu) {
            return Some(bytes);
        }
        let bound = self.seat.memory.unwrap_or(0);
        let asks_for_less = own > 0 && own != before && (bound == 0 || own < bound);
        (!asks_for_less && own != bound).then_some(bound)
    }
}

/// The largest number of jobs without a process whose terms are kept.
const MAX_ABSENT: usize = 256;

/// Returns the factor by which a priority changes the weight, in parts of [`WEIGHT_SCALE`].
fn factor(priority: Priority) -> u64 {
    match priority {
        Priority::Low => WEIGHT_SCALE / 8,
        Priority::Normal => WEIGHT_SCALE,
        Priority::High => WEIGHT_SCALE * 8,
    }
}

/// The terms of a job that are in force. They follow from those that it was given and what all of its
/// processes ask for. Each process may ask for less.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InForce {
    weight: u32,
    priority: Priority,
    enforcement: Enforcement,
    limit: Option<u8>,
}

/// How many processes ask for each value.
type Counts<V> = BTreeMap<V, usize>;

/// The least that the processes of a job ask for. It is kept by counts: a job may have a thousand processes,
/// with limits on many GPUs, and each of them comes and goes.
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
    /// Counts the wishes of a process that comes, or goes.
    fn count(&mut self, asked: &Wishes, comes: bool) {
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
struct Processes {
    clients: BTreeSet<ClientId>,
    /// The GPUs that they use.
    gpus: Counts<GpuUuid>,
    least: Least,
}

impl Processes {
    /// Counts a client that comes, or goes.
    fn count(&mut self, client: &Client, comes: bool) {
        if comes {
            self.clients.insert(client.id)
        } else {
            self.clients.remove(&client.id)
        };
        self.least.count(&client.asked, comes);
        client.accounts.keys().for_each(|&gpu| count(&mut self.gpus, gpu, comes));
    }

    /// Counts another GPU that a client uses.
    fn count_gpu(&mut self, gpu: GpuUuid) {
        count(&mut self.gpus, gpu, true);
    }

    fn gpus(&self) -> Vec<GpuUuid> {
        self.gpus.keys().copied().collect()
    }
}

/// Whether a process asks for anything that counts for its whole job.
pub(crate) fn asks_for_its_job(asked: &Wishes) -> bool {
    asked.weight.is_some() || asked.priority.is_some() || !asked.compute.is_empty()
}

fn strictness(enforcement: Enforcement) -> u8 {
    match enforcement {
        Enforcement::Disable => 0,
        Enforcement::Default => 1,
        Enforcement::Force => 2,
    }
}

fn in_force(given: &JobTerms, least: &Least, gpu: Option<GpuUuid>) -> InForce {
    let weight = first(&least.weight)
        .into_iter()
        .fold(given.weight.or(given.seat.weight).unwrap_or(DEFAULT_WEIGHT), u32::min)
        .clamp(1, MAX_WEIGHT);
    let priority = given.priority.or(given.seat.priority).unwrap_or_default();
    let priority = first(&least.priority).into_iter().fold(priority, Priority::min);
    let bound = given.seat.compute.filter(|&percent| percent > 0);
    // A process that lowers its limit, and says that limits have no effect, does not switch off that of its
    // seat, or of an administrator.
    let of_seat = given.seat.enforcement.or_else(|| bound.map(|_| Enforcement::Default));
    let of_administrator = given.has_compute_limit(gpu).then_some(Enforcement::Default);
    let set = of_seat.into_iter().chain(of_administrator);
    let strictest = set.chain(least.enforcement()).max_by_key(|&one| strictness(one));
    let enforcement = given.enforcement.or(strictest).unwrap_or_default();
    let limit = |gpu| given.compute(gpu).or_else(|| bound.into_iter().chain(least.compute(gpu)).min());
    let limit = gpu.and_then(limit).filter(|&percent| percent > 0);
    InForce { weight, priority, enforcement, limit: limit.map(|percent| percent.min(100)) }
}

impl InForce {
    /// Returns the terms by which the job shares the time.
    pub(crate) fn terms(self) -> Terms {
        Terms {
            weight: u64::from(self.weight) * factor(self.priority),
            limit: self.limit.filter(|_| self.enforcement != Enforcement::Disable),
            forced: self.enforcement == Enforcement::Force,
        }
    }
}

/// The jobs: the processes of each, and the terms that each was given.
#[derive(Debug, Default)]
pub(crate) struct Jobs {
    /// The jobs with a process: the time of all processes of a job is counted together.
    present: BTreeMap<Job, Processes>,
    /// Terms that administrators, and seats, gave to jobs.
    given: BTreeMap<Job, JobTerms>,
}

impl Jobs {
    /// Returns the clients of a job.
    pub(crate) fn clients(&self, job: Job) -> Vec<ClientId> {
        self.present.get(&job).into_iter().flat_map(|processes| &processes.clients).copied().collect()
    }

    pub(crate) fn count_clients(&self, job: Job) -> usize {
        self.present.get(&job).map_or(0, |processes| processes.clients.len())
    }

    /// Returns the GPUs that clients of a job use.
    pub(crate) fn gpus(&self, job: Job) -> Vec<GpuUuid> {
        self.present.get(&job).map(Processes::gpus).unwrap_or_default()
    }

    /// Returns the terms of a job, from what it was given and what its processes ask for.
    pub(crate) fn terms_of(&self, job: Job) -> TermsOf<'_> {
        TermsOf { given: self.given.get(&job), processes: self.present.get(&job) }
    }

    pub(crate) fn is_paused(&self, job: Job) -> bool {
        self.given.get(&job).is_some_and(|given| given.paused)
    }

    /// Whether any job is paused, if it has a process or not.
    pub(crate) fn is_any_paused(&self) -> bool {
        self.given.values().any(|given| given.paused)
    }

    /// Adds a client to its job.
    pub(crate) fn join(&mut self, client: &Client) {
        self.present.entry(client.job).or_default().count(client, true);
    }

    /// Removes a client that is gone. The terms of its job are kept while the job has processes. A tenant's
    /// terms are kept until other jobs need the place: a program that ends and starts again is the same
    /// tenant.
    pub(crate) fn leave(&mut self, client: &Client) {
        let job = client.job;
        let Some(processes) = self.present.get_mut(&job) else {
            debug_assert!(false, "a client is in its job from the event in which it comes");
            return;
        };
        processes.count(client, false);
        if processes.clients.is_empty() {
            self.present.remove(&job);
            if !matches!(job, Job::Tenant(_)) {
                self.given.remove(&job);
            }
        }
    }

    /// Counts another GPU that a client of a job uses.
    pub(crate) fn count_gpu(&mut self, job: Job, gpu: GpuUuid) {
        if let Some(processes) = self.present.get_mut(&job) {
            processes.count_gpu(gpu);
        }
    }

    /// Gives an administrator's terms to a job with a process, on one GPU or on all.
    pub(crate) fn give(&mut self, job: Job, gpu: Option<GpuUuid>, given: TenantSettings) {
        self.given.entry(job).or_default().take(gpu, given);
    }

    /// Gives an administrator's terms to a job that may have no process.
    pub(crate) fn give_in_advance(&mut self, job: Job, given: TenantSettings) {
        self.make_place_for_terms();
        self.give(job, None, given);
    }

    /// Takes what the seat of a job sets. Returns what it did before.
    pub(crate) fn set_seat(&mut self, job: Job, seat: TenantSettings) -> TenantSettings {
        if !self.given.contains_key(&job) {
            if seat == TenantSettings::default() {
                return seat;
            }
            self.make_place_for_terms();
        }
        self.given.entry(job).or_default().set_seat(seat)
    }

    /// Forgets what administrators gave to a job, and returns it. The terms that its seat sets stay.
    pub(crate) fn take_back(&mut self, job: Job) -> Option<JobTerms> {
        let given = self.given.get_mut(&job)?;
        let left = JobTerms { seat: given.seat, ..JobTerms::default() };
        Some(std::mem::replace(given, left))
    }

    /// Forgets the terms of jobs without a process, if there are too many.
    fn make_place_for_terms(&mut self) {
        if self.given.len() >= MAX_ABSENT + self.present.len() {
            let present = &self.present;
            self.given.retain(|job, _| present.contains_key(job));
        }
    }

    /// Returns the share of a client, as it is shown. The terms of a job follow from all of its processes.
    pub(crate) fn share_status(&self, client: &Client) -> ShareStatus {
        let terms = self.terms_of(client.job);
        let all = terms.on(None);
        let limit = |&gpu: &GpuUuid| Some(ComputeLimit { gpu, percent: terms.on(Some(gpu)).limit? });
        ShareStatus {
            weight: all.weight,
            priority: all.priority,
            enforcement: all.enforcement,
            compute: client.accounts.keys().filter_map(limit).collect(),
            paused: client.paused,
            processes: self.count_clients(client.job) as u32,
        }
    }

    /// Whether an administrator, or its seat, limits a client's memory on a GPU.
    pub(crate) fn has_memory_limit(&self, client: &Client, gpu: GpuUuid) -> bool {
        self.given.get(&client.job).is_some_and(|given| given.memory(gpu).is_some_and(|limit| limit > 0))
    }

    /// Returns the limits that an administrator, or its seat, sets for a client, where they are not those
    /// that the client says. `before` is what one of them set on a GPU until now, in bytes; 0: nothing.
    pub(crate) fn limits_of(&self, client: &Client, before: impl Fn(GpuUuid) -> u64) -> Vec<Amount> {
        let Some(given) = self.given.get(&client.job) else { return Vec::new() };
        let accounts = client.accounts.iter();
        let limit = accounts.filter_map(|(&gpu, account)| {
            Some(Amount { gpu, bytes: given.limit_to_tell(gpu, account.usage.limit, before(gpu))? })
        });
        limit.collect()
    }
}

/// A view of one job's terms.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TermsOf<'a> {
    given: Option<&'a JobTerms>,
    processes: Option<&'a Processes>,
}

impl TermsOf<'_> {
    /// Returns the terms on one GPU, or those that are the same on all.
    pub(crate) fn on(self, gpu: Option<GpuUuid>) -> InForce {
        let (none, nobody) = (JobTerms::default(), Least::default());
        let least = self.processes.map_or(&nobody, |processes| &processes.least);
        in_force(self.given.unwrap_or(&none), least, gpu)
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
    ) -> Wishes {
        let compute = percent.iter().map(|&percent| ComputeLimit { gpu: GPU, percent }).collect();
        Wishes { weight, priority, enforcement, compute, gang: None }
    }

    fn of(asked: &[Wishes]) -> Least {
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
            // A library never sends these.
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
            let got = in_force(&given, &least, Some(GPU));
            assert_eq!(
                (got.weight, got.priority, got.enforcement, got.limit),
                expected,
                "{given:?} {asked:?}"
            );
            assert_eq!(in_force(&given, &least, Some(OTHER)).limit, None);
        }
    }

    #[test]
    fn an_administrators_word_stands_above_the_environment() {
        let mut given = JobTerms::default();
        let asked = [asks(None, None, &[20], Enforcement::Force)];
        let limit = |given: &JobTerms, gpu| in_force(given, &of(&asked), Some(gpu)).limit;
        given.take(
            Some(GPU),
            TenantSettings { compute: Some(60), memory: Some(7), ..TenantSettings::default() },
        );
        assert_eq!((limit(&given, GPU), limit(&given, OTHER)), (Some(60), None));
        assert_eq!((given.memory(GPU), given.memory(OTHER)), (Some(7), None));
        given.take(None, TenantSettings { compute: Some(0), ..TenantSettings::default() });
        assert_eq!(
            (limit(&given, GPU), given.memory(GPU)),
            (None, Some(7)),
            "no limit, whatever it asks for"
        );
        given.take(None, TenantSettings { paused: Some(true), ..TenantSettings::default() });
        assert!(given.paused);
        given.take(None, TenantSettings { weight: Some(5), ..TenantSettings::default() });
        assert!(given.paused && given.weight == Some(5));
    }

    #[test]
    fn a_program_does_not_switch_off_an_administrators_limit() {
        use Enforcement::{Default, Disable, Force};
        let asked = [asks(None, None, &[50], Disable)];
        let got = |given: &JobTerms, gpu| {
            let found = in_force(given, &of(&asked), gpu);
            (found.enforcement, found.terms().limit)
        };
        let mut given = JobTerms::default();
        assert_eq!(got(&given, Some(GPU)), (Disable, None), "its own limit");
        given.take(Some(GPU), TenantSettings { compute: Some(25), ..TenantSettings::default() });
        assert_eq!(got(&given, Some(GPU)), (Default, Some(25)));
        assert_eq!(got(&given, Some(OTHER)), (Disable, None), "an administrator has said nothing of it");
        assert_eq!(got(&given, None).0, Default, "it is shown");
        for (enforcement, limit) in [(Disable, None), (Force, Some(25))] {
            given.take(None, TenantSettings { enforcement: Some(enforcement), ..TenantSettings::default() });
            assert_eq!(got(&given, Some(GPU)), (enforcement, limit), "an administrator's own word");
        }
        let none = JobTerms { compute: Some(0), ..JobTerms::default() };
        assert_eq!(got(&none, Some(GPU)), (Disable, None));
    }

    #[test]
    fn what_a_seat_sets_stands_below_an_administrators_word_and_above_what_programs_ask_for() {
        use Enforcement::{Default, Disable, Force};
        let seat = TenantSettings {
            weight: Some(50),
            compute: Some(40),
            memory: Some(900),
            ..TenantSettings::default()
        };
        let mut given = JobTerms { seat, ..JobTerms::default() };
        let got = |given: &JobTerms, asked: &[Wishes]| {
            let found = in_force(given, &of(asked), Some(GPU));
            (found.weight, found.enforcement, found.limit)
        };
        for (asked, expected) in [
            (vec![], (50, Default, Some(40))),
            (vec![asks(Some(200), None, &[60], Disable)], (50, Default, Some(40))),
            (vec![asks(Some(20), None, &[30], Force)], (20, Force, Some(30))),
        ] {
            assert_eq!(got(&given, &asked), expected, "{asked:?}");
        }
        for (own, before, told) in [
            (0, 0, Some(900)),
            (1000, 0, Some(900)),
            (900, 0, None),
            (500, 0, None),
            // A limit that the seat set until now follows the seat, upwards too.
            (500, 500, Some(900)),
        ] {
            assert_eq!(given.limit_to_tell(GPU, own, before), told, "{own} {before}");
        }
        let forced =
            JobTerms { seat: TenantSettings { enforcement: Some(Disable), ..seat }, ..JobTerms::default() };
        assert_eq!(got(&forced, &[]), (50, Disable, Some(40)), "it is the seat's own wish");
        given.take(
            None,
            TenantSettings {
                weight: Some(70),
                compute: Some(0),
                memory: Some(0),
                ..TenantSettings::default()
            },
        );
        assert_eq!(got(&given, &[]), (70, Default, None));
        assert_eq!(given.limit_to_tell(GPU, 500, 0), Some(0));
        let none = JobTerms::default();
        assert_eq!((none.limit_to_tell(GPU, 500, 500), none.limit_to_tell(GPU, 500, 900)), (Some(0), None));
        assert_eq!((none.limit_to_tell(GPU, 500, 0), none.limit_to_tell(GPU, 0, 0)), (None, None));
    }
}
