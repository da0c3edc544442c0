//! Whose turn it is, and when it is over.

use nvshare_proto::{Amount, ClientMessage, Gate, SchedulerMessage, TenantSettings, Usage};

use crate::table::{CAPACITY, GIB, MS, Table, asked_to_leave, config, gpu, granted, twelve_gib};

#[test]
fn a_drain_that_was_given_up_makes_no_turn_of_others_longer() {
    let (pauses, waits) = (1, 2);
    let mut table = Table::new(config(false));
    table.register(pauses, Gate::Open, 12 * GIB, 0);
    table.register(waits, Gate::Closed, 12 * GIB, 12 * GIB);
    let mut sent = table.say(waits, ClientMessage::ReqLock);
    let mut last = None;
    for _ in 0..6 {
        let now = table.now;
        sent.append(&mut table.wait_until(now + 60_000));
        let epoch = asked_to_leave(&sent, pauses).unwrap_or_else(|| panic!("{sent:?}"));
        last = Some(epoch);
        sent = table.say(pauses, ClientMessage::DropDeferred { epoch });
    }
    // It is asked again in half a minute. Before, its work is complete, and it has a pause.
    let epoch = last.expect("it was asked");
    let sent = table.say(pauses, ClientMessage::Idle { epoch });
    let sent = table.give_back(sent);
    let epoch = granted(&sent, waits).unwrap_or_else(|| panic!("{sent:?}"));
    table.say(waits, ClientMessage::Running { epoch });
    table.say(pauses, ClientMessage::ReqLock);
    let now = table.now;
    let sent = table.wait_until(now + 2100);
    assert_eq!(asked_to_leave(&sent, waits), Some(epoch), "{sent:?}");
}

/// A host function that waits for a launch, in the first half of each period: while that is so, no drain is ever complete, for the
/// launch waits at the gate.
#[test]
fn a_program_with_a_rhythm_is_not_asked_at_the_same_beat_each_time() {
    const PERIOD: u64 = 500;
    let (keeps_time, waits) = (1, 2);
    let mut table = Table::new(config(false));
    table.register(keeps_time, Gate::Open, 12 * GIB, 0);
    table.register(waits, Gate::Closed, 12 * GIB, 12 * GIB);
    let mut sent = table.say(waits, ClientMessage::ReqLock);
    for drains in 1.. {
        let (epoch, patience) = loop {
            let asked = sent.iter().find_map(|(client, message)| match message {
                SchedulerMessage::DropLock { epoch, patience_ms } if *client == keeps_time => {
                    Some((*epoch, *patience_ms))
                }
                _ => None,
            });
            if let Some(asked) = asked {
                break asked;
            }
            assert!(table.now < 60_000, "asked {drains} times at the same beat");
            let next = table.now + 1;
            sent = table.wait_until(next);
        };
        if table.now % PERIOD >= PERIOD / 2 {
            return;
        }
        let deadline = table.now + u64::from(patience);
        table.wait_until(deadline);
        sent = table.say(keeps_time, ClientMessage::DropDeferred { epoch });
    }
}

/// While nobody waits, a program launches far ahead: more work than a drain has patience for. Its work in flight is bounded from the pause on, so
/// that a later drain is complete.
#[test]
fn work_in_flight_of_a_client_that_is_paused_is_bounded_until_it_goes_on() {
    let mut table = Table::new(config(false));
    table.register(1, Gate::Closed, GIB, 0);
    let epoch = table.runs(1);
    let pause = |paused| TenantSettings { paused: Some(paused), ..TenantSettings::default() };
    let told = |sent: &[(u64, SchedulerMessage)]| -> Vec<bool> {
        let is_told = |message: &SchedulerMessage| match message {
            SchedulerMessage::Waiters { waiting } => Some(*waiting),
            _ => None,
        };
        sent.iter().filter_map(|(_, message)| is_told(message)).collect()
    };
    table.core.give(1, None, pause(true), MS(10)).unwrap();
    let mut sent = table.sent();
    assert_eq!((told(&sent), asked_to_leave(&sent, 1)), (vec![true], Some(epoch)), "{sent:?}");
    sent = table.say(1, ClientMessage::DropDeferred { epoch });
    assert_eq!(told(&sent), [], "{sent:?}");
    table.core.give(1, None, pause(false), MS(20)).unwrap();
    sent = table.sent();
    assert_eq!(told(&sent), [false], "{sent:?}");
}

/// It wanted no more when it gave the lock back, and that hand-over is long over.
#[test]
fn a_drain_that_is_given_up_brings_back_nobody_of_an_earlier_hand_over() {
    let mut table = Table::new(config(false));
    table.register(1, Gate::Closed, 12 * GIB, 12 * GIB);
    table.register(2, Gate::Closed, 12 * GIB, 12 * GIB);
    let first = table.runs(1);
    table.say(2, ClientMessage::ReqLock);
    let sent = table.wait_until(2100);
    assert_eq!(asked_to_leave(&sent, 1), Some(first), "{sent:?}");
    let sent = table.say(1, ClientMessage::LockReleased { epoch: first });
    let sent = table.give_back(sent);
    let epoch = granted(&sent, 2).unwrap_or_else(|| panic!("{sent:?}"));
    table.say(2, ClientMessage::Running { epoch });
    let paused = TenantSettings { paused: Some(true), ..TenantSettings::default() };
    table.core.give(2, None, paused, MS(table.now)).unwrap();
    let sent = table.sent();
    assert_eq!(asked_to_leave(&sent, 2), Some(epoch), "{sent:?}");
    let mut sent = table.say(2, ClientMessage::DropDeferred { epoch });
    // There is room for the other one now.
    let usage = Usage { allocated: 0, absent: 0, ..twelve_gib(0) };
    sent.append(&mut table.say(2, ClientMessage::Room(Amount { gpu: gpu(0), bytes: CAPACITY })));
    sent.append(&mut table.say(2, ClientMessage::Usage(usage)));
    assert_eq!(granted(&sent, 1), None, "{sent:?}");
    // One that asks is granted it.
    assert!(granted(&table.say(1, ClientMessage::ReqLock), 1).is_some());
}
