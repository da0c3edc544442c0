//! The core's answer to each message of a client.

use std::collections::BTreeSet;
use std::time::Duration;

use nvshare_proto::units::Bytes;
use nvshare_proto::{Amount, ClientMessage, Counters, Epoch, GpuUuid, SchedulerMessage, Usage};

use crate::Core;
use crate::policy::patience::{STUBBORN, evict_again_after, retry_after};
use crate::report::warnings::Topic;
use crate::state::account::{Account, Order, Rates, Stays};
use crate::state::client::MOST_GPUS_EACH;
use crate::state::client::{ClientId, HandOver, Phase, Why};

impl Core {
    pub(crate) fn on_message(&mut self, id: ClientId, message: ClientMessage) {
        let now = self.now;
        self.on_stopped(id, false);
        let Some(phase) = self.phase(id) else { return };
        match message {
            ClientMessage::Usage(usage) => self.on_usage(id, usage),
            ClientMessage::Counters(counters) => self.on_counters(id, counters),
            ClientMessage::ReqLock => self.on_req_lock(id, phase),
            ClientMessage::Running { epoch } => match phase {
                Phase::Granted { epoch: current, .. } if current == epoch => self.on_running(id, epoch),
                _ => {}
            },
            ClientMessage::LockReleased { epoch } => match phase {
                Phase::Running { epoch: current }
                | Phase::Granted { epoch: current, .. }
                | Phase::Dropping { epoch: current, .. }
                    if current == epoch =>
                {
                    self.note_turn(id);
                    self.park(id);
                }
                _ => {}
            },
            ClientMessage::DropDeferred { epoch } => match phase {
                Phase::Dropping { epoch: current, .. } if current == epoch => self.on_deferred(id, epoch),
                _ => {}
            },
            ClientMessage::Idle { epoch } => match phase {
                Phase::Running { epoch: current } if current == epoch => {
                    self.note_sleep(id);
                    self.with(id, |client| client.phase = Phase::Idle { epoch, since: now });
                }
                // The client was asked to leave meanwhile: an idle client has nothing left to drain.
                Phase::Dropping { epoch: current, .. } if current == epoch => self.park(id),
                _ => {}
            },
            ClientMessage::NeedRoom(Amount { gpu, bytes }) => {
                // If the client has been given that room by now, its request has crossed the answer.
                let most = self.capacity(gpu, id);
                self.with_account(id, gpu, |account| {
                    account.needs = bytes.saturating_sub(account.room).min(most);
                });
            }
            ClientMessage::Room(Amount { gpu, bytes }) => {
                self.with_account(id, gpu, |account| {
                    let came = bytes.min(account.room);
                    account.room -= came;
                    if let Some(order) = &mut account.order {
                        order.bytes = order.bytes.saturating_sub(came);
                        order.came = order.came.saturating_add(came);
                        order.since = if came > 0 { now } else { order.since };
                    }
                });
            }
            ClientMessage::Evicted { gpu, short } => self.on_evicted(id, phase, gpu, short),
            ClientMessage::Ping => self.send(id, SchedulerMessage::Pong),
            ClientMessage::Progress { ticket, submissions } => self.note_progress(id, ticket, submissions),
            // The host's memory is handed out beside the core.
            ClientMessage::HostWanted { .. }
            | ClientMessage::HostHeld { .. }
            | ClientMessage::HostBack { .. } => {}
        }
    }

    fn on_evicted(&mut self, id: ClientId, phase: Phase, uuid: GpuUuid, short: u64) {
        let now = self.now;
        let mut is_news = false;
        let mut evict = None;
        self.with_account(id, uuid, |account| {
            let order = account.order.take();
            // A client that answers EVICT and gives nothing back, though it has something, would be asked again without
            // end.
            let empty_handed = order.is_some_and(|order| order.came == 0) && could_give(account, phase);
            let stays = (short > 0 || empty_handed) && account.room > 0;
            is_news = order.is_some() && stays && !std::mem::replace(&mut account.reported_short, true);
            // If not all of the ordered memory could leave, more of the rest cannot leave now. A client without
            // room has nothing that stays.
            account.shorts = if stays { account.shorts.saturating_add(1) } else { 0 };
            let until = now + evict_again_after(account.shorts);
            account.stays = stays.then_some(Stays { bytes: account.room, until });
            if let Some(Order { came, given, .. }) = order {
                let took = now.saturating_sub(given);
                Rates::blend(&mut account.rates.evict, came, took);
                account.cost.evict.record(took);
                evict = Some((account.rates.evict, took));
            }
        });
        if let (Some((rate, took)), Some(gpu)) = (evict, self.gpus.get_mut(&uuid)) {
            gpu.cost.evict.record(took);
            gpu.rates.evict = f64::midpoint(gpu.rates.evict, rate);
        }
        if is_news {
            let text = format!(
                "client {id}: {} of {uuid} stay where they are: they cannot be moved, or its host has no memory for them",
                Bytes(short)
            );
            self.warn_of_client(Topic::Stays, id, Some(uuid), &text);
        }
    }

    fn on_usage(&mut self, id: ClientId, usage: Usage) {
        let rates = self.gpus.get(&usage.gpu).map_or_else(Rates::default, |gpu| gpu.rates);
        let Some(client) = self.clients.get(&id) else { return };
        let known = client.accounts.contains_key(&usage.gpu);
        if client.accounts.len() >= MOST_GPUS_EACH && !known {
            return;
        }
        let mut total_changed = false;
        self.with(id, |client| {
            let account =
                client.accounts.entry(usage.gpu).or_insert_with(|| Box::new(Account::new(usage, rates)));
            if account.usage.allocated != usage.allocated {
                account.stays = None;
                account.reported_short = false;
            }
            total_changed = account.usage.total != usage.total;
            account.told(usage);
        });
        if !known {
            self.meet_gpu(id, usage.gpu);
        } else if total_changed {
            self.settle_disputes(usage.gpu);
        }
    }

    fn on_counters(&mut self, id: ClientId, counters: Counters) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.asked_counters = false;
            client.counters = counters;
        }
    }

    fn on_req_lock(&mut self, id: ClientId, phase: Phase) {
        let now = self.now;
        match phase {
            Phase::Parked => {
                self.with(id, |client| {
                    if !client.wants {
                        client.waiting_since = now;
                    }
                    client.wants = true;
                });
                self.want_together(id);
            }
            // The idle client kept its place and nobody took it, so it goes on at once.
            Phase::Idle { .. } => self.with(id, |client| {
                client.wants = true;
                client.waiting_since = now;
                client.phase = Phase::Next(Why::Resumes);
            }),
            // The client is next already, maybe without a request (see `on_deferred`), and may still have to wait.
            Phase::Next(_) | Phase::Drained => self.with(id, |client| client.wants = true),
            // The client closed its gate while a grant was on its way, or requests twice.
            Phase::Granted { .. } | Phase::Running { .. } | Phase::Dropping { .. } => {}
            Phase::Free => self.send(id, SchedulerMessage::SchedOff),
        }
    }

    fn on_running(&mut self, id: ClientId, epoch: Epoch) {
        let now = self.now;
        let Some(Phase::Granted { since, begins, .. }) = self.phase(id) else { return };
        let mut hand_over = None;
        self.with(id, |client| {
            client.phase = Phase::Running { epoch };
            client.stuck = false;
            hand_over = client.hand_over.take();
        });
        for uuid in self.gpus_used_by(id) {
            let Some(gpu) = self.gpus.get_mut(&uuid) else { continue };
            if begins || gpu.turn_started.is_none() {
                gpu.turn_started = Some(gpu.turn_begins(id, now));
                gpu.turns += 1;
            }
            let Some(account) = self.clients.get_mut(&id).and_then(|c| c.accounts.get_mut(&uuid)) else {
                continue;
            };
            for cost in [&mut gpu.cost, &mut account.cost] {
                cost.restore.record(now.saturating_sub(since));
            }
            if let Some(HandOver { freed, moves }) = hand_over {
                let idle = now.saturating_sub(freed);
                gpu.cost.idle.record(idle);
                gpu.budget.spend(idle);
                account.cost.idle.record(idle);
                let claimed = std::mem::take(&mut account.claimed);
                if claimed > 0 {
                    account.moving.record(idle, claimed);
                }
                if !moves {
                    gpu.record_switch(idle);
                }
            }
            // The client had to restore what it reported as absent at its grant.
            let (restored, ahead) = (account.restores, account.ahead.take());
            // A restore that went along with evictions was no faster than these.
            if restored > 0 && ahead.is_none() {
                Rates::blend(&mut account.rates.restore, restored, now.saturating_sub(since));
                gpu.rates.restore = f64::midpoint(gpu.rates.restore, account.rates.restore);
            }
        }
    }

    /// The client's gate is closed and its work is complete.
    pub(crate) fn park(&mut self, id: ClientId) {
        let now = self.now;
        let Some(phase) = self.phase(id) else { return };
        if let Phase::Dropping { since, .. } = phase {
            self.record_drain(id, now.saturating_sub(since));
            if self.has_drained_before_others(id) {
                self.with(id, |client| {
                    client.phase = Phase::Drained;
                    client.wants = false;
                    client.note_drained();
                });
                return;
            }
        }
        self.give_up_place(id);
        self.release_drained(id);
    }

    fn record_drain(&mut self, id: ClientId, took: Duration) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        for (uuid, account) in &mut client.accounts {
            account.cost.drain.record(took);
            if let Some(gpu) = self.gpus.get_mut(uuid) {
                gpu.record_drain(took);
                gpu.cost.drain.record(took);
            }
        }
    }

    /// No work of a client runs on the GPU any more: other clients may have its place.
    pub(crate) fn give_up_place(&mut self, id: ClientId) {
        let now = self.now;
        let Some(phase) = self.phase(id) else { return };
        self.with(id, |client| {
            // A client that drained before the others of its gang may have requested the lock again.
            client.wants &= phase == Phase::Drained;
            client.phase = Phase::Parked;
            client.note_drained();
            for account in client.accounts.values_mut() {
                account.needs = 0;
                account.promised = None;
            }
        });
        for uuid in self.gpus_used_by(id) {
            let Some(gpu) = self.gpus.get_mut(&uuid) else { continue };
            if phase.drops() || phase == Phase::Drained {
                gpu.released.insert(id);
            }
            gpu.freed_at = Some(now);
            // As long as another client drains, the hand-over may still be given up.
            if gpu.ledger.sums().leaving == 0 {
                gpu.deferrals = 0;
            }
        }
        self.wait_with_gang(id);
    }

    fn on_deferred(&mut self, id: ClientId, epoch: Epoch) {
        let now = self.now;
        let unit = self.unit(id);
        let gpus = self.gpus_of(&unit);
        let deferrals = gpus.iter().filter_map(|uuid| self.gpus.get(uuid)).map(|gpu| gpu.deferrals).max();
        let retry_at = now + retry_after(deferrals.unwrap_or(0), now);
        self.with(id, |client| {
            client.phase = Phase::Running { epoch };
            client.stuck = false;
        });
        let in_a_row = unit.iter().filter_map(|id| self.clients.get(id)).map(|client| client.deferrals).max();
        let in_a_row = in_a_row.unwrap_or(0) + 1;
        for &member in unit.iter() {
            self.with(member, |client| {
                client.deferrals = in_a_row;
                // Other clients must not wait for a drain that fails: until it is asked again, this client counts as one
                // that stays.
                client.stubborn_until = (in_a_row >= STUBBORN).then_some(retry_at);
            });
        }
        // The drain may depend on work of another client that sleeps at its gate by now: all clients that were asked along
        // with it go on. A client that has given the lock back gets it again. A client that has not answered yet is told at
        // once, whatever its answer will be.
        let (gpus, others) = self.asked_along_with(id);
        for uuid in gpus {
            let Some(gpu) = self.gpus.get_mut(&uuid) else { continue };
            gpu.deferrals += 1;
            gpu.not_before = retry_at;
            gpu.released.clear();
            // Clients that were next wait on.
            let next: Vec<ClientId> = gpu.ledger.next().iter().map(|key| key.2).collect();
            for other in next {
                self.step_back(&self.unit(other));
            }
        }
        for other in others {
            match self.phase(other) {
                Some(Phase::Parked) => {
                    self.with(other, |client| client.phase = Phase::Next(Why::Resumes));
                }
                Some(Phase::Dropping { .. } | Phase::Drained) => {
                    self.send_grant(other, now + self.config.grace, Vec::new(), false);
                }
                _ => {}
            }
        }
        self.note(format!("client {id} could not drain and goes on; asked again later"));
    }

    /// The clients that were asked to leave in the same hand-over as a client, and their GPUs: on each GPU the clients that
    /// drain or have drained, and all members of their gangs, on any GPU.
    fn asked_along_with(&self, id: ClientId) -> (BTreeSet<GpuUuid>, BTreeSet<ClientId>) {
        let mut gpus = BTreeSet::new();
        let mut others = BTreeSet::new();
        let mut look_at = vec![id];
        while let Some(id) = look_at.pop() {
            for &member in self.unit(id).iter() {
                if !others.insert(member) {
                    continue;
                }
                for uuid in self.gpus_used_by(member) {
                    if !gpus.insert(uuid) {
                        continue;
                    }
                    let Some(gpu) = self.gpus.get(&uuid) else { continue };
                    let leaves = |id: &ClientId| {
                        self.phase(*id).is_some_and(|phase| phase.drops() || phase == Phase::Drained)
                    };
                    look_at.extend(gpu.ledger.holders().iter().copied().filter(leaves));
                    look_at.extend(gpu.released.iter().copied());
                }
            }
        }
        // A gang's member that was not asked, and had nothing there, goes on as it is.
        others.retain(|other| *other != id && self.was_asked(*other, &gpus));
        (gpus, others)
    }

    fn was_asked(&self, id: ClientId, gpus: &BTreeSet<GpuUuid>) -> bool {
        let released = |uuid| self.gpus.get(uuid).is_some_and(|gpu| gpu.released.contains(&id));
        match self.phase(id) {
            Some(Phase::Dropping { .. } | Phase::Drained) => true,
            Some(Phase::Parked) => gpus.iter().any(released),
            _ => false,
        }
    }
}

/// Whether an account has bytes that its client could give back in its phase.
fn could_give(account: &Account, phase: Phase) -> bool {
    if phase == Phase::Parked { account.room > 0 } else { account.room > account.wanted() }
}
