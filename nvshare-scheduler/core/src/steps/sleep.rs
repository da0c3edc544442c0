//! Clients go to sleep when nothing of them moves any more, and come back one by one when there is room: see
//! [`state::sleep`](crate::state::sleep).

use nvshare_proto::units::saturate;
use nvshare_proto::{EventKind, GpuUuid, SchedulerMessage};

use crate::policy::patience::MAX_RESTORE;
use crate::policy::rest;
use crate::policy::sleep::{LOOK_ELSEWHERE_EVERY, MAX_WAIT_FOR_IDLE, MAX_WAIT_FOR_LOOK, Step};
use crate::report::warnings::Topic;
use crate::state::client::{Client, ClientId};
use crate::state::gpu::{CapacityFigures, CapacitySource};
use crate::state::rest::Rest;
use crate::state::sleep::Sleep;
use crate::steps::books::Books;

impl Books {
    /// Begins to have a client go off the card, which can.
    pub(crate) fn order_to_go(&mut self, id: ClientId) {
        let since = self.state().now();
        self.change_client(id, |client| {
            client.sleep = Sleep::Ordered { since, evicted: false, looked: false }
        });
        // One that has the lock is told that it is waited for, and says when it does nothing.
        self.agenda_mut().tell_later([id]);
        self.agenda_mut().follow_sleeper_at(since + MAX_WAIT_FOR_IDLE, id);
        self.agenda_mut().follow_sleeper_at(since + MAX_WAIT_FOR_LOOK, id);
    }

    /// Queues the GPUs of sleepers that are to come back and whose time has come, while scheduling is off.
    pub(crate) fn queue_gpus_of_sleepers(&mut self) {
        let now = self.state().now();
        while let Some(id) = self.agenda_mut().take_sleeper(now) {
            self.follow_return(id);
        }
    }

    /// Goes on with a client that is to come back, whose time has come. It has its GPUs looked at, or others. One that was sent to
    /// another GPU and has not registered there waits for its own again. Returns whether the client is to come back.
    fn follow_return(&mut self, id: ClientId) -> bool {
        let Some(client) = self.state().client(id) else { return false };
        match client.sleep {
            Sleep::Wanted { .. } if client.looks_elsewhere_at.is_some_and(|at| at <= self.state().now()) => {
                self.change_client(id, |client| client.looks_elsewhere_at = None);
                self.look_elsewhere(id);
            }
            // A measurement has its GPUs looked at. If none has come for `MAX_WAIT_FOR_LOOK`, they are looked at without.
            Sleep::Wanted { .. } => {
                let gpus = client.gpus();
                self.queue(gpus);
            }
            Sleep::Sent { until, .. } if until <= self.state().now() => self.want_to_wake(id),
            Sleep::Sent { .. } => {}
            _ => return false,
        }
        true
    }

    /// Sends a client that waits for its way back to a GPU to another one, if that has room for it. Otherwise the next such look is
    /// planned, unless one is.
    pub(crate) fn look_elsewhere(&mut self, id: ClientId) {
        let now = self.state().now();
        let Some(client) = self.state().client(id) else { return };
        let waits = matches!(client.sleep, Sleep::Wanted { .. }) && !client.elsewhere.is_empty();
        if !waits || !self.state().config().wake_elsewhere {
            return;
        }
        let (looks, is_planned) = (client.elsewhere.len(), client.looks_elsewhere_at.is_some());
        let place = self.state().place_elsewhere(client);
        self.count_work(looks as u64);
        if let Some(gpus) = place {
            self.send_elsewhere(id, gpus);
        } else if !is_planned {
            let at = now + LOOK_ELSEWHERE_EVERY;
            self.change_client(id, |client| client.looks_elsewhere_at = Some(at));
            self.agenda_mut().follow_sleeper_at(at, id);
        }
    }

    /// Sends a client that waits for its way back to a GPU to another one.
    fn send_elsewhere(&mut self, id: ClientId, [from, to]: [GpuUuid; 2]) {
        let until = self.state().now() + self.state().config().grace;
        self.change_client(id, |client| {
            client.sleep = Sleep::Sent { to, until };
            // One that does not follow is not sent again.
            client.elsewhere = Vec::new();
            client.looks_elsewhere_at = None;
        });
        self.send(id, SchedulerMessage::Move { from, to });
        self.agenda_mut().follow_sleeper_at(until, id);
        self.queue([from]);
        self.report_mut()
            .info(format!("client {id} comes back to {to}, as {from} has no room for all that it has"));
    }

    /// Goes on with the clients that are to sleep, or to wake with work, and of which something has changed.
    pub(crate) fn follow_sleepers(&mut self) {
        let now = self.state().now();
        while let Some(id) = self.agenda_mut().take_sleeper(now) {
            self.count_work(1);
            let Some(client) = self.state().client(id) else { continue };
            if client.sleep == Sleep::Away && client.wants {
                self.want_to_wake(id);
                continue;
            }
            if client.sleep == Sleep::No {
                self.look_at_rest(id);
                continue;
            }
            if self.follow_return(id) {
                continue;
            }
            let Some(client) = self.state().client(id) else { continue };
            match self.state().next_step_to_sleep(client) {
                None | Some(Step::Wait) => {}
                Some(Step::Leave) => self.ask_these_to_leave(&[id]),
                Some(Step::StaysAtWork) => self.stays_awake(id, "it has work"),
                Some(Step::StaysFull) => {
                    self.stays_awake(id, "its memory does not leave the card; the host may lack memory");
                }
                Some(Step::StaysUnseen) => {
                    self.stays_awake(id, "NVML does not show what its contexts take");
                }
                Some(Step::Evict) => self.evict_all_of(id),
                Some(Step::Look) => self.look_at_gpus_of(id),
                Some(Step::Tell) => {
                    let since = self.state().now();
                    self.change_client(id, |client| client.sleep = Sleep::Told { since, wakes: false });
                    self.send(id, SchedulerMessage::Sleep);
                    self.emit(EventKind::Sleep, id, None);
                }
            }
        }
    }

    /// Looks at the rest of a client on the card, if it is time.
    fn look_at_rest(&mut self, id: ClientId) {
        let now = self.state().now();
        let is_due = self.change_rest(id, |rest| rest.look_at.take_if(|at| *at <= now).is_some());
        let Some(client) = self.state().client(id).filter(|_| is_due == Some(true)) else { return };
        let is_another_going =
            self.agenda().going_by_itself().is_some_and(|other| self.state().is_going(other));
        match self.state().next_step_of_rest(client, is_another_going) {
            None => {}
            Some(rest::Step::LookAgain(time)) => self.look_at_rest_in(time, id),
            Some(rest::Step::Ask { look_in }) => {
                self.change_rest(id, |rest| rest.is_asked = true);
                self.ask_for_counters(id);
                self.look_at_rest_in(look_in, id);
            }
            Some(rest::Step::Go) => self.go_by_itself(id),
        }
    }

    fn go_by_itself(&mut self, id: ClientId) {
        let now = self.state().now();
        let since = self.change_rest(id, |rest| {
            rest.is_cause = true;
            rest.since
        });
        self.agenda_mut().set_going_by_itself(id);
        let rested = now.saturating_sub(since.unwrap_or(now)).as_secs();
        self.report_mut().info(format!("client {id} has had no work for {rested} s, and goes to sleep"));
        self.order_to_go(id);
    }

    /// Has a client give back all room that can be moved, on each of its GPUs.
    fn evict_all_of(&mut self, id: ClientId) {
        self.change_client(id, |client| {
            if let Sleep::Ordered { evicted, .. } = &mut client.sleep {
                *evicted = true;
            }
        });
        for uuid in self.state().gpus_used_by(id) {
            let bytes = self.state().account(id, uuid).map_or(0, |account| account.movable());
            if bytes > 0 {
                self.send_evict_order(id, uuid, bytes);
            }
        }
    }

    /// Has the GPUs of a client measured that is to sleep, once.
    fn look_at_gpus_of(&mut self, id: ClientId) {
        self.change_client(id, |client| {
            if let Sleep::Ordered { looked, .. } = &mut client.sleep {
                *looked = true;
            }
        });
        for uuid in self.state().gpus_used_by(id) {
            self.report_mut().measure(uuid);
        }
    }

    /// Has a GPU measured of which memory has just become free, where a client waits for it to come back: it does not until somebody has
    /// seen that the memory is free.
    pub(crate) fn look_for_those_that_wake(&mut self, uuid: GpuUuid) {
        if self.state().gpu(uuid).is_some_and(|gpu| gpu.ledger.sleepers().first().is_some()) {
            self.report_mut().measure(uuid);
        }
    }

    /// Waits for a look at a client that is to sleep and has given back all room that it can. It is not looked at while memory moves,
    /// and a look before that may have shown room that it did not use.
    pub(crate) fn await_look(&mut self, id: ClientId) {
        let now = self.state().now();
        if self
            .state()
            .client(id)
            .is_some_and(|client| matches!(client.sleep, Sleep::Ordered { evicted: true, .. }))
        {
            let sleep = Sleep::Ordered { since: now, evicted: true, looked: false };
            self.change_client(id, |client| client.sleep = sleep);
            self.agenda_mut().follow_sleeper_at(now + MAX_WAIT_FOR_LOOK, id);
        }
    }

    /// Ends the order to sleep.
    pub(crate) fn stays_awake(&mut self, id: ClientId, why: &str) {
        self.change_client(id, |client| client.sleep = Sleep::No);
        self.change_rest(id, Rest::note_in_vain);
        self.follow_rest(id);
        self.agenda_mut().tell_later([id]);
        self.emit(EventKind::StaysAwake, id, None);
        self.report_mut().info(format!("client {id} does not go to sleep: {why}"));
    }

    /// Lets a client that is off the card wait until it may come back.
    pub(crate) fn want_to_wake(&mut self, id: ClientId) {
        let since = self.state().now();
        self.change_client(id, |client| client.sleep = Sleep::Wanted { since });
        let needs = self.state().needs_to_return(id);
        self.emit(EventKind::WakeWanted, id, Some(needs));
        let gpus = self.state().gpus_used_by(id);
        if gpus.is_empty() {
            return self.wake(id);
        }
        self.queue(gpus);
        self.look_elsewhere(id);
    }

    /// Sends WAKE to the client that is the next to come back to a GPU, if it has a place there and on its
    /// others. While scheduling is off, to all that have one.
    pub(crate) fn wake_next(&mut self, uuid: GpuUuid) {
        let Some(gpu) = self.state().gpu(uuid) else { return };
        let wanted: Vec<ClientId> = gpu.ledger.sleepers().wanted().collect();
        for id in wanted {
            self.count_work(1);
            if self.state().client(id).is_some_and(|client| self.state().may_wake(client)) {
                self.wake(id);
            }
        }
    }

    /// Sends WAKE. Nothing else does.
    fn wake(&mut self, id: ClientId) {
        let (now, grace) = (self.state().now(), self.state().config().grace);
        let Some(client) = self.state().client(id) else { return };
        let Sleep::Wanted { since } = client.sleep else { return };
        // Memory that does not move comes back with the process.
        let accounts = client.accounts.values();
        let moves = accounts.map(|account| account.rates.there_and_back(account.room)).max();
        let until = now + grace + moves.unwrap_or_default().min(MAX_RESTORE);
        self.change_client(id, |client| client.sleep = Sleep::Waking { until, late: false });
        self.send(id, SchedulerMessage::Wake);
        self.emit_with(EventKind::Wake, id, None, Some(now.saturating_sub(since)));
    }

    /// Lets others come back to the card though a client that was told to has not said that it is there.
    pub(crate) fn count_as_late(&mut self, id: ClientId) {
        self.change_client(id, |client| {
            client.is_unresponsive = true;
            if let Sleep::Waking { late, .. } = &mut client.sleep {
                *late = true;
            }
        });
        if let Some(Client { name, pid, .. }) = self.state().client(id) {
            let text = format!(
                "client {id} ({name}, pid {pid}) does not answer: it should come back to the card; others do so before it"
            );
            self.warn_of_client(Topic::Stuck, id, None, &text);
        }
    }

    /// Notes the clients that cannot come back to a GPU, even if all memory leaves that can. The other GPUs of those for whom that changes are looked at
    /// again: what is kept there depends on it.
    pub(crate) fn note_without_place(&mut self, uuid: GpuUuid) {
        let Some(gpu) = self.state().gpu(uuid) else { return };
        let without = self.state().without_place(gpu);
        let changed: Vec<ClientId> = gpu.no_place_for.symmetric_difference(&without).copied().collect();
        if changed.is_empty() {
            return;
        }
        self.change_gpu(uuid, |gpu| gpu.no_place_for = without);
        for id in changed {
            let others = self.state().gpus_used_by(id).into_iter().filter(|&other| other != uuid);
            self.queue(others);
        }
    }

    /// Keeps as much of a GPU as its sleepers need: the one that needs most, and those on their way back.
    pub(crate) fn set_aside_for_sleepers(&mut self, uuid: GpuUuid) {
        let Some(gpu) = self.state().gpu(uuid) else { return };
        let set_aside = gpu.ledger.sleepers().to_set_aside();
        let (size, source) = (CapacityFigures { set_aside, ..gpu.size }, gpu.source);
        // The contexts that are on the card may have changed as well.
        let is_news =
            set_aside != gpu.size.set_aside || self.state().config().usable(uuid, size) != gpu.capacity;
        if source == CapacitySource::Certain && is_news {
            self.set_size(uuid, size, source);
        }
        let Some(gpu) = self.state().gpu(uuid) else { return };
        let held_back = self.state().to_hold_back(gpu);
        if gpu.held_back != held_back {
            self.change_gpu(uuid, |gpu| gpu.held_back = held_back);
            self.queue_with_watchers(uuid);
        }
        // Less may be kept from then on, though nothing else happens.
        let next = self.state().gpu(uuid).and_then(|gpu| self.state().next_passed_over_at(gpu));
        if let Some(at) = next {
            self.wake_at(uuid, at);
        }
    }

    /// Asks holders to leave whose room is in the way of a process that is to come back, when their turn is
    /// over: clients that are parked give back theirs before.
    pub(crate) fn make_way(&mut self, uuid: GpuUuid) {
        let now = self.state().now();
        let Some(gpu) = self.state().known_gpu(uuid) else { return };
        let sums = gpu.ledger.sums();
        let beyond = sums.room.saturating_sub(u128::from(gpu.most_room())).saturating_sub(sums.ordered);
        let is_waited_for = gpu.held_back > 0 && gpu.ledger.sleepers().first().is_some();
        if !is_waited_for || beyond == 0 || sums.leaving > 0 {
            return;
        }
        let mut short = saturate(beyond);
        let (mut leavers, mut idle) = (Vec::new(), Vec::new());
        for id in self.state().staying_by_turn(gpu).into_iter().rev() {
            let Some(entry) = gpu.ledger.entry(id).filter(|entry| entry.standing.holds()) else { continue };
            let gives = entry.room.saturating_sub(entry.pinned);
            if short > 0 && gives > 0 && !entry.is_silent {
                short = short.saturating_sub(gives);
                let is_idle = |client: &Client| {
                    // Its mates may wait for its next kernels: their drains would fail again and again.
                    client.phase().is_idle() && self.state().keeps_mates_waiting_since(client).is_none()
                };
                if self.state().client(id).is_some_and(is_idle) { &mut idle } else { &mut leavers }.push(id);
            }
        }
        // An idle client has no turn to end.
        for id in idle {
            self.ask_to_leave(id);
        }
        if leavers.is_empty() {
            return;
        }
        let Some(gpu) = self.state().known_gpu(uuid) else { return };
        let over = gpu.turn.started().map_or(now, |started| started.saturating_add(gpu.quantum));
        let over = over.max(self.state().earliest_drain(&self.state().with_their_gangs(leavers.clone())));
        if over > now {
            return self.wake_at(uuid, over);
        }
        for id in leavers {
            self.ask_to_leave(id);
        }
        self.change_gpu(uuid, |gpu| gpu.turn.restart(now));
    }

    /// Asks a client for its counters, unless it still has to answer.
    pub(crate) fn ask_for_counters(&mut self, id: ClientId) {
        let was_asked = self.change_notes(id, |notes| std::mem::replace(&mut notes.asked_counters, true));
        if was_asked == Some(false) {
            self.send(id, SchedulerMessage::AskCounters);
        }
    }
}
