//! Short work beside long work, where an administrator has said what switching may cost: how soon it is done, and that nobody
//! gains by looking interactive.

use std::time::Duration;

use nvshare_core::{AutoTarget, Config};
use proptest::prelude::*;

use crate::plan::{Plan, steady};
use crate::properties::{gangs_fit, plan, worlds};
use crate::world::{MS, World, config};

const ENDLESS: u64 = 10_000_000;

/// Switching may cost `percent` of the time, and work may wait for `max_wait` milliseconds.
pub(crate) fn auto(percent: u32, max_wait: u64) -> Config {
    let auto = AutoTarget { overhead_ppm: percent * 10_000, max_wait: MS(max_wait) };
    Config { auto: Some(auto), ..config(false) }
}

/// 100 ms of work, and a sleep of `sleeps` milliseconds.
fn burst(gib: u64, sleeps: u64) -> Plan {
    Plan { pause: sleeps, ..steady(gib, ENDLESS) }
}

#[test]
fn short_work_goes_ahead_of_long_work() {
    let plans = vec![steady(12, ENDLESS), steady(12, ENDLESS), burst(6, 10_000)];
    let mut world = World::new(plans, auto(10, 30_000), 7);
    // Its first spells tell what it is.
    world.run(MS(60_000));
    world.processes[2].program.longest_wait = Duration::ZERO;
    let before = [0, 1].map(|i| world.held(i));
    world.run(MS(360_000));
    // The restore of who has the turn, a drain, and its own restore, in this world; turns last for two seconds and more.
    let wait = world.processes[2].program.longest_wait;
    assert!(wait > Duration::ZERO && wait <= MS(400 + 60 + 400 + 10), "{wait:?}");
    for (i, before) in before.into_iter().enumerate() {
        assert!(world.held(i) - before >= MS(300_000) * 4 / 10, "client {i}: {:?}", world.held(i) - before);
    }
}

#[test]
fn with_a_fixed_quantum_everybody_waits_for_its_end() {
    let plans = vec![steady(12, ENDLESS), steady(12, ENDLESS), burst(6, 5000)];
    let mut world = World::new(plans, Config { quantum: MS(5000), ..config(false) }, 7);
    world.run(MS(120_000));
    let turns = world.core.gpu_status()[0].turns;
    assert!(turns <= 120 / 5 * 2, "{turns} turns");
}

#[test]
fn nobody_gets_more_by_looking_interactive() {
    for (sleeps, max_wait) in
        [(1, 30_000), (25, 30_000), (60, 2000), (100, 30_000), (100, 2000), (150, 30_000)]
    {
        let plans = vec![burst(12, sleeps), steady(12, ENDLESS), steady(12, ENDLESS)];
        let mut world = World::new(plans, auto(15, max_wait), 7);
        world.run(MS(200_000));
        let held = [0, 1, 2].map(|i| world.held(i).as_secs_f64());
        let part = held[0] / held.iter().sum::<f64>();
        println!("sleeps {sleeps} ms, waits of {max_wait} ms: {part:.3} of {held:?}");
        assert!(part <= 0.36, "sleeps for {sleeps} ms: {part} of {held:?}");
    }
}

/// Its share is a seventh of the time, its sleeps leave two fifths, and nearly all of that may be spent on switching.
#[test]
fn a_program_that_sleeps_to_look_short_gets_no_more_than_its_share() {
    let mut plans = vec![burst(12, 150)];
    plans.extend((0..6).map(|_| steady(12, ENDLESS)));
    let (max_wait, seconds) = (30_000, 300);
    let mut world = World::new(plans, auto(90, max_wait), 7);
    world.run(MS(seconds * 1000));
    let held: Vec<f64> = (0..7).map(|i| world.held(i).as_secs_f64()).collect();
    let part = held[0] / held.iter().sum::<f64>();
    println!("{part:.3} of {held:?}");
    // It may be this far ahead of its share: see `most_ahead`.
    let lead = max_wait as f64 / 1000.0 / 7.0 / seconds as f64;
    assert!(part <= 1.0 / 7.0 + lead, "{part} of {held:?}");
}

/// Each visit costs its own job the hand-over to it, also where the turn of the long job is over.
#[test]
fn a_crowd_of_short_work_starves_no_long_work() {
    for seed in (1..20).step_by(2) {
        let mut plans = vec![steady(12, ENDLESS)];
        plans.extend((0..6).map(|n| Plan { starts_at: n * 70, ..burst(6, 150) }));
        let mut world = World::new(plans, auto(30, 30_000), seed);
        // Its first spells tell what each of them is.
        world.run(MS(60_000));
        world.processes[0].program.longest_wait = Duration::ZERO;
        world.run(MS(260_000));
        let served: Vec<f64> =
            world.processes.iter().map(|process| process.program.served.as_secs_f64()).collect();
        let part = served[0] / served.iter().sum::<f64>();
        let wait = world.processes[0].program.longest_wait;
        println!("seed {seed}: {part:.3} of {served:?}, longest wait {wait:?}");
        assert!(part >= 0.95 / 7.0, "seed {seed}: {part} of {served:?}");
        assert!(wait <= MS(30_000), "seed {seed}: {wait:?}");
    }
}

proptest! {
    #![proptest_config(worlds())]

    #[test]
    fn nobody_starves_where_short_work_goes_ahead(
        mut plans in prop::collection::vec(plan(), 1..7),
        sleeps in prop::collection::vec(prop::option::weighted(0.5, 100..2000u64), 7),
        percent in 1..=50u32,
        max_wait in prop_oneof![Just(400u64), Just(30_000)],
        seed in any::<u64>(),
    ) {
        for (plan, sleeps) in plans.iter_mut().zip(sleeps) {
            plan.pause = sleeps.unwrap_or(plan.pause);
        }
        gangs_fit(&mut plans, false);
        // Where nobody may wait for longer than 400 ms, a turn may be as short as 20 ms, beside a hand-over of up to 400 ms.
        let times = if max_wait == 400 { (20 + 400) / 20 } else { 6 };
        World::new(plans, auto(percent, max_wait), seed).serves_everybody_within(times);
    }
}
