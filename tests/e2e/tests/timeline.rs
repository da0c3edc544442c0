//! The phases of hand-overs: in the events, and in the trace that `nvshare-ctl timeline` draws of them.

use std::collections::BTreeSet;

use nvshare_harness::{Program, Running, Scheduler, World, wait_until};
use serde_json::Value;

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
const JOB: &str = "--memory 768MiB --block 64MiB --kernel-us 1000";

/// Phases in the order in which they come.
const IN_ORDER: [&str; 6] = ["drain", "look", "map", "copy", "unmap", "open"];

/// The phases of an event: they are in order, each takes time, and together they take no longer than the whole.
fn phases(event: &Value) -> Vec<&str> {
    let phases = event["phases"].as_array().expect("phases");
    let names: Vec<&str> = phases.iter().map(|phase| phase["phase"].as_str().expect("a name")).collect();
    let place = |name: &&str| IN_ORDER.iter().position(|known| known == name).expect("a known phase");
    assert!(names.iter().map(place).is_sorted_by(|one, next| one < next), "{event}");
    let times: Vec<u64> = phases.iter().map(|phase| phase["took_us"].as_u64().expect("a time")).collect();
    assert!(times.iter().all(|&time| time > 0), "{event}");
    assert!(times.iter().sum::<u64>() <= event["took_us"].as_u64().unwrap_or(0), "{event}");
    names
}

fn events(world: &World) -> Vec<Value> {
    let told = Scheduler::ctl(world, &["watch", "--json", "--no-follow"]);
    let lines = String::from_utf8(told.stdout).expect("text");
    lines.lines().map(|line| serde_json::from_str(line).expect("an event")).collect()
}

/// All that the phases of events of this kind are.
fn kinds<'a>(events: &'a [Value], event: &str) -> BTreeSet<Vec<&'a str>> {
    let of_kind = events.iter().filter(|told| told["event"] == event);
    of_kind.map(phases).filter(|phases| !phases.is_empty()).collect()
}

/// A span of a trace: its name, its client, its begin and its end.
type Span<'a> = (&'a str, u64, u64, u64);

/// The spans of a trace: those of states, and those of moves.
fn spans(trace: &Value) -> [Vec<Span<'_>>; 2] {
    let (mut states, mut moves, mut open) = (Vec::new(), Vec::new(), Vec::new());
    for event in trace["traceEvents"].as_array().expect("events") {
        let (name, client) =
            (event["name"].as_str().expect("a name"), event["tid"].as_u64().expect("a client"));
        let at = event["ts"].as_u64().unwrap_or(0);
        match event["ph"].as_str().expect("a phase") {
            "X" => states.push((name, client, at, at + event["dur"].as_u64().expect("a time"))),
            "b" => open.push((name, client, at)),
            "e" => {
                let (begun, of, from) = open.pop().expect("a span has begun");
                assert_eq!((begun, of), (name, client), "the span that began last ends first");
                moves.push((name, client, from, at));
            }
            _ => {}
        }
    }
    [states, moves]
}

/// All spans of this name are within one of the other name, and there are some.
fn assert_within(spans: &[Span<'_>], name: &str, whole: &str) {
    let parts: Vec<_> = spans.iter().filter(|span| span.0 == name).collect();
    assert!(!parts.is_empty(), "no {name}: {spans:?}");
    for part in parts {
        let has_it =
            |span: &Span<'_>| span.0 == whole && span.1 == part.1 && span.2 <= part.2 && part.3 <= span.3;
        assert!(spans.iter().any(has_it), "{part:?} is within no {whole}: {spans:?}");
    }
}

/// Two programs take turns until the events of each kind have had these phases. Returns all events and the trace.
fn hand_overs(memory: &str, expected: &[(&str, &[&str])]) -> (Vec<Value>, Value) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.2"]);
    let jobs =
        ["a", "b"].map(|name| Program::workload(&world, name, JOB).until_told().waits_for_go().start());
    Running::go(&[&jobs[0], &jobs[1]]);
    wait_until("hand-overs have their phases", || {
        let events = events(&world);
        expected.iter().all(|(event, phases)| kinds(&events, event).contains(*phases))
    });
    world.stop_intact(jobs);
    let file = world.dir().join("t.json");
    let drawn = Scheduler::ctl(&world, &["timeline", "--seconds", "1000", "-o", &file.to_string_lossy()]);
    assert!(drawn.status.success(), "{drawn:?}");
    let trace = std::fs::read_to_string(file).expect("a trace");
    (events(&world), serde_json::from_str(&trace).expect("JSON"))
}

#[test]
fn memory_that_the_library_maps_has_all_phases() {
    let (_, trace) = hand_overs(
        "swap",
        &[
            ("released", &["drain"]),
            ("evicted", &["look", "copy", "unmap"]),
            ("restored", &["map", "copy"]),
            ("running", &["open"]),
        ],
    );
    let [states, moves] = spans(&trace);
    assert_within(&states, "drain", "draining");
    assert_within(&states, "open", "restoring");
    for phase in ["look", "unmap"] {
        assert_within(&moves, phase, "moves out");
    }
    assert_within(&moves, "map", "moves in");
}

#[test]
fn managed_memory_is_drained_and_copied_and_has_no_other_phase() {
    let (events, trace) = hand_overs(
        "managed",
        &[("released", &["drain"]), ("evicted", &["copy"]), ("restored", &["copy"]), ("running", &["open"])],
    );
    for event in ["evicted", "restored"] {
        assert_eq!(kinds(&events, event), BTreeSet::from([vec!["copy"]]));
    }
    let names: BTreeSet<&str> = spans(&trace)[1].iter().map(|span| span.0).collect();
    assert_eq!(names, BTreeSet::from(["copy", "moves in", "moves out"]));
}
