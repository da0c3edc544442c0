//! Programs that go off the card while they are idle, and that any call wakes.

mod elsewhere;

use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nvshare_harness::{Finished, PlayedScheduler, Program, Running, World, guest, wait_until};
use nvshare_proto::{Amount, ClientMessage, Epoch, GpuUuid, SchedulerMessage, Usage};

const CARD: [(&str, &str); 5] = [
    ("NVSIM_MEMORY", "1GiB"),
    ("NVSIM_SCALE", "64"),
    ("NVSIM_CONTEXT", "96MiB"),
    ("NVSIM_STACKS", "8MiB"),
    ("NVSIM_MODULE", "4MiB"),
];
/// MiB that are free on the card while nobody is on it but the one that asks.
const ALL: u64 = 1024 - 96 - 8;
/// MiB at least that a guest takes of the card while all its memory that moves is on the host. The library's
/// own kernel is a module, too.
const CONTEXT: u64 = 132;
/// Room that the guest gets with each grant.
const ROOM: u64 = 64 << 20;

/// A guest, and the scheduler that the test plays for it.
struct Sleeper {
    world: World,
    guest: Running,
    client: PlayedScheduler,
    listener: UnixListener,
    gpu: GpuUuid,
    grants: u64,
}

/// The answer to SLEEP.
#[derive(Debug, PartialEq)]
enum Answer {
    Asleep,
    Stays { reason: String, for_good: bool },
}

fn stays(reason: &str, for_good: bool) -> Answer {
    Answer::Stays { reason: reason.to_owned(), for_good }
}

/// Arguments of a guest that loads a library which is linked to the driver.
const LINKED: [&str; 3] = ["linked", "bound", "bound_past"];

impl Sleeper {
    /// Until the guest is idle, has given the lock back, and all of its memory has left.
    fn parked(arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut sleeper = Self::idle(arguments, environment);
        sleeper.leave();
        sleeper
    }

    /// Until the guest is idle, under the lock.
    fn idle(arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        Self::ready(arguments, environment, false)
    }

    /// Until the guest has nothing to do, under the lock. It may be said to it that another one waits.
    fn ready(arguments: &[&str], environment: &[(&str, &str)], is_waited_for: bool) -> Self {
        let world = World::with_memory("swap", &CARD);
        let listener = PlayedScheduler::listen(&world);
        let file = |name: &str| world.dir().join(name).to_string_lossy().into_owned();
        let linked_to_nvml = guest("linked_to_nvml", true);
        let linked = world.dir().join("linked.so");
        if arguments.iter().any(|argument| LINKED.contains(argument)) {
            world.link_to_driver(&linked, "linked.c", &["-shared", "-fPIC"]);
        }
        symlink(guest("nvml", true), world.dir().join("lib/libnvidia-ml.so.1")).expect("a link");
        let mut program = Program::guest(&world, "sleeper", arguments)
            .env("GO", &file("go"))
            .env("NVSIM_LOST", &file("lost"))
            .env("BEGIN", &file("begin"))
            .env("END", &file("end"))
            .holds_up("capture", file("held"))
            .env("LINKED", &linked.to_string_lossy())
            .env("LINKED_TO_NVML", &linked_to_nvml.to_string_lossy())
            .env("NVSHARE_SLEEP", "1")
            .env("NVSHARE_LOG", "info");
        for (name, value) in environment {
            program = program.env(name, value);
        }
        let guest = program.start();
        let (mut client, usage) = PlayedScheduler::accept(&listener);
        let known = usage.first().map(|usage| usage.gpu);
        let named = |m: &ClientMessage| if let ClientMessage::Usage(u) = m { Some(u.gpu) } else { None };
        let gpu = known.unwrap_or_else(|| client.until(named));
        client.say(&[SchedulerMessage::Capacity(Amount { gpu, bytes: 900 << 20 })]);
        let mut sleeper = Self { world, guest, client, listener, gpu, grants: 0 };
        // Memory that does not move needs its room at once.
        while sleeper.until(|m| match m {
            ClientMessage::NeedRoom(Amount { bytes, .. }) => (*bytes > 0).then_some(true),
            m => matches!(m, ClientMessage::ReqLock).then_some(false),
        }) {
            sleeper.say(SchedulerMessage::Room(Amount { gpu, bytes: ROOM }));
        }
        sleeper.say(SchedulerMessage::Waiters { waiting: is_waited_for });
        sleeper.grant();
        sleeper.until_ready();
        sleeper
    }

    /// A guest that submits nothing for a while gives the lock up for the one that waits, and asks for it again.
    fn until_ready(&mut self) {
        wait_until("the guest is idle", || {
            if self.client.look_for(|m| matches!(m, ClientMessage::ReqLock)) {
                self.grant();
            }
            self.guest.out() == "ready\n" || !self.guest.lives()
        });
    }

    fn until<T>(&mut self, which: impl FnMut(&ClientMessage) -> Option<T>) -> T {
        self.client.until(which)
    }

    fn epoch(&self) -> Epoch {
        Epoch { boot: 1, counter: self.grants }
    }

    fn grant(&mut self) {
        self.grants += 1;
        let room = vec![Amount { gpu: self.gpu, bytes: ROOM }];
        self.client.say(&[SchedulerMessage::LockOk { epoch: self.epoch(), quantum_ms: 60_000, room }]);
        self.until(|m| matches!(m, ClientMessage::Running { .. }).then_some(()));
    }

    /// The lock is taken, and then all memory that moves leaves.
    fn leave(&mut self) {
        self.client.say(&[SchedulerMessage::DropLock { epoch: self.epoch(), patience_ms: 60_000 }]);
        self.until(|m| matches!(m, ClientMessage::LockReleased { .. }).then_some(()));
        self.evict();
    }

    fn evict(&mut self) {
        self.client.say(&[SchedulerMessage::Evict(Amount { gpu: self.gpu, bytes: 1 << 30 })]);
        self.until(|m| matches!(m, ClientMessage::Evicted { .. }).then_some(()));
    }

    fn say(&mut self, message: SchedulerMessage) {
        self.client.say(&[message]);
    }

    /// Orders the client to sleep; returns its answer.
    fn sleep(&mut self) -> Answer {
        self.say(SchedulerMessage::Sleep);
        self.until(|m| match m {
            ClientMessage::Asleep => Some(Answer::Asleep),
            ClientMessage::CannotSleep { reason, for_good } => {
                Some(Answer::Stays { reason: reason.clone(), for_good: *for_good })
            }
            _ => None,
        })
    }

    /// Has the client come back.
    fn wake(&mut self) {
        self.say(SchedulerMessage::Wake);
        self.until(|m| matches!(m, ClientMessage::Awake { .. }).then_some(()));
    }

    fn until_wanted(&mut self) {
        self.until(|m| matches!(m, ClientMessage::WakeWanted).then_some(()));
    }

    fn file(&self, name: &str) -> PathBuf {
        self.world.dir().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.file(name), text).expect("a file");
    }

    /// MiB that are free on the card while the one who asks is on it.
    fn free(&self) -> u64 {
        let asks = Program::guest(&self.world, "free_bytes", &[]).alone().start().finish();
        asks.passed().out.trim().parse().expect("a number")
    }

    /// Gives the guest the lock when it asks, until it ends.
    fn finish(mut self) -> Finished {
        self.write("go", "");
        let asks = |m: &ClientMessage| matches!(m, ClientMessage::ReqLock).then_some(());
        while self.client.until_or_gone(asks).is_some() {
            self.grants += 1;
            let room = vec![Amount { gpu: self.gpu, bytes: ROOM }];
            self.say(SchedulerMessage::LockOk { epoch: self.epoch(), quantum_ms: 60_000, room });
        }
        let finished = self.guest.finish();
        finished.passed();
        assert_eq!(finished.out, "ready\ncalled\ndone\n");
        finished
    }
}

#[test]
fn an_idle_program_takes_nothing_of_the_card_and_each_call_wakes_it() {
    for call in [
        "launch",
        "window",
        "linked",
        "event_query",
        "event_synchronize",
        "stream_query",
        "stream_synchronize",
        "context_synchronize",
        "memory_info",
        "alloc",
        "free",
        "set_current",
        "copy",
        "look_up",
        "proc_address",
        "load_nvml",
        "nvml_samples",
        "nvml_memory_info",
        "nvml_tables",
    ] {
        let arguments: &[&str] = if call.starts_with("nvml_") { &["first", "nvml", call] } else { &[call] };
        let mut sleeper = Sleeper::parked(arguments, &[]);
        if call == "launch" {
            let awake = sleeper.free();
            assert!(awake <= ALL - CONTEXT, "{awake} MiB are free beside a program that is awake");
        }
        assert_eq!(sleeper.sleep(), Answer::Asleep, "{call}");
        if call == "launch" {
            assert_eq!(sleeper.free(), ALL, "a program that sleeps takes nothing");
        }
        sleeper.write("go", "");
        sleeper.until_wanted();
        assert_eq!(sleeper.guest.out(), "ready\n", "{call} waits");
        sleeper.wake();
        sleeper.finish();
    }
}

/// The first call of a function finds it, or the loader has found it before.
#[test]
fn a_program_that_is_linked_to_the_driver_sleeps_and_its_calls_wake_it() {
    for before in ["linked", "bound"] {
        let mut sleeper = Sleeper::parked(&["first", before, "linked"], &[]);
        assert_eq!(sleeper.sleep(), Answer::Asleep, "{before}");
        sleeper.write("go", "");
        sleeper.until_wanted();
        assert_eq!(sleeper.guest.out(), "ready\n", "{before} waits");
        sleeper.wake();
        sleeper.finish();
    }
}

/// While others wait, its launches are marked by events, which nobody has asked about when it ends.
#[test]
fn a_thread_that_ends_while_it_is_asleep_calls_no_driver() {
    let mut sleeper = Sleeper::ready(&["first", "ends", "launch"], &[], true);
    sleeper.until(|m| matches!(m, ClientMessage::Idle { .. }).then_some(()));
    sleeper.evict();
    assert_eq!(sleeper.sleep(), Answer::Asleep);
    let lives = || sleeper.guest.threads("launches") > 0;
    assert!(lives(), "it waits");
    sleeper.write("end", "");
    wait_until("it has ended", || !lives() || !sleeper.guest.lives());
    sleeper.write("go", "");
    sleeper.until_wanted();
    sleeper.wake();
    sleeper.finish();
}

#[test]
fn threads_that_call_at_the_same_time_wake_it_once_and_it_sleeps_again() {
    let calls = ["launch", "copy", "event_query", "alloc", "memory_info", "stream_query", "set_current"];
    let mut sleeper = Sleeper::parked(&calls[2..], &[]);
    for _ in 0..3 {
        assert_eq!(sleeper.sleep(), Answer::Asleep);
        assert_eq!(sleeper.free(), ALL);
        sleeper.wake();
        assert!(sleeper.free() <= ALL - CONTEXT);
    }
    assert_eq!(sleeper.sleep(), Answer::Asleep);
    assert_eq!(sleeper.sleep(), Answer::Asleep, "a second order finds it asleep");
    sleeper.write("go", "");
    sleeper.until_wanted();
    sleeper.wake();
    sleeper.finish();
}

/// `CYCLES` in the environment asks for more of them.
#[test]
fn it_goes_and_comes_back_over_and_over_and_each_word_is_right() {
    let cycles = std::env::var("CYCLES").map_or(50, |cycles| cycles.parse().expect("a number"));
    let mut sleeper = Sleeper::idle(&["first", "cycles", "launch"], &[("NVSHARE_LOG", "warn")]);
    for cycle in 0..cycles {
        sleeper.leave();
        assert_eq!(sleeper.sleep(), Answer::Asleep, "{cycle}");
        sleeper.write("go", "");
        sleeper.until_wanted();
        sleeper.wake();
        sleeper.until(|m| matches!(m, ClientMessage::ReqLock).then_some(()));
        sleeper.grant();
        wait_until("it has computed", || std::fs::remove_file(sleeper.file("begin")).is_ok());
    }
    sleeper.write("end", "");
    sleeper.finish();
}

#[test]
fn what_needs_no_driver_is_answered_asleep() {
    let mut sleeper = Sleeper::parked(&["event_query"], &[]);
    assert_eq!(sleeper.sleep(), Answer::Asleep);
    sleeper.evict();
    sleeper.say(SchedulerMessage::AskCounters);
    sleeper.until(|m| matches!(m, ClientMessage::Counters(_)).then_some(()));
    sleeper.say(SchedulerMessage::HostShort { bytes: 1 << 30 });
    sleeper.say(SchedulerMessage::Limit(Amount { gpu: sleeper.gpu, bytes: 512 << 20 }));
    sleeper.until(|m| matches!(m, ClientMessage::Usage(Usage { limit: 0x2000_0000, .. })).then_some(()));
    assert_eq!(sleeper.free(), ALL);
    // A grant that crossed ASLEEP is void, and only WAKE brings it back.
    let (epoch, room) = (Epoch { boot: 1, counter: 99 }, vec![Amount { gpu: sleeper.gpu, bytes: ROOM }]);
    sleeper.say(SchedulerMessage::LockOk { epoch, quantum_ms: 60_000, room });
    sleeper.say(SchedulerMessage::SchedOff);
    sleeper.say(SchedulerMessage::AskCounters);
    sleeper.until(|m| matches!(m, ClientMessage::Counters(_)).then_some(()));
    assert_eq!(sleeper.free(), ALL);
    sleeper.wake();
    sleeper.finish();
}

#[test]
fn who_stays_says_why_and_goes_on() {
    let no_swap = "NVSHARE_MEMORY is not swap";
    let tables = "its program may call nvmlInternalGetExportTable past the library";
    type Case = (&'static [&'static str], &'static [(&'static str, &'static str)], Answer);
    let reached = || stays("others may reach its memory", false);
    let reaches = || stays("others reach its memory, or it reaches theirs", true);
    let pool = || stays("it has a pool of managed memory", true);
    let cases: [Case; 18] = [
        (&[], &[("NVSHARE_SLEEP", "0")], stays("NVSHARE_SLEEP is not 1", true)),
        (&[], &[("NVSHARE_MEMORY", "off")], stays(no_swap, true)),
        (&["first", "managed", "copy"], &[], stays("it has managed memory", false)),
        (&["first", "frees_in_order", "copy"], &[], pool()),
        (&["first", "makes_pool", "copy"], &[], pool()),
        (&["first", "finds_pool", "copy"], &[], pool()),
        (&["first", "finds_current_pool", "copy"], &[], pool()),
        (&["first", "describes", "copy"], &[], reached()),
        (&["first", "attributes", "copy"], &[], reached()),
        (&["first", "describes", "copy"], &[("NVSHARE_PLAIN", "all")], reaches()),
        (&["first", "imports", "copy"], &[], reaches()),
        (&["first", "captures", "copy"], &[], stays("a capture is open", false)),
        (
            &["first", "other_card", "copy"],
            &[("NVSIM_GPUS", "2")],
            stays("it has a context on a GPU that it does not use", false),
        ),
        (&["first", "spins", "copy"], &[], stays("its threads are busy", false)),
        (&["first", "calls", "copy"], &[], stays("it is at work", false)),
        (&["first", "bound_past", "copy"], &[], stays("its program is linked to cuEventQuery", true)),
        (
            &["first", "linked_to_nvml", "copy"],
            &[],
            stays("its program is linked to nvmlDeviceGetIndex", true),
        ),
        (&["first", "nvml_tables", "copy"], &[], stays(tables, true)),
    ];
    for (arguments, environment, answer) in cases {
        let mut sleeper = Sleeper::parked(arguments, environment);
        // The door is open again after each: no call waits, nor does the next order find it closed.
        for _ in 0..2 {
            let mut said = sleeper.sleep();
            // A thread that calls over and over may get no processor while it is looked at.
            while said == Answer::Asleep && arguments.contains(&"calls") {
                sleeper.until_wanted();
                sleeper.wake();
                said = sleeper.sleep();
            }
            assert_eq!(said, answer);
        }
        sleeper.finish();
    }
}

#[test]
fn a_call_that_is_under_way_keeps_the_process_on_the_card() {
    let mut sleeper = Sleeper::parked(&["first", "begins", "copy"], &[]);
    sleeper.write("held", "");
    sleeper.write("begin", "");
    wait_until("the call is in the driver", || sleeper.file("held.waits").exists());
    assert_eq!(sleeper.sleep(), stays("a call of it is under way", false));
    std::fs::remove_file(sleeper.file("held")).expect("the file");
    sleeper.finish();
}

#[test]
fn a_call_of_nvml_that_is_under_way_keeps_the_process_on_the_card() {
    let mut sleeper = Sleeper::parked(&["first", "nvml_waits", "copy"], &[]);
    sleeper.write("event", "");
    sleeper.write("begin", "");
    wait_until("the call is in NVML", || sleeper.file("event.waits").exists());
    assert_eq!(sleeper.sleep(), stays("a call of it is under way", false));
    std::fs::remove_file(sleeper.file("event")).expect("the file");
    wait_until("the call has ended", || sleeper.sleep() == Answer::Asleep);
    sleeper.wake();
    sleeper.finish();
}

#[test]
fn a_program_that_holds_the_lock_stays() {
    let mut sleeper = Sleeper::idle(&["copy"], &[]);
    assert_eq!(sleeper.sleep(), stays("it is at work", false));
    sleeper.finish();
}

#[test]
fn what_the_driver_refuses_is_undone() {
    for (step, code, answer) in [
        ("Lock", 600, stays("a call or work of it is under way", false)),
        ("Lock", 999, stays("the driver does not lock it: CUDA error 999", false)),
        ("Checkpoint", 801, stays("the driver does not take it off the card: CUDA error 801", true)),
        ("Checkpoint", 999, stays("the driver does not take it off the card: CUDA error 999", false)),
    ] {
        let mut sleeper = Sleeper::parked(&["copy", "event_query"], &[]);
        sleeper.write("lost", &format!("{code} 0 cuCheckpointProcess{step}"));
        assert_eq!(sleeper.sleep(), answer, "{step} {code}");
        std::fs::remove_file(sleeper.file("lost")).expect("the file");
        assert_eq!(sleeper.sleep(), Answer::Asleep, "the next order is obeyed");
        sleeper.wake();
        sleeper.finish();
    }
}

#[test]
fn a_way_back_that_fails_once_is_tried_again() {
    for step in ["Restore", "Unlock"] {
        let mut sleeper = Sleeper::parked(&["copy"], &[]);
        assert_eq!(sleeper.sleep(), Answer::Asleep);
        sleeper.write("lost", &format!("999 0 cuCheckpointProcess{step}"));
        sleeper.say(SchedulerMessage::Wake);
        wait_until("the first try fails", || sleeper.file("lost.met").exists());
        std::fs::remove_file(sleeper.file("lost")).expect("the file");
        sleeper.until(|m| matches!(m, ClientMessage::Awake { .. }).then_some(()));
        sleeper.finish();
    }
}

#[test]
fn a_process_that_cannot_come_back_gets_the_drivers_errors() {
    let mut sleeper = Sleeper::parked(&["event_query"], &[]);
    assert_eq!(sleeper.sleep(), Answer::Asleep);
    sleeper.write("lost", "2 0 cuCheckpointProcessRestore");
    sleeper.write("go", "");
    sleeper.until_wanted();
    sleeper.say(SchedulerMessage::Wake);
    let finished = sleeper.guest.finish();
    assert!(!finished.status.success(), "{finished:?}");
    assert!(finished.log.contains("it is lost: CUDA error 2"), "{}", finished.log);
}

/// Its calls would wait for a way back that there is no more.
#[test]
fn a_program_whose_card_is_lost_meanwhile_gets_the_cards_error() {
    for call in ["alloc", "event_query"] {
        let mut sleeper = Sleeper::parked(&[call], &[]);
        assert_eq!(sleeper.sleep(), Answer::Asleep);
        sleeper.write("lost", "214 0");
        sleeper.write("go", "");
        sleeper.until_wanted();
        sleeper.say(SchedulerMessage::Wake);
        let finished = sleeper.guest.finish();
        assert!(!finished.status.success(), "{finished:?}");
        assert!(finished.log.contains("it is lost: CUDA error 214"), "{}", finished.log);
        assert!(finished.log.contains(": 214\n"), "{call}: {}", finished.log);
    }
}

#[test]
fn a_scheduler_that_dies_leaves_it_asleep_until_a_call_waits() {
    let mut sleeper = Sleeper::parked(&["event_query"], &[]);
    assert_eq!(sleeper.sleep(), Answer::Asleep);
    let Sleeper { world, guest, client, listener, gpu, grants } = sleeper;
    drop(client);
    // Another one is told, and what waits.
    std::fs::write(world.dir().join("go"), "").expect("a file");
    let (client, usage) = PlayedScheduler::accept(&listener);
    assert_eq!(usage.first().map(|usage| usage.gpu), Some(gpu));
    let mut sleeper = Sleeper { world, guest, client, listener, gpu, grants };
    sleeper.until(|m| matches!(m, ClientMessage::Asleep).then_some(()));
    sleeper.until_wanted();
    // And with none that answers it wakes on its own.
    let Sleeper { world, guest, client, listener, .. } = sleeper;
    let begin = Instant::now();
    drop((client, listener));
    std::fs::remove_file(world.socket()).expect("the socket");
    let finished = guest.finish();
    finished.passed();
    assert!(begin.elapsed() >= Duration::from_secs(29), "a scheduler has a while to come back");
    assert_eq!(finished.out, "ready\ncalled\ndone\n");
}

#[test]
fn it_can_be_killed_and_exit_asleep() {
    for is_killed in [true, false] {
        let mut sleeper = Sleeper::parked(&["exit"], &[]);
        assert_eq!(sleeper.sleep(), Answer::Asleep);
        if is_killed {
            sleeper.guest.signal(libc::SIGKILL);
        } else {
            sleeper.write("go", "");
        }
        let wanted = |m: &ClientMessage| matches!(m, ClientMessage::WakeWanted).then_some(());
        assert_eq!(sleeper.client.until_or_gone(wanted), None, "nothing wakes it");
        let Sleeper { world, guest, .. } = sleeper;
        assert_eq!(guest.finish().status.success(), !is_killed);
        let asks = Program::guest(&world, "free_bytes", &[]).alone().start().finish();
        assert_eq!(asks.out.trim(), ALL.to_string());
    }
}

/// The copy takes five seconds, and the program ends meanwhile. The line is written when the driver has done it.
#[test]
fn the_end_of_the_program_waits_for_its_way_off_the_card() {
    let mut sleeper = Sleeper::parked(&["exit"], &[("NVSIM_COPY_OUT", "0.02"), ("NVSHARE_LOG", "debug")]);
    sleeper.say(SchedulerMessage::Sleep);
    // The simulator copies afterwards.
    wait_until("its memory is off the card", || sleeper.free() == ALL);
    sleeper.write("go", "");
    let finished = sleeper.guest.finish();
    finished.passed();
    assert!(finished.log.contains("s, its checkpoint "), "it was on its way: {}", finished.log);
}

#[test]
fn a_child_that_is_forked_asleep_waits_for_nothing() {
    let mut sleeper = Sleeper::parked(&["fork"], &[]);
    assert_eq!(sleeper.sleep(), Answer::Asleep);
    sleeper.write("go", "");
    // The launch that follows wakes the parent.
    sleeper.until_wanted();
    assert_eq!(sleeper.guest.out(), "ready\ncalled\n");
    sleeper.wake();
    sleeper.finish();
}
