//! Programs that fit run side by side or take turns, as measured: what they have done reaches the scheduler, and they come to take turns. Which
//! rates lead to which decision is a matter of virtual time (`nvshare-scheduler/core/tests/core/together.rs`).

use nvshare_harness::{PlayedScheduler, Program, Running, Scheduler, World, wait_until};
use nvshare_proto::{Amount, ClientMessage, Epoch, SchedulerMessage};

#[test]
#[ignore = "what is decided goes by what gets done on this machine while it is measured: `.ci/run` runs this"]
fn programs_that_fill_the_card_come_to_take_turns() {
    // Kernels take ten times as long while another process has kernels on the card: of what a program does alone, a busy machine takes
    // less.
    let world = World::simulated(&[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64"), ("NVSIM_SLICING", "10")]);
    let scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--together", "measure"]);
    let arguments = "--memory 64MiB --block 8MiB --kernel-us 2000";
    let programs =
        ["a", "b"].map(|name| Program::workload(&world, name, arguments).until_told().waits_for_go().start());
    Running::go(&[&programs[0], &programs[1]]);
    wait_until("turns are decided upon", || scheduler.log().contains("jobs that fit take turns"));
    Scheduler::until_turns(&world, &[&programs[0], &programs[1]], 8);
    world.stop_intact(programs);
}

/// A program is asked for its work while it launches far ahead: the answer waits for the work that was submitted, and counts no more.
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
    let room = Amount { gpu, bytes: 1 << 30 };
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
    // A launch counts when it passes the gate: the program's only thread may be between that and the driver's call.
    assert!(before + 500 <= submissions && submissions <= after + 1, "{before} {submissions} {after}");
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
