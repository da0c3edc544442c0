//! The bytes of every message, without length and version. They never change: a message that has to is a new one, of the next `VERSION`.

use std::collections::BTreeSet;
use std::fmt::Debug;

use nvshare_proto::codec::{Error, MAX_FRAME, Message, decode, encode, encode_in};
use nvshare_proto::{
    AdminReply, AdminRequest, Amount, AsleepStatus, ClientMemory, ClientMessage, ClientState, ClientStatus,
    ComputeLimit, Counters, Enforcement, Epoch, EventKind, GangName, Gate, GpuStatus, GpuUuid, HandOverPhase,
    HostSegment, HostStatus, InitialState, MemoryMode, MemoryStatus, OLDEST, Occupant, Others, PhaseTime,
    Priority, ProcessInfo, QuantumRule, Register, Reply, Request, SchedulerMessage, SchedulerStatus, Seat,
    SeatStatus, ShareStatus, Slot, TenantSettings, Usage, VERSION, WatchEvent, WatchFrom, Wishes,
};
use proptest::prelude::*;
use serde::de::DeserializeOwned;

const GPU: GpuUuid = GpuUuid([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
const EPOCH: Epoch = Epoch { boot: 0x1122_3344_5566_7788, counter: 9 };
const SEGMENT: HostSegment = HostSegment { number: 7, bytes: 4 << 20 };
const ROOM: Amount = Amount { gpu: GPU, bytes: 8 << 30 };
const USAGE: Usage =
    Usage { gpu: GPU, total: 16 << 30, limit: 0, allocated: 12 << 30, absent: 8 << 30, immovable: 1 << 30 };
const COUNTERS: Counters = Counters {
    gated: 1,
    passed_by: 2,
    managed: 3,
    hand_overs: 4,
    deferrals: 5,
    evicted: 6,
    evict_ns: 7,
    restored: 8,
    restore_ns: 9,
    drain_ns: 10,
    copied_out: 11,
    copied_in: 12,
};

const PHASES: [PhaseTime; 2] = [
    PhaseTime { gpu: None, phase: HandOverPhase::Drain, micros: 5 },
    PhaseTime { gpu: Some(GPU), phase: HandOverPhase::CopyIn, micros: 6 },
];

fn seat() -> Seat {
    let given = TenantSettings { compute: Some(25), memory: Some(8 << 30), ..TenantSettings::default() };
    Seat { slots: vec![Slot { gpu: GPU, number: 7 }], given }
}

fn occupant() -> Occupant {
    Occupant { namespace: "default".into(), pod: "train-0".into(), container: "main".into() }
}

fn requests() -> Vec<(&'static str, Request)> {
    use ClientMessage as C;
    let asked = Wishes {
        weight: Some(20),
        priority: Some(Priority::Low),
        enforcement: Enforcement::Force,
        compute: vec![ComputeLimit { gpu: GPU, percent: 25 }],
        gang: Some(GangName { name: "ranks".into(), size: 2 }),
    };
    let given = TenantSettings {
        weight: Some(200),
        memory: Some(8 << 30),
        paused: Some(true),
        ..TenantSettings::default()
    };
    let auto = QuantumRule::Auto { overhead_ppm: 50_000, max_wait_ms: 30_000 };
    let register = |memory, gate| {
        Request::Register(Register {
            pid: 7,
            name: "python3".into(),
            memory,
            gate,
            returns: gate == Gate::Open,
            run: Some(9),
            usage: vec![USAGE],
            asked: asked.clone(),
        })
    };
    vec![
        ("register, managed, closed", register(MemoryMode::Managed, Gate::Closed)),
        ("register, off, open", register(MemoryMode::Off, Gate::Open)),
        ("register, swap, open", register(MemoryMode::Swap, Gate::Open)),
        ("look", Request::Look { run: Some(9) }),
        ("usage", Request::Client(C::Usage(USAGE))),
        ("req_lock", Request::Client(C::ReqLock)),
        ("running", Request::Client(C::Running { epoch: EPOCH })),
        ("lock_released", Request::Client(C::LockReleased { epoch: EPOCH })),
        ("drop_deferred", Request::Client(C::DropDeferred { epoch: EPOCH })),
        ("idle", Request::Client(C::Idle { epoch: EPOCH })),
        ("need_room", Request::Client(C::NeedRoom(ROOM))),
        ("room", Request::Client(C::Room(ROOM))),
        ("evicted", Request::Client(C::Evicted { gpu: GPU, short: 5 })),
        ("counters", Request::Client(C::Counters(COUNTERS))),
        ("ping", Request::Client(C::Ping)),
        ("adopted", Request::Client(C::Adopted { epoch: Epoch { boot: 3, counter: 1000 } })),
        ("host_wanted", Request::Client(C::HostWanted { bytes: 9 << 20 })),
        ("host_held", Request::Client(C::HostHeld { segments: vec![SEGMENT] })),
        ("host_back", Request::Client(C::HostBack { segment: 7 })),
        ("phases", Request::Client(C::Phases(PHASES.to_vec()))),
        ("asleep", Request::Client(C::Asleep)),
        (
            "cannot_sleep",
            Request::Client(C::CannotSleep { reason: "its threads are busy".into(), for_good: false }),
        ),
        ("wake_wanted", Request::Client(C::WakeWanted)),
        ("awake", Request::Client(C::Awake { took_us: 5 })),
        ("cannot_share", Request::Client(C::CannotShare)),
        ("shares", Request::Client(C::Shares { with: vec![0x0102_0304_0506_0708] })),
        ("elsewhere", Request::Client(C::Elsewhere { gpus: vec![GPU] })),
        ("status", Request::Admin(AdminRequest::Status)),
        (
            "set_quantum",
            Request::Admin(AdminRequest::SetQuantum {
                gpu: None,
                quantum: QuantumRule::Fixed { millis: 30_000 },
            }),
        ),
        ("set_quantum of a gpu", Request::Admin(AdminRequest::SetQuantum { gpu: Some(GPU), quantum: auto })),
        ("give", Request::Admin(AdminRequest::SetTerms { client: 3, gpu: Some(GPU), given })),
        ("give_run", Request::Admin(AdminRequest::SetRunTerms { user: 1000, run: 9, given })),
        ("on", Request::Admin(AdminRequest::On)),
        ("off", Request::Admin(AdminRequest::Off { force: true })),
        ("reset", Request::Admin(AdminRequest::Reset)),
        ("watch", Request::Admin(AdminRequest::Watch { from: WatchFrom::Now, follow: true })),
        (
            "watch on",
            Request::Admin(AdminRequest::Watch { from: WatchFrom::After { boot: 7, seq: 9 }, follow: false }),
        ),
        ("seat", Request::Admin(AdminRequest::Seat(seat()))),
        (
            "hold_seats",
            Request::Admin(AdminRequest::OccupySeats(vec![
                (seat().name(), Some(occupant())),
                (seat().name(), None),
            ])),
        ),
        ("remove_seat", Request::Admin(AdminRequest::RemoveSeat(seat().name()))),
        ("bound_job", Request::Admin(AdminRequest::SetJobBounds { job: 42, given })),
        ("sleep a client", Request::Admin(AdminRequest::Sleep { client: 3 })),
        ("wake a client", Request::Admin(AdminRequest::Wake { client: 3 })),
    ]
}

fn replies() -> Vec<(&'static str, Reply)> {
    use SchedulerMessage as S;
    let registered = |hold| Reply::Client(S::Registered { client: 3, hold });
    let gpu = GpuStatus {
        gpu: GPU,
        index: Some(0),
        name: Some("Tesla T4".into()),
        capacity: 16,
        allocated: 24,
        resident: 15,
        overhead: 1,
        quantum_ms: 30_000,
        holders: vec![1],
        waiters: vec![2, 3],
        turns: 5,
        switch_us: [1, 2, 3, 4],
        others: Some(Others { clients: 1, allocated: 2, holders: 3, waiters: 4 }),
        rule: QuantumRule::Fixed { millis: 30_000 },
        switch_cost_us: 7,
        slices: true,
        by_measure: true,
        side_by_side: 940,
    };
    let client = ClientStatus {
        client: 3,
        pid: 7,
        name: "python3".into(),
        process: Some(ProcessInfo {
            user: 1000,
            command: "python3 train.py".into(),
            container: Some("c".into()),
            pod: None,
            job: Some("8".into()),
        }),
        state: ClientState::Running,
        blocked_on: Some(GPU),
        stuck: true,
        gone: false,
        usage: vec![USAGE],
        resident: 4,
        overhead: 1,
        held_ms: 5,
        waited_ms: 6,
        counters: COUNTERS,
        share: ShareStatus {
            weight: 20,
            priority: Priority::High,
            enforcement: Enforcement::Disable,
            compute: vec![ComputeLimit { gpu: GPU, percent: 25 }],
            paused: true,
            processes: 2,
        },
        host_memory: 9,
    };
    let asleep = ClientStatus { state: ClientState::Asleep, ..ClientStatus::parked(3) };
    let scheduler = SchedulerStatus {
        version: "0.1.0".into(),
        pid: 1,
        uptime_s: 2,
        scheduling: true,
        quantum_ms: 30_000,
        restricted: true,
        host_memory: Some(HostStatus { budget: 8, each: 4, used: 2 }),
    };
    let event = WatchEvent {
        seq: 10,
        time_us: 1_000_000,
        up_us: 2_000,
        event: EventKind::Evicted,
        client: Some(3),
        pid: Some(7),
        name: Some("python3".into()),
        gpus: vec![GPU],
        bytes: Some(8 << 30),
        took_us: None,
    };
    vec![
        ("registered, parked", registered(InitialState::Parked)),
        ("registered, running", registered(InitialState::Running(EPOCH))),
        ("registered, free", registered(InitialState::Free)),
        ("capacity", Reply::Client(S::Capacity(ROOM))),
        ("lock_ok", Reply::Client(S::LockOk { epoch: EPOCH, quantum_ms: 30_000, room: vec![ROOM] })),
        ("drop_lock", Reply::Client(S::DropLock { epoch: EPOCH, patience_ms: 200 })),
        ("evict", Reply::Client(S::Evict(ROOM))),
        ("room for a client", Reply::Client(S::Room(ROOM))),
        ("no_room", Reply::Client(S::NoRoom { gpu: GPU })),
        ("room to restore into", Reply::Client(S::Restore(ROOM))),
        ("waiters", Reply::Client(S::Waiters { waiting: true })),
        ("sched_off", Reply::Client(S::SchedOff)),
        ("sched_on", Reply::Client(S::SchedOn { epoch: EPOCH })),
        ("quota", Reply::Client(S::Quota { row: 2 })),
        ("limit", Reply::Client(S::Limit(ROOM))),
        ("ask_counters", Reply::Client(S::AskCounters)),
        ("ask_progress", Reply::Client(S::AskProgress { ticket: 3 })),
        ("pong", Reply::Client(S::Pong)),
        ("host_memory", Reply::Client(S::HostMemory { offered: true, segments: vec![SEGMENT] })),
        ("host_short", Reply::Client(S::HostShort { bytes: 9 << 20 })),
        ("sleep", Reply::Client(S::Sleep)),
        ("wake", Reply::Client(S::Wake)),
        ("move", Reply::Client(S::Move { from: GPU, to: GpuUuid([9; 16]) })),
        ("status of the scheduler", Reply::Admin(AdminReply::Scheduler(scheduler))),
        ("status of a gpu", Reply::Admin(AdminReply::Gpu(gpu))),
        ("status of a client", Reply::Admin(AdminReply::Client(Box::new(client)))),
        ("status of a client that is asleep", Reply::Admin(AdminReply::Client(Box::new(asleep)))),
        ("end of status", Reply::Admin(AdminReply::End)),
        ("done", Reply::Admin(AdminReply::Done { text: "scheduling is on".into() })),
        ("watching", Reply::Admin(AdminReply::Watching { boot: 7, first: 10 })),
        ("event", Reply::Admin(AdminReply::Event(Box::new(event.clone())))),
        (
            "event of a process that is asleep",
            Reply::Admin(AdminReply::Event(Box::new(WatchEvent { event: EventKind::Asleep, ..event }))),
        ),
        ("missed", Reply::Admin(AdminReply::Missed { count: 3 })),
        ("alive", Reply::Admin(AdminReply::Alive)),
        (
            "seat row",
            Reply::Admin(AdminReply::Seat(Box::new(SeatStatus {
                name: seat().name(),
                seat: seat(),
                occupant: Some(occupant()),
                clients: vec![3],
            }))),
        ),
        (
            "memory row",
            Reply::Admin(AdminReply::Memory(Box::new(MemoryStatus {
                kept: vec![Amount { gpu: GPU, bytes: 5 << 30 }],
                clients: vec![ClientMemory { client: 3, memory: MemoryMode::Swap }],
            }))),
        ),
        ("unused seats", Reply::Admin(AdminReply::UnusedSeats(vec![seat().name()]))),
        ("phases of an event", Reply::Admin(AdminReply::Phases(PHASES.to_vec()))),
        (
            "asleep row",
            Reply::Admin(AdminReply::Asleep(Box::new(AsleepStatus {
                client: 3,
                needs: vec![Amount { gpu: GPU, bytes: 5 << 30 }],
                wakes: true,
            }))),
        ),
        ("refused", Reply::Refused { reason: "no".into() }),
    ]
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn every_message_has_the_bytes_it_had() {
    fn line<M: Message + DeserializeOwned + PartialEq + Debug>(name: &str, message: M) -> String {
        let in_version = |version| {
            let frame = encode_in(version, &message).unwrap();
            let (used, decoded) = decode::<M>(&frame).unwrap().unwrap();
            assert_eq!((used, &decoded), (frame.len(), &message), "{name}");
            let (header, body) = frame.split_at(6);
            let length = (frame.len() - 4) as u32;
            assert_eq!(header, [&length.to_le_bytes()[..], &version.to_le_bytes()].concat(), "{name}");
            hex(body)
        };
        let [first, last] = [message.since(), VERSION].map(in_version);
        assert_eq!(first, last, "{name}: it is the same in each version");
        let new = if message.since() > OLDEST { ", not in the version before" } else { "" };
        format!("{name}{new}: {last}")
    }
    let mut lines: Vec<String> = requests().into_iter().map(|(name, request)| line(name, request)).collect();
    lines.extend(replies().into_iter().map(|(name, reply)| line(name, reply)));
    let text = lines.join("\n") + "\n";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/wire.golden");
    if std::env::var_os("NVSHARE_GOLDEN").is_some_and(|what| what == "write") {
        std::fs::write(path, &text).unwrap();
    }
    let golden = std::fs::read_to_string(path).unwrap();
    assert!(text == golden, "the wire changed; it was\n{golden}\nand is\n{text}");
}

/// The name of a variant, without what it carries.
fn variant(value: &impl std::fmt::Debug) -> String {
    let text = format!("{value:?}");
    text.split(|c: char| !c.is_alphanumeric())
        .take(if text.starts_with("Client(") || text.starts_with("Admin(") { 2 } else { 1 })
        .collect::<Vec<_>>()
        .join(" ")
}

/// How many variants an enum has that is in a message, behind the variants `within`: a number that is none of them is refused, and
/// the error says how many there are.
fn variants<M: DeserializeOwned + Debug>(within: &[u32]) -> usize {
    let numbers = within.iter().chain([&u32::MAX]).flat_map(|number| number.to_le_bytes());
    let body: Vec<u8> = VERSION.to_le_bytes().into_iter().chain(numbers).collect();
    let frame = [(body.len() as u32).to_le_bytes().as_slice(), &body].concat();
    let error = decode::<M>(&frame).unwrap_err().to_string();
    let count = error
        .split(" <= i < ")
        .nth(1)
        .and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok());
    count.unwrap_or_else(|| panic!("{error}"))
}

#[test]
fn no_message_is_left_out() {
    // Two variants of a request, and two of a reply, have variants of their own.
    let [client, admin] = [&[2], &[3]].map(|within| variants::<Request>(within));
    let all: BTreeSet<String> = requests().iter().map(|(_, request)| variant(request)).collect();
    assert_eq!(all.len(), variants::<Request>(&[]) - 2 + client + admin, "{all:?}");
    let [client, admin] = [&[0], &[1]].map(|within| variants::<Reply>(within));
    let all: BTreeSet<String> = replies().iter().map(|(_, reply)| variant(reply)).collect();
    assert_eq!(all.len(), variants::<Reply>(&[]) - 2 + client + admin, "{all:?}");
}

#[test]
fn a_message_that_does_not_fit_a_frame_is_not_sent() {
    let reply = Reply::Refused { reason: "x".repeat(MAX_FRAME) };
    assert!(matches!(encode(&reply), Err(Error::TooLong(_))));
}

#[test]
fn half_a_frame_is_waited_for() {
    let frame = encode(&Request::Client(ClientMessage::ReqLock)).unwrap();
    for length in 0..frame.len() {
        assert!(matches!(decode::<Request>(&frame[..length]), Ok(None)), "{length}");
    }
}

proptest! {
    #[test]
    fn bytes_that_mean_nothing_are_an_error_and_nothing_worse(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut frame = ((bytes.len() + 2) as u32).to_le_bytes().to_vec();
        frame.extend_from_slice(&nvshare_proto::VERSION.to_le_bytes());
        frame.extend_from_slice(&bytes);
        if let Ok(Some((used, request))) = decode::<Request>(&frame) {
            // A frame that can be read is written the same.
            prop_assert_eq!(used, frame.len());
            prop_assert_eq!(encode(&request).unwrap(), frame);
        }
    }
}
