//! Processes that go off the card and come back.

use super::*;
use crate::machine::patience::WAKE_PATIENCE;

fn said(message: ClientMessage) -> Action {
    Action::Send(message)
}

fn at_work() -> Action {
    said(ClientMessage::CannotSleep { reason: "it is at work".to_owned(), for_good: false })
}

const TOOK: Input = Input::Awake { took: Duration::from_millis(3) };
const AWAKE: Action = Action::Send(ClientMessage::Awake { took_us: 3000 });

/// A client that is off the card.
fn asleep() -> Client {
    let mut client = Client::registered(InitialState::Parked);
    assert_eq!(client.hear(SchedulerMessage::Sleep), [Action::Post(MoverOrder::Sleep)]);
    assert_eq!(client.feed(Input::Asleep), [said(ClientMessage::Asleep)]);
    assert!(client.machine.is_asleep());
    client
}

#[test]
fn a_call_that_waits_wakes_it_through_the_scheduler() {
    let mut client = asleep();
    assert_eq!(client.feed(Input::CallsWaiting), [said(ClientMessage::WakeWanted)]);
    assert_eq!(client.feed(Input::CallsWaiting), [], "it is said once");
    assert_eq!(client.hear(SchedulerMessage::Wake), [Action::Post(MoverOrder::Wake)]);
    assert_eq!(client.hear(SchedulerMessage::Wake), [], "it comes already");
    assert_eq!(client.feed(TOOK), [AWAKE]);
    assert!(!client.machine.is_asleep());
    assert!(client.feed(Input::ThreadsWaiting).contains(&said(ClientMessage::ReqLock)));
    assert_eq!(client.hear(SchedulerMessage::Wake), [], "it is awake");
}

#[test]
fn a_grant_that_comes_too_late_gives_its_room() {
    let late = || SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1, room: vec![room(8)] };
    let mut client = Client::registered(InitialState::Parked);
    client.hear(SchedulerMessage::Sleep);
    assert_eq!(client.hear(late()), [], "the mover may stay");
    assert_eq!(client.feed(Input::Asleep), [said(ClientMessage::Asleep), Action::Give(room(8))]);
    assert_eq!(client.hear(late()), [Action::Give(room(8))]);
    assert_eq!(client.hear(SchedulerMessage::Restore(room(3))), [Action::Give(room(3))]);
}

#[test]
fn a_program_at_work_does_not_go() {
    let mut waits = Client::registered(InitialState::Parked);
    waits.feed(Input::ThreadsWaiting);
    let mut free = Client::registered(InitialState::Free);
    free.feed(Input::Began);
    for client in [&mut waits, &mut free, &mut Client::running_contended()] {
        assert_eq!(client.hear(SchedulerMessage::Sleep), [at_work()]);
        assert!(!client.machine.is_asleep());
    }
}

#[test]
fn threads_that_come_to_the_gate_meanwhile_ask_when_it_stays() {
    let mut client = Client::registered(InitialState::Parked);
    client.hear(SchedulerMessage::Sleep);
    assert_eq!(client.feed(Input::ThreadsWaiting), [], "the mover finds them");
    let reason = || "its threads are busy".to_owned();
    let stays = client.feed(Input::CannotSleep { reason: reason(), for_good: false });
    assert_eq!(stays[0], said(ClientMessage::CannotSleep { reason: reason(), for_good: false }));
    assert!(stays.contains(&said(ClientMessage::ReqLock)));
}

#[test]
fn what_comes_on_the_way_waits_until_it_is_there() {
    let grant = || SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1000, room: vec![] };
    let mut client = Client::registered(InitialState::Parked);
    client.hear(SchedulerMessage::Sleep);
    assert_eq!(client.hear(SchedulerMessage::Evict(room(5))), []);
    assert_eq!(client.hear(grant()), []);
    let eviction = Action::Return { room: room(5), evict: false };
    assert_eq!(
        client.feed(Input::Asleep),
        [said(ClientMessage::Asleep), eviction],
        "no memory that moves is on the card, and the scheduler takes a grant back from one that is asleep"
    );
    assert_eq!(client.hear(grant()), [], "it crossed ASLEEP as well");
    assert_eq!(client.hear(SchedulerMessage::Wake), [Action::Post(MoverOrder::Wake)]);
    assert_eq!(client.feed(TOOK), [AWAKE]);
    // It stays: a grant is one.
    let mut client = Client::registered(InitialState::Parked);
    client.hear(SchedulerMessage::Sleep);
    client.hear(grant());
    let stays = client.feed(Input::CannotSleep { reason: String::new(), for_good: false });
    assert!(stays.contains(&Action::Begin { anyway: false }), "{stays:?}");
    // It stays: the eviction may move memory.
    let mut client = Client::registered(InitialState::Parked);
    client.hear(SchedulerMessage::Sleep);
    client.hear(SchedulerMessage::Evict(room(5)));
    let stays = client.feed(Input::CannotSleep { reason: String::new(), for_good: false });
    assert_eq!(stays[1..], [Action::Return { room: room(5), evict: true }]);
}

/// The card may be full: the scheduler wakes one after the other.
#[test]
fn scheduling_off_waits_for_its_turn_to_come_back() {
    let mut client = asleep();
    assert_eq!(client.hear(SchedulerMessage::SchedOff), []);
    assert_eq!(client.hear(SchedulerMessage::Wake), [Action::Post(MoverOrder::Wake)]);
    assert_eq!(client.feed(TOOK), [AWAKE], "it is told again");
    let free = client.hear(SchedulerMessage::SchedOff);
    assert_eq!(free, [Action::StopMetering, Action::Begin { anyway: false }]);
}

#[test]
fn a_grant_of_a_scheduler_that_is_gone_is_void() {
    let mut client = Client::registered(InitialState::Parked);
    client.hear(SchedulerMessage::Sleep);
    client.hear(SchedulerMessage::LockOk { epoch: epoch(1), quantum_ms: 1000, room: vec![] });
    client.feed(Input::Lost);
    let stays = client.feed(Input::CannotSleep { reason: String::new(), for_good: false });
    assert!(!stays.contains(&Action::Begin { anyway: false }), "{stays:?}");
}

/// It had passed the door before that closed, and nobody rings for it again.
#[test]
fn a_thread_that_came_to_the_gate_before_it_went_wakes_it() {
    let mut client = Client::registered(InitialState::Parked);
    client.hear(SchedulerMessage::Sleep);
    assert_eq!(client.feed(Input::ThreadsWaiting), []);
    assert_eq!(client.feed(Input::Asleep), [said(ClientMessage::Asleep), said(ClientMessage::WakeWanted)]);
    let mut later = asleep();
    assert_eq!(later.feed(Input::ThreadsWaiting), [said(ClientMessage::WakeWanted)]);
}

/// The scheduler has taken the lock from it without a word, and there was no memory to ask for.
#[test]
fn an_idle_client_goes() {
    let mut client = Client::running_contended();
    client.feed(Input::WentIdle);
    let told = client.hear(SchedulerMessage::Sleep);
    assert_eq!(told, [Action::Post(MoverOrder::Sleep)]);
}

#[test]
fn without_a_scheduler_it_sleeps_until_a_call_has_waited_long_enough() {
    let mut client = asleep();
    client.feed(Input::Lost);
    assert_eq!(client.wait(2 * WAKE_PATIENCE), [], "nothing waits");
    assert_eq!(client.feed(Input::Nobody), [Action::WarnAlone]);
    assert_eq!(client.feed(Input::CallsWaiting), []);
    assert_eq!(client.wait(MS(2000)), [Action::SayWaiting(WAKE_PATIENCE)]);
    assert!(!client.wait(WAKE_PATIENCE - MS(2500)).contains(&Action::Post(MoverOrder::Wake)));
    let woken = client.wait(MS(1000));
    assert!(woken.contains(&Action::Post(MoverOrder::Wake)), "{woken:?}");
    assert!(!woken.contains(&Action::Begin { anyway: false }), "its gate opens when it is awake");
    assert!(client.feed(TOOK).contains(&Action::Begin { anyway: false }));
}

#[test]
fn the_next_scheduler_is_told_that_it_sleeps_and_what_waits() {
    let registered = |hold| SchedulerMessage::Registered { client: 2, hold };
    let mut client = asleep();
    client.feed(Input::CallsWaiting);
    client.feed(Input::Lost);
    client.feed(Input::Registering);
    assert_eq!(
        client.hear(registered(InitialState::Parked)),
        [said(ClientMessage::Asleep), said(ClientMessage::WakeWanted)]
    );
    // While scheduling is off, it comes back when the scheduler says so.
    let mut client = asleep();
    client.feed(Input::Lost);
    client.feed(Input::Registering);
    assert_eq!(client.hear(registered(InitialState::Free)), [said(ClientMessage::Asleep)]);
    assert_eq!(client.hear(SchedulerMessage::Wake), [Action::Post(MoverOrder::Wake)]);
    assert!(client.feed(TOOK).contains(&Action::Begin { anyway: false }));
}

#[test]
fn a_scheduler_that_does_not_answer_a_waiting_call_is_given_up() {
    let mut client = asleep();
    client.feed(Input::CallsWaiting);
    let waited = client.wait(PING_AFTER + WAKE_PATIENCE + MS(2000));
    assert!(waited.contains(&said(ClientMessage::Ping)), "{waited:?}");
    assert!(waited.contains(&Action::Reconnect) && waited.contains(&Action::Post(MoverOrder::Wake)));
}

#[test]
fn one_that_registered_while_scheduling_was_off_is_not_alone_once_it_is_on() {
    let mut client = asleep();
    client.feed(Input::Lost);
    client.feed(Input::Registering);
    client.hear(SchedulerMessage::Registered { client: 2, hold: InitialState::Free });
    // Before the scheduler has heard that it sleeps.
    client.hear(SchedulerMessage::SchedOn { epoch: epoch(1) });
    client.hear(SchedulerMessage::Wake);
    assert_eq!(client.feed(TOOK), [AWAKE], "its gate stays shut");
}

const FIRST: GpuUuid = GpuUuid([1; 16]);
const OTHER: GpuUuid = GpuUuid([2; 16]);
const MOVE: SchedulerMessage = SchedulerMessage::Move { from: FIRST, to: OTHER };

#[test]
fn one_that_is_sent_to_another_gpu_registers_anew_and_comes_back_there() {
    let mut client = asleep();
    client.feed(Input::CallsWaiting);
    assert_eq!(client.hear(MOVE), [Action::ChangePlaces { gpus: [FIRST, OTHER] }, Action::Reconnect]);
    client.feed(Input::Registering);
    let registered = SchedulerMessage::Registered { client: 2, hold: InitialState::Parked };
    assert_eq!(client.hear(registered), [said(ClientMessage::Asleep), said(ClientMessage::WakeWanted)]);
    assert_eq!(client.hear(SchedulerMessage::Wake), [Action::Post(MoverOrder::Wake)]);
    assert_eq!(client.feed(TOOK), [AWAKE]);
}

/// An administrator has sent for it.
#[test]
fn one_that_is_sent_to_another_gpu_or_refused_there_asks_though_no_call_waits() {
    let asks = |client: &mut Client| {
        client.feed(Input::Registering);
        let registered = SchedulerMessage::Registered { client: 2, hold: InitialState::Parked };
        assert_eq!(client.hear(registered), [said(ClientMessage::Asleep), said(ClientMessage::WakeWanted)]);
        assert_eq!(client.hear(SchedulerMessage::Wake), [Action::Post(MoverOrder::Wake)]);
    };
    let mut client = asleep();
    client.hear(MOVE);
    asks(&mut client);
    assert_eq!(client.feed(Input::MovedBack), [Action::Reconnect]);
    asks(&mut client);
    assert_eq!(client.feed(TOOK), [AWAKE]);
    // The next sleep is another one.
    client.hear(SchedulerMessage::Sleep);
    client.feed(Input::Asleep);
    client.feed(Input::Lost);
    client.feed(Input::Registering);
    let registered = SchedulerMessage::Registered { client: 3, hold: InitialState::Parked };
    assert_eq!(client.hear(registered), [said(ClientMessage::Asleep)]);
}

#[test]
fn one_that_is_awake_or_on_its_way_is_not_sent_anywhere() {
    let mut client = Client::registered(InitialState::Parked);
    assert_eq!(client.hear(MOVE), []);
    client.hear(SchedulerMessage::Sleep);
    assert_eq!(client.hear(MOVE), []);
    client.feed(Input::Asleep);
    client.hear(SchedulerMessage::Wake);
    assert_eq!(client.hear(MOVE), []);
}

#[test]
fn one_whose_driver_refuses_the_other_gpu_sleeps_on_and_registers_anew() {
    let mut client = asleep();
    client.feed(Input::CallsWaiting);
    client.hear(MOVE);
    client.feed(Input::Registering);
    client.hear(SchedulerMessage::Registered { client: 2, hold: InitialState::Parked });
    client.hear(SchedulerMessage::Wake);
    assert_eq!(client.feed(Input::MovedBack), [Action::Reconnect]);
    assert!(client.machine.is_asleep());
    client.feed(Input::Registering);
    let registered = SchedulerMessage::Registered { client: 3, hold: InitialState::Parked };
    assert_eq!(client.hear(registered), [said(ClientMessage::Asleep), said(ClientMessage::WakeWanted)]);
    assert_eq!(client.hear(SchedulerMessage::Wake), [Action::Post(MoverOrder::Wake)]);
}

/// Its own GPU may be full by now.
#[test]
fn one_that_is_refused_the_other_gpu_while_scheduling_is_off_asks_as_well() {
    let mut client = asleep();
    client.hear(MOVE);
    client.feed(Input::Registering);
    client.hear(SchedulerMessage::Registered { client: 2, hold: InitialState::Free });
    client.hear(SchedulerMessage::Wake);
    assert_eq!(client.feed(Input::MovedBack), [Action::Reconnect]);
    client.feed(Input::Registering);
    let free = SchedulerMessage::Registered { client: 3, hold: InitialState::Free };
    assert_eq!(client.hear(free), [said(ClientMessage::Asleep), said(ClientMessage::WakeWanted)]);
    client.hear(SchedulerMessage::Wake);
    assert!(client.feed(TOOK).contains(&Action::Begin { anyway: false }));
}

#[test]
fn one_that_is_alone_and_refused_the_other_gpu_comes_back_at_once() {
    let mut client = asleep();
    client.feed(Input::CallsWaiting);
    client.hear(MOVE);
    let woken = client.wait(WAKE_PATIENCE + MS(1000));
    assert!(woken.contains(&Action::Post(MoverOrder::Wake)), "{woken:?}");
    assert_eq!(client.feed(Input::MovedBack), [Action::Post(MoverOrder::Wake)]);
    assert!(client.feed(TOOK).contains(&Action::Begin { anyway: false }));
}

/// Nobody keeps memory free on the GPU to which it was sent.
#[test]
fn one_that_was_sent_elsewhere_and_finds_no_scheduler_waits_for_one() {
    let mut client = asleep();
    client.hear(MOVE);
    let at_once = client.feed(Input::Nobody);
    assert!(!at_once.contains(&Action::Post(MoverOrder::Wake)), "{at_once:?}");
    let later = client.wait(2 * WAKE_PATIENCE);
    assert!(!later.contains(&Action::Post(MoverOrder::Wake)), "nothing waits: {later:?}");
    client.feed(Input::CallsWaiting);
    let soon = client.wait(WAKE_PATIENCE - MS(500));
    assert!(!soon.contains(&Action::Post(MoverOrder::Wake)), "{soon:?}");
    assert!(client.wait(MS(1000)).contains(&Action::Post(MoverOrder::Wake)));
}
