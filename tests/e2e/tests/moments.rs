//! Two events at one moment: an allocation that the lock overtakes, orders that arrive together, and the lock that is asked for
//! while work is in flight, or a capture open. A signal comes while a thread sleeps at the gate.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;
use std::time::Duration;

use nvshare_harness::{PlayedScheduler, Program, Running, Scheduler, World, wait_until};
use nvshare_proto::{Amount, ClientMessage, ClientState, Epoch, GpuUuid, SchedulerMessage};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];

nvshare_harness::with_both_memories! {
    an_allocation_that_the_lock_overtakes_is_charged_and_populated
    the_gate_stays_closed_while_memory_leaves_though_scheduling_goes_off
    an_eviction_waits_for_an_allocation_that_is_under_way
    an_eviction_waits_for_a_free_that_is_under_way
    the_lock_is_not_given_back_while_work_is_in_flight
    the_lock_is_not_given_back_while_a_second_context_has_work
    a_context_that_cannot_be_looked_at_counts_as_busy
    a_drain_that_is_given_up_leaves_no_barrier
    a_drain_leaves_an_open_capture_whole
    a_thread_that_jumps_out_of_its_sleep_asks_for_no_further_turn
    a_thread_that_sleeps_on_through_a_turn_asks_for_another
}

/// The order that asks for the lock of a grant.
fn drop_lock(epoch: Epoch, patience_ms: u32) -> SchedulerMessage {
    SchedulerMessage::DropLock { epoch, patience_ms }
}

/// Grants a client the lock with all the room of the card.
fn grant(client: &mut PlayedScheduler, gpu: GpuUuid, epoch: Epoch) {
    let room = Amount { gpu, bytes: 1 << 30 };
    client.say(&[
        SchedulerMessage::Capacity(room),
        SchedulerMessage::LockOk { epoch, quantum_ms: 1000, room: vec![room] },
    ]);
}

/// The client's connection, its GPU, and its grant.
type Played = (PlayedScheduler, GpuUuid, Epoch);

/// Waits for the client and grants it the lock.
fn granted(listener: &UnixListener) -> Played {
    let (mut client, usage) = PlayedScheduler::accept(listener);
    let gpu = usage.first().map(|usage| usage.gpu);
    let gpu = gpu.unwrap_or_else(|| {
        client.until(|m| if let ClientMessage::Usage(u) = m { Some(u.gpu) } else { None })
    });
    let epoch = Epoch { boot: 1, counter: 1 };
    grant(&mut client, gpu, epoch);
    (client, gpu, epoch)
}

/// Waits until the client has no work under way and its gate is closed.
fn given_back(client: &mut PlayedScheduler) {
    client.until(|m| {
        matches!(m, ClientMessage::LockReleased { .. } | ClientMessage::Idle { .. }).then_some(())
    });
}

fn an_allocation_that_the_lock_overtakes_is_charged_and_populated(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let held = world.dir().join("held");
    let guest = Program::guest(&world, "overtaken", &[]);
    let guest = guest.holds_up("allocations", &held).until_told().start();
    // The allocation is under way, and the holder has waited in vain for memory that it is told to restore. Where the library maps the
    // memory, it is the holder that asks the driver for it.
    let state = if memory == "swap" { ClientState::Restoring } else { ClientState::Running };
    Scheduler::until(&world, "it has the lock, and the driver is asked", |status| {
        assert!(guest.lives(), "{}", guest.log());
        let client = status.find(guest.pid());
        client.is_some_and(|client| client.state == state) && held.with_extension("waits").exists()
    });
    std::fs::remove_file(&held).expect("the file");
    Scheduler::until(&world, "what it has is on the card", |status| {
        assert!(guest.lives(), "{}", guest.log());
        status.find(guest.pid()).is_some_and(|client| client.resident >= 256 << 20)
    });
    world.stop();
    guest.finish().passed();
    // No kernel was the first to touch the memory.
    let (moved, _) = world.observe();
    assert_eq!((moved.touched, moved.faulted, moved.pushed_out), (0, 0, 0), "{moved:?}");
}

fn the_gate_stays_closed_while_memory_leaves_though_scheduling_goes_off(memory: &str) {
    const BYTES: u64 = 640 << 20;
    // The memory takes a while to leave.
    let world = World::with_memory(memory, &[CARD[0], CARD[1], ("NVSIM_TO_HOST", "1")]);
    let listener = PlayedScheduler::listen(&world);
    // The job does not wait for its kernels: there is always one that could run. Each block is more than a client may have
    // allocated without reporting it.
    let job = Program::workload(&world, "job", "--memory 640MiB --block 160MiB --kernel-us 1000 --ahead");
    let job = job.until_told().start();
    let (mut client, gpu, epoch) = granted(&listener);
    client.until(|m| match m {
        ClientMessage::Usage(usage) if usage.allocated == BYTES && usage.absent == 0 => Some(()),
        _ => None,
    });
    // Kernels run by now.
    let ran = || world.observe().1.len();
    let before = ran();
    wait_until("its kernels run", || ran() > before + 20);
    client.say(&[drop_lock(epoch, 60_000)]);
    given_back(&mut client);
    // The client reads both at once: memory is to leave, and the gate may open.
    client.say(&[SchedulerMessage::Evict(Amount { gpu, bytes: BYTES }), SchedulerMessage::SchedOff]);
    let before = ran();
    client.until(|m| matches!(m, ClientMessage::Counters(c) if c.evicted >= BYTES).then_some(()));
    wait_until("its kernels run again", || ran() > before + 20);
    world.stop();
    // A kernel that reaches memory without a mapping ends its process.
    job.finish().intact();
    let (moved, _) = world.observe();
    assert_eq!((moved.evicted_in_use, moved.faulted), (0, 0), "{moved:?}");
}

/// Asks for an eviction while the file `held` holds up the guest. When the eviction has found nothing to move, waits for `WOULD_BE_OVER`, and
/// removes the file. An eviction that does not wait would have ended by then. Returns the bytes that stay.
fn evicts_beside(client: &mut PlayedScheduler, guest: &Running, held: &Path, room: Amount) -> u64 {
    const WOULD_BE_OVER: Duration = Duration::from_millis(500);
    client.say(&[SchedulerMessage::Evict(room)]);
    thread::scope(|scope| {
        scope.spawn(|| {
            wait_until("the eviction has looked", || guest.log().contains("[INFO]: evicted 0 MiB"));
            thread::sleep(WOULD_BE_OVER);
            std::fs::remove_file(held).expect("the file");
        });
        client.until(|m| if let ClientMessage::Evicted { short, .. } = m { Some(*short) } else { None })
    })
}

fn an_eviction_waits_for_an_allocation_that_is_under_way(memory: &str) {
    // Memory of a pool takes room when it is made, with or without the lock.
    const BYTES: u64 = 600 << 20;
    let world = World::with_memory(memory, CARD);
    let held = world.dir().join("held");
    let listener = PlayedScheduler::listen(&world);
    let guest = Program::guest(&world, "pool_beside_host_function", &[]);
    let guest = guest.holds_up("allocations", &held).until_told().start();
    let (mut client, _) = PlayedScheduler::accept(&listener);
    let gpu = client.until(|m| match m {
        ClientMessage::NeedRoom(room) if room.bytes == BYTES => Some(room.gpu),
        _ => None,
    });
    std::fs::write(&held, "").expect("allocations are held");
    client.say(&[
        SchedulerMessage::Capacity(Amount { gpu, bytes: 1 << 30 }),
        SchedulerMessage::Room(Amount { gpu, bytes: BYTES + (100 << 20) }),
    ]);
    // The allocation is charged by the time that the driver is asked for the memory.
    wait_until("the driver is asked", || held.with_extension("waits").exists());
    let short = evicts_beside(&mut client, &guest, &held, Amount { gpu, bytes: BYTES });
    assert_eq!(short, 0, "bytes stay that an allocation is about to enter");
}

fn an_eviction_waits_for_a_free_that_is_under_way(memory: &str) {
    const BYTES: u64 = 600 << 20;
    let world = World::with_memory(memory, CARD);
    let listener = PlayedScheduler::listen(&world);
    let held = world.dir().join("held");
    let guest = Program::guest(&world, "frees_parked", &[]).holds_up("free", &held);
    let guest = guest.until_woken().until_told().start();
    let (mut client, gpu, epoch) = granted(&listener);
    wait_until("its kernel has run", || guest.out().contains("ran") || !guest.lives());
    client.say(&[drop_lock(epoch, 60_000)]);
    given_back(&mut client);
    std::fs::write(&held, "").expect("frees are held");
    world.wake();
    wait_until("it frees its memory", || held.with_extension("waits").exists() || !guest.lives());
    let short = evicts_beside(&mut client, &guest, &held, Amount { gpu, bytes: BYTES });
    assert_eq!(short, 0, "bytes stay that are being freed");
    world.stop();
    guest.finish().passed();
}

#[test]
fn a_free_returns_when_what_was_freed_in_stream_order_is_free_as_well() {
    let world = World::with_memory("managed", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let held = world.dir().join("held").to_string_lossy().into_owned();
    Program::guest(&world, "free_beside_free", &[]).holds_up("free", &held).start().finish().passed();
}

/// A guest with work in flight that does not end, which has the lock. `argument`: its own.
fn with_work(world: &World, argument: &str, variables: &[(&str, &str)]) -> (Running, Played) {
    let listener = PlayedScheduler::listen(world);
    let guest = Program::guest(world, "held_work", &[argument]).until_woken().until_told();
    let guest = variables.iter().fold(guest, |guest, (name, value)| guest.env(name, value)).start();
    let played = granted(&listener);
    wait_until("its work has begun", || guest.out().contains("begun") || !guest.lives());
    (guest, played)
}

/// A client that is asked for the lock keeps it, since its work does not end. The answer shows that the library has waited for that work,
/// and so is the same on a machine of any speed.
fn keeps_the_lock(client: &mut PlayedScheduler, epoch: Epoch) {
    // The library waits this long for work that makes no progress, before it says so.
    const PATIENCE_MS: u32 = 3000;
    client.say(&[drop_lock(epoch, PATIENCE_MS)]);
    let keeps = client.until(|m| match m {
        ClientMessage::DropDeferred { .. } => Some(true),
        ClientMessage::LockReleased { .. } | ClientMessage::Idle { .. } => Some(false),
        _ => None,
    });
    assert!(keeps, "the lock was given back while work was in flight");
}

/// Once the work may end, the lock is given back, and not before the work has ended.
fn gives_the_lock_back_after_its_work(world: &World, guest: Running, (mut client, gpu, epoch): Played) {
    client.say(&[drop_lock(epoch, 60_000)]);
    world.wake();
    client.until(|m| matches!(m, ClientMessage::LockReleased { .. }).then_some(()));
    assert!(guest.out().contains("over"), "the lock was given back before the work was over");
    grant(&mut client, gpu, Epoch { boot: 1, counter: 2 });
    world.stop();
    guest.finish().passed();
}

fn the_lock_is_not_given_back_while_work_is_in_flight(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let (guest, (mut client, gpu, epoch)) = with_work(&world, "", &[]);
    keeps_the_lock(&mut client, epoch);
    gives_the_lock_back_after_its_work(&world, guest, (client, gpu, epoch));
}

fn the_lock_is_not_given_back_while_a_second_context_has_work(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let (guest, (mut client, gpu, epoch)) = with_work(&world, "second", &[]);
    keeps_the_lock(&mut client, epoch);
    gives_the_lock_back_after_its_work(&world, guest, (client, gpu, epoch));
}

fn a_context_that_cannot_be_looked_at_counts_as_busy(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let (_guest, (mut client, _, epoch)) = with_work(&world, "", &[("NVSIM_CTX_RECORD_FAILS", "1")]);
    keeps_the_lock(&mut client, epoch);
}

/// An event on the legacy stream would let work on other streams wait for the work that does not end.
fn a_drain_that_is_given_up_leaves_no_barrier(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let given_up = world.dir().join("given-up");
    let variables = [("GIVEN_UP", given_up.to_str().expect("a name"))];
    let (guest, (mut client, gpu, epoch)) = with_work(&world, "blocking", &variables);
    keeps_the_lock(&mut client, epoch);
    std::fs::write(&given_up, "").expect("a file");
    wait_until("other work goes on", || guest.out().contains("beside") || !guest.lives());
    gives_the_lock_back_after_its_work(&world, guest, (client, gpu, epoch));
}

fn a_drain_leaves_an_open_capture_whole(memory: &str) {
    // The capture is on a stream that waits for the legacy stream, and on one that does not.
    for flags in ["0", "1"] {
        let world = World::with_memory(memory, CARD);
        let listener = PlayedScheduler::listen(&world);
        let guest = Program::guest(&world, "held_capture", &[flags]).until_woken().start();
        let (mut client, gpu, epoch) = granted(&listener);
        wait_until("its capture is open", || guest.out().contains("open") || !guest.lives());
        client.say(&[drop_lock(epoch, 60_000)]);
        client.until(|m| matches!(m, ClientMessage::LockReleased { .. }).then_some(()));
        world.wake();
        // The graph is launched under the next grant.
        grant(&mut client, gpu, Epoch { boot: 1, counter: 2 });
        guest.finish().passed();
    }
}

fn asks(message: &ClientMessage) -> Option<()> {
    matches!(message, ClientMessage::ReqLock).then_some(())
}

fn says(guest: &Running, text: &str) {
    wait_until(&format!("the guest says {text:?}"), || {
        assert!(guest.lives(), "{} {}", guest.out(), guest.log());
        guest.out().contains(text)
    });
}

/// A guest with a thread that has slept at the gate when a signal came, whose handler does this.
fn interrupted(world: &World, how: &str) -> (Running, PlayedScheduler, GpuUuid) {
    let listener = PlayedScheduler::listen(world);
    let guest =
        Program::guest(world, "interrupted", &[how]).until_woken().waits_for_go().until_told().start();
    let (mut client, gpu, epoch) = granted(&listener);
    says(&guest, "has worked\n");
    client.say(&[drop_lock(epoch, 60_000)]);
    given_back(&mut client);
    world.wake();
    client.until(asks);
    std::fs::write(world.dir().join("go"), "").expect("a file");
    says(&guest, "interrupted\n");
    (guest, client, gpu)
}

fn a_thread_that_jumps_out_of_its_sleep_asks_for_no_further_turn(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let (guest, mut client, gpu) = interrupted(&world, "jumps");
    grant(&mut client, gpu, Epoch { boot: 1, counter: 2 });
    client.until_running();
    // It has made the call once more.
    says(&guest, "has worked again\n");
    client.say(&[SchedulerMessage::Waiters { waiting: true }]);
    client.until(|m| matches!(m, ClientMessage::Idle { .. }).then_some(()));
    // The client would have asked before it answers this.
    client.say(&[SchedulerMessage::Evict(Amount { gpu, bytes: 16 << 20 })]);
    let mut has_asked = false;
    client.until(|m| {
        has_asked |= asks(m).is_some();
        matches!(m, ClientMessage::Evicted { .. }).then_some(())
    });
    assert!(!has_asked, "{}", guest.log());
    world.stop();
    guest.finish().passed();
}

fn a_thread_that_sleeps_on_through_a_turn_asks_for_another(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let (guest, mut client, gpu) = interrupted(&world, "stays");
    let epoch = Epoch { boot: 1, counter: 2 };
    grant(&mut client, gpu, epoch);
    client.until_running();
    client.say(&[drop_lock(epoch, 60_000)]);
    given_back(&mut client);
    // The handler ends, and the thread finds the gate closed.
    std::fs::remove_file(world.dir().join("go")).expect("the file");
    client.until(asks);
    grant(&mut client, gpu, Epoch { boot: 1, counter: 3 });
    says(&guest, "has worked again\n");
    world.stop();
    guest.finish().passed();
}

#[test]
fn one_thread_waits_for_a_context_however_often_its_drain_is_given_up() {
    let world = World::with_memory("managed", CARD);
    let (guest, (mut client, gpu, epoch)) = with_work(&world, "unseen", &[("NVSIM_CTX_RECORD", "0")]);
    for _ in 0..4 {
        client.say(&[drop_lock(epoch, 500)]);
        client.until(|m| matches!(m, ClientMessage::DropDeferred { .. }).then_some(()));
        client.until_running();
    }
    assert_eq!(guest.threads("nvshare-wait"), 1);
    gives_the_lock_back_after_its_work(&world, guest, (client, gpu, epoch));
}
