//! Gangs: processes that are granted together or not at all, and give the lock back together.

use nvshare_core::{Config, Event, Gang, Identity};
use nvshare_proto::{Amount, ClientMessage, Epoch, Gate, Register, SchedulerMessage, TenantSettings, Usage};

use crate::table::{GIB, MS, Table, asked_to_leave, config, gpu, granted, newcomer, room_given, twelve_gib};

const PAIR: Gang = Gang { number: 5, size: 2 };
pub(crate) const RANKS: [u64; 2] = [1, 2];
pub(crate) const OTHER: u64 = 3;

pub(crate) type Sent = Vec<(u64, SchedulerMessage)>;

pub(crate) fn register(table: &mut Table, client: u64, on: u8, gang: Option<Gang>, resident: bool) -> Sent {
    let absent = if resident { 0 } else { 12 * GIB };
    let identity = Identity { pid: Some(9), process: Some(client), gang, ..Identity::default() };
    table.register_as(client, identity, Gate::Closed, Usage { gpu: gpu(on), ..twelve_gib(absent) })
}

/// A gang with a rank on each of two GPUs, and another client on one of them.
pub(crate) fn pair_and_other(other_on: u8) -> Table {
    let mut table = Table::new(config(false));
    register(&mut table, RANKS[0], 0, Some(PAIR), false);
    register(&mut table, RANKS[1], 1, Some(PAIR), false);
    register(&mut table, OTHER, other_on, None, false);
    table
}

fn both_run(table: &mut Table) -> [Epoch; 2] {
    let sent = table.say(RANKS[0], ClientMessage::ReqLock);
    let epochs = RANKS.map(|rank| granted(&sent, rank).unwrap_or_else(|| panic!("{rank}: {sent:?}")));
    for (rank, epoch) in RANKS.into_iter().zip(epochs) {
        table.say(rank, ClientMessage::Running { epoch });
        let usage = Usage { gpu: gpu(rank as u8 - 1), ..twelve_gib(0) };
        table.say(rank, ClientMessage::Usage(usage));
    }
    epochs
}

#[test]
fn a_gang_is_granted_at_once_or_not_at_all() {
    let mut table = pair_and_other(1);
    let epoch = table.runs(OTHER);
    table.say(OTHER, ClientMessage::Usage(Usage { gpu: gpu(1), ..twelve_gib(0) }));
    // One of them asks, and its own GPU is free.
    let sent = table.say(RANKS[0], ClientMessage::ReqLock);
    assert!(RANKS.iter().all(|&rank| granted(&sent, rank).is_none()), "{sent:?}");
    let sent = table.wait_until(1000);
    assert_eq!(asked_to_leave(&sent, OTHER), Some(epoch), "{sent:?}");
    assert!(RANKS.iter().all(|&rank| granted(&sent, rank).is_none()), "{sent:?}");
    let sent = table.say(OTHER, ClientMessage::LockReleased { epoch });
    let sent = table.give_back(sent);
    assert!(RANKS.iter().all(|&rank| granted(&sent, rank).is_some()), "{sent:?}");
}

/// The time until which it waits for a third member is over before its members go on one by one.
#[test]
fn a_gang_that_lacks_a_member_and_does_not_fit_goes_on_one_by_one() {
    let mut table = Table::new(config(false));
    let gang = Some(Gang { number: 5, size: 3 });
    for rank in RANKS {
        register(&mut table, rank, 0, gang, false);
    }
    table.now = 5000;
    let mut sent = RANKS.map(|rank| table.say(rank, ClientMessage::ReqLock)).concat();
    sent.append(&mut table.wait_until(60_000));
    assert!(RANKS.iter().any(|&rank| granted(&sent, rank).is_some()), "{sent:?}");
}

/// A change of the configuration has both GPUs looked at in one event. On the second one another client takes the turn first, and
/// the gang does not fit beside that.
#[test]
fn a_gang_takes_no_turn_on_one_gpu_while_another_client_takes_the_other() {
    const ON_FIRST: u64 = 10;
    const ON_SECOND: u64 = 11;
    const AHEAD: u64 = 12;
    let mut table = Table::new(Config { quantum: MS(30_000), ..config(false) });
    let mut has = |client, on, gib, gang| {
        table.now += 1;
        let identity = Identity { pid: Some(9), process: Some(client), gang, ..Identity::default() };
        let usage = Usage { gpu: gpu(on), allocated: gib * GIB, ..twelve_gib(gib * GIB) };
        table.register_as(client, identity, Gate::Closed, usage);
        table.say(client, ClientMessage::ReqLock)
    };
    let epochs = [(ON_FIRST, 0, 12), (ON_SECOND, 1, 4)].map(|(client, on, gib)| {
        let sent = has(client, on, gib, None);
        (client, granted(&sent, client).unwrap())
    });
    has(AHEAD, 1, 14, None);
    for (number, rank) in RANKS.into_iter().enumerate() {
        has(rank, number as u8, 8, Some(PAIR));
    }
    for (client, epoch) in epochs {
        table.say(client, ClientMessage::Running { epoch });
    }
    table.wait_until(5000);
    table.core.configure(config(false), MS(5000));
    let sent = table.sent();
    assert!(asked_to_leave(&sent, ON_SECOND).is_some(), "{sent:?}");
    assert_eq!(asked_to_leave(&sent, ON_FIRST), None, "{sent:?}");
}

#[test]
fn a_waiter_gets_the_place_of_one_rank_when_all_have_drained() {
    let mut table = pair_and_other(0);
    let epochs = both_run(&mut table);
    table.say(OTHER, ClientMessage::ReqLock);
    let sent = table.wait_until(1000);
    for (rank, epoch) in RANKS.into_iter().zip(epochs) {
        assert_eq!(asked_to_leave(&sent, rank), Some(epoch), "{sent:?}");
    }
    let sent = table.say(RANKS[0], ClientMessage::LockReleased { epoch: epochs[0] });
    assert_eq!(sent, [], "the other rank may yet be unable to");
    let sent = table.say(RANKS[1], ClientMessage::LockReleased { epoch: epochs[1] });
    let sent = table.give_back(sent);
    assert!(granted(&sent, OTHER).is_some(), "{sent:?}");
}

/// Its GPU has become too small for its memory.
#[test]
fn a_rank_that_gives_its_grant_back_has_the_others_leave() {
    let mut table = pair_and_other(1);
    let sent = table.say(RANKS[0], ClientMessage::ReqLock);
    let epochs = RANKS.map(|rank| granted(&sent, rank).unwrap_or_else(|| panic!("{rank}: {sent:?}")));
    let sent = table.say(RANKS[0], ClientMessage::LockReleased { epoch: epochs[0] });
    assert_eq!(asked_to_leave(&sent, RANKS[1]), Some(epochs[1]), "{sent:?}");
}

#[test]
fn a_rank_that_cannot_drain_lets_all_go_on() {
    let mut table = pair_and_other(0);
    let epochs = both_run(&mut table);
    table.say(OTHER, ClientMessage::ReqLock);
    table.wait_until(1000);
    table.say(RANKS[0], ClientMessage::LockReleased { epoch: epochs[0] });
    let sent = table.say(RANKS[1], ClientMessage::DropDeferred { epoch: epochs[1] });
    let again = granted(&sent, RANKS[0]).unwrap_or_else(|| panic!("{sent:?}"));
    assert_eq!(granted(&sent, OTHER), None, "{sent:?}");
    // Asked again later, it drains.
    table.say(RANKS[0], ClientMessage::Running { epoch: again });
    let sent = table.wait_until(4000);
    assert!(asked_to_leave(&sent, RANKS[0]).is_some(), "{sent:?}");
    table.say(RANKS[0], ClientMessage::LockReleased { epoch: again });
    let sent = table.say(RANKS[1], ClientMessage::LockReleased { epoch: epochs[1] });
    assert!(granted(&table.give_back(sent), OTHER).is_some());
}

#[test]
fn an_idle_rank_goes_on_with_one_that_cannot_drain() {
    let mut table = pair_and_other(0);
    let epochs = both_run(&mut table);
    table.say(RANKS[0], ClientMessage::Idle { epoch: epochs[0] });
    table.say(OTHER, ClientMessage::ReqLock);
    table.wait_until(2000);
    let sent = table.say(RANKS[1], ClientMessage::DropDeferred { epoch: epochs[1] });
    assert!(granted(&sent, RANKS[0]).is_some(), "{sent:?}");
}

/// The grant has answered what it asked while the others drained.
#[test]
fn a_rank_that_is_called_back_asks_for_nothing_more() {
    let mut table = pair_and_other(1);
    let epochs = both_run(&mut table);
    table.say(OTHER, ClientMessage::ReqLock);
    table.wait_until(1000);
    table.say(RANKS[0], ClientMessage::LockReleased { epoch: epochs[0] });
    table.say(RANKS[0], ClientMessage::ReqLock);
    let sent = table.say(RANKS[1], ClientMessage::DropDeferred { epoch: epochs[1] });
    let again = granted(&sent, RANKS[0]).unwrap_or_else(|| panic!("{sent:?}"));
    table.say(RANKS[0], ClientMessage::Running { epoch: again });
    let mut sent = table.say(RANKS[0], ClientMessage::Idle { epoch: again });
    sent.extend(table.say(RANKS[1], ClientMessage::Idle { epoch: epochs[1] }));
    let epoch = granted(&table.give_back(sent), OTHER).expect("its turn");
    table.say(OTHER, ClientMessage::Running { epoch });
    let sent = table.wait_until(120_000);
    assert_eq!(asked_to_leave(&sent, OTHER), None, "{sent:?}");
}

#[test]
fn a_rank_that_dies_or_is_silent_frees_the_places_of_the_others() {
    for dies in [true, false] {
        let mut table = pair_and_other(0);
        let epochs = both_run(&mut table);
        table.say(OTHER, ClientMessage::ReqLock);
        table.wait_until(1000);
        table.say(RANKS[0], ClientMessage::LockReleased { epoch: epochs[0] });
        let sent = if dies {
            table.happens(Event::Disconnected { client: RANKS[1], process_remains: false })
        } else {
            table.wait_until(11_001)
        };
        assert!(granted(&table.give_back(sent), OTHER).is_some(), "dies: {dies}");
    }
}

#[test]
fn a_gang_waits_for_those_who_are_to_come_but_not_for_ever() {
    let mut table = Table::new(config(false));
    register(&mut table, RANKS[0], 0, Some(PAIR), false);
    let sent = table.say(RANKS[0], ClientMessage::ReqLock);
    assert_eq!(granted(&sent, RANKS[0]), None, "half of it");
    table.now = 10;
    let sent = register(&mut table, RANKS[1], 1, Some(PAIR), false);
    assert!(RANKS.iter().all(|&rank| granted(&sent, rank).is_some()), "{sent:?}");

    let mut table = Table::new(config(false));
    register(&mut table, RANKS[0], 0, Some(PAIR), false);
    table.say(RANKS[0], ClientMessage::ReqLock);
    let sent = table.wait_until(31_000);
    assert!(granted(&sent, RANKS[0]).is_some(), "{sent:?}");
    assert!(table.notes.iter().any(|note| note.contains("goes on with 1 of 2")), "{:?}", table.notes);
}

#[test]
fn ranks_that_wait_for_another_one_keep_no_client_of_their_gpus_waiting() {
    const HOLDER: u64 = 4;
    let mut table = Table::new(config(false));
    let comes = |table: &mut Table, client: u64, gib: u64, gang: Option<Gang>| {
        table.now += 10;
        let usages =
            [0, 1].map(|number| Usage { gpu: gpu(number), allocated: gib * GIB, ..twelve_gib(gib * GIB) });
        let identity = Identity { pid: Some(9), process: Some(client), gang, ..Identity::default() };
        let register = Register { usage: usages.to_vec(), ..newcomer(Gate::Closed, usages[0]) };
        table.happens(Event::Registered { client, identity, register });
        table.say(client, ClientMessage::ReqLock)
    };
    let epoch = granted(&comes(&mut table, HOLDER, 12, None), HOLDER).expect("both GPUs are free");
    table.say(HOLDER, ClientMessage::Running { epoch });
    // The second rank comes when it is known that the first one has to wait.
    let three = Some(Gang { size: 3, ..PAIR });
    for (client, gib, gang) in [(RANKS[0], 6, three), (RANKS[1], 6, three), (OTHER, 12, None)] {
        comes(&mut table, client, gib, gang);
    }
    let sent = table.wait_until(10_000);
    assert_eq!(asked_to_leave(&sent, HOLDER), Some(epoch), "{sent:?}");
}

/// Ranks of the one come first to two GPUs, and ranks of the other one to the other two.
#[test]
fn gangs_whose_ranks_come_in_another_order_do_not_keep_each_other_off() {
    let mut table = Table::new(config(false));
    let holders = [0, 1, 2, 3].map(|on| {
        register(&mut table, 20 + u64::from(on), on, None, false);
        let sent = table.say(20 + u64::from(on), ClientMessage::ReqLock);
        (on, granted(&sent, 20 + u64::from(on)).expect("it is free"))
    });
    for (now, number, ranks) in [(10, 5, [0, 1]), (20, 6, [0, 1]), (20, 6, [2, 3]), (30, 5, [2, 3])] {
        table.now = now;
        for on in ranks {
            let rank = number * 10 + u64::from(on);
            register(&mut table, rank, on, Some(Gang { number, size: 4 }), false);
            table.say(rank, ClientMessage::ReqLock);
        }
    }
    table.now = 40;
    for (on, epoch) in holders {
        table.say(20 + u64::from(on), ClientMessage::Running { epoch });
        table.say(20 + u64::from(on), ClientMessage::Usage(Usage { gpu: gpu(on), ..twelve_gib(0) }));
    }
    let sent = table.wait_until(1100);
    assert!((20..24).all(|holder| asked_to_leave(&sent, holder).is_some()), "{sent:?}");
}

#[test]
fn a_rank_that_comes_late_has_the_others_leave_and_come_back_with_it() {
    let gang = Some(Gang { size: 0, ..PAIR });
    let mut table = Table::new(config(false));
    register(&mut table, RANKS[0], 0, gang, false);
    let first = table.runs(RANKS[0]);
    table.say(RANKS[0], ClientMessage::Usage(twelve_gib(0)));
    register(&mut table, OTHER, 1, None, false);
    let other = table.runs(OTHER);
    table.say(OTHER, ClientMessage::Usage(Usage { gpu: gpu(1), ..twelve_gib(0) }));
    table.now = 10;
    let sent = register(&mut table, RANKS[1], 1, gang, false);
    assert_eq!(asked_to_leave(&sent, RANKS[0]), Some(first), "{sent:?}");
    assert_eq!(asked_to_leave(&sent, OTHER), None, "its turn is not over");
    let mut sent = table.say(RANKS[0], ClientMessage::LockReleased { epoch: first });
    assert_eq!(granted(&sent, RANKS[0]), None, "{sent:?}");
    sent.append(&mut table.say(RANKS[0], ClientMessage::ReqLock));
    sent.append(&mut table.wait_until(1100));
    assert_eq!(asked_to_leave(&sent, OTHER), Some(other), "{sent:?}");
    let sent = table.say(OTHER, ClientMessage::LockReleased { epoch: other });
    let sent = table.give_back(sent);
    assert!(RANKS.iter().all(|&rank| granted(&sent, rank).is_some()), "{sent:?}");
}

#[test]
fn a_gang_that_fits_no_gpu_is_told_so_and_holds_nobody_up() {
    let mut table = Table::new(config(false));
    for rank in RANKS {
        register(&mut table, rank, 0, Some(PAIR), false);
    }
    table.say(RANKS[0], ClientMessage::ReqLock);
    let told = |note: &String| note.contains("its gang wants 24.00 GiB");
    assert!(table.notes.iter().any(told), "{:?}", table.notes);
    register(&mut table, OTHER, 0, None, false);
    table.runs(OTHER);
}

#[test]
fn a_gang_of_a_thousand_is_bounded() {
    const MAX_MEMBERS: u64 = 64;
    let mut table = Table::new(config(false));
    let register = |table: &mut Table, client: u64| {
        let gang = Some(Gang { number: 5, size: 1000 });
        let identity = Identity { pid: Some(9), process: Some(client), gang, ..Identity::default() };
        let usage = Usage { gpu: gpu((client % 8) as u8), allocated: GIB, absent: GIB, ..twelve_gib(0) };
        table.register_as(client, identity, Gate::Closed, usage)
    };
    (0..MAX_MEMBERS - 1).for_each(|client| drop(register(&mut table, client)));
    let sent = table.say(0, ClientMessage::ReqLock);
    assert!(
        (0..MAX_MEMBERS).all(|client| granted(&sent, client).is_none()),
        "the gang is not complete: {sent:?}"
    );
    let sent = register(&mut table, MAX_MEMBERS - 1);
    assert!((0..MAX_MEMBERS).all(|client| granted(&sent, client).is_some()), "it is: {sent:?}");
    assert!(!table.notes.iter().any(|note| note.contains("members already")), "{:?}", table.notes);
    for further in [MAX_MEMBERS, MAX_MEMBERS + 1] {
        register(&mut table, further);
        let told = format!("client {further}: its gang has 64 members already");
        assert!(table.notes.iter().any(|note| note.contains(&told)), "{:?}", table.notes);
        let sent = table.say(further, ClientMessage::ReqLock);
        assert!(granted(&sent, further).is_some(), "it is by itself: {sent:?}");
    }
}

#[test]
fn a_gang_of_one_is_granted_like_any_client() {
    let mut table = pair_and_other(0);
    register(&mut table, 9, 2, Some(Gang { number: 7, size: 0 }), false);
    let sent = table.say(9, ClientMessage::ReqLock);
    assert!(granted(&sent, 9).is_some(), "{sent:?}");
}

/// Four ranks under one name, two on each GPU: what the second script takes for its own gang is part of the first one's.
#[test]
fn two_scripts_of_one_name_are_one_gang_and_are_told_where_that_cannot_be() {
    for gib in [6, 12] {
        let mut table = Table::new(config(false));
        let ranks = [11, 12, 13, 14];
        for rank in ranks {
            let identity =
                Identity { pid: Some(9), process: Some(rank), gang: Some(PAIR), ..Identity::default() };
            let usage = Usage {
                gpu: gpu((rank % 2) as u8),
                allocated: gib * GIB,
                absent: gib * GIB,
                ..twelve_gib(0)
            };
            table.register_as(rank, identity, Gate::Closed, usage);
        }
        let sent = table.say(ranks[0], ClientMessage::ReqLock);
        let run = ranks.iter().filter(|&&rank| granted(&sent, rank).is_some()).count();
        let told = table.notes.iter().any(|note| note.contains("its gang wants 24.00 GiB"));
        assert_eq!((run, told), if gib == 6 { (4, false) } else { (0, true) }, "{:?}", table.notes);
        // Nobody waits for a gang that cannot run.
        if gib == 12 {
            register(&mut table, OTHER, 0, None, false);
            table.runs(OTHER);
        }
    }
}

/// Two programs that have one name by mistake, and one GPU.
#[test]
fn members_that_do_not_fit_their_one_gpu_together_go_on_one_by_one_after_a_while() {
    let mut table = Table::new(config(false));
    for rank in RANKS {
        register(&mut table, rank, 0, Some(Gang { number: 5, size: 0 }), false);
    }
    for rank in RANKS {
        let sent = table.say(rank, ClientMessage::ReqLock);
        assert!(RANKS.iter().all(|&rank| granted(&sent, rank).is_none()), "{sent:?}");
    }
    let sent = table.wait_until(29_000);
    assert!(RANKS.iter().all(|&rank| granted(&sent, rank).is_none()), "{sent:?}");
    let sent = table.wait_until(31_000);
    let epoch = granted(&sent, RANKS[0]).unwrap_or_else(|| panic!("{sent:?}"));
    assert_eq!(granted(&sent, RANKS[1]), None, "{sent:?}");
    assert!(table.notes.iter().any(|note| note.contains("go on, each by itself")), "{:?}", table.notes);
    table.say(RANKS[0], ClientMessage::Running { epoch });
    table.say(RANKS[0], ClientMessage::Usage(twelve_gib(0)));
    let sent = table.wait_until(33_000);
    assert_eq!(asked_to_leave(&sent, RANKS[0]), Some(epoch), "{sent:?}");
    let sent = table.say(RANKS[0], ClientMessage::LockReleased { epoch });
    assert!(granted(&table.give_back(sent), RANKS[1]).is_some());
    table.core.audit().expect("in order");
}

/// None of four ranks on two GPUs could go on alone.
#[test]
fn members_on_several_gpus_that_do_not_fit_wait_together() {
    let mut table = Table::new(config(false));
    for rank in [11, 12, 13, 14] {
        register(&mut table, rank, (rank % 2) as u8, Some(PAIR), false);
    }
    table.say(11, ClientMessage::ReqLock);
    let sent = table.wait_until(120_000);
    assert!([11, 12, 13, 14].iter().all(|&rank| granted(&sent, rank).is_none()), "{sent:?}");
}

#[test]
fn an_allocation_that_its_gang_has_no_room_for_is_refused() {
    let mut table = Table::new(config(false));
    for rank in RANKS {
        let usage = Usage { allocated: 7 * GIB, absent: 7 * GIB, ..twelve_gib(0) };
        let identity =
            Identity { pid: Some(9), process: Some(rank), gang: Some(PAIR), ..Identity::default() };
        table.register_as(rank, identity, Gate::Closed, usage);
    }
    let sent = table.say(RANKS[0], ClientMessage::ReqLock);
    for rank in RANKS {
        let epoch = granted(&sent, rank).unwrap_or_else(|| panic!("{rank}: {sent:?}"));
        table.say(rank, ClientMessage::Running { epoch });
        table.say(rank, ClientMessage::Usage(Usage { allocated: 7 * GIB, ..twelve_gib(0) }));
    }
    // Alone it would fit; both together have 14 of 16 GiB, and are there together or not at all.
    let room = Amount { gpu: gpu(0), bytes: 15 * GIB };
    let sent = table.say(RANKS[0], ClientMessage::NeedRoom(room));
    let sent = table.give_back(sent);
    assert!(sent.contains(&(RANKS[0], SchedulerMessage::NoRoom { gpu: gpu(0) })), "{sent:?}");
}

#[test]
fn a_rank_waits_for_no_turn_where_another_one_runs() {
    let gang = Some(Gang { number: 5, size: 0 });
    let (grows, pauses) = (20, 21);
    let usage =
        |on, gib: u64| Usage { gpu: gpu(on), allocated: gib * GIB, absent: gib * GIB, ..twelve_gib(0) };
    let identity =
        |client, gang| Identity { pid: Some(9), process: Some(client), gang, ..Identity::default() };
    let mut table = Table::new(config(false));
    table.register_as(RANKS[0], identity(RANKS[0], gang), Gate::Closed, usage(1, 7));
    let first = table.runs(RANKS[0]);
    table.say(RANKS[0], ClientMessage::Usage(Usage { absent: 0, ..usage(1, 7) }));
    table.register_as(grows, identity(grows, None), Gate::Closed, usage(1, 8));
    let turn = table.runs(grows);
    table.say(grows, ClientMessage::Usage(Usage { absent: 0, ..usage(1, 8) }));
    table.register_as(pauses, identity(pauses, None), Gate::Closed, usage(0, 1));
    let idle = table.runs(pauses);
    // The other rank comes, and the first one cannot drain before it runs.
    table.now = 100;
    let sent = table.register_as(RANKS[1], identity(RANKS[1], gang), Gate::Closed, usage(0, 16));
    assert!(asked_to_leave(&sent, RANKS[0]).is_some(), "{sent:?}");
    let mut sent = table.say(RANKS[1], ClientMessage::ReqLock);
    // Now the clients on the GPU of the first rank do not fit it together.
    sent.append(&mut table.say(grows, ClientMessage::NeedRoom(Amount { gpu: gpu(1), bytes: 10 * GIB })));
    table.now = 300;
    sent.append(&mut table.say(RANKS[0], ClientMessage::DropDeferred { epoch: first }));
    sent.append(&mut table.say(pauses, ClientMessage::Idle { epoch: idle }));
    sent.append(&mut table.wait_until(5000));
    if asked_to_leave(&sent, grows).is_some() {
        sent.append(&mut table.say(grows, ClientMessage::LockReleased { epoch: turn }));
    }
    let sent = table.give_back(sent);
    assert!(granted(&sent, RANKS[1]).is_some(), "{sent:?}");
}

/// The members of one gang may belong to several tenants: a user starts each with an `nvshare-ctl run` of its own.
#[test]
fn a_gang_of_two_tenants_with_different_weights_runs_as_one_job() {
    let usage = Usage { allocated: 4 * GIB, absent: 4 * GIB, ..twelve_gib(0) };
    let mut table = Table::new(config(false));
    let come = |table: &mut Table, client, tenant, gang| {
        let identity = Identity { process: Some(client), tenant: Some(tenant), gang, ..Identity::default() };
        table.register_as(client, identity, Gate::Closed, usage);
    };
    for rank in RANKS {
        come(&mut table, rank, rank, Some(PAIR));
    }
    come(&mut table, OTHER, OTHER, None);
    let heavy = TenantSettings { weight: Some(700), ..TenantSettings::default() };
    table.core.give(RANKS[1], None, heavy, MS(0)).unwrap();
    let sent = table.say(RANKS[0], ClientMessage::ReqLock);
    table.assert_at_rest();
    let epochs = RANKS.map(|rank| granted(&sent, rank).unwrap_or_else(|| panic!("{rank}: {sent:?}")));
    for (rank, epoch) in RANKS.into_iter().zip(epochs) {
        table.say(rank, ClientMessage::Running { epoch });
        table.say(rank, ClientMessage::Usage(Usage { absent: 0, ..usage }));
    }
    // Another job has its time after it, not beside it: their shares are unequal.
    let mut sent = table.say(OTHER, ClientMessage::ReqLock);
    table.assert_at_rest();
    assert_eq!(granted(&sent, OTHER), None, "{sent:?}");
    sent.append(&mut table.wait_until(1000));
    for (rank, epoch) in RANKS.into_iter().zip(epochs) {
        assert_eq!(asked_to_leave(&sent, rank), Some(epoch), "{sent:?}");
        sent.append(&mut table.say(rank, ClientMessage::LockReleased { epoch }));
    }
    table.assert_at_rest();
    assert!(granted(&sent, OTHER).is_some(), "{sent:?}");
    // The gang counts as its first member's job for as long as a member is there.
    table.happens(Event::Disconnected { client: RANKS[0], process_remains: false });
    come(&mut table, RANKS[0] + 10, 11, Some(PAIR));
    table.say(RANKS[1], ClientMessage::ReqLock);
    table.assert_at_rest();
    let sent = table.happens(Event::Disconnected { client: OTHER, process_remains: false });
    table.assert_at_rest();
    for rank in [RANKS[0] + 10, RANKS[1]] {
        assert!(granted(&sent, rank).is_some(), "{rank}: {sent:?}");
    }
}

/// One member asked for the lock while the other one still drained, and both were paused.
#[test]
fn a_gang_that_goes_on_after_a_pause_waits_for_its_turn_with_all_members() {
    let small = |on| Usage { gpu: gpu(on), allocated: GIB, absent: 0, ..twelve_gib(0) };
    let identity = |client, gang| Identity { process: Some(client), gang, ..Identity::default() };
    let mut table = Table::new(config(false));
    table.register_as(OTHER, identity(OTHER, None), Gate::Closed, small(1));
    let other = table.runs(OTHER);
    table.now = 10;
    let gang = Some(Gang { size: 0, ..PAIR });
    for (rank, on) in RANKS.into_iter().zip(0..) {
        table.register_as(rank, identity(rank, gang), Gate::Closed, small(on));
    }
    let sent = table.say(RANKS[0], ClientMessage::ReqLock);
    let epochs = RANKS.map(|rank| granted(&sent, rank).unwrap_or_else(|| panic!("{rank}: {sent:?}")));
    for (rank, epoch) in RANKS.into_iter().zip(epochs) {
        table.say(rank, ClientMessage::Running { epoch });
    }
    // Then its share is another one than that of the client beside it.
    let pause =
        |paused| TenantSettings { weight: Some(1), paused: Some(paused), ..TenantSettings::default() };
    table.core.give(RANKS[0], None, pause(true), MS(10)).unwrap();
    let sent = table.sent();
    assert!(RANKS.iter().all(|&rank| asked_to_leave(&sent, rank).is_some()), "{sent:?}");
    table.say(RANKS[0], ClientMessage::LockReleased { epoch: epochs[0] });
    table.say(RANKS[0], ClientMessage::ReqLock);
    table.say(RANKS[1], ClientMessage::LockReleased { epoch: epochs[1] });
    table.wait_until(5000);
    table.core.give(RANKS[0], None, pause(false), MS(5000)).unwrap();
    table.assert_at_rest();
    let mut sent = table.sent();
    assert!(RANKS.iter().all(|&rank| granted(&sent, rank).is_none()), "{sent:?}");
    sent.append(&mut table.wait_until(60_000));
    assert_eq!(asked_to_leave(&sent, OTHER), Some(other), "{sent:?}");
    sent.append(&mut table.say(OTHER, ClientMessage::LockReleased { epoch: other }));
    let sent = table.give_back(sent);
    assert!(RANKS.iter().all(|&rank| granted(&sent, rank).is_some()), "{sent:?}");
}

/// The members of a gang may belong to several jobs. While one of these is paused, the others wait with it.
#[test]
fn a_gang_is_paused_while_one_of_its_jobs_is() {
    let small = |on| Usage { gpu: gpu(on), allocated: GIB, absent: 0, ..twelve_gib(0) };
    let gang = Some(Gang { size: 0, ..PAIR });
    let mut table = Table::new(config(false));
    for (rank, on) in RANKS.into_iter().zip(0..) {
        let identity = Identity { process: Some(rank), tenant: Some(rank), gang, ..Identity::default() };
        table.register_as(rank, identity, Gate::Closed, small(on));
    }
    let pause = |paused| TenantSettings { paused: Some(paused), ..TenantSettings::default() };
    table.core.give(RANKS[0], None, pause(true), MS(10)).unwrap();
    let mut sent = table.say(RANKS[1], ClientMessage::ReqLock);
    sent.append(&mut table.wait_until(5000));
    assert!(RANKS.iter().all(|&rank| granted(&sent, rank).is_none()), "{sent:?}");
    table.core.give(RANKS[0], None, pause(false), MS(5000)).unwrap();
    let sent = table.sent();
    assert!(RANKS.iter().all(|&rank| granted(&sent, rank).is_some()), "{sent:?}");
    // The one that is paused goes: the other one goes on.
    table.core.give(RANKS[0], None, pause(true), MS(5000)).unwrap();
    let is_paused = |table: &Table, rank| {
        table.core.client_status().iter().any(|row| row.client == rank && row.share.paused)
    };
    assert!(RANKS.iter().all(|&rank| is_paused(&table, rank)));
    table.core.handle(Event::Disconnected { client: RANKS[0], process_remains: false }, MS(5000));
    assert!(!is_paused(&table, RANKS[1]));
}

/// It has given the lock back, and its allocation goes on waiting.
#[test]
fn a_rank_that_drains_first_keeps_the_need_that_it_tells_meanwhile() {
    let mut table = pair_and_other(0);
    let epochs = both_run(&mut table);
    let sits = Usage { allocated: 3 * GIB, ..twelve_gib(0) };
    table.register_as(
        4,
        Identity { pid: Some(9), process: Some(4), ..Identity::default() },
        Gate::Closed,
        sits,
    );
    let mut sent = table.say(OTHER, ClientMessage::ReqLock);
    sent.append(&mut table.wait_until(1000));
    sent.append(&mut table.say(RANKS[0], ClientMessage::LockReleased { epoch: epochs[0] }));
    let need = ClientMessage::NeedRoom(Amount { gpu: gpu(0), bytes: 14 * GIB });
    sent.append(&mut table.say(RANKS[0], need));
    assert_eq!(room_given(&sent, RANKS[0]), 0, "the GPU is full: {sent:?}");
    sent.append(&mut table.say(RANKS[1], ClientMessage::LockReleased { epoch: epochs[1] }));
    let mut sent = table.give_back(sent);
    let other = granted(&sent, OTHER).unwrap_or_else(|| panic!("{sent:?}"));
    table.say(OTHER, ClientMessage::Running { epoch: other });
    table.say(OTHER, ClientMessage::Usage(twelve_gib(0)));
    sent.append(&mut table.wait_until(60_000));
    let is_given = room_given(&table.give_back(sent.clone()), RANKS[0]) > 0;
    assert!(is_given || asked_to_leave(&sent, OTHER).is_some(), "nobody makes room for it: {sent:?}");
}
