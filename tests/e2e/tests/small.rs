//! Programs with small allocations, in turns with a program whose memory does not fit beside theirs.

use nvshare_harness::{Program, Scheduler, World};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];

nvshare_harness::with_both_memories! {
    small_allocations_keep_their_words
}

fn small_allocations_keep_their_words(memory: &str) {
    let world = World::with_memory(memory, CARD);
    // In managed memory, a small allocation takes a whole block of the simulated card, and is charged its own size.
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "896MiB", "--tq", "0.1"]);
    let arguments: &[&str] = if memory == "swap" { &["slabs"] } else { &[] };
    let guest = Program::guest(&world, "small", arguments).until_told().start();
    let other = Program::workload(&world, "other", "--memory 640MiB --block 64MiB --kernel-us 2000");
    let other = other.until_told().start();
    Scheduler::until_turns(&world, &[&guest, &other], 8);
    if memory == "swap" {
        let status = Scheduler::status(&world);
        let immovable = status.client(guest.pid()).usage.iter().map(|usage| usage.immovable).sum::<u64>();
        assert_eq!(immovable, 0, "small allocations move as well");
    }
    world.stop_guest(guest, other);
    world.moved_when_told();
}

#[test]
fn memory_that_the_program_wants_to_share_is_plain_from_then_on() {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let guest = Program::guest(&world, "small", &["slabs", "shares"]).start().finish();
    guest.passed();
    assert!(guest.log.contains("memory that moves cannot be shared"), "{}", guest.log);
}
