//! The status: a snapshot of what the core, and the tasks beside it, know, and answers to those who ask for it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nvshare_core::{ClientId, Rule};
use nvshare_proto::{
    AdminReply, Amount, ClientMemory, ClientStatus, GpuStatus, MemoryStatus, Reply, SeatName, SeatStatus,
};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{CoreTask, view};
use crate::host_memory::HostMemory;
use crate::identity::Viewer;
use crate::metrics::Snapshot;

/// The longest time that `status` waits for clients' counters.
const COUNTERS_PATIENCE: Duration = Duration::from_millis(100);
/// The time between two questions to clients for their counters, where the status is asked for on the clients' socket.
const COUNTERS_FRESH: Duration = Duration::from_millis(500);

/// A request for the status that waits for fresh counters.
pub(super) struct Waiting {
    /// The process that asked on the clients' socket; none: an administrator.
    viewer: Option<Viewer>,
    pub(super) clients: BTreeSet<ClientId>,
    pub(super) until: Instant,
    answer: oneshot::Sender<Vec<Reply>>,
}

impl CoreTask {
    /// Answers with the state as soon as the clients' counters are there.
    pub(super) fn wait_for_counters(&mut self, viewer: Option<Viewer>, answer: oneshot::Sender<Vec<Reply>>) {
        let now = Instant::now();
        self.listing.look();
        // Each question of anybody else would be one to all clients.
        let are_fresh = self.asked_counters.is_some_and(|asked| now < asked + COUNTERS_FRESH);
        let clients = if viewer.is_some() && are_fresh {
            BTreeSet::new()
        } else {
            self.asked_counters = Some(now);
            self.core.ask_counters().into_iter().collect()
        };
        self.waiting.push(Waiting { viewer, clients, until: now + COUNTERS_PATIENCE, answer });
    }

    /// Answers requests for the status whose counters are there, or late.
    pub(super) fn answer_status(&mut self) {
        let now = Instant::now();
        let is_ready = |waiting: &mut Waiting| waiting.clients.is_empty() || waiting.until <= now;
        let ready: Vec<Waiting> = self.waiting.extract_if(.., is_ready).collect();
        if ready.is_empty() {
            return;
        }
        let snapshot = self.snapshot();
        for waiting in ready {
            let mut asleep = self.core.asleep_status();
            let Snapshot { mut scheduler, mut gpus, mut clients, mut memory, .. } = snapshot.clone();
            if let Some(viewer) = &waiting.viewer {
                scheduler.restricted = true;
                view::restrict(viewer, &self.processes, &self.seated, &mut gpus, &mut clients);
                memory.clients.retain(|kind| clients.iter().any(|row| row.client == kind.client));
                asleep.retain(|sleeper| clients.iter().any(|row| row.client == sleeper.client));
            }
            let seats = self.seat_rows(waiting.viewer.as_ref());
            let unused = self.seats.unused();
            let unused = seats.iter().map(|row| row.name).filter(|name| unused.contains(name)).collect();
            let rows = std::iter::once(AdminReply::Scheduler(scheduler))
                .chain(gpus.into_iter().map(AdminReply::Gpu))
                .chain(clients.into_iter().map(|row| AdminReply::Client(Box::new(row))))
                .chain(seats.into_iter().map(|row| AdminReply::Seat(Box::new(row))))
                .chain([AdminReply::UnusedSeats(unused), AdminReply::Memory(Box::new(memory))])
                .chain(asleep.into_iter().map(|row| AdminReply::Asleep(Box::new(row))))
                .chain(std::iter::once(AdminReply::End));
            let _ = waiting.answer.send(rows.map(Reply::Admin).collect());
        }
    }

    /// The seats that a viewer may see: an administrator sees all, others the one at whose socket they ask.
    fn seat_rows(&self, viewer: Option<&Viewer>) -> Vec<SeatStatus> {
        let is_shown = |name: &SeatName| match viewer {
            None => true,
            Some(Viewer::Seat(own)) => own == name,
            Some(Viewer::Process(_)) => false,
        };
        let mut clients: BTreeMap<SeatName, Vec<ClientId>> = BTreeMap::new();
        let seated = self.seated.iter().filter_map(|(&client, &seat)| Some((client, seat?)));
        for (client, name) in seated {
            clients.entry(name).or_default().push(client);
        }
        let shown = self.seats.all().into_iter().filter(|(name, ..)| is_shown(name));
        shown
            .map(|(name, seat, occupant)| {
                let clients = clients.remove(&name).unwrap_or_default();
                SeatStatus { name, seat, occupant, clients }
            })
            .collect()
    }

    /// The kinds of memory on the GPUs.
    fn memory_status(&self, clients: &[ClientStatus]) -> MemoryStatus {
        let kept = self.unowned.iter().map(|(&gpu, &bytes)| Amount {
            gpu,
            bytes: bytes.saturating_sub(view::managed_on(gpu, clients, &self.memory_modes)),
        });
        let living = clients.iter().filter(|row| !row.gone).map(|row| row.client);
        let kind = |client| Some(ClientMemory { client, memory: *self.memory_modes.get(&client)? });
        MemoryStatus {
            kept: kept.filter(|kept| kept.bytes > 0).collect(),
            clients: living.filter_map(kind).collect(),
        }
    }

    /// The present state.
    pub(super) fn snapshot(&mut self) -> Snapshot {
        let mut scheduler = self.core.status(self.started.elapsed(), std::process::id());
        self.forget_the_gone();
        let mut clients = self.core.client_status_at(self.started.elapsed());
        for row in &mut clients {
            row.process = self.processes.get(&row.client).map(|process| process.info.clone());
        }
        if let Some((about, has)) = self.host.as_ref().map(HostMemory::status) {
            scheduler.host_memory = Some(about);
            for row in &mut clients {
                row.host_memory = has.get(&row.client).copied().unwrap_or(0);
            }
        }
        let mut gpus = self.core.gpu_status();
        let config = self.store.over(&self.config);
        let idle = |gpu| {
            let rule = config.rule(gpu);
            let quantum = if let Rule::Fixed(quantum) = rule { quantum } else { Duration::ZERO };
            GpuStatus { quantum_ms: quantum.as_millis() as u64, rule: rule.said(), ..GpuStatus::idle(gpu) }
        };
        view::list_all(&mut gpus, &self.listing.last(), idle);
        let memory = self.memory_status(&clients);
        Snapshot {
            scheduler,
            gpus,
            clients,
            seats: self.seat_rows(None),
            unused: self.seats.unused(),
            memory,
        }
    }
}
