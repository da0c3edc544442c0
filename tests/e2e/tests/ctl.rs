//! The command line: every command gets an answer, a refused one says why and exits non-zero.

use std::process::{Command, Output};

use nvshare_harness::{Artifacts, Program, Running, Scheduler, World, wait_until};
use nvshare_proto::ClientState;

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
const JOB: &str = "--memory 768MiB --block 64MiB --kernel-us 1000";

fn text(output: &Output) -> (bool, String, String) {
    let read = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), read(&output.stdout), read(&output.stderr))
}

/// Two programs that do not fit together, until they are told to stop.
fn two_jobs(world: &World) -> [Running; 2] {
    let jobs = ["a", "b"].map(|name| Program::workload(world, name, JOB).until_told().waits_for_go().start());
    Running::go(&[&jobs[0], &jobs[1]]);
    jobs
}

#[test]
fn set_tq_is_obeyed_at_once() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "300"]);
    let jobs = two_jobs(&world);
    Scheduler::until(&world, "one waits", |status| status.gpus[0].waiters.len() == 1);
    let turns = Scheduler::status(&world).gpus[0].turns;
    let gpu = Scheduler::status(&world).gpus[0].gpu.to_string();
    let (good, out, _) = text(&Scheduler::ctl(&world, &["set-tq", "0.25", "--gpu", &gpu]));
    assert!(good && out.contains(&gpu) && out.contains("0.25 s"), "{out}");
    Scheduler::until(&world, "turns are taken", |status| status.gpus[0].turns >= turns + 3);
    world.stop();
    for job in jobs.map(Running::finish) {
        job.intact();
    }
}

#[test]
fn quanta_that_are_none_are_refused() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--tq", "7"]);
    for value in ["0", "-3", "NaN", "inf", "soon", "", "1e99"] {
        let (good, _, error) = text(&Scheduler::ctl(&world, &["set-tq", value]));
        assert!(!good && error.contains("is no quantum; accepted: seconds"), "{value}: {error}");
    }
    assert_eq!(Scheduler::status(&world).scheduler.quantum_ms, 7000);
}

#[test]
fn off_lets_everybody_run_if_all_fits_and_on_takes_turns_again() {
    // Forced off, page faults move memory: fast ones, or the test would wait for them.
    let world = World::simulated(&[CARD[0], CARD[1], ("NVSIM_FAULT", "10")]);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.3"]);
    let jobs = two_jobs(&world);
    Scheduler::until(&world, "turns are taken", |status| status.gpus[0].turns >= 3);
    let (good, _, error) = text(&Scheduler::ctl(&world, &["off"]));
    assert!(!good && error.contains("--force"), "{error}");
    assert!(Scheduler::status(&world).scheduler.scheduling);
    let (good, out, _) = text(&Scheduler::ctl(&world, &["off", "--force"]));
    assert!(good && out.contains("scheduling is off"), "{out}");
    Scheduler::until(&world, "both run", |status| {
        status.clients.iter().filter(|client| client.state == ClientState::Free).count() == 2
    });
    let (good, out, _) = text(&Scheduler::ctl(&world, &["on"]));
    assert!(good && out.contains("scheduling is on"), "{out}");
    let turns = Scheduler::status(&world).gpus[0].turns;
    Scheduler::until(&world, "turns are taken again", |status| status.gpus[0].turns >= turns + 2);
    world.stop();
    for job in jobs.map(Running::finish) {
        job.intact();
    }
}

#[test]
fn json_holds_what_a_row_of_measurements_needs() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let job = Program::workload(&world, "job", &format!("{JOB} --steps 3")).start().finish();
    let output = Scheduler::ctl(&world, &["clients", "--all", "--json"]);
    let clients: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let client =
        clients.as_array().expect("a list").iter().find(|c| c["pid"] == job.pid).expect("the client");
    for counter in
        ["gated", "passed_by", "managed", "hand_overs", "evicted", "evict_ns", "restored", "restore_ns"]
    {
        assert!(client["counters"][counter].is_u64(), "{counter}: {client}");
    }
    assert!(client["held_ms"].is_u64());
    assert_eq!(client["usage"][0]["gpu"], "GPU-51600000-0000-4000-8000-000000000000");
    // Without --all, only who is there.
    wait_until("it is known to be gone", || {
        Scheduler::ctl(&world, &["clients", "--json"]).stdout.trim_ascii() == b"[]"
    });
    let (good, out, _) = text(&Scheduler::ctl(&world, &["clients"]));
    assert!(good && out == "no clients\n", "{out}");
}

#[test]
fn without_a_scheduler_every_command_says_so() {
    let world = World::simulated(CARD);
    for arguments in [&["status"][..], &["clients"], &["set-tq", "5"], &["on"], &["off"]] {
        let (good, out, error) = text(&Scheduler::ctl(&world, arguments));
        assert!(!good && out.is_empty(), "{arguments:?}: {out}");
        assert!(error.starts_with("nvshare-ctl: no scheduler answers at "), "{error}");
    }
}

#[test]
fn run_becomes_the_program() {
    let artifacts = Artifacts::get();
    let run = |library: &str, arguments: &[&str]| {
        let library = ["run", "--library", library, "--"].into_iter();
        let mut command = Command::new(&artifacts.ctl);
        text(
            &command
                .args(library.chain(arguments.iter().copied()))
                .env("LD_PRELOAD", "")
                .output()
                .expect("it runs"),
        )
    };
    let library = artifacts.library.to_string_lossy().into_owned();
    let output = Command::new(&artifacts.ctl)
        .args(["run", "--library", &library, "--", "sh", "-c", "echo $LD_PRELOAD; exit 42"])
        .env_remove("LD_PRELOAD")
        .output()
        .expect("it runs");
    assert_eq!(output.status.code(), Some(42));
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), library);
    let (good, _, error) = run(&library, &["/no/such/program"]);
    assert!(!good && error.contains("/no/such/program"), "{error}");
    let (good, _, error) = run("/no/such/library.so", &["true"]);
    assert!(!good && error.contains("/no/such/library.so: no such library"), "{error}");
}

#[test]
fn doctor_names_what_a_newer_driver_has_beyond() {
    let world = World::simulated(&[]);
    let _scheduler = Scheduler::start(&world, &[]);
    let artifacts = Artifacts::get();
    let doctor = |driver: &std::path::Path| {
        Command::new(&artifacts.ctl)
            .args(["doctor", "--json", "--driver"])
            .arg(driver)
            .env("NVSHARE_ADMIN_SOCKET", world.admin_socket())
            .output()
            .expect("it runs")
    };
    let known = doctor(&artifacts.simulator);
    assert!(known.status.success(), "{known:?}");
    assert!(String::from_utf8_lossy(&known.stdout).contains("\"unknown\": []"), "{known:?}");
    // The simulator with one function more.
    let newer = world.dir().join("newer.so");
    let source = world.dir().join("newer.c");
    std::fs::write(&source, "int cuInit(int f) { return f; } int cuLaunchTomorrow(void) { return 0; }")
        .expect("a file");
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&newer).arg(&source).status().expect("cc");
    assert!(built.success());
    let unknown = doctor(&newer);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&unknown.stdout).contains("\"cuLaunchTomorrow\""), "{unknown:?}");
    assert!(!doctor(&source).status.success(), "what is no library is said so");
}
