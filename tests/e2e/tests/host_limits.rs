//! Memory that the scheduler hands out, to programs that may have little: a control group with a limit that has no room for what
//! leaves the card, and fewer free descriptors than there are segments.

use std::process::Command;

use nvshare_harness::{Artifacts, MemoryGroup, Program, Scheduler, World, wait_until};

const MIB: u64 = 1 << 20;
const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_TO_HOST", "6"), ("NVSHARE_MEMORY", "swap")];
/// 12 allocations of 64 MiB, so that two programs do not fit: 512 MiB of each leave.
const JOB: &str = "--memory 768MiB --block 64MiB --kernel-us 500 --full-check";

fn scheduler(world: &World) -> Scheduler {
    Scheduler::start(world, &["--gpu-memory", "1GiB", "--tq", "0.1", "--host-memory", "4GiB"])
}

#[test]
#[ignore = "needs root and a control group with a limit of memory; .ci/run runs this test where they are there"]
fn more_leaves_than_the_limit_of_a_control_group_allows() {
    const LIMIT: u64 = 416 * MIB;
    let world = World::simulated(CARD);
    let _scheduler = scheduler(&world);
    // The simulated card's memory is charged to who uses it first.
    Program::workload(&world, "first", "--memory 1000MiB --block 8MiB --steps 1").start().finish().intact();
    let groups = [MemoryGroup::with_limit(LIMIT), MemoryGroup::with_limit(LIMIT)];
    let jobs = [("one", &groups[0]), ("two", &groups[1])].map(|(name, group)| {
        let workload = Artifacts::get().workload.display();
        let line = format!("echo $$ > {} && exec {workload} {name} {JOB}", group.entrance().display());
        let mut command = Command::new("sh");
        command.args(["-c", &line]);
        Program::of(&world, name, command).preloaded().until_told().start()
    });
    Scheduler::until_turns(&world, &[&jobs[0], &jobs[1]], 4);
    let status = Scheduler::status(&world);
    for job in &jobs {
        let client = status.client(job.pid());
        assert!(client.counters.evicted > LIMIT && client.host_memory > LIMIT, "{client:?}");
    }
    let jobs = world.stop_intact(jobs);
    for (job, group) in jobs.iter().zip(&groups) {
        assert!(group.peak() <= LIMIT, "{}", group.peak());
        assert!(!job.log.contains("memory of its own"), "{}", job.log);
    }
}

/// A program that has used its descriptors but for so many. All of its memory, more than one segment, has to leave for another one.
fn with_free_descriptors(left: &str) -> String {
    let world = World::simulated(CARD);
    let _scheduler = scheduler(&world);
    let line = format!("ulimit -n 256; exec {}", nvshare_harness::guest("few_descriptors", false).display());
    let mut command = Command::new("sh");
    command.args(["-c", &line]);
    let few = Program::of(&world, "few", command).env("LEFT", left).preloaded().until_told().start();
    wait_until("few are left", || few.out().contains("few are left") || !few.lives());
    let args = "--memory 1000MiB --block 8MiB --kernel-us 500 --full-check";
    let other = Program::workload(&world, "other", args).until_told().start();
    Scheduler::until_turns(&world, &[&few, &other], 3);
    let status = Scheduler::status(&world);
    if left != "0" {
        let has = status.client(few.pid()).host_memory;
        assert!(has >= 512 * MIB, "{has} {}", few.log());
    }
    world.stop_guest(few, other).log
}

#[test]
fn segments_come_through_the_only_free_descriptor() {
    with_free_descriptors("1");
}

#[test]
fn without_a_free_descriptor_a_program_uses_memory_of_its_own() {
    let log = with_free_descriptors("0");
    assert!(log.contains("1 of 1 segments of the scheduler's memory did not come"), "{log}");
}
