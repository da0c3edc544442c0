//! Random worlds: the invariants hold, and nobody starves.

use nvshare_core::{Gang, Measured};
use nvshare_proto::MemoryMode;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use crate::agenda::Later;
use crate::plan::{Plan, steady};
use crate::world::{GIB, MS, World, config, gpu};

pub(crate) fn plan() -> impl Strategy<Value = Plan> {
    (
        prop_oneof![4 => Just(vec![gpu(0)]), 2 => Just(vec![gpu(1)]), 1 => Just(vec![gpu(0), gpu(1)])],
        1..=16u64,
        prop_oneof![1 => Just(0u64), 5 => 100..6000u64],
        prop_oneof![2 => Just(0u64), 1 => 10..800u64],
        proptest::option::weighted(0.3, 200..2000u64),
        proptest::option::weighted(0.2, 1..4u64),
        0..3000u64,
        proptest::option::weighted(0.2, 0..9000u64),
        (
            proptest::option::weighted(0.2, 0..2u64),
            proptest::option::weighted(0.3, 0..2u64),
            prop_oneof![Just(MemoryMode::Swap), Just(MemoryMode::Managed)],
            proptest::option::weighted(0.3, (100..103u64, 0..6000u64)),
            proptest::option::weighted(0.4, 0..9000u64),
        ),
    )
        .prop_map(
            |(
                gpus,
                gib,
                work,
                pause,
                grows_every,
                defers_every,
                starts_at,
                dies_at,
                (gang, tenant, memory, shares, closes_after),
            )| Plan {
                gpus,
                memory,
                gib,
                work,
                pause,
                grows_every,
                // A process that defers each time keeps the GPU: that is tested on its own.
                defers_every: defers_every.filter(|&n| n > 1),
                tenant,
                gang: gang.map(|number| Gang { number, size: 0 }),
                shares,
                closes_at: shares.zip(closes_after).map(|((_, at), after)| at + after),
                starts_at,
                dies_at: dies_at.filter(|&dies| dies > starts_at),
                ..steady(0, 0)
            },
        )
}

/// The memory of a gang that shares a GPU fits there, since its processes are granted together.
pub(crate) fn gangs_fit(plans: &mut [Plan], exclusive: bool) {
    for at in 0..plans.len() {
        let Some(gang) = plans[at].gang else { continue };
        let others = plans[..at].iter().filter(|other| other.gang == Some(gang));
        let shared = others.filter(|other| other.gpus.iter().any(|gpu| plans[at].gpus.contains(gpu)));
        let gib: Vec<u64> = shared.map(|other| other.gib).collect();
        if gib.iter().sum::<u64>() + plans[at].gib > 16 || (exclusive && !gib.is_empty()) {
            plans[at].gang = None;
        } else {
            plans.iter_mut().filter(|plan| plan.gang == Some(gang)).for_each(|plan| plan.grows_every = None);
        }
    }
}

/// The same worlds each time, so that a change is judged by what it changes. To explore, say how far and find others:
/// `PROPTEST_CASES=500000 cargo test --release -p nvshare-client`; what is found is kept in `tests/proptest-regressions`.
#[expect(clippy::disallowed_methods, reason = "how many worlds are tried is said by the environment")]
pub(crate) fn worlds() -> ProptestConfig {
    let mut config = ProptestConfig { max_shrink_iters: 2000, ..ProptestConfig::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.rng_seed = RngSeed::Fixed(1);
    }
    config
}

proptest! {
    #![proptest_config(worlds())]

    #[test]
    fn invariants_hold_and_nobody_starves(
        mut plans in prop::collection::vec(plan(), 1..7),
        first_runs_already in prop::bool::weighted(0.2),
        exclusive in prop::bool::weighted(0.2),
        seed in any::<u64>(),
    ) {
        if first_runs_already {
            plans[0] = Plan { runs_already: true, starts_at: 0, dies_at: None, ..plans[0].clone() };
        }
        gangs_fit(&mut plans, exclusive);
        World::new(plans, config(exclusive), seed).serves_everybody();
    }

    /// Every process has its work done although schedulers die, and in turns again when there is one.
    #[test]
    fn nobody_starves_though_schedulers_die(
        mut plans in prop::collection::vec(plan(), 1..6),
        killed in prop::collection::vec((0..12_000u64, prop_oneof![1..900u64, 1000..8000u64]), 1..4),
        seed in any::<u64>(),
    ) {
        gangs_fit(&mut plans, false);
        let mut world = World::new(plans, config(false), seed);
        for (at, down) in killed {
            world.at(MS(at), Later::Restart(down));
        }
        world.serves_everybody();
        for gpu in world.core.gpu_status() {
            prop_assert!(gpu.resident <= gpu.capacity, "{gpu:?} {:?}", world.core.client_status());
        }
    }

    /// Connections end in the middle of long drains, while other threads allocate: no memory leaves under work. Everybody is served
    /// where drains end by themselves. Of two that run, cannot drain and have no room for all of their memory, neither may leave.
    #[test]
    fn no_memory_leaves_under_work_though_schedulers_die(
        mut plans in prop::collection::vec((plan(), 500..8000u64), 2..5),
        killed in prop::collection::vec((0..12_000u64, 1..3000u64), 1..4),
        seed in any::<u64>(),
    ) {
        for (plan, drains_in) in &mut plans {
            (plan.drains_in, plan.grows_in_drains, plan.gang) = (*drains_in, true, None);
        }
        let mut world = World::new(plans.into_iter().map(|(plan, _)| plan).collect(), config(false), seed);
        for (at, down) in killed {
            world.at(MS(at), Later::Restart(down));
        }
        if world.processes.iter().any(|process| process.plan.defers_every.is_some()) {
            world.run(MS(60_000));
        } else {
            world.serves_everybody_within(60);
        }
    }

    /// Programs allocate of pools, also while they are parked.
    #[test]
    fn an_allocation_of_a_pool_gets_its_room(
        mut plans in prop::collection::vec(plan(), 2..7),
        seed in any::<u64>(),
    ) {
        gangs_fit(&mut plans, false);
        for plan in &mut plans {
            plan.pools = true;
            plan.gib = plan.gib.min(6);
            // The memory of a gang has to fit, however often it drains.
            plan.grows_in_drains = seed.is_multiple_of(2) && plan.gang.is_none();
        }
        let mut world = World::new(plans, config(false), seed);
        if world.processes.iter().any(|process| process.plan.defers_every.is_some()) {
            world.run(MS(60_000));
        } else {
            world.serves_everybody_within(60);
        }
    }

    /// Processes are stopped and go on, and the scheduler sees that later, or never.
    #[test]
    fn nobody_starves_though_others_are_stopped(
        mut plans in prop::collection::vec(plan(), 2..7),
        stops in prop::collection::vec(
            (0..6usize, 0..12_000u64, prop_oneof![2 => 1..3000u64, 1 => 9_000..40_000u64], proptest::option::weighted(0.8, 0..1100u64)),
            1..5,
        ),
        seed in any::<u64>(),
    ) {
        gangs_fit(&mut plans, false);
        let mut world = World::new(plans, config(false), seed);
        for (i, at, lasts, seen) in stops {
            if i < world.processes.len() {
                world.at(MS(at), Later::Stop(i, lasts, seen));
            }
        }
        world.serves_everybody_within(12);
    }

    /// Strangers come and go, and contexts grow: there is always room for who comes, and for the largest.
    #[test]
    fn nobody_starves_whatever_is_measured(
        mut plans in prop::collection::vec(plan(), 1..6),
        measured in prop::collection::vec((0..20_000u64, 0..2u8, 12..=16u64, prop::collection::vec(0..5 * GIB / 8, 6)), 0..9),
        seed in any::<u64>(),
    ) {
        plans.iter_mut().for_each(|plan| (plan.gib, plan.gang) = (plan.gib.min(8), None));
        let mut world = World::measured(plans, seed);
        for (at, on, available, used) in measured {
            let used = (0..).zip(used).collect();
            let available = available * GIB + GIB / 2;
            let measured = Measured { gpu: gpu(on), asked_at: MS(at), available, used };
            world.at(MS(at), Later::Measure(measured));
        }
        world.serves_everybody();
        for gpu in world.core.gpu_status() {
            prop_assert!(gpu.resident <= gpu.capacity, "{gpu:?} {:?}", world.core.client_status());
        }
    }
}
