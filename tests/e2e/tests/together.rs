//! Programs that fit run side by side or take turns, as measured: with the scheduler, the library, and two programs of which each
//! leaves the card gaps, or fills it.

use nvshare_harness::{PlayedScheduler, Program, Running, Scheduler, World, wait_until};
use nvshare_proto::{ClientMessage, Epoch, Room, SchedulerMessage};

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

#[test]
fn programs_that_fill_the_card_and_launch_far_ahead_come_to_take_turns() {
    // 1021 launches in flight are half a second of work alone, and several beside the other.
    let world = World::simulated(&[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64"), ("NVSIM_SLICING", "4")]);
    let scheduler = measures(&world);
    let programs = two(&world, "--block 2MiB --kernel-us 500 --ahead");
    // Where a busy machine has a drain given up, another trial follows.
    wait_until("turns are decided upon", || scheduler.log().contains("jobs that fit take turns"));
    Scheduler::until_turns(&world, &[&programs[0], &programs[1]], 12);
    world.stop_intact(programs);
}

#[test]
fn programs_that_launch_far_ahead_and_leave_gaps_stay_side_by_side() {
    // Each step is 0.4 s of work that is launched at once, and then as much time without any.
    let world = World::simulated(&[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")]);
    let scheduler = measures(&world);
    let programs = two(&world, "--block 1MiB --kernel-us 6000 --host-ms 400");
    let ends = ["stay side by side", "a job leaves gaps", "cannot drain", "get as much done"];
    wait_until("a trial is over", || ends.iter().any(|end| scheduler.log().contains(end)));
    Scheduler::until(&world, "nobody takes turns", |status| !status.gpus[0].slices);
    world.stop_intact(programs);
    assert!(!scheduler.log().contains("jobs that fit take turns"), "{}", scheduler.log());
}

/// What a program has done is asked while it launches far ahead: the answer waits for the work that was submitted, and counts no more.
#[test]
fn a_program_says_what_is_complete_and_not_what_it_has_launched() {
    let world = World::simulated(&[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")]);
    let listener = PlayedScheduler::listen(&world);
    let job = Program::workload(&world, "job", "--memory 64MiB --block 8MiB --kernel-us 1000 --ahead");
    let job = job.until_told().start();
    let (mut client, usage) = PlayedScheduler::accept(&listener);
    let gpu = usage.first().map(|usage| usage.gpu);
    let gpu = gpu.unwrap_or_else(|| {
        client.until(|m| if let ClientMessage::Usage(u) = m { Some(u.gpu) } else { None })
    });
    let epoch = Epoch { boot: 1, counter: 1 };
    let room = Room { gpu, bytes: 1 << 30 };
    client.say(&[
        SchedulerMessage::Capacity(room),
        SchedulerMessage::LockOk { epoch, quantum_ms: 1000, room: vec![room] },
    ]);
    let complete = || world.observe().1.len() as u64;
    wait_until("it launches far ahead", || {
        client.say(&[SchedulerMessage::AskCounters]);
        let launched =
            client.until(|m| if let ClientMessage::Counters(c) = m { Some(c.gated) } else { None });
        launched > complete() + 500
    });
    let before = complete();
    client.say(&[SchedulerMessage::AskProgress { ticket: 7 }]);
    let submissions = client.until(|m| match m {
        ClientMessage::Progress { ticket: 7, submissions } => Some(*submissions),
        _ => None,
    });
    let after = complete();
    assert!(before + 500 <= submissions && submissions <= after, "{before} {submissions} {after}");
    // A drain goes before an answer that is still to come.
    client.say(&[
        SchedulerMessage::AskProgress { ticket: 8 },
        SchedulerMessage::DropLock { epoch, patience_ms: 60_000 },
    ]);
    client.until(|m| matches!(m, ClientMessage::LockReleased { .. }).then_some(()));
    client.say(&[SchedulerMessage::SchedOff]);
    world.stop();
    job.finish().intact();
}
