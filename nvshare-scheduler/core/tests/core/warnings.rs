//! Lines of the log whose cause comes back many times a second.

use nvshare_proto::{Amount, ClientMessage, Gate, SchedulerMessage, Usage};

use crate::table::{CAPACITY, GIB, Table, asked_to_leave, config, gpu, granted};

fn usage(allocated: u64, absent: u64) -> ClientMessage {
    ClientMessage::Usage(Usage { gpu: gpu(0), total: CAPACITY, limit: 0, allocated, absent, immovable: 0 })
}

/// A client whose memory does not leave, and that allocates and frees: each time that it has allocated something else, it is asked
/// again.
#[test]
fn memory_that_stays_is_said_once_a_minute() {
    let mut table = Table::new(config(false));
    let (stays, waits) = (1, 2);
    table.register(stays, Gate::Closed, 12 * GIB, 0);
    table.register(waits, Gate::Closed, 12 * GIB, 12 * GIB);
    let mut sent = table.say(waits, ClientMessage::ReqLock);
    let mut asked = 0;
    for at in (0..90_000).step_by(100) {
        table.now = at;
        let evicts = |(client, message): &(u64, SchedulerMessage)| {
            *client == stays && matches!(message, SchedulerMessage::Evict(_))
        };
        if sent.iter().any(evicts) {
            asked += 1;
            sent = table.say(stays, ClientMessage::Evicted { gpu: gpu(0), short: 8 * GIB });
        }
        sent.append(&mut table.say(stays, usage(12 * GIB - at % 200, 0)));
        sent.append(&mut table.wait_until(at + 99));
    }
    assert!(asked > 500, "it was asked {asked} times");
    let said: Vec<&String> =
        table.notes.iter().filter(|note| note.contains("this memory cannot be moved")).collect();
    assert_eq!(said.len(), 2, "{said:#?}");
    assert!(
        !said[0].contains("more since") && said[1].contains("times more since the last such line"),
        "{said:#?}"
    );
}

/// A program that asks for more than can be had, in a loop.
#[test]
fn an_allocation_that_gets_no_room_is_said_once_a_minute() {
    let mut table = Table::new(config(false));
    table.register(1, Gate::Closed, GIB, GIB);
    table.register_with(
        2,
        Gate::Closed,
        Usage { gpu: gpu(0), total: CAPACITY, limit: 0, allocated: 14 * GIB, absent: 0, immovable: 14 * GIB },
    );
    table.runs(1);
    table.say(1, usage(GIB, 0));
    let mut refused = 0;
    for at in (0..30_000).step_by(100) {
        table.now = at;
        let sent = table.say(1, ClientMessage::NeedRoom(Amount { gpu: gpu(0), bytes: 8 * GIB }));
        refused +=
            sent.iter().filter(|(_, message)| matches!(message, SchedulerMessage::NoRoom { .. })).count();
    }
    assert!(refused > 50, "it was refused {refused} times");
    let said = table.notes.iter().filter(|note| note.contains("no room for")).count();
    assert_eq!(said, 1, "{:#?}", table.notes);
}

/// A client that runs under each of its grants, and gives none of them back in time.
#[test]
fn a_client_that_does_not_answer_is_said_once_a_minute() {
    let mut table = Table::new(config(false));
    table.register(1, Gate::Closed, 12 * GIB, 12 * GIB);
    table.register(2, Gate::Closed, 12 * GIB, 12 * GIB);
    let mut epoch = table.runs(1);
    let mut sent = table.say(2, ClientMessage::ReqLock);
    let mut late = 0;
    while table.now < 55_000 {
        let next = table.now + 100;
        sent.append(&mut table.wait_until(next));
        if asked_to_leave(&sent, 1).is_some() {
            // Far beyond its grace, it says that it goes on.
            let next = table.now + 11_000;
            table.wait_until(next);
            late += 1;
            sent = table.say(1, ClientMessage::DropDeferred { epoch });
            epoch = granted(&sent, 1).unwrap_or(epoch);
        }
    }
    assert!(late >= 3, "{late} times");
    let said = table.notes.iter().filter(|note| note.contains("client 1 (x, pid 9) does not answer")).count();
    assert_eq!(said, 1, "{:#?}", table.notes);
}
