//! Random weights, limits, priorities and pauses, changed while programs run: the invariants hold, and nobody starves.

use nvshare_proto::{ComputeLimit, Enforcement, Priority, TenantSettings, Wishes};
use proptest::prelude::*;

use crate::properties::{gangs_fit, plan, worlds};
use crate::world::{MS, World, config, gpu};

/// Work under a limit of one per cent takes a hundred times as long, and what a hand-over takes at each spell.
const TIMES: u64 = 4000;

fn priority() -> impl Strategy<Value = Priority> {
    prop_oneof![Just(Priority::Low), Just(Priority::Normal), Just(Priority::High)]
}

fn enforcement() -> impl Strategy<Value = Enforcement> {
    prop_oneof![Just(Enforcement::Default), Just(Enforcement::Force), Just(Enforcement::Disable)]
}

fn asked() -> impl Strategy<Value = Wishes> {
    let limits = prop::option::weighted(0.4, 1..=100u8);
    let weight = prop::option::weighted(0.4, 1..=10_000u32);
    (weight, prop::option::weighted(0.3, priority()), enforcement(), limits).prop_map(
        |(weight, priority, enforcement, percent)| Wishes {
            weight,
            priority,
            enforcement,
            compute: percent.into_iter().map(|percent| ComputeLimit { gpu: gpu(0), percent }).collect(),
            gang: None,
        },
    )
}

fn given() -> impl Strategy<Value = TenantSettings> {
    (
        prop::option::weighted(0.4, 1..=10_000u32),
        prop::option::weighted(0.3, priority()),
        prop::option::weighted(0.3, enforcement()),
        prop::option::weighted(0.4, 0..=100u8),
        prop::option::weighted(0.2, any::<bool>()),
    )
        .prop_map(|(weight, priority, enforcement, compute, paused)| TenantSettings {
            weight,
            priority,
            enforcement,
            compute,
            paused,
            ..TenantSettings::default()
        })
}

proptest! {
    #![proptest_config(worlds())]

    #[test]
    fn nobody_starves_whatever_terms_are_given(
        mut plans in prop::collection::vec(plan(), 1..6),
        asked in prop::collection::vec(asked(), 6),
        mut changes in prop::collection::vec((0..20_000u64, 0..6usize, given()), 0..9),
        exclusive in prop::bool::weighted(0.2),
        seed in any::<u64>(),
    ) {
        for (plan, asked) in plans.iter_mut().zip(asked) {
            plan.asked = asked;
        }
        gangs_fit(&mut plans, exclusive);
        let all = plans.len();
        let mut world = World::new(plans, config(exclusive), seed);
        changes.sort_by_key(|change| change.0);
        for (at, i, given) in changes {
            world.run(MS(at));
            let _ = world.try_to_give(i, given);
        }
        world.run(MS(20_000));
        for i in 0..all {
            let _ = world.try_to_give(i, TenantSettings { paused: Some(false), ..TenantSettings::default() });
        }
        world.serves_everybody_within(TIMES);
    }
}
