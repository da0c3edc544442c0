//! A process that is no client has a part of the card, and nobody has measured that.

use nvshare_harness::{Program, Running, Scheduler, World, wait_until};

/// Clients believe that they may fill 896 MiB together: there is no NVML.
const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];

/// A card of which a process without the library has 320 MiB, and two clients whose memory the library maps, with so many MiB
/// each. Both run in turns, each ends with its data, and nobody is told that memory is out.
fn two_beside_a_stranger(mib: [u64; 2]) {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--tq", "0.2"]);
    let stranger = Program::workload(&world, "stranger", "--memory 320MiB --block 64MiB --host-ms 5");
    let stranger = stranger.alone().until_told().waits_for_go().start();
    wait_until("the stranger has its memory", || stranger.is_ready());
    Running::go(&[&stranger]);
    let [a, b] = [("a", mib[0]), ("b", mib[1])].map(|(name, mib)| {
        let args = format!("--memory {mib}MiB --block 32MiB --kernel-us 500 --full-check");
        let job = Program::workload(&world, name, &args).until_told().start();
        wait_until("it has begun to allocate", || {
            let status = Scheduler::status(&world);
            status.find(job.pid()).is_some_and(|client| client.usage.iter().any(|usage| usage.allocated > 0))
        });
        job
    });
    Scheduler::until_turns(&world, &[&a, &b], 3);
    // Who is granted the lock has not run yet.
    let submitted = || [&a, &b].map(|job| Scheduler::status(&world).client(job.pid()).counters.gated);
    let before = submitted();
    wait_until("both get on", || submitted().iter().zip(before).all(|(now, before)| *now > before + 100));
    world.stop();
    for job in [a, b, stranger] {
        job.finish().intact();
    }
}

/// Both fit the card that the scheduler believes in: the driver has nothing for the last allocations.
#[test]
fn an_allocation_that_the_driver_has_no_memory_for_waits_until_others_leave() {
    two_beside_a_stranger([400, 384]);
}

/// Neither fits beside the other: the driver has nothing for the memory that comes back last.
#[test]
fn memory_that_the_driver_has_no_room_for_comes_back_when_others_leave() {
    two_beside_a_stranger([600, 600]);
}
