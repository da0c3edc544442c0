//! The client's side of the protocol, as a state machine without IO: what happened goes in, what is to be done
//! comes out. It obeys the scheduler and decides nothing but what to do without one.

use std::time::{Duration, Instant};

use nvshare_proto::{ClientMessage, Epoch, Gate, Hold, Room, SchedulerMessage};

use crate::memory::mover::{Job, Ticket};

/// Something happened.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Input {
    /// The scheduler said this.
    Message(SchedulerMessage),
    /// There is a connection, and REGISTER goes out on it.
    Registering,
    /// The connection to the scheduler is gone.
    Lost,
    /// There is no scheduler to be found.
    Nobody,
    /// Threads sleep at the gate.
    Asked,
    /// In answer to [`Action::Begin`]: the gate is open.
    Began,
    /// In answer to [`Action::Begin`]: memory is absent.
    StillAbsent,
    /// All submitted work is complete, in answer to the drain of this ticket.
    Drained(Ticket),
    /// What could be restored is.
    Restored {
        /// What lacks room.
        lacking: Vec<Room>,
    },
    /// All work is complete that was submitted until this many submissions were counted.
    Quiet {
        /// How many.
        submissions: u64,
    },
    /// Some work is not.
    Busy,
    /// In answer to [`Action::TryIdle`]: some work is not, the gate is closed, and memory is absent.
    BusyAndAbsent,
    /// In answer to [`Action::TryIdle`]: the gate is closed and nothing is under way.
    WentIdle,
    /// Time passed.
    Tick {
        /// [`crate::memory::mover::progress`].
        progress: u64,
        /// Submissions counted so far.
        submissions: u64,
        /// An allocation waits for room: the program has work, though it submits none.
        lacking: bool,
    },
}

/// Something is to be done.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// Say this to the scheduler.
    Send(ClientMessage),
    /// Say what is allocated and counted.
    Report,
    /// Close the gate; memory allocated from now on is absent.
    Close,
    /// Open the gate if nothing is absent: answered by [`Input::Began`] or [`Input::StillAbsent`].
    Begin {
        /// Even if something is: it comes by faults.
        anyway: bool,
    },
    /// Bound work in flight, or stop doing so.
    Bound(bool),
    /// Order this from the mover.
    Post(Job),
    /// Have it give up.
    Cancel,
    /// Close the gate if nothing was submitted since; answered by [`Input::WentIdle`], or not.
    TryIdle {
        /// Submissions counted when all work was complete.
        submissions: u64,
    },
    /// Room came.
    Give(Room),
    /// Room will not come.
    Refuse(nvshare_proto::GpuUuid),
    /// What the GPU's clients may fill.
    Capacity(Room),
    /// Give back this much unused room; what is missing, evict (if the flag says so).
    Return {
        /// How much.
        room: Room,
        /// The gate is closed: memory may be moved.
        evict: bool,
    },
    /// Give back all unused room.
    ReturnAll,
    /// Room is not counted from now on.
    Unlimit,
    /// Room is counted again, from what was last reported.
    Limit,
    /// Counters.
    CountHandOver,
    /// Counters.
    CountDeferral,
    /// Connect and register anew: what the scheduler knows of the gate is wrong.
    Reconnect,
    /// Tell the user, once.
    WarnAlone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The gate is closed.
    Parked,
    /// The lock is granted; memory comes back.
    Restoring { epoch: Epoch },
    /// The gate is open.
    Running { epoch: Epoch },
    /// The gate is closed again; work completes.
    Draining { epoch: Epoch, patience: Duration, progress: u64, since: Instant },
    /// The gate is closed, nothing is under way, and the lock may or may not still be ours.
    Idle { epoch: Epoch },
    /// On its own: no scheduler, or it does not schedule. Memory comes back and the gate opens.
    Freeing,
    /// On its own, gate open.
    Free,
}

/// What is known of submitted work while the program submits none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Probe {
    /// Nothing.
    None,
    /// The mover looks.
    Looking,
    /// All work is complete that was submitted until `submissions` were counted, since this time.
    Complete { submissions: u64, since: Instant },
}

/// How long a parked program waits for a lost scheduler before it goes on alone.
const RETURN_PATIENCE: Duration = Duration::from_secs(5);
/// A scheduler that has said nothing for this long while a program waits is asked whether it lives.
const PING_AFTER: Duration = Duration::from_secs(5);
/// Without a submission for this long, it is asked whether all work is complete.
const PROBE_AFTER: Duration = Duration::from_millis(5);
/// Without a submission for this long after all work was complete, the program is idle. Less would take a program
/// that waits for each of its steps to be idle between them.
const IDLE_AFTER: Duration = Duration::from_millis(25);

/// Restores after which what is still absent is left to page faults.
const MOST_ATTEMPTS: u32 = 1000;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Machine {
    phase: Phase,
    connected: bool,
    /// Since when no scheduler answers: it is lost, or has not answered REGISTER or PING.
    silent_since: Option<Instant>,
    /// When the scheduler was last heard or asked.
    heard_at: Instant,
    last_drain: Ticket,
    /// REQ_LOCK is sent and not answered.
    asked: bool,
    /// Threads sleep at the gate.
    asleep: bool,
    /// Somebody waits for what we hold.
    waiters: bool,
    /// Submissions at a tick, and since when they are that many.
    last_submission: (u64, Instant),
    probe: Probe,
    /// Restores since the grant.
    attempts: u32,
    warned: bool,
    actions: Vec<Action>,
}

impl Machine {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            phase: Phase::Parked,
            connected: false,
            silent_since: None,
            heard_at: now,
            last_drain: 0,
            asked: false,
            asleep: false,
            waiters: false,
            last_submission: (0, now),
            probe: Probe::None,
            attempts: 0,
            warned: false,
            actions: Vec::new(),
        }
    }

    /// What to say of the gate when registering.
    pub(crate) fn gate(&self) -> Gate {
        if self.phase == Phase::Free { Gate::Open } else { Gate::Closed }
    }

    /// Whether time matters: ticks are wanted this often. `lacking`: allocations wait for room.
    pub(crate) fn tick_every(&self, lacking: bool) -> Option<Duration> {
        match self.phase {
            Phase::Draining { .. } => Some(Duration::from_millis(5)),
            Phase::Running { .. } if self.waiters => Some(Duration::from_millis(5)),
            _ if !self.connected => Some(Duration::from_millis(250)),
            Phase::Parked | Phase::Idle { .. } if self.asleep || lacking => Some(Duration::from_secs(1)),
            _ => None,
        }
    }

    /// Whether the process runs under a grant.
    pub(crate) fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running { .. })
    }

    /// Whether its memory is on its way back.
    pub(crate) fn is_restoring(&self) -> bool {
        matches!(self.phase, Phase::Restoring { .. })
    }

    /// Whether the lock is elsewhere, or may be.
    pub(crate) fn is_parked(&self) -> bool {
        matches!(self.phase, Phase::Parked)
    }

    /// Takes in what happened; returns what is to be done, in this order.
    pub(crate) fn handle(&mut self, input: Input, now: Instant) -> Vec<Action> {
        match input {
            Input::Message(message) => {
                self.heard_at = now;
                if self.connected {
                    self.silent_since = None;
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
            Input::Asked => {
                self.asleep = true;
                self.ask();
            }
            Input::Began => self.began(now),
            Input::StillAbsent => {
                // An allocation that is just being made is restored a moment later; one that never can be comes
                // by faults.
                self.attempts += 1;
                // Not twice in a row: while memory is on its way out the answer is this one again.
                let action = if self.attempts.is_multiple_of(MOST_ATTEMPTS) {
                    Action::Begin { anyway: true }
                } else {
                    Action::Post(Job::Restore)
                };
                self.act(action);
            }
            Input::Restored { lacking } => self.restored(lacking),
            Input::Drained(ticket) => self.drained(ticket),
            Input::Quiet { submissions } => self.probe = Probe::Complete { submissions, since: now },
            Input::Busy => {
                self.probe = Probe::None;
                self.last_submission.1 = now;
            }
            Input::BusyAndAbsent => {
                self.probe = Probe::None;
                if let Phase::Running { epoch } = self.phase {
                    self.phase = Phase::Restoring { epoch };
                    self.act(Action::Post(Job::Restore));
                }
            }
            Input::WentIdle => {
                if let Phase::Running { epoch } = self.phase {
                    self.phase = Phase::Idle { epoch };
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

    fn message(&mut self, message: SchedulerMessage, now: Instant) {
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
                self.act(Action::Return { room, evict: self.phase == Phase::Parked });
            }
            SchedulerMessage::Room(room) => {
                self.act(Action::Give(room));
                if matches!(self.phase, Phase::Restoring { .. }) {
                    // Of nothing: it has all that it can have.
                    let has_all = room.bytes == 0;
                    self.act(if has_all {
                        Action::Begin { anyway: false }
                    } else {
                        Action::Post(Job::Restore)
                    });
                }
            }
            SchedulerMessage::NoRoom { gpu } => {
                self.act(Action::Refuse(gpu));
                if matches!(self.phase, Phase::Restoring { .. }) {
                    self.act(Action::Begin { anyway: true });
                }
            }
            SchedulerMessage::Waiters { waiting } => {
                self.waiters = waiting;
                self.last_submission.1 = now;
                if self.is_running() {
                    self.act(Action::Bound(waiting));
                    self.act(Action::Report);
                }
            }
            SchedulerMessage::SchedOff => self.go_alone(),
            SchedulerMessage::SchedOn { epoch } => self.adopted(epoch),
            SchedulerMessage::AskCounters => self.act(Action::Report),
            // The page is the session's own business; that the answer was heard is all there is to it.
            SchedulerMessage::Quota { .. } | SchedulerMessage::Pong => {}
        }
    }

    fn registered(&mut self, hold: Hold, now: Instant) {
        if hold == Hold::Parked && matches!(self.phase, Phase::Free | Phase::Running { .. }) {
            // The gate opened while the answer was on its way: that has to be known.
            self.reconnect();
            return;
        }
        self.connected = true;
        self.silent_since = None;
        self.waiters = false;
        self.asked = false;
        self.last_submission.1 = now;
        match hold {
            Hold::Parked => {
                if self.phase != Phase::Parked {
                    self.phase = Phase::Parked;
                    self.act(Action::Limit);
                }
                self.ask();
            }
            Hold::Running(epoch) => self.adopted(epoch),
            Hold::Free => self.go_alone(),
        }
    }

    fn reconnect(&mut self) {
        self.connected = false;
        self.act(Action::Reconnect);
    }

    /// The scheduler takes us as we are: running, or about to.
    fn adopted(&mut self, epoch: Epoch) {
        self.act(Action::Limit);
        match self.phase {
            Phase::Free | Phase::Running { .. } => self.phase = Phase::Running { epoch },
            _ => {
                self.phase = Phase::Parked;
                self.granted(epoch, Vec::new());
            }
        }
    }

    fn granted(&mut self, epoch: Epoch, room: Vec<Room>) {
        room.into_iter().for_each(|room| self.act(Action::Give(room)));
        self.asked = false;
        match self.phase {
            Phase::Free | Phase::Freeing => return,
            Phase::Running { .. } => {
                self.phase = Phase::Running { epoch };
                self.act(Action::Send(ClientMessage::Running { epoch }));
                return;
            }
            Phase::Draining { .. } => self.act(Action::Cancel),
            Phase::Parked | Phase::Idle { .. } | Phase::Restoring { .. } => {}
        }
        self.phase = Phase::Restoring { epoch };
        self.act(Action::Begin { anyway: false });
    }

    fn began(&mut self, now: Instant) {
        self.asleep = false;
        self.attempts = 0;
        self.last_submission.1 = now;
        match self.phase {
            Phase::Restoring { epoch } => {
                self.phase = Phase::Running { epoch };
                self.act(Action::Bound(self.waiters));
                self.act(Action::Send(ClientMessage::Running { epoch }));
                self.act(Action::Report);
            }
            Phase::Freeing => self.phase = Phase::Free,
            _ => {}
        }
    }

    fn restored(&mut self, lacking: Vec<Room>) {
        match self.phase {
            Phase::Restoring { .. } if !lacking.is_empty() => {
                self.act(Action::Report);
                lacking.into_iter().for_each(|room| self.act(Action::Send(ClientMessage::NeedRoom(room))));
            }
            Phase::Restoring { .. } | Phase::Freeing => self.act(Action::Begin { anyway: false }),
            _ => {}
        }
    }

    fn drop_lock(&mut self, epoch: Epoch, patience: Duration, now: Instant) {
        match self.phase {
            Phase::Running { epoch: current } if current == epoch => self.act(Action::Close),
            Phase::Restoring { epoch: current } if current == epoch => {}
            // Another grant's, or IDLE has crossed it.
            _ => return,
        }
        self.probe = Probe::None;
        self.phase = Phase::Draining { epoch, patience, progress: u64::MAX, since: now };
        self.last_drain += 1;
        self.act(Action::Cancel);
        self.act(Action::Post(Job::Drain(self.last_drain)));
    }

    fn drained(&mut self, ticket: Ticket) {
        let Phase::Draining { epoch, .. } = self.phase else { return };
        if ticket != self.last_drain {
            return;
        }
        self.phase = Phase::Parked;
        self.act(Action::CountHandOver);
        self.act(Action::Report);
        self.act(Action::ReturnAll);
        self.act(Action::Send(ClientMessage::LockReleased { epoch }));
        self.ask();
    }

    fn ask(&mut self) {
        let closed = matches!(self.phase, Phase::Parked | Phase::Idle { .. });
        if self.asleep && closed && self.connected && !self.asked {
            self.asked = true;
            self.act(Action::Report);
            self.act(Action::Send(ClientMessage::ReqLock));
        }
    }

    fn lost(&mut self, now: Instant) {
        self.connected = false;
        self.asked = false;
        self.waiters = false;
        self.probe = Probe::None;
        self.silent_since = Some(now);
        match self.phase {
            Phase::Running { .. } => {
                self.phase = Phase::Free;
                self.act(Action::Unlimit);
                self.act(Action::Bound(false));
            }
            Phase::Restoring { .. } | Phase::Draining { .. } => self.go_alone(),
            Phase::Parked | Phase::Idle { .. } | Phase::Freeing | Phase::Free => {}
        }
    }

    fn go_alone(&mut self) {
        self.asked = false;
        if self.phase == Phase::Free {
            return;
        }
        if matches!(self.phase, Phase::Draining { .. }) {
            // What it waits for may be a thread that sleeps at the gate.
            self.act(Action::Cancel);
        }
        self.act(Action::Unlimit);
        if self.is_running() {
            self.phase = Phase::Free;
            self.act(Action::Bound(false));
        } else {
            self.phase = Phase::Freeing;
            self.act(Action::Begin { anyway: false });
        }
    }

    fn tick(&mut self, progress: u64, submissions: u64, lacking: bool, now: Instant) {
        match &mut self.phase {
            Phase::Draining { epoch, patience, progress: last, since } => {
                if *last != progress {
                    (*last, *since) = (progress, now);
                } else if now.duration_since(*since) >= *patience {
                    // It may depend on a thread that sleeps at our gate.
                    let epoch = *epoch;
                    self.phase = Phase::Restoring { epoch };
                    self.act(Action::Cancel);
                    self.act(Action::CountDeferral);
                    self.act(Action::Send(ClientMessage::DropDeferred { epoch }));
                    self.act(Action::Begin { anyway: false });
                }
            }
            Phase::Running { .. } if self.waiters => self.look_for_idleness(submissions, lacking, now),
            Phase::Parked | Phase::Idle { .. } => self.wait_for_the_scheduler(lacking, now),
            _ => {}
        }
    }

    /// A parked program with work, or that lacks room, waits for a scheduler that answers, and not for ever.
    fn wait_for_the_scheduler(&mut self, lacking: bool, now: Instant) {
        if let Some(since) = self.silent_since {
            if now.duration_since(since) >= RETURN_PATIENCE {
                self.reconnect();
                self.go_alone();
            }
        } else if (self.asleep || lacking) && now.duration_since(self.heard_at) >= PING_AFTER {
            self.silent_since = Some(now);
            self.act(Action::Send(ClientMessage::Ping));
        }
    }

    fn look_for_idleness(&mut self, submissions: u64, lacking: bool, now: Instant) {
        if self.last_submission.0 != submissions || lacking {
            self.last_submission = (submissions, now);
            if self.probe != Probe::Looking {
                self.probe = Probe::None;
            }
            return;
        }
        match self.probe {
            Probe::None if now.duration_since(self.last_submission.1) >= PROBE_AFTER => {
                self.probe = Probe::Looking;
                self.act(Action::Post(Job::Probe));
            }
            Probe::Complete { submissions, since } if now.duration_since(since) >= IDLE_AFTER => {
                self.probe = Probe::None;
                self.act(Action::TryIdle { submissions });
            }
            Probe::None | Probe::Looking | Probe::Complete { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvshare_proto::GpuUuid;

    const GPU: GpuUuid = GpuUuid([1; 16]);
    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn epoch(counter: u64) -> Epoch {
        Epoch { boot: 1, counter }
    }

    fn room(bytes: u64) -> Room {
        Room { gpu: GPU, bytes }
    }

    /// A machine and its clock.
    struct Client {
        machine: Machine,
        now: Instant,
    }

    impl Client {
        fn new() -> Self {
            let now = Instant::now();
            Self { machine: Machine::new(now), now }
        }

        fn registered(hold: Hold) -> Self {
            let mut client = Self::new();
            client.hear(SchedulerMessage::Registered { client: 1, hold });
            client
        }

        /// One that runs under grant 1 while somebody waits.
        fn running_contended() -> Self {
            let mut client = Self::registered(Hold::Parked);
            client.feed(Input::Asked);
            client.hear(SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1000, room: vec![] });
            client.feed(Input::Began);
            client.hear(SchedulerMessage::Waiters { waiting: true });
            client
        }

        fn feed(&mut self, input: Input) -> Vec<Action> {
            self.machine.handle(input, self.now)
        }

        fn hear(&mut self, message: SchedulerMessage) -> Vec<Action> {
            self.feed(Input::Message(message))
        }

        fn tick(&mut self, after: u64, progress: u64, submissions: u64) -> Vec<Action> {
            self.now += MS(after);
            self.feed(Input::Tick { progress, submissions, lacking: false })
        }
    }

    #[test]
    fn asks_once_and_opens_only_when_everything_is_back() {
        let mut client = Client::registered(Hold::Parked);
        assert_eq!(client.feed(Input::Asked), [Action::Report, Action::Send(ClientMessage::ReqLock)]);
        assert_eq!(client.feed(Input::Asked), []);
        let granted =
            client.hear(SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1, room: vec![room(8)] });
        assert_eq!(granted, [Action::Give(room(8)), Action::Begin { anyway: false }]);
        assert_eq!(client.feed(Input::StillAbsent), [Action::Post(Job::Restore)]);
        assert_eq!(client.feed(Input::Restored { lacking: vec![] }), [Action::Begin { anyway: false }]);
        let began = client.feed(Input::Began);
        assert!(began.contains(&Action::Send(ClientMessage::Running { epoch: epoch(1) })), "{began:?}");
    }

    #[test]
    fn what_lacks_room_is_asked_for_and_waited_for() {
        let mut client = Client::registered(Hold::Parked);
        client.hear(SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1, room: vec![] });
        client.feed(Input::StillAbsent);
        let asked = client.feed(Input::Restored { lacking: vec![room(5)] });
        assert_eq!(asked, [Action::Report, Action::Send(ClientMessage::NeedRoom(room(5)))]);
        assert_eq!(
            client.hear(SchedulerMessage::Room(room(5))),
            [Action::Give(room(5)), Action::Post(Job::Restore)]
        );
        // There is none to be had: page faults then, rather than never.
        assert_eq!(
            client.hear(SchedulerMessage::NoRoom { gpu: GPU }),
            [Action::Refuse(GPU), Action::Begin { anyway: true }]
        );
    }

    #[test]
    fn gives_the_lock_back_only_when_drained() {
        let mut client = Client::running_contended();
        let dropped = client.hear(SchedulerMessage::DropLock { epoch: epoch(1), patience_ms: 200 });
        assert_eq!(dropped, [Action::Close, Action::Cancel, Action::Post(Job::Drain(1))]);
        client.feed(Input::Asked);
        assert_eq!(client.tick(100, 1, 0), []);
        let released = client.feed(Input::Drained(1));
        assert_eq!(
            released,
            [
                Action::CountHandOver,
                Action::Report,
                Action::ReturnAll,
                Action::Send(ClientMessage::LockReleased { epoch: epoch(1) }),
                // Who came to the gate meanwhile still wants the lock.
                Action::Report,
                Action::Send(ClientMessage::ReqLock),
            ]
        );
        // A second answer of the mover means nothing.
        assert_eq!(client.feed(Input::Drained(1)), []);
    }

    #[test]
    fn a_drain_without_progress_is_given_up_and_one_with_progress_is_not() {
        let mut client = Client::running_contended();
        client.hear(SchedulerMessage::DropLock { epoch: epoch(1), patience_ms: 200 });
        for progress in 0..10 {
            assert_eq!(client.tick(150, progress, 0), []);
        }
        assert_eq!(client.tick(150, 9, 0), []);
        let given_up = client.tick(60, 9, 0);
        assert_eq!(
            given_up,
            [
                Action::Cancel,
                Action::CountDeferral,
                Action::Send(ClientMessage::DropDeferred { epoch: epoch(1) }),
                Action::Begin { anyway: false },
            ]
        );
        client.feed(Input::Began);
        assert!(client.machine.is_running());
    }

    #[test]
    fn stale_orders_are_ignored() {
        let mut client = Client::running_contended();
        assert_eq!(client.hear(SchedulerMessage::DropLock { epoch: epoch(7), patience_ms: 200 }), []);
        assert_eq!(client.feed(Input::Restored { lacking: vec![room(1)] }), []);
        assert_eq!(client.feed(Input::WentIdle).len(), 3);
        // IDLE and DROP_LOCK have crossed: there is nothing to drain.
        assert_eq!(client.hear(SchedulerMessage::DropLock { epoch: epoch(1), patience_ms: 200 }), []);
    }

    #[test]
    fn who_is_freed_while_it_drains_waits_for_nothing() {
        let mut client = Client::running_contended();
        client.hear(SchedulerMessage::DropLock { epoch: epoch(1), patience_ms: 50_000 });
        let freed = client.hear(SchedulerMessage::SchedOff);
        assert_eq!(freed, [Action::Cancel, Action::Unlimit, Action::Begin { anyway: false }]);
    }

    #[test]
    fn an_eviction_moves_memory_only_behind_a_closed_gate() {
        let mut client = Client::running_contended();
        assert_eq!(
            client.hear(SchedulerMessage::Evict(room(3))),
            [Action::Return { room: room(3), evict: false }]
        );
        client.feed(Input::WentIdle);
        // From an idle client this says as well that the lock is gone.
        assert_eq!(
            client.hear(SchedulerMessage::Evict(room(3))),
            [Action::Return { room: room(3), evict: true }]
        );
        assert!(client.machine.is_parked());
    }

    #[test]
    fn idle_after_a_pause_behind_complete_work_and_not_between_steps() {
        let mut client = Client::running_contended();
        assert_eq!(client.tick(1, 0, 10), []);
        assert_eq!(client.tick(6, 0, 10), [Action::Post(Job::Probe)]);
        assert_eq!(client.feed(Input::Quiet { submissions: 10 }), []);
        // The next step comes 20 ms later: not idle.
        assert_eq!(client.tick(20, 0, 11), []);
        assert_eq!(client.tick(6, 0, 11), [Action::Post(Job::Probe)]);
        assert_eq!(client.feed(Input::Quiet { submissions: 11 }), []);
        assert_eq!(client.tick(24, 0, 11), []);
        assert_eq!(client.tick(2, 0, 11), [Action::TryIdle { submissions: 11 }]);
        assert!(
            client.feed(Input::WentIdle).contains(&Action::Send(ClientMessage::Idle { epoch: epoch(1) }))
        );
        // Work again: the lock may still be ours, and is asked for.
        assert!(client.feed(Input::Asked).contains(&Action::Send(ClientMessage::ReqLock)));
    }

    #[test]
    fn without_a_scheduler_it_runs_and_warns_once() {
        let mut client = Client::new();
        let alone = client.feed(Input::Nobody);
        assert_eq!(alone, [Action::WarnAlone, Action::Unlimit, Action::Begin { anyway: false }]);
        client.feed(Input::Began);
        assert_eq!(client.machine.gate(), Gate::Open);
        assert_eq!(client.feed(Input::Nobody), []);
        // It joins as it is.
        let joined = client.hear(SchedulerMessage::Registered { client: 1, hold: Hold::Running(epoch(4)) });
        assert_eq!(joined, [Action::Limit]);
        assert!(client.machine.is_running());
    }

    #[test]
    fn a_lost_scheduler_stops_no_holder_and_parks_nobody_for_ever() {
        let mut holder = Client::running_contended();
        assert_eq!(holder.feed(Input::Lost), [Action::Unlimit, Action::Bound(false)]);
        assert_eq!(holder.machine.gate(), Gate::Open);

        let mut parked = Client::registered(Hold::Parked);
        parked.feed(Input::Asked);
        assert_eq!(parked.feed(Input::Lost), []);
        assert_eq!(parked.feed(Input::Nobody), [Action::WarnAlone]);
        assert_eq!(parked.tick(4900, 0, 0), []);
        assert_eq!(
            parked.tick(200, 0, 0),
            [Action::Reconnect, Action::Unlimit, Action::Begin { anyway: false }]
        );

        let mut draining = Client::running_contended();
        draining.hear(SchedulerMessage::DropLock { epoch: epoch(1), patience_ms: 200 });
        assert_eq!(
            draining.feed(Input::Lost),
            [Action::Cancel, Action::Unlimit, Action::Begin { anyway: false }]
        );
    }

    #[test]
    fn a_scheduler_that_hangs_is_as_good_as_lost() {
        let mut client = Client::registered(Hold::Parked);
        client.feed(Input::Asked);
        assert_eq!(client.tick(5000, 0, 0), [Action::Send(ClientMessage::Ping)]);
        client.now += MS(100);
        client.hear(SchedulerMessage::Pong);
        assert_eq!(client.tick(4900, 0, 0), []);
        assert_eq!(client.tick(100, 0, 0), [Action::Send(ClientMessage::Ping)]);
        assert_eq!(client.tick(4900, 0, 0), []);
        let alone = client.tick(100, 0, 0);
        assert_eq!(alone, [Action::Reconnect, Action::Unlimit, Action::Begin { anyway: false }]);
    }

    #[test]
    fn a_gate_that_opened_before_the_answer_to_register_is_registered_as_it_is() {
        let mut client = Client::new();
        client.feed(Input::Registering);
        assert_eq!(
            client.tick(5100, 0, 0),
            [Action::Reconnect, Action::Unlimit, Action::Begin { anyway: false }]
        );
        client.feed(Input::Began);
        let late = client.hear(SchedulerMessage::Registered { client: 1, hold: Hold::Parked });
        assert_eq!(late, [Action::Reconnect]);
        assert_eq!(client.machine.gate(), Gate::Open);
    }

    #[test]
    fn room_of_nothing_means_that_there_is_no_more() {
        let mut client = Client::registered(Hold::Parked);
        client.feed(Input::Asked);
        client.hear(SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1000, room: vec![] });
        let room = |bytes| Room { gpu: GpuUuid([1; 16]), bytes };
        let some = client.hear(SchedulerMessage::Room(room(7)));
        assert_eq!(some, [Action::Give(room(7)), Action::Post(Job::Restore)]);
        let none = client.hear(SchedulerMessage::Room(room(0)));
        assert_eq!(none, [Action::Give(room(0)), Action::Begin { anyway: false }]);
    }

    #[test]
    fn an_answer_to_an_earlier_drain_gives_nothing_back() {
        let mut client = Client::running_contended();
        client.hear(SchedulerMessage::DropLock { epoch: epoch(1), patience_ms: 200 });
        client.tick(1, 5, 0);
        client.tick(300, 5, 0);
        client.feed(Input::Began);
        // The first drain ended just when it was given up; the second has just begun.
        client.hear(SchedulerMessage::DropLock { epoch: epoch(1), patience_ms: 400 });
        assert_eq!(client.feed(Input::Drained(1)), []);
        assert!(!client.feed(Input::Drained(2)).is_empty());
    }

    #[test]
    fn scheduling_may_be_switched_off_and_on_at_any_moment() {
        let mut client = Client::registered(Hold::Parked);
        client.hear(SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1, room: vec![] });
        assert_eq!(
            client.hear(SchedulerMessage::SchedOff),
            [Action::Unlimit, Action::Begin { anyway: false }]
        );
        // Before it was free, it is to be counted again.
        assert_eq!(
            client.hear(SchedulerMessage::SchedOn { epoch: epoch(2) }),
            [Action::Limit, Action::Begin { anyway: false }]
        );
        let began = client.feed(Input::Began);
        assert!(began.contains(&Action::Send(ClientMessage::Running { epoch: epoch(2) })), "{began:?}");
    }
}
