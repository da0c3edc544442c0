//! Clients that come back to another GPU.

use nvshare_proto::GpuUuid;

use super::*;

/// Two GPUs. On the first, client 1 sleeps, with 8 GiB, and client 2 has the lock and 12 GiB.
fn crowded(config: Config) -> Cards {
    let mut cards = Cards { table: Table::new(config), contexts: BTreeMap::new(), asleep: BTreeSet::new() };
    cards.comes(1, of_client_1(0), GIB);
    cards.comes(2, usage(12 * GIB, 12 * GIB), 0);
    cards.measure();
    cards.measure();
    cards.sleeps(1);
    cards.table.runs(2);
    cards.table.say(2, ClientMessage::Usage(usage(12 * GIB, 0)));
    sees(&mut cards, 1);
    cards
}

/// Some of its memory does not move.
fn of_client_1(card: u8) -> Usage {
    Usage { gpu: gpu(card), immovable: GIB, ..usage(8 * GIB, 7 * GIB) }
}

fn config(wake_elsewhere: bool) -> Config {
    Config { gpu_memory: None, reserve: Some(0), grace: MS(10_000), wake_elsewhere, ..super::config(false) }
}

fn elsewhere(gpus: impl IntoIterator<Item = u8>) -> ClientMessage {
    ClientMessage::Elsewhere { gpus: gpus.into_iter().map(gpu).collect() }
}

fn sent_to(sent: &Sent) -> Vec<(u64, GpuUuid)> {
    let to = |(client, message): &(u64, SchedulerMessage)| match message {
        SchedulerMessage::Move { from, to } if *from == gpu(0) => Some((*client, *to)),
        _ => None,
    };
    sent.iter().filter_map(to).collect()
}

fn on(card: u8, allocated: u64) -> Usage {
    Usage { gpu: gpu(card), ..usage(allocated, allocated) }
}

/// The process of client 1 registers as client 11 on another GPU, asleep.
fn registers_on(cards: &mut Cards, card: u8, disconnects_first: bool) -> Sent {
    let disconnected = Event::Disconnected { client: 1, process_remains: true };
    let identity = Identity { pid: Some(1), process: Some(1), ..Identity::default() };
    let register = newcomer(Gate::Closed, of_client_1(card));
    let register = Register { memory: MemoryMode::Swap, returns: true, ..register };
    let registered = Event::Registered { client: 11, identity, register };
    let both = if disconnects_first { [disconnected, registered] } else { [registered, disconnected] };
    for event in both {
        cards.table.happens(event);
    }
    cards.table.say(11, ClientMessage::Asleep);
    cards.table.say(11, elsewhere([0]));
    cards.table.say(11, ClientMessage::WakeWanted)
}

fn sees(cards: &mut Cards, card: u8) -> Sent {
    cards.table.now += 1000;
    let asked_at = MS(cards.table.now);
    let used = BTreeMap::new();
    cards.table.happens(Event::Measured(Measured { gpu: gpu(card), asked_at, available: CAPACITY, used }))
}

#[test]
fn a_sleeper_comes_back_where_there_is_room_for_all_that_it_has() {
    for disconnects_first in [true, false] {
        let mut cards = crowded(config(true));
        assert_eq!(cards.table.say(1, elsewhere([0, 1])), []);
        let sent = cards.table.say(1, ClientMessage::WakeWanted);
        assert_eq!((sent_to(&sent), woken(&sent)), (vec![(1, gpu(1))], vec![]));
        assert_eq!(woken(&cards.measure()), [], "it does not come back here any more");
        let sent = registers_on(&mut cards, 1, disconnects_first);
        assert_eq!(woken(&sent), [], "nobody has looked at that GPU");
        assert_eq!(woken(&sees(&mut cards, 1)), [11]);
        cards.table.say(11, ClientMessage::Awake { took_us: 1 });
        let sent = cards.table.say(11, ClientMessage::ReqLock);
        assert!(granted(&sent, 11).is_some(), "{sent:?}");
        assert_eq!(asked_to_leave(&sent, 2), None);
        let row = |client| cards.table.core.client_status().into_iter().find(|row| row.client == client);
        let first = cards.table.core.gpu_status().into_iter().find(|row| row.gpu == gpu(0));
        assert_eq!(first.unwrap().resident, row(2).unwrap().resident, "nothing of it is left there");
        cards.table.core.audit().unwrap();
    }
}

#[test]
fn a_sleeper_is_sent_nowhere_without_need_or_where_others_would_make_room() {
    // It is not wished.
    let mut cards = crowded(config(false));
    cards.table.say(1, elsewhere([1]));
    let sent = cards.table.say(1, ClientMessage::WakeWanted);
    assert_eq!((sent_to(&sent), woken(&sent)), (vec![], vec![1]));
    // It knows no other GPU.
    let mut cards = crowded(config(true));
    let sent = cards.table.say(1, ClientMessage::WakeWanted);
    assert_eq!((sent_to(&sent), woken(&sent)), (vec![], vec![1]));
    // All that it has fits beside the other, which gives back what it does not use.
    let mut cards = crowded(config(true));
    cards.table.say(2, ClientMessage::Usage(usage(2 * GIB, 0)));
    cards.table.say(1, elsewhere([1]));
    let sent = cards.table.say(1, ClientMessage::WakeWanted);
    assert_eq!((sent_to(&sent), woken(&sent)), (vec![], vec![1]));
    // The other GPU is as full.
    let mut cards = crowded(config(true));
    cards.comes(3, on(1, 12 * GIB), 0);
    sees(&mut cards, 1);
    cards.table.runs(3);
    cards.table.say(1, elsewhere([1]));
    let sent = cards.table.say(1, ClientMessage::WakeWanted);
    assert_eq!((sent_to(&sent), woken(&sent)), (vec![], vec![1]));
    // Others keep their memory on it.
    let mut cards = crowded(config(true));
    let register = newcomer(Gate::Closed, Usage { absent: 0, ..on(1, 12 * GIB) });
    let register = Register { memory: MemoryMode::Off, ..register };
    let identity = Identity { process: Some(3), ..Identity::default() };
    cards.table.happens(Event::Registered { client: 3, identity, register });
    sees(&mut cards, 1);
    cards.table.say(1, elsewhere([1]));
    let sent = cards.table.say(1, ClientMessage::WakeWanted);
    assert_eq!((sent_to(&sent), woken(&sent)), (vec![], vec![1]));
    // It has a limit.
    let mut cards = crowded(config(true));
    cards.table.say(1, ClientMessage::Usage(Usage { limit: 10 * GIB, ..of_client_1(0) }));
    cards.table.say(1, elsewhere([1]));
    let sent = cards.table.say(1, ClientMessage::WakeWanted);
    assert_eq!((sent_to(&sent), woken(&sent)), (vec![], vec![1]));
    // Nobody has looked at the other GPU, or not for a while: others may have its memory.
    let mut cards = crowded(config(true));
    cards.table.say(1, elsewhere([2]));
    assert!(cards.table.to_measure.contains(&gpu(2)) && cards.table.core.gpus_in_use().contains(&gpu(2)));
    let sent = cards.table.say(1, ClientMessage::WakeWanted);
    assert_eq!((sent_to(&sent), woken(&sent)), (vec![], vec![1]));
    let mut cards = crowded(config(true));
    cards.table.say(1, elsewhere([1]));
    cards.table.now += 10_001;
    let sent = cards.table.say(1, ClientMessage::WakeWanted);
    assert_eq!((sent_to(&sent), woken(&sent)), (vec![], vec![1]));
    // Scheduling is off.
    let mut cards = crowded(config(true));
    cards.table.say(1, elsewhere([1]));
    cards.table.core.switch_off(true, MS(cards.table.now)).unwrap();
    assert_eq!(sent_to(&cards.table.sent()), []);
}

/// Those on their way count there.
#[test]
fn no_more_are_sent_to_a_gpu_than_fit_there() {
    let mut cards = crowded(config(true));
    for client in [5, 6] {
        cards.comes(client, usage(8 * GIB, 8 * GIB), GIB);
    }
    cards.measure();
    cards.measure();
    for client in [5, 6] {
        cards.sleeps(client);
    }
    let mut all = Vec::new();
    for client in [1, 5, 6] {
        cards.table.say(client, elsewhere([1]));
        all.append(&mut cards.table.say(client, ClientMessage::WakeWanted));
    }
    assert_eq!((sent_to(&all), woken(&all)), (vec![(1, gpu(1)), (5, gpu(1))], vec![6]));
    registers_on(&mut cards, 1, true);
    cards.comes(7, usage(8 * GIB, 8 * GIB), 0);
    cards.table.say(7, ClientMessage::Asleep);
    cards.table.say(7, elsewhere([1]));
    assert_eq!(sent_to(&cards.table.say(7, ClientMessage::WakeWanted)), [], "one has arrived, one has not");
}

/// One that names others over and over has one look a second.
#[test]
fn looks_for_another_gpu_do_not_add_up() {
    let mut cards = crowded(config(true));
    cards.comes(3, on(1, 12 * GIB), 0);
    cards.comes(4, usage(0, 0), GIB);
    cards.measure();
    cards.measure();
    cards.sleeps(4);
    cards.table.runs(3);
    assert_eq!(woken(&cards.wake(4).1), [4]);
    cards.table.say(1, ClientMessage::WakeWanted);
    cards.table.to_measure.clear();
    for _ in 0..1000 {
        cards.table.say(1, elsewhere([0, 1]));
        cards.table.say(1, elsewhere([]));
    }
    assert_eq!(cards.table.to_measure.len(), 2, "NVML is asked once");
    cards.table.now += 5_000;
    cards.table.happens(Event::Deadline);
    assert!(cards.table.core.steps() < 100, "{}", cards.table.core.steps());
}

/// The way back takes a second if the card is busy otherwise, and it may be late. Then another GPU has room.
#[test]
fn a_sleeper_that_waits_is_sent_as_soon_as_there_is_room() {
    let mut cards = crowded(config(true));
    cards.comes(4, usage(0, 0), GIB);
    cards.comes(3, on(1, 12 * GIB), 0);
    for _ in 0..2 {
        sees(&mut cards, 1);
        cards.measure();
    }
    cards.sleeps(4);
    cards.table.runs(3);
    assert_eq!(woken(&cards.wake(4).1), [4]);
    cards.table.say(1, elsewhere([1]));
    let sent = cards.table.say(1, ClientMessage::WakeWanted);
    assert_eq!((sent_to(&sent), woken(&sent)), (vec![], vec![]), "another one is on its way back");
    assert_eq!(sent_to(&cards.table.wait_until(cards.table.now + 1500)), []);
    cards.table.happens(Event::Disconnected { client: 3, process_remains: false });
    let sent = cards.table.wait_until(cards.table.now + 600);
    assert_eq!((sent_to(&sent), woken(&sent)), (vec![(1, gpu(1))], vec![]));
}

#[test]
fn a_sleeper_that_does_not_follow_comes_back_where_it_was_and_is_not_sent_again() {
    let mut cards = crowded(config(true));
    cards.table.say(1, elsewhere([1]));
    let sent = cards.table.say(1, ClientMessage::WakeWanted);
    assert_eq!(sent_to(&sent), [(1, gpu(1))]);
    assert_eq!(woken(&cards.table.say(1, ClientMessage::WakeWanted)), []);
    assert_eq!(cards.table.wait_until(cards.table.now + 9_900), []);
    let sent = cards.table.wait_until(cards.table.now + 200);
    assert_eq!((sent_to(&sent), woken(&sent)), (vec![], vec![1]));
}
