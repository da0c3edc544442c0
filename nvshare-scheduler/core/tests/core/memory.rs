//! Room that is given, asked for, given back, and not given back.

use std::collections::BTreeMap;

use nvshare_core::{Config, Core, Event, Identity, Measured, Output};
use nvshare_proto::{
    Amount, ClientMessage, ClientState, Gate, MemoryMode, Register, SchedulerMessage, Usage,
};

use crate::table::{
    CAPACITY, GIB, MS, Table, asked_to_leave, config, gpu, granted, newcomer, registered, say, twelve_gib,
};

#[test]
fn a_capacity_that_became_smaller_holds_for_what_is_there() {
    let mut core = Core::new(Config { gpu_memory: None, reserve: Some(0), ..config(false) });
    core.handle(registered(0, Gate::Closed, 0), MS(0));
    while core.poll_output().is_some() {}
    let measured = Measured { gpu: gpu(0), asked_at: MS(1), available: 9 * GIB, used: BTreeMap::new() };
    core.handle(Event::Measured(measured), MS(1));
    let evict = SchedulerMessage::Evict(Amount { gpu: gpu(0), bytes: 3 * GIB });
    let outputs: Vec<Output> = std::iter::from_fn(|| core.poll_output()).collect();
    assert!(outputs.contains(&Output::Send { client: 0, message: evict }), "{outputs:?}");
    say(&mut core, 0, ClientMessage::Room(Amount { gpu: gpu(0), bytes: 3 * GIB }));
    say(&mut core, 0, ClientMessage::Evicted { gpu: gpu(0), short: 0 });
    assert_eq!(core.gpu_status()[0].resident, 9 * GIB);
}

/// Contexts and modules of clients make the card smaller for all. Memory that the library maps is memory, not a context.
#[test]
fn memory_that_the_library_maps_is_not_taken_for_contexts() {
    for memory in [MemoryMode::Swap, MemoryMode::Managed] {
        let mut table = Table::new(Config { gpu_memory: None, reserve: Some(0), ..config(false) });
        let usage = Usage { total: CAPACITY, ..twelve_gib(0) };
        let register = Register { memory, ..newcomer(Gate::Open, usage) };
        let identity = Identity { pid: Some(7), process: Some(7), ..Identity::default() };
        table.happens(Event::Registered { client: 1, identity, register });
        assert!(table.core.is_measuring());
        // NVML sees what the library maps, and no managed memory.
        let seen = if memory == MemoryMode::Swap { 12 * GIB } else { 0 };
        for _ in 0..2 {
            table.now += 1000;
            let used = BTreeMap::from([(1, seen + GIB / 2)]);
            table.sees(0, CAPACITY, used);
        }
        assert!(!table.core.is_measuring());
        let status = &table.core.gpu_status()[0];
        assert_eq!((status.overhead, status.capacity), (GIB / 2, CAPACITY - GIB / 2), "{memory:?}");
    }
}

#[test]
fn a_client_that_runs_beyond_the_capacity_is_asked_for_nothing_that_it_uses() {
    let mut core = Core::new(Config { gpu_memory: None, reserve: Some(0), ..config(false) });
    core.handle(registered(0, Gate::Open, 0), MS(0));
    let measured = Measured { gpu: gpu(0), asked_at: MS(1), available: 9 * GIB, used: BTreeMap::new() };
    core.handle(Event::Measured(measured), MS(1));
    let evict = |output: &Output| matches!(output, Output::Send { message: SchedulerMessage::Evict(_), .. });
    let outputs: Vec<Output> = std::iter::from_fn(|| core.poll_output()).collect();
    assert!(!outputs.iter().any(evict), "{outputs:?}");
}

#[test]
fn an_eviction_that_nobody_ordered_changes_nothing() {
    let mut core = Core::new(config(false));
    core.handle(registered(0, Gate::Closed, 0), MS(0));
    while core.poll_output().is_some() {}
    assert_eq!(say(&mut core, 0, ClientMessage::Evicted { gpu: gpu(0), short: GIB }), []);
}

/// The reason may be over at once, as when a context ends; memory that never leaves is asked for less and less often.
#[test]
fn memory_that_could_not_leave_is_asked_for_again_soon_and_then_rarely() {
    let mut table = Table::new(config(false));
    let (stays, waits) = (1, 2);
    table.register(stays, Gate::Closed, 12 * GIB, 0);
    table.register(waits, Gate::Closed, 12 * GIB, 12 * GIB);
    let mut sent = table.say(waits, ClientMessage::ReqLock);
    let mut asked = Vec::new();
    for at in (0..60_000).step_by(50) {
        let evicts = |(client, message): &(u64, SchedulerMessage)| {
            *client == stays && matches!(message, SchedulerMessage::Evict(_))
        };
        if sent.iter().any(evicts) {
            asked.push(table.now);
            sent = table.say(stays, ClientMessage::Evicted { gpu: gpu(0), short: 8 * GIB });
        }
        sent.append(&mut table.wait_until(at + 50));
    }
    assert!(asked.len() >= 3 && asked[1] <= 300 && asked[2] <= 900, "{asked:?}");
    assert!(asked.len() <= 13, "{asked:?}");
    // Once it can leave, the waiter has waited no longer than the last pause.
    let sent = table.wait_until(table.now + 10_000);
    assert!(granted(&table.give_back(sent), waits).is_some());
}

#[test]
fn a_grant_comes_with_all_the_room_or_not_at_all() {
    // The messages of one hand-over, in their order.
    let mut core = Core::new(config(false));
    let mut sent = Vec::new();
    let mut handle = |core: &mut Core, client: u64, message: ClientMessage, now: u64| {
        core.handle(Event::Message { client, message }, MS(now));
        while let Some(output) = core.poll_output() {
            if let Output::Send { client, message } = output {
                sent.push((client, message));
            }
        }
        std::mem::take(&mut sent)
    };
    for client in [1, 2] {
        core.handle(registered(client, Gate::Closed, 12 * GIB), MS(0));
    }
    while core.poll_output().is_some() {}
    let first = handle(&mut core, 1, ClientMessage::ReqLock, 1);
    let Some((1, SchedulerMessage::LockOk { epoch: one, .. })) = first.first().cloned() else {
        panic!("{first:?}")
    };
    handle(&mut core, 1, ClientMessage::Running { epoch: one }, 2);
    handle(&mut core, 1, ClientMessage::Usage(twelve_gib(0)), 2);
    assert_eq!(
        handle(&mut core, 2, ClientMessage::ReqLock, 3),
        [(1, SchedulerMessage::Waiters { waiting: true })]
    );
    core.handle(Event::Deadline, MS(1002));
    let mut drop = Vec::new();
    while let Some(Output::Send { client, message }) = core.poll_output() {
        drop.push((client, message));
    }
    assert_eq!(drop, [(1, SchedulerMessage::DropLock { epoch: one, patience_ms: 200 })]);
    // Spare room that client 1 never used goes back with the lock.
    let spare = Amount { gpu: gpu(0), bytes: GIB };
    handle(&mut core, 1, ClientMessage::Room(spare), 1010);
    let released = handle(&mut core, 1, ClientMessage::LockReleased { epoch: one }, 1010);
    let [(1, SchedulerMessage::Evict(Amount { bytes, .. }))] = released[..] else { panic!("{released:?}") };
    assert_eq!(bytes, 8 * GIB);
    let half = Amount { gpu: gpu(0), bytes: 4 * GIB };
    assert!(handle(&mut core, 1, ClientMessage::Room(half), 1200).is_empty(), "half the room is not enough");
    let granted = handle(&mut core, 1, ClientMessage::Room(half), 1400);
    assert!(
        matches!(&granted[0], (2, SchedulerMessage::LockOk { room, .. }) if room[0].bytes == 12 * GIB),
        "{granted:?}"
    );
}

#[test]
fn an_eviction_stands_until_it_is_answered() {
    let mut core = Core::new(config(false));
    let mut now = 0;
    let mut say = |core: &mut Core, client: u64, message: ClientMessage| {
        now += 1;
        core.handle(Event::Message { client, message }, MS(now));
        let sends = std::iter::from_fn(|| core.poll_output());
        sends
            .filter_map(|output| match output {
                Output::Send { client, message } => Some((client, message)),
                Output::Log { .. } | Output::Measure { .. } => None,
            })
            .collect::<Vec<_>>()
    };
    let epoch = |sent: &[(u64, SchedulerMessage)], to: u64| {
        sent.iter().find_map(|(client, message)| match message {
            SchedulerMessage::LockOk { epoch, .. } if *client == to => Some(*epoch),
            _ => None,
        })
    };
    for client in [1, 2] {
        core.handle(registered(client, Gate::Closed, 12 * GIB), MS(0));
    }
    while core.poll_output().is_some() {}
    let one = epoch(&say(&mut core, 1, ClientMessage::ReqLock), 1).expect("a grant");
    say(&mut core, 1, ClientMessage::Running { epoch: one });
    say(&mut core, 1, ClientMessage::Usage(twelve_gib(0)));
    say(&mut core, 2, ClientMessage::ReqLock);
    say(&mut core, 1, ClientMessage::LockReleased { epoch: one });
    say(&mut core, 1, ClientMessage::ReqLock);
    // Room that it gave back by itself, its spare among it, crosses the order; what was ordered is still to leave.
    let granted = say(&mut core, 1, ClientMessage::Room(Amount { gpu: gpu(0), bytes: 9 * GIB }));
    let two = epoch(&granted, 2).unwrap_or_else(|| panic!("{granted:?}; {:?}", core.client_status()));
    say(&mut core, 2, ClientMessage::Running { epoch: two });
    say(&mut core, 2, ClientMessage::Usage(twelve_gib(0)));
    say(&mut core, 2, ClientMessage::LockReleased { epoch: two });
    say(&mut core, 2, ClientMessage::Room(Amount { gpu: gpu(0), bytes: 12 * GIB }));
    let sent = say(&mut core, 2, ClientMessage::Evicted { gpu: gpu(0), short: 0 });
    assert_eq!(epoch(&sent, 1), None, "granted while its memory is leaving");
    let sent = say(&mut core, 1, ClientMessage::Evicted { gpu: gpu(0), short: 0 });
    assert!(epoch(&sent, 1).is_some(), "{sent:?}");
}

#[test]
fn a_client_that_cannot_have_its_room_holds_nobody_up() {
    let mut core = Core::new(config(false));
    for client in [1, 2] {
        core.handle(registered(client, Gate::Closed, 12 * GIB), MS(0));
    }
    let mut say = |client: u64, message: ClientMessage, at: u64| {
        core.handle(Event::Message { client, message }, MS(at));
        if core.next_deadline().is_some_and(|deadline| deadline <= MS(at)) {
            core.handle(Event::Deadline, MS(at));
        }
        std::iter::from_fn(|| core.poll_output()).find_map(|output| match output {
            Output::Send { client, message: SchedulerMessage::LockOk { epoch, .. } } => Some((client, epoch)),
            _ => None,
        })
    };
    let Some((1, epoch)) = say(1, ClientMessage::ReqLock, 1) else { panic!("a grant") };
    say(1, ClientMessage::Running { epoch }, 2);
    say(1, ClientMessage::Usage(twelve_gib(0)), 2);
    say(2, ClientMessage::ReqLock, 3);
    say(1, ClientMessage::LockReleased { epoch }, 1010);
    say(1, ClientMessage::ReqLock, 1011);
    // Nothing of what the first has can leave, and so the second cannot be next.
    let next = say(1, ClientMessage::Evicted { gpu: gpu(0), short: 8 * GIB }, 1012);
    assert!(matches!(next, Some((1, _))), "{next:?}; {:?}", core.client_status());
}

#[test]
fn room_is_not_kept_for_a_parked_need_while_who_is_next_waits_for_it() {
    const MIB: u64 = 1 << 20;
    let (holder, parked, small) = (1, 2, 3);
    let config = Config { quantum: MS(8000), gpu_memory: Some(GIB), ..config(false) };
    let mut table = Table::new(config);
    table.register(holder, Gate::Open, 512 * MIB, 0);
    table.register(parked, Gate::Closed, 0, 0);
    table.register(small, Gate::Closed, 384 * MIB, 384 * MIB);
    // It has to have its room at once, as memory that is allocated in stream order does.
    table.say(parked, ClientMessage::NeedRoom(Amount { gpu: gpu(0), bytes: 768 * MIB }));
    table.now = 100;
    let mut asked = table.say(small, ClientMessage::ReqLock);
    if let Some(epoch) = granted(&asked, small) {
        table.say(small, ClientMessage::Running { epoch });
    }
    // The need is served when the holder's turn is over.
    asked.append(&mut table.wait_until(8000));
    let mut sent = Vec::new();
    let epoch = asked_to_leave(&asked, holder).unwrap_or_else(|| panic!("{asked:?}"));
    sent.append(&mut table.say(holder, ClientMessage::LockReleased { epoch }));
    if let Some(epoch) = asked_to_leave(&asked, small) {
        sent.append(&mut table.say(small, ClientMessage::LockReleased { epoch }));
    }
    let mut room = 0;
    for _ in 0..4 {
        let mut answers = Vec::new();
        for (client, message) in sent {
            match message {
                SchedulerMessage::Evict(Amount { gpu, bytes }) => {
                    answers.append(&mut table.say(client, ClientMessage::Room(Amount { gpu, bytes })));
                    answers.append(&mut table.say(client, ClientMessage::Evicted { gpu, short: 0 }));
                }
                SchedulerMessage::Room(Amount { bytes, .. }) if client == parked => room += bytes,
                SchedulerMessage::LockOk { room: given, epoch, .. } if client == parked => {
                    room += given[0].bytes;
                    answers.append(&mut table.say(parked, ClientMessage::Running { epoch }));
                    let usage = Usage { allocated: 768 * MIB, absent: 0, ..twelve_gib(0) };
                    answers.append(&mut table.say(parked, ClientMessage::Usage(usage)));
                }
                _ => {}
            }
        }
        sent = answers;
    }
    assert!(room >= 768 * MIB, "{:?}", table.core.client_status());
    // And the small one has its turn then, if it has not had one.
    asked.append(&mut table.wait_until(17_000));
    if granted(&asked, small).is_none() {
        let epoch = asked_to_leave(&asked, parked).unwrap_or_else(|| panic!("{asked:?}"));
        let sent = table.say(parked, ClientMessage::LockReleased { epoch });
        let [(2, SchedulerMessage::Evict(room))] = sent[..] else { panic!("{sent:?}") };
        assert!(granted(&table.say(parked, ClientMessage::Room(room)), small).is_some());
    }
}

#[test]
fn a_client_that_waited_for_immovable_memory_goes_on_when_it_can_move() {
    let (silent, waiter) = (1, 2);
    let mut table = Table::new(config(false));
    table.register(silent, Gate::Closed, 12 * GIB, 0);
    table.register(waiter, Gate::Closed, 12 * GIB, 12 * GIB);
    let sent = table.say(waiter, ClientMessage::ReqLock);
    let evict = (silent, SchedulerMessage::Evict(Amount { gpu: gpu(0), bytes: 8 * GIB }));
    assert_eq!(sent, [evict]);
    // Nothing is heard of it for longer than anybody waits for an answer; then it answers after all.
    table.wait_until(10_001);
    assert_eq!(table.core.client_status()[1].state, ClientState::Blocked, "{:?}", table.core.client_status());
    table.say(silent, ClientMessage::Room(Amount { gpu: gpu(0), bytes: 4 * GIB }));
    let sent = table.say(silent, ClientMessage::Evicted { gpu: gpu(0), short: 0 });
    let evict = (silent, SchedulerMessage::Evict(Amount { gpu: gpu(0), bytes: 4 * GIB }));
    assert_eq!(sent, [evict], "{:?}", table.core.client_status());
}

/// A process without the library has taken a part of the GPU, so that the large client cannot run with what it is granted. It keeps nobody
/// waiting, and goes on when that process has gone.
#[test]
fn a_client_that_gives_a_grant_back_waits_for_room_for_all_of_its_memory() {
    let (large, other) = (1, 2);
    let mut table = Table::new(Config { gpu_memory: None, reserve: Some(0), ..config(false) });
    table.register(large, Gate::Closed, 12 * GIB, 12 * GIB);
    table.register(other, Gate::Closed, 6 * GIB, 6 * GIB);
    table.sees(0, 9 * GIB, BTreeMap::new());
    let sent = table.say(large, ClientMessage::ReqLock);
    let epoch = granted(&sent, large).unwrap_or_else(|| panic!("{sent:?}"));
    table.say(other, ClientMessage::ReqLock);
    table.say(large, ClientMessage::Usage(twelve_gib(3 * GIB)));
    let mut sent = table.say(large, ClientMessage::LockReleased { epoch });
    sent.append(&mut table.say(large, ClientMessage::ReqLock));
    let sent = table.give_back(sent);
    assert_eq!(granted(&sent, large), None, "{sent:?}");
    let epoch = granted(&sent, other).unwrap_or_else(|| panic!("{sent:?}"));
    table.say(other, ClientMessage::Running { epoch });
    let sent = table.wait_until(10_000);
    assert_eq!(asked_to_leave(&sent, other), None, "{sent:?}");
    assert_eq!(table.core.client_status()[0].state, ClientState::Blocked, "{:?}", table.core.client_status());
    let is_told = |note: &String| note.starts_with("client 1 waits: it wants 12.00 GiB of ");
    assert!(table.notes.iter().any(is_told), "{:?}", table.notes);
    let sent = table.sees(0, CAPACITY, BTreeMap::new());
    assert_eq!(asked_to_leave(&sent, other), Some(epoch), "{sent:?}");
    let sent = table.say(other, ClientMessage::LockReleased { epoch });
    let sent = table.give_back(sent);
    assert!(granted(&sent, large).is_some(), "{sent:?}");
    table.assert_at_rest();
}
