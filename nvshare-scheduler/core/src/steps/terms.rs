//! The terms of jobs take effect: see [`state::terms`](crate::state::terms).

use nvshare_proto::{GpuUuid, SchedulerMessage};

use crate::state::client::{Client, ClientId, Job};
use crate::state::terms::{OfJob, TermsOf, asks_for_its_job};
use crate::steps::books::Books;

impl Books {
    /// Applies a job's terms on all of its GPUs, after an administrator changed them.
    pub(crate) fn apply_terms(&mut self, job: Job) {
        let gpus = self.state.jobs.get(&job).map(OfJob::gpus).unwrap_or_default();
        self.apply_terms_on(job, gpus);
        self.apply_pauses(self.state.members_of_job(job));
    }

    /// Applies a job's terms on these GPUs.
    fn apply_terms_on(&mut self, job: Job, gpus: Vec<GpuUuid>) {
        let mut is_news = false;
        let terms = TermsOf::new(job, &self.state.given, &self.state.jobs);
        for uuid in gpus {
            let Some(gpu) = self.state.gpus.get_mut(&uuid) else { continue };
            self.work += 1;
            gpu.shares.advance(self.state.now);
            if gpu.shares.set_terms(job, terms.on(Some(uuid)).terms()) {
                self.agenda.dirty.insert(uuid);
                is_news = true;
            }
        }
        if is_news {
            self.agenda.to_tell.extend(self.state.members_of_job(job));
        }
    }

    /// Pauses these clients and their gangs, or lets them go on. A gang is granted together or not at all, so all of it is
    /// paused while the job of one of its members is.
    pub(crate) fn apply_pauses(&mut self, clients: Vec<ClientId>) {
        for id in self.state.with_their_gangs(clients) {
            self.work += 1;
            let unit = self.state.unit(id);
            let is_paused =
                |client: &Client| self.state.given.get(&client.job).is_some_and(|given| given.paused);
            let paused = self.state.clients_of(&unit).any(is_paused);
            if self.state.clients.get(&id).is_some_and(|client| client.paused != paused) {
                self.with(id, |client| client.paused = paused);
                // A client that runs has to leave, though nothing in its ledger entries changed. Until it can, its work in flight is bounded.
                self.agenda.dirty.extend(self.state.gpus_used_by(id));
                self.agenda.to_tell.insert(id);
            }
        }
    }

    /// Tells a client what an administrator, or its seat, lets it allocate; `before` is what its seat did until now.
    pub(crate) fn tell_limits(&mut self, id: ClientId, before: u64) {
        let limits = self.state.clients.get(&id).map(|client| self.state.limits_of(client, before));
        for limit in limits.into_iter().flatten() {
            self.report.send(id, SchedulerMessage::Limit(limit));
        }
    }

    /// Adds a client to its job.
    pub(crate) fn join_job(&mut self, id: ClientId) {
        if let Some(client) = self.state.clients.get(&id) {
            self.state.jobs.entry(client.job).or_default().count(client, true);
        }
    }

    /// A client of a job uses another GPU.
    pub(crate) fn count_gpu(&mut self, id: ClientId, gpu: GpuUuid) {
        let job = self.state.clients.get(&id).map(|client| client.job);
        if let Some(of_job) = job.and_then(|job| self.state.jobs.get_mut(&job)) {
            of_job.count_gpu(gpu);
        }
    }

    /// Applies the terms of a client's job after the client came, or began to use a GPU. A wish of one process counts on all GPUs of
    /// its job.
    pub(crate) fn apply_terms_of(&mut self, id: ClientId) {
        let Some(client) = self.state.clients.get(&id) else { return };
        let job = client.job;
        let gpus = match self.state.jobs.get(&job) {
            Some(of_job) if asks_for_its_job(&client.asked) => of_job.gpus(),
            _ => client.gpus(),
        };
        self.apply_terms_on(job, gpus);
        self.apply_pauses(vec![id]);
        self.tell_limits(id, 0);
    }

    /// A client is gone. Its job's terms are kept while the job has processes, and a tenant's terms until other jobs need
    /// the place: a program that ends and starts again is the same tenant.
    pub(crate) fn leave_job(&mut self, client: &Client) {
        let job = client.job;
        let Some(of_job) = self.state.jobs.get_mut(&job) else { return };
        of_job.count(client, false);
        if of_job.clients.is_empty() {
            self.state.jobs.remove(&job);
            if !matches!(job, Job::Tenant(_)) {
                self.state.given.remove(&job);
            }
        } else if asks_for_its_job(&client.asked) {
            let gpus = of_job.gpus();
            self.apply_terms_on(job, gpus);
        }
    }
}
