//! The requests of administrators.

use nvshare_proto::units::Bytes;
use nvshare_proto::{EventKind, Given, GpuUuid, SchedulerMessage};

use crate::state::client::{ClientId, Job, Phase};
use crate::state::config::Config;
use crate::state::gpu::Gpu;
use crate::steps::books::Books;

impl Books {
    /// Switches scheduling on: every client that runs becomes a holder.
    ///
    /// # Errors
    /// When it is on.
    pub(crate) fn switch_on(&mut self) -> Result<String, String> {
        if self.state.scheduling {
            return Err("scheduling was on".to_owned());
        }
        self.state.scheduling = true;
        self.report.tell_setting(EventKind::On, None, None);
        for id in self.state.clients.keys().copied().collect::<Vec<_>>() {
            let epoch = self.state.new_epoch();
            self.adopt(id, epoch);
            self.report.send(id, SchedulerMessage::SchedOn { epoch });
        }
        Ok("scheduling is on".to_owned())
    }

    /// Switches scheduling off: every client runs.
    ///
    /// # Errors
    /// When not everything fits, unless `force` is set: page faults would then move memory.
    pub(crate) fn switch_off(&mut self, force: bool) -> Result<String, String> {
        let demand = |gpu: &Gpu| gpu.ledger.sums().allocated;
        let mut gpus = self.state.gpus.values().filter(|_| !force);
        if let Some(gpu) = gpus.find(|gpu| demand(gpu) > u128::from(gpu.capacity)) {
            return Err(format!(
                "{}: clients have {} together and {} fit; page faults would move the rest (--force does it anyway)",
                gpu.uuid,
                Bytes(u64::try_from(demand(gpu)).unwrap_or(u64::MAX)),
                Bytes(gpu.capacity)
            ));
        }
        self.state.scheduling = false;
        self.report.tell_setting(EventKind::Off, None, None);
        for id in self.state.clients.keys().copied().collect::<Vec<_>>() {
            self.with(id, |client| {
                client.phase = Phase::Free;
                client.wants = false;
            });
            self.report.send(id, SchedulerMessage::SchedOff);
        }
        Ok("scheduling is off".to_owned())
    }

    /// Applies another configuration. The number that names this run of the scheduler stays, and the settings of its start.
    pub(crate) fn configure(&mut self, config: Config) {
        let Config { boot, settle, restarted, .. } = self.state.config;
        self.state.config = Config { boot, settle, restarted, ..config };
        for uuid in self.state.gpus.keys().copied().collect::<Vec<_>>() {
            let rule = self.state.config.rule(uuid);
            let Some(gpu) = self.state.gpus.get_mut(&uuid) else { continue };
            if gpu.rule != rule {
                (gpu.rule, gpu.quantum) = (rule, rule.at_first());
            }
            let (size, source) = (gpu.size, gpu.source);
            self.agenda.dirty.insert(uuid);
            self.size(uuid, size, source);
            self.agree_on_size(uuid);
        }
    }

    /// An administrator gives terms to a client's job. Returns words for the clients that they apply to.
    ///
    /// # Errors
    /// When there is no such client, or it does not use the GPU.
    pub(crate) fn give(
        &mut self,
        client: ClientId,
        gpu: Option<GpuUuid>,
        given: Given,
    ) -> Result<String, String> {
        let Some(there) = self.state.clients.get(&client) else {
            return Err(format!("there is no client {client}; `nvshare-ctl clients` shows who is there"));
        };
        let (job, name) = (there.job, there.name.clone());
        if let Some(gpu) = gpu.filter(|gpu| !there.accounts.contains_key(gpu)) {
            return Err(format!("client {client} ({name}) does not use {gpu}"));
        }
        self.state.given.entry(job).or_default().take(gpu, given);
        let members = self.state.members_of_job(job);
        if given.memory.is_some() {
            for &id in &members {
                self.tell_limits(id, 0);
            }
        }
        self.apply_terms(job);
        Ok(match members.len() {
            0 | 1 => format!("client {client} ({name})"),
            several => format!("the {several} processes of client {client} ({name})"),
        })
    }

    /// An administrator gives terms to a tenant that is about to come.
    pub(crate) fn give_tenant(&mut self, tenant: u64, given: Given) {
        let job = Job::Tenant(tenant);
        self.state.make_place_for_terms();
        self.state.given.entry(job).or_default().take(None, given);
        self.apply_terms(job);
    }

    /// Sets what the seat of a tenant bounds, in place of what it did before.
    pub(crate) fn bound_tenant(&mut self, tenant: u64, bounds: Given) {
        let job = Job::Tenant(tenant);
        let is_known = self.state.given.contains_key(&job);
        if !is_known && bounds == Given::default() {
            return;
        }
        if !is_known {
            self.state.make_place_for_terms();
        }
        let before = self.state.given.entry(job).or_default().set_seat(bounds);
        if before != bounds {
            for id in self.state.members_of_job(job) {
                self.tell_limits(id, before.memory.unwrap_or(0));
            }
            self.apply_terms(job);
        }
    }

    /// Asks every client for its counters, unless it still has to answer.
    pub(crate) fn ask_counters(&mut self) -> Vec<ClientId> {
        let ids: Vec<ClientId> = self.state.clients.keys().copied().collect();
        for &id in &ids {
            self.ask_for_counters(id);
        }
        ids
    }
}
