//! Peer access: kernels of one card reach what the program has on another by `cuMemAlloc`, however that memory is kept.

use nvshare_harness::{Finished, PlayedScheduler, Program, Running, Scheduler, World, wait_until};
use nvshare_proto::units::{GIB, MIB};
use nvshare_proto::{Amount, ClientMessage, Epoch, GpuUuid, SchedulerMessage};

const CARDS: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64"), ("NVSIM_GPUS", "2")];
/// More than the guest has on a card.
const BYTES: u64 = 128 * MIB;

fn peers(memory: &str, arguments: &[&str]) -> Finished {
    let world = World::with_memory(memory, CARDS);
    Program::guest(&world, "peers", arguments).start().finish()
}

/// Whether the guest asks for the lock of these GPUs, which it names before.
fn asks_for(message: &ClientMessage, gpus: &mut Vec<GpuUuid>) -> Option<()> {
    if let ClientMessage::Usage(usage) = message
        && !gpus.contains(&usage.gpu)
    {
        gpus.push(usage.gpu);
    }
    matches!(message, ClientMessage::ReqLock).then_some(())
}

#[test]
fn kernels_reach_the_memory_of_peers() {
    let native = Program::guest(&World::simulated(CARDS), "peers", &[]).alone().start().finish();
    native.passed();
    for memory in ["off", "managed", "swap"] {
        peers(memory, &[]).passed();
    }
}

#[test]
fn a_context_of_one_card_ends_beside_a_thread_that_retains_another_ones() {
    let run = |program: Program| {
        program.start().finish().passed();
    };
    run(Program::guest(&World::simulated(CARDS), "retains_beside_reset", &[]).alone());
    for memory in ["managed", "swap"] {
        run(Program::guest(&World::with_memory(memory, CARDS), "retains_beside_reset", &[]));
    }
}

#[test]
fn access_that_is_said_to_be_there_is_there() {
    let world = World::with_memory("swap", CARDS);
    let held = format!("access:{}", world.dir().join("held").display());
    Program::guest(&world, "peers_at_once", &[]).env("NVSIM_HELD", &held).start().finish().passed();
}

#[test]
fn access_that_was_given_up_is_none() {
    for how in ["again", "ended"] {
        let native = Program::guest(&World::simulated(CARDS), "peers", &[how]).alone().start().finish();
        for finished in [native, peers("off", &[how]), peers("swap", &[how])] {
            assert!(!finished.status.success(), "{how}: {}", finished.log);
            assert!(finished.log.contains("to which the card has no access"), "{how}: {}", finished.log);
        }
    }
}

/// The driver makes such copies of memory of `cuMemAlloc`, and not of mapped memory (measured).
#[test]
fn copies_without_access_are_made() {
    Program::guest(&World::simulated(CARDS), "across", &[]).alone().start().finish().passed();
    for memory in ["off", "managed", "swap"] {
        Program::guest(&World::with_memory(memory, CARDS), "across", &[]).start().finish().passed();
    }
}

/// The driver refuses them as well, and the capture that they are in goes on (measured).
#[test]
fn copies_of_graphs_without_access_are_made() {
    for way in ["0", "1", "2", "3", "4", "5"] {
        let arguments = ["graph", way];
        Program::guest(&World::simulated(CARDS), "across", &arguments).alone().start().finish().passed();
        for memory in ["managed", "swap"] {
            Program::guest(&World::with_memory(memory, CARDS), "across", &arguments)
                .start()
                .finish()
                .passed();
        }
    }
}

/// Where cards have no way to each other's memory, copies between them are made all the same.
#[test]
fn copies_are_made_between_cards_without_a_way() {
    for (memory, passes) in [("off", true), ("managed", true), ("swap", false)] {
        let world = World::with_memory(memory, CARDS);
        let refuses = world.dir().join("refuses");
        std::fs::write(&refuses, "").expect("a file");
        let guest = Program::guest(&world, "across", &["cards"]);
        guest.env("NVSIM_REFUSED_PEERS", &refuses.to_string_lossy()).start().finish().passed();
        let guest =
            Program::guest(&world, "across", &[]).env("NVSIM_REFUSED_PEERS", &refuses.to_string_lossy());
        assert_eq!(guest.start().finish().status.success(), passes, "{memory}");
    }
}

/// A kernel waits for the lock of the card whose memory it reaches, though nothing runs there.
#[test]
fn a_program_asks_for_the_cards_that_its_memory_is_on() {
    for memory in ["managed", "swap"] {
        let world = World::with_memory(memory, CARDS);
        let listener = PlayedScheduler::listen(&world);
        let guest = Program::guest(&world, "reaches", &[]).start();
        let (mut scheduler, usage) = PlayedScheduler::accept(&listener);
        let mut gpus: Vec<GpuUuid> = usage.iter().map(|usage| usage.gpu).collect();
        scheduler.until(|message| asks_for(message, &mut gpus));
        assert_eq!(gpus.len(), 2, "{memory}");
        scheduler.say(&[SchedulerMessage::SchedOff]);
        guest.finish().passed();
    }
}

/// A card's kernels run only while the memory of all of the program's cards is there, though each card has another program of its own.
#[test]
fn rings_take_turns_with_programs_of_each_card() {
    for (memory, cards) in [("managed", 2), ("swap", 2), ("swap", 3)] {
        let gpus = cards.to_string();
        let settings = [CARDS[0], CARDS[1], ("NVSIM_GPUS", gpus.as_str())];
        let world = World::with_memory(memory, &settings);
        let _scheduler = Scheduler::start(&world, &["--gpu-memory", "128MiB", "--tq", "0.1"]);
        let rings =
            ["a", "b"].map(|_| Program::guest(&world, "ring", &[]).env("GPUS", &gpus).until_told().start());
        let arguments = "--memory 96MiB --block 16MiB --kernel-us 2000 --full-check";
        let others: Vec<Running> = (0..cards)
            .map(|card| {
                let other = Program::workload(&world, &format!("of-{card}"), arguments);
                other.env("CUDA_VISIBLE_DEVICES", &card.to_string()).until_told().start()
            })
            .collect();
        let all: Vec<&Running> = rings.iter().chain(&others).collect();
        Scheduler::until_turns(&world, &all, 8);
        world.stop();
        rings.map(Running::finish).iter().for_each(|ring| _ = ring.passed());
        others.into_iter().map(Running::finish).for_each(|other| _ = other.intact());
        if memory == "swap" {
            world.moved_when_told();
        }
    }
}

#[test]
fn memory_that_comes_back_is_reached_by_peers() {
    come_back(false).passed();
}

#[test]
fn memory_comes_back_though_the_driver_refuses_peers() {
    let finished = come_back(true);
    // It is there, and the peer does not reach it.
    assert!(finished.log.contains("the driver refuses peers access"), "{}", finished.log);
    assert!(finished.log.contains("to which the card has no access"), "{}", finished.log);
}

/// The guest's memory leaves when it has enabled peer access, and comes back. The driver may refuse that peers reach it then.
fn come_back(refused: bool) -> Finished {
    let world = World::with_memory("swap", CARDS);
    let listener = PlayedScheduler::listen(&world);
    let (wake, refuses) = (world.dir().join("wake"), world.dir().join("refuses"));
    let guest = Program::guest(&world, "peers", &[]).env("WAKE", &wake.to_string_lossy());
    let guest = guest.env("NVSIM_REFUSED_PEERS", &refuses.to_string_lossy()).start();
    let (mut scheduler, usage) = PlayedScheduler::accept(&listener);
    let mut gpus: Vec<GpuUuid> = usage.iter().map(|usage| usage.gpu).collect();
    let mut granted = 0;
    let mut grant = |scheduler: &mut PlayedScheduler, gpus: &[GpuUuid]| {
        granted += 1;
        let epoch = Epoch { boot: 1, counter: granted };
        let room = gpus.iter().map(|&gpu| Amount { gpu, bytes: BYTES }).collect();
        let capacity = gpus.iter().map(|&gpu| SchedulerMessage::Capacity(Amount { gpu, bytes: GIB }));
        scheduler.say(&capacity.collect::<Vec<_>>());
        scheduler.say(&[SchedulerMessage::LockOk { epoch, quantum_ms: 60_000, room }]);
        scheduler.until_running();
        epoch
    };
    scheduler.until(|message| asks_for(message, &mut gpus));
    let epoch = grant(&mut scheduler, &gpus);
    wait_until("the guest has enabled peer access", || {
        assert!(guest.lives(), "{}", guest.log());
        guest.out().contains("ready\n")
    });
    scheduler.say(&[SchedulerMessage::DropLock { epoch, patience_ms: 60_000 }]);
    scheduler.until(|m| {
        matches!(m, ClientMessage::LockReleased { .. } | ClientMessage::Idle { .. }).then_some(())
    });
    let mut left = 0;
    for &gpu in &gpus {
        scheduler.say(&[SchedulerMessage::Evict(Amount { gpu, bytes: BYTES })]);
        scheduler.until(|m| {
            if let ClientMessage::Room(room) = m {
                left += room.bytes;
            }
            matches!(m, ClientMessage::Evicted { .. }).then_some(())
        });
    }
    assert!(left >= 74 * MIB, "{left}");
    if refused {
        std::fs::write(&refuses, "").expect("a file");
    }
    world.wake();
    scheduler.until(|message| asks_for(message, &mut gpus));
    grant(&mut scheduler, &gpus);
    guest.finish()
}
