//! Clients that say what is not so, or do what serves no work, to get more of a GPU than their share.

use std::time::Duration;

use nvshare_core::{AutoTarget, Config};
use nvshare_proto::{ComputeLimit, Enforcement, Priority, Wishes};

use super::honest::Honest;
use super::world::World;
use crate::table::{MS, config, gpu};

/// A third is its share: two honest ones have work all the time.
const MAX_GAIN: f64 = 0.36;
/// With its restores.
const MAX_TAKEN: f64 = 0.38;

fn cheats() -> Vec<(&'static str, Honest)> {
    let honest = Honest::new(0, 12);
    let asked = |weight, percent| Wishes {
        weight: Some(weight),
        priority: Some(Priority::High),
        enforcement: Enforcement::Default,
        compute: vec![ComputeLimit { gpu: gpu(0), percent }],
        gang: None,
    };
    vec![
        ("says that it is idle every 5 ms, and goes on", Honest { works: 5, ..honest.clone() }),
        ("says so every 400 ms", Honest { works: 400, ..honest.clone() }),
        ("gives back and asks again every 5 ms", Honest { gives_back: 5, ..honest.clone() }),
        ("gives back and asks again every 100 ms", Honest { gives_back: 100, ..honest.clone() }),
        ("sleeps for 25 ms to look interactive", Honest { works: 25, pauses: 25, ..honest.clone() }),
        ("sleeps for as long as it works", Honest { works: 200, pauses: 200, ..honest.clone() }),
        ("ends and comes again all the time", Honest { ends_after: Some((50, 0)), ..honest.clone() }),
        (
            "asks for the largest weight that there is",
            Honest { asked: asked(u32::MAX, 255), ..honest.clone() },
        ),
        ("asks for a weight and a limit of nothing", Honest { asked: asked(0, 0), ..honest }),
    ]
}

fn nobody_gains(rule: &str, config: &Config) {
    for (what, cheat) in cheats() {
        let mut world = World::new(config.clone());
        let cheat = world.add(0, cheat);
        let honest = [7, 13].map(|at| world.add(at, Honest::new(0, 12)));
        world.run(Duration::from_secs(120), |_| {});
        let roles = [cheat, honest[0], honest[1]];
        let [got, first, second] = roles.map(|role| world.computed(role).as_secs_f64());
        let part = got / (got + first + second);
        let held = roles.map(|role| world.held(role).as_secs_f64());
        let taken = held[0] / held.iter().sum::<f64>();
        println!(
            "{rule}, {what}: {part:.3} of the time, {taken:.3} with restores; {got:.1}, {first:.1} and {second:.1} s"
        );
        assert!(part <= MAX_GAIN, "{rule}, {what}: {part} of the time");
        // The cost of its many switches. They are charged to it as far as they take longer than its work.
        assert!(taken <= MAX_TAKEN, "{rule}, {what}: {taken} of the time");
        // It costs the others nothing either: between them they have what is left.
        assert!((first / second - 1.0).abs() <= 0.1, "{rule}, {what}: {first} and {second} s");
    }
}

#[test]
fn nobody_gains_by_cheating_under_a_fixed_quantum() {
    nobody_gains("a quantum of 500 ms", &Config { quantum: MS(500), ..config(false) });
}

#[test]
fn nobody_gains_by_cheating_where_short_work_goes_ahead() {
    let auto = Some(AutoTarget { overhead_ppm: 150_000, max_wait: MS(10_000) });
    nobody_gains("auto", &Config { auto, ..config(false) });
}
