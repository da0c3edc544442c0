//! A process that is no client has a part of the card, and nobody has measured that.

use std::time::Instant;

use nvshare_harness::{PlayedScheduler, Program, Running, Scheduler, World, patience, wait_until};
use nvshare_proto::units::{GIB, MIB};
use nvshare_proto::{Amount, ClientMessage, Epoch, SchedulerMessage};

/// Clients believe that they may fill 896 MiB together: there is no NVML.
const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];

/// A client with so many MiB, which has begun to allocate.
fn client(world: &World, name: &str, mib: u64) -> Running {
    let args = format!("--memory {mib}MiB --block 32MiB --kernel-us 500 --full-check");
    let job = Program::workload(world, name, &args).until_told().start();
    wait_until("it has begun to allocate", || {
        let status = Scheduler::status(world);
        status.find(job.pid()).is_some_and(|client| client.usage.iter().any(|usage| usage.allocated > 0))
    });
    job
}

/// A process without the library has taken 320 MiB of the card.
fn stranger(world: &World) -> Running {
    let stranger = Program::guest(world, "takes_room", &["5"]).alone().until_told().start();
    wait_until("the stranger has its memory", || stranger.out().contains("has them"));
    stranger
}

/// Both submit work: who is only granted the lock has not run.
fn both_get_on(world: &World, jobs: [&Running; 2]) {
    let submitted = || jobs.map(|job| Scheduler::status(world).client(job.pid()).counters.gated);
    let before = submitted();
    wait_until("both get on", || submitted().iter().zip(before).all(|(now, before)| *now > before + 100));
}

/// Both fit the card that the scheduler believes in: the driver has nothing for the last allocations.
#[test]
fn an_allocation_that_the_driver_has_no_memory_for_waits_until_others_leave() {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--tq", "0.2"]);
    let stranger = stranger(&world);
    let [a, b] = [("a", 400), ("b", 384)].map(|(name, mib)| client(&world, name, mib));
    Scheduler::until_turns(&world, &[&a, &b], 3);
    both_get_on(&world, [&a, &b]);
    world.stop();
    stranger.finish().passed();
    for job in [a, b] {
        job.finish().intact();
    }
}

/// The stranger takes what is free in the middle of hand-overs: the driver has nothing for the memory that comes back last.
#[test]
fn memory_that_the_driver_has_no_room_for_comes_back_when_others_leave() {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--tq", "0.2", "--exchange", "nobody"]);
    let [a, b] = [("a", 600), ("b", 600)].map(|(name, mib)| client(&world, name, mib));
    Scheduler::until_turns(&world, &[&a, &b], 2);
    let stranger = stranger(&world);
    both_get_on(&world, [&a, &b]);
    world.stop();
    stranger.finish().passed();
    for job in [a, b] {
        job.finish().intact();
    }
}

/// A client has been given far more than it needs, and the driver has nothing of it for the last of its memory.
#[test]
fn room_that_the_driver_does_not_have_is_asked_for_again_however_much_was_given() {
    const BYTES: u64 = 768 * MIB;
    const FAR_MORE: u64 = 64 * GIB;
    let world = World::with_memory("swap", CARD);
    let listener = PlayedScheduler::listen(&world);
    let wake = world.dir().join("wake");
    let guest = Program::guest(&world, "waits_with_memory", &[]).until_told();
    let guest = guest.env("WAKE", &wake.to_string_lossy()).start();
    let (mut client, usage) = PlayedScheduler::accept(&listener);
    let known = usage.first().map(|usage| usage.gpu);
    let gpu = known.unwrap_or_else(|| {
        client.until(|m| if let ClientMessage::Usage(usage) = m { Some(usage.gpu) } else { None })
    });
    let grant = |counter, bytes| SchedulerMessage::LockOk {
        epoch: Epoch { boot: 1, counter },
        quantum_ms: 60_000,
        room: vec![Amount { gpu, bytes }],
    };
    client.say(&[SchedulerMessage::Capacity(Amount { gpu, bytes: 4 * GIB })]);
    wait_until("the program has memory", || guest.out().contains("has memory\n"));
    client.say(&[grant(0, BYTES)]);
    client.until_running();
    client.say(&[SchedulerMessage::DropLock { epoch: Epoch { boot: 1, counter: 0 }, patience_ms: 60_000 }]);
    client.until(|m| {
        matches!(m, ClientMessage::LockReleased { .. } | ClientMessage::Idle { .. }).then_some(())
    });
    client.say(&[SchedulerMessage::Evict(Amount { gpu, bytes: BYTES })]);
    client.until(|m| matches!(m, ClientMessage::Evicted { .. }).then_some(()));
    let stranger = stranger(&world);
    world.wake();
    client.say(&[grant(1, FAR_MORE)]);
    let asked = client.until(|m| if let ClientMessage::NeedRoom(room) = m { Some(room.bytes) } else { None });
    assert!(asked > FAR_MORE, "the client asks for more than it was given: {asked}");
    // There is no more, so what counted as lost is tried again, until the card has it.
    let (mut stranger, mut refused, begin) = (Some(stranger), 0, Instant::now());
    loop {
        assert!(begin.elapsed() < patience(), "the client asks for ever");
        client.say(&[SchedulerMessage::Room(Amount { gpu, bytes: 0 })]);
        refused += 1;
        if let Some(stranger) = stranger.take_if(|_| refused == 2) {
            world.stop();
            stranger.finish().passed();
        }
        let asks = client.until_or_gone(|m| match m {
            ClientMessage::NeedRoom(_) => Some(true),
            ClientMessage::Running { .. } => Some(false),
            _ => None,
        });
        if asks != Some(true) {
            break;
        }
    }
    guest.finish().passed();
}
