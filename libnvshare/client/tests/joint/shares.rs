//! Weights, compute limits and priorities: who gets how much, and that nobody gets more by cheating.

use std::time::Duration;

use nvshare_core::Config;
use nvshare_proto::{ComputeLimit, Enforcement, Priority, TenantSettings, Wishes};

use crate::plan::{self, Plan};
use crate::world::{MS, Process, World, config, gpu};

const ENDLESS: u64 = 10_000_000;

fn quantum(ms: u64) -> Config {
    Config { quantum: MS(ms), ..config(false) }
}

/// Like the library: where nothing has to move, a hand-over is quick.
fn steady(gib: u64, work: u64) -> Plan {
    Plan { quick: true, ..plan::steady(gib, work) }
}

fn weight(gib: u64, weight: u32) -> Plan {
    let asked = Wishes { weight: Some(weight), ..Wishes::default() };
    Plan { asked, ..steady(gib, ENDLESS) }
}

fn limit(gib: u64, percent: u8, enforcement: Enforcement) -> Plan {
    let compute = vec![ComputeLimit { gpu: gpu(0), percent }];
    let asked = Wishes { enforcement, compute, ..Wishes::default() };
    Plan { asked, ..steady(gib, ENDLESS) }
}

/// The part of each in the time that all got together, in millionths, between two moments.
fn parts(world: &mut World, from: u64, to: u64) -> Vec<u64> {
    world.run(MS(from));
    let before: Vec<Duration> = (0..world.processes.len()).map(|i| world.held(i)).collect();
    world.run(MS(to));
    let got: Vec<Duration> = before.iter().enumerate().map(|(i, before)| world.held(i) - *before).collect();
    let sum: Duration = got.iter().sum();
    got.iter().map(|got| (got.as_nanos() * 1_000_000 / sum.as_nanos().max(1)) as u64).collect()
}

fn close(got: &[u64], expected: &[u64]) {
    let sum: u64 = expected.iter().sum();
    for (got, expected) in got.iter().zip(expected) {
        let expected = expected * 1_000_000 / sum;
        assert!(got.abs_diff(expected) <= expected / 20, "{got} ppm, not {expected}");
    }
}

#[test]
fn shares_of_programs_that_fit_come_out_within_five_per_cent() {
    let default = Enforcement::Default;
    for (plans, expected) in [
        (vec![weight(4, 20), weight(4, 30), weight(4, 40)], vec![2, 3, 4]),
        (vec![limit(4, 20, default), limit(4, 30, default), limit(4, 40, default)], vec![2, 3, 4]),
        (vec![limit(4, 30, default), limit(4, 70, default)], vec![3, 7]),
        (vec![limit(4, 100, default), limit(4, 100, default), limit(4, 100, default)], vec![1, 1, 1]),
        (vec![limit(4, 30, default), steady(4, ENDLESS)], vec![3, 7]),
        (vec![limit(4, 30, Enforcement::Force), steady(4, ENDLESS)], vec![3, 7]),
        (vec![weight(4, 10), steady(4, ENDLESS)], vec![1, 10]),
    ] {
        for seed in 1..=5 {
            let mut world = World::new(plans.clone(), quantum(30_000), seed);
            // The last pair has a turn of a slice in eleven: what is left of one matters until then.
            close(&parts(&mut world, 1000, 91_000), &expected);
            // Turns take the place of what would run side by side, and cost next to nothing.
            let held: Duration = (0..world.processes.len()).map(|i| world.held(i)).sum();
            assert!(held >= MS(88_500), "{held:?}");
        }
    }
}

#[test]
fn shares_of_programs_that_do_not_fit_come_out_within_five_per_cent() {
    for (ms, seed) in [(1000, 7), (5000, 8)] {
        let plans = vec![weight(12, 20), weight(12, 30), weight(12, 40)];
        let mut world = World::new(plans, quantum(ms), seed);
        close(&parts(&mut world, 1000, 301_000), &[2, 3, 4]);
    }
}

#[test]
fn programs_without_shares_of_their_own_are_not_interrupted() {
    let disabled = limit(4, 30, Enforcement::Disable);
    let mut world = World::new(vec![weight(4, 100), disabled, steady(4, ENDLESS)], quantum(1000), 7);
    world.run(MS(20_000));
    assert!(world.processes.iter().all(|process| process.program.drains == 0));
    // One with a limit and nobody else: the rest is nobody's, so it may have it.
    let mut alone = World::new(vec![limit(4, 25, Enforcement::Default)], quantum(1000), 7);
    alone.run(MS(20_000));
    assert_eq!(alone.processes[0].program.drains, 0);
}

#[test]
fn an_enforced_limit_binds_alone_too() {
    for percent in [5, 25, 50, 90] {
        let mut world = World::new(vec![limit(4, percent, Enforcement::Force)], quantum(1000), 7);
        world.run(MS(30_000));
        let held = world.held(0).as_secs_f64() / 30.0 * 100.0;
        assert!((held - f64::from(percent)).abs() <= 2.0, "{held} % of {percent}");
        assert!(world.processes[0].program.drains >= 28, "{} drains", world.processes[0].program.drains);
    }
}

/// Per cent of the time that a job with an enforced limit held the GPU beside these, in each of some seconds.
fn seconds_under_force(percent: u8, drains_in: u64, others: &[Plan]) -> Vec<f64> {
    let mut plans = vec![Plan { drains_in, ..limit(3, percent, Enforcement::Force) }];
    plans.extend(others.iter().cloned());
    let mut world = World::new(plans, quantum(1000), u64::from(percent));
    (2..62).map(|n| held_in_the_second_to(&mut world, 1000 * n)).collect()
}

/// Per cent of the second up to this time that the first job held the GPU.
fn held_in_the_second_to(world: &mut World, until: u64) -> f64 {
    world.run(MS(until - 1000));
    let before = world.held(0);
    world.run(MS(until));
    (world.held(0) - before).as_secs_f64() * 100.0
}

#[test]
fn an_enforced_limit_is_exact_however_long_drains_take() {
    let mean = |seconds: &[f64]| seconds.iter().sum::<f64>() / seconds.len() as f64;
    let others = [weight(4, 1), Plan { pause: 300, ..weight(4, 1) }];
    for percent in [5, 25, 60, 90] {
        // 0: of any length up to 20 ms.
        for drains_in in [0, 1, 20, 45] {
            let cap = f64::from(percent);
            let alone = seconds_under_force(percent, drains_in, &[]);
            assert!((mean(&alone) - cap).abs() <= 0.2, "{percent} %, {drains_in} ms: {}", mean(&alone));
            // Drains that are always as long as expected: each second has its part.
            let even = alone.iter().all(|second| (second - cap).abs() <= 1.5);
            assert!(percent != 25 || ![1, 20].contains(&drains_in) || even, "{drains_in} ms: {alone:?}");
            // Beside others that leave it as much as it may have, but for what hand-overs to them take.
            let beside = mean(&seconds_under_force(percent, drains_in, &others));
            let least = if percent == 90 { 2.5 } else { 0.6 };
            assert!(
                beside <= cap + 0.2 && beside >= cap - least,
                "{percent} %, {drains_in} ms, others: {beside}"
            );
        }
    }
}

#[test]
fn an_enforced_limit_binds_a_tenant_with_several_processes() {
    for (processes, drains_in) in [(2, 0), (2, 20), (3, 45)] {
        let one = || Plan { drains_in, tenant: Some(1), ..limit(3, 25, Enforcement::Force) };
        let mut world = World::new((0..processes).map(|_| one()).collect(), quantum(1000), 7);
        world.run(MS(2000));
        let drains = |world: &World| world.processes.iter().map(|p| p.program.drains).sum::<u64>();
        let (before, mut held) = (drains(&world), 0);
        for at in 2000..32_000 {
            world.run(MS(at));
            held += u64::from(world.processes.iter().any(Process::is_running));
        }
        let held = held as f64 / 300.0;
        assert!((held - 25.0).abs() <= 2.0, "{processes} processes, {drains_in} ms: {held} %");
        // Four spells a second, each of all processes; one whose drain was shorter than expected may come back once more.
        let spells = (drains(&world) - before) as f64 / processes as f64;
        assert!(spells <= 30.0 * 4.0 * 1.1, "{processes} processes, {drains_in} ms: {spells} spells");
    }
}

#[test]
fn another_enforced_limit_is_in_force_within_100_ms() {
    let mut world = World::new(vec![limit(4, 20, Enforcement::Force)], quantum(1000), 7);
    for (n, percent) in (0u64..).zip([60, 20, 90, 5, 25, 60, 40, 20]) {
        // At any moment of its spells and rests.
        let at = 2037 * n + 1000;
        world.run(MS(at));
        world.give(0, TenantSettings { compute: Some(percent), ..TenantSettings::default() });
        let held = held_in_the_second_to(&mut world, at + 1100);
        // One spell more or less.
        let spell = f64::from(percent).max(20.0) / 4.0;
        assert!((held - f64::from(percent)).abs() <= spell, "{held} % of {percent}");
    }
}

#[test]
fn the_rest_of_an_enforced_limit_goes_to_others() {
    let pauses = Plan { pause: 900, ..steady(4, ENDLESS) };
    let mut world = World::new(vec![limit(4, 20, Enforcement::Force), pauses], quantum(1000), 7);
    world.run(MS(60_000));
    let held = world.held(0).as_secs_f64() / 60.0;
    assert!(held <= 0.22, "{held}");
}

#[test]
fn another_limit_holds_within_a_second() {
    let plans = vec![limit(4, 20, Enforcement::Default), steady(4, ENDLESS)];
    let mut world = World::new(plans, quantum(30_000), 7);
    close(&parts(&mut world, 1000, 21_000), &[2, 8]);
    let given = TenantSettings { compute: Some(60), ..TenantSettings::default() };
    world.give(0, given);
    // It had 20 of 100 before: at an equal weight it is to have half, as its limit allows more than that.
    close(&parts(&mut world, 22_000, 42_000), &[5, 5]);
    assert!(world.core.give(0, Some(gpu(1)), given, world.now).is_err(), "it does not use this one");
    assert!(world.core.give(77, None, given, world.now).is_err());
}

#[test]
fn a_tenant_has_one_share_however_many_processes_it_has() {
    let one = |weight: u32| Plan { tenant: Some(1), ..self::weight(3, weight) };
    let plans = vec![one(50), one(50), one(100), steady(3, ENDLESS)];
    for seed in 1..=5 {
        let mut world = World::new(plans.clone(), quantum(30_000), seed);
        let [mut tenant, mut alone] = [0, 0];
        for at in 0..30_000 {
            world.run(MS(at));
            // A turn of theirs lasts until the last of them has drained.
            tenant += u64::from(world.processes[..3].iter().any(Process::is_running));
            alone += u64::from(world.processes[3].is_running());
        }
        let ratio = alone as f64 / tenant as f64;
        assert!((ratio - 2.0).abs() <= 0.1, "{tenant} ms of the tenant, {alone} ms of the other");
        // They run side by side in their turns.
        for i in 0..3 {
            assert!(world.held(i) >= MS(tenant * 8 / 10), "client {i}: {:?}", world.held(i));
        }
    }
}

#[test]
fn a_paused_client_stands_still_and_goes_on_later() {
    let mut world = World::new(vec![steady(12, ENDLESS), steady(4, ENDLESS)], quantum(1000), 7);
    world.run(MS(5000));
    let pause = |paused| TenantSettings { paused: Some(paused), ..TenantSettings::default() };
    let told = world.give(0, pause(true));
    assert!(told.contains("client 0"), "{told}");
    world.run(MS(5500));
    let (stands, goes) = (world.served(0), world.served(1));
    world.run(MS(15_000));
    assert_eq!(world.served(0), stands);
    let went = world.served(1) - goes;
    assert!(went >= MS(9000), "{went:?}");
    world.give(0, pause(false));
    world.run(MS(25_000));
    let went = world.served(0) - stands;
    assert!(went >= MS(9000), "{went:?}");
}

#[test]
fn a_priority_starves_nobody() {
    for gib in [4, 12] {
        let low = Wishes { priority: Some(Priority::Low), ..Wishes::default() };
        let low = Plan { asked: low, ..steady(gib, ENDLESS) };
        let mut world = World::new(vec![steady(gib, ENDLESS), low], quantum(1000), 7);
        let parts = parts(&mut world, 1000, 241_000);
        assert!(
            parts[1] >= 100_000 && parts[1] <= 140_000,
            "{gib} GiB: {parts:?} ppm; an eighth of the other's"
        );
    }
}

#[test]
fn the_lightest_waits_for_a_bounded_time() {
    for gib in [4, 12] {
        let mut world = World::new(vec![weight(gib, 1), steady(gib, ENDLESS)], quantum(1000), 7);
        let given = TenantSettings { weight: Some(10_000), ..TenantSettings::default() };
        world.run(MS(10));
        world.give(1, given);
        world.run(MS(300_000));
        // 64 quanta, or slices, and what a hand-over takes in this world.
        let most = if gib == 4 { MS(64 * 100 + 3000) } else { MS(64 * 1000 + 5000) };
        assert!(world.longest_wait(0) <= most, "{gib} GiB: {:?}", world.longest_wait(0));
        assert!(world.held(0) > Duration::ZERO);
    }
}

#[test]
fn nobody_gets_more_by_cheating() {
    let honest = || limit(4, 50, Enforcement::Default);
    let fair = |cheat: Plan, what: &str| {
        let mut world = World::new(vec![cheat, honest(), honest()], quantum(30_000), 7);
        let got = parts(&mut world, 1000, 61_000);
        assert!(got[0] <= 350_000, "{what}: {got:?} ppm");
    };
    let asked = |weight, priority| Wishes { weight, priority, ..Wishes::default() };
    fair(Plan { asked: asked(Some(10_000), Some(Priority::High)), ..steady(4, ENDLESS) }, "asks for more");
    fair(Plan { pause: 20, ..honest() }, "sleeps to look interactive");
    fair(Plan { pause: 60, ..honest() }, "says that it is idle after each step");
    fair(Plan { drains_in: 150, drains_slowly: true, ..honest() }, "drains slowly");
    fair(Plan { defers_every: Some(2), ..honest() }, "defers every other drain");
}
