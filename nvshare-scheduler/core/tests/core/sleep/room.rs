//! The memory that sleepers need to come back, and who gets it.

use super::*;

/// It has more room than memory while nobody waits, and a look then shows nothing beside its room.
#[test]
fn what_a_client_needs_is_what_is_seen_when_its_memory_has_left() {
    let mut cards = Cards::with(&[]);
    cards.comes(1, usage(2 * GIB, 2 * GIB), GIB);
    let epoch = cards.table.runs(1);
    cards.table.say(1, ClientMessage::Usage(usage(2 * GIB, 0)));
    assert!(cards.table.core.gpu_status()[0].resident > 2 * GIB, "it has room that it does not use");
    let sees = |cards: &mut Cards, bytes| {
        cards.table.now += 1000;
        let used = BTreeMap::from([(1, bytes)]);
        cards.table.sees(0, CAPACITY, used)
    };
    sees(&mut cards, 3 * GIB);
    sees(&mut cards, 3 * GIB);
    cards.order(1).unwrap();
    cards.table.sent();
    sees(&mut cards, 3 * GIB);
    let sent = cards.table.say(1, ClientMessage::Idle { epoch });
    cards.table.say(1, ClientMessage::Usage(usage(2 * GIB, 2 * GIB)));
    assert_eq!(cards.table.to_measure, [], "its memory is still there");
    assert!(!told_to_sleep(&cards.table.give_back(sent)), "it is looked at once more");
    assert_eq!(cards.table.to_measure, [gpu(0)], "at once");
    assert!(told_to_sleep(&sees(&mut cards, GIB)));
    cards.table.say(1, ClientMessage::Asleep);
    assert_eq!(cards.table.core.asleep_status()[0].needs[0].bytes, GIB);
}

/// One look alone has shown its contexts, so they did not count yet.
#[test]
fn contexts_that_come_back_count_at_once() {
    let mut cards = Cards::with(&[(1, 0, 0)]);
    cards.contexts.insert(1, GIB);
    cards.sleeps(1);
    assert_eq!(woken(&cards.wake(1).1), [1]);
    cards.awakes(1);
    assert_eq!(cards.capacity(), 15);
}

/// NVML shows processes by numbers that one of these does not have here, and does not show the other.
#[test]
fn a_client_that_nobody_sees_on_the_card_stays() {
    for pid in [None, Some(1)] {
        let mut cards = Cards::new();
        let identity = Identity { pid, process: Some(1), ..Identity::default() };
        let register = Register { memory: MemoryMode::Swap, ..newcomer(Gate::Closed, usage(GIB, 0)) };
        cards.table.happens(Event::Registered { client: 1, identity, register });
        let look = |cards: &mut Cards| {
            let mut sent = cards.table.wait_until(cards.table.now + 1000);
            sent.append(&mut cards.table.sees(0, CAPACITY, BTreeMap::new()));
            cards.table.give_back(sent)
        };
        look(&mut cards);
        look(&mut cards);
        cards.order(1).unwrap();
        let ordered = cards.table.sent();
        let mut sent = cards.table.give_back(ordered);
        sent.extend((0..15).flat_map(|_| look(&mut cards)));
        assert!(cards.table.to_measure.len() <= 1, "the other looks come each second");
        assert!(!told_to_sleep(&sent), "{sent:?}");
        let gives_back = sent.iter().any(|(_, message)| matches!(message, SchedulerMessage::Evict(_)));
        assert_eq!(gives_back, pid.is_some(), "one that can never be seen keeps its memory");
        let said = "client 1 does not go to sleep: NVML does not show what its contexts take";
        assert!(cards.table.notes.iter().any(|note| note == said), "{:?}", cards.table.notes);
    }
}

/// Of what several leave, as much stays free as the one needs that had most. The rest is given away.
#[test]
fn what_sleepers_leave_is_given_away_but_for_the_largest() {
    let mut cards = Cards::with(&[(1, 0, 1), (2, 0, 3), (3, 0, 2), (4, 1, 0)]);
    assert_eq!(cards.capacity(), 10);
    for (client, capacity) in [(1, 10), (2, 11), (3, 13)] {
        cards.sleeps(client);
        assert_eq!(cards.capacity(), capacity, "3 GiB stay free, when {client} is asleep too");
    }
    cards.assert_all_fit();
}

/// A wake without room would cost the program its life.
#[test]
fn sleepers_come_back_one_by_one_and_only_when_there_is_room() {
    let mut cards = Cards::with(&[(1, 0, 2), (2, 0, 3), (3, 0, 2), (4, 13, 0)]);
    for client in [1, 2, 3] {
        cards.sleeps(client);
    }
    assert_eq!(cards.capacity(), 13);
    let epoch = cards.table.runs(4);
    cards.table.say(4, ClientMessage::Usage(usage(13 * GIB, 0)));
    cards.table.say(4, ClientMessage::Idle { epoch });
    cards.measure();
    // There is a place for each one of them, and for one alone.
    let sent = cards.table.say(2, ClientMessage::WakeWanted);
    assert_eq!(woken(&sent), [2]);
    let mut waits = cards.table.say(3, ClientMessage::WakeWanted);
    cards.table.now += 1;
    waits.append(&mut cards.table.say(1, ClientMessage::WakeWanted));
    waits.append(&mut cards.measure());
    assert_eq!(woken(&waits), [], "one comes back at a time");
    cards.table.to_measure.clear();
    let sent = cards.awakes(2);
    cards.assert_all_fit();
    assert_eq!(woken(&sent), [], "there is no room for another one");
    let evicts = |(client, message): &(u64, SchedulerMessage)| {
        *client == 4 && matches!(message, SchedulerMessage::Evict(_))
    };
    assert!(waits.iter().any(evicts), "the neighbour is idle, and what it has leaves: {waits:?}");
    assert_eq!(cards.table.to_measure, [gpu(0)], "the next one would wait for a look");
    cards.table.to_measure.clear();
    assert_eq!(woken(&cards.table.give_back(waits)), [], "nobody has seen that memory is free");
    assert_eq!(cards.table.to_measure, [gpu(0)], "it is looked at once");
    let mut sent = cards.measure();
    assert_eq!(woken(&sent), [3], "the first that wanted it");
    sent.append(&mut cards.awakes(3));
    cards.assert_all_fit();
    let mut all = cards.table.give_back(sent);
    all.append(&mut cards.measure());
    assert_eq!(woken(&all)[1..], [1]);
    cards.awakes(1);
    cards.assert_all_fit();
}

/// A client that has the whole GPU and is busy is asked for it when its turn is over, and goes on afterwards.
#[test]
fn a_busy_client_makes_way_for_one_that_comes_back_and_goes_on() {
    let mut cards = Cards::with(&[(1, 0, 4), (4, 12, 0)]);
    cards.sleeps(1);
    // It came back to a scheduler that had no sleepers: it has more than there is beside one.
    let epoch = cards.table.runs(4);
    cards.table.say(4, ClientMessage::Usage(usage(12 * GIB, 0)));
    cards.comes(2, usage(0, 0), 3 * GIB);
    cards.measure();
    cards.measure();
    let mut sent = cards.table.say(1, ClientMessage::WakeWanted);
    for _ in 0..3 {
        sent.append(&mut cards.measure());
    }
    assert_eq!(woken(&sent), [], "it has no place");
    assert_eq!(asked_to_leave(&sent, 4), Some(epoch), "{sent:?}");
    let mut sent = cards.table.say(4, ClientMessage::LockReleased { epoch });
    sent.append(&mut cards.table.say(4, ClientMessage::ReqLock));
    sent = cards.table.give_back(sent);
    cards.table.say(4, ClientMessage::Usage(usage(12 * GIB, 3 * GIB)));
    for _ in 0..2 {
        sent.append(&mut cards.measure());
    }
    assert_eq!((woken(&sent), granted(&sent, 4)), (vec![1], None), "{sent:?}");
    cards.assert_all_fit();
    let mut sent = cards.awakes(1);
    sent.append(&mut cards.measure());
    assert!(granted(&sent, 4).is_some(), "it has room for all that it has again: {sent:?}");
}

#[test]
fn one_that_does_not_come_back_does_not_keep_others() {
    let mut cards = Cards::with(&[(1, 0, 1), (2, 0, 1)]);
    cards.sleeps(1);
    cards.sleeps(2);
    assert_eq!(woken(&cards.table.say(1, ClientMessage::WakeWanted)), [1]);
    assert_eq!(woken(&cards.table.say(2, ClientMessage::WakeWanted)), []);
    let sent = cards.table.wait_until(cards.table.now + 11_000);
    assert_eq!(woken(&sent), [2]);
    assert!(cards.table.core.client_status().iter().any(|row| row.client == 1 && row.stuck));
    cards.awakes(1);
    assert!(!cards.table.core.client_status().iter().any(|row| row.client == 1 && row.stuck));
}

/// A process without nvshare has taken the memory that the first would need.
#[test]
fn one_that_finds_no_place_does_not_keep_others_off_the_card() {
    let mut cards = Cards::with(&[(1, 0, 3), (2, 0, 1)]);
    cards.sleeps(1);
    cards.sleeps(2);
    let measure = |cards: &mut Cards| {
        let mut sent = cards.table.wait_until(cards.table.now + 1000);
        sent.append(&mut cards.table.sees(0, 2 * GIB, BTreeMap::new()));
        sent
    };
    measure(&mut cards);
    assert_eq!(woken(&cards.table.say(1, ClientMessage::WakeWanted)), []);
    cards.table.now += 1;
    assert_eq!(woken(&cards.table.say(2, ClientMessage::WakeWanted)), [], "the first has a while");
    let sent: Sent = (0..11).flat_map(|_| measure(&mut cards)).collect();
    assert_eq!(woken(&sent), [2]);
}

/// A process without nvshare has taken that memory, and frees a part of it later. Nobody measures meanwhile.
#[test]
fn a_sleeper_without_a_place_keeps_nobody_off_its_only_gpu() {
    let mut cards = Cards::with(&[(1, 0, 3), (4, 2, 0)]);
    cards.sleeps(1);
    cards.table.sees(0, 2 * GIB, BTreeMap::new());
    assert_eq!(woken(&cards.table.say(1, ClientMessage::WakeWanted)), [0; 0]);
    let mut sent = cards.table.say(4, ClientMessage::ReqLock);
    sent.append(&mut cards.table.wait_until(cards.table.now + 9_900));
    assert_eq!(granted(&sent, 4), None, "the sleeper has a while");
    let sent = cards.table.wait_until(cards.table.now + 200);
    let epoch = granted(&sent, 4).unwrap_or_else(|| panic!("{:?}", cards.table.core.gpu_status()));
    cards.table.say(4, ClientMessage::Running { epoch });
    cards.table.say(4, ClientMessage::Usage(usage(2 * GIB, 0)));
    cards.table.assert_at_rest();
    // From now on there is a place for the sleeper, if the other makes way.
    cards.table.now += 2000;
    let sent = cards.table.sees(0, 4 * GIB, BTreeMap::from([(4, 2 * GIB)]));
    assert_eq!(asked_to_leave(&sent, 4), Some(epoch), "{sent:?}");
    let sent = cards.table.say(4, ClientMessage::LockReleased { epoch });
    cards.table.give_back(sent);
    cards.table.say(4, ClientMessage::Usage(usage(2 * GIB, GIB)));
    cards.table.now += 1000;
    let sent = cards.table.sees(0, 4 * GIB, BTreeMap::from([(4, GIB)]));
    assert_eq!(woken(&sent), [1], "{:?}", cards.table.core.gpu_status());
    cards.table.core.audit().unwrap();
}

/// Scheduling is off. Memory that does not move comes back with each.
#[test]
fn what_does_not_move_is_given_once_as_well() {
    let mut cards = Cards::new();
    let plain = |allocated| Usage { immovable: 4 * GIB, ..usage(allocated, allocated - 4 * GIB) };
    for client in [1, 2] {
        cards.comes(client, plain(4 * GIB), GIB);
    }
    cards.measure();
    cards.measure();
    cards.sleeps(1);
    cards.sleeps(2);
    let sees = |cards: &mut Cards, available| cards.table.sees(0, available, BTreeMap::new());
    sees(&mut cards, 6 * GIB);
    cards.table.core.switch_off(true, MS(cards.table.now)).unwrap();
    assert_eq!(woken(&cards.table.sent()), [1]);
    assert_eq!(woken(&cards.awakes(1)), []);
    cards.table.now += 1;
    assert_eq!(woken(&sees(&mut cards, 6 * GIB)), [2], "it was freed meanwhile");
}

/// Until it is over, NVML would see a part of it.
#[test]
fn an_eviction_that_lasts_is_waited_for() {
    let mut cards = Cards::with(&[(1, 4, 1)]);
    let sent = cards.order_from_the_card(1);
    for _ in 0..15 {
        cards.table.say(1, ClientMessage::Room(Amount { gpu: gpu(0), bytes: GIB / 8 }));
        assert!(!told_to_sleep(&cards.measure()));
    }
    cards.table.say(1, ClientMessage::Usage(usage(4 * GIB, 4 * GIB)));
    let mut sent = cards.table.give_back(sent);
    sent.append(&mut cards.measure());
    assert!(told_to_sleep(&sent), "{:?}", cards.table.notes);
}

/// Its context on the second GPU has ended.
#[test]
fn a_client_without_a_context_on_one_of_its_gpus_goes() {
    let mut cards = Cards::with(&[(1, 4, 1)]);
    let other = Usage { gpu: gpu(1), ..usage(0, 0) };
    cards.table.say(1, ClientMessage::Usage(other));
    let look = |cards: &mut Cards| {
        let mut sent = cards.table.sees(1, CAPACITY, BTreeMap::from([(9, GIB)]));
        sent.append(&mut cards.measure());
        sent
    };
    look(&mut cards);
    look(&mut cards);
    cards.order(1).unwrap();
    let sent: Sent = (0..3).flat_map(|_| look(&mut cards)).collect();
    assert!(told_to_sleep(&sent), "{:?}", cards.table.notes);
    cards.table.say(1, ClientMessage::Asleep);
    let needs = &cards.table.core.asleep_status()[0].needs;
    let bytes: Vec<u64> = needs.iter().map(|need| need.bytes).collect();
    assert_eq!(bytes, [GIB, 0]);
}

/// The first needs little here, and has no place on its other GPU. Clients may fill a fixed amount, so nothing is set aside.
#[test]
fn room_is_made_for_those_that_pass_one_without_a_place() {
    let mut cards = Cards::with(&[(1, 0, 1), (2, 0, 3)]);
    let other = Usage { gpu: gpu(1), ..usage(0, 0) };
    cards.table.say(1, ClientMessage::Usage(other));
    let look = |cards: &mut Cards, available| {
        let used = if cards.asleep.contains(&1) { BTreeMap::new() } else { BTreeMap::from([(1, GIB)]) };
        let mut sent = cards.table.sees(1, available, used);
        sent.append(&mut cards.measure());
        cards.table.give_back(sent)
    };
    look(&mut cards, CAPACITY);
    look(&mut cards, CAPACITY);
    cards.sleeps(2);
    cards.order(1).unwrap();
    let sent: Sent = (0..3).flat_map(|_| look(&mut cards, CAPACITY)).collect();
    assert!(told_to_sleep(&sent), "{:?}", cards.table.notes);
    cards.asleep.insert(1);
    cards.table.say(1, ClientMessage::Asleep);
    let fixed = Config { gpu_memory: Some(CAPACITY), reserve: None, grace: MS(10_000), ..config(false) };
    cards.table.core.configure(fixed, MS(cards.table.now));
    cards.comes(4, usage(15 * GIB, 15 * GIB), 0);
    let epoch = cards.table.runs(4);
    cards.table.say(4, ClientMessage::Usage(usage(15 * GIB, 0)));
    cards.table.say(4, ClientMessage::Idle { epoch });
    look(&mut cards, GIB / 2);
    for client in [1, 2] {
        cards.table.now += 1;
        let sent = cards.table.say(client, ClientMessage::WakeWanted);
        assert_eq!(woken(&cards.table.give_back(sent)), []);
    }
    let sent: Sent = (0..15).flat_map(|_| look(&mut cards, GIB / 2)).collect();
    assert_eq!(woken(&sent), [2], "{:?}", cards.table.core.gpu_status());
}

/// The look was asked for while the first was away, and answered when it was back: it does not show what that one takes.
#[test]
fn a_look_from_before_one_came_back_lets_no_other_come_back() {
    let mut cards = Cards::with(&[(1, 0, 3), (2, 0, 3)]);
    cards.sleeps(1);
    cards.sleeps(2);
    // Clients may fill a fixed amount, so nothing is set aside.
    let fixed = Config { gpu_memory: Some(CAPACITY), reserve: None, grace: MS(10_000), ..config(false) };
    cards.table.core.configure(fixed, MS(cards.table.now));
    let stays = CAPACITY - 4 * GIB;
    cards.comes(4, Usage { immovable: stays, ..usage(stays, 0) }, 0);
    cards.measure();
    let (_, sent) = cards.wake(1);
    assert_eq!(woken(&sent), [1]);
    let asked_at = MS(cards.table.now);
    cards.table.now += 5;
    cards.awakes(1);
    let used = BTreeMap::from([(4, stays)]);
    cards.table.happens(Event::Measured(Measured { gpu: gpu(0), asked_at, available: CAPACITY, used }));
    assert_eq!(woken(&cards.wake(2).1), [0; 0], "{:?}", cards.table.core.gpu_status());
}

/// The scheduler has begun anew, and does not know what it has given away of the memory that sleepers left.
#[test]
fn a_sleeper_of_an_earlier_scheduler_comes_back_when_the_card_has_been_looked_at() {
    for is_on in [true, false] {
        let mut cards = Cards::new();
        if !is_on {
            cards.table.core.switch_off(true, MS(0)).unwrap();
        }
        cards.comes(2, usage(CAPACITY, 0), 0);
        cards.comes(1, usage(GIB, GIB), GIB);
        cards.asleep.insert(1);
        let mut sent = cards.table.say(1, ClientMessage::Asleep);
        sent.append(&mut cards.table.say(1, ClientMessage::WakeWanted));
        assert_eq!(woken(&sent), [0; 0]);
        assert_eq!(woken(&cards.table.sees(0, CAPACITY, BTreeMap::from([(2, CAPACITY)]))), [0; 0]);
        let gone = Event::Disconnected { client: 2, process_remains: false };
        let mut sent = cards.table.happens(gone);
        sent.append(&mut cards.measure());
        assert_eq!(woken(&sent), [1], "there is room now");
    }
    // Nothing measures the card, so nothing that sleepers left was given away.
    let mut cards = Cards::new();
    cards.comes(1, usage(GIB, GIB), GIB);
    cards.table.say(1, ClientMessage::WakeWanted);
    assert_eq!(woken(&cards.table.happens(Event::Unmeasured { gpu: gpu(0) })), [1]);
    // No answer comes at all.
    for is_on in [true, false] {
        let mut cards = Cards::new();
        if !is_on {
            cards.table.core.switch_off(true, MS(0)).unwrap();
        }
        cards.comes(1, usage(GIB, GIB), GIB);
        assert_eq!(woken(&cards.table.say(1, ClientMessage::WakeWanted)), [0; 0]);
        let now = cards.table.now;
        assert_eq!(woken(&cards.table.wait_until(now + 9_000)), [0; 0]);
        assert_eq!(woken(&cards.table.wait_until(now + 10_100)), [1]);
    }
}

/// It gives nothing back, so an allocation that needs the room is refused, as beside one that is awake.
#[test]
fn memory_of_a_sleeper_that_does_not_move_lets_no_allocation_wait() {
    let mut cards = Cards::new();
    cards.comes(1, Usage { immovable: 5 * GIB, ..usage(5 * GIB, 0) }, GIB);
    cards.measure();
    cards.measure();
    cards.comes(2, usage(0, 0), 0);
    cards.sleeps(1);
    let need = Amount { gpu: gpu(0), bytes: CAPACITY - 4 * GIB };
    let sent = cards.table.say(2, ClientMessage::NeedRoom(need));
    assert!(sent.contains(&(2, SchedulerMessage::NoRoom { gpu: gpu(0) })), "{sent:?}");
}

/// No more than 4 GiB of contexts are kept for their way back.
#[test]
fn a_client_with_more_beside_its_memory_than_is_counted_stays() {
    for (contexts, goes) in [(4, true), (6, false)] {
        let mut cards = Cards::with(&[(1, 1, contexts)]);
        cards.order(1).unwrap();
        let sent = cards.table.sent();
        let mut sent = cards.table.give_back(sent);
        for _ in 0..12 {
            sent.append(&mut cards.measure());
        }
        assert_eq!(sent.contains(&(1, SchedulerMessage::Sleep)), goes, "{sent:?}");
    }
}
