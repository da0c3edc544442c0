//! The memory of a client that is next comes while that of others leaves.

use nvshare_core::{Config, Core, Event, Exchange, Identity};
use nvshare_proto::units::MIB;
use nvshare_proto::{Amount, ClientMessage, Epoch, EventKind, Gate, MemoryMode, Register, SchedulerMessage};

use crate::table::{GIB, MS, Table, config, gpu, granted, newcomer, twelve_gib};

const LEAVES: u64 = 1;
const COMES: u64 = 2;

fn room(bytes: u64) -> Amount {
    Amount { gpu: gpu(0), bytes }
}

fn restore(bytes: u64) -> (u64, SchedulerMessage) {
    (COMES, SchedulerMessage::Restore(room(bytes)))
}

fn made(bytes: u64) -> ClientMessage {
    ClientMessage::Room(room(bytes))
}

/// Two clients of 12 GiB on a GPU of 16. The first one has just given the lock back, and was told to evict.
fn leaving(exchange: Exchange, memory: MemoryMode) -> (Table, Vec<(u64, SchedulerMessage)>) {
    let mut table = Table {
        core: Core::new(Config { exchange, ..config(false) }),
        now: 0,
        notes: Vec::new(),
        to_measure: Vec::new(),
    };
    for client in [LEAVES, COMES] {
        let register = Register { memory, ..newcomer(Gate::Closed, twelve_gib(12 * GIB)) };
        let identity = Identity { pid: Some(9), process: Some(client), ..Identity::default() };
        table.happens(Event::Registered { client, identity, register });
    }
    let epoch = table.runs(LEAVES);
    table.say(LEAVES, ClientMessage::Usage(twelve_gib(0)));
    table.say(COMES, ClientMessage::ReqLock);
    table.wait_until(1100);
    // Spare room goes back with the lock.
    table.say(LEAVES, made(GIB));
    let sent = table.say(LEAVES, ClientMessage::LockReleased { epoch });
    (table, sent)
}

fn swapping() -> Table {
    let (table, sent) = leaving(Exchange::Swap, MemoryMode::Swap);
    // Room that is free already comes at once.
    assert_eq!(sent, [(LEAVES, SchedulerMessage::Evict(room(8 * GIB))), restore(4 * GIB)]);
    table
}

fn epoch(sent: &[(u64, SchedulerMessage)]) -> Epoch {
    granted(sent, COMES).unwrap_or_else(|| panic!("{sent:?}"))
}

#[test]
fn room_comes_as_it_is_made_and_the_grant_with_the_last_of_it() {
    let mut table = swapping();
    assert_eq!(table.say(LEAVES, made(3 * GIB)), [restore(3 * GIB)]);
    assert_eq!(table.say(LEAVES, made(64 * MIB - 1)), [], "too little for a message");
    assert_eq!(table.say(LEAVES, made(1)), [restore(64 * MIB)]);
    let last = table.say(LEAVES, made(5 * GIB - 64 * MIB));
    let [(COMES, SchedulerMessage::LockOk { room: given, .. }), ..] = &last[..] else { panic!("{last:?}") };
    assert_eq!(given[..], [room(5 * GIB - 64 * MIB)]);
    let epoch = epoch(&last);
    table.now = 1300;
    table.say(COMES, ClientMessage::Running { epoch });
    let [gpu] = &table.core.gpu_status()[..] else { panic!("one GPU") };
    assert_eq!((gpu.resident, &gpu.holders), (16 * GIB, &vec![COMES]));
    // Memory has moved, though none was absent any more at the grant.
    assert_eq!((gpu.switch_us[0], gpu.switch_cost_us), (0, 200_000));
}

#[test]
fn clients_whose_memory_moves_one_way_at_a_time_restore_when_all_has_left() {
    for (exchange, memory) in [(Exchange::Nobody, MemoryMode::Swap), (Exchange::Swap, MemoryMode::Managed)] {
        let (mut table, sent) = leaving(exchange, memory);
        assert_eq!(sent, [(LEAVES, SchedulerMessage::Evict(room(8 * GIB)))]);
        assert_eq!(table.say(LEAVES, made(7 * GIB)), []);
        epoch(&table.say(LEAVES, made(GIB)));
    }
    let (_, sent) = leaving(Exchange::All, MemoryMode::Managed);
    assert!(sent.contains(&restore(4 * GIB)), "{sent:?}");
}

#[test]
fn the_lock_and_the_room_of_a_client_that_dies_meanwhile_are_free() {
    let mut table = swapping();
    table.say(LEAVES, made(3 * GIB));
    table.say(LEAVES, ClientMessage::ReqLock);
    // Its process still has what came back: the eviction goes on, and nobody gets that room yet.
    assert_eq!(table.happens(Event::Disconnected { client: COMES, process_remains: true }), []);
    assert_eq!(table.core.gpu_status()[0].resident, 16 * GIB);
    assert_eq!(table.say(LEAVES, made(5 * GIB)), []);
    assert_eq!(table.say(LEAVES, ClientMessage::Evicted { gpu: gpu(0), short: 0 }), []);
    let sent = table.happens(Event::Exited { client: COMES, identity: Identity::default() });
    assert!(granted(&sent, LEAVES).is_some(), "{sent:?}");
}

#[test]
fn memory_that_came_back_is_evicted_when_the_rest_cannot_come() {
    let mut table = swapping();
    table.say(LEAVES, made(3 * GIB));
    table.say(LEAVES, ClientMessage::ReqLock);
    // The host cannot take the rest, so the client that leaves is the only one that can run.
    let sent = table.say(LEAVES, ClientMessage::Evicted { gpu: gpu(0), short: 5 * GIB });
    assert_eq!(sent, [(COMES, SchedulerMessage::Evict(room(3 * GIB)))]);
    assert_eq!(table.say(COMES, made(2 * GIB)), [(LEAVES, SchedulerMessage::Restore(room(2 * GIB)))]);
    let sent = table.say(COMES, made(GIB));
    assert!(granted(&sent, LEAVES).is_some(), "{sent:?}");
}

/// A part of its memory came early for the first grant, which it gave back.
#[test]
fn a_restore_after_a_grant_was_given_back_has_a_beginning_of_its_own() {
    let mut table = swapping();
    let first = epoch(&table.say(LEAVES, made(8 * GIB)));
    table.say(LEAVES, ClientMessage::Evicted { gpu: gpu(0), short: 0 });
    table.say(COMES, ClientMessage::LockReleased { epoch: first });
    table.now = 61_000;
    let second = epoch(&table.say(COMES, ClientMessage::ReqLock));
    table.now += 500;
    table.say(COMES, ClientMessage::Running { epoch: second });
    let mut told = std::iter::from_fn(|| table.core.poll_incident());
    let restored = told.find(|incident| incident.kind == EventKind::Restored);
    assert_eq!(restored.and_then(|incident| incident.took), Some(MS(500)));
}
