//! A process that goes off the card, and comes back.
//!
//! It stays parked all the while. The mover makes the driver's calls. Until the process is back, nothing may be done that needs the
//! driver. Messages that come while the mover tries to go are kept until it is known whether the process stays. A process that has gone
//! is brought back by WAKE alone: the scheduler knows where there is memory for it. Its messages from before it heard ASLEEP are
//! void, and it says what is true when the process is back.
//!
//! A call of the program that waits asks the scheduler for the way back, since the card may be full. If none answers for
//! [`WAKE_PATIENCE`](super::patience::WAKE_PATIENCE), the process comes back on its own. A scheduler that sends it to another GPU knows that there is memory.
//! The process registers anew then, as one that sleeps there. It asks for its way back there, also if no call waits: an administrator may have
//! sent for it.

use std::time::Duration;

use nvshare_proto::{ClientMessage, InitialState, SchedulerMessage};

use super::{Action, Machine, MoverOrder, Phase};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Stage {
    #[default]
    Awake,
    /// The mover tries to go.
    Falling,
    Asleep,
    /// The mover brings the process back.
    Waking,
}

#[derive(Debug, Default)]
pub(super) struct Sleeper {
    stage: Stage,
    /// Since when a call of the program waits for the way back.
    wanted_since: Option<Duration>,
    /// The process was sent to another GPU, to come back there. It says so on each connection until it is back.
    is_sent_for: bool,
    /// WAKE_WANTED is said on this connection.
    is_said: bool,
    /// The process is to come back as soon as it is asleep.
    is_called: bool,
    /// The process is on its own as soon as it is awake.
    is_alone: bool,
    /// Messages that are kept until the process is awake.
    kept: Vec<SchedulerMessage>,
}

impl Sleeper {
    pub(super) fn is_awake(&self) -> bool {
        self.stage == Stage::Awake
    }

    /// Whether a call of the program waits for the way back.
    pub(super) fn is_wanted(&self) -> bool {
        self.wanted_since.is_some()
    }

    /// The time from which the silence of the scheduler counts that began at `since`. `None`: nothing waits for it.
    pub(super) fn counts_from(&self, since: Duration) -> Option<Duration> {
        match self.stage {
            Stage::Awake => Some(since),
            Stage::Asleep => self.wanted_since.map(|wanted| wanted.max(since)),
            Stage::Falling | Stage::Waking => None,
        }
    }
}

impl Machine {
    /// Whether the process is off the card, or on its way there or back.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        !self.sleeper.is_awake()
    }

    /// Does what a message asks of the sleep. While the process is not awake, it also keeps messages until that is over, or voids
    /// them: see the [module's documentation](self). Returns a message that is not for the sleep, and has its effect now.
    pub(super) fn let_sleeper_take(
        &mut self,
        message: SchedulerMessage,
        now: Duration,
    ) -> Option<SchedulerMessage> {
        use SchedulerMessage as M;
        if matches!(message, M::SchedOn { .. }) {
            // It registered while scheduling was off.
            self.sleeper.is_alone = false;
        }
        match (self.sleeper.stage, message) {
            (_, M::Sleep) => self.fall_asleep(),
            (_, M::Wake) => self.come_back(),
            (Stage::Asleep, M::Move { from, to }) => {
                self.sleeper.is_sent_for = true;
                self.act(Action::ChangePlaces { gpus: [from, to] });
                self.register_anew(now);
            }
            (Stage::Awake, message) => return Some(message),
            // Nothing that moves is on the card.
            (Stage::Asleep, M::Evict(room)) => self.act(Action::Return { room, evict: false }),
            (_, message @ M::Evict(_)) => self.sleeper.kept.push(message),
            (stage, message @ (M::LockOk { .. } | M::Restore(_) | M::SchedOff | M::SchedOn { .. })) => {
                if stage == Stage::Falling {
                    self.sleeper.kept.push(message);
                } else {
                    self.take_room_of(message);
                }
            }
            (_, message) => return Some(message),
        }
        None
    }

    /// Takes the room that comes with a void message. It is unused, so it goes back.
    fn take_room_of(&mut self, message: SchedulerMessage) {
        let room = match message {
            SchedulerMessage::LockOk { room, .. } => room,
            SchedulerMessage::Restore(room) => vec![room],
            _ => Vec::new(),
        };
        room.into_iter().for_each(|room| self.act(Action::Give(room)));
    }

    fn fall_asleep(&mut self) {
        match self.sleeper.stage {
            Stage::Awake
                if matches!(self.phase, Phase::Parked | Phase::Idle { .. }) && !self.threads_wait =>
            {
                // The scheduler has taken the lock of one that is idle, without a word.
                self.phase = Phase::Parked;
                self.sleeper.stage = Stage::Falling;
                self.act(Action::Post(MoverOrder::Sleep));
            }
            Stage::Falling => {}
            Stage::Asleep => self.act(Action::Send(ClientMessage::Asleep)),
            Stage::Awake | Stage::Waking => self.act(Action::Send(ClientMessage::CannotSleep {
                reason: "it is at work".to_owned(),
                for_good: false,
            })),
        }
    }

    fn come_back(&mut self) {
        match self.sleeper.stage {
            Stage::Awake | Stage::Waking => {}
            Stage::Falling => self.sleeper.is_called = true,
            Stage::Asleep => {
                self.sleeper.stage = Stage::Waking;
                self.act(Action::Post(MoverOrder::Wake));
            }
        }
    }

    /// The process is on its own. If it is not awake, it is so when it has come back: true.
    pub(super) fn comes_back_first(&mut self) -> bool {
        if self.sleeper.is_awake() {
            return false;
        }
        self.sleeper.is_alone = true;
        self.come_back();
        true
    }

    /// The mover has taken the process off the card.
    pub(super) fn slept(&mut self, now: Duration) {
        self.sleeper.stage = Stage::Asleep;
        self.act(Action::Send(ClientMessage::Asleep));
        for message in std::mem::take(&mut self.sleeper.kept) {
            self.let_sleeper_take(message, now);
        }
        // A thread had passed the door before it closed, and came to the gate.
        if self.threads_wait {
            self.calls_waiting(now);
        }
        if std::mem::take(&mut self.sleeper.is_called) {
            self.come_back();
        }
    }

    /// The connection is gone. Its messages are not valid any more.
    pub(super) fn forget_kept(&mut self) {
        self.sleeper.kept.clear();
    }

    /// The mover could not take the process off the card.
    pub(super) fn stayed(&mut self, reason: String, for_good: bool, now: Duration) {
        self.act(Action::Send(ClientMessage::CannotSleep { reason, for_good }));
        self.go_on(now);
    }

    /// The mover has brought the process back.
    pub(super) fn came_back(&mut self, took: Duration, now: Duration) {
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.act(Action::Send(ClientMessage::Awake { took_us }));
        self.go_on(now);
    }

    /// Registers again, as one that is asleep. Until a scheduler answers, it counts as lost: nobody else keeps memory free for the way back.
    fn register_anew(&mut self, now: Duration) {
        self.silent_since.get_or_insert(now);
        self.reconnect();
    }

    /// The driver has refused the GPU to which the process was sent. It sleeps on, and the scheduler learns that its own GPU is to have
    /// room for it.
    pub(super) fn moved_back(&mut self, now: Duration) {
        self.sleeper.stage = Stage::Asleep;
        if self.connected {
            self.register_anew(now);
        } else if self.sleeper.is_alone {
            self.come_back();
        }
    }

    /// The process is awake: what was kept has its effect.
    fn go_on(&mut self, now: Duration) {
        let Sleeper { is_alone, kept, .. } = std::mem::take(&mut self.sleeper);
        for message in kept {
            self.message(message, now);
        }
        if is_alone {
            self.go_alone();
        } else {
            self.ask();
        }
    }

    /// Calls of the program wait for the way back.
    pub(super) fn calls_waiting(&mut self, now: Duration) {
        if self.sleeper.stage == Stage::Asleep {
            self.sleeper.wanted_since.get_or_insert(now);
            self.say_wanted();
        }
    }

    /// Asks for the way back, once on each connection.
    fn say_wanted(&mut self) {
        let is_to_come = self.sleeper.is_wanted() || self.sleeper.is_sent_for;
        let is_new = self.sleeper.stage == Stage::Asleep && is_to_come && !self.sleeper.is_said;
        if is_new && self.connected {
            self.sleeper.is_said = true;
            self.act(Action::Send(ClientMessage::WakeWanted));
        }
    }

    /// A scheduler has registered the process. Returns whether it sleeps, so that all else waits until it is awake.
    pub(super) fn registered_asleep(&mut self, hold: InitialState) -> bool {
        if self.sleeper.is_awake() {
            return false;
        }
        self.sleeper.is_alone = hold == InitialState::Free;
        self.sleeper.is_said = false;
        if self.sleeper.stage != Stage::Falling {
            self.act(Action::Send(ClientMessage::Asleep));
        }
        self.say_wanted();
        true
    }
}
