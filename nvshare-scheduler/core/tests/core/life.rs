//! What happens in a world, and what its clients do about it.

use nvshare_core::{Event, Identity};
use nvshare_proto::{ClientMessage, Epoch, Gate, Hold, MemoryMode, Register, Room, SchedulerMessage};

use crate::model::{Model, State};
use crate::world::{GIB, Later, MS, World};

impl World {
    pub(crate) fn happen(&mut self, what: Later) {
        match what {
            Later::Start(i) => {
                let now = self.now;
                let model = &mut self.models[i];
                model.connected = true;
                if model.plan.runs_already {
                    model.resident.values_mut().for_each(|bytes| *bytes = model.allocated);
                    model.state = State::Running(Epoch { boot: 0, counter: 0 });
                    model.since = now;
                }
                let gate = if model.plan.runs_already { Gate::Open } else { Gate::Closed };
                let register = Register {
                    pid: 1000 + i as u32,
                    name: format!("model{i}"),
                    memory: MemoryMode::Managed,
                    gate,
                    returns: false,
                    run: None,
                    usage: self.models[i].plan.gpus.clone().into_iter().map(|g| self.usage(i, g)).collect(),
                    asked: self.models[i].plan.asked.clone(),
                };
                let identity = Identity {
                    pid: Some(register.pid),
                    process: Some(i as u64),
                    tenant: self.models[i].plan.tenant,
                    gang: self.models[i].plan.gang,
                };
                self.event(Event::Registered { client: i as u64, identity, register });
                self.at(self.now, Later::Work(i));
            }
            Later::Die(i) => {
                self.models[i].connected = false;
                self.event(Event::Disconnected { client: i as u64, process_remains: true });
                self.after(100, 50_000, Later::Exited(i));
            }
            Later::Exited(i) => {
                self.models[i].dead = true;
                self.event(Event::Exited { client: i as u64 });
            }
            Later::Say(i, message) => {
                if self.models[i].connected {
                    self.event(Event::Message { client: i as u64, message });
                }
            }
            Later::Deliver(i, message) => {
                if self.models[i].connected {
                    self.obey(i, message);
                    self.check();
                }
            }
            Later::Restored(i, epoch) => {
                if self.models[i].connected && self.models[i].state == State::Restoring(epoch) {
                    self.begin(i, epoch);
                }
            }
            Later::Drained(i, epoch) => {
                let leaving = [State::Draining(epoch), State::Withdrawing(epoch)];
                if self.models[i].connected && leaving.contains(&self.models[i].state) {
                    self.drained(i, epoch);
                }
            }
            Later::GivenUp(i, epoch) => {
                if self.models[i].connected && self.models[i].state == State::Draining(epoch) {
                    self.account(i);
                    self.models[i].state = State::Running(epoch);
                    self.say(i, ClientMessage::DropDeferred { epoch });
                    self.at(self.now, Later::Work(i));
                }
            }
            Later::Work(i) => {
                if self.models[i].connected {
                    self.work(i);
                }
            }
            Later::Measure(measured) => self.event(Event::Measured(measured)),
        }
    }

    pub(crate) fn begin(&mut self, i: usize, epoch: Epoch) {
        let mut lacking = Vec::new();
        for gpu in self.models[i].plan.gpus.clone() {
            let model = &mut self.models[i];
            let absent = model.allocated - model.resident[&gpu];
            let room = model.room.get_mut(&gpu).unwrap();
            let brought = absent.min(*room);
            *room -= brought;
            *model.resident.get_mut(&gpu).unwrap() += brought;
            if brought < absent {
                lacking.push(ClientMessage::NeedRoom(Room { gpu, bytes: model.allocated }));
            }
        }
        if !lacking.is_empty() {
            // Only who had begun to leave when it was told to go on has given some of its room back.
            assert!(self.models[i].recalled, "granted without the room for what is absent");
            self.models[i].needs = true;
            self.tell_usage(i);
            lacking.into_iter().for_each(|message| self.say(i, message));
            return;
        }
        let now = self.now;
        let model = &mut self.models[i];
        model.needs = false;
        model.state = State::Running(epoch);
        model.since = now;
        if let Some(since) = model.wanted_since.take() {
            model.longest_wait = model.longest_wait.max(now - since);
        }
        self.say(i, ClientMessage::Running { epoch });
        self.at(self.now, Later::Work(i));
    }

    pub(crate) fn drained(&mut self, i: usize, epoch: Epoch) {
        self.account(i);
        self.models[i].state = State::Parked;
        self.models[i].needs = false;
        self.tell_usage(i);
        for gpu in self.models[i].plan.gpus.clone() {
            let unused = std::mem::take(self.models[i].room.get_mut(&gpu).unwrap());
            if unused > 0 {
                self.say(i, ClientMessage::Room(Room { gpu, bytes: unused }));
            }
        }
        self.say(i, ClientMessage::LockReleased { epoch });
        self.at(self.now, Later::Work(i));
    }

    /// Whether a rank's work waits for another one of its gang that does not run.
    fn waits_for_partner(&self, i: usize) -> bool {
        let Some(gang) = self.models[i].plan.gang else { return false };
        let started =
            |m: &&Model| m.connected && !m.dead && m.plan.gang.is_some_and(|g| g.number == gang.number);
        let runs = |m: &Model| matches!(m.state, State::Running(_) | State::Draining(_) | State::Idle(_));
        // Before all of them are there, they have nothing to wait for.
        let all = self.models.iter().filter(|m| m.plan.gang.is_some_and(|g| g.number == gang.number)).count();
        let there = self.models.iter().filter(started).count();
        there == all && !self.models.iter().filter(started).all(runs)
    }

    /// Time on the GPU counts as work done.
    pub(crate) fn account(&mut self, i: usize) {
        let now = self.now;
        let model = &mut self.models[i];
        if matches!(model.state, State::Running(_)) {
            model.served += now - model.since;
            model.since = now;
        }
    }

    /// The program's own life.
    pub(crate) fn work(&mut self, i: usize) {
        self.account(i);
        let now = self.now;
        let model = &mut self.models[i];
        let has_work = model.served < MS(model.plan.work) && now >= model.paused_until;
        match model.state {
            State::Parked | State::Idle(_) if has_work && !model.asked => {
                model.asked = true;
                model.wanted_since.get_or_insert(now);
                self.tell_usage(i);
                self.say(i, ClientMessage::ReqLock);
            }
            State::Parked | State::Idle(_) if now < model.paused_until => {
                let until = model.paused_until;
                self.at(until, Later::Work(i));
            }
            State::Running(epoch) => {
                if model.plan.exits && model.served >= MS(model.plan.work) {
                    self.end(i);
                    return;
                }
                if !has_work {
                    if model.waiters && !model.needs {
                        model.state = State::Idle(epoch);
                        self.say(i, ClientMessage::Idle { epoch });
                        if now < self.models[i].paused_until {
                            let until = self.models[i].paused_until;
                            self.at(until, Later::Work(i));
                        }
                    } else if now < model.paused_until {
                        let until = model.paused_until;
                        self.at(until, Later::Work(i));
                    }
                    return;
                }
                if let Some(every) = model.plan.grows_every
                    && model.served >= model.grown_at + MS(every)
                    && model.may_grow()
                {
                    model.grown_at = model.served;
                    self.grow(i);
                }
                let model = &mut self.models[i];
                if model.plan.pause > 0 {
                    model.paused_until = now + MS(100 + model.plan.pause);
                }
                self.at(now + MS(100), Later::Work(i));
            }
            _ => {}
        }
    }

    /// The program ends, with everything that it had, and the next one of its shell starts.
    fn end(&mut self, i: usize) {
        self.models[i].connected = false;
        self.models[i].dead = true;
        self.event(Event::Disconnected { client: i as u64, process_remains: false });
        let next = self.models.iter().position(|model| model.plan.after == Some(i));
        if let Some(next) = next {
            self.at(self.now + MS(10), Later::Start(next));
        }
    }

    pub(crate) fn grow(&mut self, i: usize) {
        let gpus = self.models[i].plan.gpus.clone();
        if gpus.iter().all(|g| self.models[i].room[g] >= GIB) {
            self.models[i].allocated += GIB;
            for g in gpus {
                *self.models[i].room.get_mut(&g).unwrap() -= GIB;
                *self.models[i].resident.get_mut(&g).unwrap() += GIB;
            }
        } else {
            self.models[i].needs = true;
            self.tell_usage(i);
            for gpu in gpus {
                if self.models[i].room[&gpu] < GIB {
                    let bytes = self.models[i].resident[&gpu] + GIB;
                    self.say(i, ClientMessage::NeedRoom(Room { gpu, bytes }));
                }
            }
        }
    }

    pub(crate) fn obey(&mut self, i: usize, message: SchedulerMessage) {
        self.account(i);
        match message {
            SchedulerMessage::Registered { hold: Hold::Running(epoch), .. } => {
                assert!(self.models[i].plan.runs_already);
                self.models[i].state = State::Running(epoch);
            }
            SchedulerMessage::Registered { hold, .. } => assert_eq!(hold, Hold::Parked),
            SchedulerMessage::LockOk { epoch, room, .. } => {
                self.models[i].recalled = room.is_empty();
                for Room { gpu, bytes } in room {
                    *self.models[i].room.get_mut(&gpu).unwrap() += bytes;
                }
                self.models[i].asked = false;
                self.models[i].state = State::Restoring(epoch);
                let moves = self.models[i].resident.values().any(|&bytes| bytes < self.models[i].allocated);
                let most = if self.models[i].plan.quick && !moves { 500 } else { 400_000 };
                self.after(10, most, Later::Restored(i, epoch));
            }
            SchedulerMessage::DropLock { epoch, patience_ms } => match self.models[i].state {
                State::Running(current) | State::Restoring(current) if current == epoch => {
                    self.models[i].drains += 1;
                    let defers = self.models[i]
                        .plan
                        .defers_every
                        .is_some_and(|n| self.models[i].drains.is_multiple_of(n));
                    // What waits for a rank whose gate is closed does not end.
                    let takes =
                        if self.waits_for_partner(i) { u64::MAX } else { self.models[i].plan.drains_in };
                    if defers && matches!(self.models[i].state, State::Running(_)) {
                        self.say(i, ClientMessage::DropDeferred { epoch });
                    } else if self.models[i].plan.drains_slowly {
                        self.models[i].state = State::Draining(epoch);
                        self.at(self.now + MS(takes), Later::Drained(i, epoch));
                    } else if takes > 0 && matches!(self.models[i].state, State::Running(_)) {
                        self.models[i].state = State::Draining(epoch);
                        let patience = u64::from(patience_ms);
                        if takes > patience {
                            self.at(self.now + MS(patience), Later::GivenUp(i, epoch));
                        } else {
                            self.at(self.now + MS(takes), Later::Drained(i, epoch));
                        }
                    } else {
                        let ran = matches!(self.models[i].state, State::Running(_));
                        self.models[i].state =
                            if ran { State::Draining(epoch) } else { State::Withdrawing(epoch) };
                        let most = if self.models[i].plan.quick { 20_000 } else { 60_000 };
                        self.after(10, most, Later::Drained(i, epoch));
                    }
                }
                _ => {}
            },
            SchedulerMessage::Evict(Room { gpu, bytes }) => {
                if let State::Idle(_) = self.models[i].state {
                    self.models[i].state = State::Parked;
                }
                let parked = self.models[i].state == State::Parked;
                let model = &mut self.models[i];
                let room = model.room.get_mut(&gpu).unwrap();
                let unused = bytes.min(*room);
                *room -= unused;
                let resident = model.resident.get_mut(&gpu).unwrap();
                let moved =
                    if parked && !model.plan.cannot_evict { (bytes - unused).min(*resident) } else { 0 };
                *resident -= moved;
                let short = if parked { bytes - unused - moved } else { 0 };
                self.tell_usage(i);
                for bytes in [unused, moved / 2, moved - moved / 2] {
                    if bytes > 0 {
                        self.say(i, ClientMessage::Room(Room { gpu, bytes }));
                    }
                }
                self.say(i, ClientMessage::Evicted { gpu, short });
            }
            SchedulerMessage::Room(Room { gpu, bytes }) => {
                *self.models[i].room.get_mut(&gpu).unwrap() += bytes;
                if self.models[i].needs {
                    self.models[i].needs = false;
                    match self.models[i].state {
                        // It may have less than when it asked.
                        State::Running(_) if !self.models[i].may_grow() => {}
                        State::Running(_) => self.grow(i),
                        State::Restoring(epoch) => self.begin(i, epoch),
                        _ => {}
                    }
                }
            }
            SchedulerMessage::NoRoom { gpu } => {
                let model = &mut self.models[i];
                let restored = model.resident[&gpu] == model.allocated || !model.recalled;
                assert!(restored || !model.needs, "called back where there is no room");
                model.needs = false;
                let excused = |m: &Model| m.plan.cannot_evict || m.plan.dies_at.is_some();
                assert!(self.models.iter().any(excused), "no room, though everybody gives way");
            }
            SchedulerMessage::Waiters { waiting } => {
                self.models[i].waiters = waiting;
                self.at(self.now, Later::Work(i));
            }
            SchedulerMessage::Capacity(Room { gpu, bytes }) => {
                self.models[i].capacity.insert(gpu, bytes.min(self.most));
            }
            SchedulerMessage::Quota { .. }
            | SchedulerMessage::Limit(_)
            | SchedulerMessage::AskCounters
            | SchedulerMessage::Pong => {}
            SchedulerMessage::SchedOff | SchedulerMessage::SchedOn { .. } => {
                unreachable!("nobody switches here")
            }
        }
    }
}
