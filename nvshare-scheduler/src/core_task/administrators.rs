//! Requests of administrators: what is asked for is checked, done, kept where it is to survive a restart, and answered.

use nvshare_core::{ClientId, Time};
use nvshare_proto::units::Bytes;
use nvshare_proto::{AdminReply, AdminRequest, GpuUuid, Reply, SeatName};
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tracing::{info, warn};

use super::{Command, CoreTask};
use crate::identity::Tenant;
use crate::seats::Seats;
use crate::settings::limits;

impl CoreTask {
    pub(super) fn administer(
        &mut self,
        request: AdminRequest,
        answer: oneshot::Sender<Vec<Reply>>,
        now: Time,
    ) {
        // A prolog has to hear that its job's limits end with this scheduler.
        let has_to_last = matches!(request, AdminRequest::SetJobBounds { .. });
        // The text about what is in force now, and the change that is still to be kept.
        let outcome = match request {
            AdminRequest::Status => return self.wait_for_counters(None, answer),
            AdminRequest::SetQuantum { gpu, quantum } => {
                if let Err(reason) = limits::quantum(quantum) {
                    Err(reason)
                } else if let Some(gpu) = gpu.filter(|&gpu| !self.is_known(gpu)) {
                    // It may have come since the last look.
                    self.listing.look();
                    Err(format!("unknown GPU {gpu}: this machine does not list it and no client has used it"))
                } else {
                    let text = self.core.set_quantum(gpu, quantum.into(), now);
                    Ok((text, Some(self.store.set_quantum(gpu, quantum.into()))))
                }
            }
            AdminRequest::SetTerms { client, gpu, given } => limits::given(given).and_then(|said| {
                let whom = self.core.give(client, gpu, given, now)?;
                let beyond = self.beyond_limit(client, gpu, given.memory).unwrap_or_default();
                let is_late = given.paused == Some(true) && !self.core.is_scheduling();
                let late = if is_late { "; it runs on until scheduling is on" } else { "" };
                Ok((format!("{whom}: {said}{beyond}{late}"), None))
            }),
            AdminRequest::SetRunTerms { user, run, given } => limits::given(given).map(|said| {
                let tenant = Tenant::Run { user, run };
                self.core.set_tenant_terms(tenant.number(), given, now);
                (format!("what is about to run: {said}"), None)
            }),
            AdminRequest::SetJobBounds { job, given } => limits::given(given).and_then(|said| {
                let change = self.store.bound_job(job, given)?;
                self.bound_job(job, now);
                self.forget_ended_job(job, now);
                Ok((format!("job {job}: {said}"), Some(change)))
            }),
            AdminRequest::Sleep { client } => self.core.sleep(client, now).map(|text| (text, None)),
            AdminRequest::Wake { client } => self.core.wake(client, now).map(|text| (text, None)),
            AdminRequest::On => {
                let text = self.core.switch_on(now);
                Ok((text, Some(self.store.set_scheduling(true))))
            }
            AdminRequest::Off { force } => {
                let text = self.core.switch_off(force, now);
                text.map(|text| (text, Some(self.store.set_scheduling(false))))
            }
            AdminRequest::Reset => {
                let change = self.store.reset();
                self.core.reset(self.config.clone(), now);
                let rule = self.config.general_rule();
                let text = format!(
                    "the configuration is in force: TQ {rule}, scheduling is on; limits and weights of clients stay"
                );
                Ok((text, Some(change)))
            }
            // The connection sends them itself, from the journal.
            AdminRequest::Watch { .. } => Err("events are told on a connection of their own".to_owned()),
            AdminRequest::Seat(seat) => {
                let name = seat.name();
                return self.change_seats(vec![name], answer, move |seats| seats.make(seat));
            }
            AdminRequest::RemoveSeat(name) => {
                return self.change_seats(vec![name], answer, move |seats| seats.remove(name));
            }
            AdminRequest::OccupySeats(holders) => {
                let names = holders.iter().map(|(name, _)| *name).collect();
                return self.change_seats(names, answer, move |seats| seats.hold(holders));
            }
        };
        match outcome {
            Ok((text, None)) => done(answer, text),
            // The disk may take its time; nobody's grant waits for it.
            Ok((text, Some(change))) => {
                spawn_blocking(move || match change.keep() {
                    Ok(()) => done(answer, text),
                    Err(error) => not_kept(answer, text, has_to_last, &error),
                });
            }
            Err(reason) => refuse(answer, reason),
        }
    }

    /// Words for the answer where a client has more memory than its new limit allows.
    fn beyond_limit(&self, client: ClientId, gpu: Option<GpuUuid>, limit: Option<u64>) -> Option<String> {
        let limit = limit.filter(|&limit| limit > 0)?;
        let rows = self.core.client_status_at(self.started.elapsed());
        let row = rows.iter().find(|row| row.client == client)?;
        let usage = row.usage.iter().filter(|usage| gpu.is_none_or(|gpu| usage.gpu == gpu));
        let has = usage.map(|usage| usage.allocated).max().filter(|&has| has > limit)?;
        Some(format!("; it has {} and keeps them: new allocations fail until it is below", Bytes(has)))
    }

    /// Changes these seats, beside this task: the disk may take its time.
    fn change_seats(
        &self,
        names: Vec<SeatName>,
        answer: oneshot::Sender<Vec<Reply>>,
        change: impl FnOnce(&Seats) -> Result<String, String> + Send + 'static,
    ) {
        let (seats, commands) = (self.seats.clone(), self.commands.clone());
        spawn_blocking(move || {
            let outcome = change(&seats);
            let _ = commands.blocking_send(Command::SeatsChanged(names));
            match outcome {
                Ok(text) => done(answer, text),
                Err(reason) => refuse(answer, reason),
            }
        });
    }

    /// Whether a client has used a GPU, or the machine lists it.
    fn is_known(&self, gpu: GpuUuid) -> bool {
        self.core.gpu_status().iter().any(|row| row.gpu == gpu) || self.listing.has(gpu)
    }
}

/// Says why nothing was done.
fn refuse(answer: oneshot::Sender<Vec<Reply>>, reason: String) {
    let _ = answer.send(vec![Reply::Refused { reason }]);
}

/// Logs what was done for an administrator, and says so.
fn done(answer: oneshot::Sender<Vec<Reply>>, text: String) {
    info!("{text}");
    let _ = answer.send(vec![Reply::Admin(AdminReply::Done { text })]);
}

/// Logs and says that a change is in force, and will not survive a restart of the scheduler.
fn not_kept(answer: oneshot::Sender<Vec<Reply>>, text: String, has_to_last: bool, error: &str) {
    let text = format!("{text}; a restart will undo this, because it cannot be kept: {error}");
    warn!("{text}");
    let reply =
        if has_to_last { Reply::Refused { reason: text } } else { Reply::Admin(AdminReply::Done { text }) };
    let _ = answer.send(vec![reply]);
}
