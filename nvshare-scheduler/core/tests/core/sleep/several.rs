//! Clients of several GPUs: they come back to all of them at once.

use nvshare_proto::ClientStatus;

use super::*;

/// Clients may fill two GPUs, so nothing is set aside. Client 1 sleeps, with a context of a GiB on each. Client 4 has memory for all of
/// the first.
fn two_gpus(quantum: u64) -> Cards {
    let config = Config { quantum: MS(quantum), reserve: Some(0), grace: MS(10_000), ..super::config(false) };
    let mut cards = Cards { table: Table::new(config), contexts: BTreeMap::new(), asleep: BTreeSet::new() };
    cards.comes(1, usage(0, 0), GIB);
    cards.table.say(1, ClientMessage::Usage(on(1, 0, 0)));
    look(&mut cards, CAPACITY);
    look(&mut cards, CAPACITY);
    cards.order(1).unwrap();
    let sent = look(&mut cards, CAPACITY);
    assert!(told_to_sleep(&sent), "{:?}", cards.table.notes);
    cards.asleep.insert(1);
    cards.table.say(1, ClientMessage::Asleep);
    cards.comes(4, on(0, CAPACITY, CAPACITY), 0);
    cards
}

fn on(card: u8, allocated: u64, absent: u64) -> Usage {
    Usage { gpu: gpu(card), ..usage(allocated, absent) }
}

/// A second passes, and NVML sees both GPUs. Processes without nvshare leave `available` bytes of the second one.
fn look(cards: &mut Cards, available: u64) -> Sent {
    let mut sent = cards.table.wait_until(cards.table.now + 1000);
    for (card, available) in [(0, CAPACITY), (1, available)] {
        let rows = cards.table.core.client_status();
        let uses = |row: &&ClientStatus| row.usage.iter().any(|usage| usage.gpu == gpu(card));
        let here = rows.iter().filter(uses).filter(|row| !cards.asleep.contains(&row.client));
        let used = here.map(|row| (row.client, row.resident + cards.contexts[&row.client])).collect();
        sent.append(&mut cards.table.sees(card, available, used));
    }
    cards.table.give_back(sent)
}

/// The client gives the lock back, and a GiB of its memory leaves.
fn makes_way(cards: &mut Cards, client: u64, card: u8, sent: Sent) {
    let epoch = asked_to_leave(&sent, client).unwrap_or_else(|| panic!("{client}: {sent:?}"));
    let sent = cards.table.say(client, ClientMessage::LockReleased { epoch });
    cards.table.give_back(sent);
    cards.table.say(client, ClientMessage::Usage(on(card, CAPACITY, GIB)));
}

/// A process without nvshare has taken the memory of the second GPU. Nobody measures meanwhile.
#[test]
fn a_sleeper_without_a_place_on_one_gpu_keeps_nobody_off_its_others() {
    let mut cards = two_gpus(1000);
    look(&mut cards, GIB / 2);
    assert_eq!(woken(&cards.table.say(1, ClientMessage::WakeWanted)), [0; 0]);
    let mut sent = cards.table.say(4, ClientMessage::ReqLock);
    sent.append(&mut cards.table.wait_until(cards.table.now + 9_900));
    assert_eq!(granted(&sent, 4), None, "the sleeper has a while");
    let sent = cards.table.wait_until(cards.table.now + 200);
    assert!(granted(&sent, 4).is_some(), "{:?}", cards.table.core.gpu_status());
    cards.table.core.audit().unwrap();
}

/// The process without nvshare ends. Others have all of the first GPU by then.
#[test]
fn a_sleeper_that_may_have_a_place_again_is_made_way_for_at_once() {
    let mut cards = two_gpus(1000);
    look(&mut cards, GIB / 2);
    cards.table.say(1, ClientMessage::WakeWanted);
    cards.table.wait_until(cards.table.now + 10_000);
    cards.table.runs(4);
    cards.table.say(4, ClientMessage::Usage(on(0, CAPACITY, 0)));
    let sent: Sent = (0..3).flat_map(|_| look(&mut cards, GIB / 2)).collect();
    assert_eq!((asked_to_leave(&sent, 4), woken(&sent)), (None, vec![]), "{sent:?}");
    // Nobody has looked at the first GPU since.
    let sent = cards.table.sees(1, CAPACITY, BTreeMap::new());
    makes_way(&mut cards, 4, 0, sent);
    assert_eq!(woken(&look(&mut cards, CAPACITY)), [1]);
    let sent = cards.table.say(4, ClientMessage::ReqLock);
    assert_eq!(granted(&sent, 4), None, "{sent:?}");
    assert!(granted(&cards.awakes(1), 4).is_some(), "it goes on");
    cards.table.core.audit().unwrap();
}

/// Others may pass the sleeper long before the turns are over of those who have its memory on both GPUs.
#[test]
fn memory_that_can_leave_is_waited_for_on_all_gpus() {
    let mut cards = two_gpus(30_000);
    cards.comes(5, on(1, CAPACITY, CAPACITY), 0);
    look(&mut cards, CAPACITY);
    for (client, card) in [(4, 0), (5, 1)] {
        cards.table.runs(client);
        cards.table.say(client, ClientMessage::Usage(on(card, CAPACITY, 0)));
    }
    assert_eq!(woken(&cards.table.say(1, ClientMessage::WakeWanted)), [0; 0]);
    let sent: Sent = (0..31).flat_map(|_| look(&mut cards, CAPACITY)).collect();
    makes_way(&mut cards, 4, 0, sent.clone());
    makes_way(&mut cards, 5, 1, sent);
    assert_eq!(woken(&look(&mut cards, CAPACITY)), [1], "{:?}", cards.table.core.gpu_status());
    cards.table.core.audit().unwrap();
}

/// Client 4 is a rank without work, and another one works on the second GPU. Its kernels may wait for the next ones of client 4.
#[test]
fn a_rank_without_work_is_not_asked_for_a_sleeper_before_the_turn_is_over() {
    let mut cards = two_gpus(10_000);
    cards.contexts.insert(5, 0);
    for (client, card) in [(4, 0), (5, 1)] {
        let gang = Some(Gang { number: 1, size: 2 });
        let identity = Identity { process: Some(client), gang, ..Identity::default() };
        let register =
            Register { memory: MemoryMode::Swap, ..newcomer(Gate::Closed, on(card, CAPACITY, CAPACITY)) };
        cards.table.happens(Event::Disconnected { client, process_remains: false });
        cards.table.happens(Event::Registered { client, identity, register });
    }
    look(&mut cards, CAPACITY);
    let mut sent = cards.table.say(4, ClientMessage::ReqLock);
    sent.append(&mut cards.table.say(5, ClientMessage::ReqLock));
    for (client, card) in [(4, 0), (5, 1)] {
        let epoch = granted(&sent, client).unwrap_or_else(|| panic!("{sent:?}"));
        cards.table.say(client, ClientMessage::Running { epoch });
        cards.table.say(client, ClientMessage::Usage(on(card, CAPACITY, 0)));
    }
    let epoch = granted(&sent, 4).unwrap();
    cards.table.say(4, ClientMessage::Idle { epoch });
    let mut sent = cards.table.say(1, ClientMessage::WakeWanted);
    (0..5).for_each(|_| sent.append(&mut look(&mut cards, CAPACITY)));
    assert_eq!((asked_to_leave(&sent, 5), woken(&sent)), (None, vec![]), "{sent:?}");
    (0..6).for_each(|_| sent.append(&mut look(&mut cards, CAPACITY)));
    assert!(asked_to_leave(&sent, 5).is_some(), "{sent:?}");
    cards.table.core.audit().unwrap();
}
