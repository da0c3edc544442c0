//! What clients claim, ask for and keep silent about harms nobody else beyond a bound.

use nvshare_core::{Config, Event};
use nvshare_proto::{ClientMessage, ClientState, Gate, Room, SchedulerMessage, Usage};

use crate::table::{Table, asked_to_leave, granted, twelve_gib};
use crate::world::{CAPACITY, GIB, MS, config, gpu};

#[test]
fn what_one_asks_for_does_not_end_the_turn_of_others() {
    let mut table = Table::new(config(false));
    table.register(1, Gate::Open, 8 * GIB, 0);
    table.register(2, Gate::Open, 8 * GIB, 0);
    table.now = 100;
    let sent = table.say(1, ClientMessage::NeedRoom(Room { gpu: gpu(0), bytes: u64::MAX }));
    assert_eq!(asked_to_leave(&sent, 2), None, "{sent:?}");
    assert!(asked_to_leave(&sent, 1).is_some(), "{sent:?}");
}

#[test]
fn who_answers_an_eviction_with_nothing_is_not_asked_without_end() {
    let mut table = Table::new(config(false));
    table.register(1, Gate::Closed, 12 * GIB, 0);
    table.register(2, Gate::Closed, 12 * GIB, 12 * GIB);
    let mut sent = table.say(2, ClientMessage::ReqLock);
    let mut asked = 0;
    while sent.iter().any(|(to, message)| *to == 1 && matches!(message, SchedulerMessage::Evict(_))) {
        asked += 1;
        assert!(asked < 10, "asked without end");
        sent = table.say(1, ClientMessage::Evicted { gpu: gpu(0), short: 0 });
    }
    assert_eq!(asked, 1);
    assert_eq!(table.core.client_status()[1].state, ClientState::Blocked, "{:?}", table.core.client_status());
}

#[test]
fn a_claim_of_absent_memory_does_not_stretch_its_deadline() {
    let mut table = Table::new(config(false));
    table.register(1, Gate::Closed, 1 << 63, 1 << 63);
    let sent = table.say(1, ClientMessage::ReqLock);
    assert!(granted(&sent, 1).is_some());
    let deadline = table.core.next_deadline().expect("a deadline");
    assert!(deadline <= MS(131_000), "{deadline:?}");
}

#[test]
fn what_clients_claim_can_be_added_up() {
    let mut table = Table::new(config(false));
    for client in 1..4 {
        table.register(client, Gate::Closed, u64::MAX, 0);
    }
    let status = table.core.gpu_status();
    assert!(status[0].allocated < 1 << 60 && status[0].resident < 1 << 60, "{status:?}");
}

#[test]
fn sizes_of_a_gpu_that_differ_mean_turns() {
    let config = Config { gpu_memory: None, reserve: Some(0), ..config(false) };
    let usage = |total| Usage { total, allocated: GIB, absent: GIB, ..twelve_gib(0) };
    let capacity = |sent: &[(u64, SchedulerMessage)], of: u64| {
        sent.iter().find_map(|(to, message)| match message {
            SchedulerMessage::Capacity(room) if *to == of => Some(room.bytes),
            _ => None,
        })
    };
    let mut table = Table::new(config);
    // One that says nothing useful refuses nobody, and one that says too much lets nobody in.
    assert_eq!(capacity(&table.register_with(1, Gate::Closed, usage(0)), 1), Some(0));
    assert_eq!(capacity(&table.register_with(2, Gate::Closed, usage(CAPACITY)), 2), Some(CAPACITY));
    table.register_with(3, Gate::Closed, usage(u64::MAX));
    table.runs(2);
    let sent = table.say(3, ClientMessage::ReqLock);
    assert_eq!(granted(&sent, 3), None, "they would fit");
    let sent = table.wait_until(1000);
    assert!(asked_to_leave(&sent, 2).is_some(), "{sent:?}");
    // When those are gone, the rest agree, and run together.
    for client in [1, 3] {
        table.happens(Event::Disconnected { client, process_remains: false });
    }
    table.register_with(4, Gate::Closed, usage(CAPACITY));
    let sent = table.say(4, ClientMessage::ReqLock);
    assert!(granted(&sent, 4).is_some() || asked_to_leave(&sent, 2).is_none(), "{sent:?}");
}
