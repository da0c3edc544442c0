//! Whose turn it is, and when it is over, with real clients.

use std::time::Duration;

use nvshare_core::{Config, Event, Identity, Output};
use nvshare_proto::{ClientMessage, Register, SchedulerMessage, Usage};

use crate::plan::{Plan, steady};
use crate::world::{CAPACITY, GIB, MS, World, config, gpu};

/// A client that is not one of the world's processes.
fn registered(client: u64, allocated: u64) -> Event {
    let usage = Usage { gpu: gpu(0), total: CAPACITY, limit: 0, allocated, absent: allocated, immovable: 0 };
    let register = Register { usage: vec![usage], ..Register::newcomer(9, "x") };
    let identity = Identity { pid: Some(9), process: Some(client), ..Identity::default() };
    Event::Registered { client, identity, register }
}

#[test]
fn two_that_do_not_fit_take_equal_turns() {
    let mut world = World::new(vec![steady(12, 20_000), steady(12, 20_000)], config(false), 7);
    world.run(MS(20_000));
    let [a, b] = [world.served(0), world.served(1)];
    assert!(a.abs_diff(b) <= MS(1500), "{a:?} and {b:?}");
    assert!(a + b >= MS(12_000), "{a:?} and {b:?} of 20 s");
    // A quantum of the other, and the hand-overs around it.
    assert!(
        world.processes.iter().all(|p| p.program.longest_wait <= MS(2200)),
        "{:?}",
        world.core.client_status()
    );
}

#[test]
fn a_slow_drain_is_waited_for_in_the_end_whoever_runs_beside_it() {
    // Two run together; one gives the lock back at once, and the other after a second.
    for pause in [0, 60, 2000] {
        let slow = Plan { drains_in: 1000, ..steady(4, 60_000) };
        let quick = Plan { pause, ..steady(4, 60_000) };
        let mut world = World::new(vec![quick, slow, steady(14, 2_000)], config(false), 7);
        world.run(MS(30_000));
        assert!(world.served(2) >= MS(2_000), "pauses of {pause} ms: {:?}", world.core.client_status());
    }
}

#[test]
fn two_that_fit_are_never_interrupted() {
    let mut world = World::new(vec![steady(8, 5_000), steady(8, 5_000)], config(false), 7);
    world.run(MS(20_000));
    assert!(world.processes.iter().all(|p| p.program.drains == 0 && p.program.served >= MS(5000)));
}

#[test]
fn a_small_one_runs_beside_whoever_has_the_turn() {
    let mut world =
        World::new(vec![steady(2, 20_000), steady(12, 20_000), steady(12, 20_000)], config(false), 9);
    world.run(MS(20_000));
    assert_eq!(world.processes[0].program.drains, 0);
    assert!(world.served(0) >= MS(19_000), "{:?}", world.served(0));
}

#[test]
fn a_client_with_bursts_of_work_is_not_moved_out_at_each_pause() {
    // 60 ms of host work in each 160 ms; moving 8 GiB costs seconds at the rates assumed at first.
    let mut world =
        World::new(vec![Plan { pause: 60, ..steady(12, 60_000) }, steady(12, 60_000)], config(false), 3);
    world.run(MS(10_000));
    assert!(
        world.processes[0].program.drains <= 8,
        "{} drains in 10 s of quanta of 1 s",
        world.processes[0].program.drains
    );
}

#[test]
fn an_idle_holder_gives_way_before_its_quantum_is_over() {
    let config = Config { quantum: MS(60_000), exclusive: true, ..config(true) };
    // Exclusive: nothing has to move.
    let mut world = World::new(vec![steady(1, 300), Plan { starts_at: 100, ..steady(1, 300) }], config, 3);
    world.run(MS(5_000));
    assert!(world.served(1) >= MS(300));
    // Two restores, and the work of the first.
    assert!(
        world.processes[1].program.longest_wait <= MS(1100),
        "{:?}",
        world.processes[1].program.longest_wait
    );
}

#[test]
fn a_client_older_than_its_scheduler_gives_way_when_its_quantum_is_over() {
    let there = Plan { runs_already: true, ..steady(12, 60_000) };
    let mut world = World::new(vec![there, Plan { starts_at: 100, ..steady(12, 500) }], config(false), 3);
    world.run(MS(5_000));
    assert!(world.served(1) >= MS(500), "{:?}", world.served(1));
}

#[test]
fn a_client_that_never_runs_under_its_grant_does_not_keep_the_gpu() {
    // A client that registers, asks, and is never heard of again.
    let mut world =
        World::new(vec![steady(12, 60_000), Plan { starts_at: 3_000, ..steady(2, 500) }], config(false), 3);
    world.core.handle(registered(77, 12 * GIB), MS(0));
    world.core.handle(Event::Message { client: 77, message: ClientMessage::ReqLock }, MS(0));
    let granted = std::iter::from_fn(|| world.core.poll_output())
        .any(|o| matches!(o, Output::Send { client: 77, message: SchedulerMessage::LockOk { .. } }));
    assert!(granted);
    world.silent = Some(77);
    world.run(MS(30_000));
    assert!(world.served(1) >= MS(500), "the small one fits beside it");
    assert!(
        world.notes.iter().any(|note| note.contains("client 77 (x, pid 9) does not answer")),
        "{:?}",
        world.notes
    );
}

#[test]
fn a_client_that_always_defers_keeps_the_gpu_and_nothing_else() {
    let deferring = Plan { defers_every: Some(1), ..steady(12, 60_000) };
    let mut world = World::new(
        vec![deferring, Plan { starts_at: 300, ..steady(12, 500) }, steady(2, 500)],
        config(false),
        5,
    );
    world.run(MS(30_000));
    assert_eq!(world.served(1), Duration::ZERO);
    assert!(world.served(2) >= MS(500));
}
