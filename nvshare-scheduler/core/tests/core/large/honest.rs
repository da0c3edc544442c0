//! A client that does what the protocol says, in times of its own.

use std::time::Duration;

use nvshare_core::{Gang, Identity};
use nvshare_proto::{
    Amount, ClientMessage, Epoch, Gate, InitialState, MemoryMode, Register, SchedulerMessage, Usage, Wishes,
};

use super::{Act, Behaviour, Plan, Seen};
use crate::table::{CAPACITY, GIB, MS, gpu};

/// Numbers of its own acts.
const RESTORED: u64 = 1;
const DRAINED: u64 = 2;
const GIVES_UP: u64 = 3;
const PAUSES: u64 = 4;
const WORKS: u64 = 5;
const GIVES_BACK: u64 = 7;

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    Parked,
    Restoring(Epoch),
    Running(Epoch),
    Draining(Epoch),
    Idle(Epoch),
}

/// How one differs from another. Times in milliseconds.
#[derive(Debug, Clone)]
pub(crate) struct Honest {
    pub(crate) gpu: u8,
    pub(crate) gib: u64,
    pub(crate) restores_in: u64,
    pub(crate) drains_in: u64,
    pub(crate) evicts_in: u64,
    /// One of this number of drains is given up; 0: none.
    pub(crate) defers_every: u64,
    /// It works for `works` and then pauses for `pauses`, again and again. `works` is 0: it never pauses.
    pub(crate) works: u64,
    pub(crate) pauses: u64,
    /// It gives the lock back by itself after so much work, and asks again at once; 0: never.
    pub(crate) gives_back: u64,
    /// Its program ends after so much work, and the next one starts so much later.
    pub(crate) ends_after: Option<(u64, u64)>,
    /// The GiB of an allocation that waits for room while it is parked, once.
    pub(crate) needs_parked: u64,
    pub(crate) tenant: Option<u64>,
    pub(crate) gang: Option<Gang>,
    /// The part of the GPU's time that it asks for.
    pub(crate) asked: Wishes,
    pub(crate) now: Now,
}

/// Where it stands.
#[derive(Debug, Clone)]
pub(crate) struct Now {
    state: State,
    allocated: u64,
    resident: u64,
    room: u64,
    asked: Option<Duration>,
    contested: bool,
    drains: u64,
    pausing: bool,
    /// It counts what it plans, so that what was planned before something else is void.
    turn: u64,
    worked: Duration,
    since: Duration,
}

impl Honest {
    pub(crate) fn new(on: u8, gib: u64) -> Self {
        let now = Now {
            state: State::Parked,
            allocated: 0,
            resident: 0,
            room: 0,
            asked: None,
            contested: false,
            drains: 0,
            pausing: false,
            turn: 0,
            worked: Duration::ZERO,
            since: Duration::ZERO,
        };
        Self {
            gpu: on,
            gib,
            restores_in: 100,
            drains_in: 20,
            evicts_in: 0,
            defers_every: 0,
            works: 0,
            pauses: 0,
            gives_back: 0,
            ends_after: None,
            needs_parked: 0,
            tenant: None,
            gang: None,
            asked: Wishes::default(),
            now,
        }
    }

    fn usage(&self) -> Usage {
        let Now { allocated, resident, .. } = self.now;
        let absent = allocated - resident;
        Usage { gpu: gpu(self.gpu), total: CAPACITY, limit: 0, allocated, absent, immovable: 0 }
    }

    fn say(&self, message: ClientMessage) -> (Duration, Act) {
        (Duration::from_micros(30), Act::Say(message))
    }

    fn own(&self, ms: u64, what: u64) -> (Duration, Act) {
        (MS(ms), Act::Own(what << 32 | self.now.turn))
    }

    fn asks(&mut self, now: Duration) -> Plan {
        self.now.asked = self.now.asked.or(Some(now));
        vec![self.say(ClientMessage::Usage(self.usage())), self.say(ClientMessage::ReqLock)]
    }

    fn stops_working(&mut self, now: Duration) {
        if let State::Running(_) = self.now.state {
            self.now.worked += now.saturating_sub(self.now.since);
            self.now.since = now;
        }
    }

    /// Its gate is closed and its work complete: what room it has not used is given back.
    fn leaves(&mut self, epoch: Epoch, now: Duration) -> Plan {
        self.now.state = State::Parked;
        self.now.turn += 1;
        let bytes = std::mem::take(&mut self.now.room);
        let mut plan = Vec::new();
        if bytes > 0 {
            plan.push(self.say(ClientMessage::Room(Amount { gpu: gpu(self.gpu), bytes })));
        }
        plan.push(self.say(ClientMessage::LockReleased { epoch }));
        if self.now.pausing {
            plan.push(self.say(ClientMessage::Usage(self.usage())));
            return plan;
        }
        plan.append(&mut self.asks(now));
        if self.needs_parked > 0 {
            let bytes = std::mem::take(&mut self.needs_parked) * GIB + self.now.resident;
            plan.push(self.say(ClientMessage::NeedRoom(Amount { gpu: gpu(self.gpu), bytes })));
        }
        plan
    }

    /// The acts that end its work if nobody interrupts it.
    fn works_on(&self) -> Plan {
        let mut plan = Vec::new();
        if self.works > 0 && !self.now.pausing {
            plan.push(self.own(self.works, PAUSES));
        }
        if self.gives_back > 0 {
            plan.push(self.own(self.gives_back, GIVES_BACK));
        }
        if let Some((work, again)) = self.ends_after {
            let left = MS(work).saturating_sub(self.now.worked);
            plan.push((left, Act::Own(again << 40 | self.now.turn | 6 << 32)));
        }
        plan
    }

    fn introduces_itself(&self, client: u64, gate: Gate, returns: bool) -> (Identity, Register) {
        let register = Register {
            asked: self.asked.clone(),
            pid: client as u32,
            name: "honest".into(),
            // The memory of every other one comes while that of others leaves.
            memory: if client.is_multiple_of(2) { MemoryMode::Swap } else { MemoryMode::Managed },
            gate,
            returns,
            run: None,
            usage: vec![self.usage()],
        };
        let identity = Identity {
            pid: Some(client as u32),
            process: Some(client),
            tenant: self.tenant,
            gang: self.gang,
        };
        (identity, register)
    }

    fn pause(&mut self, epoch: Epoch) -> Plan {
        if self.now.pausing && self.now.contested {
            self.now.state = State::Idle(epoch);
            return vec![self.say(ClientMessage::Idle { epoch })];
        }
        Vec::new()
    }
}

impl Behaviour for Honest {
    fn begins(&mut self, client: u64, now: Duration) -> (Identity, Register, Plan) {
        let turn = self.now.turn + 1;
        self.now = Now { turn, allocated: self.gib * GIB, ..Self::new(0, 0).now };
        let (identity, register) = self.introduces_itself(client, Gate::Closed, false);
        let plan = self.asks(now);
        (identity, register, plan)
    }

    fn returns(&mut self, client: u64, now: Duration) -> (Identity, Register, Plan) {
        self.stops_working(now);
        // Room that was given and not used is lost.
        (self.now.room, self.now.contested) = (0, false);
        self.now.turn += 1;
        let runs = matches!(self.now.state, State::Running(_) | State::Draining(_));
        let mut plan = if self.now.pausing { vec![self.own(self.pauses, WORKS)] } else { Vec::new() };
        if runs {
            self.now.state = State::Running(Epoch { boot: 0, counter: 0 });
            plan.append(&mut self.works_on());
        } else {
            self.now.state = State::Parked;
            if !self.now.pausing {
                plan.append(&mut self.asks(now));
            }
        }
        let gate = if runs { Gate::Open } else { Gate::Closed };
        let (identity, register) = self.introduces_itself(client, gate, true);
        (identity, register, plan)
    }

    fn hears(&mut self, message: SchedulerMessage, now: Duration) -> Plan {
        self.stops_working(now);
        match message {
            SchedulerMessage::Registered { hold: InitialState::Running(epoch), .. } => {
                if let State::Running(_) = self.now.state {
                    self.now.state = State::Running(epoch);
                }
                Vec::new()
            }
            SchedulerMessage::LockOk { epoch, room, .. } => {
                self.now.room += room.iter().map(|room| room.bytes).sum::<u64>();
                self.now.state = State::Restoring(epoch);
                self.now.turn += 1;
                vec![self.own(self.restores_in, RESTORED)]
            }
            SchedulerMessage::DropLock { epoch, patience_ms } => match self.now.state {
                State::Running(current) if current == epoch => {
                    self.now.drains += 1;
                    self.now.state = State::Draining(epoch);
                    self.now.turn += 1;
                    let defers = self.defers_every > 0 && self.now.drains.is_multiple_of(self.defers_every);
                    if defers {
                        vec![self.own(patience_ms.into(), GIVES_UP)]
                    } else {
                        vec![self.own(self.drains_in, DRAINED)]
                    }
                }
                State::Restoring(current) if current == epoch => self.leaves(epoch, now),
                _ => Vec::new(),
            },
            SchedulerMessage::Evict(Amount { bytes, .. }) => {
                if let State::Idle(_) = self.now.state {
                    self.now.state = State::Parked;
                }
                let unused = bytes.min(self.now.room);
                let parked = self.now.state == State::Parked;
                let moved = if parked { (bytes - unused).min(self.now.resident) } else { 0 };
                self.now.room -= unused;
                self.now.resident -= moved;
                let room = Amount { gpu: gpu(self.gpu), bytes: unused + moved };
                let mut plan = vec![
                    self.say(ClientMessage::Usage(self.usage())),
                    self.say(ClientMessage::Room(room)),
                    self.say(ClientMessage::Evicted { gpu: room.gpu, short: 0 }),
                ];
                if moved > 0 {
                    plan.iter_mut().for_each(|(after, _)| *after += MS(self.evicts_in));
                }
                plan
            }
            SchedulerMessage::Room(Amount { bytes, .. })
            | SchedulerMessage::Restore(Amount { bytes, .. }) => {
                self.now.room += bytes;
                Vec::new()
            }
            SchedulerMessage::Waiters { waiting } => {
                self.now.contested = waiting;
                match self.now.state {
                    State::Running(epoch) => self.pause(epoch),
                    _ => Vec::new(),
                }
            }
            _ => Vec::new(),
        }
    }

    fn does(&mut self, what: u64, now: Duration) -> Plan {
        self.stops_working(now);
        let (what, turn) = (what >> 32, what & 0xffff_ffff);
        match (what, self.now.state) {
            // Pauses go on whatever becomes of the lock.
            (WORKS, _) => {
                self.now.pausing = false;
                match self.now.state {
                    State::Parked | State::Idle(_) => self.asks(now),
                    State::Running(_) if self.works > 0 => vec![self.own(self.works, PAUSES)],
                    _ => Vec::new(),
                }
            }
            _ if turn != self.now.turn => Vec::new(),
            (RESTORED, State::Restoring(epoch)) => {
                let brought = (self.now.allocated - self.now.resident).min(self.now.room);
                self.now.room -= brought;
                self.now.resident += brought;
                self.now.state = State::Running(epoch);
                self.now.since = now;
                self.now.asked = None;
                let mut plan = vec![
                    self.say(ClientMessage::Running { epoch }),
                    self.say(ClientMessage::Usage(self.usage())),
                ];
                plan.append(&mut self.works_on());
                plan
            }
            (DRAINED, State::Draining(epoch)) | (GIVES_BACK, State::Running(epoch)) => {
                self.leaves(epoch, now)
            }
            (GIVES_UP, State::Draining(epoch)) => {
                self.now.state = State::Running(epoch);
                vec![self.say(ClientMessage::DropDeferred { epoch })]
            }
            (PAUSES, State::Running(epoch)) => {
                self.now.pausing = true;
                let mut plan = self.pause(epoch);
                plan.push(self.own(self.pauses, WORKS));
                plan
            }
            (ends, State::Running(_)) if ends & 0xff == 6 => {
                vec![(Duration::ZERO, Act::End(Some(MS(ends >> 8))))]
            }
            _ => Vec::new(),
        }
    }

    fn seen(&self) -> Seen {
        let holds = !matches!(self.now.state, State::Parked | State::Idle(_));
        Seen {
            gpu: self.gpu,
            resident: Some(self.now.resident + self.now.room),
            holds,
            restores: matches!(self.now.state, State::Restoring(_)),
            waits_since: self.now.asked,
        }
    }
}
