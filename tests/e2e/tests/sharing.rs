//! Memory that processes share by handles (CUDA IPC), with `NVSHARE_MEMORY=swap`: as natively, and it stays on the card.

use nvshare_harness::{Finished, Program, Scheduler, World};
use nvshare_proto::units::MIB;

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
/// Bytes that the guest shares, where it shares one allocation.
const SHARED: u64 = 36 * MIB;

fn natively(what: &str) {
    Program::guest(&World::simulated(CARD), "shares_memory", &[what]).alone().start().finish().passed();
}

fn under_nvshare(what: &str) -> Finished {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let finished = Program::guest(&world, "shares_memory", &[what]).start().finish();
    finished.passed();
    finished
}

#[test]
fn calls_answer_as_natively() {
    natively("answers");
    let log = under_nvshare("answers").log;
    assert!(log.contains("36 MiB stay on the card: other processes can reach them"), "{log}");
    assert!(!log.contains("memory that moves cannot be shared"), "{log}");
}

#[test]
fn small_allocations_are_shared_one_by_one() {
    natively("small");
    under_nvshare("small");
}

#[test]
fn memory_in_use_is_shared_with_its_contents() {
    natively("in use");
    under_nvshare("in use");
}

#[test]
fn forged_handles_and_odd_processes() {
    let log = under_nvshare("hostile").log;
    assert!(log.contains("memory of another process cannot be opened"), "{log}");
}

#[test]
fn descriptors_of_shared_memory_leave_the_program_its_own() {
    let log = under_nvshare("descriptors").log;
    assert!(log.contains("RLIMIT_NOFILE"), "{log}");
}

/// Without a scheduler the gate is open for ever.
#[test]
fn alone() {
    let world = World::with_memory("swap", CARD);
    Program::guest(&world, "shares_memory", &["answers"]).start().finish().passed();
}

#[test]
fn shared_memory_stays_while_other_memory_moves() {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let guest = Program::guest(&world, "shares_memory", &["turns"]).until_told().start();
    let other = Program::workload(&world, "other", "--memory 640MiB --block 64MiB --kernel-us 2000");
    let other = other.until_told().start();
    Scheduler::until_turns(&world, &[&guest, &other], 8);
    Scheduler::until(&world, "the guest's other memory has moved", |status| {
        !guest.lives() || status.find(guest.pid()).is_some_and(|client| client.counters.evicted >= 100 * MIB)
    });
    if guest.lives() {
        let status = Scheduler::status(&world);
        let usage = &status.client(guest.pid()).usage;
        assert_eq!(usage.iter().map(|usage| usage.immovable).sum::<u64>(), SHARED);
    }
    world.stop_guest(guest, other);
    world.moved_when_told();
}
