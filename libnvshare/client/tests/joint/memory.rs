//! Room of real clients: asked for, and not given back.

use std::time::Duration;

use nvshare_proto::ClientState;

use crate::plan::{Plan, steady};
use crate::world::{MS, Process, World, config, gpu};

#[test]
fn a_need_that_crossed_with_its_room_holds_nobody_up() {
    // It grows on two GPUs; the room for one arrives first, and it asks for the other once more.
    let grows = Plan { gpus: vec![gpu(0), gpu(1)], grows_every: Some(401), ..steady(14, 845) };
    let other = Plan { pause: 10, starts_at: 501, ..steady(2, 301) };
    let plans = vec![Plan { runs_already: true, ..grows }, other];
    for seed in (0..32).chain([4_477_790_973_996_748_370]) {
        let mut world = World::new(plans.clone(), config(false), seed);
        world.run(MS(80_000));
        let is_done = |p: &Process| p.program.served >= MS(p.plan.work);
        assert!(world.processes.iter().all(is_done), "seed {seed}: {:?}", world.core.client_status());
    }
}

#[test]
fn a_client_that_cannot_evict_keeps_others_waiting_until_it_is_gone() {
    let stuck = Plan { cannot_evict: true, work: 500, dies_at: Some(8_000), ..steady(12, 500) };
    let mut world = World::new(vec![stuck, Plan { starts_at: 200, ..steady(12, 500) }], config(false), 5);
    world.run(MS(7_500));
    assert_eq!(world.served(1), Duration::ZERO);
    assert!(
        world.core.client_status().iter().any(|c| c.state == ClientState::Blocked),
        "{:?}",
        world.core.client_status()
    );
    world.run(MS(20_000));
    assert!(world.served(1) >= MS(500));
}
