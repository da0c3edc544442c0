//! Allocations that must have their room at once, of clients that are parked: they get it as soon as what others have can
//! be moved, and are refused only where it never can.

use std::collections::BTreeMap;

use nvshare_core::Config;
use nvshare_proto::{Amount, ClientMessage, Epoch, Gate, SchedulerMessage, Usage};

use crate::table::{MS, Table, asked_to_leave, config, gpu, granted, room_given, twelve_gib};

const MIB: u64 = 1 << 20;
const NEIGHBOUR: u64 = 1;
const PARKED: u64 = 2;

fn room(mib: u64) -> Amount {
    Amount { gpu: gpu(0), bytes: mib * MIB }
}

fn usage(allocated: u64, absent: u64) -> Usage {
    Usage { allocated: allocated * MIB, absent: absent * MIB, ..twelve_gib(0) }
}

fn half_a_gib() -> Table {
    Table::new(Config { gpu_memory: Some(512 * MIB), ..config(false) })
}

fn is_refused(sent: &[(u64, SchedulerMessage)]) -> bool {
    sent.iter().any(|(to, message)| *to == PARKED && matches!(message, SchedulerMessage::NoRoom { .. }))
}

/// The neighbour drains when it is asked to, and its memory leaves: the parked client has its room then.
fn gets_room_when_the_neighbour_leaves(table: &mut Table, mib: u64) {
    let now = table.now;
    let sent = table.wait_until(now + 2100);
    let epoch = asked_to_leave(&sent, NEIGHBOUR).unwrap_or_else(|| panic!("{sent:?}"));
    let sent = table.say(NEIGHBOUR, ClientMessage::LockReleased { epoch });
    let sent = table.give_back(sent);
    assert!(room_given(&sent, PARKED) >= mib * MIB, "{sent:?}");
}

/// The neighbour could not give up all that it was asked for, and 20 MiB are left.
fn keeps_the_last_20_mib(table: &mut Table) {
    let third = 3;
    table.register(NEIGHBOUR, Gate::Closed, 300 * MIB, 0);
    table.register(PARKED, Gate::Closed, 400 * MIB, 400 * MIB);
    table.register(third, Gate::Closed, 500 * MIB, 500 * MIB);
    let sent = table.say(third, ClientMessage::ReqLock);
    assert_eq!(sent, [(NEIGHBOUR, SchedulerMessage::Evict(room(288)))]);
    table.say(NEIGHBOUR, ClientMessage::Usage(usage(300, 280)));
    table.say(NEIGHBOUR, ClientMessage::Room(room(280)));
    table.say(NEIGHBOUR, ClientMessage::Evicted { gpu: gpu(0), short: 8 * MIB });
    table.happens(nvshare_core::Event::Disconnected { client: third, process_remains: false });
}

#[test]
fn memory_that_came_back_since_some_could_not_move_can_move_again() {
    let mut table = half_a_gib();
    keeps_the_last_20_mib(&mut table);
    table.runs(NEIGHBOUR);
    table.say(NEIGHBOUR, ClientMessage::Usage(usage(300, 0)));
    table.now = 200;
    let sent = table.say(PARKED, ClientMessage::NeedRoom(room(484)));
    assert!(!is_refused(&sent), "{sent:?}");
    gets_room_when_the_neighbour_leaves(&mut table, 484);
}

#[test]
fn a_need_for_more_than_can_be_made_free_is_refused() {
    let mut table = half_a_gib();
    keeps_the_last_20_mib(&mut table);
    let sent = table.say(PARKED, ClientMessage::NeedRoom(room(500)));
    assert!(is_refused(&table.give_back(sent)));
}

/// Its memory stays on the card for as long as it lives.
#[test]
fn a_process_that_has_left_and_lives_on_keeps_no_need_waiting() {
    for (mib, fits) in [(300, true), (500, false)] {
        let mut table = half_a_gib();
        let lives_on = 3;
        table.register(lives_on, Gate::Open, 20 * MIB, 0);
        table.register(NEIGHBOUR, Gate::Open, 300 * MIB, 0);
        table.register(PARKED, Gate::Closed, 0, 0);
        table.happens(nvshare_core::Event::Disconnected { client: lives_on, process_remains: true });
        // It may be about to end.
        let sent = table.say(PARKED, ClientMessage::NeedRoom(room(mib)));
        assert!(!is_refused(&sent), "{mib} MiB: {sent:?}");
        let sent = table.wait_until(61_000);
        assert_eq!(is_refused(&sent), !fits, "{mib} MiB: {sent:?}");
        // Its turn has lasted long enough.
        assert_eq!(asked_to_leave(&sent, NEIGHBOUR).is_some(), fits, "{mib} MiB: {sent:?}");
    }
}

#[test]
fn a_drain_that_was_given_up_refuses_nobody() {
    let mut table = half_a_gib();
    table.register(NEIGHBOUR, Gate::Open, 300 * MIB, 0);
    table.register(PARKED, Gate::Closed, 400 * MIB, 400 * MIB);
    let mut asked = table.say(PARKED, ClientMessage::ReqLock);
    let mut last: Option<Epoch> = None;
    for _ in 0..3 {
        let now = table.now;
        asked.append(&mut table.wait_until(now + 20_000));
        let epoch = asked_to_leave(&asked, NEIGHBOUR).unwrap_or_else(|| panic!("{asked:?}"));
        last = Some(epoch);
        asked = table.say(NEIGHBOUR, ClientMessage::DropDeferred { epoch });
    }
    let sent = table.say(PARKED, ClientMessage::NeedRoom(room(300)));
    assert!(!is_refused(&sent), "{sent:?}");
    // It pauses: there is nothing to drain now.
    table.now += 1;
    let epoch = last.expect("it was asked");
    let sent = table.say(NEIGHBOUR, ClientMessage::Idle { epoch });
    let sent = table.give_back(sent);
    assert!(room_given(&sent, PARKED) >= 400 * MIB, "{sent:?}");
    assert!(table.core.next_deadline().is_some_and(|deadline| deadline > MS(table.now)));
}

#[test]
fn a_question_that_crossed_with_room_for_it_asks_for_no_more() {
    let mut table = half_a_gib();
    table.register(NEIGHBOUR, Gate::Open, 100 * MIB, 0);
    table.register(PARKED, Gate::Closed, 100 * MIB, 0);
    // It has 100 MiB, and lacks 150; and has not heard of the room for that when it lacks 160.
    let sent = table.say(NEIGHBOUR, ClientMessage::NeedRoom(room(250)));
    assert!(room_given(&sent, NEIGHBOUR) >= 150 * MIB, "{sent:?}");
    let given = room_given(&sent, NEIGHBOUR);
    assert_eq!(table.say(NEIGHBOUR, ClientMessage::NeedRoom(room(260))), []);
    // All that it has or is about to have is 412 MiB: that is what more is counted from.
    let sent = table.say(NEIGHBOUR, ClientMessage::NeedRoom(room(412)));
    assert_eq!(given + room_given(&sent, NEIGHBOUR), 312 * MIB, "{sent:?}");
}

/// Its drain may wait for a thread that sleeps at its gate, which opens when all of its memory is back.
#[test]
fn a_client_that_cannot_drain_gets_the_room_without_which_it_cannot_go_on() {
    let mut table = half_a_gib();
    let grows = PARKED;
    table.register(NEIGHBOUR, Gate::Open, 200 * MIB, 0);
    table.register(grows, Gate::Open, 200 * MIB, 0);
    let mut asked = table.say(grows, ClientMessage::Usage(usage(350, 150)));
    asked.append(&mut table.say(grows, ClientMessage::NeedRoom(room(350))));
    for _ in 0..3 {
        let now = table.now;
        asked.append(&mut table.wait_until(now + 20_000));
        assert_eq!(asked_to_leave(&asked, NEIGHBOUR), None, "{asked:?}");
        let epoch = asked_to_leave(&asked, grows).unwrap_or_else(|| panic!("{asked:?}"));
        asked = table.say(grows, ClientMessage::DropDeferred { epoch });
        asked.append(&mut table.say(grows, ClientMessage::NeedRoom(room(350))));
    }
    let epoch = asked_to_leave(&asked, NEIGHBOUR).unwrap_or_else(|| panic!("{asked:?}"));
    let sent = table.say(NEIGHBOUR, ClientMessage::LockReleased { epoch });
    let sent = table.give_back(sent);
    assert!(room_given(&sent, grows) >= 150 * MIB, "{sent:?}");
}

/// Its memory, which the library maps, comes back by no page fault: it asks again and again, as long as it is answered.
#[test]
fn a_client_that_asks_while_a_stranger_fills_the_gpu_is_answered_and_gets_its_room_later() {
    let mut table = Table::new(Config { gpu_memory: None, reserve: Some(512 * MIB), ..config(false) });
    table.register(PARKED, Gate::Closed, 300 * MIB, 300 * MIB);
    table.sees(0, 256 * MIB, BTreeMap::new());
    let sent = table.say(PARKED, ClientMessage::ReqLock);
    assert!(granted(&sent, PARKED).is_some(), "{sent:?}");
    let asked = ClientMessage::NeedRoom(room(300));
    for _ in 0..2 {
        assert_eq!(table.say(PARKED, asked.clone()), [(PARKED, SchedulerMessage::Room(room(0)))]);
    }
    table.sees(0, 2048 * MIB, BTreeMap::new());
    let sent = table.say(PARKED, asked);
    assert!(room_given(&sent, PARKED) >= 300 * MIB, "{sent:?}");
    table.assert_at_rest();
}
