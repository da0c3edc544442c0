//! Programs that free, reset, fork, end contexts or break theirs while their memory is on the host or on its way, and
//! programs whose every byte has moved often.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Command;

use nvshare_harness::{Artifacts, Program, Running, Scheduler, World, wait_until};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
const MIB: u64 = 1 << 20;

nvshare_harness::with_both_memories! {
    memory_is_freed_while_a_kernel_uses_it
    contexts_end_while_their_memory_leaves
    green_contexts_end_while_their_memory_leaves
    devices_are_reset_while_memory_is_away
    children_are_forked_while_memory_is_away
    freed_memory_can_be_allocated_again_at_the_limit
    memory_freed_beside_a_capture_makes_room_for_others
    memory_freed_while_it_is_away_holds_no_capture_up
    every_byte_survives_many_hand_overs
}

/// Runs a guest that takes turns with a program whose memory does not fit beside its own; both must succeed.
fn in_turns(memory: &str, name: &str, settings: &[(&str, &str)], turns: u64) {
    let world = World::with_memory(memory, &[CARD, settings].concat());
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let other = Program::workload(&world, "other", "--memory 640MiB --block 64MiB --kernel-us 2000");
    let (guest, other) = (Program::guest(&world, name, &[]).until_told().start(), other.until_told().start());
    Scheduler::until_turns(&world, &[&guest, &other], turns);
    world.stop_guest(guest, other);
    world.moved_when_told();
}

fn memory_is_freed_while_a_kernel_uses_it(memory: &str) {
    in_turns(memory, "frees_in_use", &[], 5);
}

fn contexts_end_while_their_memory_leaves(memory: &str) {
    // An eviction takes a quarter of a second, and a context ends each fiftieth.
    in_turns(memory, "contexts_end", &[("NVSIM_COPY_OUT", "2"), ("NVSIM_TO_HOST", "2")], 5);
}

fn green_contexts_end_while_their_memory_leaves(memory: &str) {
    in_turns(memory, "green_ends", &[("NVSIM_COPY_OUT", "2"), ("NVSIM_TO_HOST", "2")], 5);
}

fn devices_are_reset_while_memory_is_away(memory: &str) {
    in_turns(memory, "resets", &[("NVSIM_COPY_OUT", "4"), ("NVSIM_TO_HOST", "4")], 5);
}

fn children_are_forked_while_memory_is_away(memory: &str) {
    in_turns(memory, "forks_parked", &[], 5);
}

fn freed_memory_can_be_allocated_again_at_the_limit(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let guest = Program::guest(&world, "at_limit", &[]).env("NVSHARE_MEM_LIMIT", "512MiB").start();
    guest.finish().passed();
}

fn memory_freed_beside_a_capture_makes_room_for_others(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let guest = Program::guest(&world, "freed_beside_capture", &[]).until_told().until_woken().start();
    Scheduler::until(&world, "the guest has its memory", |status| {
        status.find(guest.pid()).is_some_and(|client| client.resident >= 600 * MIB)
    });
    world.wake();
    let other = Program::workload(&world, "other", "--memory 640MiB --block 64MiB --kernel-us 2000");
    let other = other.until_told().start();
    // It allocates nothing more, so no call of its own ends the memory.
    Scheduler::until(&world, "what was freed is gone", |status| {
        assert!(guest.lives() && other.lives(), "{}{}", guest.log(), other.log());
        let client = status.client(guest.pid());
        client.usage.iter().all(|usage| usage.allocated < 64 * MIB)
    });
    world.stop_guest(guest, other);
    world.moved_when_told();
}

fn memory_freed_while_it_is_away_holds_no_capture_up(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let guest = Program::guest(&world, "freed_while_away", &[]).until_woken().start();
    wait_until("the guest has its memory", || guest.out().contains("ready") || !guest.lives());
    let other = Program::workload(&world, "other", "--memory 640MiB --block 64MiB --kernel-us 2000");
    let other = other.until_told().start();
    Scheduler::until(&world, "a part of the guest's memory is away", |status| {
        assert!(guest.lives() && other.lives(), "{}{}", guest.log(), other.log());
        status.find(guest.pid()).is_some_and(|client| client.resident < 500 * MIB)
    });
    world.wake();
    guest.finish().passed();
    world.stop_intact([other]);
}

/// With few descriptors, little memory that may be locked, as a user who is not root has it, and no home. All bytes are moved: the
/// simulator keeps as many in the host's memory as the program has.
fn every_byte_survives_many_hand_overs(memory: &str) {
    let world = World::with_memory(
        memory,
        &[("NVSIM_MEMORY", "128MiB"), ("NVSIM_SCALE", "1"), ("NVSIM_SPARSE", "0"), ("NVSIM_REGISTER", "50")],
    );
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "128MiB", "--tq", "0.05"]);
    let start = |name: &str, arguments: &str| {
        let line = format!(
            "ulimit -n 64; ulimit -l 64; unset HOME; exec {} {name} {arguments} --kernel-us 500 --full-check",
            Artifacts::get().workload.display()
        );
        let mut command = Command::new("sh");
        command.args(["-c", &line]);
        Program::of(&world, name, command).preloaded().until_told().waits_for_go().start()
    };
    // More than a chunk, parts of chunks, and blocks that are freed and allocated anew in each step.
    let jobs =
        [start("a", "--memory 96MiB --block 34MiB"), start("b", "--memory 93MiB --block 3MiB --churn")];
    Running::go(&[&jobs[0], &jobs[1]]);
    Scheduler::until_turns(&world, &[&jobs[0], &jobs[1]], 12);
    for job in world.stop_intact(jobs) {
        assert!(job.intact().words_checked > 20 << 20, "{:?}", job.outcome);
    }
}

/// With few descriptors, little memory that may be locked, no capability and no home; with memory of its own, and of the scheduler.
#[test]
#[ignore = "needs root, to be somebody else; .ci/run runs this test where it is root"]
fn who_is_not_root_exchanges_memory() {
    for host_memory in [&[][..], &["--host-memory", "1GiB"]] {
        let world = World::with_memory(
            "swap",
            &[
                ("NVSIM_MEMORY", "128MiB"),
                ("NVSIM_SCALE", "1"),
                ("NVSIM_SPARSE", "0"),
                ("NVSIM_REGISTER", "50"),
            ],
        );
        std::fs::set_permissions(world.dir(), Permissions::from_mode(0o777)).expect("our directory");
        let options = [&["--gpu-memory", "128MiB", "--tq", "0.05"], host_memory].concat();
        let _scheduler = Scheduler::start(&world, &options);
        let jobs = ["a", "b"].map(|name| {
            let line = format!(
                "ulimit -n 64; ulimit -l 64; unset HOME; exec setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all \
                 --bounding-set=-all {} {name} --memory 96MiB --block 6MiB --kernel-us 500 --full-check",
                Artifacts::get().workload.display()
            );
            let mut command = Command::new("sh");
            command.args(["-c", &line]);
            Program::of(&world, name, command).preloaded().until_told().waits_for_go().start()
        });
        Running::go(&[&jobs[0], &jobs[1]]);
        Scheduler::until_turns(&world, &[&jobs[0], &jobs[1]], 6);
        let status = Scheduler::status(&world);
        for job in &jobs {
            let user = std::fs::metadata(format!("/proc/{}", job.pid())).expect("a process").uid();
            let has = status.client(job.pid()).host_memory;
            assert_eq!((user, has > 0), (65534, !host_memory.is_empty()), "{}", job.log());
        }
        for job in world.stop_intact(jobs) {
            assert!(job.intact().words_checked > 10 << 20, "{:?}", job.outcome);
        }
    }
}

#[test]
fn a_green_context_ends_while_its_memory_is_copied() {
    ends_while_its_memory_is_copied("green_ends_held");
}

#[test]
fn memory_that_is_copied_is_freed_while_its_context_ends() {
    ends_while_its_memory_is_copied("frees_while_leaving");
}

fn ends_while_its_memory_is_copied(guest: &str) {
    let world = World::with_memory("swap", &[CARD, &[("NVSHARE_CONTENT", "off")]].concat());
    let held = world.dir().join("held").to_string_lossy().into_owned();
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let guest = Program::guest(&world, guest, &[]).holds_up("out", &held).start();
    wait_until("the guest has its memory", || guest.out().contains("ready") || !guest.lives());
    let other = Program::workload(&world, "other", "--memory 640MiB --block 64MiB --steps 20").start();
    guest.finish().passed();
    other.finish().intact();
}

#[test]
fn programs_whose_memory_cannot_leave_run_one_after_the_other() {
    // The host lets nobody page-lock anything.
    let world = World::with_memory("swap", &[CARD, &[("NVSIM_MOST_LOCKED", "4KiB")]].concat());
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let start =
        |name: &str, arguments: &str| Program::workload(&world, name, &format!("{arguments} --full-check"));
    let first = start("first", "--memory 640MiB --block 64MiB").until_told().start();
    Scheduler::until(&world, "all of it is on the card", |status| {
        status.find(first.pid()).is_some_and(|client| client.resident >= 640 * MIB)
    });
    // It makes one allocation, before it has the lock: one that is made with the lock, and that no room can be made for, is
    // refused.
    let second = start("second", "--memory 640MiB --block 640MiB --steps 5").start();
    wait_until("the first one says that its memory stays", || {
        assert!(first.lives() && second.lives(), "{} {}", first.log(), second.log());
        first.log().contains("stays on the card")
    });
    // Programs that fit beside it run, and it runs itself.
    start("small", "--memory 128MiB --block 128MiB --steps 5").start().finish().intact();
    let turns = |status: &nvshare_harness::Status| status.client(first.pid()).counters.gated;
    let before = turns(&Scheduler::status(&world));
    Scheduler::until(&world, "the first one goes on", |status| turns(status) > before + 20);
    assert!(second.lives(), "{}", second.log());
    world.stop();
    first.finish().intact();
    let second = second.finish();
    second.intact();
    let (moved, _) = world.observe();
    assert_eq!((moved.evicted, moved.faulted, moved.pushed_out), (0, 0, 0), "{moved:?}");
}

#[test]
fn memory_of_a_broken_context_stays_and_is_tried_once() {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let broken = Program::guest(&world, "breaks", &[]).until_told().start();
    wait_until("it is broken", || {
        assert!(broken.lives(), "{}", broken.log());
        broken.out() == "broken\n"
    });
    // One allocation, which is made before the lock can come: more of them might ask for room as the holder, and be refused.
    let other = Program::workload(&world, "other", "--memory 640MiB --block 640MiB --steps 5").start();
    Scheduler::until(&world, "all of it counts as immovable", |status| {
        status.find(broken.pid()).is_some_and(|client| client.usage.iter().any(|u| u.immovable == 600 * MIB))
    });
    // A program that fits beside it runs.
    let small = Program::workload(&world, "small", "--memory 128MiB --block 64MiB --steps 5");
    small.start().finish().intact();
    // And the other one when the memory is free.
    let broken = world.stop_guest(broken, other);
    assert_eq!(broken.log.matches("600 MiB stay on the card").count(), 1, "{}", broken.log);
    assert!(!broken.log.contains("moving memory at"), "{}", broken.log);
    let evicted = broken.log.lines().filter(|line| line.contains("evicted "));
    assert!(evicted.clone().all(|line| line.contains("evicted 0 MiB")), "{}", broken.log);
}
