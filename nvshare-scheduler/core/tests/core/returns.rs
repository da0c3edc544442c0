//! Clients and schedulers that come back.

use std::collections::{BTreeMap, BTreeSet};

use nvshare_core::{Config, Core, Event, Identity, Output};
use nvshare_proto::{Amount, ClientMessage, ClientState, EventKind, Gate, Register, SchedulerMessage, Usage};

use crate::table::{
    CAPACITY, GIB, MS, Table, config, gpu, granted, newcomer, registered, room_given, twelve_gib,
};

#[test]
fn a_client_back_before_it_is_known_to_be_gone_is_charged_once() {
    let mut core = Core::new(config(false));
    let again = |client| match registered(client, Gate::Closed, 0) {
        Event::Registered { register, .. } => {
            let identity = Identity { pid: Some(9), process: Some(77), tenant: None, gang: None };
            Event::Registered { client, identity, register }
        }
        other => other,
    };
    core.handle(again(0), MS(0));
    core.handle(again(1), MS(1));
    core.handle(Event::Disconnected { client: 0, process_remains: true }, MS(2));
    assert_eq!(core.gpu_status()[0].resident, 12 * GIB);
}

#[test]
fn a_client_parked_before_its_scheduler_waits_for_those_that_run() {
    let mut core = Core::new(Config { settle: MS(1300), ..config(false) });
    let granted = |core: &mut Core| {
        std::iter::from_fn(|| core.poll_output())
            .any(|o| matches!(o, Output::Send { client: 1, message: SchedulerMessage::LockOk { .. } }))
    };
    core.handle(registered(1, Gate::Closed, 8 * GIB), MS(100));
    core.handle(Event::Message { client: 1, message: ClientMessage::ReqLock }, MS(101));
    assert!(!granted(&mut core), "what the other fills is not known yet");
    assert_eq!(core.next_deadline(), Some(MS(1300)));
    core.handle(registered(2, Gate::Open, 0), MS(900));
    core.handle(Event::Deadline, MS(1300));
    assert!(!granted(&mut core), "the other runs");
    // The other is gone, with what it had.
    core.handle(Event::Disconnected { client: 2, process_remains: false }, MS(1400));
    assert!(granted(&mut core));
}

#[test]
fn after_an_earlier_scheduler_a_newcomer_waits_for_those_who_come_back() {
    let mut table = Table::new(Config { settle: MS(1300), restarted: true, ..config(false) });
    table.now = 50;
    table.register(1, Gate::Closed, 12 * GIB, 12 * GIB);
    assert_eq!(granted(&table.say(1, ClientMessage::ReqLock), 1), None);
    table.now = 900;
    table.register(2, Gate::Open, 12 * GIB, 0);
    assert_eq!(granted(&table.wait_until(1400), 1), None, "the other runs");
    assert!(table.core.gpu_status()[0].resident <= CAPACITY);
}

/// A process has left its connection and lives on, with 12 GiB; another waits for them.
fn left_behind() -> Table {
    let mut table = Table::new(config(false));
    table.register(1, Gate::Closed, 12 * GIB, 0);
    table.happens(Event::Disconnected { client: 1, process_remains: true });
    table.register(2, Gate::Closed, 12 * GIB, 12 * GIB);
    assert_eq!(granted(&table.say(2, ClientMessage::ReqLock), 2), None);
    table
}

#[test]
fn a_process_that_is_back_is_not_charged_twice_on_a_gpu_that_it_names_later() {
    let mut table = Table::new(config(false));
    for client in 1..=100 {
        let identity = Identity { pid: Some(9), process: Some(7), ..Identity::default() };
        let register = Register { usage: Vec::new(), ..newcomer(Gate::Closed, twelve_gib(0)) };
        table.happens(Event::Registered { client, identity, register });
        table.say(client, ClientMessage::Usage(twelve_gib(12 * GIB)));
        table.say(client, ClientMessage::NeedRoom(Amount { gpu: gpu(0), bytes: 12 * GIB }));
        table.happens(Event::Disconnected { client, process_remains: true });
        assert!(table.core.gpu_status()[0].resident <= 13 * GIB, "client {client}");
    }
    let left =
        table.core.client_status().iter().filter(|row| row.state == ClientState::Left && !row.gone).count();
    assert_eq!(left, 1);
}

#[test]
fn a_process_that_left_and_lives_on_is_shown_and_who_waits_is_told() {
    let mut table = left_behind();
    table.wait_until(10_001);
    let rows = table.core.client_status();
    let left = rows.iter().find(|row| row.client == 1).expect("a row");
    assert_eq!(left.state, ClientState::Left);
    assert!(!left.gone && left.pid == 9 && left.resident == 12 * GIB, "{left:?}");
    let waits = rows.iter().find(|row| row.client == 2).expect("a row");
    assert_eq!((waits.state, waits.blocked_on), (ClientState::Blocked, Some(gpu(0))), "{waits:?}");
    let told = |note: &String| note.contains("client 2 waits: process 9 has left");
    assert!(table.notes.iter().any(told), "{:?}", table.notes);
    assert!(granted(&table.happens(Event::Exited { client: 1, identity: Identity::default() }), 2).is_some());
}

#[test]
fn of_many_that_left_at_once_the_last_few_stay_listed() {
    const MANY: u64 = 100;
    let mut table = Table::new(config(false));
    for client in 1..=MANY {
        table.register(client, Gate::Closed, GIB / 16, 0);
        table.happens(Event::Disconnected { client, process_remains: true });
    }
    assert_eq!(table.core.client_status().len() as u64, MANY, "their memory is still there");
    for client in 1..=MANY {
        let identity = Identity { pid: Some(9), process: Some(client), ..Identity::default() };
        table.happens(Event::Exited { client, identity });
    }
    table.register(MANY + 1, Gate::Closed, GIB, 0);
    table.happens(Event::Disconnected { client: MANY + 1, process_remains: false });
    assert_eq!(table.core.client_status().len(), 32);
}

#[test]
fn a_process_that_left_and_has_nothing_is_given_up() {
    let mut table = left_behind();
    let look = |table: &mut Table, seen: bool| {
        let used = if seen { BTreeMap::from([(1, GIB)]) } else { BTreeMap::new() };
        table.now += 5000;
        table.sees(0, CAPACITY, used)
    };
    for seen in [false, true, false] {
        assert_eq!(granted(&look(&mut table, seen), 2), None, "it may still end, or be seen");
    }
    assert!(granted(&look(&mut table, false), 2).is_some(), "{:?}", table.core.client_status());
}

/// Each time that it disconnects, its end is waited for anew, and once in all.
#[test]
fn all_that_a_process_left_is_free_when_it_ends() {
    let process = Identity { pid: Some(9), process: Some(1), ..Identity::default() };
    for process_remains in [true, false] {
        let mut table = left_behind();
        // It comes back without that GPU, and goes again.
        let elsewhere = Usage { gpu: gpu(1), allocated: 0, absent: 0, ..twelve_gib(0) };
        table.register_as(3, process, Gate::Closed, elsewhere);
        table.happens(Event::Disconnected { client: 3, process_remains });
        assert_eq!(table.core.gpu_status()[0].resident, 12 * GIB);
        let sent = table.happens(Event::Exited { client: 3, identity: process });
        assert!(granted(&sent, 2).is_some(), "{:?}", table.core.client_status());
    }
}

/// It names another GPU each time.
#[test]
fn all_that_a_process_left_is_one_row() {
    let process = Identity { pid: Some(9), process: Some(1), ..Identity::default() };
    let mut table = Table::new(config(false));
    let on = |n| Usage { gpu: gpu(n), allocated: GIB, absent: 0, ..twelve_gib(0) };
    for n in 0..40 {
        table.register_as(u64::from(n), process, Gate::Closed, on(n));
        table.happens(Event::Disconnected { client: u64::from(n), process_remains: true });
        let told: BTreeSet<_> = std::iter::from_fn(|| table.core.poll_incident())
            .filter_map(|incident| Some((incident.client?, incident.kind)))
            .filter(|(_, kind)| matches!(kind, EventKind::Left | EventKind::Ended))
            .map(|(client, kind)| (client, kind == EventKind::Ended))
            .collect();
        // Nothing is left under the number before.
        let before = n.checked_sub(1).map(|n| (u64::from(n), true));
        assert_eq!(told, before.into_iter().chain([(u64::from(n), false)]).collect());
    }
    let rows = table.core.client_status();
    let left: Vec<_> = rows.iter().filter(|row| !row.gone).map(|row| (row.client, row.resident)).collect();
    assert_eq!(left, [(39, 40 * GIB)]);
    assert!(rows.len() <= 32, "{}", rows.len());
    assert!(table.core.gpu_status().iter().all(|gpu| gpu.resident == GIB));
    // It names one of them again, and ends.
    table.register_as(50, process, Gate::Closed, on(3));
    table.happens(Event::Disconnected { client: 50, process_remains: true });
    assert!(table.core.gpu_status().iter().all(|gpu| gpu.resident == GIB));
    table.happens(Event::Exited { client: 50, identity: process });
    assert!(table.core.gpu_status().iter().all(|gpu| gpu.resident == 0));
}

/// A process with 12 GiB, some of them absent, goes on as scheduling comes on, and has still to read that.
fn scheduling_comes_on(absent: u64) -> (Table, ClientMessage) {
    let mut table = Table::new(config(false));
    table.register(1, Gate::Closed, 12 * GIB, absent);
    table.core.switch_off(true, MS(1)).unwrap();
    table.core.switch_on(MS(2));
    let on = table.sent().into_iter().find_map(|(_, message)| match message {
        SchedulerMessage::SchedOn { epoch } => Some(epoch),
        _ => None,
    });
    (table, ClientMessage::Adopted { epoch: on.expect("SCHED_ON") })
}

/// One GiB leaves the card, and the process says these messages before and after it has read SCHED_ON. Returns the GiB of its room then, and
/// those that it is given when it wants all of its memory.
fn room_after_scheduling_came_on(before: &[ClientMessage], after: &[ClientMessage]) -> (u64, u64) {
    let (mut table, adopted) = scheduling_comes_on(0);
    for message in before.iter().chain([&adopted]).chain(after) {
        table.say(1, message.clone());
    }
    let has = table.core.gpu_status()[0].resident / GIB;
    let needs = ClientMessage::NeedRoom(Amount { gpu: gpu(0), bytes: 12 * GIB });
    // One GiB is given to spare.
    (has, room_given(&table.say(1, needs), 1) / GIB - 1)
}

#[test]
fn room_given_back_as_scheduling_comes_on_is_counted_once() {
    let left = ClientMessage::Usage(twelve_gib(GIB));
    let room = ClientMessage::Room(Amount { gpu: gpu(0), bytes: GIB });
    for (before, after, expected) in [
        (vec![left.clone(), room.clone()], vec![], (11, 1)),
        (vec![], vec![left.clone(), room.clone()], (11, 1)),
        // It counts on what it has said, and knows that it has still to give the room back.
        (vec![left], vec![room], (10, 2)),
    ] {
        assert_eq!(room_after_scheduling_came_on(&before, &after), expected, "{before:?}, {after:?}");
    }
}

#[test]
fn a_gpu_first_used_as_scheduling_comes_on_counts() {
    let (mut table, adopted) = scheduling_comes_on(0);
    table.say(1, ClientMessage::Usage(Usage { gpu: gpu(1), allocated: 4 * GIB, ..twelve_gib(0) }));
    table.say(1, adopted);
    assert_eq!(table.core.gpu_status()[1].resident, 4 * GIB);
}

/// The scheduler knew already that its memory had left, and hears of the room late.
#[test]
fn room_given_as_scheduling_comes_on_is_not_taken_for_room_given_back() {
    let (mut table, adopted) = scheduling_comes_on(12 * GIB);
    let room = |gib| Amount { gpu: gpu(0), bytes: gib * GIB };
    let given = room_given(&table.say(1, ClientMessage::NeedRoom(room(5))), 1);
    table.say(1, ClientMessage::Room(room(4)));
    table.say(1, adopted);
    assert_eq!((given, table.core.gpu_status()[0].resident), (6 * GIB, 6 * GIB));
}
