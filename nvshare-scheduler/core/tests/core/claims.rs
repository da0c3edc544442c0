//! Claims, requests and the silence of clients harm nobody else beyond a bound.

use nvshare_core::{Config, Event, Identity};
use nvshare_proto::{
    Amount, ClientMessage, ClientState, Gate, MemoryMode, Register, SchedulerMessage, Usage,
};

use crate::table::{
    CAPACITY, GIB, MS, Table, asked_to_leave, config, gpu, granted, newcomer, room_given, twelve_gib,
};

#[test]
fn a_need_of_one_client_does_not_end_the_turn_of_others() {
    let mut table = Table::new(config(false));
    table.register(1, Gate::Open, 8 * GIB, 0);
    table.register(2, Gate::Open, 8 * GIB, 0);
    table.now = 100;
    let sent = table.say(1, ClientMessage::NeedRoom(Amount { gpu: gpu(0), bytes: u64::MAX }));
    assert_eq!(asked_to_leave(&sent, 2), None, "{sent:?}");
    assert!(asked_to_leave(&sent, 1).is_some(), "{sent:?}");
}

#[test]
fn a_client_that_evicts_nothing_is_not_asked_without_end() {
    let mut table = Table::new(config(false));
    table.register(1, Gate::Closed, 12 * GIB, 0);
    table.register(2, Gate::Closed, 12 * GIB, 12 * GIB);
    let mut sent = table.say(2, ClientMessage::ReqLock);
    let mut asked = 0;
    while sent.iter().any(|(to, message)| *to == 1 && matches!(message, SchedulerMessage::Evict(_))) {
        asked += 1;
        assert!(asked < 10, "asked without end");
        sent = table.say(1, ClientMessage::Evicted { gpu: gpu(0), short: 0 });
    }
    assert_eq!(asked, 1);
    assert_eq!(table.core.client_status()[1].state, ClientState::Blocked, "{:?}", table.core.client_status());
}

#[test]
fn a_claim_of_absent_memory_does_not_stretch_its_deadline() {
    let mut table = Table::new(config(false));
    table.register(1, Gate::Closed, 1 << 63, 1 << 63);
    let sent = table.say(1, ClientMessage::ReqLock);
    assert!(granted(&sent, 1).is_some());
    let deadline = table.core.next_deadline().expect("a deadline");
    assert!(deadline <= MS(131_000), "{deadline:?}");
}

#[test]
fn claims_of_clients_can_be_added_up() {
    let mut table = Table::new(config(false));
    for client in 1..4 {
        table.register(client, Gate::Closed, u64::MAX, 0);
    }
    let status = table.core.gpu_status();
    assert!(status[0].allocated < 1 << 60 && status[0].resident < 1 << 60, "{status:?}");
}

#[test]
fn sizes_of_a_gpu_that_differ_mean_turns() {
    let config = Config { gpu_memory: None, reserve: Some(0), ..config(false) };
    let usage = |total| Usage { total, allocated: GIB, absent: GIB, ..twelve_gib(0) };
    let capacity = |sent: &[(u64, SchedulerMessage)], of: u64| {
        sent.iter().find_map(|(to, message)| match message {
            SchedulerMessage::Capacity(room) if *to == of => Some(room.bytes),
            _ => None,
        })
    };
    let mut table = Table::new(config);
    // One that says nothing useful refuses nobody, and one that says too much lets nobody in.
    assert_eq!(capacity(&table.register_with(1, Gate::Closed, usage(0)), 1), Some(0));
    assert_eq!(capacity(&table.register_with(2, Gate::Closed, usage(CAPACITY)), 2), Some(CAPACITY));
    table.register_with(3, Gate::Closed, usage(u64::MAX));
    table.runs(2);
    let sent = table.say(3, ClientMessage::ReqLock);
    assert_eq!(granted(&sent, 3), None, "they would fit");
    let sent = table.wait_until(1000);
    assert!(asked_to_leave(&sent, 2).is_some(), "{sent:?}");
    // When those are gone, the rest agree, and run together.
    for client in [1, 3] {
        table.happens(Event::Disconnected { client, process_remains: false });
    }
    table.register_with(4, Gate::Closed, usage(CAPACITY));
    let sent = table.say(4, ClientMessage::ReqLock);
    assert!(granted(&sent, 4).is_some() || asked_to_leave(&sent, 2).is_none(), "{sent:?}");
}

#[test]
fn a_client_that_says_that_a_gpu_is_small_has_others_asked_once() {
    let mut table = Table::new(Config { gpu_memory: None, reserve: Some(0), ..config(false) });
    table.register(1, Gate::Closed, 12 * GIB, 0);
    table.register_with(2, Gate::Closed, Usage { total: 4 * GIB, allocated: 0, ..twelve_gib(0) });
    // There is room for it when the other one has no more than 4 GiB, less a byte.
    let sent = table.say(2, ClientMessage::NeedRoom(Amount { gpu: gpu(0), bytes: 1 }));
    let sent = table.give_back(sent);
    let asked: Vec<u64> = sent
        .iter()
        .filter_map(|(to, message)| match message {
            SchedulerMessage::Evict(room) if *to == 1 => Some(room.bytes),
            _ => None,
        })
        .collect();
    assert!(asked.len() == 1 && asked[0] > 8 * GIB, "{asked:?}");
    assert!(room_given(&sent, 2) >= 1, "{sent:?}");
}

#[test]
fn plain_memory_that_nvml_does_not_see_is_charged_to_nobody() {
    let (lies, waits, other) = (1, 2, 3);
    let mut table = Table::new(Config { gpu_memory: None, reserve: Some(0), ..config(false) });
    let look = |table: &mut Table, of_liar: Option<u64>| {
        let used = [(waits, GIB / 2)].into_iter().chain(of_liar.map(|used| (lies, used))).collect();
        table.now += 5000;
        table.sees(0, CAPACITY, used)
    };
    look(&mut table, None);
    for (client, memory, absent) in
        [(lies, MemoryMode::Off, 0), (waits, MemoryMode::Managed, 12 * GIB), (other, MemoryMode::Off, 0)]
    {
        let allocated = if client == other { GIB } else { 12 * GIB };
        let usage = Usage { allocated, ..twelve_gib(absent) };
        let register = Register { memory, ..newcomer(Gate::Closed, usage) };
        let pid = if client == other { None } else { Some(client as u32) };
        let identity = Identity { pid, process: Some(client), ..Identity::default() };
        table.happens(Event::Registered { client, identity, register });
    }
    assert_eq!(granted(&table.say(waits, ClientMessage::ReqLock), waits), None);
    // It may have allocated it since NVML looked; and it says something else each time.
    assert_eq!(granted(&look(&mut table, None), waits), None);
    table.say(lies, ClientMessage::Usage(Usage { allocated: 11 * GIB, ..twelve_gib(0) }));
    assert!(granted(&look(&mut table, Some(GIB / 2)), waits).is_some(), "{:?}", table.core.client_status());
    assert!(table.notes.iter().any(|note| note.contains("NVML does not see")), "{:?}", table.notes);
    // NVML cannot see processes of another PID namespace, so the scheduler trusts their figures.
    let rows = table.core.client_status();
    assert_eq!(rows.iter().find(|row| row.client == other).map(|row| row.resident), Some(GIB));
}
