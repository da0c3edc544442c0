//! Streams and contexts that come and go, and work that waits for other work, in turns with a neighbour: the library may
//! not use anything that has ended, hold up work that could go on, or overlook work that runs.

use nvshare_harness::{Moved, Program, Scheduler, World, wait_until};
use nvshare_proto::{ClientState, ClientStatus};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];

nvshare_harness::with_both_memories! {
    stream_churn
    stream_churn_without_events_of_contexts
    stream_churn_with_handles_that_come_again
    legacy_wait
    memory_of_a_pool_is_not_brought_behind_a_host_function
    memory_freed_in_stream_order_holds_no_allocation_up
    rows_of_a_new_width_wait_for_no_work
    memory_freed_to_a_pool_is_room_for_the_next_program
    memory_freed_in_stream_order_does_not_leave_as_memory_in_use
    what_was_freed_in_stream_order_is_allocated_again_beside_work
    attributes_of_memory_end_with_its_free
    an_allocation_that_can_never_be_is_refused_beside_frees
    an_allocation_waits_for_no_full_queue_of_another_context
    an_allocation_asks_nothing_of_other_contexts_about_frees_put_off
    a_stream_ends_beside_a_full_queue_of_another_context
    a_stream_ends_while_a_capture_is_about_to_begin
    a_capture_begins_beside_a_full_queue_of_another_context
    a_launch_waits_for_no_launches_of_another_context
    a_primary_context_ends_with_the_green_one_that_outlived_its_release
    a_capture_that_stays_open_is_not_looked_into
    looks_at_contexts_that_fail
    second_context
    memory_of_a_pool_outlives_a_reset
}

/// A guest and a neighbour that do not fit together take `turns` turns each, and both succeed. Returns the bytes that
/// moved.
fn in_turns(memory: &str, name: &str, settings: &[(&str, &str)], turns: u64) -> Moved {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let other = Program::workload(&world, "other", "--memory 640MiB --block 64MiB --kernel-us 2000");
    let guest = Program::guest(&world, name, &[]);
    let guest = settings.iter().fold(guest, |guest, (name, value)| guest.env(name, value));
    let (guest, other) = (guest.until_told().start(), other.until_told().start());
    Scheduler::until_turns(&world, &[&guest, &other], turns);
    let guest = world.stop_guest(guest, other);
    assert!(Scheduler::status(&world).client(guest.pid).counters.hand_overs >= turns);
    world.observe().0
}

fn stream_churn(memory: &str) {
    // Each look at a stream takes a while before the driver reads its handle, so that streams end meanwhile.
    in_turns(memory, "stream_churn", &[("NVSIM_ENTRY_US", "1000")], 10);
}

fn stream_churn_without_events_of_contexts(memory: &str) {
    // Without events behind contexts, the library looks at the streams themselves.
    in_turns(memory, "stream_churn", &[("NVSIM_ENTRY_US", "1000"), ("NVSIM_CTX_RECORD", "0")], 10);
}

fn stream_churn_with_handles_that_come_again(memory: &str) {
    in_turns(memory, "stream_churn", &[("NVSIM_REUSE_HANDLES", "1")], 5);
}

/// Whether a client's work waits: for its turn, or, where it had one before the others filled the card, for memory that cannot leave.
fn waits(client: &ClientStatus) -> bool {
    matches!(client.state, ClientState::Waiting | ClientState::Blocked)
}

fn legacy_wait(memory: &str) {
    legacy_wait_for(memory, 2);
}

#[test]
#[ignore = "takes a minute: each turn ends with a drain that is given up first; .ci/run runs this test"]
fn legacy_wait_through_five_turns() {
    ["managed", "swap"].iter().for_each(|memory| legacy_wait_for(memory, 5));
}

fn legacy_wait_for(memory: &str, turns: u64) {
    for record in ["1", "0"] {
        in_turns(memory, "legacy_wait", &[("NVSIM_CTX_RECORD", record)], turns);
    }
}

fn memory_of_a_pool_is_not_brought_behind_a_host_function(memory: &str) {
    in_turns(memory, "pool_beside_host_function", &[], 5);
}

fn rows_of_a_new_width_wait_for_no_work(memory: &str) {
    Program::guest(&World::with_memory(memory, CARD), "pitch_beside_host_function", &[])
        .start()
        .finish()
        .passed();
}

fn memory_freed_in_stream_order_holds_no_allocation_up(memory: &str) {
    in_turns(memory, "frees_later", &[], 5);
}

fn memory_freed_to_a_pool_is_room_for_the_next_program(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let guest = Program::guest(&world, "leaves_pool_memory", &[]).waits_for_go().start();
    wait_until("it has freed its memory", || {
        assert!(guest.lives(), "{}", guest.log());
        guest.out() == "freed\n"
    });
    let other =
        Program::workload(&world, "other", "--memory 768MiB --block 64MiB --steps 3").start().finish();
    other.intact();
    assert!(
        !other.log.contains("less memory for this program than the scheduler has given"),
        "{}",
        other.log
    );
    let (moved, _) = world.observe();
    assert_eq!((moved.faulted, moved.pushed_out), (0, 0), "{moved:?}");
    std::fs::write(world.dir().join("go"), "").expect("a file");
    guest.finish().passed();
}

/// It is idle, so it does not drain. Memory that it has freed is not copied out and kept for it.
fn memory_freed_in_stream_order_does_not_leave_as_memory_in_use(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let guest = Program::guest(&world, "leaves_pool_memory", &["own"]).waits_for_go().start();
    wait_until("it has freed its memory", || {
        assert!(guest.lives(), "{}", guest.log());
        guest.out() == "freed\n"
    });
    Program::workload(&world, "other", "--memory 768MiB --block 64MiB --steps 3").start().finish().intact();
    let status = Scheduler::status(&world);
    let client = status.client(guest.pid());
    assert_eq!((client.counters.evicted, client.usage[0].allocated), (0, 0), "{client:?}");
    std::fs::write(world.dir().join("go"), "").expect("a file");
    guest.finish().passed();
}

fn what_was_freed_in_stream_order_is_allocated_again_beside_work(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    Program::guest(&world, "freed_again", &[]).start().finish().passed();
}

fn attributes_of_memory_end_with_its_free(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let guest = Program::guest(&world, "attributes_end", &[]).start().finish();
    guest.passed();
    // Managed memory that was freed in stream order is kept beside work.
    assert_eq!(guest.out, if memory == "managed" { "again\n" } else { "anew\n" });
}

#[test]
fn what_was_freed_is_not_allocated_again_in_a_broken_context() {
    let world = World::with_memory("managed", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    Program::guest(&world, "freed_then_broken", &[]).start().finish().passed();
}

fn an_allocation_waits_for_no_full_queue_of_another_context(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    Program::guest(&world, "allocates_beside_full", &[]).start().finish().passed();
}

fn an_allocation_asks_nothing_of_other_contexts_about_frees_put_off(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    Program::guest(&world, "allocates_beside_free", &[]).start().finish().passed();
}

fn a_stream_ends_beside_a_full_queue_of_another_context(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    Program::guest(&world, "ends_beside_full", &[]).start().finish().passed();
}

fn a_stream_ends_while_a_capture_is_about_to_begin(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let held = world.dir().join("held").to_string_lossy().into_owned();
    Program::guest(&world, "ends_beside_beginning", &[]).holds_up("capture", &held).start().finish().passed();
}

fn an_allocation_that_can_never_be_is_refused_beside_frees(memory: &str) {
    const ROUNDS: usize = 20;
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let guest = Program::guest(&world, "refused_beside_frees", &[]).start().finish();
    guest.passed();
    // Each try writes a line: one at first, one when memory is free that was not, and few more where the frees come one by one.
    let tries = guest.log.matches("an allocation of 4194304 MiB is refused").count();
    assert!((ROUNDS..=4 * ROUNDS).contains(&tries), "{tries}");
}

fn a_launch_waits_for_no_launches_of_another_context(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "300"]);
    let files = ["ONE", "TWO", "THREE"].map(|name| (name, world.dir().join(name)));
    let guest = Program::guest(&world, "window_beside_full", &[]);
    let guest = files.iter().fold(guest, |guest, (name, file)| guest.env(name, &file.to_string_lossy()));
    let guest = guest.start();
    let until = |says: &str, waiters: &str, count: usize| {
        wait_until(says, || {
            assert!(guest.lives(), "{}", guest.log());
            guest.out().ends_with(says) && guest.log().matches(waiters).count() >= count
        });
    };
    let waits =
        || Program::workload(&world, "waits", "--memory 640MiB --block 64MiB --steps 1").until_told().start();
    until("ready\n", "", 0);
    let first = waits();
    until("ready\n", "received Waiters { waiting: true }", 1);
    std::fs::write(&files[0].1, "").expect("a file");
    until("launched\n", "", 0);
    drop(first);
    until("launched\n", "received Waiters { waiting: false }", 1);
    std::fs::write(&files[1].1, "").expect("a file");
    until("full\n", "", 0);
    let _second = waits();
    until("full\n", "received Waiters { waiting: true }", 2);
    std::fs::write(&files[2].1, "").expect("a file");
    guest.finish().passed();
}

fn a_capture_begins_beside_a_full_queue_of_another_context(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let guest = Program::guest(&world, "capture_beside_full", &[]).waits_for_go().start();
    wait_until("a thread waits for a place", || {
        assert!(guest.lives(), "{}", guest.log());
        guest.out() == "full\n"
    });
    // The same while another client waits.
    let other = Program::workload(&world, "other", "--memory 640MiB --block 64MiB --steps 3").start();
    Scheduler::until(&world, "the other one waits", |status| status.find(other.pid()).is_some_and(waits));
    std::fs::write(world.dir().join("go"), "").expect("a file");
    guest.finish().passed();
    other.finish().intact();
}

fn a_primary_context_ends_with_the_green_one_that_outlived_its_release(memory: &str) {
    in_turns(memory, "green_outlives", &[], 3);
}

fn a_capture_that_stays_open_is_not_looked_into(memory: &str) {
    in_turns(memory, "capture_stays_open", &[], 1);
}

fn looks_at_contexts_that_fail(memory: &str) {
    // Each third event of a context fails, which says nothing about its work. (Each second event might always be that of
    // the idle context.)
    let moved = in_turns(memory, "second_context", &[("NVSIM_CTX_RECORD_FAILS", "3")], 10);
    assert_eq!((moved.faulted, moved.pushed_out), (0, 0), "{moved:?}");
}

fn memory_of_a_pool_outlives_a_reset(memory: &str) {
    let moved = in_turns(memory, "pool_outlives_reset", &[], 10);
    assert_eq!((moved.faulted, moved.pushed_out), (0, 0), "{moved:?}");
}

fn second_context(memory: &str) {
    // With events behind whole contexts, and without.
    for record in ["1", "0"] {
        let moved = in_turns(memory, "second_context", &[("NVSIM_CTX_RECORD", record)], 10);
        // No kernel found a page absent: none ran after the lock was given back.
        assert_eq!((moved.faulted, moved.pushed_out), (0, 0), "{moved:?}");
    }
}
