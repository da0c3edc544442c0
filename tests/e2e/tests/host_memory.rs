//! The memory of the host that evicted memory goes to: how much of it there is, and where it comes from.

use std::process::Command;

use nvshare_harness::{Artifacts, Program, Running, Scheduler, World, guest, wait_until};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_TO_HOST", "6"), ("NVSHARE_MEMORY", "swap")];

/// 12 allocations of 64 MiB, so that two programs do not fit.
const JOB: &str = "--memory 768MiB --block 64MiB --kernel-us 500 --full-check";

/// The driver's refusal, as the library says it.
const REFUSED: &str = "cannot be page-locked";

/// Segments of the scheduler that a process has mapped: their bytes, and whether the kernel keeps them from forked children
/// and core dumps.
fn segments(pid: u32) -> Vec<(u64, bool)> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let mut found = Vec::new();
    let mut bytes = None;
    for line in maps.lines() {
        if line.contains("memfd:nvshare-host") {
            let (from, until) =
                line.split(' ').next().and_then(|range| range.split_once('-')).expect("a range");
            let [from, until] = [from, until].map(|text| u64::from_str_radix(text, 16).expect("an address"));
            bytes = Some(until - from);
        } else if let Some(flags) = line.strip_prefix("VmFlags:")
            && let Some(bytes) = bytes.take()
        {
            let has = |flag: &str| flags.split_whitespace().any(|one| one == flag);
            found.push((bytes, has("dc") && has("dd")));
        }
    }
    found
}

/// Their bytes in sum.
fn has(job: &Running) -> u64 {
    segments(job.pid()).iter().map(|(bytes, _)| bytes).sum()
}

/// Two programs that take turns, with memory of the host from the scheduler.
fn turns(world: &World, second: &str) -> [Running; 2] {
    let jobs = [("one", JOB), ("two", second)];
    let jobs =
        jobs.map(|(name, job)| Program::workload(world, name, job).until_told().waits_for_go().start());
    Running::go(&[&jobs[0], &jobs[1]]);
    jobs
}

#[test]
fn memory_of_the_host_comes_from_the_scheduler() {
    let world = World::simulated(CARD);
    let scheduler =
        Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1", "--host-memory", "4GiB"]);
    let jobs = turns(&world, JOB);
    Scheduler::until_turns(&world, &[&jobs[0], &jobs[1]], 4);
    let found = jobs.each_ref().map(|job| segments(job.pid()));
    let status = Scheduler::status(&world);
    let about = status.scheduler.host_memory.expect("it hands out memory");
    let each: Vec<u64> = jobs.iter().map(|job| status.client(job.pid()).host_memory).collect();
    assert_eq!(about.budget, 4 << 30);
    assert!(
        each.iter().all(|&bytes| bytes > 0) && each.iter().sum::<u64>() <= about.used,
        "{each:?} {about:?}"
    );
    world.stop();
    jobs.map(Running::finish).iter().for_each(|job| drop(job.intact().clone()));
    for found in found {
        assert!(found.iter().map(|(bytes, _)| bytes).sum::<u64>() >= 256 << 20, "{found:?}");
        assert!(found.iter().all(|(_, is_private)| *is_private), "{found:?}");
    }
    wait_until("all of it is free again", || {
        Scheduler::status(&world).scheduler.host_memory.is_some_and(|host| host.used == 0)
    });
    scheduler.wait_for_log("free again");
}

#[test]
fn programs_get_no_more_than_their_parts_and_the_budget() {
    let world = World::simulated(CARD);
    let budget = ["--host-memory", "384MiB", "--host-memory-each", "256MiB"];
    let _scheduler =
        Scheduler::start(&world, &[&["--gpu-memory", "1GiB", "--tq", "0.1"][..], &budget].concat());
    // 768 and 320 MiB on 1 GiB: 64 have to leave.
    let jobs = turns(&world, "--memory 320MiB --block 64MiB --kernel-us 500 --full-check");
    Scheduler::until_turns(&world, &[&jobs[0], &jobs[1]], 4);
    let [one, two] = jobs.each_ref().map(has);
    world.stop();
    jobs.map(Running::finish).iter().for_each(|job| drop(job.intact().clone()));
    assert!(one <= 256 << 20 && two <= 256 << 20 && one + two <= 384 << 20 && one + two > 0, "{one} {two}");
}

/// The new scheduler's clients would have more than the budget if it did not count what they have: the third one makes more memory
/// leave than there was before.
#[test]
fn a_new_scheduler_learns_what_its_clients_have() {
    const BUDGET: u64 = 256 << 20;
    let world = World::simulated(CARD);
    let settings = ["--gpu-memory", "1GiB", "--tq", "0.1", "--host-memory", "256MiB"];
    let scheduler = Scheduler::start(&world, &settings);
    // 64 MiB have to leave.
    let jobs = turns(&world, "--memory 320MiB --block 64MiB --kernel-us 500 --full-check");
    Scheduler::until_turns(&world, &[&jobs[0], &jobs[1]], 4);
    scheduler.kill();
    let had: u64 = jobs.iter().map(has).sum();
    assert!(had > 0 && had <= BUDGET, "{had}");
    let scheduler = Scheduler::start(&world, &settings);
    // Each says for itself what it has, and may have given some back meanwhile.
    wait_until("the new scheduler knows", || {
        let has: u64 = jobs.iter().map(has).sum();
        let known = Scheduler::status(&world).scheduler.host_memory.expect("it hands out memory");
        scheduler.log().contains("in part from an earlier scheduler") && known.used >= has
    });
    let third = Program::workload(&world, "three", JOB).until_told().start();
    let turns = |job: &Running| {
        Scheduler::status(&world).find(job.pid()).map_or(0, |client| client.counters.hand_overs) + 3
    };
    let most = jobs.iter().map(turns).max().unwrap_or(3);
    let jobs = {
        let [one, two] = jobs;
        [one, two, third]
    };
    Scheduler::until_turns(&world, &[&jobs[0], &jobs[1], &jobs[2]], most);
    let has: u64 = jobs.iter().map(has).sum();
    world.stop();
    jobs.map(Running::finish).iter().for_each(|job| drop(job.intact().clone()));
    assert!(has <= BUDGET, "{has}");
}

#[test]
fn what_a_killed_client_had_is_free_again() {
    let world = World::simulated(CARD);
    let scheduler =
        Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1", "--host-memory", "2GiB"]);
    let [one, two] = turns(&world, JOB);
    Scheduler::until_turns(&world, &[&one, &two], 2);
    assert!(!scheduler.log().contains("free again"));
    one.signal(libc::SIGKILL);
    wait_until("its memory is free", || scheduler.log().contains("free again"));
    world.stop();
    two.finish().intact();
    drop(one);
}

/// The scheduler's line about the first program that asks for memory of the host. Each has a granule that is for none of its memory.
fn first_question(scheduler: &Scheduler) -> Option<String> {
    let asks = |line: &&str| line.contains(" asks for ") && !line.contains(" asks for 2.0 MiB ");
    scheduler.log().lines().find(asks).map(str::to_owned)
}

/// Under the limits of a user who is not root, and with few descriptors.
#[test]
fn memory_of_the_scheduler_comes_to_programs_with_few_descriptors() {
    let world = World::simulated(CARD);
    let _scheduler =
        Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1", "--host-memory", "4GiB"]);
    let jobs = ["one", "two"].map(|name| {
        let line = format!(
            "ulimit -n 64; ulimit -l 64; unset HOME; exec {} {name} {JOB}",
            Artifacts::get().workload.display()
        );
        let mut command = Command::new("sh");
        command.args(["-c", &line]);
        Program::of(&world, name, command).preloaded().until_told().waits_for_go().start()
    });
    Running::go(&[&jobs[0], &jobs[1]]);
    Scheduler::until_turns(&world, &[&jobs[0], &jobs[1]], 4);
    let sum: u64 = jobs.iter().map(has).sum();
    let jobs = world.stop_intact(jobs);
    assert!(sum >= 256 << 20, "{sum}");
    assert!(jobs.iter().all(|job| !job.log.contains("too many files")), "{}", jobs[0].log);
}

#[test]
fn children_are_forked_while_memory_is_in_that_of_the_scheduler() {
    let world = World::simulated(CARD);
    let _scheduler =
        Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.2", "--host-memory", "4GiB"]);
    let other = Program::workload(&world, "other", JOB).until_told();
    let guest = Program::guest(&world, "forks_parked", &[]).until_told().start();
    let other = other.start();
    Scheduler::until_turns(&world, &[&guest, &other], 4);
    assert!(has(&guest) + has(&other) > 0);
    world.stop_guest(guest, other);
}

/// A guest under nvshare, which goes on until the world stops.
fn under(world: &World, name: &str) -> Program {
    let program = Program::of(world, name, Command::new(guest(name, false)));
    program.env("LD_PRELOAD", &Artifacts::get().library.to_string_lossy()).until_told().until_woken()
}

#[test]
fn zeros_take_no_memory_of_the_host() {
    let world = World::simulated(CARD);
    let scheduler =
        Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "300", "--host-memory", "4GiB"]);
    // 256 MiB that are not zero, one segment, and the kernel's own granules.
    let job =
        Program::workload(&world, "job", &format!("{JOB} --zeros 8")).env("NVSIM_MOST_LOCKED", "516MiB");
    let job = job.until_told().until_woken().waits_for_go().start();
    Running::go(&[&job]);
    wait_until("its memory can be looked at", || {
        job.log().contains("the kernel that looks at memory is loaded")
    });
    let other = Program::workload(&world, "other", JOB).until_told().start();
    wait_until("it asks when the other program comes", || first_question(&scheduler).is_some());
    assert!(Scheduler::ctl(&world, &["set-tq", "0.2"]).status.success());
    Scheduler::until_turns(&world, &[&job, &other], 3);
    world.stop();
    let [job, other] = [job, other].map(Running::finish);
    job.intact();
    other.intact();
    assert!(!job.log.contains(REFUSED), "more was page-locked: {}", job.log);
    assert!(job.log.contains("MiB of zeros"), "{}", job.log);
}

#[test]
fn work_that_waits_for_a_thread_goes_on_while_memory_of_the_host_goes_back() {
    let world = World::simulated(CARD);
    let held = world.dir().join("held");
    std::fs::write(&held, "").expect("a file");
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let job = under(&world, "works_beside_unregister").holds_up("unregister", &held).start();
    wait_until("the program has memory", || job.out().contains("has memory") || !job.lives());
    let other = Program::workload(&world, "other", "--memory 1000MiB --block 64MiB --kernel-us 500");
    let other = other.until_told().start();
    Scheduler::until_turns(&world, &[&job, &other], 4);
    world.wake();
    wait_until("the program has made a stream", || job.out().contains("made a stream") || !job.lives());
    world.stop_guest(job, other);
}

#[test]
fn memory_of_the_host_goes_back_when_it_is_not_needed() {
    // At first 512 MiB for the program's memory; later 448 MiB that the program itself wants, 64, and one segment.
    let world = World::simulated(&[CARD, &[("NVSIM_MOST_LOCKED", "772MiB")]].concat());
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let job = under(&world, "host_memory_returns").env("NVSHARE_LOG", "debug").start();
    wait_until("the program has memory", || job.out().contains("has memory") || !job.lives());
    let args = "--memory 1000MiB --block 64MiB --kernel-us 500";
    let other =
        Program::workload(&world, "other", args).env("NVSIM_MOST_LOCKED", "2GiB").until_told().start();
    Scheduler::until_turns(&world, &[&job, &other], 4);
    // As long as others wait, what is not needed also goes back when the next eviction is prepared for.
    other.signal(libc::SIGKILL);
    wait_until("nobody waits, and nothing is prepared for any more", || {
        let said = job.log();
        let last = said.lines().rev().find(|line| line.contains("received Waiters"));
        let is_alone = last.is_some_and(|line| line.contains("waiting: false"));
        !job.lives() || is_alone && job.threads("nvshare-pool") == 0
    });
    world.wake();
    wait_until("the program has page-locked memory", || job.out().contains("page-locked") || !job.lives());
    world.stop();
    drop(other);
    let job = job.finish();
    assert!(job.status.success() && job.out.contains("right"), "{} {}", job.out, job.log);
    assert!(!job.log.contains(REFUSED), "{}", job.log);
}
