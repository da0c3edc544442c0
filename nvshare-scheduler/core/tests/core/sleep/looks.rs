//! Looks of NVML that were asked for early, or that one client asks for over and over.

use super::*;

/// It says that it sleeps, and that it is back, and was told to do neither.
#[test]
fn a_client_that_comes_and_goes_as_it_likes_keeps_no_sleeper_off_the_card() {
    for is_on in [true, false] {
        let mut cards = Cards::with(&[(1, 0, 1), (2, 0, 1)]);
        cards.sleeps(2);
        cards.measure();
        for _ in 0..1000 {
            cards.table.now += 1;
            cards.table.say(1, ClientMessage::Asleep);
            cards.awakes(1);
        }
        if !is_on {
            cards.table.core.switch_off(true, MS(cards.table.now)).unwrap();
        }
        let mut sent = cards.table.sent();
        sent.append(&mut cards.table.say(2, ClientMessage::WakeWanted));
        assert_eq!(woken(&sent), [2], "scheduling on: {is_on}");
    }
}

/// The answer to a question from before shows memory that has left since.
#[test]
fn a_look_that_was_asked_for_before_memory_has_left_says_nothing_of_its_client() {
    let mut cards = Cards::with(&[(1, 4, 1)]);
    let sent = cards.order_from_the_card(1);
    let asked_at = MS(cards.table.now);
    cards.table.now += 500;
    cards.table.say(1, ClientMessage::Usage(usage(4 * GIB, 4 * GIB)));
    cards.table.give_back(sent);
    let used = BTreeMap::from([(1, 5 * GIB)]);
    let early = Measured { gpu: gpu(0), asked_at, available: CAPACITY, used };
    cards.table.now += 500;
    assert!(!told_to_sleep(&cards.table.happens(Event::Measured(early))));
    assert!(told_to_sleep(&cards.measure()));
    cards.table.say(1, ClientMessage::Asleep);
    assert_eq!(cards.table.core.asleep_status()[0].needs[0].bytes, GIB);
}

/// It has no order to give memory back, and says that it has done so.
#[test]
fn an_answer_to_no_order_makes_no_wait_for_a_look_longer() {
    let mut cards = Cards::with(&[(1, 4, 1)]);
    let sent = cards.order_from_the_card(1);
    cards.table.say(1, ClientMessage::Usage(usage(4 * GIB, 4 * GIB)));
    cards.table.give_back(sent);
    for _ in 0..11 {
        let now = cards.table.now;
        cards.table.wait_until(now + 1000);
        cards.table.say(1, ClientMessage::Evicted { gpu: gpu(0), short: 0 });
    }
    let said = "client 1 does not go to sleep: NVML does not show what its contexts take";
    assert!(cards.table.notes.iter().any(|note| note == said), "{:?}", cards.table.notes);
}

/// Processes come and go faster than their times come.
#[test]
fn a_client_that_is_gone_is_not_looked_at_any_more() {
    let mut cards = Cards::with(&[(1, 0, 1), (2, 0, 1), (3, 0, 1)]);
    let idle = cards.table.core.next_deadline();
    let rests =
        Config { sleep_after: Some(MS(600_000)), gpu_memory: None, reserve: Some(0), ..config(false) };
    cards.table.core.configure(rests, MS(cards.table.now));
    cards.order(1).unwrap();
    cards.table.say(2, ClientMessage::Asleep);
    assert_ne!(cards.table.core.next_deadline(), idle);
    for client in 1..=3 {
        cards.table.happens(Event::Disconnected { client, process_remains: false });
    }
    assert_eq!((idle, cards.table.core.next_deadline()), (None, None));
}
