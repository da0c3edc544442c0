//! A client does not become interactive by its own messages.

use nvshare_core::{AutoTarget, Config};
use nvshare_proto::{ClientMessage, Gate, SchedulerMessage};

use crate::table::{GIB, MS, Table, asked_to_leave, config, granted};

/// Works for ten milliseconds and asks again at once; and works for two and asks again eight later, which is no sleep.
#[test]
fn a_client_that_asks_and_gives_back_in_a_loop_waits_for_each_turn() {
    for (works, waits) in [(10, 0), (2, 8)] {
        asks_and_gives_back(works, waits);
    }
}

fn asks_and_gives_back(works: u64, waits: u64) {
    let mut table = Table::new(Config {
        auto: Some(AutoTarget { overhead_ppm: 50_000, max_wait: MS(60_000) }),
        ..config(false)
    });
    table.register(1, Gate::Open, 12 * GIB, 0);
    table.register(2, Gate::Closed, 12 * GIB, 12 * GIB);
    let mut sent = table.say(2, ClientMessage::ReqLock);
    for round in 0..12 {
        let ran_from = table.now;
        while asked_to_leave(&sent, 1).is_none() {
            let at = table.now + 100;
            assert!(at < 10_000_000, "client 1 is not asked to leave: {sent:?}");
            sent.append(&mut table.wait_until(at));
        }
        let epoch = asked_to_leave(&sent, 1).expect("asked");
        // A hand-over, as measured by then, takes a twentieth of the other one's turn.
        let ran = table.now - ran_from;
        assert!(round < 3 || ran >= 3000, "{works} and {waits} ms, round {round}: it ran for {ran} ms");
        table.now += 20;
        let mut sent_before = table.say(1, ClientMessage::LockReleased { epoch });
        sent_before.append(&mut table.say(1, ClientMessage::ReqLock));
        table.now += 200;
        let granted_to = |table: &mut Table, client, mut sent: Vec<_>| {
            while granted(&sent, client).is_none() {
                let at = table.now + 100;
                assert!(at < 10_000_000, "client {client} is not granted: {sent:?}");
                sent = table.give_back(sent);
                sent.append(&mut table.wait_until(at));
            }
            granted(&sent, client).expect("granted")
        };
        let epoch = granted_to(&mut table, 2, sent_before);
        table.say(2, ClientMessage::Running { epoch });
        table.now += works;
        let mut sent_before = table.say(2, ClientMessage::LockReleased { epoch });
        let at = table.now + waits;
        sent_before.append(&mut table.wait_until(at));
        sent_before.append(&mut table.say(2, ClientMessage::ReqLock));
        let epoch = granted_to(&mut table, 1, sent_before);
        sent = table.say(1, ClientMessage::Running { epoch });
    }
}

/// The last word to a client whether others wait, if there is one.
fn told(sent: &[(u64, SchedulerMessage)], client: u64) -> Option<bool> {
    let waiting = |(to, message): &(u64, SchedulerMessage)| match message {
        SchedulerMessage::Waiters { waiting } if *to == client => Some(*waiting),
        _ => None,
    };
    sent.iter().rev().find_map(waiting)
}

/// Client 2 has short work each 0.3 s. Client 1 keeps its work bounded in between, so that its drain is short; and no longer when the
/// other one stays away.
#[test]
fn holders_expect_short_work_again() {
    let mut table = Table::new(Config {
        auto: Some(AutoTarget { overhead_ppm: 500_000, max_wait: MS(60_000) }),
        ..config(false)
    });
    table.register(1, Gate::Open, 12 * GIB, 0);
    table.register(2, Gate::Closed, 12 * GIB, 12 * GIB);
    let mut is_bounded = false;
    for _ in 0..6 {
        let mut sent = table.say(2, ClientMessage::ReqLock);
        let mut all = sent.clone();
        let mut go_on = |table: &mut Table, sent: &mut Vec<_>| {
            *sent = table.give_back(std::mem::take(sent));
            let at = table.now + 10;
            assert!(at < 600_000, "nothing comes: {sent:?}");
            sent.append(&mut table.wait_until(at));
            all.extend(sent.iter().cloned());
        };
        while asked_to_leave(&sent, 1).is_none() {
            go_on(&mut table, &mut sent);
        }
        let epoch = asked_to_leave(&sent, 1).expect("asked");
        sent = table.say(1, ClientMessage::LockReleased { epoch });
        sent.append(&mut table.say(1, ClientMessage::ReqLock));
        while granted(&sent, 2).is_none() {
            go_on(&mut table, &mut sent);
        }
        let epoch = granted(&sent, 2).expect("granted");
        table.say(2, ClientMessage::Running { epoch });
        table.now += 10;
        sent = table.say(2, ClientMessage::Idle { epoch });
        while granted(&sent, 1).is_none() {
            go_on(&mut table, &mut sent);
        }
        let epoch = granted(&sent, 1).expect("granted");
        all.extend(sent);
        all.extend(table.say(1, ClientMessage::Running { epoch }));
        let at = table.now + 300;
        all.extend(table.wait_until(at));
        is_bounded = told(&all, 1).unwrap_or(is_bounded);
    }
    assert!(is_bounded);
    let at = table.now + 5000;
    let sent = table.wait_until(at);
    assert_eq!(told(&sent, 1), Some(false), "{sent:?}");
}
