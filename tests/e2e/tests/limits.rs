//! Limits fail closed: quota, odd arguments, and the sizes that programs are told.

use std::process::Command;

use nvshare_harness::{Program, Running, Scheduler, World};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
const MIB: u64 = 1 << 20;

nvshare_harness::with_both_memories! {
    over_quota_is_out_of_memory_and_nothing_else_changes
    without_a_scheduler_a_limit_holds_all_the_same
    what_one_pool_keeps_serves_no_other
    a_device_that_cannot_be_described_gives_no_memory_if_it_has_a_limit
    programs_see_their_limit_and_what_is_free_of_the_card
    odd_arguments_get_the_drivers_own_answers
}

fn has_line(log: &str, level: &str, words: &[&str]) -> bool {
    log.lines().any(|line| {
        line.starts_with(&format!("[NVSHARE][{level}]")) && words.iter().all(|word| line.contains(word))
    })
}

fn over_quota_is_out_of_memory_and_nothing_else_changes(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let job = Program::workload(&world, "over", "--memory 512MiB --block 64MiB --steps 1")
        .env("NVSHARE_MEM_LIMIT", "256MiB")
        .start()
        .finish();
    let outcome = job.outcome.expect("an account");
    assert_eq!(outcome.error.as_deref(), Some("cuMemAlloc: CUDA error 2"));
    let why =
        ["an allocation of 64 MiB is refused", "the process's limit has 256 MiB, and 256 MiB are in use"];
    assert!(has_line(&job.log, "WARN", &why), "{}", job.log);
    // Memory that was allocated before the refusal is still charged, and no more: the library's last report.
    let status = Scheduler::status(&world);
    assert_eq!(status.client(job.pid).counters.managed, 256 * MIB);

    let within = Program::workload(&world, "within", "--memory 256MiB --block 64MiB --steps 3 --churn")
        .env("NVSHARE_MEM_LIMIT_0", "256m")
        .start()
        .finish();
    within.intact();
}

fn without_a_scheduler_a_limit_holds_all_the_same(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let job = Program::workload(&world, "over", "--memory 512MiB --block 64MiB --steps 1")
        .env("NVSHARE_MEM_LIMIT", "256MiB")
        .start()
        .finish();
    assert_eq!(job.outcome.expect("an account").error.as_deref(), Some("cuMemAlloc: CUDA error 2"));
}

/// On a driver with managed pools, and on one without.
fn what_one_pool_keeps_serves_no_other(memory: &str) {
    for managed in ["1", "0"] {
        let world = World::with_memory(memory, CARD);
        let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
        let guest = Program::guest(&world, "pools_apart", &[]).env("NVSHARE_MEM_LIMIT", "100MiB");
        guest.env("NVSIM_MANAGED_POOLS", managed).start().finish().passed();
    }
}

fn a_device_that_cannot_be_described_gives_no_memory_if_it_has_a_limit(memory: &str) {
    let world = World::with_memory(memory, &[CARD, &[("NVSIM_GPUS", "2"), ("NVSIM_UNNAMED", "1")]].concat());
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    for (limited, answer, level) in
        [("NVSHARE_MEM_LIMIT", "2", "ERROR"), ("NVSHARE_MEM_LIMIT_0", "0", "WARN")]
    {
        let guest = Program::guest(&world, "unnamed_gpu", &[answer]).env(limited, "256MiB").start().finish();
        guest.passed();
        assert!(has_line(&guest.log, level, &["device 1"]), "{}", guest.log);
    }
}

/// It cannot know what others have.
#[test]
fn a_process_without_descriptors_does_not_get_the_limit_that_it_shares() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let shares = |program: Program| program.env("NVSHARE_RUN", "7").env("NVSHARE_MEM_LIMIT", "100MiB");
    let has = Program::workload(&world, "has", "--memory 80MiB --block 16MiB --kernel-us 100");
    let has = shares(has).until_told().start();
    Scheduler::until(&world, "it has its part", |status| {
        status.find(has.pid()).is_some_and(|client| client.usage.iter().any(|u| u.allocated >= 80 * MIB))
    });
    for left in ["0", "1", "2", "3", "4", "5"] {
        shares(Program::guest(&world, "few_left", &[left])).start().finish().passed();
    }
    world.stop();
    has.finish().intact();
}

#[test]
fn an_allocation_that_other_programs_leave_no_room_for_says_so() {
    let world = World::simulated(&[("NVSIM_MEMORY", "1GiB")]);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let plain = |name: &str| {
        let job = Program::workload(&world, name, "--memory 640MiB --block 64MiB --kernel-us 100");
        job.env("NVSHARE_PLAIN", "all")
    };
    let first = plain("first").until_told().start();
    Scheduler::until(&world, "it has its memory", |status| {
        status.find(first.pid()).is_some_and(|client| client.usage.iter().any(|u| u.immovable >= 640 * MIB))
    });
    let log = plain("second").start().finish().log;
    assert!(log.contains("is refused: other programs keep their memory on the GPU"), "{log}");
    world.stop();
    first.finish().intact();
}

#[test]
fn a_program_larger_than_the_gpu_is_refused_unless_it_may_be() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "512MiB"]);
    let large =
        |name| Program::workload(&world, name, "--memory 640MiB --block 64MiB --steps 3 --kernel-us 100");
    let refused = large("refused").start().finish();
    assert_eq!(refused.outcome.expect("an account").error.as_deref(), Some("cuMemAlloc: CUDA error 2"));
    large("allowed").env("NVSHARE_ENABLE_SINGLE_OVERSUB", "1").start().finish().intact();
}

#[test]
fn with_swap_a_program_larger_than_the_gpu_is_refused_and_the_log_says_why() {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "512MiB"]);
    // The one block comes before the library has heard of the capacity.
    for block in ["64MiB", "640MiB"] {
        let large = Program::workload(&world, "large", &format!("--memory 640MiB --block {block} --steps 1"));
        let large = large.env("NVSHARE_ENABLE_SINGLE_OVERSUB", "1").start().finish();
        assert_eq!(large.outcome.expect("an account").error.as_deref(), Some("cuMemAlloc: CUDA error 2"));
        let words = ["NVSHARE_ENABLE_SINGLE_OVERSUB has no effect with NVSHARE_MEMORY=swap"];
        assert!(has_line(&large.log, "WARN", &words), "{}", large.log);
    }
}

#[test]
fn a_program_larger_than_the_gpu_takes_turns() {
    let world = World::simulated(&[CARD[0], CARD[1], ("NVSIM_FAULT", "10")]);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "512MiB", "--tq", "0.2"]);
    let start = |name, memory| {
        let job = Program::workload(&world, name, memory).env("NVSHARE_ENABLE_SINGLE_OVERSUB", "1");
        job.until_told().waits_for_go().start()
    };
    let large = start("large", "--memory 640MiB --block 64MiB --kernel-us 1000 --full-check");
    let other = start("other", "--memory 384MiB --block 64MiB --kernel-us 1000 --full-check");
    Running::go(&[&large, &other]);
    Scheduler::until_turns(&world, &[&large, &other], 3);
    world.stop_intact([large, other]);
}

#[test]
fn a_limit_that_cannot_be_read_fails_closed() {
    let world = World::simulated(CARD);
    for value in ["1 banana", "-1g", "0", "1GiBs", "4", "63m"] {
        let job = Program::workload(&world, "odd", "--memory 64MiB --steps 1")
            .env("NVSHARE_MEM_LIMIT", value)
            .start()
            .finish();
        assert_eq!(
            job.outcome.as_ref().expect("an account").error.as_deref(),
            Some("cuInit: CUDA error 1"),
            "{value}"
        );
        assert!(has_line(&job.log, "ERROR", &["NVSHARE_MEM_LIMIT"]), "{value}: {}", job.log);
        assert_eq!(
            job.log.lines().filter(|line| line.contains("NVSHARE_MEM_LIMIT")).count(),
            1,
            "{}",
            job.log
        );
    }
}

#[test]
fn without_a_scheduler_the_limits_of_a_seat_hold_all_the_same() {
    let world = World::simulated(CARD);
    let limits = world.socket().with_file_name("limits");
    let over = |variables: &[(&str, &str)]| {
        let job = Program::workload(&world, "in-seat", "--memory 512MiB --block 64MiB --steps 1");
        let job = variables.iter().fold(job, |job, (name, value)| job.env(name, value)).start().finish();
        let error = job.outcome.as_ref().and_then(|outcome| outcome.error.clone());
        (error.unwrap_or_default(), job.log)
    };
    std::fs::write(&limits, "NVSHARE_MEM_LIMIT=268435456\n").expect("a file");
    for variables in [&[][..], &[("NVSHARE_MEM_LIMIT", "1GiB")], &[("CUDA_DEVICE_MEMORY_LIMIT_0", "0")]] {
        assert_eq!(over(variables).0, "cuMemAlloc: CUDA error 2", "{variables:?}");
    }
    for odd in ["NVSHARE_MEM_LIMIT=a lot\n", "NVSHARE_MEM_LIMIT=268435456\nNVSHARE_SOC"] {
        std::fs::write(&limits, odd).expect("a file");
        let (error, log) = over(&[]);
        assert_eq!(error, "cuInit: CUDA error 1", "{odd}");
        assert!(has_line(&log, "ERROR", &[]), "{log}");
    }
    std::fs::write(&limits, "").expect("a file");
    assert_eq!(over(&[]).0, "", "a seat without limits");
}

#[test]
fn a_mistyped_variable_is_named_once() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &[]);
    let job = Program::workload(&world, "mistyped", "--memory 64MiB --steps 1")
        .env("NVSHARE_MEMLIMIT", "4g")
        .env("CUDA_OVERSUBSCRIBE", "true")
        .start()
        .finish();
    job.intact();
    let words = ["NVSHARE_MEMLIMIT is not a variable of nvshare", "did you mean NVSHARE_MEM_LIMIT?"];
    assert!(has_line(&job.log, "WARN", &words), "{}", job.log);
    assert!(has_line(&job.log, "WARN", &["CUDA_OVERSUBSCRIBE is HAMi's and has no effect"]), "{}", job.log);
    assert_eq!(job.log.lines().filter(|line| line.contains("has no effect")).count(), 2, "{}", job.log);
}

fn programs_see_their_limit_and_what_is_free_of_the_card(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "768MiB"]);
    let args = "--memory 128MiB --block 64MiB --steps 1";
    let limited =
        Program::workload(&world, "limited", args).env("NVSHARE_MEM_LIMIT", "256MiB").start().finish();
    assert_eq!((limited.intact().free, limited.intact().total), (128 * MIB, 256 * MIB));
    let unlimited = Program::workload(&world, "unlimited", args).start().finish();
    assert_eq!((unlimited.intact().free, unlimited.intact().total), (640 * MIB, 1024 * MIB));
    let native = Program::workload(&world, "native", args).alone().start().finish();
    assert_eq!(native.intact().total, 1024 * MIB);
}

fn odd_arguments_get_the_drivers_own_answers(memory: &str) {
    // The same calls with and without the library must answer alike.
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &[]);
    let source = r#"
        #include <dlfcn.h>
        #include <stdio.h>
        #include <stddef.h>
        typedef unsigned long long ptr;
        int main(void) {
            void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *context;
            #define GET(ret, name, ...) ret (*name)(__VA_ARGS__) = dlsym(cuda, #name)
            GET(int, cuInit, unsigned); GET(int, cuDevicePrimaryCtxRetain, void **, int); GET(int, cuCtxSetCurrent, void *);
            GET(int, cuMemAlloc_v2, ptr *, size_t); GET(int, cuMemFree_v2, ptr); GET(int, cuMemAllocManaged, ptr *, size_t, unsigned);
            GET(int, cuMemAllocPitch_v2, ptr *, size_t *, size_t, size_t, unsigned); GET(int, cuMemGetInfo_v2, size_t *, size_t *);
            ptr p = 0; size_t pitch = 0;
            printf("alloc before init %d\n", cuMemAlloc_v2(&p, 64));
            cuInit(0);
            printf("alloc without context %d\n", cuMemAlloc_v2(&p, 64));
            cuDevicePrimaryCtxRetain(&context, 0); cuCtxSetCurrent(context);
            printf("alloc of 0 bytes %d, managed %d\n", cuMemAlloc_v2(&p, 0), cuMemAllocManaged(&p, 0, 1));
            printf("alloc to nowhere %d\n", cuMemAlloc_v2(NULL, 64));
            printf("free of an unknown pointer %d, of null %d\n", cuMemFree_v2(0xdead0000), cuMemFree_v2(0));
            printf("alloc %d free %d free again %d\n", cuMemAlloc_v2(&p, 64), cuMemFree_v2(p), cuMemFree_v2(p));
            printf("pitch %d: %zu\n", cuMemAllocPitch_v2(&p, &pitch, 1000, 10, 4), pitch);
            printf("pitch of nothing %d\n", cuMemAllocPitch_v2(&p, &pitch, 0, 10, 4));
            printf("no such function: %d\n", dlsym(cuda, "cuMemcpyAtoA_v2") == NULL);
            return 0;
        }
    "#;
    let program = compile(&world, "odd", source);
    let run = |preload: bool| {
        let program = Program::of(&world, if preload { "under" } else { "native" }, Command::new(&program));
        let program = if preload { program.preloaded() } else { program };
        program.start().finish().passed().out.clone()
    };
    let native = run(false);
    assert!(native.contains("free of an unknown pointer 1"), "{native}");
    assert_eq!(run(true), native);
}

/// Compiles a small C program.
fn compile(world: &World, name: &str, source: &str) -> std::path::PathBuf {
    let file = world.dir().join(format!("{name}.c"));
    let program = world.dir().join(name);
    std::fs::write(&file, source).expect("a file");
    let status = Command::new("cc")
        .args(["-o"])
        .arg(&program)
        .arg(&file)
        .args(["-ldl", "-w"])
        .status()
        .expect("a C compiler");
    assert!(status.success());
    program
}
