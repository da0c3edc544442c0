//! Clients that go off the card by themselves, because they have had no work for a while.

use nvshare_proto::Counters;

use super::*;

const AFTER: u64 = 60;

/// Clients that go by themselves, and answer as libraries do.
struct Resting {
    cards: Cards,
    /// Each client's submissions, as its counters have them.
    gated: BTreeMap<u64, u64>,
    /// The clients that were asked for their counters.
    asked: Vec<u64>,
}

impl Resting {
    /// Parked clients, each with its memory, and that of its contexts, in GiB.
    fn with(clients: &[(u64, u64, u64)]) -> Self {
        Self::configured(Some(AFTER), 0, clients)
    }

    fn configured(after: Option<u64>, reserve: u64, clients: &[(u64, u64, u64)]) -> Self {
        let config = Config {
            reserve: Some(reserve * GIB),
            gpu_memory: None,
            sleep_after: after.map(|seconds| MS(seconds * 1000)),
            ..config(false)
        };
        let table = Table::new(config);
        let cards = Cards { table, contexts: BTreeMap::new(), asleep: BTreeSet::new() };
        let mut resting = Self { cards, gated: BTreeMap::new(), asked: Vec::new() };
        for &(client, gib, contexts) in clients {
            resting.cards.comes(client, usage(gib * GIB, gib * GIB), contexts * GIB);
        }
        resting
    }

    /// These seconds pass. Clients do what they are told. Returns when each went off the card.
    fn pass(&mut self, seconds: u64) -> Vec<(u64, u64)> {
        let mut went = Vec::new();
        for _ in 0..seconds {
            let mut sent = self.cards.measure();
            let mut at = 0;
            while let Some((client, message)) = sent.get(at).cloned() {
                at += 1;
                let mut answers = match message {
                    SchedulerMessage::Evict(room) => {
                        let mut sent = self.cards.table.say(client, ClientMessage::Room(room));
                        let evicted = ClientMessage::Evicted { gpu: room.gpu, short: 0 };
                        sent.append(&mut self.cards.table.say(client, evicted));
                        sent
                    }
                    SchedulerMessage::AskCounters => {
                        self.asked.push(client);
                        let gated = self.gated.get(&client).copied().unwrap_or(0);
                        let counters = Counters { gated, ..Counters::default() };
                        self.cards.table.say(client, ClientMessage::Counters(counters))
                    }
                    SchedulerMessage::Sleep => {
                        went.push((self.cards.table.now / 1000, client));
                        self.cards.asleep.insert(client);
                        self.cards.table.say(client, ClientMessage::Asleep)
                    }
                    _ => Vec::new(),
                };
                sent.append(&mut answers);
            }
        }
        went
    }

    /// Has a call of the client's program bring it back.
    fn call(&mut self, client: u64) {
        assert!(self.cards.asleep.contains(&client));
        let sent = self.cards.table.say(client, ClientMessage::WakeWanted);
        assert_eq!(woken(&sent), [client]);
        self.cards.awakes(client);
    }

    /// When the client goes, in seconds from now.
    fn goes_within(&mut self, client: u64, seconds: u64) -> Option<u64> {
        let begin = self.cards.table.now / 1000;
        let went = self.pass(seconds);
        went.iter().find(|(_, who)| *who == client).map(|(when, _)| when - begin)
    }
}

#[test]
fn a_client_without_work_goes_by_itself_where_not_all_memory_fits() {
    let mut resting = Resting::with(&[(1, 9, 1), (2, 9, 1)]);
    let went = resting.pass(AFTER + 10);
    assert_eq!(went.iter().map(|&(_, client)| client).collect::<Vec<_>>(), [1, 2], "one after the other");
    assert!(went.iter().all(|&(when, _)| (AFTER..AFTER + 6).contains(&when)), "{went:?}");
    assert!(resting.asked.is_empty(), "their gates are closed");
    let said = format!("client 1 has had no work for {AFTER} s, and goes to sleep");
    assert!(resting.cards.table.notes.contains(&said), "{:?}", resting.cards.table.notes);
    // None of the two has a wake to fear.
    resting.call(2);
}

#[test]
fn clients_stay_where_all_memory_fits_until_it_does_not() {
    let mut resting = Resting::configured(Some(AFTER), 4, &[(1, 5, 1)]);
    assert_eq!(resting.pass(10 * AFTER), []);
    resting.cards.comes(2, usage(9 * GIB, 9 * GIB), GIB);
    let at = resting.goes_within(1, AFTER + 5);
    assert!(at.is_some_and(|at| at <= AFTER + 3), "{at:?}");
}

#[test]
fn contexts_that_take_more_than_is_left_to_them_are_in_the_way() {
    let notebooks: Vec<_> = (1..=6).map(|client| (client, 0, 1)).collect();
    let mut resting = Resting::configured(Some(AFTER), 8, &notebooks[..4]);
    assert_eq!(resting.pass(3 * AFTER), [], "half of the reserve is for them");
    for &(client, gib, contexts) in &notebooks[4..] {
        resting.cards.comes(client, usage(gib, gib), contexts * GIB);
    }
    let went = resting.pass(2 * AFTER);
    assert_eq!(went.len(), 2, "no more go than are in the way: {went:?}");
}

#[test]
fn nobody_goes_unless_it_is_configured() {
    let mut resting = Resting::configured(None, 0, &[(1, 9, 1), (2, 9, 1)]);
    assert_eq!(resting.pass(3600), []);
    // Another configuration is followed at once, and taken back.
    let config = |after| Config { reserve: Some(0), gpu_memory: None, sleep_after: after, ..config(false) };
    resting.cards.table.core.configure(config(Some(MS(2000))), MS(resting.cards.table.now));
    assert!(resting.goes_within(1, 10).is_some());
    resting.call(1);
    resting.cards.table.core.configure(config(None), MS(resting.cards.table.now));
    assert_eq!(resting.goes_within(1, 3600), None);
}

/// Its gate is open, and it submits without a word.
#[test]
fn a_client_that_has_the_lock_goes_only_if_it_submits_nothing() {
    for is_busy in [true, false] {
        let mut resting = Resting::with(&[(1, 9, 1), (2, 9, 1)]);
        resting.cards.table.runs(1);
        resting.cards.table.say(1, ClientMessage::Usage(usage(9 * GIB, 0)));
        resting.pass(AFTER - 5);
        if is_busy {
            resting.gated.insert(1, 7);
        }
        resting.pass(10);
        assert_eq!(resting.asked, [1], "it is asked, once");
        let goes = resting.cards.table.notes.iter().any(|note| note.starts_with("client 1 has had no work"));
        assert_eq!(goes, !is_busy);
    }
}

#[test]
fn a_client_that_is_idle_under_the_lock_goes() {
    let mut resting = Resting::with(&[(1, 9, 1), (2, 9, 1)]);
    let epoch = resting.cards.table.runs(1);
    resting.cards.table.say(1, ClientMessage::Usage(usage(9 * GIB, 0)));
    resting.cards.table.say(1, ClientMessage::Idle { epoch });
    let at = resting.goes_within(1, AFTER + 10);
    assert!(at.is_some_and(|at| at >= AFTER), "{at:?}");
}

#[test]
fn work_begins_a_rest_anew() {
    let mut resting = Resting::with(&[(1, 9, 1), (2, 9, 1)]);
    resting.pass(AFTER - 1);
    // It allocates.
    resting.cards.table.say(1, ClientMessage::Usage(usage(10 * GIB, 10 * GIB)));
    let at = resting.goes_within(1, 2 * AFTER);
    assert!(at.is_some_and(|at| at >= AFTER), "{at:?}");
}

/// It asks for the free memory each ten seconds, and has no work.
#[test]
fn a_client_that_comes_back_in_vain_rests_longer_each_time() {
    let mut resting = Resting::with(&[(1, 9, 1), (2, 9, 1)]);
    let mut waited = Vec::new();
    for _ in 0..5 {
        waited.push(resting.goes_within(1, 40 * AFTER).unwrap() / AFTER);
        resting.pass(10);
        resting.call(1);
    }
    assert_eq!(waited, [1, 2, 4, 8, 16]);
    // Work makes up for it.
    resting.pass(AFTER + 5);
    let epoch = resting.cards.table.runs(1);
    resting.cards.table.say(1, ClientMessage::Idle { epoch });
    let at = resting.goes_within(1, 2 * AFTER).unwrap();
    assert_eq!(at / AFTER, 1);
}

#[test]
fn a_client_that_an_administrator_sent_to_sleep_has_not_come_back_in_vain() {
    let mut resting = Resting::with(&[(1, 9, 1), (2, 9, 1)]);
    resting.pass(2);
    resting.cards.sleeps(1);
    resting.call(1);
    let at = resting.goes_within(1, 2 * AFTER).unwrap();
    assert_eq!(at / AFTER, 1);
}

#[test]
fn a_client_that_never_can_is_not_asked_for_its_memory_again() {
    let mut resting = Resting::with(&[(1, 9, 1), (2, 9, 1)]);
    let reason = "NVSHARE_SLEEP is not 1".to_owned();
    resting.cards.table.say(1, ClientMessage::CannotSleep { reason, for_good: true });
    assert_eq!(resting.goes_within(1, 10 * AFTER), None);
    assert!(resting.asked.is_empty());
}

#[test]
fn a_client_that_does_not_answer_keeps_others_from_going_for_a_while_only() {
    let mut resting = Resting::with(&[(1, 9, 1), (2, 9, 1)]);
    let mut told = Vec::new();
    for second in 0..AFTER + 20 {
        let sent = resting.cards.measure();
        told.extend(
            sent.iter().filter(|(_, m)| *m == SchedulerMessage::Sleep).map(|(client, _)| (*client, second)),
        );
        resting.cards.table.give_back(sent);
    }
    let [(first, began), (second, later)] = told[..] else { panic!("{told:?}") };
    assert!(first == 1 && second == 2 && (8..14).contains(&(later - began)), "{told:?}");
}

#[test]
fn scheduling_off_and_on_keeps_the_rests_followed() {
    let mut resting = Resting::with(&[(1, 9, 1), (2, 9, 1)]);
    let now = MS(resting.cards.table.now);
    resting.cards.table.core.switch_off(true, now).unwrap();
    assert_eq!(resting.pass(2 * AFTER), []);
    resting.cards.table.core.switch_on(MS(resting.cards.table.now));
    let epochs = resting.cards.table.sent();
    let epoch = epochs.iter().find_map(|(client, message)| match message {
        SchedulerMessage::SchedOn { epoch } if *client == 1 => Some(*epoch),
        _ => None,
    });
    // Nobody knows what they did meanwhile.
    assert!(epochs.contains(&(1, SchedulerMessage::AskCounters)), "{epochs:?}");
    resting.cards.table.say(1, ClientMessage::Counters(Counters::default()));
    resting.cards.table.say(1, ClientMessage::Idle { epoch: epoch.unwrap() });
    assert!(resting.goes_within(1, 2 * AFTER).is_some());
}

#[test]
fn settings_that_change_do_not_put_a_rest_off() {
    let mut resting = Resting::with(&[(1, 9, 1), (2, 9, 1)]);
    let mut went = None;
    for _ in 0..4 {
        let rule = nvshare_core::Rule::Fixed(MS(7000));
        resting.cards.table.core.set_quantum(None, rule, MS(resting.cards.table.now));
        went = went.or(resting.goes_within(1, AFTER / 2));
    }
    assert!(went.is_some());
}
