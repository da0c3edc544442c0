//! Memory that processes share by handles (CUDA IPC), or other devices reach by descriptors (dma-buf), with `NVSHARE_MEMORY=swap`: as
//! natively. It stays on the card while another process or device has it.

use nvshare_harness::{Finished, Program, Running, Scheduler, World, wait_until};
use nvshare_proto::units::MIB;
use nvshare_proto::{ClientStatus, Usage};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
/// Bytes that the guest shares, where it shares one allocation.
const SHARED: u64 = 36 * MIB;

const BY_HANDLES: &str = "shares_memory";
const BY_DESCRIPTORS: &str = "dma_bufs";

fn natively(guest: &str, what: &str) {
    natively_with(guest, &[what]);
}

fn natively_with(guest: &str, arguments: &[&str]) {
    Program::guest(&World::simulated(CARD), guest, arguments).alone().start().finish().passed();
}

fn under_nvshare(guest: &str, what: &str) -> Finished {
    under_nvshare_with(guest, &[what])
}

fn under_nvshare_with(guest: &str, arguments: &[&str]) -> Finished {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let finished = Program::guest(&world, guest, arguments).start().finish();
    finished.passed();
    finished
}

#[test]
fn calls_answer_as_natively() {
    natively(BY_HANDLES, "answers");
    let log = under_nvshare(BY_HANDLES, "answers").log;
    assert!(log.contains("other processes can open 36 MiB"), "{log}");
    assert!(!log.contains("memory that moves cannot be shared"), "{log}");
}

/// Work of one may wait for words of another.
#[test]
fn processes_that_share_memory_are_a_gang() {
    let world = World::with_memory("swap", CARD);
    let scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    Program::guest(&world, BY_HANDLES, &["answers"]).start().finish().passed();
    scheduler.wait_for_log("share memory: they hold their GPUs together");
}

#[test]
fn small_allocations_are_shared_one_by_one() {
    natively(BY_HANDLES, "small");
    under_nvshare(BY_HANDLES, "small");
}

#[test]
fn memory_in_use_is_shared_with_its_contents() {
    natively(BY_HANDLES, "in use");
    under_nvshare(BY_HANDLES, "in use");
}

#[test]
fn forged_handles_and_odd_processes() {
    let log = under_nvshare(BY_HANDLES, "hostile").log;
    assert!(log.contains("memory of another process cannot be opened"), "{log}");
}

#[test]
fn descriptors_of_shared_memory_leave_the_program_its_own() {
    let log = under_nvshare(BY_HANDLES, "descriptors").log;
    assert!(log.contains("RLIMIT_NOFILE"), "{log}");
}

/// The process that opens it works with two cards.
#[test]
fn other_cards_work_on_opened_memory() {
    let cards = [CARD[0], CARD[1], ("NVSIM_GPUS", "2")];
    Program::guest(&World::simulated(&cards), BY_HANDLES, &["cards"]).alone().start().finish().passed();
    let world = World::with_memory("swap", &cards);
    Program::guest(&world, BY_HANDLES, &["cards"]).start().finish().passed();
}

#[test]
fn a_handle_that_failed_exchanges_nothing_again() {
    under_nvshare(BY_HANDLES, "retried");
}

/// Few descriptors are left, so that the exchange needs room for all of the memory at once. Others make way for as much: for more than
/// the 1 GiB to spare that any allocation brings.
#[test]
fn others_make_way_for_an_exchange() {
    let world = World::with_memory("swap", &[("NVSIM_MEMORY", "3GiB"), CARD[1]]);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "3GiB", "--tq", "0.1"]);
    let other = Program::workload(&world, "other", "--memory 1792MiB --block 64MiB --kernel-us 2000");
    let other = other.until_told().start();
    until_allocated(&world, &other, 1792 * MIB);
    let guest = Program::guest(&world, BY_HANDLES, &["full"]).until_woken().start();
    Scheduler::until_turns(&world, &[&guest, &other], 4);
    world.wake();
    guest.finish().passed();
    world.stop();
    other.finish().intact();
    world.moved_when_told();
}

/// Without a scheduler the gate is open for ever.
#[test]
fn alone() {
    let world = World::with_memory("swap", CARD);
    Program::guest(&world, "shares_memory", &["answers"]).start().finish().passed();
}

#[test]
fn shared_memory_stays_while_other_memory_moves() {
    stays_while_other_memory_moves(BY_HANDLES, "turns");
}

/// Waits until a program has all of its memory.
fn until_allocated(world: &World, program: &Running, bytes: u64) {
    Scheduler::until(world, "a program has all of its memory", |status| {
        let has_all = |usage: &Usage| usage.allocated >= bytes;
        status.find(program.pid()).is_some_and(|client| client.usage.iter().any(has_all))
    });
}

fn immovable(client: &ClientStatus) -> u64 {
    client.usage.iter().map(|usage| usage.immovable).sum()
}

fn stays_while_other_memory_moves(guest: &str, what: &str) {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let guest = Program::guest(&world, guest, &[what]).until_told().start();
    let other = Program::workload(&world, "other", "--memory 640MiB --block 64MiB --kernel-us 2000");
    let other = other.until_told().start();
    Scheduler::until_turns(&world, &[&guest, &other], 8);
    Scheduler::until(&world, "the guest's other memory has moved", |status| {
        !guest.lives() || status.find(guest.pid()).is_some_and(|client| client.counters.evicted >= 100 * MIB)
    });
    if guest.lives() {
        assert_eq!(immovable(Scheduler::status(&world).client(guest.pid())), SHARED);
    }
    world.stop_guest(guest, other);
    world.moved_when_told();
}

/// The other process opens it for moments, also while it is away.
#[test]
fn shared_memory_moves_while_nobody_else_has_it() {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let other = Program::workload(&world, "other", "--memory 1008MiB --block 48MiB --kernel-us 2000");
    let other = other.until_told().start();
    // Beside memory that stays, it would not get as much.
    until_allocated(&world, &other, 1008 * MIB);
    let guest = Program::guest(&world, BY_HANDLES, &["lent"]).until_told().start();
    Scheduler::until_turns(&world, &[&guest, &other], 12);
    let until = |what: &str, is_so: &dyn Fn(&ClientStatus) -> bool| {
        Scheduler::until(&world, what, |status| {
            !guest.lives() || status.find(guest.pid()).is_some_and(is_so)
        });
    };
    for _ in 0..3 {
        until("all of it is away", &|client| {
            client.usage.iter().map(|usage| usage.absent).sum::<u64>() >= 400 * MIB + SHARED
        });
        until("another process has it", &|client| immovable(client) >= SHARED);
    }
    world.stop_guest(guest, other);
    world.moved_when_told();
}

#[test]
fn memory_that_a_dead_process_had_moves_again() {
    let world = World::with_memory("swap", CARD);
    let scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let guest = Program::guest(&world, BY_HANDLES, &["abandoned"]).until_woken().until_told().start();
    let until = |what: &str, wanted| {
        Scheduler::until(&world, what, |status| {
            !guest.lives() || status.find(guest.pid()).is_some_and(|client| immovable(client) == wanted)
        });
    };
    until("two have it", SHARED);
    world.wake();
    until("one has died, and one has closed it", 0);
    wait_until("they are no gang any more", || scheduler.log().contains("share no memory any more"));
    assert!(guest.lives());
    world.stop();
    guest.finish().passed();
}

/// It cannot be known any more which processes have the memory.
#[test]
fn shared_memory_stays_after_its_program_has_closed_all_descriptors() {
    stays_while_other_memory_moves(BY_HANDLES, "closes");
}

#[test]
fn memory_that_is_away_is_opened_in_the_turn_of_its_process() {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    Program::guest(&world, BY_HANDLES, &["waits"]).start().finish().passed();
    world.moved_when_told();
}

#[test]
fn memory_that_is_lost_is_opened_with_the_error_of_its_process() {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let lost = world.dir().join("lost");
    let guest = Program::guest(&world, BY_HANDLES, &["lost"]).env("NVSIM_LOST", &lost.to_string_lossy());
    let finished = guest.start().finish();
    assert!(finished.log.contains("36 MiB of the program's memory cannot come back"), "{}", finished.log);
    finished.passed();
}

#[test]
fn calls_for_descriptors_answer_as_natively() {
    natively(BY_DESCRIPTORS, "answers");
    let log = under_nvshare(BY_DESCRIPTORS, "answers").log;
    assert!(log.contains("36 MiB stay on the card: other devices can reach them"), "{log}");
}

#[test]
fn memory_that_other_devices_reach_stays_while_other_memory_moves() {
    stays_while_other_memory_moves(BY_DESCRIPTORS, "turns");
}

/// A device that reaches memory goes on to reach it when the program shares it with processes, too.
#[test]
fn memory_that_other_devices_reach_is_shared_with_processes() {
    natively(BY_DESCRIPTORS, "shared");
    under_nvshare(BY_DESCRIPTORS, "shared");
}

/// The device came to reach it while work ran, so it could not be exchanged before.
#[test]
fn memory_that_other_devices_reach_is_not_exchanged() {
    natively_with(BY_DESCRIPTORS, &["shared in use", "0"]);
    let log = under_nvshare_with(BY_DESCRIPTORS, &["shared in use", "1"]).log;
    assert!(log.contains("36 MiB cannot be shared with other processes: other devices may reach"), "{log}");
}

#[test]
fn without_swap_the_memory_that_comes_later_has_a_descriptor() {
    let world = World::simulated(CARD);
    let finished = Program::guest(&world, BY_DESCRIPTORS, &["managed"]).start().finish();
    finished.passed();
    let log = finished.log;
    assert!(log.contains("with another device (dma-buf), but memory that moves cannot be shared"), "{log}");
}
