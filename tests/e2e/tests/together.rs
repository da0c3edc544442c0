//! Programs that fit run side by side or take turns, as measured: with the scheduler, the library, and two programs of which each
//! leaves the card gaps, or fills it.

use nvshare_harness::{Program, Running, Scheduler, World, wait_until};

/// Two programs on a card of 1 GiB, told to start together.
fn two(world: &World, arguments: &str) -> [Running; 2] {
    let arguments = format!("--memory 64MiB {arguments}");
    let programs =
        ["a", "b"].map(|name| Program::workload(world, name, &arguments).until_told().waits_for_go().start());
    Running::go(&[&programs[0], &programs[1]]);
    programs
}

fn measures(world: &World) -> Scheduler {
    Scheduler::start(world, &["--gpu-memory", "1GiB", "--together", "measure"])
}

#[test]
fn programs_that_fill_the_card_come_to_take_turns() {
    // Kernels take four times as long while another process has kernels on the card.
    let world = World::simulated(&[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64"), ("NVSIM_SLICING", "4")]);
    let scheduler = measures(&world);
    let programs = two(&world, "--block 8MiB --kernel-us 2000");
    wait_until("turns are decided upon", || scheduler.log().contains("jobs that fit take turns"));
    Scheduler::until_turns(&world, &[&programs[0], &programs[1]], 12);
    world.stop_intact(programs);
}

#[test]
fn programs_that_leave_gaps_stay_side_by_side() {
    let world = World::simulated(&[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")]);
    let scheduler = measures(&world);
    let programs = two(&world, "--block 64MiB --kernel-us 5000 --host-ms 10");
    wait_until("a trial is over", || {
        ["stay side by side", "a job leaves gaps"].iter().any(|end| scheduler.log().contains(end))
    });
    Scheduler::until(&world, "nobody takes turns", |status| !status.gpus[0].slices);
    world.stop_intact(programs);
    assert!(!scheduler.log().contains("jobs that fit take turns"), "{}", scheduler.log());
}
