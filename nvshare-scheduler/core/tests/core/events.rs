//! Events that watchers are told.

use nvshare_core::{Config, Event, Rule};
use nvshare_proto::{Amount, ClientMessage, EventKind, Gate, SchedulerMessage, Usage};

use crate::table::{GIB, MS, Table, config, gpu};

type Told = (EventKind, u64, Option<u64>, Option<u64>);

/// The events that are told: kind, client, GiB, milliseconds.
fn told(table: &mut Table) -> Vec<Told> {
    std::iter::from_fn(|| table.core.poll_incident())
        .map(|incident| {
            let client = incident.client.unwrap_or(0);
            let took = incident.took.map(|took| took.as_millis() as u64);
            (incident.kind, client, incident.bytes.map(|bytes| bytes / GIB), took)
        })
        .collect()
}

/// The events that are told of a message that comes `millis` milliseconds later.
fn after(table: &mut Table, millis: u64, client: u64, message: ClientMessage) -> Vec<Told> {
    table.now += millis;
    table.core.handle(Event::Message { client, message }, MS(table.now));
    told(table)
}

fn granted(table: &mut Table, client: u64) -> nvshare_proto::Epoch {
    let sent = table.sent();
    let epoch = sent.iter().find_map(|(to, message)| match message {
        SchedulerMessage::LockOk { epoch, .. } if *to == client => Some(*epoch),
        _ => None,
    });
    epoch.unwrap_or_else(|| panic!("no grant for client {client}: {sent:?}"))
}

#[test]
fn a_hand_over_is_told_with_its_sizes_and_times() {
    let mut table = Table::new(Config { quantum: MS(1000), ..config(false) });
    table.register(1, Gate::Closed, 12 * GIB, 0);
    assert_eq!(told(&mut table), [(EventKind::Registered, 1, Some(12), None)]);
    table.core.handle(Event::Message { client: 1, message: ClientMessage::ReqLock }, MS(0));
    assert_eq!(
        told(&mut table),
        [
            (EventKind::Waiting, 1, None, None),
            (EventKind::Next, 1, None, None),
            (EventKind::Granted, 1, Some(0), None)
        ]
    );
    let first = granted(&mut table, 1);
    assert_eq!(
        after(&mut table, 1, 1, ClientMessage::Running { epoch: first }),
        [(EventKind::Running, 1, Some(0), Some(1))]
    );
    table.register(2, Gate::Closed, 10 * GIB, 10 * GIB);
    assert_eq!(after(&mut table, 0, 2, ClientMessage::ReqLock), [(EventKind::Waiting, 2, None, None)]);
    table.now = 1100;
    table.core.handle(Event::Deadline, MS(1100));
    assert_eq!(told(&mut table), [(EventKind::Drop, 1, None, None), (EventKind::Next, 2, None, None)]);
    assert_eq!(
        after(&mut table, 30, 1, ClientMessage::LockReleased { epoch: first }),
        [(EventKind::Released, 1, None, Some(30)), (EventKind::Evict, 1, Some(7), None)]
    );
    assert_eq!(
        after(&mut table, 500, 1, ClientMessage::Room(Amount { gpu: gpu(0), bytes: 7 * GIB })),
        [(EventKind::Granted, 2, Some(10), None)]
    );
    let evicted = after(&mut table, 100, 1, ClientMessage::Evicted { gpu: gpu(0), short: 0 });
    assert_eq!(evicted, [(EventKind::Evicted, 1, Some(7), Some(600))]);
    let second = granted(&mut table, 2);
    // Its usage while it restores does not change the number of bytes that it had to bring back.
    let usage =
        Usage { gpu: gpu(0), total: 16 * GIB, limit: 0, allocated: 10 * GIB, absent: 0, immovable: 0 };
    assert_eq!(after(&mut table, 0, 2, ClientMessage::Usage(usage)), []);
    assert_eq!(
        after(&mut table, 700, 2, ClientMessage::Running { epoch: second }),
        [(EventKind::Restored, 2, Some(10), Some(800)), (EventKind::Running, 2, Some(10), Some(800))]
    );
}

#[test]
fn an_allocation_is_refused_when_it_was_told_so_and_not_when_it_gives_up() {
    let mut table = Table::new(config(false));
    table.register(1, Gate::Closed, 8 * GIB, 0);
    table.register(2, Gate::Open, 8 * GIB, 0);
    told(&mut table);
    let need = |bytes| ClientMessage::NeedRoom(Amount { gpu: gpu(0), bytes });
    let kinds = |told: Vec<Told>| told.into_iter().map(|told| told.0).collect::<Vec<_>>();
    assert_eq!(kinds(after(&mut table, 0, 2, need(9 * GIB))), [EventKind::NeedRoom, EventKind::Evict]);
    assert_eq!(kinds(after(&mut table, 0, 2, need(0))), []);
    // The memory of the other one cannot be moved, and is in the way for good.
    let stays = ClientMessage::Evicted { gpu: gpu(0), short: 8 * GIB };
    assert_eq!(kinds(after(&mut table, 0, 1, stays)), [EventKind::Evicted, EventKind::Stays]);
    assert_eq!(
        after(&mut table, 0, 2, need(9 * GIB)),
        [(EventKind::NeedRoom, 2, Some(1), None), (EventKind::Refused, 2, Some(1), None)]
    );
}

#[test]
fn a_setting_is_told_before_what_follows_from_it() {
    let mut table = Table::new(Config { quantum: MS(60_000), ..config(false) });
    table.register(1, Gate::Closed, 12 * GIB, 0);
    table.runs(1);
    table.register(2, Gate::Closed, 10 * GIB, 10 * GIB);
    table.say(2, ClientMessage::ReqLock);
    told(&mut table);
    let quantum = |millis| (EventKind::Quantum, 0, None, Some(millis));
    table.core.set_quantum(None, Rule::Fixed(MS(1000)), MS(5000));
    let follows = [(EventKind::Drop, 1, None, None), (EventKind::Next, 2, None, None)];
    assert_eq!(told(&mut table), [[quantum(1000)].as_slice(), &follows].concat());
    table.core.reset(Config { quantum: MS(30_000), ..config(false) }, MS(5000));
    assert_eq!(told(&mut table), [quantum(30_000)]);
}

#[test]
fn scheduling_that_is_off_is_not_switched_off_again() {
    let mut table = Table::new(config(false));
    for client in [1, 2] {
        table.register(client, Gate::Closed, 12 * GIB, 12 * GIB);
    }
    assert!(table.core.switch_off(false, MS(0)).is_err(), "not everything fits");
    assert_eq!(table.core.switch_off(true, MS(0)), Ok("scheduling is off".to_owned()));
    told(&mut table);
    table.sent();
    assert_eq!(table.core.switch_off(false, MS(0)), Ok("scheduling is already off".to_owned()));
    assert_eq!((told(&mut table), table.sent()), (vec![], vec![]));
}

#[test]
fn events_that_nobody_takes_are_forgotten_with_the_next() {
    let mut table = Table::new(config(false));
    for _ in 0..1000 {
        table.core.switch_on(MS(0));
        table.core.handle(Event::Deadline, MS(0));
    }
    assert_eq!(told(&mut table), []);
}

#[test]
fn times_are_shown_up_to_now_though_nothing_happens() {
    let mut table = Table::new(Config { quantum: MS(60_000), ..config(false) });
    table.register(1, Gate::Closed, 12 * GIB, 0);
    table.register(2, Gate::Closed, 12 * GIB, 12 * GIB);
    table.now = 100;
    table.runs(1);
    table.now = 400;
    table.say(2, ClientMessage::ReqLock);
    let times = |table: &Table, now| {
        let rows = table.core.client_status_at(MS(now));
        rows.iter().map(|row| (row.held_ms, row.waited_ms)).collect::<Vec<_>>()
    };
    assert_eq!(times(&table, 400), [(300, 0), (0, 0)]);
    assert_eq!(times(&table, 5400), [(5300, 0), (0, 5000)]);
    // A look counts nothing: the next one says the same.
    assert_eq!(times(&table, 5400), [(5300, 0), (0, 5000)]);
}
