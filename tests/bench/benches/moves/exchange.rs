//! Hand-overs in which all memory of one program leaves and all of another one's comes: both at once, and one after the other.
//!
//! Two programs and the real scheduler, on a simulated card whose link takes 8 GB/s each way. How long the card stands still is by
//! the scheduler's events: from the end of one program's work until the other one's gate is open. Runs with and without the exchange
//! alternate, and a ratio is of two that follow each other.

use nvshare_harness::{Program, Running, Scheduler, World};
use nvshare_proto::units::MIB;
use serde_json::Value;

/// Programs: their memory, and the arguments that make it so.
struct Case {
    name: &'static str,
    mib: u64,
    arguments: &'static str,
}

const CASES: [Case; 4] = [
    Case { name: "all changed", mib: 1280, arguments: "--block 64MiB --kernel-us 200" },
    Case { name: "90 % unchanged", mib: 1280, arguments: "--block 64MiB --kernel-us 200 --still 18" },
    Case { name: "90 % zeros", mib: 1280, arguments: "--block 64MiB --kernel-us 200 --zeros 18" },
    // The simulated driver keeps all bytes of memory of 2 MiB, so there is less of it.
    Case { name: "256 of 2 MiB", mib: 512, arguments: "--block 2MiB --kernel-us 1" },
];

/// In the first hand-overs the host's memory is made, and nothing is there that has not changed.
const FIRST: usize = 4;

/// One hand-over.
struct HandOver {
    /// Milliseconds that the card stood still.
    stands_ms: f64,
    /// Milliseconds from the grant until the gate was open.
    restore_ms: f64,
    /// Bytes that came back.
    back: u64,
}

/// The hand-overs that the scheduler has told of.
fn hand_overs(world: &World) -> Vec<HandOver> {
    let out = Scheduler::ctl(world, &["watch", "--json", "--kept", "--no-follow"]);
    assert!(out.status.success(), "{out:?}");
    let number = |event: &Value, name: &str| event[name].as_u64().unwrap_or_default();
    let (mut found, mut drained) = (Vec::new(), None);
    for line in String::from_utf8_lossy(&out.stdout).lines() {
        let event: Value = serde_json::from_str(line).expect("events are JSON");
        match event["event"].as_str().unwrap_or_default() {
            "released" | "idle" => drained = Some((number(&event, "up_us"), number(&event, "client"))),
            "running" => {
                let since = drained.take_if(|(_, client)| *client != number(&event, "client"));
                if let (Some((since, _)), back @ 1..) = (since, number(&event, "bytes")) {
                    found.push(HandOver {
                        stands_ms: (number(&event, "up_us") - since) as f64 / 1e3,
                        restore_ms: number(&event, "took_us") as f64 / 1e3,
                        back,
                    });
                }
            }
            _ => {}
        }
    }
    found
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The figures of one run.
struct Seen {
    stands_ms: f64,
    restore_ms: f64,
    back_mib: f64,
    hand_overs: usize,
}

fn run(case: &Case, exchange: &str, turns: u64) -> Seen {
    let size = format!("{}MiB", case.mib + 64);
    let world = World::with_memory(
        "swap",
        &[("NVSIM_MEMORY", &size), ("NVSIM_SCALE", "64"), ("NVSIM_TO_DEVICE", "8"), ("NVSIM_COPY_OUT", "8")],
    );
    let arguments = ["--gpu-memory", &size, "--tq", "0.2", "--exchange", exchange];
    let _scheduler = Scheduler::start(&world, &arguments);
    let jobs = ["a", "b"].map(|name| {
        let line = format!("--memory {}MiB {}", case.mib, case.arguments);
        Program::workload(&world, name, &line).until_told().until_woken().waits_for_go().start()
    });
    Running::go(&[&jobs[0], &jobs[1]]);
    Scheduler::until_turns(&world, &[&jobs[0], &jobs[1]], turns);
    let seen: Vec<HandOver> = hand_overs(&world).into_iter().skip(FIRST).collect();
    world.stop();
    for job in jobs {
        job.finish().intact();
    }
    let of = |which: fn(&HandOver) -> f64| median(seen.iter().map(which).collect());
    Seen {
        stands_ms: of(|h| h.stands_ms),
        restore_ms: of(|h| h.restore_ms),
        back_mib: of(|h| h.back as f64 / MIB as f64),
        hand_overs: seen.len(),
    }
}

/// Prints the table. Each case takes `pairs` pairs of runs, each of `turns` turns of each program.
pub(crate) fn print(pairs: usize, turns: u64) {
    println!(
        "\n{:<15} {:>9} {:>10} {:>13} {:>23} {:>15} {:>14} {:>10}",
        "both ways",
        "MiB back",
        "at once ms",
        "one by one ms",
        "of one by one (min, max)",
        "of the restore",
        "of all changed",
        "hand-overs"
    );
    let mut of_all_changed = None;
    for case in &CASES {
        let all: Vec<(Seen, Seen)> =
            (0..pairs).map(|_| (run(case, "swap", turns), run(case, "nobody", turns))).collect();
        let ratio = |which: fn(&(Seen, Seen)) -> f64| {
            let mut ratios: Vec<f64> = all.iter().map(which).collect();
            ratios.sort_by(f64::total_cmp);
            (median(ratios.clone()), ratios[0], ratios[ratios.len() - 1])
        };
        let middle = |which: fn(&(Seen, Seen)) -> f64| median(all.iter().map(which).collect());
        let (of_both, least, most) = ratio(|(at_once, one)| at_once.stands_ms / one.stands_ms);
        let (of_restore, ..) = ratio(|(at_once, one)| at_once.stands_ms / one.restore_ms);
        // Per byte, since what fits beside the other program stays.
        let per_mib = middle(|(at_once, _)| at_once.stands_ms / at_once.back_mib);
        let all_changed = *of_all_changed.get_or_insert(per_mib);
        println!(
            "{:<15} {:>9.0} {:>10.1} {:>13.1} {:>24} {:>15.2} {:>14.2} {:>10}",
            case.name,
            middle(|(at_once, _)| at_once.back_mib),
            middle(|(at_once, _)| at_once.stands_ms),
            middle(|(_, one)| one.stands_ms),
            format!("{of_both:.2} ({least:.2}, {most:.2})"),
            of_restore,
            per_mib / all_changed,
            all.iter().map(|(at_once, one)| at_once.hand_overs + one.hand_overs).sum::<usize>()
        );
    }
}
