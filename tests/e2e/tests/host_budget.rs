//! Memory of the host that the scheduler hands out is too little, or cannot be used: every program has its turns as without it,
//! as long as there is memory for them at all, and no program loses its data.

use nvshare_harness::{PlayedScheduler, Program, Running, Scheduler, World, wait_until};
use nvshare_proto::{Amount, ClientMessage, Epoch, SchedulerMessage};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_TO_HOST", "6"), ("NVSHARE_MEMORY", "swap")];
/// 12 allocations of 64 MiB, so that two programs do not fit.
const JOB: &str = "--memory 768MiB --block 64MiB --kernel-us 500 --full-check";

/// Bytes of the scheduler's memory that a process has mapped.
fn has(job: &Running) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", job.pid())).unwrap_or_default();
    let range = |line: &str| {
        let (from, until) = line.split(' ').next()?.split_once('-')?;
        Some(u64::from_str_radix(until, 16).ok()? - u64::from_str_radix(from, 16).ok()?)
    };
    maps.lines().filter(|line| line.contains("memfd:nvshare-host")).filter_map(range).sum()
}

fn scheduler(world: &World, budget: &str) -> Scheduler {
    Scheduler::start(world, &["--gpu-memory", "1GiB", "--tq", "0.1", "--host-memory", budget])
}

/// Two programs that do not fit together, after four turns each.
fn two_in_turns(world: &World) -> [Running; 2] {
    let jobs =
        ["one", "two"].map(|name| Program::workload(world, name, JOB).until_told().waits_for_go().start());
    Running::go(&[&jobs[0], &jobs[1]]);
    Scheduler::until_turns(world, &[&jobs[0], &jobs[1]], 4);
    jobs
}

#[test]
fn beyond_the_budget_programs_use_memory_of_their_own() {
    let world = World::simulated(CARD);
    let _scheduler = scheduler(&world, "128MiB");
    let jobs = two_in_turns(&world);
    let sum: u64 = jobs.iter().map(has).sum();
    let jobs = world.stop_intact(jobs);
    assert!(sum > 0 && sum <= 128 << 20, "{sum}");
    assert!(jobs.iter().any(|job| job.log.contains("memory of its own")), "{}", jobs[0].log);
}

/// Two programs would stop each other for good: one has given a part of its memory away, and the other one got that part, but
/// not all that it needs, and the host has no memory for it.
#[test]
fn memory_that_came_for_a_turn_that_cannot_be_leaves_without_memory_of_the_host() {
    const BYTES: u64 = 64 << 20;
    let none = ("NVSIM_MOST_LOCKED", "1MiB");
    let world = World::simulated(&[CARD, &[("NVSHARE_CONTENT", "off"), none]].concat());
    let listener = PlayedScheduler::listen(&world);
    let job = Program::workload(&world, "job", "--memory 64MiB --block 64MiB --kernel-us 500 --full-check");
    let job = job.until_told().waits_for_go().start();
    let (mut client, usage) = PlayedScheduler::accept(&listener);
    let gpu = usage.first().map(|usage| usage.gpu);
    let gpu = gpu.unwrap_or_else(|| {
        client.until(|m| if let ClientMessage::Usage(u) = m { Some(u.gpu) } else { None })
    });
    client.say(&[SchedulerMessage::Capacity(Amount { gpu, bytes: 1 << 30 })]);
    client.until(|m| matches!(m, ClientMessage::ReqLock).then_some(()));
    let all = Amount { gpu, bytes: BYTES };
    let short = |client: &mut PlayedScheduler| {
        client.say(&[SchedulerMessage::Evict(all)]);
        client.until(|m| if let ClientMessage::Evicted { short, .. } = m { Some(*short) } else { None })
    };
    client.say(&[SchedulerMessage::Restore(all)]);
    client.until(|m| matches!(m, ClientMessage::Usage(usage) if usage.absent == 0).then_some(()));
    assert_eq!(short(&mut client), 0, "what nobody has written stays: {}", job.log());
    // It runs, and what it has written stays.
    let epoch = Epoch { boot: 1, counter: 1 };
    client.say(&[SchedulerMessage::LockOk { epoch, quantum_ms: 1000, room: vec![all] }]);
    client.until_running();
    Running::go(&[&job]);
    client.say(&[SchedulerMessage::DropLock { epoch, patience_ms: 60_000 }]);
    client.until(|m| {
        matches!(m, ClientMessage::LockReleased { .. } | ClientMessage::Idle { .. }).then_some(())
    });
    assert_eq!(short(&mut client), BYTES, "{}", job.log());
    client.say(&[SchedulerMessage::SchedOff]);
    world.stop();
    job.finish().intact();
}

/// The words at the end of an allocation leave first, and the host has no memory for them.
#[test]
fn zeros_leave_though_the_host_is_full() {
    const ALL: u64 = 256 << 20;
    const ZEROS: u64 = 192 << 20;
    // The kernel that looks at memory has 4 MiB of its own.
    let few = ("NVSIM_MOST_LOCKED", "6MiB");
    let world = World::simulated(&[CARD, &[few]].concat());
    let listener = PlayedScheduler::listen(&world);
    let wake = world.dir().join("wake");
    let guest = Program::guest(&world, "half_zeros", &[]).env("WAKE", &wake.to_string_lossy());
    let guest = guest.until_told().start();
    let (mut client, usage) = PlayedScheduler::accept(&listener);
    let gpu = usage.first().map(|usage| usage.gpu);
    let gpu = gpu.unwrap_or_else(|| {
        client.until(|m| if let ClientMessage::Usage(u) = m { Some(u.gpu) } else { None })
    });
    let all = Amount { gpu, bytes: ALL };
    let epoch = Epoch { boot: 1, counter: 1 };
    let granted = SchedulerMessage::LockOk { epoch, quantum_ms: 1000, room: vec![all] };
    client.say(&[SchedulerMessage::Capacity(Amount { gpu, bytes: 1 << 30 }), granted]);
    wait_until("it has memory, which can be looked at", || {
        let can_be_looked_at = guest.log().contains("the kernel that looks at memory is loaded");
        guest.out().contains("has memory") && can_be_looked_at || !guest.lives()
    });
    client.say(&[SchedulerMessage::Waiters { waiting: true }]);
    client.until(|m| matches!(m, ClientMessage::Idle { .. }).then_some(()));
    client.say(&[SchedulerMessage::Evict(all)]);
    let short =
        client.until(|m| if let ClientMessage::Evicted { short, .. } = m { Some(*short) } else { None });
    assert_eq!(short, ALL - ZEROS, "{}", guest.log());
    client.say(&[SchedulerMessage::SchedOff]);
    std::fs::write(&wake, "").expect("a file");
    guest.finish().passed();
}

/// The program has twelve allocations. An eviction that is short is tried again three times.
#[test]
fn memory_of_the_host_that_is_refused_is_not_asked_for_by_each_allocation() {
    const BYTES: u64 = 768 << 20;
    let none = ("NVSIM_MOST_LOCKED", "1MiB");
    let world = World::simulated(&[CARD, &[("NVSHARE_CONTENT", "off"), none]].concat());
    let (mut client, guest, gpu) = PlayedScheduler::of_waiting_guest(&world);
    client.hand_out_nothing();
    let (epoch, all) = (Epoch { boot: 1, counter: 1 }, Amount { gpu, bytes: BYTES });
    client.say(&[SchedulerMessage::Capacity(Amount { gpu, bytes: 1 << 30 })]);
    wait_until("the program has memory", || guest.out().contains("has memory") || !guest.lives());
    client.say(&[SchedulerMessage::LockOk { epoch, quantum_ms: 60_000, room: vec![all] }]);
    client.until_running();
    client.say(&[SchedulerMessage::DropLock { epoch, patience_ms: 60_000 }]);
    client.until(|m| {
        matches!(m, ClientMessage::LockReleased { .. } | ClientMessage::Idle { .. }).then_some(())
    });
    client.say(&[SchedulerMessage::Evict(all)]);
    let mut questions = 0;
    let short = client.until(|m| {
        questions += u32::from(matches!(m, ClientMessage::HostWanted { .. }));
        if let ClientMessage::Evicted { short, .. } = m { Some(*short) } else { None }
    });
    assert_eq!(short, BYTES, "{}", guest.log());
    assert!((1..=4).contains(&questions), "{questions} questions: {}", guest.log());
    client.say(&[SchedulerMessage::SchedOff]);
    world.wake();
    world.stop();
    guest.finish().passed();
}

#[test]
fn memory_of_the_scheduler_that_the_driver_refuses_is_replaced() {
    let world = World::simulated(&[CARD, &[("NVSIM_LOCK_SHARED", "0")]].concat());
    let _scheduler = scheduler(&world, "4GiB");
    let jobs = two_in_turns(&world);
    let sum: u64 = jobs.iter().map(has).sum();
    let jobs = world.stop_intact(jobs);
    assert_eq!(sum, 0, "what cannot be used goes back");
    assert!(jobs.iter().all(|job| job.log.contains("cannot be page-locked here")), "{}", jobs[0].log);
}

/// A program that has a card to itself has copies of all of its memory on the host, and on another card two programs have to leave for
/// each other, with nothing but the scheduler's memory.
#[test]
fn copies_of_memory_on_the_card_give_way_to_what_others_need() {
    const COPIES: u64 = 256 << 20;
    // A program has memory of its own for the list of pieces that are looked at.
    let few = [("NVSIM_GPUS", "2"), ("NVSIM_MOST_PRIVATE", "4MiB")];
    let world = World::simulated(&[CARD, &few].concat());
    let _scheduler = scheduler(&world, "272MiB");
    let on = |card, name, args| Program::workload(&world, name, args).env("CUDA_VISIBLE_DEVICES", card);
    let args = "--memory 256MiB --block 64MiB --still 2 --kernel-us 500 --full-check";
    let still = on("0", "still", args).until_told().start();
    wait_until("the first program runs", || Scheduler::status(&world).find(still.pid()).is_some());
    // It takes nearly all of the card, and no memory of the scheduler.
    let large = on("0", "large", "--memory 1000MiB --block 8MiB --kernel-us 500 --seconds 600");
    let large = large.env("NVSIM_MOST_PRIVATE", "2GiB").env("NVSIM_LOCK_SHARED", "0").start();
    Scheduler::until_turns(&world, &[&still, &large], 3);
    drop(large);
    wait_until("all of its memory is back", || {
        let client = Scheduler::status(&world).client(still.pid()).clone();
        client.usage.iter().all(|usage| usage.absent == 0) || !still.lives()
    });
    assert!(has(&still) >= COPIES, "{} {}", has(&still), still.log());
    // 64 MiB have to leave, of one or the other.
    let small = "--memory 320MiB --block 64MiB --kernel-us 500 --full-check";
    let others = [("one", JOB), ("two", small)].map(|(name, args)| on("1", name, args).until_told().start());
    Scheduler::until_turns(&world, &[&others[0], &others[1]], 4);
    let left = has(&still);
    world.stop();
    let still = still.finish();
    still.intact();
    others.map(Running::finish).iter().for_each(|job| drop(job.intact().clone()));
    assert!(
        left < COPIES && still.log.contains("of copies of memory that is on the card"),
        "{left} {}",
        still.log
    );
}
