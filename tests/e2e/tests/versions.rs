//! Parts of different versions meet: a scheduler that was downgraded, or not yet upgraded, under newer libraries; and an older kernel.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use nvshare_harness::{PlayedScheduler, Program, Scheduler, World, guest, wait_until};
use nvshare_proto::units::GIB;
use nvshare_proto::{
    Amount, ClientMessage, Epoch, InitialState, OLDEST, Reply, Request, SchedulerMessage, VERSION, codec,
};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];

/// A frame of any version.
fn frame(version: u16, reply: &Reply) -> Vec<u8> {
    let mut frame = codec::encode(reply).expect("a frame");
    frame[4..6].copy_from_slice(&version.to_le_bytes());
    frame
}

/// The answer of a scheduler of another version to any message.
fn refusal(version: u16) -> Vec<u8> {
    let reason = format!("protocol version {VERSION}; this is version {version}");
    frame(version, &Reply::Refused { reason })
}

/// A scheduler of the version before, which refuses what is newer, as that version does. Returns what the client that it can read
/// registers as.
fn older_scheduler(listener: &UnixListener) -> (UnixStream, Vec<u16>, Request) {
    let mut heard = Vec::new();
    loop {
        let (mut stream, _) = listener.accept().expect("a client");
        let mut bytes = vec![0; 65536];
        let read = stream.read(&mut bytes).expect("a frame");
        bytes.truncate(read);
        let version = codec::version(&bytes).expect("a frame");
        heard.push(version);
        if version == OLDEST {
            let (_, first) = codec::decode(&bytes).expect("a frame").expect("a whole frame");
            return (stream, heard, first);
        }
        assert_eq!(heard.len(), 1, "it does not fall back: {heard:?}");
        stream.write_all(&refusal(OLDEST)).expect("sent");
    }
}

#[test]
fn a_program_runs_under_a_scheduler_of_the_version_before() {
    let world = World::simulated(CARD);
    let listener = UnixListener::bind(world.socket()).expect("a socket");
    let job = Program::workload(&world, "job", "--memory 128MiB --block 64MiB --steps 3 --full-check")
        .env("NVSHARE_LOG", "info")
        .start();
    let (mut stream, heard, first) = older_scheduler(&listener);
    assert_eq!(heard, [VERSION, OLDEST], "it begins with the newest, and falls back at once");
    let Request::Register(register) = first else { panic!("{first:?}") };
    assert!(!register.returns, "nobody has registered it before");
    let registered = SchedulerMessage::Registered { client: 1, hold: InitialState::Free };
    stream.write_all(&frame(OLDEST, &Reply::Client(registered))).expect("sent");
    // All that it says it says in that version.
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("its last words");
    let mut unread = &bytes[..];
    let mut frames = 0;
    while let Some((used, _)) = codec::decode::<Request>(unread).expect("a frame") {
        assert_eq!(codec::version(unread), Some(OLDEST));
        (unread, frames) = (&unread[used..], frames + 1);
    }
    assert!(frames > 0, "it said nothing");
    let job = job.finish();
    job.intact();
    let log = &job.log;
    assert!(
        log.contains(&format!("goes on in protocol version {OLDEST}")) && !log.contains("refuses"),
        "{log}"
    );
}

#[test]
fn a_program_takes_turns_under_a_scheduler_of_the_version_before() {
    let world = World::simulated(CARD);
    let listener = PlayedScheduler::listen(&world);
    let job =
        Program::workload(&world, "job", "--memory 128MiB --block 64MiB --full-check").until_told().start();
    let (mut client, usage) = PlayedScheduler::accept_in(OLDEST, &listener);
    let named = |m: &ClientMessage| if let ClientMessage::Usage(usage) = m { Some(usage.gpu) } else { None };
    let gpu = usage.first().map_or_else(|| client.until(named), |usage| usage.gpu);
    let room = Amount { gpu, bytes: GIB };
    client.say(&[SchedulerMessage::Capacity(room)]);
    client.until(|m| matches!(m, ClientMessage::ReqLock).then_some(()));
    for counter in [1, 2] {
        let epoch = Epoch { boot: 1, counter };
        client.say(&[SchedulerMessage::LockOk { epoch, quantum_ms: 1000, room: vec![room] }]);
        client.until(|m| matches!(m, ClientMessage::Running { .. }).then_some(()));
        client.say(&[SchedulerMessage::DropLock { epoch, patience_ms: 60_000 }]);
        client.until(|m| matches!(m, ClientMessage::LockReleased { .. }).then_some(()));
    }
    client.say(&[SchedulerMessage::SchedOff]);
    world.stop();
    job.finish().intact();
}

#[test]
fn a_program_goes_on_under_a_scheduler_of_another_version_and_joins_the_next_one() {
    for version in [OLDEST - 1, VERSION + 1] {
        let world = World::simulated(CARD);
        let listener = UnixListener::bind(world.socket()).expect("a socket");
        listener.set_nonblocking(true).expect("a socket");
        let (met, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let other = std::thread::spawn({
            let (met, stop) = (Arc::clone(&met), Arc::clone(&stop));
            move || {
                while !stop.load(Ordering::Relaxed) {
                    if let Ok((mut stream, _)) = listener.accept() {
                        stream.set_nonblocking(false).expect("a stream");
                        let _ = stream.read(&mut [0; 4096]);
                        let _ = stream.write_all(&refusal(version));
                        met.fetch_add(1, Ordering::Relaxed);
                    }
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
            }
        });
        let job = Program::workload(&world, "job", "--memory 128MiB --block 64MiB --full-check")
            .env("NVSHARE_LOG", "warn")
            .until_told()
            .start();
        wait_until("they have met, and met again", || met.load(Ordering::Relaxed) >= 3);
        let line = format!("protocol version {version}; this is version {VERSION}");
        wait_until("it says so", || job.log().contains(&line));
        assert_eq!(job.log().matches(&line).count(), 1, "once: {}", job.log());
        stop.store(true, Ordering::Relaxed);
        other.join().expect("the other scheduler");
        std::fs::remove_file(world.socket()).expect("a socket");
        // The client joins a scheduler of its own version.
        let _scheduler = Scheduler::start(&world, &[]);
        Scheduler::until(&world, "it joins", |status| status.find(job.pid()).is_some());
        world.stop();
        job.finish().intact();
    }
}

#[test]
fn before_linux_6_5_the_scheduler_says_once_that_connections_are_all_it_knows() {
    let world = World::simulated(&[]);
    let mut scheduler = Scheduler::command(&world, &[]);
    scheduler.env("LD_PRELOAD", guest("old_kernel", true));
    let scheduler = Scheduler::start_by(&world, scheduler);
    for _ in 0..3 {
        drop(Scheduler::status(&world));
    }
    let said = "before Linux 6.5 the end of a process whose number cannot be seen";
    wait_until("it is said", || scheduler.log().contains(said));
    assert_eq!(scheduler.log().matches(said).count(), 1, "{}", scheduler.log());
}
