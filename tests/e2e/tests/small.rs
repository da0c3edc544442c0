//! Programs with small allocations, in turns with a program whose memory does not fit beside theirs.

use nvshare_harness::{Program, Scheduler, World};
use nvshare_proto::units::MIB;

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
fn something_small_that_comes_and_goes_takes_no_new_mapping() {
    for limit in ["", "64MiB"] {
        let world = World::with_memory("swap", CARD);
        let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
        let arguments: &[&str] = if limit.is_empty() { &[] } else { &["limit"] };
        Program::guest(&world, "spare", arguments).env("NVSHARE_MEM_LIMIT", limit).start().finish().passed();
    }
}

#[test]
fn what_is_kept_of_small_allocations_leaves_first_when_others_need_room() {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "256MiB"]);
    let guest = Program::guest(&world, "keeps_spare", &[]).until_told().start();
    let has = |bytes: u64| {
        Scheduler::until(&world, "the scheduler knows", |status| {
            !guest.lives()
                || status.find(guest.pid()).is_some_and(|client| {
                    client.usage.iter().map(|usage| usage.allocated).sum::<u64>() == bytes
                })
        });
    };
    has(2 * MIB);
    // It fills the card: nothing of the guest can stay there.
    let all = Program::workload(&world, "all", "--memory 256MiB --block 32MiB --steps 3").start();
    all.finish().intact();
    has(0);
    world.stop();
    guest.finish().passed();
}
