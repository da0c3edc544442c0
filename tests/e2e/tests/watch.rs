//! `nvshare-ctl watch`: events are told in their order, and a scheduler that goes away is joined again.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use nvshare_harness::{Artifacts, Program, Running, Scheduler, World};
use nvshare_proto::ClientState;

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
const JOB: &str = "--memory 768MiB --block 64MiB --kernel-us 1000";
const PATIENCE: Duration = Duration::from_secs(300);

/// `nvshare-ctl watch`, until it is dropped.
struct Watcher {
    child: Child,
    lines: Receiver<serde_json::Value>,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Watcher {
    fn start(world: &World) -> Self {
        let mut child = Command::new(&Artifacts::get().ctl)
            .args(["watch", "--json", "--kept"])
            .env("NVSHARE_ADMIN_SOCKET", world.admin_socket())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it runs");
        let out = child.stdout.take().expect("a pipe");
        let (told, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                let line = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
                if told.send(line).is_err() {
                    return;
                }
            }
        });
        Self { child, lines }
    }

    /// Waits for an event, of a process if one is named. Returns the event, and all events before it.
    fn until(&self, event: &str, pid: Option<u32>) -> Vec<serde_json::Value> {
        self.until_one_of(&[event], pid)
    }

    fn until_one_of(&self, events: &[&str], pid: Option<u32>) -> Vec<serde_json::Value> {
        let mut seen = Vec::new();
        loop {
            let line =
                self.lines.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no {events:?}: {seen:?}"));
            seen.push(line);
            let last = &seen[seen.len() - 1];
            if events.iter().any(|event| last["event"] == *event) && pid.is_none_or(|pid| last["pid"] == pid)
            {
                return seen;
            }
        }
    }
}

fn names(lines: &[serde_json::Value]) -> Vec<&str> {
    lines.iter().filter_map(|line| line["event"].as_str()).collect()
}

/// Whether a process has been told of as one that waits, runs, is asked for the lock and gives it back, and whose memory then leaves.
fn has_turn(lines: &[serde_json::Value], pid: u32) -> bool {
    let mut told = lines.iter().filter(|line| line["pid"] == pid).filter_map(|line| line["event"].as_str());
    ["waiting", "granted", "running", "drop", "released", "evict", "evicted"]
        .iter()
        .all(|event| told.any(|told| told == *event))
}

#[test]
fn events_are_told_in_their_order_with_sizes_and_times() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.2"]);
    let watcher = Watcher::start(&world);
    assert_eq!(names(&watcher.until("started", None)), ["started"]);
    let jobs =
        ["a", "b"].map(|name| Program::workload(&world, name, JOB).until_told().waits_for_go().start());
    Running::go(&[&jobs[0], &jobs[1]]);
    let [first, second] = [jobs[0].pid(), jobs[1].pid()];
    // A busy machine may have a program look idle, and then it gives the lock back without being asked.
    let mut lines = Vec::new();
    while !(has_turn(&lines, first) && has_turn(&lines, second)) {
        lines.extend(watcher.until("evicted", None));
    }
    world.stop_intact(jobs);
    // A process may outlive its connection for a moment.
    lines.extend(watcher.until_one_of(&["gone", "ended"], None));
    lines.extend(watcher.until_one_of(&["gone", "ended"], None));
    let numbers: Vec<u64> = lines.iter().filter_map(|line| line["seq"].as_u64()).collect();
    assert!(numbers.is_sorted_by(|a, b| a + 1 == *b), "no event is left out: {numbers:?}");
    let of = |pid: u32| lines.iter().filter(move |line| line["pid"] == pid);
    for pid in [first, second] {
        assert_eq!(of(pid).next().expect("an event")["event"], "registered");
        let last = &of(pid).next_back().expect("an event")["event"];
        assert!(last == "gone" || last == "ended", "{last}");
    }
    let evicted = lines.iter().filter(|line| line["event"] == "evicted");
    let evicted = evicted.max_by_key(|line| line["bytes"].as_u64()).expect("an eviction");
    assert!(evicted["bytes"].as_u64() >= Some(256 << 20), "{evicted}");
    assert!(evicted["took_us"].as_u64() > Some(0), "{evicted}");
    assert_eq!(evicted["gpus"][0], "GPU-51600000-0000-4000-8000-000000000000");
    let restored = |line: &&serde_json::Value| line["event"] == "running" && line["bytes"].as_u64() > Some(0);
    assert!(lines.iter().any(|line| restored(&line)), "{lines:?}");
}

#[test]
fn a_scheduler_that_goes_away_is_joined_again() {
    let world = World::simulated(CARD);
    let scheduler = Scheduler::start(&world, &["--tq", "7"]);
    let watcher = Watcher::start(&world);
    watcher.until("started", None);
    assert!(Scheduler::ctl(&world, &["set-tq", "5"]).status.success());
    assert_eq!(watcher.until("quantum", None)[0]["took_us"], 5_000_000);
    scheduler.kill();
    let lost = watcher.until("lost", None);
    assert!(lost[0]["why"].as_str().is_some_and(|why| why.contains("admin.sock")), "{lost:?}");
    let _scheduler = Scheduler::start(&world, &[]);
    assert_eq!(names(&watcher.until("started", None)), ["joined", "started"]);
    assert!(Scheduler::ctl(&world, &["off"]).status.success());
    assert_eq!(names(&watcher.until("off", None)), ["off"]);
}

/// Microseconds since 1970.
fn now_us() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock");
    now.as_micros() as u64
}

/// A client is killed at this event of its own, in the middle of hand-overs, and the other one runs on. The scheduler gives no client up
/// that is silent, so it knows by the end of the connection.
fn dies_at(moment: &str, slow: (&str, &str)) {
    let world = World::with_memory("swap", &[CARD, &[slow]].concat());
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1", "--grace", "3600"]);
    let watcher = Watcher::start(&world);
    let [one, other] =
        ["a", "b"].map(|name| Program::workload(&world, name, JOB).until_told().waits_for_go().start());
    Running::go(&[&one, &other]);
    Scheduler::until_turns(&world, &[&one, &other], 2);
    let time = |event: &serde_json::Value| event["time_us"].as_u64().expect("a time");
    let until_after = |begin: u64, events: &[&str], pid| loop {
        let at = time(watcher.until_one_of(events, Some(pid)).last().expect("an event"));
        if at >= begin {
            return at;
        }
    };
    until_after(now_us(), &[moment], one.pid());
    let killed = now_us();
    one.signal(libc::SIGKILL);
    until_after(killed, &["gone", "left"], one.pid());
    Scheduler::until(&world, "the other one runs with all of its memory", |status| {
        let client = status.client(other.pid());
        client.state == ClientState::Running && client.usage.iter().all(|usage| usage.absent == 0)
    });
    world.stop_intact([other]);
}

#[test]
fn who_is_killed_in_the_middle_of_an_exchange_has_no_lock_when_its_connection_ends() {
    for (moment, slow) in [
        ("running", ("NVSIM_TO_HOST", "6")),
        ("evict", ("NVSIM_COPY_OUT", "2")),
        ("granted", ("NVSIM_TO_DEVICE", "2")),
    ] {
        dies_at(moment, slow);
    }
}
