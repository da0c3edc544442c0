//! Makes the program of a finding smaller while the finding stays.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::RunOptions;
use crate::caps::SLEEP;
use crate::rng::Rng;

use super::chaos;
use super::parts::Parts;
use super::trial::{self, Finding, Running};
use super::world::World;

/// The conditions under which a program had its finding.
#[derive(Debug, Clone)]
pub(crate) struct Conditions {
    pub(crate) parts: Parts,
    pub(crate) capacity: u64,
    pub(crate) mixed: bool,
    pub(crate) caps: String,
    pub(crate) jobs: usize,
    pub(crate) chaos: bool,
    pub(crate) patience: Duration,
}

/// A smaller program with the same kind of finding, and that finding; `None`: the program did not show it again in time.
pub(crate) fn shrink(
    conditions: &Conditions,
    options: &RunOptions,
    kind: &str,
    limit: Duration,
) -> Option<(RunOptions, Finding)> {
    let deadline = Instant::now() + limit;
    let mut best = options.clone();
    let mut found = again(conditions, &best, kind, 12, deadline)?;
    let attempt = |candidate: RunOptions, best: &mut RunOptions, found: &mut Finding| {
        if let Some(finding) = again(conditions, &candidate, kind, 4, deadline) {
            *best = candidate;
            *found = finding;
            return true;
        }
        false
    };
    // Fewer choices: the first ones have the same effect in a shorter program.
    while best.steps > 1 {
        let shorter = [best.steps / 2, best.steps * 3 / 4, best.steps - 1];
        let before = best.clone();
        if !shorter.into_iter().any(|steps| {
            steps < before.steps && attempt(RunOptions { steps, ..before.clone() }, &mut best, &mut found)
        }) {
            break;
        }
    }
    for threads in [1, 2, 3, 4, 6] {
        if attempt(RunOptions { threads, ..best.clone() }, &mut best, &mut found) {
            break;
        }
    }
    // Choices in the middle, in ever smaller pieces.
    let mut piece = best.steps / 2;
    while piece > 0 && Instant::now() < deadline {
        let mut at = 0;
        while at < best.steps && Instant::now() < deadline {
            let mut candidate = best.clone();
            candidate
                .skip
                .extend((at..(at + piece).min(best.steps)).filter(|pick| !best.skip.contains(pick)));
            if candidate.skip.len() > best.skip.len() {
                attempt(candidate, &mut best, &mut found);
            }
            at += piece;
        }
        piece /= 2;
    }
    best.skip.sort_unstable();
    Some((best, found))
}

/// Runs a program several times, some at once in a world of their own, until it shows a kind of finding.
fn again(
    conditions: &Conditions,
    options: &RunOptions,
    kind: &str,
    rounds: usize,
    deadline: Instant,
) -> Option<Finding> {
    let world = World::new(&conditions.parts, "shrink", conditions.capacity, conditions.mixed).ok()?;
    let mut rng = Rng::part(options.seed, 7);
    world.start_scheduler(chaos::quantum(&mut rng)).ok()?;
    let (running, stop) = (Running::default(), AtomicBool::new(false));
    let mut neighbour = super::start_neighbour(&world, conditions.capacity, options.seed).ok()?;
    let neighbour_pid = neighbour.id();
    let found = std::thread::scope(|scope| {
        scope.spawn(|| {
            let sleeps = conditions.caps.split(',').any(|cap| cap == SLEEP);
            chaos::disturb(&world, &running, neighbour_pid, &stop, options.seed, conditions.chaos, sleeps)
        });
        let mut found = None;
        for round in 0..rounds {
            if found.is_some() || Instant::now() > deadline || super::INTERRUPTED.load(Ordering::SeqCst) {
                break;
            }
            let trials: Vec<_> = (0..conditions.jobs)
                .map(|job| {
                    let (world, running) = (&world, &running);
                    scope.spawn(move || {
                        let log = world.dir.join(format!("shrink-{round}-{job}.log"));
                        let command = trial::under(world, options, &conditions.caps, "info");
                        trial::trial(command, options, &log, conditions.patience, running, Some(world))
                    })
                })
                .collect();
            for trial in trials {
                if let Ok(Err(finding)) = trial.join()
                    && finding.kind == kind
                {
                    found = Some(finding);
                }
            }
        }
        stop.store(true, Ordering::SeqCst);
        found
    });
    let _ = neighbour.kill();
    let _ = neighbour.wait();
    found
}
