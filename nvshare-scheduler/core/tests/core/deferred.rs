//! Drains that are given up: when they are tried again, and which others they hold up.

use nvshare_core::{Event, Gang, Identity};
use nvshare_proto::{Amount, ClientMessage, Epoch, Gate, SchedulerMessage, TenantSettings, Usage};

use crate::gangs::Sent;
use crate::table::{CAPACITY, GIB, MS, Table, asked_to_leave, config, gpu, granted};

fn has(on: u8, gib: u64) -> Usage {
    Usage { gpu: gpu(on), total: CAPACITY, limit: 0, allocated: gib * GIB, absent: 0, immovable: 0 }
}

fn lacks(on: u8, gib: u64) -> Usage {
    Usage { absent: gib * GIB, ..has(on, gib) }
}

/// Registers a client of this number, which is a tenant of its own, and may be a rank.
fn register(table: &mut Table, client: u64, gang: Option<Gang>, gate: Gate, usage: Usage) -> Sent {
    let (process, tenant) = (Some(client), Some(client));
    table.register_as(client, Identity { pid: Some(9), process, tenant, gang }, gate, usage)
}

/// Waits until a client is asked for the lock. Returns the epoch and the patience in milliseconds.
fn until_asked(table: &mut Table, client: u64, mut sent: Sent) -> (Epoch, u64) {
    let until = table.now + 300_000;
    loop {
        let asked = |(to, message): &(u64, SchedulerMessage)| match message {
            SchedulerMessage::DropLock { epoch, patience_ms } if *to == client => {
                Some((*epoch, u64::from(*patience_ms)))
            }
            _ => None,
        };
        if let Some(asked) = sent.iter().find_map(asked) {
            return asked;
        }
        assert!(table.now < until, "{client} is not asked");
        let next = table.now + 10;
        sent = table.wait_until(next);
    }
}

/// A client gives up its drains, this many one after the other, as soon as it is asked. Returns what is sent after the last.
fn gives_up(table: &mut Table, client: u64, times: u32, mut sent: Sent) -> Sent {
    for _ in 0..times {
        let (epoch, _) = until_asked(table, client, sent);
        sent = table.say(client, ClientMessage::DropDeferred { epoch });
    }
    sent
}

/// Two run side by side, and a third one waits for the first, which cannot drain.
#[test]
fn a_client_that_drains_well_is_paused_at_once_beside_one_that_cannot() {
    let mut table = Table::new(config(false));
    register(&mut table, 1, None, Gate::Open, has(0, 12));
    register(&mut table, 2, None, Gate::Open, has(0, 2));
    register(&mut table, 3, None, Gate::Closed, lacks(0, 12));
    let sent = table.say(3, ClientMessage::ReqLock);
    gives_up(&mut table, 1, 6, sent);
    let paused = TenantSettings { paused: Some(true), ..TenantSettings::default() };
    table.core.give(2, None, paused, MS(table.now)).unwrap();
    let sent = table.sent();
    assert!(asked_to_leave(&sent, 2).is_some(), "no drain of its own was given up: {sent:?}");
    assert!(asked_to_leave(&sent, 1).is_none(), "its drain is not tried again at once: {sent:?}");
}

/// Both are paused. One drains, and the other one cannot without it.
#[test]
fn clients_that_were_asked_together_are_asked_together_again() {
    let mut table = Table::new(config(false));
    let identity =
        |process| Identity { pid: Some(9), process: Some(process), tenant: Some(1), ..Identity::default() };
    let epochs = [1, 2].map(|client| {
        table.register_as(client, identity(client), Gate::Closed, has(0, 4));
        table.runs(client)
    });
    let paused = TenantSettings { paused: Some(true), ..TenantSettings::default() };
    table.core.give(1, None, paused, MS(table.now)).unwrap();
    let sent = table.sent();
    assert_eq!([1, 2].map(|client| asked_to_leave(&sent, client)), epochs.map(Some), "{sent:?}");
    table.say(2, ClientMessage::LockReleased { epoch: epochs[1] });
    let mut sent = table.say(1, ClientMessage::DropDeferred { epoch: epochs[0] });
    let epoch = granted(&sent, 2).unwrap_or_else(|| panic!("the first one may wait for it: {sent:?}"));
    sent.append(&mut table.say(2, ClientMessage::Running { epoch }));
    assert!([1, 2].iter().all(|&client| asked_to_leave(&sent, client).is_none()), "{sent:?}");
    let sent = table.wait_until(2000);
    assert!([1, 2].iter().all(|&client| asked_to_leave(&sent, client).is_some()), "{sent:?}");
}

/// The patience of its drain is longer than the grace of an answer by then.
#[test]
fn a_client_that_gives_up_one_long_drain_after_the_other_counts_as_one_that_answers() {
    let mut table = Table::new(config(false));
    register(&mut table, 1, None, Gate::Open, has(0, 12));
    register(&mut table, 2, None, Gate::Closed, lacks(0, 12));
    let sent = table.say(2, ClientMessage::ReqLock);
    let sent = gives_up(&mut table, 1, 7, sent);
    let (epoch, patience) = until_asked(&mut table, 1, sent);
    assert!(MS(patience) > config(false).grace, "{patience} ms");
    // It reads the order a moment after it was sent, and looks at its work now and then.
    let answers = table.now + patience + 20;
    table.wait_until(answers);
    table.say(1, ClientMessage::DropDeferred { epoch });
    assert!(!table.notes.iter().any(|note| note.contains("does not answer")), "{:#?}", table.notes);
}

/// The turn is over while one rank is idle, and as its gate opens again. The other one could not drain.
#[test]
fn a_gang_is_asked_when_the_rank_that_goes_on_works_again() {
    let gang = Some(Gang { number: 5, size: 2 });
    let (pauses, works, other) = (1, 2, 3);
    let mut table = Table::new(config(false));
    register(&mut table, pauses, gang, Gate::Closed, lacks(0, 12));
    register(&mut table, works, gang, Gate::Closed, lacks(1, 12));
    register(&mut table, other, None, Gate::Closed, lacks(1, 12));
    let sent = table.say(pauses, ClientMessage::ReqLock);
    let epochs = [pauses, works].map(|rank| granted(&sent, rank).unwrap_or_else(|| panic!("{sent:?}")));
    for (rank, on) in [(pauses, 0), (works, 1)] {
        table.say(rank, ClientMessage::Running { epoch: epochs[usize::from(on)] });
        table.say(rank, ClientMessage::Usage(has(on, 12)));
    }
    table.say(other, ClientMessage::ReqLock);
    table.wait_until(900);
    table.say(pauses, ClientMessage::Idle { epoch: epochs[0] });
    let sent = table.wait_until(1050);
    assert!([pauses, works].iter().all(|&rank| asked_to_leave(&sent, rank).is_none()), "{sent:?}");
    let sent = table.say(pauses, ClientMessage::ReqLock);
    let epoch = granted(&sent, pauses).unwrap_or_else(|| panic!("{sent:?}"));
    let sent = table.wait_until(1500);
    assert!([pauses, works].iter().all(|&rank| asked_to_leave(&sent, rank).is_none()), "{sent:?}");
    let sent = table.say(pauses, ClientMessage::Running { epoch });
    assert!([pauses, works].iter().all(|&rank| asked_to_leave(&sent, rank).is_some()), "{sent:?}");
}

/// A client beside the idle rank grows, and leaves. The rank has its memory, and the other one may wait for its kernels.
#[test]
fn a_rank_that_was_idle_goes_on_though_others_outgrow_the_gpu() {
    let gang = Some(Gang { number: 5, size: 2 });
    let (pauses, grows) = (1, 3);
    let mut table = Table::new(config(false));
    register(&mut table, pauses, gang, Gate::Closed, has(0, 8));
    register(&mut table, 2, gang, Gate::Closed, has(1, 8));
    let sent = table.say(pauses, ClientMessage::ReqLock);
    let epochs = [pauses, 2].map(|rank| granted(&sent, rank).unwrap_or_else(|| panic!("{sent:?}")));
    table.say(pauses, ClientMessage::Running { epoch: epochs[0] });
    table.say(2, ClientMessage::Running { epoch: epochs[1] });
    register(&mut table, grows, None, Gate::Closed, has(0, 4));
    table.runs(grows);
    table.say(pauses, ClientMessage::Idle { epoch: epochs[0] });
    let sent = table.say(grows, ClientMessage::NeedRoom(Amount { gpu: gpu(0), bytes: 10 * GIB }));
    assert!(asked_to_leave(&sent, grows).is_some(), "{sent:?}");
    let sent = table.say(pauses, ClientMessage::ReqLock);
    assert!(granted(&sent, pauses).is_some(), "{sent:?}");
}

const COMES: u64 = 1;
const WORKS: u64 = 2;

/// A gang of which the second rank works, and the first one brings its memory back. A client waits for the second one's GPU. Returns the
/// first rank's epoch.
fn comes_in(table: &mut Table) -> Epoch {
    let gang = Some(Gang { number: 5, size: 2 });
    register(table, COMES, gang, Gate::Closed, lacks(0, 12));
    register(table, WORKS, gang, Gate::Closed, lacks(1, 12));
    register(table, 3, None, Gate::Closed, lacks(1, 12));
    let sent = table.say(COMES, ClientMessage::ReqLock);
    let [epoch, of_other] =
        [COMES, WORKS].map(|rank| granted(&sent, rank).unwrap_or_else(|| panic!("{sent:?}")));
    table.say(WORKS, ClientMessage::Running { epoch: of_other });
    table.say(WORKS, ClientMessage::Usage(has(1, 12)));
    table.say(3, ClientMessage::ReqLock);
    epoch
}

fn is_gang_asked(sent: &Sent) -> bool {
    let asked = [COMES, WORKS].map(|rank| asked_to_leave(sent, rank).is_some());
    assert_eq!(asked[0], asked[1], "a gang leaves as a whole: {sent:?}");
    asked[0]
}

#[test]
fn a_gang_leaves_for_a_waiter_when_its_last_rank_has_come_in() {
    let mut table = Table::new(config(false));
    let epoch = comes_in(&mut table);
    let sent = table.wait_until(4000);
    assert!(!is_gang_asked(&sent), "{sent:?}");
    assert!(is_gang_asked(&table.say(COMES, ClientMessage::Running { epoch })));
}

#[test]
fn a_gang_leaves_for_an_administrator_when_its_last_rank_has_come_in() {
    let mut table = Table::new(config(false));
    let epoch = comes_in(&mut table);
    let paused = TenantSettings { paused: Some(true), ..TenantSettings::default() };
    table.core.give(WORKS, None, paused, MS(table.now)).unwrap();
    let sent = table.sent();
    assert!(!is_gang_asked(&sent), "{sent:?}");
    assert!(is_gang_asked(&table.say(COMES, ClientMessage::Running { epoch })));
}

/// A rank that does not come in is waited for no longer than a restore may take.
#[test]
fn a_gang_leaves_though_its_last_rank_does_not_come_in() {
    let mut table = Table::new(config(false));
    comes_in(&mut table);
    let next = table.now + 10;
    let sent = table.wait_until(next);
    until_asked(&mut table, WORKS, sent);
    assert!(MS(table.now) >= config(false).grace, "{} ms", table.now);
    assert!(MS(table.now) < config(false).grace + MS(60_000), "{} ms", table.now);
}

/// One rank runs, and cannot drain without the other, which comes last. Each of their GPUs has a waiter that no other client fits beside.
#[test]
fn a_rank_that_fits_joins_its_gang_though_every_waiter_would_delay_the_first() {
    let gang = Some(Gang { number: 5, size: 0 });
    let (runs, comes) = (1, 9);
    let mut table = Table::new(config(false));
    register(&mut table, runs, gang, Gate::Open, has(1, 4));
    register(&mut table, 3, None, Gate::Open, has(0, 4));
    for (large, on) in [(4, 0), (5, 1)] {
        register(&mut table, large, None, Gate::Closed, lacks(on, 14));
        table.say(large, ClientMessage::ReqLock);
    }
    table.wait_until(100);
    let mut sent = register(&mut table, comes, gang, Gate::Closed, lacks(0, 6));
    sent.append(&mut table.say(comes, ClientMessage::ReqLock));
    assert!(granted(&sent, comes).is_some(), "{sent:?}");
}

/// The rank on the other GPU cannot drain, and ends.
#[test]
fn a_rank_is_asked_at_once_when_the_one_that_could_not_drain_has_ended() {
    let gang = Some(Gang { number: 5, size: 2 });
    let (stays, ends, other) = (1, 2, 3);
    let mut table = Table::new(config(false));
    register(&mut table, stays, gang, Gate::Open, has(0, 12));
    register(&mut table, ends, gang, Gate::Open, has(1, 12));
    register(&mut table, other, None, Gate::Closed, lacks(0, 12));
    let mut sent = table.say(other, ClientMessage::ReqLock);
    for _ in 0..5 {
        sent = gives_up(&mut table, ends, 1, sent);
        let epoch = granted(&sent, stays).unwrap_or_else(|| panic!("it was asked as well: {sent:?}"));
        sent = table.say(stays, ClientMessage::Running { epoch });
    }
    let sent = table.wait_until(table.now + 1000);
    assert!(asked_to_leave(&sent, stays).is_none(), "the drain is not tried again at once: {sent:?}");
    let sent = table.happens(Event::Disconnected { client: ends, process_remains: false });
    assert!(asked_to_leave(&sent, stays).is_some(), "{sent:?}");
}
