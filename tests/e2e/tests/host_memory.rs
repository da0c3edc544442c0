//! The memory of the host that evicted memory goes to: how much of it there is, and where it comes from.

use std::process::Command;

use nvshare_harness::{Artifacts, Program, Running, Scheduler, World, guest, wait_until};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_TO_HOST", "6"), ("NVSHARE_MEMORY", "swap")];

/// 12 allocations of 64 MiB, so that two programs do not fit.
const JOB: &str = "--memory 768MiB --block 64MiB --kernel-us 500 --full-check";

/// The driver's refusal, as the library says it.
const REFUSED: &str = "cannot be page-locked";

/// A guest under nvshare, which goes on until the world stops.
fn under(world: &World, name: &str) -> Program {
    let program = Program::of(world, name, Command::new(guest(name, false)));
    program.env("LD_PRELOAD", &Artifacts::get().library.to_string_lossy()).until_told().until_woken()
}

#[test]
fn zeros_take_no_memory_of_the_host() {
    let world = World::simulated(CARD);
    // The turn is long enough for what is made in the background when the other program comes.
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "2"]);
    // 256 MiB that are not zero, one segment, and the kernel's own granules.
    let job =
        Program::workload(&world, "job", &format!("{JOB} --zeros 8")).env("NVSIM_MOST_LOCKED", "516MiB");
    let job = job.until_told().until_woken().waits_for_go().start();
    Running::go(&[&job]);
    let other = Program::workload(&world, "other", JOB).until_told().start();
    Scheduler::until_turns(&world, &[&job, &other], 3);
    world.stop();
    let [job, other] = [job, other].map(Running::finish);
    job.intact();
    other.intact();
    assert!(!job.log.contains(REFUSED), "more was page-locked: {}", job.log);
    assert!(job.log.contains("MiB of zeros"), "{}", job.log);
}

#[test]
fn memory_of_the_host_goes_back_when_it_is_not_needed() {
    // At first 512 MiB for the program's memory; later 448 MiB that the program itself wants, 64, and one segment.
    let world = World::simulated(&[CARD, &[("NVSIM_MOST_LOCKED", "772MiB")]].concat());
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let job = under(&world, "host_memory_returns").start();
    wait_until("the program has memory", || job.out().contains("has memory") || !job.lives());
    let args = "--memory 1000MiB --block 64MiB --kernel-us 500";
    let other =
        Program::workload(&world, "other", args).env("NVSIM_MOST_LOCKED", "2GiB").until_told().start();
    Scheduler::until_turns(&world, &[&job, &other], 4);
    world.wake();
    wait_until("the program has page-locked memory", || job.out().contains("page-locked") || !job.lives());
    world.stop();
    other.finish().intact();
    let job = job.finish();
    assert!(job.status.success() && job.out.contains("right"), "{} {}", job.out, job.log);
    assert!(!job.log.contains(REFUSED), "{}", job.log);
}
