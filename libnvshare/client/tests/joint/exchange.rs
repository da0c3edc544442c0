//! Memory comes to the card while that of others leaves.

use std::time::Duration;

use nvshare_core::Event;
use nvshare_proto::MemoryMode;

use crate::agenda::Later;
use crate::library::GateState;
use crate::plan::{Plan, steady};
use crate::world::{CAPACITY, GIB, MS, World, config};

const LEAVES: usize = 0;
const COMES: usize = 1;

fn swaps(gib: u64, work: u64) -> Plan {
    Plan { memory: MemoryMode::Swap, ..steady(gib, work) }
}

/// Bytes that a process has on the card, and on the way there.
fn charged(world: &World, i: usize) -> u64 {
    world.processes[i].library.devices[0].account().charged()
}

/// The memory of the second process comes to the card while that of the first one leaves.
fn is_exchanging(world: &World) -> bool {
    let closed = |i: usize| world.processes[i].library.gate == GateState::Closed;
    closed(LEAVES)
        && closed(COMES)
        && world.processes[LEAVES].library.evictions > 0
        && charged(world, COMES) > CAPACITY - 12 * GIB
}

/// Runs until an exchange is in its middle.
fn until_exchange(world: &mut World) {
    while !is_exchanging(world) {
        let next = world.now + Duration::from_micros(200);
        assert!(next < MS(50_000), "there was no exchange");
        world.run(next);
        world.now = next;
    }
}

impl World {
    /// An administrator switches scheduling on, or off.
    pub(crate) fn switch(&mut self, on: bool) {
        if on {
            self.core.switch_on(self.now);
        } else {
            self.core.switch_off(true, self.now).expect("it is forced");
        }
        self.follower.follow(&mut self.core);
        self.event(Event::Deadline);
    }
}

/// Two processes of which one fits, in the middle of an exchange.
fn exchanging(seed: u64) -> World {
    let plans = vec![swaps(12, 20_000), Plan { starts_at: 100, ..swaps(12, 20_000) }];
    let mut world = World::new(plans, config(false), seed);
    until_exchange(&mut world);
    world
}

fn worlds() -> impl Iterator<Item = World> {
    (0..16).map(exchanging)
}

#[test]
fn memory_comes_while_that_of_others_leaves_and_everybody_is_served() {
    worlds().for_each(|mut world| world.serves_everybody());
}

#[test]
fn managed_memory_moves_one_way_after_the_other() {
    let plans = vec![steady(12, 4000), Plan { starts_at: 100, ..steady(12, 4000) }];
    let mut world = World::new(plans, config(false), 1);
    while world.now < MS(10_000) {
        let next = world.now + Duration::from_micros(200);
        world.run(next);
        world.now = next;
        assert!(!is_exchanging(&world));
    }
}

#[test]
fn the_client_that_is_next_dies_in_the_middle() {
    for mut world in worlds() {
        let now = world.now;
        world.at(now, Later::Die(COMES));
        world.serves_everybody();
        assert_eq!(charged(&world, LEAVES), 12 * GIB);
    }
}

#[test]
fn the_client_that_leaves_dies_in_the_middle() {
    for mut world in worlds() {
        let now = world.now;
        world.at(now, Later::Die(LEAVES));
        world.serves_everybody();
        assert_eq!(charged(&world, COMES), 12 * GIB);
    }
}

#[test]
fn the_scheduler_is_killed_in_the_middle() {
    for down in [1, 300, 7000] {
        for mut world in worlds() {
            let now = world.now;
            world.at(now, Later::Restart(down));
            world.serves_everybody();
        }
    }
}

#[test]
fn scheduling_is_switched_off_in_the_middle_and_on_again() {
    for mut world in worlds() {
        // Both may have more than there is, until they have been asked for it.
        world.was_killed = true;
        world.switch(false);
        world.run(world.now + MS(2000));
        let runs = |i: usize| world.processes[i].library.gate != GateState::Closed;
        assert!(runs(LEAVES) && runs(COMES));
        world.switch(true);
        world.serves_everybody();
    }
}

#[test]
fn nothing_comes_before_all_have_drained() {
    // Two small ones run. One of them leaves at once and its memory makes room; the drains of the other are given up.
    const LARGE: usize = 2;
    for seed in 0..8 {
        let stays = Plan { defers_every: Some(2), ..swaps(6, 8000) };
        let large = Plan { starts_at: 200, ..swaps(15, 5000) };
        let mut world = World::new(vec![swaps(6, 8000), stays, large], config(false), seed);
        while world.now < MS(20_000) {
            let (next, before) = (world.now + MS(1), charged(&world, LARGE));
            let small_runs =
                |world: &World| world.processes[..LARGE].iter().any(|process| process.library.runs());
            let ran = small_runs(&world);
            world.run(next);
            world.now = next;
            let comes = charged(&world, LARGE) > before;
            // Its first room is there before anybody else needs it.
            let is_first = before < 4 * GIB;
            assert!(
                is_first || !(ran && small_runs(&world) && comes),
                "seed {seed}: memory comes at {:?} while others run",
                world.now
            );
        }
        assert!(world.processes[1].library.deferrals > 0);
        world.serves_everybody();
    }
}
