//! Clients whose processes go off the card, and come back when there is room for what they had there.

mod elsewhere;
mod looks;
mod rest;
mod room;
mod several;

use std::collections::{BTreeMap, BTreeSet};

use nvshare_core::{Config, Event, Gang, Identity, Measured};
use nvshare_proto::{
    Amount, ClientMessage, ClientState, EventKind, Gate, MemoryMode, Register, SchedulerMessage, Usage,
};

use crate::table::{CAPACITY, GIB, MS, Table, asked_to_leave, config, gpu, granted, newcomer, room_given};

type Sent = Vec<(u64, SchedulerMessage)>;

/// Clients whose memory the library maps, on a GPU that is measured.
struct Cards {
    table: Table,
    /// Bytes that the contexts and modules of each client take on the card.
    contexts: BTreeMap<u64, u64>,
    asleep: BTreeSet<u64>,
}

fn usage(allocated: u64, absent: u64) -> Usage {
    Usage { gpu: gpu(0), total: CAPACITY, limit: 0, allocated, absent, immovable: 0 }
}

impl Cards {
    fn new() -> Self {
        let config = Config { gpu_memory: None, reserve: Some(0), grace: MS(10_000), ..config(false) };
        Self { table: Table::new(config), contexts: BTreeMap::new(), asleep: BTreeSet::new() }
    }

    /// Parked clients that the core has measured; each with its memory, and that of its contexts, in GiB.
    fn with(clients: &[(u64, u64, u64)]) -> Self {
        let mut cards = Self::new();
        for &(client, gib, contexts) in clients {
            cards.comes(client, usage(gib * GIB, gib * GIB), contexts * GIB);
        }
        cards.measure();
        cards.measure();
        cards
    }

    fn comes(&mut self, client: u64, usage: Usage, contexts: u64) {
        let register = Register { memory: MemoryMode::Swap, ..newcomer(Gate::Closed, usage) };
        let identity = Identity { pid: Some(client as u32), process: Some(client), ..Identity::default() };
        self.table.happens(Event::Registered { client, identity, register });
        self.contexts.insert(client, contexts);
    }

    /// A second passes, and NVML sees what there is.
    fn measure(&mut self) -> Sent {
        let mut sent = self.table.wait_until(self.table.now + 1000);
        let rows = self.table.core.client_status();
        let here = rows.iter().filter(|row| !row.gone && !self.asleep.contains(&row.client));
        let used = here.map(|row| (row.client, row.resident + self.contexts[&row.client])).collect();
        sent.append(&mut self.table.sees(0, CAPACITY, used));
        sent
    }

    fn order(&mut self, client: u64) -> Result<String, String> {
        self.table.core.sleep(client, MS(self.table.now))
    }

    fn wake(&mut self, client: u64) -> (String, Sent) {
        let said = self.table.core.wake(client, MS(self.table.now)).unwrap();
        (said, self.table.sent())
    }

    /// A client with the lock and all of its 4 GiB on the card does nothing any more, and is ordered to sleep. Returns all that was sent.
    fn order_from_the_card(&mut self, client: u64) -> Sent {
        let epoch = self.table.runs(client);
        self.table.say(client, ClientMessage::Usage(usage(4 * GIB, 0)));
        self.table.say(client, ClientMessage::Idle { epoch });
        self.order(client).unwrap();
        self.table.sent()
    }

    /// An idle client goes to sleep; returns all that was sent.
    fn sleeps(&mut self, client: u64) -> Sent {
        self.order(client).unwrap();
        let sent = self.table.sent();
        let mut sent = self.table.give_back(sent);
        sent.append(&mut self.measure());
        assert!(sent.contains(&(client, SchedulerMessage::Sleep)), "{sent:?}");
        self.asleep.insert(client);
        sent.append(&mut self.table.say(client, ClientMessage::Asleep));
        sent
    }

    fn awakes(&mut self, client: u64) -> Sent {
        self.asleep.remove(&client);
        self.table.say(client, ClientMessage::Awake { took_us: 700_000 })
    }

    fn state(&self, client: u64) -> ClientState {
        self.table.core.client_status().iter().find(|row| row.client == client).unwrap().state
    }

    fn capacity(&self) -> u64 {
        self.table.core.gpu_status()[0].capacity / GIB
    }

    /// Whether all that clients may have, what contexts take, and what those need that come back, is on the card.
    fn assert_all_fit(&self) {
        let row = &self.table.core.gpu_status()[0];
        let on_card = self.contexts.iter().filter(|(client, _)| !self.asleep.contains(client));
        let contexts: u64 = on_card.map(|(_, bytes)| bytes).sum();
        assert!(row.resident + contexts <= CAPACITY, "{row:?}");
    }
}

fn woken(sent: &Sent) -> Vec<u64> {
    let wake = |(client, message): &(u64, SchedulerMessage)| {
        matches!(message, SchedulerMessage::Wake).then_some(*client)
    };
    sent.iter().filter_map(wake).collect()
}

/// A client runs and nobody waits for it, as an idle notebook does: it is asked whether it does anything.
#[test]
fn a_client_that_has_the_lock_and_does_nothing_goes_to_sleep() {
    let mut cards = Cards::with(&[(1, 4, 1)]);
    let epoch = cards.table.runs(1);
    cards.table.say(1, ClientMessage::Usage(usage(4 * GIB, 0)));
    cards.order(1).unwrap();
    assert_eq!(cards.table.sent(), [(1, SchedulerMessage::Waiters { waiting: true })]);
    let sent = cards.table.say(1, ClientMessage::Idle { epoch });
    assert!(matches!(sent[..], [(1, SchedulerMessage::Evict(_))]), "{sent:?}");
    cards.table.say(1, ClientMessage::Usage(usage(4 * GIB, 4 * GIB)));
    let mut sent = cards.table.give_back(sent);
    sent.append(&mut cards.measure());
    assert!(told_to_sleep(&sent), "{sent:?}");
}

#[test]
fn a_client_that_works_on_stays_on_the_card() {
    let mut cards = Cards::with(&[(1, 4, 1)]);
    cards.table.runs(1);
    cards.order(1).unwrap();
    assert_eq!(cards.table.sent(), [(1, SchedulerMessage::Waiters { waiting: true })]);
    assert_eq!(cards.measure(), []);
    let sent = cards.table.wait_until(cards.table.now + 1_100);
    assert_eq!(sent, [(1, SchedulerMessage::Waiters { waiting: false })]);
    assert_eq!(cards.state(1), ClientState::Running);
    assert!(!told_to_sleep(&cards.measure()));
}

fn told_to_sleep(sent: &Sent) -> bool {
    sent.iter().any(|(_, message)| *message == SchedulerMessage::Sleep)
}

#[test]
fn an_idle_client_gives_its_room_back_goes_off_the_card_and_comes_back() {
    let mut cards = Cards::with(&[(1, 4, 1)]);
    let epoch = cards.table.runs(1);
    cards.table.say(1, ClientMessage::Usage(usage(4 * GIB, 0)));
    cards.table.say(1, ClientMessage::Idle { epoch });
    assert_eq!(cards.capacity(), 15, "its contexts are on the card");
    assert_eq!(
        cards.order(1).unwrap(),
        "client 1 (x) is to go to sleep, if it has no work within 2 s; any call of its program wakes it"
    );
    let sent = cards.table.sent();
    let room = cards.table.core.gpu_status()[0].resident;
    assert_eq!(
        sent,
        [(1, SchedulerMessage::Evict(Amount { gpu: gpu(0), bytes: room }))],
        "memory leaves first"
    );
    cards.table.say(1, ClientMessage::Usage(usage(4 * GIB, 4 * GIB)));
    let sent = cards.table.give_back(sent);
    assert!(!told_to_sleep(&sent), "what it has beside its memory is not measured yet");
    assert_eq!(cards.measure(), [(1, SchedulerMessage::Sleep)]);
    cards.asleep.insert(1);
    cards.table.say(1, ClientMessage::Asleep);
    assert_eq!(cards.state(1), ClientState::Asleep);
    cards.measure();
    assert_eq!(cards.capacity(), 15, "it can come back at any time");
    let rows = cards.table.core.asleep_status();
    assert_eq!(
        (rows[0].client, &rows[0].needs[..], rows[0].wakes),
        (1, &[Amount { gpu: gpu(0), bytes: GIB }][..], false)
    );

    let sent = cards.table.say(1, ClientMessage::WakeWanted);
    assert_eq!(sent, [(1, SchedulerMessage::Wake)]);
    assert_eq!(cards.state(1), ClientState::Asleep);
    cards.awakes(1);
    assert_eq!((cards.state(1), cards.capacity()), (ClientState::Parked, 15));
    assert!(cards.table.core.asleep_status().is_empty());
    // With its memory on the host, it gets the lock like others.
    assert!(room_given(&cards.table.say(1, ClientMessage::ReqLock), 1) >= 4 * GIB);
}

#[test]
fn watchers_are_told_of_each_step() {
    let mut cards = Cards::with(&[(1, 4, 1), (3, 4, 0)]);
    let mut told = Vec::new();
    let mut listen = |cards: &mut Cards| {
        while let Some(incident) = cards.table.core.poll_incident() {
            told.push((
                incident.kind,
                incident.bytes.map(|bytes| bytes / GIB),
                incident.took.map(|t| t.as_millis()),
            ));
        }
    };
    cards.order(1).unwrap();
    cards.table.now += 1000;
    let used = BTreeMap::from([(1, GIB)]);
    cards.table.sees(0, CAPACITY, used);
    listen(&mut cards);
    cards.table.now += 400;
    cards.table.say(1, ClientMessage::Asleep);
    listen(&mut cards);
    cards.table.say(1, ClientMessage::ReqLock);
    listen(&mut cards);
    cards.awakes(1);
    listen(&mut cards);
    cards.order(3).unwrap();
    cards.table.say(3, ClientMessage::ReqLock);
    listen(&mut cards);
    told.retain(|(kind, ..)| !matches!(kind, EventKind::Next | EventKind::Granted));
    assert_eq!(
        told,
        [
            (EventKind::Sleep, None, None),
            (EventKind::Asleep, Some(1), Some(400)),
            (EventKind::WakeWanted, Some(1), None),
            (EventKind::Wake, None, Some(0)),
            (EventKind::Awake, None, Some(700)),
            (EventKind::Waiting, None, None),
            (EventKind::StaysAwake, None, None),
            (EventKind::Waiting, None, None),
        ]
    );
}

#[test]
fn clients_that_cannot_sleep_are_refused() {
    let mut cards = Cards::with(&[(1, 4, 1), (2, 4, 1), (3, 4, 1)]);
    // It wants the lock, and another one has it.
    cards.table.runs(2);
    cards.table.say(2, ClientMessage::Usage(usage(4 * GIB, 0)));
    cards.table.runs(3);
    cards.table.say(3, ClientMessage::Usage(usage(4 * GIB, 0)));
    cards.table.say(1, ClientMessage::Usage(usage(8 * GIB, 8 * GIB)));
    cards.table.say(1, ClientMessage::ReqLock);
    let managed = Identity { pid: Some(5), process: Some(5), ..Identity::default() };
    cards.table.register_as(5, managed, Gate::Closed, usage(GIB, GIB));
    let gang = Identity { gang: Some(Gang { number: 7, size: 2 }), process: Some(6), ..Identity::default() };
    let register = Register { memory: MemoryMode::Swap, ..newcomer(Gate::Closed, usage(GIB, GIB)) };
    cards.table.happens(Event::Registered { client: 6, identity: gang, register });
    cards.table.happens(Event::Stopped { client: 3, stopped: true });
    cards.table.say(2, ClientMessage::CannotSleep { reason: "it is linked to cuX".into(), for_good: true });
    for (client, why) in [
        (1, "client 1 (x) cannot sleep: it is at work"),
        (2, "client 2 (x) cannot sleep: it is linked to cuX"),
        (3, "client 3 (x) cannot sleep: its process is stopped"),
        (5, "client 5 (x) cannot sleep: only programs with NVSHARE_MEMORY=swap can go off the card"),
        (6, "client 6 (x) cannot sleep: it is a member of a gang"),
        (9, "there is no client 9; `nvshare-ctl clients` shows who is there"),
    ] {
        assert_eq!(cards.order(client).unwrap_err(), why);
    }
    assert!(!told_to_sleep(&cards.table.sent()));
    assert!(cards.table.core.wake(9, MS(cards.table.now)).is_err());
}

#[test]
fn a_second_order_and_a_wake_of_one_that_is_awake_change_nothing() {
    let mut cards = Cards::with(&[(1, 4, 1)]);
    assert_eq!(cards.wake(1).0, "client 1 (x) is awake");
    cards.order(1).unwrap();
    assert_eq!(cards.order(1).unwrap(), "client 1 (x) is going to sleep already");
    assert_eq!(cards.wake(1).0, "client 1 (x) stays awake");
    assert!(!told_to_sleep(&cards.measure()), "the order was taken back");
    cards.sleeps(1);
    assert_eq!(cards.order(1).unwrap(), "client 1 (x) is asleep already");
    let (said, sent) = cards.wake(1);
    assert_eq!((said.as_str(), woken(&sent)), ("client 1 (x) wakes up, as soon as there is room", vec![1]));
    assert_eq!(cards.wake(1).0, "client 1 (x) is waking up already");
    assert_eq!(cards.order(1).unwrap_err(), "client 1 (x) is waking up");
    cards.awakes(1);
    assert_eq!(cards.wake(1).0, "client 1 (x) is awake");
}

/// The order cannot be taken back any more: the client comes back at once.
#[test]
fn a_wake_that_crosses_the_way_to_sleep_is_not_lost() {
    let mut cards = Cards::with(&[(1, 4, 1)]);
    cards.order(1).unwrap();
    assert!(told_to_sleep(&cards.measure()));
    cards.wake(1);
    cards.asleep.insert(1);
    assert_eq!(woken(&cards.table.say(1, ClientMessage::Asleep)), [1]);
}

#[test]
fn work_ends_the_order_to_sleep() {
    let need = ClientMessage::NeedRoom(Amount { gpu: gpu(0), bytes: GIB });
    let grows = ClientMessage::Usage(usage(5 * GIB, 5 * GIB));
    for work in [ClientMessage::ReqLock, need.clone(), grows] {
        let mut cards = Cards::with(&[(1, 4, 1)]);
        cards.order(1).unwrap();
        cards.table.say(1, work.clone());
        assert!(!told_to_sleep(&cards.measure()), "{work:?}");
    }
    // It has been told, and its work crosses SLEEP: it is granted the lock as ever, and answers that it stays.
    for work in [ClientMessage::ReqLock, need] {
        let mut cards = Cards::with(&[(1, 4, 1)]);
        cards.order(1).unwrap();
        assert!(told_to_sleep(&cards.measure()));
        let sent = cards.table.say(1, work.clone());
        assert!(granted(&sent, 1).is_some() || room_given(&sent, 1) > 0, "{work:?}: {sent:?}");
        cards.table.say(1, ClientMessage::CannotSleep { reason: "it is at work".into(), for_good: false });
        assert_ne!(cards.state(1), ClientState::Asleep);
    }
}

/// The room for an allocation has come, and the allocation is about to take it.
#[test]
fn a_client_that_was_just_given_room_is_at_work() {
    let mut cards = Cards::with(&[(1, 4, 1)]);
    let sent = cards.table.say(1, ClientMessage::NeedRoom(Amount { gpu: gpu(0), bytes: GIB }));
    assert!(room_given(&sent, 1) > 0, "{sent:?}");
    assert!(cards.order(1).unwrap_err().ends_with("it is at work"));
    cards.measure();
    cards.order(1).unwrap();
}

#[test]
fn a_client_whose_memory_stays_on_the_card_does_not_go() {
    let mut cards = Cards::with(&[(1, 4, 1)]);
    cards.order_from_the_card(1);
    cards.table.say(1, ClientMessage::Evicted { gpu: gpu(0), short: 4 * GIB });
    cards.measure();
    assert!(!told_to_sleep(&cards.measure()));
    assert!(
        cards.table.notes.iter().any(|note| note.contains("does not go to sleep: its memory")),
        "{:?}",
        cards.table.notes
    );
    assert_eq!(cards.wake(1).0, "client 1 (x) is awake");
}

/// Plain memory goes with the process: it stays charged, and nobody asks a sleeper for it.
#[test]
fn a_sleeper_is_asked_for_nothing() {
    let mut cards = Cards::new();
    let plain = |allocated| Usage { immovable: 4 * GIB, ..usage(allocated, allocated - 4 * GIB) };
    cards.comes(1, plain(6 * GIB), GIB);
    cards.comes(2, usage(14 * GIB, 14 * GIB), GIB);
    cards.measure();
    cards.measure();
    cards.sleeps(1);
    let mut sent = cards.table.say(2, ClientMessage::ReqLock);
    for _ in 0..20 {
        sent.append(&mut cards.measure());
    }
    sent.append(
        &mut cards.table.core.ask_counters().iter().map(|&id| (id, SchedulerMessage::AskCounters)).collect(),
    );
    assert!(
        !sent.iter().any(|(client, message)| *client == 1 && matches!(message, SchedulerMessage::Evict(_))),
        "{sent:?}"
    );
    // A neighbour that fits beside what it needs runs.
    cards.comes(3, usage(8 * GIB, 8 * GIB), GIB);
    assert!(granted(&cards.table.say(3, ClientMessage::ReqLock), 3).is_some());
}

#[test]
fn a_stopped_sleeper_is_passed_over_until_it_goes_on() {
    let mut cards = Cards::with(&[(1, 0, 1), (2, 0, 1)]);
    cards.sleeps(1);
    cards.sleeps(2);
    cards.table.happens(Event::Stopped { client: 1, stopped: true });
    assert_eq!(woken(&cards.wake(1).1), []);
    assert_eq!(woken(&cards.wake(2).1), [2]);
    cards.awakes(2);
    assert_eq!(woken(&cards.table.happens(Event::Stopped { client: 1, stopped: false })), [1]);
}

/// The scheduler was started again: nobody has measured what the process had.
#[test]
fn a_process_that_registers_asleep_has_a_place_kept() {
    let mut cards = Cards::new();
    cards.comes(4, usage(GIB, GIB), GIB);
    cards.comes(1, usage(4 * GIB, 4 * GIB), GIB);
    cards.asleep.insert(1);
    cards.table.say(1, ClientMessage::Asleep);
    assert_eq!(cards.state(1), ClientState::Asleep);
    cards.measure();
    cards.measure();
    assert_eq!(cards.capacity(), 13, "an eighth of the GPU stays free for it");
    assert!(!cards.table.core.is_measuring(), "there is nothing of it to measure");
    assert_eq!(woken(&cards.table.say(1, ClientMessage::WakeWanted)), [1]);
    cards.awakes(1);
    cards.measure();
    cards.measure();
    assert_eq!(cards.capacity(), 14);
}

#[test]
fn scheduling_that_goes_off_wakes_all_for_whom_there_is_memory() {
    let mut cards = Cards::with(&[(1, 0, 2), (2, 0, 2), (4, 12, 0)]);
    cards.sleeps(1);
    cards.sleeps(2);
    cards.table.core.switch_off(false, MS(cards.table.now)).unwrap();
    let sent = cards.table.sent();
    let off: Vec<u64> =
        sent.iter().filter(|(_, m)| *m == SchedulerMessage::SchedOff).map(|(c, _)| *c).collect();
    assert_eq!((woken(&sent), off), (vec![1, 2], vec![4]), "a sleeper is told when it is back");
    assert_eq!(cards.awakes(1), [(1, SchedulerMessage::SchedOff)]);
    assert_eq!(cards.state(1), ClientState::Free);
    // On again, while the other one is still on its way.
    cards.table.core.switch_on(MS(cards.table.now));
    let sent = cards.table.sent();
    let is_of_memory = |message: &SchedulerMessage| matches!(message, SchedulerMessage::Capacity(_));
    assert!(sent.iter().all(|(client, message)| *client != 2 || is_of_memory(message)), "{sent:?}");
    cards.awakes(2);
    assert_eq!(cards.state(2), ClientState::Parked);
}

#[test]
fn scheduling_stays_on_where_sleepers_would_not_fit_any_more() {
    let mut cards = Cards::with(&[(1, 0, 4), (2, 0, 4), (4, 10, 0)]);
    cards.sleeps(1);
    cards.sleeps(2);
    assert!(cards.table.core.switch_off(false, MS(cards.table.now)).is_err());
    // By force, each comes back as soon as there is memory.
    cards.table.core.switch_off(true, MS(cards.table.now)).unwrap();
    let used = BTreeMap::from([(4, 11 * GIB)]);
    cards.table.sent();
    cards.awakes(1);
    let sent = cards.table.sees(0, CAPACITY, used);
    assert_eq!(woken(&sent), []);
}

/// Scheduling is off, so nothing is known but what was last measured.
#[test]
fn what_was_free_is_given_once() {
    let mut cards = Cards::with(&[(1, 0, 4), (2, 0, 4), (4, 10, 0)]);
    cards.sleeps(1);
    cards.sleeps(2);
    let used = BTreeMap::from([(4, 11 * GIB)]);
    cards.table.sees(0, CAPACITY, used);
    cards.table.core.switch_off(true, MS(cards.table.now)).unwrap();
    assert_eq!(woken(&cards.table.sent()), [1]);
    assert_eq!(woken(&cards.awakes(1)), []);
    let used = BTreeMap::from([(1, 4 * GIB), (4, 8 * GIB)]);
    let sent = cards.table.sees(0, CAPACITY, used);
    assert_eq!(woken(&sent), [2]);
}

/// One that comes while scheduling is off is told so before it can say that it sleeps.
#[test]
fn a_sleeper_that_comes_while_scheduling_is_off_is_woken() {
    let mut cards = Cards::with(&[(4, 1, 0)]);
    cards.table.core.switch_off(false, MS(cards.table.now)).unwrap();
    cards.comes(1, usage(GIB, GIB), GIB);
    cards.asleep.insert(1);
    assert_eq!(woken(&cards.table.say(1, ClientMessage::Asleep)), [1]);
    cards.table.core.switch_on(MS(cards.table.now));
    let is_told = |(client, message): &(u64, SchedulerMessage)| {
        *client == 1 && matches!(message, SchedulerMessage::SchedOn { .. } | SchedulerMessage::LockOk { .. })
    };
    assert!(!cards.table.sent().iter().any(is_told));
    assert!(cards.awakes(1).iter().any(is_told), "its gate is open");
}

#[test]
fn a_sleeper_that_ends_leaves_nothing_behind() {
    let mut cards = Cards::with(&[(1, 4, 2), (2, 0, 1)]);
    cards.sleeps(1);
    cards.sleeps(2);
    let (_, sent) = cards.wake(1);
    assert_eq!(woken(&sent), [1]);
    assert_eq!(woken(&cards.wake(2).1), []);
    let sent = cards.table.happens(Event::Disconnected { client: 1, process_remains: false });
    assert_eq!(woken(&sent), [2], "nobody waits for one that is gone");
    cards.awakes(2);
    cards.measure();
    assert_eq!(cards.capacity(), 15);
    cards.table.core.audit().unwrap();
}

/// A member of a gang that sleeps is woken when the others want the lock: they are granted together.
#[test]
fn a_gang_wakes_its_member() {
    let mut cards = Cards::new();
    let gang = Some(Gang { number: 7, size: 2 });
    for client in [1, 2] {
        let identity =
            Identity { pid: Some(client as u32), process: Some(client), gang, ..Identity::default() };
        let register = Register { memory: MemoryMode::Swap, ..newcomer(Gate::Closed, usage(GIB, GIB)) };
        cards.table.happens(Event::Registered { client, identity, register });
        cards.contexts.insert(client, GIB);
    }
    cards.measure();
    cards.measure();
    cards.table.say(1, ClientMessage::Asleep);
    let sent = cards.table.say(2, ClientMessage::ReqLock);
    assert_eq!((woken(&sent), granted(&sent, 2)), (vec![1], None));
    let mut sent = cards.awakes(1);
    sent.append(&mut cards.measure());
    assert!(granted(&sent, 1).is_some() && granted(&sent, 2).is_some(), "{sent:?}");
}

#[test]
fn a_client_that_sleeps_though_it_was_granted_the_lock_loses_it() {
    let mut cards = Cards::with(&[(1, 4, 1), (2, 14, 0)]);
    let sent = cards.table.say(1, ClientMessage::ReqLock);
    assert!(granted(&sent, 1).is_some());
    cards.table.say(1, ClientMessage::Asleep);
    assert_eq!(cards.state(1), ClientState::Asleep);
    cards.table.core.audit().unwrap();
    // Work that it says it has brings it back.
    assert_eq!(woken(&cards.table.say(1, ClientMessage::ReqLock)), [1]);
    assert!(granted(&cards.awakes(1), 1).is_some());
}
