//! Programs that create and map their memory themselves: with `NVSHARE_MEMORY=swap` it moves.

use nvshare_harness::{Program, Running, Scheduler, Status, World, wait_until};
use nvshare_proto::{ClientState, ClientStatus};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
const MIB: u64 = 1 << 20;

/// The guest under nvshare.
fn maps(world: &World, how: &str) -> Program {
    Program::guest(world, "maps", &[how]).until_told()
}

/// Both programs have ended well, and nothing came to the card or left it but by the library's copies.
fn both_are_intact(world: &World, guest: Running, other: Running) -> String {
    let guest = world.stop_guest(guest, other);
    world.moved_when_told();
    guest.log
}

/// The bytes of all evictions in a log.
fn evicted(log: &str) -> u64 {
    let lines = log.lines().filter_map(|line| line.split_once("evicted ")?.1.split_once(" MiB"));
    lines.filter_map(|(mib, _)| mib.parse::<u64>().ok()).sum::<u64>() * MIB
}

/// Runs the guest in turns with a program whose memory does not fit beside its own.
fn in_turns(how: &str, settings: &[(&str, &str)], turns: u64) -> String {
    let world = World::with_memory("swap", &[CARD, settings].concat());
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let other = Program::workload(&world, "other", "--memory 832MiB --block 64MiB --kernel-us 2000");
    let (guest, other) = (maps(&world, how).start(), other.until_told().start());
    Scheduler::until_turns(&world, &[&guest, &other], turns);
    // How much moves in a turn depends on how far the guest comes in it.
    Scheduler::until(&world, "the guest's memory has moved", |status| {
        let moved = |client: &ClientStatus| client.counters.evicted >= 200 * MIB;
        status.find(guest.pid()).is_some_and(moved) || !guest.lives()
    });
    let log = both_are_intact(&world, guest, other);
    assert!(evicted(&log) >= 200 * MIB, "{log}");
    log
}

#[test]
fn one_handle_that_is_mapped_as_a_whole() {
    in_turns("pool", &[], 4);
}

#[test]
fn one_handle_that_others_may_get() {
    in_turns("pool", &[("EXPORTABLE", "1")], 4);
}

/// Memory under one handle moves as a whole, but not in one step: the lock is given back in the middle.
#[test]
fn a_restore_of_much_memory_under_one_handle_is_given_up_in_its_middle() {
    const POOL: u64 = 402 * MIB;
    // A hold of copies is over a while before they are all done.
    let world = World::with_memory("swap", &[CARD, &[("NVSIM_TO_DEVICE", "4")]].concat());
    let held = world.dir().join("held");
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1", "--grace", "600"]);
    let other = Program::workload(&world, "other", "--memory 832MiB --block 64MiB --kernel-us 2000");
    let guest = maps(&world, "pool").env("EXPORTABLE", "1").holds_up("in", &held);
    let (guest, other) = (guest.start(), other.until_told().start());
    Scheduler::until_turns(&world, &[&guest, &other], 3);
    let absent =
        |status: &Status| status.client(guest.pid()).usage.iter().map(|usage| usage.absent).sum::<u64>();
    Scheduler::until(&world, "the guest runs", |status| {
        status.client(guest.pid()).state == ClientState::Running
    });
    std::fs::write(&held, "").expect("a file");
    Scheduler::until(&world, "its memory comes back, and it has the lock", |status| {
        held.with_extension("waits").exists() && status.client(guest.pid()).state == ClientState::Restoring
    });
    let said = guest.log().len();
    let id = Scheduler::status(&world).client(guest.pid()).client.to_string();
    let paused = Scheduler::ctl(&world, &["pause", &id]);
    assert!(paused.status.success(), "{paused:?}");
    wait_until("the mover is told", || guest.log()[said..].contains("what the mover does is given up"));
    std::fs::remove_file(&held).expect("the file");
    Scheduler::until(&world, "the lock is given back", |status| {
        let state = status.client(guest.pid()).state;
        !matches!(state, ClientState::Restoring | ClientState::Draining)
    });
    assert_eq!(absent(&Scheduler::status(&world)), POOL, "{}", guest.log());
    assert!(guest.log()[said..].contains("is given up between two of its parts"), "{}", guest.log());
    let resumed = Scheduler::ctl(&world, &["resume", &id]);
    assert!(resumed.status.success(), "{resumed:?}");
    Scheduler::until_more_turns(&world, &[&guest, &other], 3);
    both_are_intact(&world, guest, other);
}

#[test]
fn segments_that_come_and_go_and_change_their_addresses() {
    in_turns("segments", &[], 4);
}

#[test]
fn memory_at_several_addresses_or_at_none() {
    in_turns("aliases", &[], 4);
}

/// Contents that stay behind are not page-locked any more, so the simulator keeps all of their bytes.
#[test]
fn memory_outlives_its_contexts() {
    in_turns("contexts", &[("NVSIM_COPY_OUT", "4"), ("NVSIM_SPARSE", "0")], 4);
}

#[test]
fn a_context_ends_while_memory_comes_back() {
    let world = World::with_memory("swap", &[CARD, &[("NVSIM_SPARSE", "0")]].concat());
    let held = world.dir().join("held").to_string_lossy().into_owned();
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let other = Program::workload(&world, "other", "--memory 832MiB --block 64MiB --kernel-us 2000");
    let guest = maps(&world, "restored").holds_up("access", &held).start();
    let other = other.until_told().start();
    Scheduler::until_turns(&world, &[&guest, &other], 4);
    both_are_intact(&world, guest, other);
}

/// The program creates no memory while there is no scheduler, because nobody would make room for it.
#[test]
fn the_scheduler_is_killed_meanwhile() {
    let world = World::with_memory("swap", CARD);
    let scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let other = Program::workload(&world, "other", "--memory 832MiB --block 64MiB --kernel-us 2000");
    let (guest, other) = (maps(&world, "aliases").start(), other.until_told().start());
    Scheduler::until_turns(&world, &[&guest, &other], 4);
    scheduler.kill();
    let _next = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    Scheduler::until(&world, "both are back", |status| {
        [&guest, &other].iter().all(|program| status.find(program.pid()).is_some() || !program.lives())
    });
    Scheduler::until_more_turns(&world, &[&guest, &other], 4);
    both_are_intact(&world, guest, other);
}

/// All bytes are moved: the simulator keeps as many in the host's memory as the program has.
#[test]
fn every_word_of_a_pool_survives() {
    let whole =
        [("NVSIM_MEMORY", "128MiB"), ("NVSIM_SCALE", "1"), ("NVSIM_SPARSE", "0"), ("NVSIM_REGISTER", "50")];
    let world = World::with_memory("swap", &whole);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "128MiB", "--tq", "0.05"]);
    let other =
        Program::workload(&world, "other", "--memory 93MiB --block 3MiB --kernel-us 500 --full-check");
    let guest = maps(&world, "pool").env("ALL_WORDS", "1").start();
    let other = other.until_told().start();
    Scheduler::until_turns(&world, &[&guest, &other], 8);
    let log = both_are_intact(&world, guest, other);
    assert!(evicted(&log) >= 500 * MIB, "{log}");
}

#[test]
fn memory_that_others_can_get_stays() {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let guest = maps(&world, "shares").start();
    let immovable = |bytes: u64| {
        Scheduler::until(&world, "so much is immovable", |status| {
            let client = status.find(guest.pid());
            client.is_some_and(|client| client.usage.iter().any(|usage| usage.immovable == bytes))
        });
    };
    immovable(100 * MIB);
    let other = Program::workload(&world, "other", "--memory 832MiB --block 64MiB --kernel-us 2000");
    let other = other.until_told().start();
    Scheduler::until_turns(&world, &[&guest, &other], 4);
    let log = both_are_intact(&world, guest, other);
    assert!(log.contains("100 MiB stay on the card: other processes can reach them"), "{log}");
    assert!(evicted(&log) >= 100 * MIB, "{log}");
}

/// And the driver's answers about it are those that the library gives about memory that moves: the program checks them.
#[test]
fn memory_that_a_user_names_is_the_drivers_and_stays() {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let guest = maps(&world, "pool").env("NVSHARE_PLAIN", "all").start();
    Scheduler::until(&world, "all of it is immovable", |status| {
        let client = status.find(guest.pid());
        client.is_some_and(|client| client.usage.iter().any(|usage| usage.immovable == 402 * MIB))
    });
    world.stop();
    guest.finish().passed();
}
