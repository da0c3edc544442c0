//! Worlds that random tests found, each when the core or its clients had a defect.

use nvshare_client::account::DeviceFacts;
use nvshare_client::{Done, MoverOrder, Session};
use nvshare_core::Gang;
use nvshare_proto::{
    ClientMessage, ComputeLimit, Enforcement, Epoch, GpuUuid, InitialState, MemoryMode, SchedulerMessage,
    TenantSettings, Wishes,
};

use crate::agenda::Later;
use crate::interactive::auto;
use crate::library::{GateState, Library};
use crate::mover::Lane;
use crate::plan::{Plan, steady};
use crate::world::{CAPACITY, MS, World, config, gpu};

/// Delays are drawn otherwise than when these were found: each runs with several seeds beside its own.
const SEEDS: u64 = 32;

/// The seeds of a world with its own, each printed before its run.
fn seeds(own: u64) -> impl Iterator<Item = u64> {
    (0..SEEDS).chain([own]).inspect(|seed| println!("seed {seed}"))
}

fn second() -> Vec<GpuUuid> {
    vec![gpu(1)]
}

/// The same processes, whose memory comes back while that of others leaves.
fn with_exchange(plans: &[Plan]) -> Vec<Plan> {
    plans.iter().map(|plan| Plan { memory: MemoryMode::Swap, ..plan.clone() }).collect()
}

fn both() -> Vec<GpuUuid> {
    vec![gpu(0), gpu(1)]
}

/// One function, as it is a list of worlds and one check for all.
#[test]
fn worlds_in_which_somebody_starved_serve_everybody() {
    for (seed, plans) in [
        (
            1_557_099_208_481_414_208,
            vec![
                Plan { starts_at: 934, ..steady(16, 100) },
                Plan { pause: 213, starts_at: 635, ..steady(1, 301) },
                Plan { gpus: both(), starts_at: 1712, ..steady(1, 100) },
            ],
        ),
        (
            8_474_265_946_774_420_634,
            vec![
                steady(9, 2625),
                Plan { gpus: both(), pause: 177, ..steady(14, 800) },
                Plan { starts_at: 1631, ..steady(7, 1584) },
                Plan { starts_at: 709, grows_every: Some(401), ..steady(6, 1601) },
            ],
        ),
        (
            3_230_161_451_949_741_666,
            vec![
                Plan { pause: 43, starts_at: 2177, ..steady(11, 1757) },
                Plan { pause: 548, starts_at: 133, ..steady(2, 2048) },
                Plan { gpus: second(), pause: 355, starts_at: 2445, ..steady(1, 3321) },
                Plan { gpus: both(), pause: 133, starts_at: 1519, grows_every: Some(933), ..steady(1, 1844) },
                Plan { gpus: both(), pause: 343, starts_at: 2723, ..steady(5, 235) },
            ],
        ),
        (
            0,
            vec![
                Plan { starts_at: 2408, ..steady(1, 100) },
                Plan { gpus: both(), starts_at: 1745, ..steady(16, 100) },
                Plan { starts_at: 2409, ..steady(11, 100) },
            ],
        ),
        (
            17_259_557_016_227_046_414,
            vec![
                Plan { pause: 197, runs_already: true, ..steady(11, 2911) },
                Plan {
                    pause: 394,
                    starts_at: 2462,
                    grows_every: Some(588),
                    defers_every: Some(2),
                    ..steady(10, 688)
                },
                Plan { gpus: both(), pause: 602, starts_at: 2135, ..steady(6, 476) },
            ],
        ),
        (
            14_330_612_099_199_376_508,
            vec![
                Plan { starts_at: 2677, ..steady(9, 100) },
                Plan { starts_at: 403, ..steady(4, 2081) },
                Plan { starts_at: 1483, grows_every: Some(301), ..steady(6, 1140) },
            ],
        ),
        (
            9_596_402_676_179_258_762,
            vec![
                Plan { runs_already: true, ..steady(1, 3937) },
                Plan { starts_at: 632, ..steady(7, 2951) },
                Plan { gpus: both(), pause: 405, starts_at: 2402, ..steady(1, 376) },
                Plan { starts_at: 35, defers_every: Some(3), ..steady(7, 3420) },
                Plan { starts_at: 2472, ..steady(9, 3780) },
                Plan { starts_at: 2510, ..steady(1, 0) },
            ],
        ),
        (
            5_564_520_920_708_649_838,
            vec![
                Plan {
                    pause: 54,
                    starts_at: 723,
                    grows_every: Some(201),
                    defers_every: Some(2),
                    ..steady(6, 1208)
                },
                Plan { gpus: both(), pause: 538, starts_at: 867, ..steady(8, 628) },
                Plan { pause: 330, starts_at: 1637, ..steady(8, 201) },
                Plan { starts_at: 1302, grows_every: Some(1501), defers_every: Some(2), ..steady(7, 1701) },
            ],
        ),
        (
            11_006_096_709_876_723_678,
            vec![
                Plan { gpus: both(), pause: 733, starts_at: 175, grows_every: Some(706), ..steady(6, 757) },
                Plan { gpus: both(), starts_at: 2282, ..steady(10, 1001) },
                Plan { gpus: both(), starts_at: 2061, ..steady(8, 1001) },
                Plan { gpus: second(), starts_at: 1626, grows_every: Some(501), ..steady(9, 1001) },
                Plan { gpus: second(), pause: 10, starts_at: 823, ..steady(11, 701) },
            ],
        ),
        (
            4_477_790_973_996_748_370,
            vec![
                Plan { gpus: both(), grows_every: Some(401), runs_already: true, ..steady(14, 845) },
                Plan { pause: 10, starts_at: 501, ..steady(2, 301) },
            ],
        ),
    ] {
        for seed in (0..SEEDS).chain([seed]) {
            println!("seed {seed}: {plans:?}");
            World::new(plans.clone(), config(false), seed).serves_everybody();
            World::new(with_exchange(&plans), config(false), seed).serves_everybody();
        }
    }
}

#[test]
fn a_world_of_a_measured_gpu_in_which_somebody_starved_serves_everybody() {
    let plans = vec![
        Plan { gpus: both(), pause: 623, starts_at: 582, ..steady(8, 3674) },
        Plan {
            gpus: second(),
            starts_at: 221,
            grows_every: Some(422),
            defers_every: Some(2),
            ..steady(8, 3122)
        },
        Plan { pause: 244, starts_at: 1001, ..steady(8, 3565) },
    ];
    for seed in seeds(5_848_142_209_069_594_922) {
        World::measured(plans.clone(), seed).serves_everybody();
        World::measured(with_exchange(&plans), seed).serves_everybody();
    }
}

/// A process is granted the lock again as soon as it has left, while room that it had asked for and needs no more is on its
/// way back.
#[test]
fn a_world_in_which_returned_room_crossed_a_grant_serves_everybody() {
    let limited = |enforcement| Wishes {
        enforcement,
        compute: vec![ComputeLimit { gpu: gpu(0), percent: 43 }],
        ..Wishes::default()
    };
    let (default, force) = (limited(Enforcement::Default), limited(Enforcement::Force));
    let plans = with_exchange(&[
        Plan { tenant: Some(1), asked: default, starts_at: 2072, ..steady(4, 1666) },
        Plan { starts_at: 713, ..steady(3, 3634) },
        Plan { tenant: Some(1), asked: force, starts_at: 1873, grows_every: Some(401), ..steady(3, 1501) },
        Plan { gpus: second(), starts_at: 817, ..steady(1, 100) },
        Plan { starts_at: 2188, dies_at: Some(2987), ..steady(9, 100) },
    ]);
    for seed in seeds(10_972_731_126_526_078_554) {
        let mut world = World::new(plans.clone(), config(false), seed);
        world.run(MS(20_000));
        for i in 0..plans.len() {
            let _ = world.try_to_give(i, TenantSettings { paused: Some(false), ..TenantSettings::default() });
        }
        world.serves_everybody_within(4000);
    }
}

#[test]
fn a_world_in_which_a_gang_with_a_paused_member_never_rested_serves_everybody() {
    let gang = Some(Gang { number: 0, size: 0 });
    let limited = Wishes { compute: vec![ComputeLimit { gpu: gpu(0), percent: 5 }], ..Wishes::default() };
    let plans = vec![
        Plan { tenant: Some(0), gang, ..steady(1, 3701) },
        Plan { pause: 510, asked: limited, starts_at: 1068, ..steady(1, 301) },
        Plan { gpus: second(), pause: 329, gang, starts_at: 2956, ..steady(1, 601) },
    ];
    for seed in seeds(986_724_303_384_138_782) {
        let mut world = World::new(plans.clone(), config(false), seed);
        world.run(MS(3261));
        world.give(0, TenantSettings { paused: Some(true), ..TenantSettings::default() });
        world.run(MS(20_000));
        world.give(0, TenantSettings { paused: Some(false), ..TenantSettings::default() });
        world.serves_everybody_within(4000);
    }
}

/// Clients that unite bring different answers to whether they must wait, and a gang has one.
#[test]
fn sharers_unite_whatever_each_waited_for() {
    let limited = Wishes { compute: vec![ComputeLimit { gpu: gpu(0), percent: 1 }], ..Wishes::default() };
    let plans = vec![
        Plan { pause: 10, starts_at: 1680, dies_at: Some(3924), ..steady(16, 301) },
        Plan { starts_at: 988, ..steady(1, 514) },
        Plan {
            gpus: vec![gpu(0), gpu(1)],
            asked: limited,
            shares: Some((1, 0)),
            starts_at: 1680,
            ..steady(1, 100)
        },
        Plan { shares: Some((1, 3950)), starts_at: 1455, ..steady(8, 1001) },
    ];
    for seed in seeds(342) {
        World::new(plans.clone(), config(false), seed).serves_everybody();
    }
}

/// A member of a gang is stopped, so that another is refused room. Both go on with memory absent until they move next.
#[test]
fn a_member_is_refused_room_beside_one_that_is_stopped() {
    let gang = Some(Gang { number: 0, size: 0 });
    let plans = vec![
        Plan { gpus: vec![gpu(1)], gang, starts_at: 1229, ..steady(14, 301) },
        Plan { gpus: vec![gpu(1)], gang, ..steady(2, 301) },
    ];
    for seed in seeds(4_049_073_033_063_344_306) {
        let mut world = World::new(plans.clone(), config(false), seed);
        world.at(MS(2), Later::Stop(1, 11_515, None));
        world.serves_everybody_within(12);
    }
}

/// The drain of one fails, so the one that it may depend on is next, without a request. Its memory comes back ahead of the lock. Then the
/// first one dies, so the second one is not next any more, and is not told.
#[test]
fn memory_that_comes_ahead_of_a_turn_that_is_off_is_not_waited_for() {
    let limited = Wishes {
        enforcement: Enforcement::Force,
        compute: vec![ComputeLimit { gpu: gpu(0), percent: 69 }],
        ..Wishes::default()
    };
    let swap = |gib, work| Plan { memory: MemoryMode::Swap, tenant: Some(0), ..steady(gib, work) };
    let plans = vec![
        Plan { defers_every: Some(2), asked: limited, starts_at: 2941, dies_at: Some(4807), ..swap(13, 501) },
        swap(4, 100),
        Plan { gpus: second(), tenant: None, ..swap(1, 100) },
    ];
    for seed in seeds(10_437_734_240_253_369_346) {
        let mut world = World::new(plans.clone(), config(false), seed);
        world.run(MS(20_000));
        assert!(world.processes[1].lanes.iter().all(Lane::is_at_rest), "{:?}", world.processes[1].lanes);
    }
}

/// The gate opens, and closes for want of work, before the system lets the thread run that sleeps at it. The thread rings no
/// second time.
#[test]
fn a_thread_that_slept_while_the_gate_was_open_asks_again() {
    let terms =
        DeviceFacts { gpu: gpu(0), total: CAPACITY, limit: None, is_of_seat: false, oversubscribe: false };
    let mut library = Library::new([terms].into_iter());
    let mut session = Session::new(MS(0));
    (library.is_connected, library.is_asleep) = (true, true);
    session.register(&mut library, MS(0));
    let epoch = Epoch { boot: 1, counter: 1 };
    for message in [
        SchedulerMessage::Registered { client: 1, hold: InitialState::Parked },
        SchedulerMessage::LockOk { epoch, quantum_ms: 1000, room: vec![] },
        SchedulerMessage::Waiters { waiting: true },
    ] {
        session.hear(&mut library, message, MS(1));
        session.look(&mut library, MS(1));
    }
    assert_ne!(library.gate, GateState::Closed);
    library.now = MS(20);
    session.look(&mut library, MS(20));
    assert!(library.orders.iter().any(|(order, _)| *order == MoverOrder::Probe), "{:?}", library.orders);
    session.done(&mut library, Done::Quiet { submissions: 0 }, MS(20));
    library.said.clear();
    library.now = MS(100);
    session.look(&mut library, MS(100));
    assert_eq!(library.gate, GateState::Closed);
    let idle = library.said.iter().position(|said| *said == ClientMessage::Idle { epoch });
    let asks = library.said.iter().rposition(|said| *said == ClientMessage::ReqLock);
    assert!(idle.is_some() && idle < asks, "{:?}", library.said);
}

/// A member of a gang is stopped while it drains, with more room than it uses. Its mate became next and stepped back, over and over.
#[test]
fn a_gang_with_a_stopped_member_comes_to_rest() {
    let gang = Some(Gang { number: 1, size: 0 });
    let swap = |gib, work| Plan { memory: MemoryMode::Swap, ..steady(gib, work) };
    let plans = vec![
        Plan { starts_at: 537, ..swap(10, 100) },
        Plan { gpus: second(), ..swap(1, 0) },
        Plan { starts_at: 1943, ..swap(3, 100) },
        Plan { gang, ..swap(4, 100) },
        Plan { gang, starts_at: 479, ..swap(2, 0) },
    ];
    for seed in seeds(1_951_667_277_289_885_554) {
        let mut world = World::new(plans.clone(), config(false), seed);
        for (i, at, lasts, seen) in [(2, 1884, 570, None), (3, 541, 915, Some(914)), (4, 0, 1455, None)] {
            world.at(MS(at), Later::Stop(i, lasts, seen));
        }
        world.serves_everybody_within(12);
    }
}

/// The same with a mate that uses another GPU as well.
#[test]
fn a_gang_on_several_gpus_with_a_stopped_member_comes_to_rest() {
    let gang = Some(Gang { number: 1, size: 0 });
    let swap = |gib, work| Plan { memory: MemoryMode::Swap, ..steady(gib, work) };
    let plans = vec![
        Plan { starts_at: 1521, ..swap(6, 100) },
        Plan { starts_at: 1521, ..swap(11, 100) },
        Plan { gpus: vec![gpu(0), gpu(1)], tenant: Some(0), gang, starts_at: 1523, ..swap(7, 0) },
        Plan { gang, starts_at: 214, ..swap(3, 100) },
    ];
    for seed in seeds(573_989_708_966_154_682) {
        let mut world = World::new(plans.clone(), config(false), seed);
        world.at(MS(1282), Later::Stop(3, 2101, Some(242)));
        world.serves_everybody_within(12);
    }
}

/// It is asked to leave while its memory comes back, and called back, as another client keeps the GPU. Memory on its way was given up, and
/// counted as being there.
#[test]
fn a_client_that_is_called_back_in_its_restore_goes_on_with_all_of_its_memory() {
    let swap = |gib, work| Plan { memory: MemoryMode::Swap, ..steady(gib, work) };
    let gang = Some(Gang { number: 1, size: 0 });
    let both = || vec![gpu(0), gpu(1)];
    let plans = vec![
        Plan { gpus: both(), pause: 241, tenant: Some(1), starts_at: 2092, ..swap(12, 301) },
        Plan { gang, ..swap(3, 0) },
        Plan { gpus: both(), gang, starts_at: 2436, ..swap(5, 1001) },
        Plan { gpus: second(), starts_at: 2438, ..swap(12, 100) },
        Plan { pause: 420, starts_at: 2405, ..swap(9, 201) },
        Plan { tenant: Some(1), starts_at: 2405, ..steady(9, 100) },
    ];
    for seed in seeds(18_191_490_420_944_488_438) {
        World::new(plans.clone(), config(false), seed).serves_everybody();
    }
}

/// A member came back from its idleness while its mate, which had left another GPU with it, sat there. So nobody looked at the gang
/// when that GPU became free.
#[test]
fn a_member_that_was_idle_waits_with_its_mate() {
    let swap = |gib, work| Plan { memory: MemoryMode::Swap, ..steady(gib, work) };
    let plans = vec![
        Plan { starts_at: 2276, pause: 1238, ..steady(10, 401) },
        Plan { grows_every: Some(501), pause: 620, starts_at: 2371, ..swap(9, 876) },
        swap(1, 0),
        Plan { gpus: second(), pause: 461, starts_at: 2476, shares: Some((0, 0)), ..swap(13, 1301) },
        Plan { defers_every: Some(3), shares: Some((0, 2792)), starts_at: 1597, ..swap(7, 4667) },
    ];
    for seed in seeds(4_647_930_563_673_078_584) {
        World::new(plans.clone(), auto(1, 400), seed).serves_everybody_within(21);
    }
}

/// The same with a member that never works, and others that are stopped.
#[test]
fn a_member_that_was_idle_waits_with_a_mate_that_never_works() {
    let swap = |gib, work| Plan { memory: MemoryMode::Swap, ..steady(gib, work) };
    let gang = Some(Gang { number: 0, size: 0 });
    let plans = vec![
        Plan { gang, ..swap(6, 0) },
        Plan { starts_at: 2480, ..swap(3, 4102) },
        Plan { pause: 61, starts_at: 2756, ..swap(14, 1266) },
        Plan { gpus: second(), pause: 564, tenant: Some(0), gang, starts_at: 2549, ..swap(1, 1201) },
        Plan { pause: 466, starts_at: 2698, ..steady(11, 601) },
    ];
    for seed in seeds(571_626_809_864_392_710) {
        let mut world = World::new(plans.clone(), config(false), seed);
        world.at(MS(4483), Later::Stop(2, 503, Some(502)));
        world.serves_everybody_within(12);
    }
}
