//! The scheduler's configuration: options, the file, SIGHUP, and settings made at run time.

use std::process::Output;

use nvshare_harness::{Scheduler, World, wait_until};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];

/// Runs a scheduler that is expected to end by itself.
fn fails(world: &World, arguments: &[&str]) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = Scheduler::command(world, arguments).output().expect("it runs");
    (status.code(), String::from_utf8_lossy(&stderr).into_owned())
}

fn quantum(world: &World) -> u64 {
    Scheduler::status(world).scheduler.quantum_ms
}

fn hang_up(scheduler: &Scheduler) {
    scheduler.signal(libc::SIGHUP);
}

#[test]
fn a_hang_up_has_the_configuration_read_again() {
    let world = World::simulated(CARD);
    let file = world.dir().join("config.toml");
    let write = |text: &str| std::fs::write(&file, text).expect("a file");
    write("tq = 7\n");
    let mut scheduler = Scheduler::start(&world, &["--config", &file.to_string_lossy()]);
    assert_eq!(quantum(&world), 7000);
    write("tq = 11\nsocket = \"/elsewhere\"\n");
    hang_up(&scheduler);
    wait_until("it is followed", || quantum(&world) == 11_000);
    // The environment names the clients' socket and overrules the file.
    assert!(!scheduler.log().contains("the sockets stay"), "{}", scheduler.log());
    // A mistake changes nothing, and its line is named.
    write("tq = 13\ntqq = 1\n");
    hang_up(&scheduler);
    wait_until("the mistake is reported", || {
        scheduler.log().contains("config.toml: line 2: unknown field `tqq`, expected one of")
    });
    assert!(scheduler.lives() && quantum(&world) == 11_000);
    // A setting made at run time wins until it is reset.
    assert!(Scheduler::ctl(&world, &["set-tq", "3"]).status.success());
    write("tq = 17\n");
    hang_up(&scheduler);
    wait_until("it is read again", || scheduler.log().matches("is read again").count() == 2);
    assert_eq!(quantum(&world), 3000);
    let reset = Scheduler::ctl(&world, &["reset"]);
    assert_eq!(
        String::from_utf8_lossy(&reset.stdout),
        "the configuration is in force: TQ 17 s, scheduling is on; limits and weights of clients stay\n"
    );
    assert_eq!(quantum(&world), 17_000);
}

#[test]
fn settings_made_at_run_time_survive_a_restart() {
    let world = World::simulated(CARD);
    let state = world.dir().join("nvshare-state.toml");
    let scheduler = Scheduler::start(&world, &["--tq", "7"]);
    for arguments in [&["set-tq", "0.25"][..], &["off"]] {
        assert!(Scheduler::ctl(&world, arguments).status.success(), "{arguments:?}");
    }
    scheduler.kill();
    let scheduler = Scheduler::start(&world, &["--tq", "7"]);
    let status = Scheduler::status(&world).scheduler;
    assert!(!status.scheduling && status.quantum_ms == 250, "{status:?}");
    scheduler.wait_for_log("scheduling is off, as an administrator left it");
    scheduler.wait_for_log(", TQ 0.25 s, set at run time");
    assert!(Scheduler::ctl(&world, &["reset"]).status.success());
    assert!(!state.exists(), "nothing is left of it");
    drop(scheduler);
    let _scheduler = Scheduler::start(&world, &["--tq", "7"]);
    let status = Scheduler::status(&world).scheduler;
    assert!(status.scheduling && status.quantum_ms == 7000, "{status:?}");
}

#[test]
fn a_place_where_nothing_can_be_kept_is_named() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--state", "/proc/nvshare/state.toml"]);
    let set = Scheduler::ctl(&world, &["set-tq", "5"]);
    let text = String::from_utf8_lossy(&set.stdout).into_owned();
    assert!(set.status.success());
    assert!(
        text.starts_with(
            "quantum of every GPU is 5 s; a restart will undo this, because it cannot be kept: /proc/nvshare"
        ),
        "{text}"
    );
    assert_eq!(quantum(&world), 5000);
    // Limits of jobs fail closed: a prolog stops here.
    let limited = Scheduler::ctl(&world, &["set-limit", "job:7", "--compute", "10"]);
    let text = String::from_utf8_lossy(&limited.stderr).into_owned();
    assert!(
        !limited.status.success() && text.contains("job 7: compute limit 10 %; a restart will undo"),
        "{text}"
    );
}

#[test]
fn a_configuration_that_cannot_be_followed_is_refused() {
    let world = World::simulated(CARD);
    let file = world.dir().join("config.toml");
    let named = file.to_string_lossy().into_owned();
    for (text, expected) in [
        ("tq = 5\nspeed = 11\n", "config.toml: line 2: unknown field `speed`"),
        ("tq = 0\n", "config.toml: line 1: \"0\" is not a quantum; accepted: seconds from 0.01"),
        ("gpu-memory = \"8g\"\nreserve = \"1g\"\n", "config.toml: gpu-memory and reserve exclude each other"),
        ("[gpu.3]\n", "config.toml: line 1: \"3\" is not a GPU UUID"),
    ] {
        std::fs::write(&file, text).expect("a file");
        let (code, log) = fails(&world, &["--config", &named]);
        assert!(code == Some(1) && log.contains(expected), "{text}: {log}");
        assert!(!world.socket().exists(), "nothing is left behind");
    }
    std::fs::remove_file(&file).expect("a file");
    let (code, log) = fails(&world, &["--config", &named]);
    assert!(code == Some(1) && log.contains("config.toml: No such file"), "{log}");
}

#[test]
fn options_that_mean_nothing_are_refused() {
    let world = World::simulated(CARD);
    for (arguments, expected) in [
        (&["--gpu-memory", "0"][..], "the least is 64.0 MiB"),
        (&["--gpu-memory", "4"], "the least is 64.0 MiB"),
        (&["--gpu-memory", "8g", "--reserve", "1g"], "cannot be used with"),
        (&["--grace", "0"], "is not a grace time; accepted: seconds"),
        (&["--tq", "0"], "is not a quantum; accepted: seconds"),
        (&["--tq", "99999999999999999999"], "is not a quantum; accepted: seconds"),
        (&["--tq", "-1"], "unexpected argument '-1'"),
        (&["--tq"], "a value is required"),
        (&["--reserve", "lots"], "is not a size; accepted: 8GiB"),
        (&["--everything"], "unexpected argument"),
    ] {
        let (code, log) = fails(&world, arguments);
        assert!(code == Some(2) && log.contains(expected), "{arguments:?}: {log}");
    }
}

#[test]
fn a_log_that_is_no_terminal_has_no_colours() {
    let world = World::simulated(CARD);
    let scheduler = Scheduler::start(&world, &[]);
    wait_until("it says something", || scheduler.log().contains("nvshare-scheduler"));
    assert!(!scheduler.log().contains('\u{1b}'), "{:?}", scheduler.log());
}

#[test]
fn more_memory_than_the_gpu_has_is_not_given_away() {
    let world = World::simulated(CARD);
    let scheduler = Scheduler::start(&world, &["--gpu-memory", "80GiB"]);
    let job = nvshare_harness::Program::workload(&world, "job", "--memory 128MiB --block 64MiB --steps 2");
    job.start().finish().intact();
    assert_eq!(Scheduler::status(&world).gpus[0].capacity, 1 << 30);
    scheduler.wait_for_log("which has 1.00 GiB: more than that is not given away");
}
