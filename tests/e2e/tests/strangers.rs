//! A process that is no client has a part of the card. Mostly nobody has measured that.

use std::os::unix::fs::symlink;
use std::time::Instant;

use nvshare_harness::{
    PlayedScheduler, Program, Running, Scheduler, Status, World, guest, patience, wait_until,
};
use nvshare_proto::units::{GIB, MIB};
use nvshare_proto::{Amount, ClientMessage, ClientState, Epoch, GpuUuid, SchedulerMessage};

/// Clients believe that they may fill 896 MiB together: there is no NVML.
const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];

/// A client with `mib` MiB, which has begun to allocate.
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

/// So does plain memory, which stays. The other one goes on when it is free again.
#[test]
fn plain_memory_that_the_driver_does_not_have_waits_until_others_leave() {
    let world = World::with_memory("swap", &[CARD, &[("NVSIM_MANAGED_POOLS", "0")]].concat());
    let _scheduler = Scheduler::start(&world, &["--tq", "0.2"]);
    let stranger = stranger(&world);
    let other = client(&world, "other", 400);
    Scheduler::until(&world, "the other one has all of its memory", |status| {
        status.client(other.pid()).usage.iter().any(|usage| usage.allocated >= 400 * MIB)
    });
    let plain = "--memory 384MiB --block 64MiB --kernel-us 500 --steps 5 --ordered --full-check";
    Program::workload(&world, "plain", plain).start().finish().intact();
    world.stop();
    stranger.finish().passed();
    other.finish().intact();
    world.moved_when_told();
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

/// NVML sees a stranger that leaves less of the card than one of them has. That one waits, and the other one has the rest for itself.
#[test]
fn a_program_that_does_not_fit_beside_a_stranger_any_more_waits_and_stops_nobody() {
    let world = World::with_memory("swap", CARD);
    let processes = world.dir().join("processes");
    std::fs::write(&processes, "").expect("a file");
    symlink(guest("nvml", true), world.dir().join("lib/libnvidia-ml.so.1")).expect("a link");
    let _scheduler = Scheduler::start(&world, &["--tq", "0.2", "--reserve", "128MiB"]);
    let [large, small] = [("large", 640), ("small", 320)].map(|(name, mib)| client(&world, name, mib));
    Scheduler::until(&world, "they have all of their memory", |status| {
        let has =
            |job: &Running, mib| status.client(job.pid()).usage.iter().any(|u| u.allocated >= mib * MIB);
        has(&large, 640) && has(&small, 320)
    });
    Scheduler::until_more_turns(&world, &[&large, &small], 2);
    std::fs::write(&processes, format!("1 {}\n", 512 * MIB)).expect("a file");
    Scheduler::until(&world, "there is too little for the large one", |status| {
        status.client(large.pid()).state == ClientState::Blocked
    });
    assert!(large.log().contains("the program waits: its memory needs"), "{}", large.log());
    let gated = |status: &Status| status.client(small.pid()).counters.gated;
    let before = gated(&Scheduler::status(&world));
    Scheduler::until(&world, "the small one gets on", |status| gated(status) > before + 100);
    std::fs::write(&processes, "").expect("a file");
    both_get_on(&world, [&large, &small]);
    world.stop();
    for job in [large, small] {
        job.finish().intact();
    }
}

/// Memory of a client that a scheduler of the test's has made leave, and the room that it is given when it comes back. That is far more, and
/// the driver has nothing of it for the last of the client's memory.
const BYTES: u64 = 768 * MIB;
const FAR_MORE: u64 = 64 * GIB;
/// After this many turns a client tries lost room again.
const TURNS_WITHOUT: u64 = 16;

fn epoch(counter: u64) -> Epoch {
    Epoch { boot: 1, counter }
}

fn grant(counter: u64, gpu: GpuUuid, bytes: u64) -> SchedulerMessage {
    SchedulerMessage::LockOk { epoch: epoch(counter), quantum_ms: 60_000, room: vec![Amount { gpu, bytes }] }
}

/// Takes the lock back from a client, whatever it is doing.
fn take_back(client: &mut PlayedScheduler, counter: u64) {
    client.say(&[SchedulerMessage::DropLock { epoch: epoch(counter), patience_ms: 60_000 }]);
    client.until(|m| {
        matches!(m, ClientMessage::LockReleased { .. } | ClientMessage::Idle { .. }).then_some(())
    });
}

/// A client that has found out that the driver lacks memory, its scheduler, its GPU, and the stranger who has the memory.
fn without_room(world: &World) -> (PlayedScheduler, Running, GpuUuid, Running) {
    let (mut client, guest, gpu) = PlayedScheduler::of_waiting_guest(world);
    client.say(&[SchedulerMessage::Capacity(Amount { gpu, bytes: 4 * GIB })]);
    wait_until("the program has memory", || guest.out().contains("has memory\n"));
    client.say(&[grant(0, gpu, BYTES)]);
    client.until_running();
    take_back(&mut client, 0);
    client.say(&[SchedulerMessage::Evict(Amount { gpu, bytes: BYTES })]);
    client.until(|m| matches!(m, ClientMessage::Evicted { .. }).then_some(()));
    let stranger = stranger(world);
    world.wake();
    client.say(&[grant(1, gpu, FAR_MORE)]);
    let asked = client.until(|m| if let ClientMessage::NeedRoom(room) = m { Some(room.bytes) } else { None });
    assert!(asked > FAR_MORE, "the client asks for more than it was given: {asked}");
    (client, guest, gpu, stranger)
}

/// Where there is no more, room that counts as lost is tried again, until the card has it.
#[test]
fn room_that_the_driver_does_not_have_is_asked_for_again_however_much_was_given() {
    let world = World::with_memory("swap", CARD);
    let (mut client, guest, gpu, stranger) = without_room(&world);
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

/// Turns that end before the memory is back count as well.
#[test]
fn lost_room_is_tried_again_after_some_turns() {
    let world = World::with_memory("swap", CARD);
    let (mut client, guest, gpu, stranger) = without_room(&world);
    world.stop();
    stranger.finish().passed();
    for turn in 1..=TURNS_WITHOUT {
        take_back(&mut client, turn);
        if turn < TURNS_WITHOUT {
            client.say(&[grant(turn + 1, gpu, 0)]);
        }
    }
    // Lost room counts as allocated until then.
    let is_found = |m: &ClientMessage| matches!(m, ClientMessage::Usage(usage) if usage.allocated == BYTES);
    client.until(|m| is_found(m).then_some(()));
    client.say(&[grant(TURNS_WITHOUT + 1, gpu, BYTES)]);
    client.until_running();
    guest.finish().passed();
}
