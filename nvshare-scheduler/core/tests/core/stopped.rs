//! A client that is stopped, as by Ctrl-Z, answers nothing: it costs others no more than the memory that it keeps.

use nvshare_core::{Config, Event, Gang, Identity};
use nvshare_proto::{Amount, ClientMessage, Gate, Register, SchedulerMessage, Usage, Wishes};

use crate::table::{CAPACITY, GIB, MS, Table, asked_to_leave, config, gpu, granted, newcomer};

const STOPPED: u64 = 3;

/// Clients of this size, of which the last is stopped while it runs; it asked for this weight.
fn beside_one_that_stops(bytes: u64, weight: Option<u32>) -> Table {
    let config = Config { grace: MS(2000), ..config(false) };
    let mut table = Table::new(config);
    for client in 1..=STOPPED {
        let usage =
            Usage { gpu: gpu(0), total: CAPACITY, limit: 0, allocated: bytes, absent: bytes, immovable: 0 };
        let asked = Wishes { weight: weight.filter(|_| client == STOPPED), ..Wishes::default() };
        let register = Register { asked, ..newcomer(Gate::Closed, usage) };
        let identity = Identity { pid: Some(9), process: Some(client), ..Identity::default() };
        table.happens(Event::Registered { client, identity, register });
    }
    table.runs(STOPPED);
    for client in 1..STOPPED {
        let sent = table.say(client, ClientMessage::ReqLock);
        answer(&mut table, sent);
    }
    table
}

/// All clients but the stopped one do at once what they are told, and always have work.
fn answer(table: &mut Table, mut sent: Vec<(u64, SchedulerMessage)>) {
    let mut at = 0;
    while let Some((client, message)) = sent.get(at).cloned() {
        at += 1;
        let answers: &[ClientMessage] = match message {
            _ if client == STOPPED => &[],
            SchedulerMessage::LockOk { epoch, .. } => &[ClientMessage::Running { epoch }],
            SchedulerMessage::DropLock { epoch, .. } => {
                &[ClientMessage::LockReleased { epoch }, ClientMessage::ReqLock]
            }
            SchedulerMessage::Evict(Amount { gpu, bytes }) => {
                &[ClientMessage::Room(Amount { gpu, bytes }), ClientMessage::Evicted { gpu, short: 0 }]
            }
            _ => &[],
        };
        for answer in answers {
            sent.append(&mut table.say(client, answer.clone()));
        }
    }
}

fn go_on_until(table: &mut Table, time: u64) {
    while let Some(deadline) = table.core.next_deadline().filter(|&deadline| deadline <= MS(time)) {
        table.now = table.now.max(deadline.as_millis() as u64 + 1);
        let sent = table.happens(Event::Deadline);
        answer(table, sent);
    }
    table.now = time;
}

/// How long each of the clients that are not stopped holds the lock in 20 s, a while after one of them was.
fn held(table: &mut Table) -> Vec<u64> {
    let times = |table: &Table| -> Vec<u64> {
        let clients = table.core.client_status();
        clients.iter().filter(|client| client.client != STOPPED).map(|client| client.held_ms).collect()
    };
    go_on_until(table, 10_000);
    table.happens(Event::Deadline);
    let before = times(table);
    go_on_until(table, 30_000);
    table.happens(Event::Deadline);
    times(table).iter().zip(before).map(|(after, before)| after - before).collect()
}

/// It keeps the room that it was given beyond its memory, and a third one would fit beside its memory alone.
#[test]
fn room_of_a_stopped_client_is_in_the_way_of_others_like_its_memory() {
    const LARGE: u64 = 1;
    const LATER: u64 = 2;
    let mut table = Table::new(Config { grace: MS(2000), ..config(false) });
    for (client, gib) in [(LARGE, 12), (STOPPED, 1), (LATER, 3)] {
        table.register(client, Gate::Closed, gib * GIB, gib * GIB);
    }
    let epoch = table.runs(LARGE);
    let sent = table.say(STOPPED, ClientMessage::ReqLock);
    assert!(granted(&sent, STOPPED).is_some(), "{sent:?}");
    table.happens(Event::Stopped { client: STOPPED, stopped: true });
    let mut sent = table.say(LATER, ClientMessage::ReqLock);
    sent.append(&mut table.wait_until(10_000));
    assert_eq!(asked_to_leave(&sent, LARGE), Some(epoch), "{sent:?}");
}

/// Each look at one of the GPUs finds it ahead on the other one.
#[test]
fn one_that_waits_for_two_gpus_keeps_no_other_off_them() {
    for is_idle in [false, true] {
        let mut table = Table::new(config(false));
        for client in 1..=STOPPED {
            let on = |number| Usage {
                gpu: gpu(number),
                total: CAPACITY,
                limit: 0,
                allocated: 12 * GIB,
                absent: 12 * GIB,
                immovable: 0,
            };
            let register = Register { usage: vec![on(0), on(1)], ..newcomer(Gate::Closed, on(0)) };
            table.happens(Event::Registered { client, identity: Identity::default(), register });
        }
        let epoch = table.runs(1);
        for (at, client) in [(10, STOPPED), (20, 2)] {
            table.now = at;
            table.say(client, ClientMessage::ReqLock);
        }
        table.happens(Event::Stopped { client: STOPPED, stopped: true });
        let sent = if is_idle {
            table.say(1, ClientMessage::Idle { epoch });
            table.wait_until(10_000)
        } else {
            let sent = table.wait_until(10_000);
            assert_eq!(asked_to_leave(&sent, 1), Some(epoch), "{sent:?}");
            table.say(1, ClientMessage::LockReleased { epoch })
        };
        let sent = table.give_back(sent);
        assert!(granted(&sent, 2).is_some(), "{is_idle}: {sent:?}");
    }
}

#[test]
fn it_stops_nobody_whose_memory_fits_beside_its_own() {
    for (bytes, weight, takes_turns, least) in [
        (GIB, None, false, 19_000),
        (GIB, Some(50), true, 19_000),
        // A program may ask for less than others, not for more.
        (GIB, Some(400), false, 19_000),
        // The two others take turns in the room that is left.
        (6 * GIB, None, true, 9_700),
        (6 * GIB, Some(50), true, 9_700),
    ] {
        let mut table = beside_one_that_stops(bytes, weight);
        let held = held(&mut table);
        let says = |note: &&String| {
            note.contains("client 3 (x, pid 9) does not answer") && note.contains("`kill -CONT 9`")
        };
        assert_eq!(table.notes.iter().filter(says).count(), usize::from(takes_turns), "{:?}", table.notes);
        assert!(held.iter().all(|&ms| ms > least), "{held:?} with {bytes} bytes and {weight:?}");
    }
}

/// In another PID namespace, as in a pod, the number that it says itself is another process's here.
#[test]
fn no_command_has_a_number_that_the_kernel_did_not_give() {
    let mut table = Table::new(Config { grace: MS(2000), ..config(false) });
    let identity = Identity { pid: None, process: Some(STOPPED), ..Identity::default() };
    table.register_as(STOPPED, identity, Gate::Closed, usage_of(12));
    table.register(1, Gate::Closed, 12 * GIB, 12 * GIB);
    table.runs(STOPPED);
    let sent = table.say(1, ClientMessage::ReqLock);
    answer(&mut table, sent);
    go_on_until(&mut table, 10_000);
    let is_said = |note: &&String| note.contains("client 3 (x, pid 9) does not answer");
    let said: Vec<&String> = table.notes.iter().filter(is_said).collect();
    assert_eq!(said.len(), 1, "{:?}", table.notes);
    assert!(said[0].ends_with("the end of its pod or container frees its memory"), "{said:?}");
    assert!(table.notes.iter().all(|note| !note.contains("kill")), "{:?}", table.notes);
}

#[test]
fn allocations_of_others_do_not_wait_for_it() {
    let mut table = beside_one_that_stops(GIB, Some(50));
    go_on_until(&mut table, 10_000);
    let sent = table.say(1, ClientMessage::NeedRoom(Amount { gpu: gpu(0), bytes: 14 * GIB }));
    let evicted =
        sent.iter().any(|(client, message)| *client == 2 && matches!(message, SchedulerMessage::Evict(_)));
    let left = sent
        .iter()
        .any(|(client, message)| *client == 2 && matches!(message, SchedulerMessage::DropLock { .. }));
    assert!(evicted || left, "{sent:?}");
}

/// Three programs of 12 GiB: one runs, and two wait.
fn crowded() -> Table {
    let mut table = Table::new(config(false));
    for client in 1..=STOPPED {
        table.register(client, Gate::Closed, 12 * GIB, 12 * GIB);
    }
    table.runs(1);
    for client in [STOPPED, 2] {
        let sent = table.say(client, ClientMessage::ReqLock);
        assert_eq!(granted(&sent, client), None);
        table.now += 1;
    }
    table
}

fn stops(table: &mut Table, stopped: bool) -> Vec<(u64, SchedulerMessage)> {
    table.happens(Event::Stopped { client: STOPPED, stopped })
}

#[test]
fn one_that_waits_is_granted_nothing_until_it_goes_on() {
    let mut table = crowded();
    assert_eq!(table.core.suspects(), [1, 2, 3], "others wait for each of them");
    stops(&mut table, true);
    let kept = |note: &String| note.contains("client 3 (x, pid 9) is stopped, and keeps 0; `kill -CONT 9`");
    assert!(table.notes.iter().any(kept), "{:?}", table.notes);
    let held = held(&mut table);
    assert!(held.iter().all(|&ms| ms > 9_500), "the two others take turns: {held:?}");
    let status = table.core.client_status();
    let stopped = status.iter().find(|client| client.client == STOPPED).unwrap();
    assert!(stopped.stuck && stopped.held_ms == 0 && stopped.resident == 0, "{stopped:?}");

    table.say(1, ClientMessage::Ping);
    assert!(table.core.suspects().contains(&STOPPED), "nobody would see it go on");
    let mut sent = stops(&mut table, false);
    let until = table.now + 5_000;
    while table.now < until && granted(&sent, STOPPED).is_none() {
        answer(&mut table, sent);
        let next = table.now + 100;
        sent = table.wait_until(next);
        // Others give way to it.
        let asked: Vec<_> = sent.iter().filter(|(client, _)| *client != STOPPED).cloned().collect();
        for (client, message) in asked {
            if let SchedulerMessage::DropLock { epoch, .. } = message {
                sent.append(&mut table.say(client, ClientMessage::LockReleased { epoch }));
            }
        }
        sent = table.give_back(sent);
    }
    assert!(granted(&sent, STOPPED).is_some(), "{sent:?}");
}

#[test]
fn its_answer_is_not_waited_for() {
    // The grant was on its way.
    let mut table = crowded();
    let sent = table.wait_until(1_000);
    let epoch = asked_to_leave(&sent, 1).unwrap();
    let sent = table.say(1, ClientMessage::LockReleased { epoch });
    let sent = table.give_back(sent);
    assert!(granted(&sent, STOPPED).is_some(), "{sent:?}");
    table.register(4, Gate::Closed, GIB, GIB);
    stops(&mut table, true);
    assert!(table.core.client_status().iter().any(|client| client.client == STOPPED && client.stuck));
    let sent = table.say(4, ClientMessage::ReqLock);
    let sent = table.give_back(sent);
    assert!(granted(&sent, 4).is_some(), "it fits beside what the stopped one keeps: {sent:?}");
    // It is asked to leave.
    let mut table = beside_one_that_stops(6 * GIB, None);
    table.happens(Event::Stopped { client: STOPPED, stopped: true });
    let mut asked = 0;
    while table.now < 4_000 {
        let next = table.now + 100;
        let sent = table.wait_until(next);
        asked += usize::from(asked_to_leave(&sent, STOPPED).is_some());
        answer(&mut table, sent);
    }
    assert_eq!(asked, 1, "once, since it cannot answer");
    let held: u64 = table.core.client_status().iter().map(|client| client.held_ms).sum();
    assert!(held > 6_000, "{held} ms: the two others fit beside each other, or take turns beside it");
}

/// Three programs of 6 GiB on 16 GiB: two run beside each other, and one of these is stopped while it drains.
#[test]
fn its_drain_is_not_waited_for() {
    let mut table = beside_one_that_stops(6 * GIB, None);
    let mut sent = Vec::new();
    while asked_to_leave(&sent, STOPPED).is_none() {
        assert!(table.now < 20_000, "nobody asks it to leave");
        answer(&mut table, sent);
        let next = table.now + 100;
        sent = table.wait_until(next);
    }
    answer(&mut table, sent);
    let sent = stops(&mut table, true);
    assert!(table.core.client_status().iter().any(|client| client.client == STOPPED && client.stuck));
    assert!(
        [1, 2].iter().any(|&other| asked_to_leave(&sent, other).is_some()),
        "another makes room: {sent:?}"
    );
}

/// The next does not fit beside what it keeps. Another client does, and would wait behind the next for ever.
#[test]
fn it_stops_nobody_though_the_next_waits_for_it() {
    for exclusive in [false, true] {
        let mut table = Table::new(Config { grace: MS(2000), ..config(exclusive) });
        for (client, gib) in [(STOPPED, 6), (1, 12), (2, 1)] {
            table.register(client, Gate::Closed, gib * GIB, gib * GIB);
        }
        table.runs(STOPPED);
        for client in [1, 2] {
            // The last fits beside the stopped one, unless one runs at a time.
            let sent = table.say(client, ClientMessage::ReqLock);
            answer(&mut table, sent);
            table.now += 1;
        }
        let held = held(&mut table);
        assert!(held[1] > 19_000, "exclusive: {exclusive}: {held:?}");
    }
}

#[test]
fn it_counts_as_any_other_when_scheduling_was_off() {
    let mut table = beside_one_that_stops(6 * GIB, None);
    go_on_until(&mut table, 10_000);
    let is_stuck = |table: &Table| {
        table.core.client_status().iter().any(|client| client.client == STOPPED && client.stuck)
    };
    assert!(is_stuck(&table));
    table.core.switch_off(true, MS(table.now)).unwrap();
    table.core.switch_on(MS(table.now));
    let sent = table.sent();
    answer(&mut table, sent);
    assert!(!is_stuck(&table));
}

#[test]
fn its_memory_is_not_asked_for() {
    let mut table = Table::new(config(false));
    for client in [1, STOPPED] {
        table.register(client, Gate::Closed, 6 * GIB, 6 * GIB);
        let epoch = table.runs(client);
        table.say(client, ClientMessage::LockReleased { epoch });
    }
    table.runs(1);
    stops(&mut table, true);
    let needs = ClientMessage::NeedRoom(Amount { gpu: gpu(0), bytes: 12 * GIB });
    assert_eq!(table.say(1, needs.clone()), [], "it may go on soon");
    let refused = SchedulerMessage::NoRoom { gpu: gpu(0) };
    assert_eq!(table.wait_until(9_900), []);
    assert_eq!(table.wait_until(10_100), [(1, refused.clone())], "it did not");
    assert_eq!(table.say(1, needs.clone()), [(1, refused)]);
    // It goes on, and is asked like any other.
    stops(&mut table, false);
    let sent = table.say(1, needs);
    assert!(matches!(sent[..], [(STOPPED, SchedulerMessage::Evict(_))]), "{sent:?}");
}

#[test]
fn what_others_restore_waits_until_it_goes_on() {
    let mut table = Table::new(config(false));
    table.register(STOPPED, Gate::Closed, 12 * GIB, 12 * GIB);
    table.runs(STOPPED);
    stops(&mut table, true);
    // It says how much it has only when it has the lock.
    let little = usage_of(1);
    let sent = table.register_with(1, Gate::Closed, little);
    assert_eq!(granted(&sent, 1), None);
    let sent = table.say(1, ClientMessage::ReqLock);
    assert!(granted(&sent, 1).is_some(), "{sent:?}");
    table.say(1, ClientMessage::Usage(usage_of(6)));
    table.say(1, ClientMessage::NeedRoom(Amount { gpu: gpu(0), bytes: 6 * GIB }));
    let refused = (1, SchedulerMessage::NoRoom { gpu: gpu(0) });
    let sent = table.wait_until(60_000);
    assert!(!sent.contains(&refused), "{sent:?}");
}

#[test]
fn its_gang_waits_with_it() {
    let mut table = Table::new(config(false));
    let gang = Some(Gang { number: 7, size: 0 });
    for client in [2, STOPPED] {
        let identity = Identity { pid: Some(9), process: Some(client), gang, ..Identity::default() };
        table.register_as(client, identity, Gate::Closed, usage_of(6));
    }
    table.register(1, Gate::Closed, 12 * GIB, 12 * GIB);
    table.runs(1);
    table.say(2, ClientMessage::ReqLock);
    stops(&mut table, true);
    let sent = table.wait_until(10_000);
    assert_eq!(asked_to_leave(&sent, 1), None, "the gang could not go on");
    let sent = stops(&mut table, false);
    assert!(asked_to_leave(&sent, 1).is_some(), "{sent:?}");
}

fn usage_of(gib: u64) -> Usage {
    Usage { gpu: gpu(0), total: CAPACITY, limit: 0, allocated: gib * GIB, absent: gib * GIB, immovable: 0 }
}
