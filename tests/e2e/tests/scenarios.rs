//! The five named scenarios, on the simulated driver: alone; two that fit; two that do not; a capture under
//! contention; a kill in a hand-over.

use nvshare_harness::{Program, Ran, Running, Scheduler, World, wait_until};
use nvshare_proto::ClientState;

/// A card of 1 GiB with a fast link, so that a hand-over takes some ten milliseconds.
const SMALL: &[(&str, &str)] = &[
    ("NVSIM_MEMORY", "1GiB"),
    ("NVSIM_SCALE", "16"),
    ("NVSIM_TO_DEVICE", "12"),
    ("NVSIM_TO_HOST", "6"),
    ("NVSIM_FAULT", "1"),
];

nvshare_harness::with_both_memories! {
    alone
    two_that_fit_run_together
    two_that_do_not_fit_take_turns
    stream_ordered_memory_moves_as_well
    a_capture_under_contention_is_not_broken
    a_program_killed_in_a_hand_over_leaves_its_room
}

fn alone(memory: &str) {
    let world = World::with_memory(memory, SMALL);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let job = Program::workload(&world, "alone", "--memory 512MiB --block 64MiB --steps 20 --full-check")
        .start()
        .finish();
    job.intact();
    let status = Scheduler::status(&world);
    let client = status.client(job.pid);
    // 8 blocks: filled once, stepped 20 times, and read back 32 pieces each.
    assert_eq!(client.counters.gated, 8 + 8 * 20 + 8 * 32);
    assert_eq!(client.counters.passed_by, 0);
    assert_eq!(client.counters.hand_overs, 0);
    assert_eq!(client.counters.evicted, 0);
    let moved = world.moved_when_told();
    // Memory that was allocated under the lock was populated before a kernel touched it.
    assert_eq!(moved.touched, 0);
}

fn two_that_fit_run_together(memory: &str) {
    let world = World::with_memory(memory, SMALL);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.2"]);
    let args = "--memory 448MiB --block 64MiB --kernel-us 1000";
    let jobs =
        ["a", "b"].map(|name| Program::workload(&world, name, args).until_told().waits_for_go().start());
    let go = Running::go(&[&jobs[0], &jobs[1]]);
    wait_until("their kernels alternate", || Ran::changes(&world.observe().1, go) > 20);
    let jobs = world.stop_intact(jobs);
    let status = Scheduler::status(&world);
    for job in &jobs {
        assert_eq!(status.client(job.pid).counters.hand_overs, 0);
        assert_eq!(status.client(job.pid).counters.passed_by, 0);
    }
    let (moved, _) = world.observe();
    assert_eq!((moved.faulted, moved.pushed_out, moved.evicted), (0, 0, 0));
}

fn two_that_do_not_fit_take_turns(memory: &str) {
    let world = World::with_memory(memory, SMALL);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.5"]);
    // One of them never waits for the GPU: whenever its turn ends, work is in flight.
    let jobs = [("a", ""), ("b", " --ahead")].map(|(name, more)| {
        let args = "--memory 768MiB --block 64MiB --kernel-us 1000 --full-check".to_owned() + more;
        Program::workload(&world, name, &args).until_told().waits_for_go().start()
    });
    let go = Running::go(&[&jobs[0], &jobs[1]]);
    Scheduler::until_turns(&world, &[&jobs[0], &jobs[1]], 4);
    let jobs = world.stop_intact(jobs);
    let status = Scheduler::status(&world);
    let mut hand_overs = 0;
    for job in &jobs {
        let counters = status.client(job.pid).counters;
        assert_eq!(counters.passed_by, 0);
        assert!(counters.hand_overs >= 4, "{counters:?}");
        // All memory that left came back, apart from memory that the last turn did not need.
        assert!(counters.evicted >= 512 << 20, "{counters:?}");
        assert!(counters.restored <= counters.evicted, "{counters:?}");
        hand_overs += counters.hand_overs as usize;
    }
    let (moved, ran) = world.observe();
    // Memory moved in bulk: no kernel ever found a page absent, and the card was never overfull.
    assert_eq!((moved.faulted, moved.pushed_out), (0, 0), "{moved:?}");
    // Kernels of one program never ran in the other's turn.
    let changes = Ran::changes(&ran, go);
    assert!(changes <= hand_overs + 1, "{changes} changes in {hand_overs} hand-overs");
}

fn stream_ordered_memory_moves_as_well(memory: &str) {
    let world = World::with_memory(memory, SMALL);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.3"]);
    let args = "--memory 768MiB --block 64MiB --kernel-us 1000 --full-check --ordered --churn";
    let jobs =
        ["a", "b"].map(|name| Program::workload(&world, name, args).until_told().waits_for_go().start());
    Running::go(&[&jobs[0], &jobs[1]]);
    Scheduler::until_turns(&world, &[&jobs[0], &jobs[1]], 4);
    let jobs = world.stop_intact(jobs);
    let status = Scheduler::status(&world);
    for job in &jobs {
        let counters = status.client(job.pid).counters;
        assert!(counters.evicted >= 512 << 20 && counters.passed_by == 0, "{counters:?}");
    }
    world.moved_when_told();
}

#[test]
fn without_restore_page_faults_bring_the_memory_back() {
    let world = World::with_memory("managed", SMALL);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.5"]);
    let args = "--memory 768MiB --block 64MiB --kernel-us 1000 --full-check";
    let jobs = ["a", "b"].map(|name| {
        let job = Program::workload(&world, name, args).env("NVSHARE_RESTORE", "0");
        job.until_told().waits_for_go().start()
    });
    Running::go(&[&jobs[0], &jobs[1]]);
    Scheduler::until_turns(&world, &[&jobs[0], &jobs[1]], 3);
    world.stop_intact(jobs);
    let (moved, _) = world.observe();
    assert!(moved.faulted >= 512 << 20, "{moved:?}");
    assert_eq!(moved.restored, 0, "{moved:?}");
}

fn a_capture_under_contention_is_not_broken(memory: &str) {
    let world = World::with_memory(memory, SMALL);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.2"]);
    let steady = "--memory 640MiB --block 64MiB --kernel-us 1000 --full-check";
    let graphs = format!("{steady} --graph");
    let jobs = [("graphs", graphs.as_str()), ("steady", steady)]
        .map(|(name, args)| Program::workload(&world, name, args).until_told().waits_for_go().start());
    Running::go(&[&jobs[0], &jobs[1]]);
    Scheduler::until_turns(&world, &[&jobs[0], &jobs[1]], 4);
    for job in world.stop_intact(jobs) {
        assert!(Scheduler::status(&world).client(job.pid).counters.hand_overs >= 4);
    }
}

fn a_program_killed_in_a_hand_over_leaves_its_room(memory: &str) {
    let world = World::with_memory(memory, SMALL);
    // A slow way out: the kill comes in the middle of it.
    let mut scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.5"]);
    let args = "--memory 768MiB --block 32MiB --kernel-us 1000";
    let victim = Program::workload(&world, "victim", args).until_told().env("NVSIM_TO_HOST", "0.5").start();
    Scheduler::until(&world, "the first one holds the lock", |status| {
        status.find(victim.pid()).is_some_and(|client| client.state == ClientState::Running)
    });
    let other = Program::workload(&world, "other", &format!("{args} --full-check")).until_told().start();
    Scheduler::until(&world, "memory of the first one leaves", |status| {
        status
            .find(victim.pid())
            .is_some_and(|client| client.state == ClientState::Waiting || client.state == ClientState::Parked)
    });
    victim.signal(libc::SIGKILL);
    let _ = victim.finish();
    Scheduler::until(&world, "the other one has all of its memory and runs", |status| {
        let other = status.client(other.pid());
        other.state == ClientState::Running && other.usage.iter().all(|usage| usage.absent == 0)
    });
    world.stop_intact([other]);
    assert!(scheduler.lives());
    Scheduler::until(&world, "all is free", |status| status.gpus[0].resident == 0);
}
