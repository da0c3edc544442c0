//! The habits of host programs, one small program in C for each (`tests/guests/`), under the real library and the real
//! daemon, on the simulated driver.

use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use nvshare_harness::{
    Artifacts, Finished, PlayedScheduler, Program, Running, Scheduler, Status, World, guest, wait_until,
};
use nvshare_proto::units::MIB;

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
const TWO_CARDS: &[(&str, &str)] = &[CARD[0], CARD[1], ("NVSIM_GPUS", "2")];

nvshare_harness::with_both_memories! {
    memory_of_every_kind_is_counted_while_it_lives
    memory_that_the_driver_keeps_counts_and_gives_way
    threads_have_a_stack_beside_much_memory_of_each_thread
    memory_of_every_kind_is_refused_over_the_limit
    a_runs_processes_share_one_limit
    programs_with_two_gpus_take_turns_with_both
    a_gpu_is_used_whatever_comes_to_it_first
    an_allocation_on_a_stream_is_on_its_gpu
    a_program_that_reconnects_counts_once
    memory_is_looked_at_before_any_is_allocated
    without_a_scheduler_memory_that_does_not_fit_is_refused
    a_million_allocations_from_sixteen_threads
    memory_that_moves_looks_like_device_memory
    fills_return_before_they_are_done
    callbacks_that_call_cuda
    functions_of_graphs_that_free
    default_streams_of_threads
    captures_on_threads_own_streams
    cancelled_threads_and_long_jumps
    forks_before_and_after
    exit_from_another_thread
    closed_and_full_descriptors
}

/// Runs a guest alone with a scheduler; it must succeed.
fn passes(memory: &str, name: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Finished {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let program =
        variables.iter().fold(Program::guest(&world, name, arguments), |p, (name, value)| p.env(name, value));
    let finished = program.start().finish();
    finished.passed();
    finished
}

/// Runs a guest that takes turns with another program; both must succeed.
fn passes_under_turns(memory: &str, name: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let other = Program::workload(&world, "other", "--memory 640MiB --block 64MiB --kernel-us 2000");
    let guest = Program::guest(&world, name, &[]).until_told().start();
    let other = other.until_told().start();
    Scheduler::until_turns(&world, &[&guest, &other], 5);
    let guest = world.stop_guest(guest, other);
    assert!(Scheduler::status(&world).client(guest.pid).counters.hand_overs >= 5);
}

fn memory_of_every_kind_is_counted_while_it_lives(memory: &str) {
    passes(memory, "accounting", &[], &[]);
}

fn threads_have_a_stack_beside_much_memory_of_each_thread(memory: &str) {
    passes_under_turns(memory, "large_tls");
    passes(memory, "large_tls", &[], &[("RUST_MIN_STACK", "16384")]);
}

fn memory_that_the_driver_keeps_counts_and_gives_way(memory: &str) {
    passes(memory, "keeps", &[], &[("NVSHARE_MEM_LIMIT", "100MiB")]);
    // A driver without managed pools.
    passes(memory, "keeps", &[], &[("NVSHARE_MEM_LIMIT", "100MiB"), ("NVSIM_MANAGED_POOLS", "0")]);

    // The calls of the library on a driver with managed pools, and on one without.
    for (managed, call) in [("1", "cuMemAllocFromPoolAsync"), ("0", "cuMemAllocAsync")] {
        let world = World::with_memory(memory, CARD);
        let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
        let lost = world.dir().join("lost");
        let guest = Program::guest(&world, "keeps", &["refused"]).env("NVSIM_LOST", &lost.to_string_lossy());
        let guest = guest.env("NVSIM_MANAGED_POOLS", managed).env("REFUSED", call).until_told().start();
        wait_until("it is refused", || guest.out() == "refused\n" || !guest.lives());
        Scheduler::until(&world, "the pool keeps what it had", |status| {
            status.client(guest.pid()).usage.iter().any(|usage| usage.allocated == 60 * MIB)
        });
        std::fs::remove_file(lost).expect("the file");
        world.stop();
        guest.finish().passed();
    }

    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let keeper = Program::guest(&world, "keeps", &["for others"]).until_told().start();
    wait_until("it keeps memory", || {
        assert!(keeper.lives(), "{}", keeper.log());
        keeper.out() == "kept\n"
    });
    let other = Program::workload(&world, "other", "--memory 960MiB --block 64MiB --steps 5 --full-check");
    other.start().finish().intact();
    world.stop();
    keeper.finish().passed();
    world.moved_when_told();
}

fn memory_of_every_kind_is_refused_over_the_limit(memory: &str) {
    passes(memory, "over_quota", &[], &[("NVSHARE_MEM_LIMIT", "100MiB")]);
    // HAMi's name for it.
    passes(memory, "over_quota", &[], &[("CUDA_DEVICE_MEMORY_LIMIT_0", "100m")]);
}

fn a_runs_processes_share_one_limit(memory: &str) {
    passes(memory, "tenant", &[], &[("NVSHARE_MEM_LIMIT", "100MiB"), ("NVSHARE_RUN", "7")]);
}

#[test]
fn a_tenants_processes_may_see_different_gpus() {
    let world = World::simulated(TWO_CARDS);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let program =
        Program::guest(&world, "sees_others", &[]).env("NVSHARE_MEM_LIMIT", "100MiB").env("NVSHARE_RUN", "7");
    program.start().finish().passed();
}

fn programs_with_two_gpus_take_turns_with_both(memory: &str) {
    let world = World::with_memory(memory, TWO_CARDS);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let start = |name: &str| {
        let program = Program::of(&world, name, Command::new(guest("two_gpus", false)));
        program.preloaded().until_told().start()
    };
    let (a, b) = (start("a"), start("b"));
    // One more, on the second GPU alone.
    let one = Program::workload(&world, "one", "--memory 512MiB --block 64MiB --kernel-us 2000 --full-check");
    let one = one.env("CUDA_VISIBLE_DEVICES", "1").until_told().start();
    Scheduler::until_turns(&world, &[&a, &b, &one], 4);
    world.stop();
    let [a, b] = [a, b].map(Running::finish);
    a.passed();
    b.passed();
    one.finish().intact();
    let status = Scheduler::status(&world);
    assert_eq!(status.gpus.len(), 2);
    for pid in [a.pid, b.pid] {
        let client = status.client(pid);
        assert!(client.counters.hand_overs >= 4, "{client:?}");
    }
}

fn an_allocation_on_a_stream_is_on_its_gpu(memory: &str) {
    for (limited, answer) in [("NVSHARE_MEM_LIMIT_0", "0"), ("NVSHARE_MEM_LIMIT_1", "2")] {
        let world = World::with_memory(memory, TWO_CARDS);
        let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
        Program::guest(&world, "other_gpu", &[answer]).env(limited, "64MiB").start().finish().passed();
    }
}

fn a_gpu_is_used_whatever_comes_to_it_first(memory: &str) {
    for way in ["stream", "context", "pool"] {
        let world = World::with_memory(memory, TWO_CARDS);
        let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
        let guest = Program::guest(&world, "meets_gpu", &[way]).until_told().start();
        wait_until("it uses both GPUs", || {
            assert!(guest.lives(), "{}", guest.log());
            Scheduler::status(&world).clients.iter().any(|client| client.usage.len() == 2)
        });
        world.stop();
        guest.finish().passed();
    }
}

fn a_program_that_reconnects_counts_once(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let guest = Program::guest(&world, "rejoins", &[])
        .env("NVSHARE_MEM_LIMIT", "100MiB")
        .env("NVSHARE_RUN", "7")
        .until_told()
        .start();
    wait_until("it comes back three times", || {
        assert!(guest.lives(), "{}", guest.log());
        guest.log().matches("received Registered").count() > 3
    });
    world.stop();
    guest.finish().passed();
}

#[test]
fn nvml_says_the_same() {
    let world = World::simulated(CARD);
    symlink(guest("nvml", true), world.dir().join("lib/libnvidia-ml.so.1")).expect("a link");
    let scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let program = Program::guest(&world, "looks_by_nvml", &[])
        .env("NVSHARE_MEM_LIMIT", "100MiB")
        .env("NVSHARE_RUN", "7");
    program.start().finish().passed();
    drop(scheduler);
    // Without a limit and a scheduler, nothing has to be hidden: NVML's own answer.
    let said = Program::guest(&world, "looks_by_nvml", &["alone"]).start().finish().passed().out.clone();
    assert_eq!(said, "512 of 1024 in 1\n");
}

/// Runs a guest that looks at the GPU by a plug-in, with a limit of 100 MiB. Returns its lines.
fn looks_by_plug_in(world: &World, preload: &str, scope: &[&str]) -> String {
    let plug_in = world.dir().join("plug_in.so");
    let nvml = world.dir().join("lib/libnvidia-ml.so.1");
    if !nvml.exists() {
        symlink(guest("nvml", true), &nvml).expect("a link");
        let folder = world.dir().join("lib").display().to_string();
        let how = ["-shared", "-fPIC", "-Wl,--no-as-needed", "-L", &folder, "-l:libnvidia-ml.so.1"];
        world.link_to_driver(&plug_in, "linked_to_nvml.c", &how);
    }
    let plug_in = plug_in.to_string_lossy();
    let arguments = [&[&*plug_in], scope].concat();
    let program = Program::guest(world, "looks_by_plug_in", &arguments).env("NVSHARE_MEM_LIMIT", "100MiB");
    program.env("LD_PRELOAD", preload).start().finish().passed().out.clone()
}

#[test]
fn a_plug_in_that_has_nvml_for_itself_sees_the_same() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    assert_eq!(looks_by_plug_in(&world, "", &[]), "512 of 1024\n");
    let library = Artifacts::get().library.to_string_lossy().into_owned();
    assert_eq!(looks_by_plug_in(&world, &library, &[]), "0 of 100\n");
}

#[test]
fn another_library_that_stands_before_nvml_is_called_once() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let library = Artifacts::get().library.to_string_lossy().into_owned();
    let other = guest("stands_before_nvml", true).to_string_lossy().into_owned();
    assert_eq!(looks_by_plug_in(&world, &other, &["global"]), "passed on\n512 of 1024\n");
    for preload in [format!("{library}:{other}"), format!("{other}:{library}")] {
        assert_eq!(looks_by_plug_in(&world, &preload, &["global"]), "passed on\n0 of 100\n", "{preload}");
    }
}

#[test]
fn a_child_that_is_forked_while_nvml_is_asked_gets_an_answer() {
    let world = World::simulated(CARD);
    symlink(guest("nvml", true), world.dir().join("lib/libnvidia-ml.so.1")).expect("a link");
    // It accepts connections and says nothing.
    let _silent = PlayedScheduler::listen(&world);
    let guest = Program::guest(&world, "looks_when_forked", &[]).env("NVSHARE_MEM_LIMIT", "100MiB");
    guest.start().finish().passed();
}

#[test]
fn a_thread_that_is_cancelled_while_it_asks_by_nvml_has_asked() {
    let world = World::simulated(CARD);
    symlink(guest("nvml", true), world.dir().join("lib/libnvidia-ml.so.1")).expect("a link");
    let silent = PlayedScheduler::listen(&world);
    let guest = Program::guest(&world, "looks_when_cancelled", &[]).env("NVSHARE_MEM_LIMIT", "100MiB");
    let guest = guest.waits_for_go().start();
    // Behind its question, the thread does nothing but wait for the answer.
    let (mut asker, _) = silent.accept().expect("a connection");
    asker.read_exact(&mut [0; 4]).expect("a question");
    std::fs::write(world.dir().join("go"), "").expect("a file");
    guest.finish().passed();
}

#[test]
fn contexts_and_strangers_are_measured() {
    let world = World::simulated(CARD);
    let processes = world.dir().join("processes");
    std::fs::write(&processes, "").expect("a file");
    symlink(guest("nvml", true), world.dir().join("lib/libnvidia-ml.so.1")).expect("a link");
    let _scheduler = Scheduler::start(&world, &["--reserve", "256MiB"]);
    // The program has plain memory, which NVML sees. NVML does not see managed memory.
    let program = Program::workload(&world, "program", "--memory 192MiB --block 64MiB --kernel-us 100")
        .env("NVSHARE_PLAIN", "all")
        .until_told()
        .start();
    let is_there = |status: &Status| {
        status.find(program.pid()).is_some_and(|client| client.usage.iter().any(|u| u.allocated == 192 * MIB))
    };
    Scheduler::until(&world, "it is there", is_there);
    let status = Scheduler::status(&world);
    assert_eq!(status.client(program.pid()).usage[0].immovable, 192 * MIB);
    assert_eq!(status.gpus[0].capacity, 768 * MIB);
    // The program's context is larger than the half of the reserve that is for contexts. Another process, which is no
    // client, has 64 MiB.
    let used = format!("{} {}\n1 {}\n", program.pid(), 492 * MIB, 64 * MIB);
    std::fs::write(&processes, used).expect("a file");
    Scheduler::until(&world, "its context counts", |status| status.gpus[0].overhead == 320 * MIB);
    let status = Scheduler::status(&world);
    assert_eq!(status.gpus[0].capacity, (1024 - 64 - 128 - 320) * MIB);
    assert_eq!(status.client(program.pid()).overhead, 320 * MIB);
    std::fs::write(&processes, "").expect("a file");
    Scheduler::until(&world, "they are gone", |status| status.gpus[0].capacity == 768 * MIB);
    assert_eq!(Scheduler::status(&world).memory.kept[0].bytes, 512 * MIB, "in use, and no process has it");
    world.stop();
    program.finish().intact();
}

fn memory_is_looked_at_before_any_is_allocated(memory: &str) {
    passes(memory, "looks_first", &["100", "100"], &[("NVSHARE_MEM_LIMIT", "100MiB")]);
    // As much of the card is free as the scheduler lets programs fill together.
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "512MiB"]);
    Program::guest(&world, "looks_first", &["512", "1024"]).start().finish().passed();
    // Without a scheduler, all of the card is free.
    let world = World::with_memory(memory, CARD);
    Program::guest(&world, "looks_first", &["1024", "1024"]).start().finish().passed();
}

fn without_a_scheduler_memory_that_does_not_fit_is_refused(memory: &str) {
    let world = World::with_memory(memory, CARD);
    Program::guest(&world, "alone", &[]).start().finish().passed();
}

fn a_million_allocations_from_sixteen_threads(memory: &str) {
    let world = World::with_driver(&Artifacts::stub());
    let program = Program::guest(&world, "million", &[]).env("NVSHARE_MEMORY", memory);
    let program = program.env("NVSHARE_MEM_LIMIT", "1024GiB").env("NVSHARE_LOG", "warn");
    program.start().finish().passed();
}

#[test]
fn threads_that_are_cancelled_inside_the_driver() {
    let world = World::with_driver(&guest("odd_driver", true));
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    Program::guest(&world, "cancel_inside", &[]).start().finish().passed();
}

fn memory_that_moves_looks_like_device_memory(memory: &str) {
    passes(memory, "pointers", &[], &[]);
}

#[test]
fn managed_memory_looks_like_itself_without_the_disguise() {
    passes("managed", "pointers", &["plainly"], &[("NVSHARE_DISGUISE", "0")]);
}

#[test]
fn memory_can_be_shared_after_a_handle_was_refused() {
    let undisguised = ("NVSHARE_DISGUISE", "0");
    let log = passes("managed", "ipc", &[], &[undisguised]).log;
    assert!(log.contains("NVSHARE_PLAIN=all") && log.contains("NVSHARE_MEMORY=swap"), "{log}");
    passes("managed", "ipc", &["from the start"], &[undisguised, ("NVSHARE_PLAIN", "4MiB")]);
}

/// The library shares the program's other memory itself, so that goes on to move.
#[test]
fn a_refused_handle_of_a_pool_keeps_only_pools_on_the_card() {
    Program::guest(&World::simulated(CARD), "ipc", &["of a pool"]).alone().start().finish().passed();
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let guest = Program::guest(&world, "ipc", &["of a pool"]).until_told().start();
    let has = |status: &Status| Some(status.find(guest.pid())?.usage.first()?.allocated);
    Scheduler::until(&world, "it has all", |status| has(status) >= Some(268 * MIB));
    let usage = Scheduler::status(&world).client(guest.pid()).usage[0];
    // The memory that comes from a pool afterwards.
    assert_eq!(usage.immovable, 8 * MIB, "{usage:?}");
    world.stop();
    let finished = guest.finish();
    finished.passed();
    assert!(finished.log.contains("memory of pools from now on is not moved"), "{}", finished.log);
}

#[test]
fn a_program_that_shares_memory_is_known_by_its_executable() {
    for name in ["shares_imported", "shares_built_in"] {
        let log = passes("managed", name, &[], &[]).log;
        assert!(log.contains("IpcGetMemHandle, which refuses managed memory"), "{log}");
        // Unless a variable says otherwise.
        let world = World::with_memory("managed", CARD);
        let overruled = Program::guest(&world, name, &[]).env("NVSHARE_PLAIN", "none").start().finish();
        assert!(!overruled.status.success(), "{}", overruled.log);
        // The library itself shares what it maps.
        let log = passes("swap", name, &[], &[]).log;
        assert!(log.contains("other processes can open 4 MiB"), "{log}");
    }
    passes("managed", "shares_never", &[], &[]);
}

fn fills_return_before_they_are_done(memory: &str) {
    passes(memory, "prompt", &[], &[]);
}

fn callbacks_that_call_cuda(memory: &str) {
    passes_under_turns(memory, "callback");
}

fn functions_of_graphs_that_free(memory: &str) {
    passes(memory, "frees_in_graph", &[], &[]);
}

fn default_streams_of_threads(memory: &str) {
    passes_under_turns(memory, "per_thread");
}

fn captures_on_threads_own_streams(memory: &str) {
    passes(memory, "captures", &[], &[]);
}

#[test]
fn an_allocator_of_its_own() {
    passes("managed", "own_malloc", &[], &[]);
}

#[test]
fn answers_of_a_newer_driver_go_through() {
    let world = World::with_driver(&guest("odd_driver", true));
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    Program::guest(&world, "unknown", &[]).start().finish().passed();
}

#[test]
fn threads_by_the_thousand() {
    passes("managed", "threads", &[], &[]);
}

fn cancelled_threads_and_long_jumps(memory: &str) {
    passes_under_turns(memory, "cancel");
}

fn forks_before_and_after(memory: &str) {
    passes(memory, "forks", &[], &[]);
}

fn exit_from_another_thread(memory: &str) {
    passes(memory, "exits", &[], &[]);
}

fn closed_and_full_descriptors(memory: &str) {
    passes(memory, "descriptors", &[], &[]);
}

#[test]
fn a_program_without_standard_descriptors() {
    passes("swap", "no_standard", &[], &[]);
}

/// Runs a guest beside a program with which it takes turns.
fn passes_beside_another(name: &str) {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.2"]);
    let other = Program::workload(&world, "other", "--memory 640MiB --block 64MiB --kernel-us 2000");
    let other = other.until_told().start();
    Scheduler::until(&world, "it runs", |status| status.find(other.pid()).is_some());
    let guest = Program::guest(&world, name, &[]).start().finish();
    guest.passed();
    assert!(guest.log.contains("received LockOk"), "it had no turns: {}", guest.log);
    world.stop();
    let longest = other.finish().intact().longest_s;
    assert!(longest < 3.0, "the other one waited for {longest} s");
}

#[test]
fn a_thread_with_other_descriptors_asks_for_the_lock() {
    passes_beside_another("other_files");
}

#[test]
fn a_program_that_forbids_itself_descriptors_takes_turns() {
    passes_beside_another("no_new_files");
}

#[test]
fn data_under_the_number_of_standard_error_gets_no_line() {
    let world = World::simulated(CARD);
    let data = world.dir().join("data");
    let guest = Program::guest(&world, "data_at_two", &[&data.to_string_lossy()]);
    guest.env("NVSHARE_LOG", "warn").start().finish().passed();
    assert_eq!(std::fs::read_to_string(&data).expect("a file"), "data\n");
}

#[test]
fn a_line_that_no_file_may_take_ends_nobody() {
    passes("managed", "no_file_may_grow", &[], &[("NVSHARE_LOG", "warn")]);
}

/// The simulated driver has threads in Rust, too.
#[test]
fn a_program_without_keys_for_threads_runs_as_if_alone() {
    let world = World::with_driver(&guest("odd_driver", true));
    let finished = Program::guest(&world, "no_keys", &[]).start().finish();
    finished.passed();
    assert!(finished.log.contains("cannot start threads"), "{}", finished.log);
}

#[test]
fn signals_of_the_host() {
    passes("managed", "signals", &[], &[]);
}

#[test]
fn a_constructor_allocates_while_another_thread_does_so_first() {
    let world = World::simulated(CARD);
    let program = world.dir().join("exports");
    world.link_to_driver(&program, "starts_in_constructor.c", &["-rdynamic"]);
    let mut command = Command::new(program);
    command.arg(guest("constructor", true));
    let program = Program::of(&world, "starts", command);
    program.preloaded().start().finish().passed();
}

#[test]
fn every_door_gives_the_same_hook() {
    let plugin = guest("plugin", true);
    let deep = plugin.with_file_name("deep.so");
    std::fs::copy(&plugin, &deep).expect("a copy");
    passes("managed", "doors", &[&plugin.to_string_lossy(), &deep.to_string_lossy()], &[]);
}

#[test]
fn a_second_library_with_its_own_dlsym() {
    let library = Artifacts::get().library.to_string_lossy().into_owned();
    let other = guest("other_dlsym", true).to_string_lossy().into_owned();
    for order in [format!("{library}:{other}"), format!("{other}:{library}")] {
        let finished = passes("managed", "accounting", &[], &[("LD_PRELOAD", &order)]);
        assert!(finished.status.success());
    }
}

/// Each of two libraries stands before the same function of the driver, and finds the next.
#[test]
fn another_library_that_stands_before_the_driver_is_called_once() {
    let world = World::simulated(CARD);
    let program = world.dir().join("linked");
    world.link_to_driver(&program, "linked_program.c", &[]);
    let library = Artifacts::get().library.to_string_lossy().into_owned();
    let other = guest("stands_before", true).to_string_lossy().into_owned();
    let runs = |preload: &str, environment: &[(&str, &str)]| {
        let mut program = Program::of(&world, "linked", Command::new(&program)).env("LD_PRELOAD", preload);
        for (name, value) in environment {
            program = program.env(name, value);
        }
        let finished = program.start().finish();
        finished.passed();
        finished.out
    };
    let natively = runs(&other, &[]);
    assert_eq!(natively, "passed on\n0 400\n");
    let sleeps = [("NVSHARE_MEMORY", "swap"), ("NVSHARE_SLEEP", "1")];
    for preload in [format!("{library}:{other}"), format!("{other}:{library}")] {
        for environment in
            [&[][..], &[("BY_HANDLE", "1")], &sleeps, &[sleeps[0], sleeps[1], ("BY_HANDLE", "1")]]
        {
            assert_eq!(runs(&preload, environment), natively, "{preload} {environment:?}");
        }
    }
}

/// The functions that a driver has and that the library hooks.
fn hooked(driver: &Path) -> Vec<String> {
    let output =
        Command::new("nm").args(["-D", "--defined-only", "-f", "posix"]).arg(driver).output().expect("nm");
    let exported = String::from_utf8_lossy(&output.stdout).into_owned();
    let ours = include_str!("golden/exports.txt");
    exported
        .lines()
        .filter_map(|line| line.split(' ').next())
        .filter(|name| ours.lines().any(|ours| ours == *name))
        .map(str::to_owned)
        .collect()
}

#[test]
fn of_nothing_but_zeros_comes_the_drivers_own_answer() {
    let world = World::simulated(CARD);
    let names = hooked(&Artifacts::get().simulator);
    assert!(names.len() > 40, "{names:?}");
    let zeros = guest("zeros", false);
    for name in names {
        let run = |preload: bool| {
            let mut command = Command::new(&zeros);
            command.arg(&name);
            let program =
                Program::of(&world, &format!("{name}-{preload}"), command).env("NVSHARE_LOG", "off");
            let program = if preload { program.preloaded() } else { program };
            let finished = program.start().finish();
            (finished.status.code(), finished.out)
        };
        assert_eq!(run(true), run(false), "{name}");
    }
}

/// Managed memory makes way by itself.
#[test]
fn with_swap_a_graph_gets_the_memory_that_it_allocates_from_others() {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let idle = Program::guest(&world, "graph_takes_memory", &["idle"]).until_told().start();
    wait_until("it has memory", || {
        assert!(idle.lives(), "{}", idle.log());
        idle.out() == "has memory\n"
    });
    Program::guest(&world, "graph_takes_memory", &[]).start().finish().passed();
    world.stop();
    idle.finish().passed();
    world.moved_when_told();
}
