//! Requests that a connection may not make: each gets a clear answer, and the scheduler serves on.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use nvshare_harness::{Program, Scheduler, World, guest, wait_until};
use nvshare_proto::{
    AdminRequest, ClientMessage, Counters, Gate, GpuUuid, MemoryMode, QuantumRule, Register, Reply, Request,
    Usage, VERSION, Wishes, codec,
};

fn register() -> Request {
    let usage =
        Usage { gpu: GpuUuid([9; 16]), total: 1 << 30, limit: 0, allocated: 0, absent: 0, immovable: 0 };
    Request::Register(Register {
        pid: 1,
        name: "test".into(),
        memory: MemoryMode::Managed,
        gate: Gate::Closed,
        returns: false,
        run: None,
        usage: vec![usage],
        asked: Wishes::default(),
    })
}

/// Sends bytes and then the end of the stream. Returns the answers until the end of the connection.
fn exchange(world: &World, frames: &[Vec<u8>]) -> Vec<Reply> {
    let mut stream = UnixStream::connect(world.socket()).expect("a connection");
    for frame in frames {
        // The scheduler may have closed the connection already.
        let _ = stream.write_all(frame);
    }
    let _ = stream.shutdown(Shutdown::Write);
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    while let Ok(read @ 1..) = stream.read(&mut chunk) {
        bytes.extend_from_slice(&chunk[..read]);
    }
    let mut replies = Vec::new();
    while let Some((used, reply)) = codec::decode(&bytes).expect("a frame") {
        bytes.drain(..used);
        replies.push(reply);
    }
    replies
}

fn refusal(replies: &[Reply]) -> &str {
    match replies.last() {
        Some(Reply::Refused { reason }) => reason,
        other => panic!("no refusal but {other:?}"),
    }
}

#[test]
fn bytes_that_are_no_frame_are_refused_with_a_reason() {
    let world = World::simulated(&[]);
    let mut scheduler = Scheduler::start(&world, &[]);
    let good = codec::encode(&register()).expect("a frame");
    let mut other_version = good.clone();
    other_version[4] = 99;
    let mut cut = good.clone();
    cut.truncate(10);
    cut[..4].copy_from_slice(&6u32.to_le_bytes());
    let mut longer = good.clone();
    longer.extend_from_slice(b"xx");
    let length = (longer.len() - 4) as u32;
    longer[..4].copy_from_slice(&length.to_le_bytes());
    for (frame, words) in [
        (vec![0xff; 64], "is too long"),
        ((64 * 1024 + 1u32).to_le_bytes().to_vec(), "is too long"),
        (vec![1, 0, 0, 0, 7], "too short"),
        (vec![0, 0, 0, 0], "too short"),
        (other_version, "protocol version 99; this is version"),
        (cut, "malformed message"),
        (longer, "2 bytes left over"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(), "is too long"),
        ([vec![6, 0, 0, 0, VERSION as u8, 0], vec![0xee; 4]].concat(), "malformed message"),
    ] {
        let replies = exchange(&world, std::slice::from_ref(&frame));
        assert!(refusal(&replies).contains(words), "{frame:x?}: {replies:?}");
    }
    // A huge collection inside a small frame allocates nothing.
    let mut huge = codec::encode(&register()).expect("a frame");
    // The list of GPUs stands before the wishes for shares, of which each part is empty here.
    let asked = 1 + 1 + 4 + 8 + 1;
    let at = huge.len() - asked - (16 + 8 * 5) - 8;
    huge[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(refusal(&exchange(&world, &[huge])).contains("malformed message"));
    assert!(scheduler.lives());
}

#[test]
fn order_matters() {
    let world = World::simulated(&[]);
    let _scheduler = Scheduler::start(&world, &[]);
    let frame = |request: &Request| codec::encode(request).expect("a frame");
    let early = exchange(&world, &[frame(&Request::Client(ClientMessage::ReqLock))]);
    assert!(refusal(&early).contains("registers before"), "{early:?}");
    let twice = exchange(&world, &[frame(&register()), frame(&register())]);
    assert!(refusal(&twice).contains("registered already"), "{twice:?}");
    let mixed = exchange(&world, &[frame(&register()), frame(&Request::Admin(AdminRequest::On))]);
    assert!(refusal(&mixed).contains("administrator's request"), "{mixed:?}");
    // Clients may look and not touch.
    let change = exchange(
        &world,
        &[frame(&Request::Admin(AdminRequest::SetQuantum {
            gpu: None,
            quantum: QuantumRule::Fixed { millis: 5000 },
        }))],
    );
    assert!(refusal(&change).contains("administrators' socket"), "{change:?}");
    let look = exchange(&world, &[frame(&Request::Admin(AdminRequest::Status))]);
    assert!(matches!(look[0], Reply::Admin(_)), "{look:?}");
}

#[test]
fn a_child_that_talks_keeps_nothing_of_its_dead_parent() {
    let world = World::simulated(&[("NVSIM_MEMORY", "1GiB")]);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--grace", "3"]);
    let Request::Register(register) = register() else { unreachable!() };
    let gpu: GpuUuid = "GPU-51600000-0000-4000-8000-000000000000".parse().expect("the simulated card");
    let usage = Usage { gpu, allocated: 768 << 20, ..register.usage[0] };
    let register = Register { gate: Gate::Open, usage: vec![usage], ..register };
    let file = |name: &str, request: &Request| {
        let path = world.dir().join(name);
        std::fs::write(&path, codec::encode(request).expect("a frame")).expect("a file");
        path.to_string_lossy().into_owned()
    };
    let registers = file("register", &Request::Register(register));
    let talk = file("talk", &Request::Client(ClientMessage::Ping));
    let guest = Program::of(&world, "guest", Command::new(guest("dead_parent", false)))
        .env("REGISTER", &registers)
        .env("TALK", &talk);
    let parent = guest.waits_for_go().until_told().start();
    Scheduler::until(&world, "the parent has the memory", |status| status.find(parent.pid()).is_some());
    std::fs::write(world.dir().join("go"), "").expect("a file");
    assert!(parent.finish().status.success());
    // It needs what the parent had; the child talks on.
    let job = Program::workload(&world, "job", "--memory 512MiB --block 256MiB --steps 3");
    job.start().finish().intact();
    world.stop();
}

#[test]
fn stale_and_absurd_messages_change_nothing_for_others() {
    let world = World::simulated(&[("NVSIM_MEMORY", "1GiB")]);
    let mut scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let frame = |message: ClientMessage| codec::encode(&Request::Client(message)).expect("a frame");
    let gpu = GpuUuid([9; 16]);
    let epoch = nvshare_proto::Epoch { boot: 1, counter: 77 };
    let most = nvshare_proto::Amount { gpu, bytes: u64::MAX };
    const ALL: u64 = u64::MAX;
    let usage = Usage { gpu, total: ALL, limit: ALL, allocated: ALL, absent: ALL, immovable: ALL };
    let frames: Vec<Vec<u8>> = std::iter::once(codec::encode(&register()).expect("a frame"))
        .chain(
            [
                ClientMessage::LockReleased { epoch },
                ClientMessage::Running { epoch },
                ClientMessage::Idle { epoch },
                ClientMessage::DropDeferred { epoch },
                ClientMessage::Room(most),
                ClientMessage::Usage(usage),
                ClientMessage::NeedRoom(most),
                ClientMessage::Room(most),
                ClientMessage::Evicted { gpu, short: u64::MAX },
                ClientMessage::Usage(Usage { absent: 0, ..usage }),
                ClientMessage::ReqLock,
                ClientMessage::ReqLock,
            ]
            .map(frame),
        )
        .collect();
    let _ = exchange(&world, &frames);
    assert!(scheduler.lives());
    // Memory moves slower and slower, and the client must move all of it before it can run.
    let slow = |n: u64| Counters {
        restored: n << 30,
        restore_ns: n << 55,
        evicted: n << 30,
        evict_ns: n << 55,
        ..Counters::default()
    };
    let first = Request::Register(Register {
        usage: vec![Usage { total: ALL, ..usage }],
        ..match register() {
            Request::Register(register) => register,
            other => unreachable!("{other:?}"),
        }
    });
    let frames: Vec<Vec<u8>> = std::iter::once(codec::encode(&first).expect("a frame"))
        .chain((1..200).map(|n| frame(ClientMessage::Counters(slow(n)))))
        .chain([frame(ClientMessage::ReqLock)])
        .collect();
    let _ = exchange(&world, &frames);
    assert!(scheduler.lives());
    Program::workload(&world, "honest", "--memory 512MiB --block 64MiB --steps 5").start().finish().intact();
}

#[test]
fn a_connection_that_does_not_read_is_cut_off() {
    let world = World::simulated(&[]);
    let mut scheduler = Scheduler::start(&world, &[]);
    let mut deaf = UnixStream::connect(world.socket()).expect("a connection");
    deaf.set_write_timeout(Some(Duration::from_secs(1))).expect("a timeout");
    deaf.write_all(&codec::encode(&register()).expect("a frame")).expect("sent");
    // Each of these is answered, and the answers are never read.
    let pings = codec::encode(&Request::Client(ClientMessage::Ping)).expect("a frame").repeat(64);
    wait_until("it is cut off", || {
        let _ = deaf.write_all(&pings);
        scheduler.log().contains("does not read; it is cut off")
    });
    assert!(scheduler.lives());
    Scheduler::until(&world, "it is gone", |status| status.clients.iter().all(|client| client.gone));
}

#[test]
fn an_unknown_gpu_is_named_in_the_refusal() {
    let world = World::simulated(&[]);
    let _scheduler = Scheduler::start(&world, &[]);
    let output =
        Scheduler::ctl(&world, &["set-tq", "5", "--gpu", "GPU-00000000-0000-0000-0000-000000000001"]);
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("unknown GPU GPU-00000000-0000-0000-0000-000000000001"), "{text}");
}
