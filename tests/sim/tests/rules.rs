//! The simulated driver keeps the real one's rules: each by a program in C (`tests/guests/rules_*.c`) that runs on the
//! simulator alone.

use std::process::Command;

use nvshare_harness::{Program, World, guest};

/// A rule of a program, with settings of the simulator.
fn holds(program: &str, rule: &str, settings: &[(&str, &str)]) {
    let mut all = vec![("NVSIM_MEMORY", "256MiB"), ("NVSIM_SCALE", "64"), ("NVSIM_GPUS", "2")];
    if program == "rules_checkpoint" {
        all.extend([("NVSIM_CONTEXT", "32MiB"), ("NVSIM_MODULE", "4MiB")]);
    }
    all.extend(settings);
    let world = World::simulated(&all);
    let mut command = Command::new(guest(program, false));
    command.arg(rule);
    let finished = Program::of(&world, rule, command).start().finish();
    assert!(finished.status.success(), "{program} {rule}: {} {}", finished.status, finished.log);
}

/// A test for each rule, which is a function of the program.
macro_rules! rules {
    ($module:ident: $($rule:ident)*) => {
        mod $module {
            $(
                #[test]
                fn $rule() {
                    super::holds(concat!("rules_", stringify!($module)), stringify!($rule), &[]);
                }
            )*
        }
    };
}

rules! { handles:
    ended_handles_stop
    a_value_that_was_no_handle_is_an_error
    handles_come_again
    a_context_that_another_thread_destroys
    work_in_flight_goes_on
    a_context_takes_its_memory_along
    a_primary_context_keeps_its_handle
    contexts_are_a_stack
    a_child_has_no_driver
}

rules! { exit:
    handlers_before_the_driver_s_own_may_call_it
    a_move_under_way_stops
}

rules! { checkpoint:
    a_process_goes_and_comes_back
    a_lock_waits_for_work
    calls_of_a_locked_process
    calls_of_a_process_that_is_away
    what_is_refused
    a_pool_of_managed_memory
    memory_of_a_descriptor_stays
    a_restore_without_room
    the_order_of_the_calls
    a_process_ends_while_it_is_away
}

rules! { order:
    looks_see_unfinished_work
    looks_see_work_of_destroyed_streams
    an_event_on_the_legacy_stream_is_a_barrier
    a_host_function_keeps_only_its_stream
    the_queue_of_host_functions
    streams_wait_for_events
    threads_have_streams_of_their_own
    events_have_a_context
    host_functions_call_nothing
    a_first_launch_waits_for_host_functions
    a_full_queue_holds_its_context
}

rules! { captures:
    calls_that_break_a_capture
    the_modes_of_a_capture
    how_captures_begin_and_end
    how_captures_spread
    executable_graphs
    graphs_hold_memory
    memory_of_graphs_is_given_up_beside_launches
}

rules! { memory:
    fills
    calls_that_return_before_they_are_done
    copies
    memory_in_stream_order
    words_that_streams_wait_for
    page_locked_memory
    copies_of_page_locked_memory
    managed_memory_and_the_host
    green_contexts
    copies_between_cards
    peers
    pools_of_the_program
    pools_keep_what_nobody_has_synchronized_with
    pools_outlive_contexts
    mapped_memory
    shared_memory
    unmapped_memory_stops
}

#[test]
fn the_stacks_of_kernels() {
    holds("rules_checkpoint", "the_stacks_of_kernels", &[("NVSIM_STACKS", "8MiB")]);
}

#[test]
fn other_drivers() {
    holds("rules_order", "without_events_of_contexts", &[("NVSIM_CTX_RECORD", "0")]);
    holds("rules_order", "a_first_launch_waits_for_host_functions", &[("CUDA_MODULE_LOADING", "EAGER")]);
}

#[test]
fn handles_that_come_again() {
    let again = [("NVSIM_REUSE_HANDLES", "1")];
    holds("rules_handles", "handles_come_again", &again);
    holds("rules_handles", "a_context_that_another_thread_destroys", &again);
}

#[test]
fn sparse_copies() {
    holds("rules_memory", "copies_of_page_locked_memory", &[("NVSIM_SPARSE", "1")]);
}
