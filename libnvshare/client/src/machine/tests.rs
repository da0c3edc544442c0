mod idleness;
mod sleeping;

use super::*;
use nvshare_proto::GpuUuid;

const GPU: GpuUuid = GpuUuid([1; 16]);
const MS: fn(u64) -> Duration = Duration::from_millis;

fn epoch(counter: u64) -> Epoch {
    Epoch { boot: 1, counter }
}

fn room(bytes: u64) -> Amount {
    Amount { gpu: GPU, bytes }
}

/// It says under which grant it goes on, after its account is the scheduler's and before anything else.
fn adopted(counter: u64) -> Action {
    Action::Send(ClientMessage::Adopted { epoch: epoch(counter) })
}

/// A machine and its clock.
struct Client {
    machine: Machine,
    now: Duration,
}

impl Client {
    fn new() -> Self {
        let now = Duration::from_secs(1);
        Self { machine: Machine::new(now), now }
    }

    fn registered(hold: InitialState) -> Self {
        let mut client = Self::new();
        client.hear(SchedulerMessage::Registered { client: 1, hold });
        client
    }

    /// A client that runs under grant 1 while another client waits.
    fn running_contended() -> Self {
        let mut client = Self::registered(InitialState::Parked);
        client.feed(Input::ThreadsWaiting);
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

    /// Ticks come as often as a client that waits wants them.
    fn wait(&mut self, time: Duration) -> Vec<Action> {
        let until = self.now + time;
        let mut actions = Vec::new();
        while self.now < until {
            let step = (until - self.now).min(MS(250));
            actions.append(&mut self.tick(step.as_millis() as u64, 0, 0));
        }
        actions
    }
}

#[test]
fn asks_once_and_opens_only_when_everything_is_back() {
    let mut client = Client::registered(InitialState::Parked);
    assert_eq!(client.feed(Input::ThreadsWaiting), [Action::Report, Action::Send(ClientMessage::ReqLock)]);
    assert_eq!(client.feed(Input::ThreadsWaiting), []);
    let granted =
        client.hear(SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1, room: vec![room(8)] });
    assert_eq!(granted, [Action::Give(room(8)), Action::Begin { anyway: false }]);
    assert_eq!(client.feed(Input::StillAbsent), [Action::Post(MoverOrder::Restore)]);
    assert_eq!(client.feed(Input::Restored { lacking: vec![] }), [Action::Begin { anyway: false }]);
    let began = client.feed(Input::Began);
    assert!(began.contains(&Action::Send(ClientMessage::Running { epoch: epoch(1) })), "{began:?}");
}

#[test]
fn a_restore_that_lacks_room_asks_for_it_and_waits() {
    let mut client = Client::registered(InitialState::Parked);
    client.hear(SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1, room: vec![] });
    client.feed(Input::StillAbsent);
    let asked = client.feed(Input::Restored { lacking: vec![room(5)] });
    assert_eq!(asked, [Action::Report, Action::Send(ClientMessage::NeedRoom(room(5)))]);
    assert_eq!(
        client.hear(SchedulerMessage::Room(room(5))),
        [Action::Give(room(5)), Action::Post(MoverOrder::Restore)]
    );
    // No room is to be had: page faults, rather than waiting for ever.
    assert_eq!(
        client.hear(SchedulerMessage::NoRoom { gpu: GPU }),
        [Action::Refuse(GPU), Action::Begin { anyway: true }]
    );
}

#[test]
fn gives_the_lock_back_only_when_drained() {
    let mut client = Client::running_contended();
    let dropped = client.hear(SchedulerMessage::DropLock { epoch: epoch(1), patience_ms: 200 });
    assert_eq!(dropped, [Action::Close, Action::Cancel, Action::Post(MoverOrder::Drain(1))]);
    client.feed(Input::ThreadsWaiting);
    assert_eq!(client.tick(100, 1, 0), []);
    let released = client.feed(Input::Drained(1));
    assert_eq!(
        released,
        [
            Action::CountHandOver,
            Action::Report,
            Action::ReturnAll,
            Action::Send(ClientMessage::LockReleased { epoch: epoch(1) }),
            // A thread that came to the gate meanwhile still requests the lock.
            Action::Report,
            Action::Send(ClientMessage::ReqLock),
        ]
    );
    // A second answer of the mover has no effect.
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

/// Its work has not had the time to complete.
#[test]
fn a_drain_goes_on_when_the_process_was_stopped_in_the_middle_of_it() {
    let mut client = Client::running_contended();
    client.hear(SchedulerMessage::DropLock { epoch: epoch(1), patience_ms: 200 });
    for after in [5, 60_000, 150] {
        assert_eq!(client.tick(after, 1, 0), [], "after {after} ms");
    }
    let given_up = client.tick(60, 1, 0);
    assert!(
        given_up.contains(&Action::Send(ClientMessage::DropDeferred { epoch: epoch(1) })),
        "{given_up:?}"
    );
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
fn a_client_freed_while_it_drains_opens_its_gate_at_once() {
    let mut client = Client::running_contended();
    client.hear(SchedulerMessage::DropLock { epoch: epoch(1), patience_ms: 50_000 });
    let freed = client.hear(SchedulerMessage::SchedOff);
    assert_eq!(freed, [Action::Cancel, Action::StopMetering, Action::Begin { anyway: false }]);
}

/// The scheduler tells no news: the other one has waited since before scheduling was switched off.
#[test]
fn a_client_beside_a_waiter_is_bounded_again_when_scheduling_is_switched_on() {
    let mut client = Client::running_contended();
    let off = client.hear(SchedulerMessage::SchedOff);
    assert_eq!(off, [Action::StopMetering, Action::Bound(InFlight::Unbounded)]);
    let on = client.hear(SchedulerMessage::SchedOn { epoch: epoch(2) });
    assert_eq!(on, [Action::StartMeteringAnew, adopted(2), Action::Bound(InFlight::Bounded)]);
    client.hear(SchedulerMessage::Waiters { waiting: false });
    client.hear(SchedulerMessage::SchedOff);
    let on = client.hear(SchedulerMessage::SchedOn { epoch: epoch(3) });
    assert_eq!(on, [Action::StartMeteringAnew, adopted(3), Action::Bound(InFlight::Unbounded)]);
}

#[test]
fn an_eviction_moves_memory_only_behind_a_closed_gate() {
    let mut client = Client::running_contended();
    assert_eq!(
        client.hear(SchedulerMessage::Evict(room(3))),
        [Action::Return { room: room(3), evict: false }]
    );
    client.feed(Input::WentIdle);
    // For an idle client, an EVICT also says that the lock was taken.
    assert_eq!(
        client.hear(SchedulerMessage::Evict(room(3))),
        [Action::Return { room: room(3), evict: true }]
    );
    assert!(client.machine.is_parked());
}

#[test]
fn a_thread_that_has_not_woken_yet_does_not_ask_for_the_lock_again() {
    let mut client = Client::running_contended();
    // The gate is open: the threads that slept at it are about to leave.
    assert_eq!(client.feed(Input::ThreadsWaiting), []);
    let idle = client.feed(Input::WentIdle);
    assert!(!idle.contains(&Action::Send(ClientMessage::ReqLock)), "{idle:?}");
    // A thread that sleeps now does ask.
    assert!(client.feed(Input::ThreadsWaiting).contains(&Action::Send(ClientMessage::ReqLock)));
}

#[test]
fn a_program_without_a_scheduler_runs_and_warns_once() {
    let mut client = Client::new();
    let alone = client.feed(Input::Nobody);
    assert_eq!(alone, [Action::WarnAlone, Action::StopMetering, Action::Begin { anyway: false }]);
    client.feed(Input::Began);
    assert_eq!(client.machine.gate(), Gate::Open);
    assert_eq!(client.feed(Input::Nobody), []);
    // The client joins with an open gate.
    let joined =
        client.hear(SchedulerMessage::Registered { client: 1, hold: InitialState::Running(epoch(4)) });
    assert_eq!(joined, [Action::StartMeteringAnew, adopted(4), Action::Bound(InFlight::Unbounded)]);
    assert!(client.machine.is_running());
}

#[test]
fn a_lost_scheduler_stops_no_holder_and_parks_nobody_for_ever() {
    let mut holder = Client::running_contended();
    let lost = [Action::StopMetering, Action::Bound(InFlight::Unbounded), Action::Expect(true)];
    assert_eq!(holder.feed(Input::Lost), lost);
    assert_eq!(holder.machine.gate(), Gate::Open);
    // An allocation that lacks memory waits for the scheduler as long as a parked program does.
    assert_eq!(holder.tick(4900, 0, 0), []);
    assert_eq!(holder.feed(Input::Lost), [], "another attempt is no other loss");
    assert_eq!(holder.tick(200, 0, 0), [Action::Expect(false)]);

    let mut parked = Client::registered(InitialState::Parked);
    parked.feed(Input::ThreadsWaiting);
    assert_eq!(parked.feed(Input::Lost), []);
    assert_eq!(parked.feed(Input::Nobody), [Action::WarnAlone]);
    assert_eq!(parked.wait(MS(4900)), []);
    assert_eq!(
        parked.tick(200, 0, 0),
        [Action::Reconnect, Action::StopMetering, Action::Begin { anyway: false }]
    );

    let mut draining = Client::running_contended();
    draining.hear(SchedulerMessage::DropLock { epoch: epoch(1), patience_ms: 200 });
    assert_eq!(
        draining.feed(Input::Lost),
        [Action::Cancel, Action::StopMetering, Action::Begin { anyway: false }, Action::Expect(true)]
    );
}

#[test]
fn a_scheduler_that_is_back_is_expected_no_more() {
    let mut client = Client::running_contended();
    client.feed(Input::Lost);
    let back = client.hear(SchedulerMessage::Registered { client: 1, hold: InitialState::Running(epoch(4)) });
    let goes_on =
        [Action::Expect(false), Action::StartMeteringAnew, adopted(4), Action::Bound(InFlight::Unbounded)];
    assert_eq!(back, goes_on);
    assert_eq!(client.tick(6000, 0, 0), []);
}

#[test]
fn a_restore_ends_when_a_scheduler_parks_the_program() {
    let mut client = Client::new();
    client.feed(Input::Nobody);
    assert_eq!(client.feed(Input::StillAbsent), [Action::Post(MoverOrder::Restore)]);
    let parked = client.hear(SchedulerMessage::Registered { client: 1, hold: InitialState::Parked });
    assert_eq!(parked, [Action::Cancel, Action::StartMetering]);
}

#[test]
fn a_scheduler_that_hangs_is_as_good_as_lost() {
    let mut client = Client::registered(InitialState::Parked);
    client.feed(Input::ThreadsWaiting);
    assert_eq!(client.tick(5000, 0, 0), [Action::Send(ClientMessage::Ping)]);
    client.now += MS(100);
    client.hear(SchedulerMessage::Pong);
    assert_eq!(client.tick(4900, 0, 0), []);
    assert_eq!(client.tick(100, 0, 0), [Action::Send(ClientMessage::Ping)]);
    assert_eq!(client.wait(MS(4900)), [Action::SayWaiting(RETURN_PATIENCE)]);
    let alone = client.tick(100, 0, 0);
    assert_eq!(alone, [Action::Reconnect, Action::StopMetering, Action::Begin { anyway: false }]);
}

#[test]
fn a_waiter_wakes_when_it_is_to_ask_whether_the_scheduler_lives() {
    let mut client = Client::registered(InitialState::Parked);
    let next_tick = |client: &Client, lacking| client.machine.next_tick(lacking, client.now);
    assert_eq!(next_tick(&client, false), None);
    client.feed(Input::ThreadsWaiting);
    assert_eq!(next_tick(&client, false), Some(MS(5000)));
    assert_eq!(client.tick(2000, 0, 0), []);
    assert_eq!((next_tick(&client, false), next_tick(&client, true)), (Some(MS(3000)), Some(MS(1000))));
    assert_eq!(client.tick(3000, 0, 0), [Action::Send(ClientMessage::Ping)]);
    assert_eq!(next_tick(&client, false), Some(MS(1000)));
    client.hear(SchedulerMessage::Pong);
    assert_eq!(next_tick(&client, false), Some(MS(5000)));
}

#[test]
fn a_process_that_was_stopped_takes_no_scheduler_for_silent() {
    let mut client = Client::registered(InitialState::Parked);
    client.feed(Input::ThreadsWaiting);
    assert_eq!(client.tick(5000, 0, 0), [Action::Send(ClientMessage::Ping)]);
    // The answer came while the process was stopped, and is read after the tick.
    assert_eq!(client.tick(60_000, 0, 0), []);
    client.hear(SchedulerMessage::Pong);
    assert_eq!(client.tick(1000, 0, 0), []);
    assert_eq!(client.tick(5000, 0, 0), [Action::Send(ClientMessage::Ping)]);
    // Nobody answers.
    assert_eq!(client.tick(60_000, 0, 0), []);
    let alone = client.wait(RETURN_PATIENCE);
    assert_eq!(alone[..2], [Action::SayWaiting(RETURN_PATIENCE), Action::Reconnect]);
}

#[test]
fn a_program_that_waits_for_an_answer_says_so_once_after_a_second() {
    let mut starting = Client::new();
    starting.feed(Input::Registering);
    assert_eq!(starting.tick(900, 0, 0), []);
    assert_eq!(starting.tick(200, 0, 0), [Action::SayWaiting(RETURN_PATIENCE)]);
    assert_eq!(starting.tick(1000, 0, 0), []);
    // An answer ends the silence. If something waits, another silence is said anew.
    starting.hear(SchedulerMessage::Registered { client: 1, hold: InitialState::Parked });
    starting.feed(Input::Lost);
    assert_eq!(starting.wait(MS(2000)), [], "nothing waits");
    starting.feed(Input::ThreadsWaiting);
    assert_eq!(starting.tick(100, 0, 0), [Action::SayWaiting(RETURN_PATIENCE)]);
}

#[test]
fn a_gate_that_opened_before_the_answer_to_register_is_registered_as_it_is() {
    let mut client = Client::new();
    client.feed(Input::Registering);
    assert_eq!(
        client.wait(MS(5000)),
        [
            Action::SayWaiting(RETURN_PATIENCE),
            Action::Reconnect,
            Action::StopMetering,
            Action::Begin { anyway: false }
        ]
    );
    client.feed(Input::Began);
    let late = client.hear(SchedulerMessage::Registered { client: 1, hold: InitialState::Parked });
    assert_eq!(late, [Action::Reconnect]);
    assert_eq!(client.machine.gate(), Gate::Open);
}

#[test]
fn room_of_nothing_means_that_there_is_no_more() {
    let mut client = Client::registered(InitialState::Parked);
    client.feed(Input::ThreadsWaiting);
    let granted =
        client.hear(SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1000, room: vec![room(0)] });
    assert!(!granted.contains(&Action::Refuse(GPU)), "in a grant it says nothing: {granted:?}");
    let some = client.hear(SchedulerMessage::Room(room(7)));
    assert_eq!(some, [Action::Give(room(7)), Action::Post(MoverOrder::Restore)]);
    let none = client.hear(SchedulerMessage::Room(room(0)));
    assert_eq!(none, [Action::Refuse(GPU), Action::Begin { anyway: false }]);
}

#[test]
fn memory_that_comes_back_waits_for_room_of_a_silent_scheduler_but_not_for_ever() {
    let mut client = Client::registered(InitialState::Parked);
    client.feed(Input::ThreadsWaiting);
    client.hear(SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1, room: vec![] });
    client.feed(Input::StillAbsent);
    let needs = client.feed(Input::Restored { lacking: vec![room(5)] });
    assert!(needs.contains(&Action::Send(ClientMessage::NeedRoom(room(5)))), "{needs:?}");
    assert!(client.machine.next_tick(false, client.now).is_some());
    assert!(client.wait(MS(4500)).is_empty());
    assert_eq!(client.wait(MS(1000)), [Action::Send(ClientMessage::Ping)]);
    let alone = client.wait(RETURN_PATIENCE);
    assert!(alone.contains(&Action::Reconnect) && alone.contains(&Action::StopMetering), "{alone:?}");
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
    let mut client = Client::registered(InitialState::Parked);
    client.hear(SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1, room: vec![] });
    assert_eq!(
        client.hear(SchedulerMessage::SchedOff),
        [Action::StopMetering, Action::Begin { anyway: false }]
    );
    // Scheduling is on again before the client's gate was open: room is counted again.
    assert_eq!(
        client.hear(SchedulerMessage::SchedOn { epoch: epoch(2) }),
        [Action::StartMeteringAnew, adopted(2), Action::Begin { anyway: false }]
    );
    let began = client.feed(Input::Began);
    assert!(began.contains(&Action::Send(ClientMessage::Running { epoch: epoch(2) })), "{began:?}");
}

#[test]
fn work_is_bounded_from_the_first_launch_on() {
    let mut client = Client::registered(InitialState::Parked);
    client.hear(SchedulerMessage::Waiters { waiting: true });
    client.hear(SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1000, room: vec![] });
    assert_eq!(client.machine.in_flight(), InFlight::Bounded, "before the gate opens");
    client.hear(SchedulerMessage::Waiters { waiting: false });
    assert_eq!(client.machine.in_flight(), InFlight::Unbounded);
}

#[test]
fn a_limit_that_an_administrator_sets_is_followed() {
    let mut client = Client::registered(InitialState::Parked);
    assert_eq!(client.hear(SchedulerMessage::Limit(room(7))), [Action::AllocationLimit(room(7))]);
}

/// A client that waits for its turn, and whose memory comes back as others' memory leaves.
fn next() -> Client {
    let mut client = Client::registered(InitialState::Parked);
    client.feed(Input::ThreadsWaiting);
    let first = client.hear(SchedulerMessage::Restore(room(5)));
    assert_eq!(first, [Action::Give(room(5)), Action::Post(MoverOrder::RestoreEarly)]);
    client
}

#[test]
fn memory_comes_back_behind_the_closed_gate_and_the_gate_opens_with_the_lock() {
    let mut client = next();
    assert_eq!(
        client.hear(SchedulerMessage::Restore(room(3))),
        [Action::Give(room(3)), Action::Post(MoverOrder::RestoreEarly)]
    );
    assert_eq!(client.feed(Input::Restored { lacking: vec![] }), [Action::Report], "the gate stays closed");
    let granted =
        client.hear(SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1, room: vec![room(2)] });
    assert_eq!(granted, [Action::Give(room(2)), Action::Cancel, Action::Begin { anyway: false }]);
    assert_eq!(client.feed(Input::StillAbsent), [Action::Post(MoverOrder::Restore)]);
}

#[test]
fn a_restore_ahead_of_the_lock_stops_when_the_order_is_to_evict() {
    let mut client = next();
    assert_eq!(
        client.hear(SchedulerMessage::Evict(room(3))),
        [Action::Cancel, Action::Return { room: room(3), evict: true }]
    );
    assert!(client.machine.is_parked());
    // An idle client's lock was taken.
    let mut idle = Client::running_contended();
    idle.feed(Input::WentIdle);
    idle.feed(Input::ThreadsWaiting);
    idle.hear(SchedulerMessage::Restore(room(5)));
    assert!(idle.machine.is_next());
}

#[test]
fn nothing_waits_for_room_of_a_scheduler_that_is_lost_or_does_not_schedule() {
    assert_eq!(next().feed(Input::Lost), [Action::Cancel]);
    let freed = [Action::Cancel, Action::StopMetering, Action::Begin { anyway: false }];
    assert_eq!(next().hear(SchedulerMessage::SchedOff), freed);
    let mut returned = next();
    assert_eq!(
        returned.hear(SchedulerMessage::Registered { client: 2, hold: InitialState::Parked })[0],
        Action::Cancel
    );
    // The scheduler does not answer.
    let mut asks = next();
    asks.now += RETURN_PATIENCE + PING_AFTER;
    assert_eq!(asks.tick(0, 0, 0), [Action::Send(ClientMessage::Ping)]);
    let alone = asks.wait(RETURN_PATIENCE);
    assert_eq!(alone[..3], [Action::SayWaiting(RETURN_PATIENCE), Action::Reconnect, Action::Cancel]);
}

#[test]
fn room_to_restore_into_that_comes_late_is_taken_and_changes_nothing() {
    let mut running = Client::running_contended();
    assert_eq!(running.hear(SchedulerMessage::Restore(room(5))), [Action::Give(room(5))]);
    assert!(running.machine.is_running());
    let mut granted = next();
    granted.hear(SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1, room: vec![] });
    assert_eq!(
        granted.hear(SchedulerMessage::Restore(room(5))),
        [Action::Give(room(5)), Action::Post(MoverOrder::Restore)]
    );
}

#[test]
fn connections_that_nobody_answers_prolong_no_wait() {
    let mut client = Client::registered(InitialState::Parked);
    client.feed(Input::ThreadsWaiting);
    client.feed(Input::Lost);
    let mut actions = Vec::new();
    for _ in 0..5 {
        actions.append(&mut client.wait(MS(1000)));
        actions.append(&mut client.feed(Input::Registering));
        actions.append(&mut client.feed(Input::Lost));
    }
    actions.append(&mut client.wait(MS(500)));
    assert!(actions.contains(&Action::Begin { anyway: false }), "{actions:?}");
}

/// Its memory was on its way back as it was asked for the lock, and counts as being there until that is over.
#[test]
fn a_program_that_is_called_back_in_its_restore_has_the_mover_look_first() {
    let mut client = Client::registered(InitialState::Parked);
    client.feed(Input::ThreadsWaiting);
    client.hear(SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1000, room: vec![] });
    client.hear(SchedulerMessage::DropLock { epoch: epoch(1), patience_ms: 200 });
    let back = client.hear(SchedulerMessage::LockOk { epoch: epoch(2), quantum_ms: 1000, room: vec![] });
    assert!(back.contains(&Action::Post(MoverOrder::Restore)), "{back:?}");
}
