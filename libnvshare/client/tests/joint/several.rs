//! Clients of several GPUs get their turns in the end. Before that, clients are stopped, paused and cut off, and the capacity changes.
//!
//! A client that waits for several GPUs can be in the way of others on each of them. The core's own audit exempts such clients, since
//! they may wait for another GPU. So the rule is checked from outside: when nothing more happens, each client gets a turn within a bound.
//!
//! One client may stay stopped. It keeps the turn from its gang, and from those that do not fit beside the memory that it keeps.
//!
//! The invariants of all joint worlds are checked after each event: those that run together fit, with all of their memory. After a
//! break processes have run alone, and such a world is checked no further than worlds of dead schedulers.
//!
//! Some worlds have gangs, with ranks that never pause, and without stops and switches. A rank that is away in the middle of a turn keeps
//! its mates from draining. So two gangs can be half in on a GPU that is too full for both. Single worlds with such ranks stand below.

use std::collections::BTreeSet;
use std::time::Duration;

use nvshare_core::{Event, Gang};
use nvshare_proto::{GpuUuid, MemoryMode, TenantSettings, Usage};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::agenda::Later;
use crate::plan::{Plan, steady};
use crate::properties::worlds;
use crate::world::{CAPACITY, GIB, MS, World, config, gpu};

/// Milliseconds of work that no world comes to the end of.
const ENDLESS: u64 = 10_000_000;
/// Milliseconds in which something may happen to clients.
const TROUBLE: u64 = 10_000;
/// More milliseconds than any world lasts.
const FOR_EVER: u64 = 100_000_000;
/// A hand-over with its moves: a drain, evictions and a restore, each at its longest in these worlds.
const MOVES: Duration = Duration::from_secs(1);

/// Something that happens to a client, or to all.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    /// It is stopped: for how many milliseconds, and after how many the scheduler sees that, if it can.
    Stop { lasts: u64, seen: Option<u64> },
    /// An administrator pauses it, or lets it go on.
    Pause(bool),
    /// Its connection breaks, and it comes back.
    Break,
    /// Clients may fill this number of GiB of each GPU.
    Capacity(u64),
    /// An administrator switches scheduling on, or off.
    Switch(bool),
}

fn trouble() -> impl Strategy<Value = Trouble> {
    let seen = prop::option::weighted(0.8, 0..1100u64);
    prop_oneof![
        4 => (100..TROUBLE, seen).prop_map(|(lasts, seen)| Trouble::Stop { lasts, seen }),
        3 => any::<bool>().prop_map(Trouble::Pause),
        1 => Just(Trouble::Break),
        2 => (14..=16u64).prop_map(Trouble::Capacity),
        1 => any::<bool>().prop_map(Trouble::Switch),
    ]
}

/// A client, and the numbers of its GPUs if there are four.
fn client() -> impl Strategy<Value = (Vec<u8>, Plan)> {
    (
        prop::sample::subsequence(vec![0u8, 1, 2, 3], 1..=3),
        prop_oneof![1 => 1..=6u64, 2 => 7..=12u64],
        prop_oneof![2 => Just(0u64), 1 => 10..800u64],
        prop_oneof![Just(MemoryMode::Swap), Just(MemoryMode::Managed)],
        0..3000u64,
    )
        .prop_map(|(on, gib, pause, memory, starts_at)| {
            (on, Plan { pause, memory, starts_at, ..steady(gib, ENDLESS) })
        })
}

/// The clients on this number of GPUs. The first pairs of them are gangs. Members of a gang fit a GPU that they share.
fn placed(clients: Vec<(Vec<u8>, Plan)>, gpus: u8, pairs: usize) -> Vec<Plan> {
    let on: Vec<BTreeSet<u8>> = clients.iter().map(|(on, _)| on.iter().map(|n| n % gpus).collect()).collect();
    let place = |(i, (_, plan)): (usize, (Vec<u8>, Plan))| {
        let gang = (i / 2 < pairs).then_some(Gang { number: i as u64 / 2, size: 2 });
        // The other one of its pair has the number that differs in the last bit.
        let share = gang.is_some() && !on[i].is_disjoint(&on[i ^ 1]);
        let gib = if share { plan.gib.min(6) } else { plan.gib };
        Plan { gpus: on[i].iter().copied().map(gpu).collect(), gang, gib, ..plan }
    };
    clients.into_iter().enumerate().map(place).collect()
}

impl World {
    /// Runs until this time.
    fn pass(&mut self, until: Duration) {
        self.run(until);
        self.now = until;
    }

    fn suffer(&mut self, i: usize, trouble: Trouble) {
        match trouble {
            Trouble::Stop { lasts, seen } => {
                let left = TROUBLE.saturating_sub(self.now.as_millis() as u64);
                self.at(self.now, Later::Stop(i, lasts.min(left), seen));
            }
            Trouble::Pause(paused) => self.pause(i, paused),
            Trouble::Switch(on) => {
                self.was_killed |= !on;
                self.switch(on);
            }
            Trouble::Break if self.processes[i].stopped_until > self.now => {}
            Trouble::Break => {
                self.was_killed = true;
                self.break_connection(i);
            }
            Trouble::Capacity(gib) => {
                self.config.gpu_memory = Some(gib * GIB);
                self.core.configure(self.config.clone(), self.now);
                self.follower.follow(&mut self.core);
                self.event(Event::Deadline);
            }
        }
    }

    /// An administrator pauses a process, or lets it go on, unless it has not come.
    fn pause(&mut self, i: usize, paused: bool) {
        let given = TenantSettings { paused: Some(paused), ..TenantSettings::default() };
        let _ = self.try_to_give(i, given);
    }

    /// Milliseconds, the process, and what happens to it then.
    fn suffer_all(&mut self, troubles: impl IntoIterator<Item = (u64, usize, Trouble)>) {
        for (at, i, trouble) in troubles {
            self.pass(MS(at));
            self.suffer(i, trouble);
        }
    }

    /// When all trouble is over, each process has turns.
    fn gives_turns(&mut self, stopped: Option<usize>) {
        self.pass(MS(TROUBLE));
        self.calm_down();
        // Twice: a first turn may be one that began before.
        for _ in 0..2 {
            self.give_everybody_a_turn(stopped);
        }
    }

    /// All trouble is over, but for a process that stays stopped.
    fn calm_down(&mut self) {
        // Those that were stopped go on, come back if they were cut off, and the scheduler sees that.
        self.switch(true);
        self.pass(self.now + MS(3000));
        for i in 0..self.processes.len() {
            self.pause(i, false);
        }
    }

    /// The processes that are granted together with this one.
    fn mates(&self, i: usize) -> Vec<usize> {
        let gang = self.processes[i].plan.gang;
        let belongs =
            |&other: &usize| other == i || gang.is_some() && self.processes[other].plan.gang == gang;
        (0..self.processes.len()).filter(belongs).collect()
    }

    /// The most that a process has of a GPU, as the core counts it. Room of several GPUs is known as a sum.
    fn kept(&self, i: usize, on: GpuUuid) -> u64 {
        let rows = self.core.client_status();
        let of_client = rows.iter().find(|row| Some(row.client) == self.processes[i].client);
        of_client.map_or(0, |row| {
            let resident = |usage: &Usage| usage.allocated.saturating_sub(usage.absent);
            let all: u64 = row.usage.iter().map(resident).sum();
            let here: u64 = row.usage.iter().filter(|usage| usage.gpu == on).map(resident).sum();
            row.resident.min(here + row.resident.saturating_sub(all))
        })
    }

    /// Whether a process, with its gang, fits its GPUs beside all that one which stays stopped, with its own gang, keeps there.
    fn may_have_a_turn(&self, i: usize, stopped: usize) -> bool {
        let (own, others) = (self.mates(i), self.mates(stopped));
        let needs = |on: GpuUuid| -> u64 {
            let plans = own.iter().map(|&mate| &self.processes[mate].plan);
            plans.filter(|plan| plan.gpus.contains(&on)).map(|plan| plan.gib * GIB).sum()
        };
        let kept = |on: GpuUuid| -> u64 { others.iter().map(|&other| self.kept(other, on)).sum() };
        let capacity = self.config.gpu_memory.unwrap_or(CAPACITY);
        let mut gpus = own.iter().flat_map(|&mate| &self.processes[mate].plan.gpus);
        own != others && gpus.all(|&on| needs(on) + kept(on) <= capacity)
    }

    /// Each process has a turn, unless it is stopped, or one that stays stopped keeps the turn from it.
    fn give_everybody_a_turn(&mut self, stopped: Option<usize>) {
        let all = 0..self.processes.len();
        let before: Vec<Duration> = all.clone().map(|i| self.served(i)).collect();
        // A turn lasts for two quanta if its client has something to catch up. An answer that does not come is waited for once.
        let turn = self.config.quantum * 2 + self.config.grace + MOVES;
        // Others may go first again, with what they are behind; and gangs give up drains, and try again.
        let until = self.now + turn * (3 * all.len() as u32);
        loop {
            self.pass(self.now + MS(500));
            let starves = |&i: &usize| {
                let may = stopped.is_none_or(|stopped| self.may_have_a_turn(i, stopped));
                may && self.served(i) <= before[i]
            };
            let starving: Vec<usize> = all.clone().filter(starves).collect();
            if starving.is_empty() {
                return;
            }
            assert!(
                self.now < until,
                "{starving:?} get no turn, and {stopped:?} is stopped: {:?}",
                self.core.client_status()
            );
        }
    }
}

/// These worlds are busy to their end, so fewer of them are tried than of others. The macro would take their number from the environment.
#[test]
fn nobody_is_kept_off_several_gpus_for_ever() {
    let all = worlds();
    let mut runner = TestRunner::new(ProptestConfig { cases: all.cases / 16, ..all });
    let worlds = (
        prop::collection::vec(client(), 3..=8),
        2..=4u8,
        prop_oneof![2 => Just(0usize), 1 => 1..=3usize],
        prop::collection::vec((0..TROUBLE, 0..8usize, trouble()), 0..8),
        prop::option::weighted(0.5, (0..8usize, 0..TROUBLE, 0..1100u64)),
        any::<u64>(),
    );
    let holds = runner.run(&worlds, |(mut clients, gpus, pairs, mut troubles, stays_stopped, seed)| {
        let pairs = pairs.min(clients.len() / 2);
        let has_gangs = pairs > 0;
        if has_gangs {
            clients.iter_mut().take(2 * pairs).for_each(|(_, plan)| plan.pause = 0);
            troubles.retain(|(_, _, trouble)| !matches!(trouble, Trouble::Stop { .. } | Trouble::Switch(_)));
        }
        let mut world = World::new(placed(clients, gpus, pairs), config(false), seed);
        let all = world.processes.len();
        let stopped = stays_stopped.filter(|_| !has_gangs).map(|(i, at, seen)| {
            world.at(MS(at), Later::Stop(i % all, FOR_EVER, Some(seen)));
            i % all
        });
        troubles.sort_by_key(|trouble| trouble.0);
        world.suffer_all(troubles.into_iter().map(|(at, i, trouble)| (at, i % all, trouble)));
        world.gives_turns(stopped);
        Ok(())
    });
    holds.unwrap_or_else(|wrong| panic!("{wrong}"));
}

/// Clients of this number of GPUs, of which the first pairs are gangs, with what happens to them.
struct Story {
    gpus: u8,
    pairs: usize,
    clients: Vec<(Vec<u8>, Plan)>,
    troubles: Vec<(u64, usize, Trouble)>,
    seed: u64,
}

impl Story {
    fn ends_well(self) {
        let mut world = World::new(placed(self.clients, self.gpus, self.pairs), config(false), self.seed);
        world.suffer_all(self.troubles);
        world.gives_turns(None);
    }
}

/// A program with swapped memory on these GPUs.
fn swaps(on: &[u8], gib: u64, pause: u64, starts_at: u64) -> (Vec<u8>, Plan) {
    (on.to_vec(), Plan { pause, memory: MemoryMode::Swap, starts_at, ..steady(gib, ENDLESS) })
}

/// On the other GPU nobody runs, so it is never behind there. Two take turns beside small ones, and get less than their share.
#[test]
fn a_client_with_an_unused_gpu_has_turns_beside_those_that_are_always_behind() {
    let clients = vec![
        swaps(&[0], 7, 0, 0),
        swaps(&[0], 11, 0, 0),
        swaps(&[2, 0], 2, 0, 0),
        swaps(&[0], 1, 0, 0),
        swaps(&[1, 0], 8, 0, 500),
    ];
    let troubles = vec![(1, 0, Trouble::Capacity(14))];
    Story { gpus: 3, pairs: 0, clients, troubles, seed: 1 }.ends_well();
}

/// The GPU that is looked at first gives the turn to one that is behind another on its second GPU, where that one fits at once.
#[test]
fn clients_of_two_of_three_gpus_all_have_turns() {
    let clients = vec![swaps(&[1, 2], 7, 0, 0), swaps(&[2, 0], 10, 0, 0), swaps(&[0, 1], 10, 0, 1365)];
    let troubles = vec![(1289, 0, Trouble::Stop { lasts: 100, seen: None })];
    Story { gpus: 3, pairs: 0, clients, troubles, seed: 894_648_342_136_725_016 }.ends_well();
}

/// The order on two GPUs changes when something happens on a third one.
#[test]
fn an_order_that_changes_elsewhere_is_noticed() {
    let (on, managed) = swaps(&[1], 9, 0, 1989);
    let clients = vec![
        (on, Plan { memory: MemoryMode::Managed, ..managed }),
        swaps(&[0, 2], 8, 0, 133),
        swaps(&[1], 8, 0, 654),
        swaps(&[3], 4, 0, 286),
        swaps(&[0, 1, 3], 12, 0, 0),
        swaps(&[0, 3], 9, 0, 1),
        swaps(&[1, 3], 1, 0, 3),
    ];
    let troubles = vec![(1601, 4, Trouble::Pause(true))];
    Story { gpus: 4, pairs: 0, clients, troubles, seed: 11_896_638_578_051_175_812 }.ends_well();
}

/// A rank that cannot drain uses up the share of its gang.
#[test]
fn a_rank_waits_no_longer_because_another_one_cannot_drain() {
    let clients = vec![
        swaps(&[1, 2], 4, 0, 0),
        swaps(&[0, 2], 1, 0, 0),
        swaps(&[3], 5, 36, 651),
        swaps(&[0, 1, 2], 5, 0, 1263),
        swaps(&[2, 3], 12, 0, 2660),
        swaps(&[0, 2], 7, 0, 700),
    ];
    let troubles = vec![(2852, 0, Trouble::Stop { lasts: 5476, seen: Some(983) })];
    Story { gpus: 4, pairs: 1, clients, troubles, seed: 5_378_141_604_210_480_718 }.ends_well();
}

/// Its gang is asked to leave while it pauses. The other rank waits for its next kernels, and cannot drain.
#[test]
fn an_idle_rank_goes_on_when_another_one_cannot_drain() {
    let clients = vec![
        swaps(&[0], 5, 67, 1219),
        swaps(&[1, 2], 1, 0, 0),
        swaps(&[0], 9, 0, 1431),
        swaps(&[0], 9, 0, 0),
    ];
    let troubles = vec![(1582, 0, Trouble::Capacity(14))];
    Story { gpus: 2, pairs: 1, clients, troubles, seed: 6_267_923_668_334_550_342 }.ends_well();
}

/// Two gangs that do not fit together. One has a rank that pauses after each step.
fn gang_with_pauses() -> Vec<(Vec<u8>, Plan)> {
    vec![swaps(&[2, 3], 7, 0, 1305), swaps(&[1], 3, 111, 0), swaps(&[0, 3], 7, 0, 0), swaps(&[3], 7, 0, 1998)]
}

#[test]
fn a_gang_is_asked_to_leave_when_all_of_its_ranks_work() {
    let troubles = vec![(3970, 0, Trouble::Stop { lasts: 1762, seen: Some(0) })];
    Story { gpus: 2, pairs: 2, clients: gang_with_pauses(), troubles, seed: 15_195_789_895_582_227_182 }
        .ends_well();
}

/// Both gangs are there as their memory grows beyond the GPU.
#[test]
fn a_rank_that_was_idle_goes_on_with_its_gang_though_the_gpu_is_too_full() {
    let troubles = vec![(1445, 0, Trouble::Pause(true)), (1999, 0, Trouble::Capacity(14))];
    Story { gpus: 2, pairs: 2, clients: gang_with_pauses(), troubles, seed: 15_077_187_815_956_066_526 }
        .ends_well();
}

/// Scheduling is switched off and on while a process is stopped in the middle of an eviction. Its answer crosses SCHED_ON.
#[test]
fn room_that_was_given_back_as_scheduling_came_on_is_counted_once() {
    let managed = |on: &[u8], gib, starts_at| {
        let (on, plan) = swaps(on, gib, 0, starts_at);
        (on, Plan { memory: MemoryMode::Managed, ..plan })
    };
    let clients = vec![
        swaps(&[0, 1], 12, 376, 402),
        managed(&[0], 9, 2257),
        managed(&[0, 1], 1, 47),
        swaps(&[0, 1, 2], 8, 0, 805),
        swaps(&[0, 1], 4, 436, 1883),
        managed(&[0], 1, 1304),
    ];
    let mut world = World::new(placed(clients, 3, 0), config(false), 94_162_026_551_654_680);
    world.at(MS(3968), Later::Stop(2, FOR_EVER, Some(717)));
    world.suffer_all([
        (2294, 1, Trouble::Break),
        (3105, 4, Trouble::Stop { lasts: 9464, seen: Some(838) }),
        (5236, 0, Trouble::Capacity(14)),
        (8654, 0, Trouble::Switch(false)),
        (9251, 5, Trouble::Break),
    ]);
    world.gives_turns(Some(2));
}

/// The first gang comes back as soon as it has left: the second one has joined the turn of the third, which has not begun.
#[test]
fn gangs_that_cannot_all_run_have_turns_though_one_is_half_in() {
    let clients = vec![
        swaps(&[0, 1], 6, 0, 2098),
        swaps(&[0, 2], 3, 0, 0),
        swaps(&[2, 3], 7, 357, 0),
        swaps(&[1, 3], 2, 0, 1223),
        swaps(&[1], 1, 0, 1349),
        swaps(&[0], 7, 0, 2099),
    ];
    Story { gpus: 3, pairs: 3, clients, troubles: vec![], seed: 3_396_546_409_488_840_790 }.ends_well();
}

/// One rank is in and cannot drain. The client in the way of the other rank can.
#[test]
fn a_drain_that_was_given_up_puts_off_no_other_drain() {
    let clients = vec![
        swaps(&[2, 3], 7, 0, 1261),
        swaps(&[1], 7, 245, 0),
        swaps(&[3], 1, 0, 0),
        swaps(&[2], 11, 0, 0),
        swaps(&[3], 5, 0, 0),
    ];
    let troubles = vec![(2378, 0, Trouble::Stop { lasts: 910, seen: Some(0) })];
    Story { gpus: 2, pairs: 1, clients, troubles, seed: 28_956_175_805_877_548 }.ends_well();
}

/// A rank pauses for longer than the first drains may take. Others drain well on its gang's GPU meanwhile.
#[test]
fn a_rank_that_pauses_is_waited_for_longer_after_each_drain_that_was_given_up() {
    let clients = vec![
        swaps(&[1], 12, 0, 2208),
        swaps(&[3], 11, 0, 2058),
        swaps(&[0], 1, 487, 1726),
        swaps(&[1, 3], 8, 0, 767),
        swaps(&[1], 12, 0, 0),
        swaps(&[1, 2, 3], 6, 0, 1426),
        swaps(&[1], 5, 516, 1130),
    ];
    Story { gpus: 4, pairs: 2, clients, troubles: vec![], seed: 9_838_684_475_913_846_044 }.ends_well();
}

/// A rank that pauses is on a GPU where the other one is not, and its gang has had more than others there.
#[test]
fn a_rank_that_resumes_changes_nothing_in_the_place_of_another_one() {
    let clients = vec![
        swaps(&[0, 1, 2], 4, 53, 0),
        swaps(&[0, 1], 5, 0, 1043),
        swaps(&[2, 3], 8, 0, 1894),
        swaps(&[1, 2, 3], 12, 0, 1266),
        swaps(&[3], 9, 0, 1488),
    ];
    let troubles =
        vec![(4334, 0, Trouble::Switch(false)), (4439, 1, Trouble::Stop { lasts: 5068, seen: Some(562) })];
    Story { gpus: 3, pairs: 1, clients, troubles, seed: 10 }.ends_well();
}

/// One rank runs and cannot drain without the other, which fits beside all that run.
#[test]
fn a_rank_that_fits_joins_its_gang_though_others_are_ahead() {
    let clients = vec![
        swaps(&[0, 1, 2], 1, 0, 880),
        swaps(&[2, 3], 3, 0, 1936),
        swaps(&[2, 3], 4, 239, 1562),
        swaps(&[0], 5, 0, 1256),
        swaps(&[1], 1, 0, 2876),
        swaps(&[2], 5, 475, 1596),
        swaps(&[1, 2], 4, 0, 1256),
        swaps(&[2, 3], 9, 446, 855),
    ];
    let troubles = vec![
        (0, 0, Trouble::Capacity(15)),
        (3230, 0, Trouble::Stop { lasts: 100, seen: None }),
        (3350, 1, Trouble::Stop { lasts: 2379, seen: Some(0) }),
        (4671, 3, Trouble::Stop { lasts: 694, seen: Some(77) }),
    ];
    Story { gpus: 3, pairs: 2, clients, troubles, seed: 684_725_304_541_332_782 }.ends_well();
}

/// A rank that goes on is asked along with its gang only when its gate is open.
#[test]
fn a_gang_is_not_asked_in_the_moment_in_which_a_rank_goes_on() {
    let clients = vec![
        swaps(&[1, 2], 6, 336, 347),
        swaps(&[0, 2, 3], 6, 0, 1731),
        swaps(&[1], 7, 0, 478),
        swaps(&[1], 3, 0, 0),
        swaps(&[2], 7, 414, 1819),
        swaps(&[0, 2, 3], 12, 0, 1395),
        swaps(&[0, 1, 2], 9, 0, 2864),
        swaps(&[2], 10, 0, 341),
    ];
    let troubles = vec![
        (479, 2, Trouble::Stop { lasts: 1327, seen: None }),
        (3060, 7, Trouble::Stop { lasts: 6940, seen: Some(0) }),
        (7569, 0, Trouble::Capacity(15)),
    ];
    Story { gpus: 4, pairs: 2, clients, troubles, seed: 13_824_201_799_062_186_856 }.ends_well();
}

/// Each gang has a rank that works, and one that comes in while the other gang waits for the turn.
#[test]
fn two_gangs_do_not_come_to_wait_for_each_others_memory() {
    let clients = vec![
        swaps(&[1, 3], 7, 0, 1630),
        swaps(&[0, 2], 5, 0, 0),
        swaps(&[1], 5, 0, 1502),
        swaps(&[1, 2, 3], 7, 0, 1),
    ];
    Story { gpus: 3, pairs: 2, clients, troubles: vec![], seed: 7_356_964_902_484_740_312 }.ends_well();
}

/// Another gang comes that has no memory yet, and grows beyond the GPU. It leaves, since none of it works.
#[test]
fn a_gang_whose_last_rank_comes_in_stays_beside_one_that_grows() {
    for (starts_at, seed) in [(768, 2_570_674_657_325_819_352), (969, 2_101_398_164_843_955_548)] {
        let clients = vec![
            swaps(&[0], 7, 0, 0),
            swaps(&[0], 7, 0, 1481),
            swaps(&[0], 5, 0, 1482),
            swaps(&[0, 1], 7, 0, 0),
            swaps(&[0, 3], 6, 0, 0),
            swaps(&[0, 1, 3], 3, 0, starts_at),
        ];
        let troubles = vec![(1482, 0, Trouble::Capacity(14))];
        Story { gpus: 3, pairs: 3, clients, troubles, seed }.ends_well();
    }
}

#[test]
fn a_gang_that_is_paused_leaves_when_its_last_rank_has_come_in() {
    let clients =
        vec![swaps(&[3], 6, 0, 0), swaps(&[1, 3], 5, 0, 1568), swaps(&[3], 5, 0, 2138), swaps(&[3], 7, 0, 0)];
    let troubles = vec![(1588, 0, Trouble::Pause(true))];
    Story { gpus: 4, pairs: 2, clients, troubles, seed: 4_905_495_233_151_409_416 }.ends_well();
}
