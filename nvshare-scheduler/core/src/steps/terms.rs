//! The terms of jobs take effect: see [`state::terms`](crate::state::terms).

use std::collections::BTreeMap;

use nvshare_proto::{GpuUuid, SchedulerMessage};

use crate::state::client::{Client, ClientId, GangId, Job};
use crate::state::gpu::Gpu;
use crate::state::terms::asks_for_its_job;
use crate::steps::books::Books;

impl Books {
    /// Applies a job's terms on all of its GPUs, after an administrator changed them.
    pub(crate) fn apply_terms(&mut self, job: Job) {
        self.apply_terms_on(job, self.state().jobs().gpus(job));
        self.apply_pauses(self.state().jobs().clients(job));
    }

    /// Applies a job's terms on these GPUs. If they differ from those before, they may bound the work in
    /// flight of its clients, or do so no longer: the clients are told.
    fn apply_terms_on(&mut self, job: Job, gpus: Vec<GpuUuid>) {
        let mut is_news = false;
        let now = self.state().now();
        for uuid in gpus {
            let terms = self.state().jobs().terms_of(job).on(Some(uuid)).terms();
            let set = |gpu: &mut Gpu| {
                gpu.shares.advance(now);
                gpu.shares.set_terms(job, terms)
            };
            self.count_work(1);
            if self.change_gpu(uuid, set) == Some(true) {
                self.queue([uuid]);
                is_news = true;
            }
        }
        if is_news {
            self.tell_later(self.state().jobs().clients(job));
        }
    }

    /// Pauses these clients and their gangs, or lets them go on. A gang is granted together or not at all, so
    /// all of it is paused while the job of one of its members is.
    pub(crate) fn apply_pauses(&mut self, clients: Vec<ClientId>) {
        let mut of_gangs: BTreeMap<GangId, bool> = BTreeMap::new();
        for id in self.state().with_their_gangs(clients) {
            self.count_work(1);
            let state = self.state();
            let Some(client) = state.client(id) else { continue };
            let known = client.gang.and_then(|gang| of_gangs.get(&gang)).copied();
            let paused = known.unwrap_or_else(|| {
                let unit = state.unit_of(client);
                state.clients_of(&unit).any(|client| state.jobs().is_paused(client.job))
            });
            of_gangs.extend(client.gang.map(|gang| (gang, paused)));
            if client.paused != paused {
                self.change_client(id, |client| client.paused = paused);
                // A client that runs has to leave, though nothing in its ledger entries changed. Until it
                // can, its work in flight is bounded.
                self.queue(self.state().gpus_used_by(id));
                self.tell_later([id]);
            }
        }
    }

    /// Tells a client what an administrator, or its seat, lets it allocate; `before` is what one of them did
    /// on a GPU until now.
    pub(crate) fn tell_limits(&mut self, id: ClientId, before: impl Fn(GpuUuid) -> u64) {
        let state = self.state();
        let limits = state.client(id).map(|client| state.jobs().limits_of(client, before));
        for limit in limits.into_iter().flatten() {
            self.send(id, SchedulerMessage::Limit(limit));
        }
    }

    /// Applies the terms of a client's job after the client came, or began to use a GPU. A wish of one
    /// process counts on all GPUs of its job.
    pub(crate) fn apply_terms_of(&mut self, id: ClientId) {
        let state = self.state();
        let Some(client) = state.client(id) else {
            debug_assert!(false, "the client has just come, or said that it uses a GPU");
            return;
        };
        let job = client.job;
        let gpus = if asks_for_its_job(&client.asked) { state.jobs().gpus(job) } else { client.gpus() };
        self.apply_terms_on(job, gpus);
        self.apply_pauses(vec![id]);
        self.tell_limits(id, |_| 0);
    }

    /// Removes a client that is gone from its job, and with it what it asked for.
    pub(crate) fn leave_job(&mut self, client: &Client) {
        self.jobs_mut().leave(client);
        if asks_for_its_job(&client.asked) {
            self.apply_terms_on(client.job, self.state().jobs().gpus(client.job));
        }
    }
}
