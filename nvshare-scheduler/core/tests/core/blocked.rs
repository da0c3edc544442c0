//! A client for which no room can be made delays nobody.

use std::collections::BTreeMap;

use nvshare_core::{AutoTarget, Config};
use nvshare_proto::{Amount, ClientMessage, ClientState, Gate, Usage};

use crate::table::{GIB, MS, Table, asked_to_leave, config, gpu, granted, room_given, twelve_gib};
use crate::victims::{evicted, works};

const BLOCKED: u64 = 1;

/// A client has 12 GiB, and a process without the library leaves it 9. It has given its grant back, keeps so much of its memory on the
/// card, and waits for room.
fn with_blocked(config: Config, keeps: u64) -> Table {
    let mut table = Table::new(Config { gpu_memory: None, reserve: Some(0), ..config });
    table.register(BLOCKED, Gate::Closed, 12 * GIB, 12 * GIB);
    table.sees(0, 9 * GIB, BTreeMap::new());
    let sent = table.say(BLOCKED, ClientMessage::ReqLock);
    let epoch = granted(&sent, BLOCKED).unwrap_or_else(|| panic!("{sent:?}"));
    table.say(BLOCKED, ClientMessage::Usage(twelve_gib(12 * GIB - keeps)));
    table.say(BLOCKED, ClientMessage::LockReleased { epoch });
    table.say(BLOCKED, ClientMessage::Room(Amount { gpu: gpu(0), bytes: 9 * GIB - keeps }));
    table.say(BLOCKED, ClientMessage::ReqLock);
    assert_eq!(table.core.client_status()[0].state, ClientState::Blocked, "{:?}", table.core.client_status());
    table
}

#[test]
fn spare_room_is_given_beside_a_blocked_client() {
    let other = 2;
    let mut table = with_blocked(config(false), 0);
    table.register(other, Gate::Closed, 4 * GIB, 4 * GIB);
    let sent = table.say(other, ClientMessage::ReqLock);
    assert!(granted(&sent, other).is_some(), "{sent:?}");
    assert_eq!(room_given(&sent, other), 5 * GIB, "{sent:?}");
}

/// A holder grows. The third client has asked last, and gets its turn before the blocked one.
#[test]
fn memory_of_a_blocked_client_leaves_before_that_of_one_that_gets_a_turn() {
    let (waits, grows) = (2, 3);
    let mut table = with_blocked(config(false), 3 * GIB);
    table.register(waits, Gate::Closed, 7 * GIB, 4 * GIB);
    table.register(grows, Gate::Closed, 3 * GIB, 3 * GIB);
    table.runs(grows);
    table.say(grows, ClientMessage::Usage(Usage { allocated: 3 * GIB, ..twelve_gib(0) }));
    table.now += 10;
    let sent = table.say(waits, ClientMessage::ReqLock);
    assert_eq!(granted(&sent, waits), None, "{sent:?}");
    let need = Amount { gpu: gpu(0), bytes: 4 * GIB };
    let sent = table.say(grows, ClientMessage::NeedRoom(need));
    // Its need, and some to spare.
    assert_eq!(evicted(&sent), [(BLOCKED, 2)], "{sent:?}");
}

/// The blocked client has waited for longer than short work may make others wait.
#[test]
fn short_work_goes_ahead_beside_a_blocked_client() {
    let (short, holds, waits) = (2, 3, 4);
    let auto = Some(AutoTarget { overhead_ppm: 500_000, max_wait: MS(60_000) });
    let mut table = with_blocked(Config { auto, ..config(true) }, 0);
    table.register(short, Gate::Closed, GIB, 0);
    for _ in 0..3 {
        works(&mut table, short);
        table.now += 700;
    }
    table.now = 40_000;
    for client in [holds, waits] {
        table.register(client, Gate::Closed, GIB, 0);
    }
    let epoch = table.runs(holds);
    table.now += 5;
    let mut sent = table.say(waits, ClientMessage::ReqLock);
    sent.append(&mut table.wait_until(table.now + 3));
    assert_eq!(asked_to_leave(&sent, holds), None, "{sent:?}");
    let sent = table.say(short, ClientMessage::ReqLock);
    assert_eq!(asked_to_leave(&sent, holds), Some(epoch), "{sent:?}");
    let sent = table.say(holds, ClientMessage::LockReleased { epoch });
    assert!(granted(&sent, short).is_some(), "{sent:?}");
}
