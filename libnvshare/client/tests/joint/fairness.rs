//! How much of a GPU each program gets, over minutes.

use std::time::Duration;

use nvshare_core::Config;

use crate::plan::{Plan, steady};
use crate::world::{MS, World, config, gpu};

const ENDLESS: u64 = 10_000_000;

fn quantum(ms: u64) -> Config {
    Config { quantum: MS(ms), ..config(false) }
}

/// `programs` programs, one after the other, as a shell starts them.
fn shell(plans: &mut Vec<Plan>, programs: usize, first: Plan) {
    let at = plans.len();
    for i in 0..programs {
        let after = (i > 0).then(|| at + i - 1);
        plans.push(Plan { exits: true, after, ..first.clone() });
    }
}

#[test]
fn a_stream_of_newcomers_does_not_starve_the_old() {
    let mut plans = vec![steady(12, ENDLESS), steady(12, ENDLESS)];
    for _ in 0..3 {
        shell(&mut plans, 120, steady(12, 5000));
    }
    let mut world = World::new(plans, quantum(8000), 7);
    world.run(MS(1_800_000));
    for old in [0, 1] {
        // Five want the GPU at any time.
        assert!(world.held(old) >= MS(1_800_000) / 5 * 8 / 10, "client {old}: {:?}", world.held(old));
    }
}

#[test]
fn a_gang_is_not_starved_by_jobs_that_come_in_turns() {
    let gang = Plan { gpus: vec![gpu(0), gpu(1)], ..steady(12, ENDLESS) };
    let mut plans = vec![gang];
    shell(&mut plans, 120, steady(12, 1000));
    shell(&mut plans, 120, Plan { gpus: vec![gpu(1)], starts_at: 500, ..steady(12, 1000) });
    let mut world = World::new(plans, quantum(1000), 7);
    world.run(MS(117_000));
    assert!(world.held(0) >= MS(117_000) / 4, "{:?}", world.held(0));
}

#[test]
fn a_client_that_always_defers_and_a_big_waiter_starve_nobody() {
    let deferring = Plan { defers_every: Some(1), ..steady(4, ENDLESS) };
    let big = Plan { starts_at: 300, ..steady(14, ENDLESS) };
    let third = Plan { starts_at: 600, ..steady(12, ENDLESS) };
    let mut world = World::new(vec![deferring, big, third.clone(), third], quantum(1000), 7);
    world.run(MS(600_000));
    // These two fit beside it, one at a time.
    for i in [2, 3] {
        assert!(world.held(i) >= MS(600_000) / 4, "client {i}: {:?} of 10 min", world.held(i));
    }
}

#[test]
fn equal_jobs_get_the_same_however_long_their_drains_take() {
    for (ms, drain) in [(8000, 5000), (1000, 1000), (1000, 5000)] {
        let slow = Plan { drains_in: drain, drains_slowly: true, ..steady(12, ENDLESS) };
        let mut world = World::new(vec![steady(12, ENDLESS), slow], quantum(ms), 7);
        world.run(MS(1_800_000));
        let [quick, slow] = [world.held(0), world.held(1)];
        println!("quantum {ms} ms, drains of {drain} ms: {quick:?} and {slow:?} of 30 min");
        assert!(quick.abs_diff(slow) <= quick.max(slow) / 20, "{quick:?} and {slow:?}");
    }
}

#[test]
fn a_job_on_a_crowded_gpu_too_gets_no_more_for_it() {
    let both = Plan { gpus: vec![gpu(0), gpu(1)], ..steady(12, ENDLESS) };
    let small = Plan { gpus: vec![gpu(1)], ..steady(1, ENDLESS) };
    let mut plans = vec![both, steady(12, ENDLESS), steady(12, ENDLESS), steady(12, ENDLESS)];
    plans.extend([small.clone(), small.clone(), small]);
    let mut world = World::new(plans, quantum(1000), 7);
    world.run(MS(300_000));
    let others: Duration = (1..4).map(|i| world.held(i)).sum::<Duration>() / 3;
    assert!(world.held(0) <= others * 13 / 10, "{:?} and {others:?}", world.held(0));
    assert!(world.held(0) >= others * 7 / 10, "{:?} and {others:?}", world.held(0));
}

#[test]
fn an_idle_client_keeps_no_old_floor_for_those_who_come() {
    let idle = steady(1, 100);
    let brief = Plan { starts_at: 50, exits: true, ..steady(12, 1000) };
    let old = steady(12, ENDLESS);
    let comes = Plan { starts_at: 60_000, ..steady(12, ENDLESS) };
    let mut world = World::new(vec![idle, brief, old, comes.clone(), comes], quantum(1000), 7);
    world.run(MS(60_000));
    let before = world.held(2);
    world.run(MS(90_000));
    assert!(world.held(2) - before >= MS(6000), "{:?} of 30 s", world.held(2) - before);
}

#[test]
fn the_processes_of_a_job_have_one_share_together() {
    let one = Plan { tenant: Some(1), ..steady(12, ENDLESS) };
    let mut world = World::new(vec![steady(12, ENDLESS), one.clone(), one.clone(), one], quantum(1000), 7);
    world.run(MS(240_000));
    let together: Duration = (1..4).map(|i| world.held(i)).sum();
    let alone = world.held(0);
    assert!(alone.abs_diff(together) <= alone / 5, "{alone:?} alone, {together:?} together");
    for i in 1..4 {
        assert!(world.held(i) >= together / 5, "client {i}: {:?} of {together:?}", world.held(i));
    }
}

#[test]
fn a_client_that_pauses_gives_way_whatever_became_of_its_drains() {
    let pauses = Plan { pause: 60, ..steady(12, ENDLESS) };
    for (ms, drains_in) in [(60, 0), (60, 60_000), (300, 0), (300, 60_000)] {
        // A drain while it computes is given up, however long it is waited for.
        let pauses = Plan { drains_in, ..pauses.clone() };
        let mut world = World::new(vec![pauses, steady(12, ENDLESS)], quantum(ms), 7);
        world.run(MS(120_000));
        let [pauses, steady] = [world.held(0), world.held(1)];
        let waits = [0, 1].map(|i| world.processes[i].program.longest_wait);
        println!("quantum {ms} ms, drains of {drains_in} ms: {pauses:?} and {steady:?} of 2 min, {waits:?}");
        let both = pauses + steady;
        assert!(pauses.min(steady) >= both * 3 / 10, "{pauses:?} and {steady:?}");
        // Two quanta of the other, a drain that is given up, a restore of each, and how long its last step takes.
        assert!(waits.iter().all(|&wait| wait <= MS(ms * 3 + 1500)), "{waits:?}");
    }
}
