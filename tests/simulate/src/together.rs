//! The throughput of sets of jobs that fit a card: side by side, and when the scheduler measures whether turns are better:
//! `--together`.

use std::time::Duration;

use nvshare_core::{Config, Time, Together};

use crate::card::Link;
use crate::policies::Ours;
use crate::trace::{self, Job};
use crate::world::{Outcome, World};

/// Sets of jobs, as lines of a trace.
pub(crate) const SETS: [(&str, &[&str]); 13] = [
    ("two that fill the card", &["steady 0 0 20 1e12 0 0"; 2]),
    ("three", &["steady 0 0 20 1e12 0 0"; 3]),
    ("two in steps of 12 ms", &["steady 0 0 20 12 0 0"; 2]),
    ("two with launches that vary", &["steady 0 0 20 200..800 0 0 launches=8..12"; 2]),
    ("two with gaps of 12 ms", &["training 0 0 20 10..14 10..14 0"; 2]),
    ("two with gaps of 1 ms", &["training 0 0 20 10..14 1..1.2 0"; 2]),
    ("two with gaps of 0.2 ms", &["training 0 0 20 10..14 0.15..0.25 0"; 2]),
    ("three with gaps of 6 ms", &["training 0 0 20 10..14 5..7 0"; 3]),
    ("one that fills it, one with gaps", &["steady 0 0 20 1e12 0 0", "training 0 0 20 10..14 10..14 0"]),
    ("one that fills it, short requests", &["steady 0 0 20 1e12 0 0", "inference 0 0 20 5..40 ~300 0"]),
    (
        "two that fill it, short requests",
        &["steady 0 0 20 1e12 0 0", "steady 0 0 20 1e12 0 0", "inference 0 0 20 5..40 ~300 0"],
    ),
    ("two in phases of 30 s", &["training 0 0 20 10..14 0 0 phase=30:10..14:10..14"; 2]),
    ("two in phases of 0.5 s", &["training 0 0 20 10..14 0 0 phase=0.5:10..14:10..14"; 2]),
];

/// Bytes of the card.
const CARD: u64 = 80 << 30;

/// The outcome for a set after this time.
pub(crate) fn run(lines: &[&str], together: Together, seed: u64, until: Time) -> Outcome {
    let trace: Vec<Job> = trace::parse(&lines.join("\n"), 1).unwrap_or_default();
    let ours = Box::new(Ours::new(Config { together, ..Config::default() }, CARD, Link::MANAGED.memory()));
    World::new(&trace, ours, 1, CARD, Link::MANAGED, seed).run(until)
}

/// The work that all clients did, in seconds.
pub(crate) fn done(outcome: &Outcome) -> f64 {
    outcome.clients.iter().map(|client| client.seen.done_ms).sum::<f64>() / 1000.0
}

/// One line for each set: the work done by the end of each of these times, against running side by side always.
pub(crate) fn print(seed: u64) {
    const SECONDS: [u64; 5] = [10, 30, 60, 300, 3600];
    println!(
        "{:<36} done side by side {}",
        "jobs",
        SECONDS.map(|s| format!("{:>9}", format!("{s} s"))).concat()
    );
    for (name, lines) in SETS {
        let side_by_side = |seconds| done(&run(lines, Together::Always, seed, Duration::from_secs(seconds)));
        let measured = |seconds| done(&run(lines, Together::Measure, seed, Duration::from_secs(seconds)));
        let gains = SECONDS.map(|s| format!("{:>+8.2}%", (measured(s) / side_by_side(s) - 1.0) * 100.0));
        println!("{name:<36} {:>15.1} % {}", side_by_side(60) / 0.6, gains.concat());
    }
}
