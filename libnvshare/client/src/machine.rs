//! The client's side of the protocol: a state machine that takes an [`Input`] and returns [`Action`]s. It obeys the
//! scheduler, and decides on its own only while there is none.
//!
//! Times are durations since one moment that the caller has chosen, the same for all calls.

mod idleness;
mod io;
mod patience;
mod sleeping;

use std::time::Duration;

use nvshare_proto::{Amount, ClientMessage, Epoch, Gate, InitialState, SchedulerMessage};

use crate::launch_window::InFlight;
use idleness::Idleness;
use patience::PING_AFTER;
use sleeping::Sleeper;

pub use io::{Action, Input, MoverOrder, Ticket};
pub use patience::RETURN_PATIENCE;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The gate is closed.
    Parked,
    /// The gate is closed, and the process gets the lock soon: memory comes back as others' memory leaves.
    Next,
    /// The lock is granted; memory comes back.
    Restoring { epoch: Epoch },
    /// The gate is open.
    Running { epoch: Epoch },
    /// The gate is closed again; work completes.
    Draining { epoch: Epoch, patience: Duration, progress: u64, since: Duration },
    /// The gate is closed, nothing is under way, and the process may or may not still have the lock.
    Idle { epoch: Epoch },
    /// The process is on its own: there is no scheduler, or scheduling is off. Memory comes back and the gate opens.
    Freeing,
    /// The process is on its own, and the gate is open.
    Free,
}

/// A restore ahead of the lock ends when no more room has come for this long. The process may not be next any more, which it is not
/// told. More room begins another one.
pub const ROOM_IS_LATE: Duration = Duration::from_secs(1);
/// Time between two ticks after which the process itself was away: stopped by a signal, or with its whole machine. The scheduler may
/// have answered long ago.
const AWAY: Duration = Duration::from_secs(2);

/// How long a drain that nobody asked for may make no progress.
const OWN_PATIENCE: Duration = Duration::from_millis(200);

/// Restores after which memory that is still absent is left to page faults.
const MAX_ATTEMPTS: u32 = 1000;

/// See the [module's documentation](self).
#[derive(Debug)]
pub struct Machine {
    phase: Phase,
    connected: bool,
    /// The time since when no scheduler answers: it is lost, or has not answered REGISTER or PING.
    silent_since: Option<Duration>,
    /// When the last tick was.
    ticked_at: Duration,
    /// When the scheduler last said something or was asked.
    heard_at: Duration,
    last_drain: Ticket,
    /// The gate has closed over work that is not known to be complete, and nobody waits for its completion.
    has_undrained: bool,
    /// REQ_LOCK is sent and not answered.
    lock_requested: bool,
    /// Threads of the program sleep at the gate. Whether the process is off the card is in `sleeper`.
    threads_wait: bool,
    /// Another client waits for the lock or memory of this one.
    waiters: bool,
    idleness: Idleness,
    /// Restores since the grant.
    attempts: u32,
    /// The user has been told that there is no scheduler.
    warned: bool,
    /// A scheduler has answered REGISTER, this one or an earlier one.
    was_answered: bool,
    /// The user has been told that the program waits for an answer.
    said_waiting: bool,
    /// When the scheduler was lost without which the process runs on its own now, for as long as it is expected back.
    expects_since: Option<Duration>,
    sleeper: Sleeper,
    actions: Vec<Action>,
}

impl Machine {
    /// A machine that has neither connected nor been asked for anything.
    #[must_use]
    pub fn new(now: Duration) -> Self {
        Self {
            phase: Phase::Parked,
            connected: false,
            silent_since: None,
            ticked_at: now,
            heard_at: now,
            last_drain: 0,
            has_undrained: false,
            lock_requested: false,
            threads_wait: false,
            waiters: false,
            idleness: Idleness::new(now),
            attempts: 0,
            warned: false,
            was_answered: false,
            said_waiting: false,
            expects_since: None,
            sleeper: Sleeper::default(),
            actions: Vec::new(),
        }
    }

    /// The gate's state for REGISTER. A process with work in flight counts as one that runs: it has to be told to
    /// drain before its memory leaves.
    #[must_use]
    pub fn gate(&self) -> Gate {
        if self.phase == Phase::Free || self.has_undrained { Gate::Open } else { Gate::Closed }
    }

    /// Time until the machine wants a tick; `None`: time does not matter. `lacking`: allocations wait for room.
    #[must_use]
    pub fn next_tick(&self, lacking: bool, now: Duration) -> Option<Duration> {
        match self.phase {
            Phase::Draining { .. } => Some(Duration::from_millis(5)),
            Phase::Running { .. } if self.waiters => self.idleness.next_look(now),
            _ if !self.connected => Some(Duration::from_millis(250)),
            Phase::Parked | Phase::Next | Phase::Idle { .. } if lacking => Some(Duration::from_secs(1)),
            Phase::Parked | Phase::Next | Phase::Idle { .. } | Phase::Restoring { .. } if self.waits() => {
                let ping = (self.heard_at + PING_AFTER).saturating_sub(now);
                Some(if self.silent_since.is_some() { Duration::from_secs(1) } else { ping })
            }
            _ => None,
        }
    }

    /// Whether the process runs under a grant.
    #[must_use]
    pub fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running { .. })
    }

    /// How much work may be in flight from the moment that the gate opens. Before a later message could bound it, a program
    /// could submit seconds of work.
    #[must_use]
    pub fn in_flight(&self) -> InFlight {
        InFlight::while_others_wait(self.waiters && self.is_restoring())
    }

    /// Whether the process's memory is on its way back.
    #[must_use]
    pub fn is_restoring(&self) -> bool {
        matches!(self.phase, Phase::Restoring { .. })
    }

    /// Whether the process neither has the lock, nor keeps a place at the GPU, nor has memory on its way back.
    #[must_use]
    pub fn is_parked(&self) -> bool {
        matches!(self.phase, Phase::Parked)
    }

    /// Whether memory comes back before the process gets the lock.
    #[must_use]
    pub fn is_next(&self) -> bool {
        matches!(self.phase, Phase::Next)
    }

    /// Takes an input; returns the actions to carry out, in this order.
    pub fn handle(&mut self, input: Input, now: Duration) -> Vec<Action> {
        match input {
            Input::Message(message) => {
                self.heard_at = now;
                if self.connected {
                    self.silent_since = None;
                    self.said_waiting = false;
                }
                self.message(message, now);
            }
            Input::Registering => {
                self.silent_since.get_or_insert(now);
            }
            Input::Lost => self.lost(now),
            Input::Nobody => {
                self.connected = false;
                if !self.warned {
                    self.warned = true;
                    self.act(Action::WarnAlone);
                }
                if self.silent_since.is_none() && !matches!(self.phase, Phase::Free | Phase::Freeing) {
                    self.go_alone();
                }
            }
            // While the gate is open, a thread that still counts as asleep is about to wake.
            Input::ThreadsWaiting if matches!(self.phase, Phase::Running { .. } | Phase::Free) => {}
            Input::ThreadsWaiting => {
                self.threads_wait = true;
                self.idleness.resume(now);
                self.calls_waiting(now);
                self.ask();
            }
            Input::Began => self.began(now),
            Input::StillAbsent => {
                // An allocation that is just being made is restored a moment later; memory that never can be restored
                // comes by page faults.
                self.attempts += 1;
                // Not at each further attempt: while memory is leaving the card, the answer is StillAbsent again.
                let action = if self.attempts.is_multiple_of(MAX_ATTEMPTS) {
                    Action::Begin { anyway: true }
                } else {
                    Action::Post(MoverOrder::Restore)
                };
                self.act(action);
            }
            Input::Restored { lacking } => self.restored(lacking),
            Input::Outgrown => {
                // The lock is of no use, and others may have it.
                if let Phase::Restoring { epoch } = self.phase {
                    self.drop_lock(epoch, OWN_PATIENCE, now);
                }
            }
            Input::Drained(ticket) => self.drained(ticket),
            Input::CallsWaiting => self.calls_waiting(now),
            Input::Asleep => self.slept(now),
            Input::CannotSleep { reason, for_good } => self.stayed(reason, for_good, now),
            Input::MovedBack => self.moved_back(now),
            Input::Awake { took } => self.came_back(took, now),
            Input::Quiet { submissions } => self.idleness.complete(submissions, now),
            Input::Busy => self.idleness.incomplete(now),
            Input::BusyAndAbsent => {
                self.idleness.forget();
                if let Phase::Running { epoch } = self.phase {
                    self.phase = Phase::Restoring { epoch };
                    self.has_undrained = true;
                    self.act(Action::Post(MoverOrder::Restore));
                }
            }
            Input::WentIdle => {
                if let Phase::Running { epoch } = self.phase {
                    self.phase = Phase::Idle { epoch };
                    self.idleness.end(now);
                    self.act(Action::CountHandOver);
                    self.act(Action::Report);
                    self.act(Action::Send(ClientMessage::Idle { epoch }));
                    self.ask();
                }
            }
            Input::Tick { progress, submissions, lacking } => self.tick(progress, submissions, lacking, now),
        }
        std::mem::take(&mut self.actions)
    }

    fn act(&mut self, action: Action) {
        self.actions.push(action);
    }

    fn message(&mut self, message: SchedulerMessage, now: Duration) {
        let Some(message) = self.let_sleeper_take(message, now) else { return };
        match message {
            SchedulerMessage::Registered { hold, .. } => self.registered(hold, now),
            SchedulerMessage::Capacity(room) => self.act(Action::Capacity(room)),
            SchedulerMessage::LockOk { epoch, room, .. } => self.granted(epoch, room),
            SchedulerMessage::DropLock { epoch, patience_ms } => {
                self.drop_lock(epoch, Duration::from_millis(patience_ms.into()), now);
            }
            SchedulerMessage::Evict(room) => {
                if matches!(self.phase, Phase::Idle { .. }) {
                    // The lock was taken.
                    self.phase = Phase::Parked;
                    self.ask();
                }
                self.end_next();
                self.act(Action::Return { room, evict: self.phase == Phase::Parked });
            }
            SchedulerMessage::Room(room) => {
                // Room of nothing: there is no more for one client.
                let has_all = room.bytes == 0;
                self.act(if has_all { Action::Refuse(room.gpu) } else { Action::Give(room) });
                if matches!(self.phase, Phase::Restoring { .. }) {
                    self.act(if has_all {
                        Action::Begin { anyway: false }
                    } else {
                        Action::Post(MoverOrder::Restore)
                    });
                }
            }
            SchedulerMessage::Restore(room) => self.restore_ahead(room),
            SchedulerMessage::NoRoom { gpu } => {
                self.act(Action::Refuse(gpu));
                if matches!(self.phase, Phase::Restoring { .. }) {
                    self.act(Action::Begin { anyway: true });
                }
            }
            SchedulerMessage::Waiters { waiting } => {
                self.waiters = waiting;
                self.idleness.count_from(now);
                if self.is_running() {
                    self.act(Action::Bound(InFlight::while_others_wait(waiting)));
                    self.act(Action::Report);
                }
            }
            SchedulerMessage::SchedOff => self.go_alone(),
            SchedulerMessage::SchedOn { epoch } => self.adopted(epoch),
            SchedulerMessage::AskCounters => self.act(Action::Report),
            SchedulerMessage::Limit(room) => self.act(Action::AllocationLimit(room)),
            // The library takes the page, and memory of the host, itself. PONG has had its effect when it was heard. A scheduler that asks
            // for progress goes on without the answer.
            SchedulerMessage::AskProgress { .. }
            | SchedulerMessage::Quota { .. }
            | SchedulerMessage::HostMemory { .. }
            | SchedulerMessage::HostShort { .. }
            | SchedulerMessage::Sleep
            | SchedulerMessage::Wake
            | SchedulerMessage::Move { .. }
            | SchedulerMessage::Pong => {}
        }
    }

    fn registered(&mut self, hold: InitialState, now: Duration) {
        if hold == InitialState::Parked && matches!(self.phase, Phase::Free | Phase::Running { .. }) {
            // The gate opened while the answer was on its way: the scheduler has to know that.
            self.reconnect();
            return;
        }
        self.connected = true;
        self.was_answered = true;
        self.said_waiting = false;
        self.silent_since = None;
        self.waiters = false;
        self.lock_requested = false;
        self.idleness.count_from(now);
        self.end_next();
        self.expect_nobody();
        if self.registered_asleep(hold) {
            return;
        }
        match hold {
            InitialState::Parked => {
                if self.phase != Phase::Parked {
                    if matches!(self.phase, Phase::Freeing | Phase::Restoring { .. }) {
                        // Memory on its way back would come beside the evictions that follow.
                        self.act(Action::Cancel);
                    }
                    self.phase = Phase::Parked;
                    self.act(Action::StartMetering);
                }
                self.ask();
            }
            InitialState::Running(epoch) => self.adopted(epoch),
            InitialState::Free => self.go_alone(),
        }
    }

    fn reconnect(&mut self) {
        self.connected = false;
        self.act(Action::Reconnect);
    }

    /// The scheduler accepts the state of the process: running, or about to run.
    fn adopted(&mut self, epoch: Epoch) {
        self.act(Action::StartMeteringAnew);
        // No other usage may be told in between: the scheduler counts from the last one before this message.
        self.act(Action::Send(ClientMessage::Adopted { epoch }));
        match self.phase {
            Phase::Free | Phase::Running { .. } => {
                self.phase = Phase::Running { epoch };
                // The scheduler does not tell anew that others wait.
                self.act(Action::Bound(InFlight::while_others_wait(self.waiters)));
            }
            _ => {
                self.phase = Phase::Parked;
                self.granted(epoch, Vec::new());
            }
        }
    }

    fn granted(&mut self, epoch: Epoch, room: Vec<Amount>) {
        room.into_iter().for_each(|room| self.act(Action::Give(room)));
        self.lock_requested = false;
        self.end_next();
        let was = std::mem::replace(&mut self.phase, Phase::Restoring { epoch });
        match was {
            Phase::Free | Phase::Freeing => self.phase = was,
            Phase::Running { .. } => {
                self.phase = Phase::Running { epoch };
                self.act(Action::Send(ClientMessage::Running { epoch }));
            }
            // The drain may have come in the middle of a restore. Memory on its way then is given up, and counts as being there until
            // that is over. So the mover looks first.
            Phase::Draining { .. } => {
                self.has_undrained = true;
                self.act(Action::Cancel);
                self.act(Action::Post(MoverOrder::Restore));
            }
            Phase::Parked | Phase::Next | Phase::Idle { .. } | Phase::Restoring { .. } => {
                self.act(Action::Begin { anyway: false });
            }
        }
    }

    /// Memory comes back as far as there is room, and the gate stays closed.
    fn restore_ahead(&mut self, room: Amount) {
        self.act(Action::Give(room));
        match self.phase {
            Phase::Parked | Phase::Next => self.phase = Phase::Next,
            Phase::Idle { .. } => {
                // The lock was taken.
                self.phase = Phase::Next;
                self.ask();
            }
            Phase::Restoring { .. } => {
                self.act(Action::Post(MoverOrder::Restore));
                return;
            }
            Phase::Running { .. } | Phase::Draining { .. } | Phase::Freeing | Phase::Free => return,
        }
        self.act(Action::Post(MoverOrder::RestoreEarly));
    }

    /// If memory was coming back ahead of the lock, that is over. Memory that has come back stays.
    fn end_next(&mut self) {
        if self.phase == Phase::Next {
            self.phase = Phase::Parked;
            self.act(Action::Cancel);
        }
    }

    fn began(&mut self, now: Duration) {
        self.threads_wait = false;
        self.has_undrained = false;
        self.attempts = 0;
        self.idleness.begin(now);
        match self.phase {
            Phase::Restoring { epoch } => {
                self.phase = Phase::Running { epoch };
                self.act(Action::Bound(InFlight::while_others_wait(self.waiters)));
                self.act(Action::Send(ClientMessage::Running { epoch }));
                self.act(Action::Report);
            }
            Phase::Freeing => self.phase = Phase::Free,
            _ => {}
        }
    }

    fn restored(&mut self, lacking: Vec<Amount>) {
        match self.phase {
            Phase::Restoring { .. } if !lacking.is_empty() => {
                self.act(Action::Report);
                lacking.into_iter().for_each(|room| self.act(Action::Send(ClientMessage::NeedRoom(room))));
            }
            Phase::Restoring { .. } | Phase::Freeing => self.act(Action::Begin { anyway: false }),
            Phase::Next => self.act(Action::Report),
            _ => {}
        }
    }

    fn drop_lock(&mut self, epoch: Epoch, patience: Duration, now: Duration) {
        match self.phase {
            Phase::Running { epoch: current } if current == epoch => self.act(Action::Close),
            Phase::Restoring { epoch: current } if current == epoch => {}
            // The order is for another grant, or crossed an IDLE.
            _ => return,
        }
        self.idleness.forget();
        self.phase = Phase::Draining { epoch, patience, progress: u64::MAX, since: now };
        self.last_drain += 1;
        self.act(Action::Cancel);
        self.act(Action::Post(MoverOrder::Drain(self.last_drain)));
    }

    fn drained(&mut self, ticket: Ticket) {
        let Phase::Draining { epoch, .. } = self.phase else { return };
        if ticket != self.last_drain {
            return;
        }
        self.phase = Phase::Parked;
        self.has_undrained = false;
        self.act(Action::CountHandOver);
        self.act(Action::Report);
        self.act(Action::ReturnAll);
        self.act(Action::Send(ClientMessage::LockReleased { epoch }));
        self.ask();
    }

    fn ask(&mut self) {
        let closed = matches!(self.phase, Phase::Parked | Phase::Next | Phase::Idle { .. });
        if self.threads_wait && closed && self.connected && !self.lock_requested && self.sleeper.is_awake() {
            self.lock_requested = true;
            self.act(Action::Report);
            self.act(Action::Send(ClientMessage::ReqLock));
        }
    }

    fn lost(&mut self, now: Duration) {
        // Connections that nobody answers prolong no wait.
        if std::mem::take(&mut self.connected) {
            self.silent_since = Some(now);
        } else {
            self.silent_since.get_or_insert(now);
        }
        self.lock_requested = false;
        self.waiters = false;
        self.idleness.forget();
        self.forget_kept();
        self.end_next();
        match self.phase {
            Phase::Running { .. } => {
                self.phase = Phase::Free;
                self.act(Action::StopMetering);
                self.act(Action::Bound(InFlight::Unbounded));
                self.expect_scheduler(now);
            }
            Phase::Restoring { .. } | Phase::Draining { .. } => {
                self.go_alone();
                self.expect_scheduler(now);
            }
            Phase::Parked | Phase::Next | Phase::Idle { .. } | Phase::Freeing | Phase::Free => {}
        }
    }

    fn go_alone(&mut self) {
        self.lock_requested = false;
        if self.phase == Phase::Free || self.comes_back_first() {
            return;
        }
        self.end_next();
        if matches!(self.phase, Phase::Draining { .. }) {
            // The mover may be waiting for a thread that sleeps at the gate.
            self.act(Action::Cancel);
            self.has_undrained = true;
        }
        self.act(Action::StopMetering);
        if self.is_running() {
            self.phase = Phase::Free;
            self.act(Action::Bound(InFlight::Unbounded));
        } else {
            self.phase = Phase::Freeing;
            self.act(Action::Begin { anyway: false });
        }
    }

    fn tick(&mut self, progress: u64, submissions: u64, lacking: bool, now: Duration) {
        let before = std::mem::replace(&mut self.ticked_at, now);
        if now.saturating_sub(before) >= AWAY {
            self.silent_since = self.silent_since.map(|_| now);
            if let Phase::Draining { since, .. } = &mut self.phase {
                // Nobody has looked whether the work goes on.
                *since = now;
            }
        }
        match &mut self.phase {
            Phase::Draining { epoch, patience, progress: last, since } => {
                if *last != progress {
                    (*last, *since) = (progress, now);
                } else if now.saturating_sub(*since) >= *patience {
                    // The drain may depend on a thread that sleeps at the gate.
                    let epoch = *epoch;
                    self.phase = Phase::Restoring { epoch };
                    self.has_undrained = true;
                    self.act(Action::Cancel);
                    self.act(Action::CountDeferral);
                    self.act(Action::Send(ClientMessage::DropDeferred { epoch }));
                    self.act(Action::Begin { anyway: false });
                }
            }
            Phase::Running { .. } if self.waiters => {
                let action = self.idleness.look(submissions, lacking, now);
                self.actions.extend(action);
            }
            Phase::Parked | Phase::Next | Phase::Idle { .. } | Phase::Restoring { .. } => {
                self.wait_for_the_scheduler(lacking, now);
            }
            Phase::Freeing | Phase::Free => self.wait_no_longer(now),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
