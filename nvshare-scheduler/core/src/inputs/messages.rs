//! The core's answer to each message of a client.

use std::collections::BTreeSet;

use nvshare_proto::units::Bytes;
use nvshare_proto::{Amount, ClientMessage, Counters, Epoch, EventKind, GpuUuid, SchedulerMessage, Usage};

use crate::Time;
use crate::policy::patience::{STUBBORN_AFTER, evict_again_after, retry_after};
use crate::report::warnings::Topic;
use crate::state::State;
use crate::state::account::{Account, Adoption, EvictOrder, MAX_BYTES, Rates, Unevictable};
use crate::state::client::{Client, ClientId, HandOver, MAX_GPUS_PER_CLIENT, NextReason, Phase};
use crate::steps::books::Books;

impl Books {
    pub(crate) fn on_message(&mut self, id: ClientId, message: ClientMessage) {
        let now = self.state().now();
        self.on_stopped(id, false);
        // None: the connection has ended meanwhile.
        let Some(phase) = self.state().phase(id) else { return };
        self.note_message(id, &message);
        match message {
            ClientMessage::Usage(usage) => self.on_usage(id, usage),
            ClientMessage::Counters(counters) => self.on_counters(id, counters),
            ClientMessage::ReqLock => {
                self.on_work(id);
                self.on_req_lock(id, phase);
            }
            ClientMessage::Running { epoch } => match phase {
                Phase::Granted { epoch: current, since, begins, .. } if current == epoch => {
                    self.on_running(id, epoch, since, begins);
                }
                _ => {}
            },
            ClientMessage::LockReleased { epoch } => match phase {
                // Nobody asked for it.
                Phase::Granted { epoch: current, .. } if current == epoch => self.on_given_back(id, phase),
                Phase::Running { epoch: current } | Phase::Dropping { epoch: current, .. }
                    if current == epoch =>
                {
                    self.park(id, phase);
                }
                _ => {}
            },
            ClientMessage::DropDeferred { epoch } => match phase {
                Phase::Dropping { epoch: current, .. } if current == epoch => self.on_deferred(id, epoch),
                _ => {}
            },
            ClientMessage::Idle { epoch } => match phase {
                Phase::Running { epoch: current } if current == epoch => {
                    self.change_client(id, |client| client.idle(epoch, now));
                }
                // The client was asked to leave meanwhile: an idle client has nothing left to drain.
                Phase::Dropping { epoch: current, .. } if current == epoch => self.park(id, phase),
                _ => {}
            },
            ClientMessage::NeedRoom(Amount { gpu, bytes }) => {
                if bytes > 0 {
                    self.on_work(id);
                }
                // If the client has been given that room by now, its request has crossed the answer. A need beyond the capacity, which may
                // be nothing, is one as well: it gets an answer.
                let bytes = bytes.min(MAX_BYTES);
                self.change_account(id, gpu, |account| account.needs = bytes.saturating_sub(account.room));
            }
            ClientMessage::Room(Amount { gpu, bytes }) => {
                self.change_account(id, gpu, |account| {
                    let came = account.return_room(bytes);
                    if let Some(order) = &mut account.evict_order {
                        order.bytes = order.bytes.saturating_sub(came);
                        order.came = order.came.saturating_add(came);
                        order.since = if came > 0 { now } else { order.since };
                    }
                });
            }
            ClientMessage::Evicted { gpu, short } => self.on_evicted(id, phase, gpu, short),
            ClientMessage::Ping => self.send(id, SchedulerMessage::Pong),
            ClientMessage::Adopted { epoch } => {
                self.change_client(id, |client| {
                    client.adopted.take_if(|adopted| *adopted == epoch);
                    client.accounts.values_mut().for_each(|account| account.settle_adoption(epoch));
                });
            }
            ClientMessage::Asleep => self.on_asleep(id, phase),
            ClientMessage::CannotSleep { reason, for_good } => self.on_cannot_sleep(id, &reason, for_good),
            ClientMessage::WakeWanted => self.on_wake_wanted(id, phase),
            ClientMessage::Awake { took_us } => self.on_awake(id, took_us),
            ClientMessage::Elsewhere { gpus } => self.on_elsewhere(id, gpus),
            ClientMessage::CannotShare => self.on_cannot_share(id),
            ClientMessage::Shares { with } => self.on_shares(id, &with),
            // The host's memory is handed out beside the core, and phases are for those who watch.
            ClientMessage::Phases(_)
            | ClientMessage::HostWanted { .. }
            | ClientMessage::HostHeld { .. }
            | ClientMessage::HostBack { .. } => {}
        }
    }

    /// Parks a client that gives a grant back which is no use to it: a GPU has become too small for memory that
    /// has to be resident at once. Its gang leaves with it.
    fn on_given_back(&mut self, id: ClientId, phase: Phase) {
        self.change_client(id, |client| client.set_whole(true));
        self.park(id, phase);
        self.ask_to_leave(id);
    }

    fn on_cannot_share(&mut self, id: ClientId) {
        let is_known = self.change_notes(id, |notes| std::mem::replace(&mut notes.reported_sharing, true));
        let Some(client) = self.state().client(id).filter(|_| is_known == Some(false)) else { return };
        let text = format!(
            "client {id} ({}) was refused to share its memory: its program has to be started with NVSHARE_MEMORY=swap",
            client.name
        );
        self.report_mut().info(text);
        self.emit(EventKind::CannotShare, id, None);
    }

    fn on_evicted(&mut self, id: ClientId, phase: Phase, uuid: GpuUuid, short: u64) {
        let now = self.state().now();
        let answered = self.change_account(id, uuid, |account| {
            let kept = account.room;
            let order = account.evict_order.take();
            // A client that answers EVICT and gives nothing back, though it has something, would be asked
            // again without end.
            let empty_handed = order.is_some_and(|order| order.came == 0) && could_give(account, phase);
            let stays = (short > 0 || empty_handed) && account.room > 0;
            let is_news =
                order.is_some() && stays && !std::mem::replace(&mut account.reported_unevictable, true);
            // If not all of the ordered memory could leave, more of the rest cannot leave now. A client
            // without room has nothing that stays.
            account.failed_evictions = if stays { account.failed_evictions.saturating_add(1) } else { 0 };
            let until = now + evict_again_after(account.failed_evictions);
            account.unevictable = stays.then_some(Unevictable { bytes: account.room, until });
            let evict = order.map(|EvictOrder { came, given, .. }| {
                let took = now.saturating_sub(given);
                Rates::blend(&mut account.rates.evict, came, took);
                account.cost.evict.record(took);
                (account.rates.evict, took)
            });
            (is_news.then_some(kept), evict)
        });
        // None: the client named a GPU that it does not use.
        let Some((kept, evict)) = answered else { return };
        if let Some((rate, took)) = evict {
            self.await_look(id);
            self.look_for_those_that_wake(uuid);
            self.change_gpu(uuid, |gpu| {
                gpu.cost.evict.record(took);
                gpu.rates.evict = f64::midpoint(gpu.rates.evict, rate);
            });
        }
        if let Some(kept) = kept {
            let text = format!(
                "client {id} keeps {} on {uuid}: this memory cannot be moved, or the host has no memory for it",
                Bytes(kept)
            );
            self.warn_of_client(Topic::Stays, id, Some(uuid), &text);
        }
    }

    fn on_usage(&mut self, id: ClientId, usage: Usage) {
        let rates = self.state().gpu(usage.gpu).map_or_else(Rates::default, |gpu| gpu.rates);
        let known = self.state().account(id, usage.gpu).is_some();
        let used = self.state().client(id).map_or(0, |client| client.accounts.len());
        if used >= MAX_GPUS_PER_CLIENT && !known {
            return;
        }
        if !known {
            self.know_gpus_of(&[usage.gpu]);
        }
        let has = self.state().account(id, usage.gpu).map_or(0, |account| account.usage.allocated);
        let is_to_sleep = self.state().client(id).is_some_and(|client| client.sleep.is_ordered());
        if is_to_sleep && usage.allocated > has {
            self.stays_awake(id, "it allocates memory");
        }
        if usage.allocated != has {
            let now = self.state().now();
            self.change_rest(id, |rest| rest.interrupt(now));
        }
        let total_changed = self.change_client(id, |client| {
            let adopted = client.adopted;
            let account = client.accounts.entry(usage.gpu).or_insert_with(|| {
                let mut account = Box::new(Account::new(usage, rates));
                // Its first usage of this GPU is of the time before it has read that it goes on.
                account.adoption = adopted.map(|epoch| Adoption { epoch, had: 0 });
                account
            });
            if account.usage.allocated != usage.allocated {
                account.unevictable = None;
                account.reported_unevictable = false;
                account.comes_whole = false;
            }
            let before = account.usage.total;
            account.set_usage(usage);
            before != usage.total
        });
        if !known {
            self.meet_gpu(id, usage.gpu);
        } else if total_changed == Some(true) {
            self.agree_on_size(usage.gpu);
        }
    }

    fn on_counters(&mut self, id: ClientId, counters: Counters) {
        self.change_notes(id, |notes| (notes.asked_counters, notes.counters) = (false, counters));
    }

    fn on_req_lock(&mut self, id: ClientId, phase: Phase) {
        let now = self.state().now();
        match phase {
            Phase::Parked | Phase::Drained => {
                self.change_client(id, |client| client.request_lock(now));
            }
            // The idle client kept its place and nobody took it, so it goes on at once.
            Phase::Idle { .. } => {
                self.change_client(id, |client| {
                    client.request_lock(now);
                    client.make_next(NextReason::Resumes);
                });
            }
            // The client is next already, maybe without a request (see `on_deferred`), and may still have to
            // wait.
            Phase::Next(_) => {
                self.change_client(id, |client| client.request_lock(now));
            }
            // The client closed its gate while a grant was on its way, or requests twice.
            Phase::Granted { .. } | Phase::Running { .. } | Phase::Dropping { .. } => {}
            Phase::Free => self.send(id, SchedulerMessage::SchedOff),
        }
    }

    /// Notes that a client has opened its gate, after it was granted the lock `since` then. If it `begins`, a
    /// turn begins.
    fn on_running(&mut self, id: ClientId, epoch: Epoch, since: Time, begins: bool) {
        let now = self.state().now();
        let hand_over = self.change_client(id, |client| {
            client.run(epoch);
            client.is_unresponsive = false;
            client.hand_over.take()
        });
        let hand_over = hand_over.flatten();
        self.change_each_gpu_of(id, |gpu, account| {
            gpu.turn.run(id, begins, now);
            let took = now.saturating_sub(since);
            for cost in [&mut gpu.cost, &mut account.cost] {
                cost.restore.record(took);
            }
            if let Some(HandOver { freed, moves }) = hand_over {
                let idle = now.saturating_sub(freed);
                gpu.cost.gap.record(idle);
                gpu.budget.spend(idle);
                account.cost.gap.record(idle);
                let moved = std::mem::take(&mut account.moved_for_turn);
                if moved > 0 {
                    account.move_cost.record(idle, moved);
                }
                if !moves {
                    gpu.record_switch(idle);
                }
            }
            // The client had to restore what it reported as absent at its grant.
            let (restored, early) = (account.restores, account.early.take());
            // A restore that went along with evictions was no faster than these.
            if restored > 0 && early.is_none() {
                Rates::blend(&mut account.rates.restore, restored, took);
                gpu.rates.restore = f64::midpoint(gpu.rates.restore, account.rates.restore);
            }
        });
    }

    fn on_deferred(&mut self, id: ClientId, epoch: Epoch) {
        let now = self.state().now();
        let unit = self.state().unit(id);
        let gpus = self.state().gpus_of(&unit);
        let of_gpus = self.state().gpus_among(&gpus).map(|gpu| gpu.deferrals).max();
        let own = self.state().clients_of(&unit).map(|client| client.deferrals).max().unwrap_or(0);
        let retry_at = now + retry_after(of_gpus.unwrap_or(0).max(own), now);
        self.change_client(id, |client| {
            client.run(epoch);
            client.is_unresponsive = false;
        });
        let in_a_row = own + 1;
        for &member in unit.iter() {
            self.change_client(member, |client| {
                client.deferrals = in_a_row;
                client.drains_again_at = retry_at;
                // Other clients must not wait for a drain that fails: until it is asked again, this client
                // counts as one that stays.
                client.stubborn_until = (in_a_row >= STUBBORN_AFTER).then_some(retry_at);
            });
        }
        // The drain may depend on work of another client that sleeps at its gate by now. All clients that
        // were asked along with it go on. A client that has given the lock back gets it again. A client that
        // has not answered yet is told at once, whatever its answer will be.
        let (gpus, others) = asked_along_with(self.state(), id);
        for uuid in gpus {
            let mut next = Vec::new();
            self.change_gpu(uuid, |gpu| {
                gpu.deferrals += 1;
                gpu.released.clear();
                next.extend(gpu.ledger.next().iter().map(|place| place.client));
            });
            // Clients that were next wait on.
            for other in next {
                self.step_back(&self.state().unit(other));
            }
        }
        for other in others {
            // They are asked together again: the drain that was given up may depend on each of them.
            self.change_client(other, |client| client.drains_again_at = retry_at);
            match self.state().phase(other) {
                Some(Phase::Parked) => {
                    self.change_client(other, |client| client.make_next(NextReason::Resumes));
                }
                Some(Phase::Dropping { .. } | Phase::Drained) => {
                    self.send_grant(other, now + self.state().config().grace, Vec::new(), false);
                }
                _ => {}
            }
        }
        self.report_mut()
            .info(format!("client {id} keeps the GPU: its kernels are not done; it is asked again"));
    }
}

/// Returns the clients that were asked to leave in the same hand-over, and their GPUs. On each GPU, these are
/// the clients that drain or have drained, with their gangs on any GPU.
fn asked_along_with(state: &State, id: ClientId) -> (BTreeSet<GpuUuid>, BTreeSet<ClientId>) {
    let mut gpus = BTreeSet::new();
    let mut others = BTreeSet::new();
    let mut queue = vec![id];
    let leaves = |client: &&Client| client.phase().is_dropping() || client.phase() == Phase::Drained;
    while let Some(id) = queue.pop() {
        for &member in state.unit(id).iter() {
            if !others.insert(member) {
                continue;
            }
            let used: Vec<GpuUuid> =
                state.gpus_used_by(member).into_iter().filter(|uuid| gpus.insert(*uuid)).collect();
            for gpu in state.gpus_among(&used) {
                let holders = gpu.ledger.holders().iter().filter_map(|id| state.client(*id));
                queue.extend(holders.filter(leaves).map(|client| client.id));
                queue.extend(gpu.released.iter().copied());
            }
        }
    }
    // A gang's member that was not asked, and had nothing there, goes on as it is.
    others.retain(|other| *other != id && was_asked(state, *other, &gpus));
    (gpus, others)
}

fn was_asked(state: &State, id: ClientId, gpus: &BTreeSet<GpuUuid>) -> bool {
    match state.phase(id) {
        Some(Phase::Dropping { .. } | Phase::Drained) => true,
        Some(Phase::Parked) => {
            let mut gpus = gpus.iter().filter_map(|uuid| state.gpu(*uuid));
            gpus.any(|gpu| gpu.released.contains(&id))
        }
        _ => false,
    }
}

/// Whether an account has bytes that its client could give back in its phase.
fn could_give(account: &Account, phase: Phase) -> bool {
    if phase == Phase::Parked { account.room > 0 } else { account.room > account.wanted() }
}
