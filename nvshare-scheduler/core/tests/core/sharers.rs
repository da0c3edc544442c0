//! Gangs of clients that share memory.

use std::collections::BTreeMap;

use nvshare_core::{Config, Event};
use nvshare_proto::{ClientMessage, Epoch, Usage};

use crate::gangs::{OTHER, RANKS, pair_and_other, register};
use crate::table::{CAPACITY, GIB, Table, asked_to_leave, config, gpu, granted, twelve_gib};

fn shares(with: &[u64]) -> ClientMessage {
    ClientMessage::Shares { with: with.to_vec() }
}

/// Clients without a gang, each on a GPU, the first two of which share memory. The third one runs beside the second.
fn sharers_and_other(on: [u8; 2]) -> (Table, Epoch) {
    let mut table = Table::new(config(false));
    for (rank, on) in RANKS.into_iter().zip(on) {
        register(&mut table, rank, on, None, false);
    }
    register(&mut table, OTHER, on[1], None, false);
    let epoch = table.runs(OTHER);
    table.say(OTHER, ClientMessage::Usage(Usage { gpu: gpu(on[1]), ..twelve_gib(0) }));
    for rank in RANKS {
        table.say(rank, shares(&[77]));
    }
    (table, epoch)
}

#[test]
fn clients_that_share_memory_are_granted_at_once_or_not_at_all() {
    let (mut table, epoch) = sharers_and_other([0, 1]);
    // The GPU of the one that asks is free.
    let mut sent = table.say(RANKS[0], ClientMessage::ReqLock);
    sent.append(&mut table.wait_until(1000));
    assert!(RANKS.iter().all(|&rank| granted(&sent, rank).is_none()), "{sent:?}");
    assert_eq!(asked_to_leave(&sent, OTHER), Some(epoch), "{sent:?}");
    let sent = table.say(OTHER, ClientMessage::LockReleased { epoch });
    let sent = table.give_back(sent);
    assert!(RANKS.iter().all(|&rank| granted(&sent, rank).is_some()), "{sent:?}");
}

/// It holds the lock already when another client opens its memory.
#[test]
fn a_client_that_opens_memory_has_the_other_leave_and_come_back_with_it() {
    let mut table = Table::new(config(false));
    register(&mut table, RANKS[0], 0, None, false);
    register(&mut table, RANKS[1], 1, None, false);
    register(&mut table, OTHER, 1, None, false);
    let first = table.runs(RANKS[0]);
    table.say(RANKS[0], ClientMessage::Usage(twelve_gib(0)));
    table.runs(OTHER);
    table.say(OTHER, ClientMessage::Usage(Usage { gpu: gpu(1), ..twelve_gib(0) }));
    table.say(RANKS[0], shares(&[77]));
    let sent = table.say(RANKS[1], shares(&[77]));
    assert_eq!(asked_to_leave(&sent, RANKS[0]), Some(first), "{sent:?}");
    // Said twice, it changes nothing.
    assert_eq!(table.say(RANKS[1], shares(&[77])), []);
}

#[test]
fn clients_that_share_memory_and_do_not_fit_go_on_one_by_one() {
    let (mut table, epoch) = sharers_and_other([0, 0]);
    // One of them is on another GPU: members of a gang with a name would wait.
    register(&mut table, 9, 1, None, false);
    table.say(9, shares(&[77]));
    table.say(OTHER, ClientMessage::LockReleased { epoch });
    table.say(RANKS[0], ClientMessage::ReqLock);
    let sent = table.wait_until(3000);
    let sent = table.give_back(sent);
    assert!(granted(&sent, RANKS[0]).is_some(), "{sent:?}");
    assert!(table.notes.iter().any(|note| note.contains("each by itself")), "{:?}", table.notes);
    // And they stay so.
    table.say(RANKS[0], shares(&[77, 78]));
    table.say(RANKS[1], shares(&[77, 78]));
    assert_eq!(
        table.notes.iter().filter(|note| note.contains("share memory")).count(),
        2,
        "{:?}",
        table.notes
    );
}

/// A process without the library has taken a part of the GPU of one of them, which goes on with all of its memory or not at all.
#[test]
fn clients_that_share_memory_stay_together_while_one_of_them_has_no_room() {
    let mut table = Table::new(Config { gpu_memory: None, reserve: Some(0), ..config(false) });
    for (rank, on) in RANKS.into_iter().zip([0, 1]) {
        register(&mut table, rank, on, None, false);
        table.say(rank, shares(&[77]));
    }
    table.sees(0, 9 * GIB, BTreeMap::new());
    let sent = table.say(RANKS[0], ClientMessage::ReqLock);
    for rank in RANKS {
        let epoch = granted(&sent, rank).unwrap_or_else(|| panic!("{rank}: {sent:?}"));
        table.say(rank, ClientMessage::LockReleased { epoch });
    }
    table.say(RANKS[0], ClientMessage::ReqLock);
    table.wait_until(60_000);
    assert!(!table.notes.iter().any(|note| note.contains("each by itself")), "{:?}", table.notes);
    let sent = table.sees(0, CAPACITY, BTreeMap::new());
    assert!(RANKS.iter().all(|&rank| granted(&sent, rank).is_some()), "{sent:?}");
}

/// As a worker that has given its results away.
#[test]
fn a_client_whose_mates_are_gone_is_in_no_gang() {
    let (mut table, epoch) = sharers_and_other([0, 1]);
    table.happens(Event::Disconnected { client: RANKS[1], process_remains: false });
    let sent = table.say(RANKS[0], ClientMessage::ReqLock);
    assert!(granted(&sent, RANKS[0]).is_some(), "{sent:?}");
    table.say(OTHER, ClientMessage::LockReleased { epoch });
    // The next one that opens its memory is its mate again.
    register(&mut table, 9, 1, None, false);
    table.say(9, shares(&[77]));
    let sharing = table.notes.iter().filter(|note| note.contains("share memory")).count();
    assert_eq!(sharing, 2, "{:?}", table.notes);
}

/// Each has given memory to the next one: they are one gang, in whatever order they say so.
#[test]
fn gangs_of_sharers_become_one() {
    let (both, all) = (&[1, 2][..], 1..=3);
    let orders: [[(u64, &[u64]); 4]; 3] = [
        [(1, &[1]), (2, &[1]), (2, both), (3, &[2])],
        [(1, &[1]), (2, &[2]), (3, &[2]), (2, both)],
        [(3, &[2]), (1, &[1]), (2, &[1]), (2, both)],
    ];
    for said in orders {
        let mut table = Table::new(config(false));
        for client in 1..=3 {
            register(&mut table, client, client as u8 - 1, None, false);
        }
        for (client, with) in said {
            table.say(client, shares(with));
        }
        let sent = table.say(2, ClientMessage::ReqLock);
        assert!(all.clone().all(|client| granted(&sent, client).is_some()), "{said:?}: {sent:?}");
    }
}

/// Three have given memory to each other in a row. One closes what it has: it goes on by itself, and the others together.
#[test]
fn a_client_that_shares_memory_no_more_leaves_its_gang() {
    for (leaver, at_end) in [(1, false), (3, false), (2, true)] {
        let mut table = Table::new(config(false));
        for client in 1..=3 {
            register(&mut table, client, client as u8 - 1, None, false);
        }
        for (client, with) in [(1, &[1][..]), (2, &[1, 2]), (3, &[2])] {
            table.say(client, shares(with));
        }
        table.say(leaver, shares(&[]));
        let sent = table.say(leaver, ClientMessage::ReqLock);
        assert!(granted(&sent, leaver).is_some(), "{sent:?}");
        let others: Vec<u64> = (1..=3).filter(|&client| client != leaver).collect();
        assert!(others.iter().all(|&other| granted(&sent, other).is_none()), "{sent:?}");
        let sent = table.say(others[0], ClientMessage::ReqLock);
        assert!(granted(&sent, others[0]).is_some(), "{sent:?}");
        assert_eq!(granted(&sent, others[1]).is_some(), !at_end, "{leaver}: {sent:?}");
        // It opens that memory again.
        let again = [1, 2];
        table.say(leaver, shares(if leaver == 2 { &again } else { &again[leaver as usize / 2..][..1] }));
        let sharing = table.notes.iter().filter(|note| note.contains("they hold their GPUs together"));
        // All three become one gang at once, or two of them stay one meanwhile.
        assert_eq!(sharing.count(), if at_end { 3 } else { 4 }, "{:?}", table.notes);
    }
}

/// The first of three that have memory of one process is gone, and another one opens it.
#[test]
fn one_that_comes_later_is_united_with_those_that_are_left() {
    let mut table = Table::new(config(false));
    for client in 1..=3 {
        register(&mut table, client, client as u8 - 1, None, false);
    }
    (1..=3).for_each(|client| _ = table.say(client, shares(&[77])));
    table.happens(Event::Disconnected { client: 1, process_remains: false });
    register(&mut table, 4, 3, None, false);
    table.say(4, shares(&[77]));
    let sent = table.say(2, ClientMessage::ReqLock);
    assert!([3, 4].iter().all(|&mate| granted(&sent, mate).is_some()), "{sent:?}");
}

#[test]
fn clients_that_have_named_a_gang_stay_with_it() {
    let mut table = pair_and_other(2);
    register(&mut table, 4, 3, None, false);
    for client in [RANKS[0], OTHER, 4] {
        table.say(client, shares(&[77]));
    }
    let sent = table.say(RANKS[0], ClientMessage::ReqLock);
    assert!(
        RANKS.iter().all(|&rank| granted(&sent, rank).is_some()) && granted(&sent, OTHER).is_none(),
        "{sent:?}"
    );
    // The others are one by what they share with it.
    let sent = table.say(OTHER, ClientMessage::ReqLock);
    assert!(granted(&sent, OTHER).is_some() && granted(&sent, 4).is_some(), "{sent:?}");
}

/// Two have closed the memory by which they became a gang, and share other memory. Others open the first.
#[test]
fn gangs_of_memory_that_passes_on_stay_apart() {
    let mut table = Table::new(config(false));
    for client in 1..=4 {
        register(&mut table, client, client as u8 - 1, None, false);
    }
    for with in [&[77, 78][..], &[78]] {
        (1..=2).for_each(|client| _ = table.say(client, shares(with)));
    }
    (3..=4).for_each(|client| _ = table.say(client, shares(&[77])));
    let sent = table.say(4, ClientMessage::ReqLock);
    let has_lock = (1..=4).filter(|&client| granted(&sent, client).is_some());
    assert_eq!(has_lock.collect::<Vec<u64>>(), [3, 4], "{sent:?}");
    table.core.audit().unwrap();
}
