//! The requests of administrators.

use nvshare_proto::units::{Bytes, saturate};
use nvshare_proto::{EventKind, GpuUuid, SchedulerMessage, TenantSettings};

use crate::state::client::{ClientId, Job};
use crate::state::config::Config;
use crate::state::gpu::Gpu;
use crate::state::rule::Rule;
use crate::state::sleep::Sleep;
use crate::steps::books::Books;

impl Books {
    /// Switches scheduling on: every client that runs becomes a holder. Returns a line that says so.
    pub(crate) fn switch_on(&mut self) -> String {
        if self.state().is_scheduling() {
            return "scheduling is already on".to_owned();
        }
        self.set_scheduling(true);
        self.report_mut().emit_setting(EventKind::On, None, None);
        for id in self.state().client_ids() {
            if self.state().client(id).is_some_and(|client| client.sleep.is_off_card()) {
                // It is told when it is back.
                continue;
            }
            let epoch = self.new_epoch();
            self.adopt(id, epoch);
            self.send(id, SchedulerMessage::SchedOn { epoch });
        }
        self.follow_all_rests();
        "scheduling is on".to_owned()
    }

    /// Switches scheduling off: every client runs.
    ///
    /// # Errors
    /// When not everything fits, unless `force` is set: page faults would then move memory.
    pub(crate) fn switch_off(&mut self, force: bool) -> Result<String, String> {
        if !self.state().is_scheduling() {
            return Ok("scheduling is already off".to_owned());
        }
        // Sleepers would come back one after the other: for the first of them, there is a place already.
        let demand = |gpu: &Gpu| {
            let more = gpu.ledger.sleepers().needed_by_all().saturating_sub(gpu.size.set_aside);
            gpu.ledger.sums().allocated + u128::from(more)
        };
        let is_too_full = |gpu: &&Gpu| !force && demand(gpu) > u128::from(gpu.capacity);
        if let Some(gpu) = self.state().gpus().find(is_too_full) {
            return Err(format!(
                "{}: clients have {} together and {} fit; page faults would move the rest (--force does it anyway)",
                gpu.uuid,
                Bytes(saturate(demand(gpu))),
                Bytes(gpu.capacity)
            ));
        }
        self.set_scheduling(false);
        self.report_mut().emit_setting(EventKind::Off, None, None);
        for id in self.state().client_ids() {
            match self.state().client(id).map(|client| client.sleep) {
                Some(Sleep::Ordered { .. }) => self.stays_awake(id, "scheduling is off"),
                // It is told when it is back.
                Some(Sleep::Away) => {
                    self.want_to_wake(id);
                    continue;
                }
                Some(Sleep::Wanted { .. } | Sleep::Sent { .. } | Sleep::Waking { .. }) => continue,
                _ => {}
            }
            self.change_client(id, |client| {
                client.set_free();
                client.wants = false;
            });
            self.send(id, SchedulerMessage::SchedOff);
        }
        Ok("scheduling is off".to_owned())
    }

    /// Sets how the quantum is chosen on one GPU, or on all GPUs. Returns a line that says what was done.
    pub(crate) fn set_quantum(&mut self, gpu: Option<GpuUuid>, rule: Rule) -> String {
        let mut config = self.state().config().clone();
        config.set_rule(gpu, rule);
        self.emit_rule(gpu, rule);
        self.configure(config);
        match gpu {
            Some(uuid) => format!("quantum of {uuid} is {rule}"),
            None => format!("quantum of every GPU is {rule}"),
        }
    }

    /// Goes back to a configuration, with scheduling on.
    pub(crate) fn reset(&mut self, config: Config) {
        self.emit_rule(None, config.general_rule());
        self.configure(config);
        self.switch_on();
    }

    /// Reports how the quantum is chosen from now on.
    fn emit_rule(&mut self, gpu: Option<GpuUuid>, rule: Rule) {
        let fixed = if let Rule::Fixed(quantum) = rule { Some(quantum) } else { None };
        self.report_mut().emit_setting(EventKind::Quantum, gpu, fixed);
    }

    /// Applies another configuration. The number that names this run of the scheduler stays, and the settings
    /// of its start.
    pub(crate) fn configure(&mut self, config: Config) {
        self.replace_config(config);
        self.follow_all_rests();
        for uuid in self.state().gpu_uuids() {
            let rule = self.state().config().rule(uuid);
            let configure = |gpu: &mut Gpu| {
                if gpu.rule != rule {
                    (gpu.rule, gpu.quantum) = (rule, rule.initial_quantum());
                }
                (gpu.size, gpu.source)
            };
            self.queue([uuid]);
            if let Some((size, source)) = self.change_gpu(uuid, configure) {
                self.set_size(uuid, size, source);
            }
            self.agree_on_size(uuid);
        }
    }

    /// Gives an administrator's terms to a client's job. Returns words for the clients that they apply to.
    ///
    /// # Errors
    /// When there is no such client, or it does not use the GPU.
    pub(crate) fn give(
        &mut self,
        client: ClientId,
        gpu: Option<GpuUuid>,
        given: TenantSettings,
    ) -> Result<String, String> {
        let Some(there) = self.state().client(client) else {
            return Err(format!("there is no client {client}; `nvshare-ctl clients` shows who is there"));
        };
        let (job, name) = (there.job, there.name.clone());
        if let Some(gpu) = gpu.filter(|gpu| !there.accounts.contains_key(gpu)) {
            return Err(format!("client {client} ({name}) does not use {gpu}"));
        }
        self.jobs_mut().give(job, gpu, given);
        let members = self.state().jobs().clients(job);
        if given.memory.is_some() {
            for &id in &members {
                self.tell_limits(id, |_| 0);
            }
        }
        self.apply_terms(job);
        Ok(match members.len() {
            0 | 1 => format!("client {client} ({name})"),
            several => format!("the {several} processes of client {client} ({name})"),
        })
    }

    /// Gives an administrator's terms to a tenant that is about to come.
    pub(crate) fn set_tenant_terms(&mut self, tenant: u64, given: TenantSettings) {
        let job = Job::Tenant(tenant);
        self.jobs_mut().give_in_advance(job, given);
        self.apply_terms(job);
    }

    /// Sets the bounds of a tenant, in place of those before.
    pub(crate) fn set_tenant_bounds(&mut self, tenant: u64, bounds: TenantSettings) {
        let job = Job::Tenant(tenant);
        let before = self.jobs_mut().set_seat(job, bounds);
        if before != bounds {
            for id in self.state().jobs().clients(job) {
                self.tell_limits(id, |_| before.memory.unwrap_or(0));
            }
            self.apply_terms(job);
        }
    }

    /// Forgets what administrators gave to a tenant. Its bounds stay.
    pub(crate) fn forget_tenant_terms(&mut self, tenant: u64) {
        let job = Job::Tenant(tenant);
        let Some(before) = self.jobs_mut().take_back(job) else { return };
        for id in self.state().jobs().clients(job) {
            self.tell_limits(id, |gpu| before.memory(gpu).unwrap_or(0));
        }
        self.apply_terms(job);
    }

    /// Asks every client for its counters, unless it still has to answer.
    pub(crate) fn ask_counters(&mut self) -> Vec<ClientId> {
        let ids: Vec<ClientId> = self.state().client_ids();
        for &id in &ids {
            self.ask_for_counters(id);
        }
        ids
    }
}
