//! A hand-over with nothing to move, part by part: two programs that fit together take turns, with either kind of memory.
//!
//! The parts follow from the scheduler's events and from the phases that the library tells. Times of a simulated driver say nothing of a
//! card. They show the way of messages through threads and sockets, before and after a change.
//!
//! `cargo bench -p nvshare-bench --bench hand_over`

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use nvshare_harness::{Program, Running, Scheduler, World, guest};
use serde_json::Value;

/// The parts of a hand-over, in their order.
const PARTS: [&str; 6] =
    ["to the drain", "drain", "release to grant", "to the gate", "gate opens", "GPU free"];

/// Times of each part, in microseconds.
type Times = BTreeMap<&'static str, Vec<u64>>;

/// A number of an event.
fn number(event: &Value, name: &str) -> u64 {
    event[name].as_u64().unwrap_or_default()
}

/// The time of a phase that was told with an event.
fn phase(event: &Value, name: &str) -> u64 {
    let phases = event["phases"].as_array().map_or(&[][..], Vec::as_slice);
    phases.iter().filter(|phase| phase["phase"] == name).map(|phase| number(phase, "took_us")).sum()
}

/// The times of hand-overs, from the events that the scheduler keeps. A hand-over that another event interrupts is left out.
fn times(world: &World) -> Times {
    let told = Scheduler::ctl(world, &["watch", "--json", "--no-follow"]);
    let lines = String::from_utf8(told.stdout).expect("events are text");
    let events: Vec<Value> = lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let is = |event: &Value, kinds: &[&str]| kinds.iter().any(|kind| event["event"] == *kind);
    let mut steps = events.iter().filter(|event| is(event, &["released", "granted", "running"])).peekable();
    let mut times = Times::new();
    while let Some(released) = steps.next() {
        if !is(released, &["released"]) || released["took_us"].is_null() {
            continue;
        }
        let Some(granted) = steps.next_if(|event| is(event, &["granted"])) else { continue };
        let Some(running) = steps.next_if(|event| is(event, &["running"])) else { continue };
        let at = |event: &Value| number(event, "up_us");
        let (drain, opens) = (phase(released, "drain"), phase(running, "open"));
        let took = [
            number(released, "took_us").saturating_sub(drain),
            drain,
            at(granted).saturating_sub(at(released)),
            number(running, "took_us").saturating_sub(opens),
            opens,
            at(running).saturating_sub(at(released)),
        ];
        PARTS.into_iter().zip(took).for_each(|(part, took)| times.entry(part).or_default().push(took));
    }
    times
}

fn case(memory: &str, time: Duration) {
    let world = World::simulated(&[]);
    let arguments = ["--exclusive", "--tq", "0.02", "--gpu-memory", "8GiB", "--log", "info"];
    let _scheduler = Scheduler::start(&world, &arguments);
    let start = |name: &str| {
        let mut command = Command::new(guest("host_share", false));
        command.arg("waits");
        let program = Program::of(&world, name, command).preloaded();
        program.env("NVSHARE_LOG", "warn").env("NVSHARE_MEMORY", memory).start()
    };
    let programs = ["a", "b"].map(start);
    Scheduler::until_turns(&world, &programs.each_ref().map(|program: &Running| program), 5);
    std::thread::sleep(time);
    let mut times = times(&world);
    let count = times.values().map(Vec::len).max().unwrap_or_default();
    println!("{memory}: {count} hand-overs");
    for part in PARTS {
        let took = times.entry(part).or_default();
        took.sort_unstable();
        let at = |percent: usize| took.get(took.len() * percent / 100).copied().unwrap_or_default();
        let longest = took.last().copied().unwrap_or_default();
        println!("  {part:<18} {:>8} {:>8} {:>8} {longest:>8}", at(50), at(90), at(99));
    }
}

fn main() {
    // Under `--test` it only has to run. The name of a case chooses it.
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let tests = arguments.iter().any(|argument| argument == "--test");
    let time = if tests { Duration::from_millis(500) } else { Duration::from_secs(20) };
    println!("  {:<18} {:>8} {:>8} {:>8} {:>8}", "microseconds", "median", "p90", "p99", "longest");
    for memory in ["managed", "swap"] {
        if arguments.iter().all(|argument| argument.starts_with('-') || argument == memory) {
            case(memory, time);
        }
    }
}
