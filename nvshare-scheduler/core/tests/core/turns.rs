//! Whose turn it is, and when it is over.

use std::time::Duration;

use nvshare_core::{Config, Event, Output};
use nvshare_proto::{ClientMessage, Gate, SchedulerMessage};

use crate::model::{Plan, steady};
use crate::table::{Table, asked_to_leave, granted, registered};
use crate::world::{GIB, MS, World, config};

#[test]
fn two_that_do_not_fit_take_equal_turns() {
    let mut world = World::new(vec![steady(12, 20_000), steady(12, 20_000)], config(false), 7);
    world.run(MS(20_000));
    let [a, b] = [world.models[0].served, world.models[1].served];
    assert!(a.abs_diff(b) <= MS(1500), "{a:?} and {b:?}");
    assert!(a + b >= MS(12_000), "{a:?} and {b:?} of 20 s");
    // A quantum of the other, and the hand-overs around it.
    assert!(world.models.iter().all(|m| m.longest_wait <= MS(2200)), "{:?}", world.models);
}

#[test]
fn a_slow_drain_is_waited_for_in_the_end_whoever_runs_beside_it() {
    // Two run together; one gives the lock back at once, and the other after a second.
    for pause in [0, 60, 2000] {
        let slow = Plan { drains_in: 1000, ..steady(4, 60_000) };
        let quick = Plan { pause, ..steady(4, 60_000) };
        let mut world = World::new(vec![quick, slow, steady(14, 2_000)], config(false), 7);
        world.run(MS(30_000));
        assert!(world.models[2].served >= MS(2_000), "pauses of {pause} ms: {:?}", world.models[2]);
    }
}

#[test]
fn two_that_fit_are_never_interrupted() {
    let mut world = World::new(vec![steady(8, 5_000), steady(8, 5_000)], config(false), 7);
    world.run(MS(20_000));
    assert!(world.models.iter().all(|m| m.drains == 0 && m.served >= MS(5000)));
}

#[test]
fn a_small_one_runs_beside_whoever_has_the_turn() {
    let mut world =
        World::new(vec![steady(2, 20_000), steady(12, 20_000), steady(12, 20_000)], config(false), 9);
    world.run(MS(20_000));
    assert_eq!(world.models[0].drains, 0);
    assert!(world.models[0].served >= MS(19_000), "{:?}", world.models[0].served);
}

#[test]
fn who_has_work_in_bursts_is_not_moved_out_at_each_pause() {
    // 60 ms of host work in each 160 ms; moving 8 GiB costs seconds at the rates assumed at first.
    let mut world =
        World::new(vec![Plan { pause: 60, ..steady(12, 60_000) }, steady(12, 60_000)], config(false), 3);
    world.run(MS(10_000));
    assert!(world.models[0].drains <= 8, "{} drains in 10 s of quanta of 1 s", world.models[0].drains);
}

#[test]
fn an_idle_holder_gives_way_before_its_quantum_is_over() {
    let config = Config { quantum: MS(60_000), exclusive: true, ..config(true) };
    // Exclusive: nothing has to move.
    let mut world = World::new(vec![steady(1, 300), Plan { starts_at: 100, ..steady(1, 300) }], config, 3);
    world.run(MS(5_000));
    assert!(world.models[1].served >= MS(300));
    // Two restores, and the work of the first.
    assert!(world.models[1].longest_wait <= MS(1100), "{:?}", world.models[1].longest_wait);
}

#[test]
fn who_was_there_before_its_scheduler_gives_way_when_its_quantum_is_over() {
    let there = Plan { runs_already: true, ..steady(12, 60_000) };
    let mut world = World::new(vec![there, Plan { starts_at: 100, ..steady(12, 500) }], config(false), 3);
    world.run(MS(5_000));
    assert!(world.models[1].served >= MS(500), "{:?}", world.models[1].served);
}

#[test]
fn who_never_runs_under_its_grant_does_not_keep_the_gpu_from_others() {
    // A client that registers, asks, and is never heard of again.
    let mut world =
        World::new(vec![steady(12, 60_000), Plan { starts_at: 3_000, ..steady(2, 500) }], config(false), 3);
    world.core.handle(registered(77, Gate::Closed, 12 * GIB), MS(0));
    world.core.handle(Event::Message { client: 77, message: ClientMessage::ReqLock }, MS(0));
    let granted = std::iter::from_fn(|| world.core.poll_output())
        .any(|o| matches!(o, Output::Send { client: 77, message: SchedulerMessage::LockOk { .. } }));
    assert!(granted);
    world.silent = Some(77);
    world.run(MS(30_000));
    assert!(world.models[1].served >= MS(500), "the small one fits beside it");
    assert!(world.notes.iter().any(|note| note.contains("client 77 does not answer")), "{:?}", world.notes);
}

#[test]
fn a_drain_that_was_given_up_makes_no_turn_of_others_longer() {
    let (pauses, waits) = (1, 2);
    let mut table = Table::new(config(false));
    table.register(pauses, Gate::Open, 12 * GIB, 0);
    table.register(waits, Gate::Closed, 12 * GIB, 12 * GIB);
    let mut sent = table.say(waits, ClientMessage::ReqLock);
    let mut last = None;
    for _ in 0..6 {
        let now = table.now;
        sent.append(&mut table.wait_until(now + 60_000));
        let epoch = asked_to_leave(&sent, pauses).unwrap_or_else(|| panic!("{sent:?}"));
        last = Some(epoch);
        sent = table.say(pauses, ClientMessage::DropDeferred { epoch });
    }
    // It is asked again in half a minute. Before, its work is complete, and it has a pause.
    let epoch = last.expect("it was asked");
    let sent = table.say(pauses, ClientMessage::Idle { epoch });
    let sent = table.give_back(sent);
    let epoch = granted(&sent, waits).unwrap_or_else(|| panic!("{sent:?}"));
    table.say(waits, ClientMessage::Running { epoch });
    table.say(pauses, ClientMessage::ReqLock);
    let now = table.now;
    let sent = table.wait_until(now + 2100);
    assert_eq!(asked_to_leave(&sent, waits), Some(epoch), "{sent:?}");
}

#[test]
fn who_always_defers_keeps_the_gpu_and_nothing_else() {
    let deferring = Plan { defers_every: Some(1), ..steady(12, 60_000) };
    let mut world = World::new(
        vec![deferring, Plan { starts_at: 300, ..steady(12, 500) }, steady(2, 500)],
        config(false),
        5,
    );
    world.run(MS(30_000));
    assert_eq!(world.models[1].served, Duration::ZERO);
    assert!(world.models[2].served >= MS(500));
}
