//! What clients say, one message after the other.

use std::collections::BTreeSet;

use nvshare_proto::units::Bytes;
use nvshare_proto::{ClientMessage, Epoch, GpuUuid, Room, SchedulerMessage, Usage};

use crate::state::{Account, ClientId, Phase, Time};
use crate::{Core, MOST_GPUS_EACH, RETRY, RETRY_FACTOR, blend, patience};

impl Core {
    pub(crate) fn on_message(&mut self, id: ClientId, message: ClientMessage, now: Time) {
        let Some(phase) = self.clients.get(&id).map(|client| client.phase) else { return };
        match message {
            ClientMessage::Usage(usage) => self.on_usage(id, usage),
            ClientMessage::Counters(counters) => self.on_counters(id, counters),
            ClientMessage::ReqLock => self.on_req_lock(id, phase, now),
            ClientMessage::Running { epoch } => match phase {
                Phase::Granted { epoch: current, .. } if current == epoch => self.on_running(id, epoch, now),
                _ => {}
            },
            ClientMessage::LockReleased { epoch } => match phase {
                Phase::Running { epoch: current }
                | Phase::Granted { epoch: current, .. }
                | Phase::Dropping { epoch: current, .. }
                    if current == epoch =>
                {
                    self.park(id, now);
                }
                _ => {}
            },
            ClientMessage::DropDeferred { epoch } => match phase {
                Phase::Dropping { epoch: current, .. } if current == epoch => {
                    self.on_deferred(id, epoch, now)
                }
                _ => {}
            },
            ClientMessage::Idle { epoch } => match phase {
                Phase::Running { epoch: current } if current == epoch => {
                    self.with(id, |client| client.phase = Phase::Idle { epoch, since: now });
                }
                // It was asked to leave meanwhile: an idle client has nothing left to drain.
                Phase::Dropping { epoch: current, .. } if current == epoch => self.park(id, now),
                _ => {}
            },
            ClientMessage::NeedRoom(Room { gpu, bytes }) => {
                self.with_account(id, gpu, |account| account.needs = bytes);
            }
            ClientMessage::Room(Room { gpu, bytes }) => {
                self.with_account(id, gpu, |account| {
                    account.budget = account.budget.saturating_sub(bytes);
                    if let Some(order) = &mut account.order {
                        order.bytes = order.bytes.saturating_sub(bytes);
                        order.since = now;
                    }
                });
            }
            ClientMessage::Evicted { gpu, short } => {
                let mut is_news = false;
                self.with_account(id, gpu, |account| {
                    let ordered = account.order.take().is_some();
                    is_news = ordered && short > 0 && !std::mem::replace(&mut account.reported_short, true);
                    // If the host could not take all of this, it can take nothing more now. What is no longer
                    // there was not short.
                    account.stays_until = (short > 0 && account.budget > 0).then_some(now + RETRY);
                });
                if is_news {
                    self.warn(format!(
                        "client {id}: {} of {gpu} stay where they are: they cannot be moved, or its host has no memory for them",
                        Bytes(short)
                    ));
                }
            }
            ClientMessage::Ping => self.send(id, SchedulerMessage::Pong),
        }
    }

    pub(crate) fn on_usage(&mut self, id: ClientId, usage: Usage) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        if client.accounts.len() >= MOST_GPUS_EACH && !client.accounts.contains_key(&usage.gpu) {
            return;
        }
        let known = client.accounts.contains_key(&usage.gpu);
        let account = client.accounts.entry(usage.gpu).or_insert_with(|| Account::new(usage));
        let changed = account.usage.allocated != usage.allocated;
        if changed {
            account.stays_until = None;
            account.reported_short = false;
        }
        account.told(usage);
        if !known {
            self.meet_gpu(id, usage);
        }
    }

    pub(crate) fn on_counters(&mut self, id: ClientId, counters: nvshare_proto::Counters) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.asked_counters = false;
        let before = std::mem::replace(&mut client.counters, counters);
        let gpus: Vec<GpuUuid> = client.accounts.keys().copied().collect();
        for uuid in gpus {
            let Some(gpu) = self.gpus.get_mut(&uuid) else { continue };
            blend(
                &mut gpu.evict_rate,
                counters.evicted - before.evicted.min(counters.evicted),
                counters.evict_ns.saturating_sub(before.evict_ns),
            );
            blend(
                &mut gpu.restore_rate,
                counters.restored - before.restored.min(counters.restored),
                counters.restore_ns.saturating_sub(before.restore_ns),
            );
        }
    }

    pub(crate) fn on_req_lock(&mut self, id: ClientId, phase: Phase, now: Time) {
        match phase {
            Phase::Parked => {
                self.with(id, |client| {
                    if !client.wants {
                        client.waiting_since = now;
                    }
                    client.wants = true;
                });
                self.wake(id);
            }
            // It kept its place: nobody took it, so it goes on at once.
            Phase::Idle { .. } => self.with(id, |client| {
                client.wants = true;
                client.waiting_since = now;
                client.phase = Phase::Chosen;
            }),
            // It is next already, maybe without having asked (see `on_deferred`), and may yet have to wait.
            Phase::Chosen => self.with(id, |client| client.wants = true),
            // It closed its gate while a grant was on its way, or asks twice.
            Phase::Granted { .. } | Phase::Running { .. } | Phase::Dropping { .. } => {}
            Phase::Free => self.send(id, SchedulerMessage::SchedOff),
        }
    }

    pub(crate) fn on_running(&mut self, id: ClientId, epoch: Epoch, now: Time) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.phase = Phase::Running { epoch };
        client.reported_stuck = false;
        let from = client.switch_from.take();
        let claims = std::mem::take(&mut client.claims);
        for uuid in client.accounts.keys() {
            let Some(gpu) = self.gpus.get_mut(uuid) else { continue };
            if claims || gpu.turn_started.is_none() {
                gpu.turn_started = Some(now);
                gpu.turns += 1;
            }
            if let Some(from) = from {
                gpu.record_switch(now.saturating_sub(from));
            }
        }
    }

    /// The client's gate is closed and its work complete.
    pub(crate) fn park(&mut self, id: ClientId, now: Time) {
        // As long as another one drains, the hand-over may yet be given up.
        let draining: BTreeSet<GpuUuid> = self
            .clients
            .iter()
            .filter(|(other, c)| **other != id && matches!(c.phase, Phase::Dropping { .. }))
            .flat_map(|(_, c)| c.accounts.keys().copied())
            .collect();
        let Some(client) = self.clients.get_mut(&id) else { return };
        let asked = matches!(client.phase, Phase::Dropping { .. });
        client.phase = Phase::Parked;
        client.wants = false;
        client.claims = false;
        client.reported_stuck = false;
        for account in client.accounts.values_mut() {
            account.needs = 0;
            account.promised = None;
        }
        for uuid in client.accounts.keys() {
            if let Some(gpu) = self.gpus.get_mut(uuid) {
                if asked {
                    gpu.released.insert(id);
                }
                gpu.freed_at = Some(now);
                if !draining.contains(uuid) {
                    gpu.deferrals = 0;
                }
            }
        }
    }

    pub(crate) fn on_deferred(&mut self, id: ClientId, epoch: Epoch, now: Time) {
        self.with(id, |client| {
            client.phase = Phase::Running { epoch };
            client.reported_stuck = false;
        });
        let gpus: Vec<GpuUuid> =
            self.clients.get(&id).map(|c| c.accounts.keys().copied().collect()).unwrap_or_default();
        let mut released = BTreeSet::new();
        let mut draining = Vec::new();
        for uuid in gpus {
            let Some(gpu) = self.gpus.get_mut(&uuid) else { continue };
            let retry = patience(gpu.deferrals) * RETRY_FACTOR;
            gpu.deferrals += 1;
            gpu.not_before = now + retry;
            released.append(&mut gpu.released);
            for (&other, client) in &mut self.clients {
                if !client.accounts.contains_key(&uuid) {
                    continue;
                }
                match client.phase {
                    // Who was to come waits on.
                    Phase::Chosen => {
                        client.phase = Phase::Parked;
                        client.claims = false;
                    }
                    Phase::Dropping { .. } => draining.push(other),
                    _ => {}
                }
            }
        }
        // The drain may depend on work of another member that sleeps at its gate by now: all of them go on. Who has
        // given the lock back gets it again; who has not answered yet is told at once, whatever its answer will be.
        for other in released {
            self.with(other, |client| {
                if client.phase == Phase::Parked {
                    client.phase = Phase::Chosen;
                }
            });
        }
        for other in draining {
            self.send_grant(other, now + self.config.grace, Vec::new());
        }
        self.note(format!("client {id} could not drain and goes on; asked again later"));
    }
}
