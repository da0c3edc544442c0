//! The worlds, and what has to hold in them.

use std::time::Duration;

use nvshare_core::{Config, Gang};

use super::honest::Honest;
use super::liar::Liar;
use super::world::World;
use crate::table::{MS, config};

const HOUR: Duration = Duration::from_secs(3600);

fn quantum(ms: u64) -> Config {
    Config { quantum: MS(ms), ..config(false) }
}

/// Numbers that look random, from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below.max(1)
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

#[test]
fn equal_jobs_stay_close_over_any_hour() {
    for (ms, drains) in
        [(1000, vec![20, 5000]), (8000, vec![20, 5000, 1000]), (4000, vec![20, 20, 3000, 20, 500])]
    {
        let mut world = World::new(quantum(ms));
        let roles: Vec<usize> = drains
            .iter()
            .map(|&drains_in| world.add(0, Honest { drains_in, ..Honest::new(0, 12) }))
            .collect();
        let longest = MS(drains.iter().copied().max().unwrap_or(0));
        // Lag over an hour is how far the difference of two moves within it, at most how far it moves in all.
        let mut range = vec![(0i64, 0i64); roles.len() * roles.len()];
        world.run(HOUR, |world| {
            let had: Vec<i64> = roles.iter().map(|&role| world.computed(role).as_millis() as i64).collect();
            for (i, one) in had.iter().enumerate() {
                for (j, other) in had.iter().enumerate().skip(i + 1) {
                    let (least, most) = &mut range[i * had.len() + j];
                    (*least, *most) = ((*least).min(one - other), (*most).max(one - other));
                }
            }
        });
        let lag = range.iter().map(|(least, most)| most - least).max().unwrap_or(0);
        let bound = 2 * (MS(ms) + longest) + MS(100);
        println!("quantum {ms} ms, drains {drains:?}: {lag} ms apart, {bound:?} allowed");
        assert!(MS(lag as u64) <= bound, "quantum {ms} ms, drains {drains:?}: {lag} ms, {bound:?} allowed");
    }
}

/// A crowd on four GPUs: programs of all sizes, in bursts, that grow while they are parked, give up drains, come and go, and
/// belong to tenants and gangs.
fn crowd(world: &mut World, random: &mut Random, clients: u64) -> Vec<(usize, Honest)> {
    let mut all = Vec::new();
    for n in 0..clients {
        let gpu = random.below(4) as u8;
        let gib = [1, 2, 6, 9, 12, 16][random.below(6) as usize];
        let mut plan = Honest::new(gpu, gib);
        plan.restores_in = random.below(300);
        plan.drains_in = random.below(200);
        if random.one_in(4) {
            (plan.works, plan.pauses) = (20 + random.below(500), 20 + random.below(2000));
        }
        if random.one_in(10) {
            plan.defers_every = 2 + random.below(3);
        }
        if random.one_in(10) {
            plan.needs_parked = 1;
        }
        if random.one_in(4) {
            plan.ends_after = Some((100 + random.below(3000), random.below(1000)));
        }
        if random.one_in(5) {
            plan.tenant = Some(random.below(5));
        }
        if random.one_in(8) && gib <= 6 {
            // Two members on different GPUs.
            let gang = Some(Gang { number: 100 + n, size: 2 });
            let other = Honest { gpu: (gpu + 1) % 4, gang, tenant: None, ends_after: None, ..plan.clone() };
            plan = Honest { gang, tenant: None, ends_after: None, ..plan };
            all.push((world.add(random.below(5000), other.clone()), other));
        }
        all.push((world.add(random.below(5000), plan.clone()), plan));
    }
    all
}

/// The bound of a wait: for each job that goes first, a turn with its hand-over, and what that job has had less than the
/// waiter when the wait begins. A job that has had less goes first as often as it takes, and what a small job has had
/// beyond its share while it ran beside others can be several turns of each of the jobs that have to catch up; without that
/// term, waits of up to 1.5 turns for each job of the GPU were seen. Its size is read from the virtual times as each wait
/// begins, and again when a job comes that is behind.
#[test]
fn nobody_in_a_crowd_waits_longer_than_the_jobs_ahead() {
    for (seed, clients) in [(1, 8), (2, 40), (3, 160), (4, 20), (5, 60), (6, 100), (7, 12), (8, 200)] {
        let mut world = World::new(quantum(500));
        let all = crowd(&mut world, &mut Random(seed * 0x9e37_79b9), clients);
        let mut longest = (Duration::ZERO, 0);
        world.run(Duration::from_secs(240), |_| {});
        for (role, _) in &all {
            longest = longest.max((world.longest_wait(*role), *role));
        }
        let mut worst = 0.0f64;
        for (role, plan) in &all {
            let part = world.worst_wait(*role);
            worst = worst.max(part);
            assert!(part <= 1.0, "role {role} waited {part} times as long as it may: {plan:?}");
        }
        println!(
            "{} clients, {} events: worst {worst:.2} of the bound, longest {longest:?}; steps {} at most, {:.1} a client",
            all.len(),
            world.events,
            world.most_steps,
            world.most_steps_each
        );
    }
}

#[test]
fn a_crowd_gets_over_restarts_of_its_scheduler() {
    for (seed, clients) in [(11, 12), (12, 80), (13, 200)] {
        let mut world = World::new(quantum(500));
        let all = crowd(&mut world, &mut Random(seed * 0x9e37_79b9), clients);
        for boot in 2..5 {
            world.run(world.now + Duration::from_secs(20), |_| {});
            world.restart(Config { boot, restarted: true, settle: MS(1300), ..quantum(500) });
        }
        world.run(world.now + Duration::from_secs(180), |_| {});
        for (role, plan) in &all {
            let part = world.worst_wait(*role);
            assert!(part <= 1.0, "role {role} waited {part} times as long as it may: {plan:?}");
        }
        println!("{} clients, {} events after 3 restarts", all.len(), world.events);
    }
}

#[test]
fn lies_stop_nobody_on_another_gpu_and_cost_no_more_than_others() {
    let seconds = 12;
    for (seed, gpu_memory) in [(1, Some(16 << 30)), (2, None), (3, Some(16 << 30)), (4, None), (5, None)] {
        let mut world =
            World::new(Config { gpu_memory, reserve: Some(0), exclusive: seed == 3, ..quantum(500) });
        for n in 0..12 {
            world.add(n * 10, Liar::new(seed * 1000 + n, 0, 7));
        }
        let mut random = Random(seed);
        for n in 0..20 {
            let on = random.below(7) as u8;
            let gib = 1 + random.below(16);
            world.add(n * 7, Honest::new(on, gib));
        }
        let away: Vec<usize> = (0..4).map(|_| world.add(0, Honest::new(7, 12))).collect();
        world.run(Duration::from_secs(seconds), |_| {});
        for role in away {
            let wait = world.longest_wait(role);
            assert!(wait <= MS(4 * 1200), "waited {wait:?}");
        }
        // A need of who holds the GPU, and does not get it, once had others evict one byte after the other.
        assert!(
            world.events < 10_000,
            "{} events in {seconds} s: one follows another without end",
            world.events
        );
        println!(
            "{} events, {} steps at most, {:.1} a client",
            world.events, world.most_steps, world.most_steps_each
        );
    }
}
