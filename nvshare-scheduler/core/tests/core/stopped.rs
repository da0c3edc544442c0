//! A client that is stopped, as by Ctrl-Z, answers nothing: it costs others no more than the memory that it keeps.

use nvshare_core::{Config, Event, Identity};
use nvshare_proto::{Asked, ClientMessage, Gate, Register, Room, SchedulerMessage, Usage};

use crate::table::{CAPACITY, GIB, MS, Table, config, gpu, newcomer};

const STOPPED: u64 = 3;

/// Clients of this size, of which the last is stopped while it runs; it asked for this weight.
fn beside_one_that_stops(bytes: u64, weight: Option<u32>) -> Table {
    let config = Config { grace: MS(2000), ..config(false) };
    let mut table = Table::new(config);
    for client in 1..=STOPPED {
        let usage =
            Usage { gpu: gpu(0), total: CAPACITY, limit: 0, allocated: bytes, absent: bytes, immovable: 0 };
        let asked = Asked { weight: weight.filter(|_| client == STOPPED), ..Asked::default() };
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
            SchedulerMessage::Evict(Room { gpu, bytes }) => {
                &[ClientMessage::Room(Room { gpu, bytes }), ClientMessage::Evicted { gpu, short: 0 }]
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

#[test]
fn allocations_of_others_do_not_wait_for_it() {
    let mut table = beside_one_that_stops(GIB, Some(50));
    go_on_until(&mut table, 10_000);
    let sent = table.say(1, ClientMessage::NeedRoom(Room { gpu: gpu(0), bytes: 14 * GIB }));
    let evicted =
        sent.iter().any(|(client, message)| *client == 2 && matches!(message, SchedulerMessage::Evict(_)));
    let left = sent
        .iter()
        .any(|(client, message)| *client == 2 && matches!(message, SchedulerMessage::DropLock { .. }));
    assert!(evicted || left, "{sent:?}");
}
