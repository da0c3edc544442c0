//! The command line: every command gets an answer, a refused one says why and exits non-zero.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Output};

use nvshare_harness::{Artifacts, Program, Running, Scheduler, Status, World, wait_until};
use nvshare_proto::ClientState;
use nvshare_proto::paths::SYSTEM_SOCKET;

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
    world.stop_intact(jobs);
}

#[test]
fn quanta_that_are_none_are_refused() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--tq", "7"]);
    for value in ["0", "-3", "NaN", "inf", "soon", "", "1e99"] {
        let (good, _, error) = text(&Scheduler::ctl(&world, &["set-tq", value]));
        assert!(!good && error.contains("is not a quantum; accepted: seconds"), "{value}: {error}");
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
    // No pause holds meanwhile, and nothing says that one does.
    let client = Scheduler::status(&world).client(jobs[0].pid()).client.to_string();
    let (good, out, _) = text(&Scheduler::ctl(&world, &["pause", &client]));
    assert!(good && out.trim_end().ends_with("paused; it runs on until scheduling is on"), "{out}");
    let (_, table, _) = text(&Scheduler::ctl(&world, &["clients"]));
    assert!(table.contains("free") && !table.contains("paused"), "{table}");
    assert!(text(&Scheduler::ctl(&world, &["resume", &client])).0);
    let (good, out, _) = text(&Scheduler::ctl(&world, &["on"]));
    assert!(good && out.contains("scheduling is on"), "{out}");
    let turns = Scheduler::status(&world).gpus[0].turns;
    Scheduler::until(&world, "turns are taken again", |status| status.gpus[0].turns >= turns + 2);
    world.stop_intact(jobs);
}

#[test]
fn json_holds_what_a_row_of_measurements_needs() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let job = Program::workload(&world, "job", &format!("{JOB} --steps 3")).start().finish();
    let output = Scheduler::ctl(&world, &["clients", "--all", "--json"]);
    let clients: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(clients["schema"], 1);
    let client = clients["clients"]
        .as_array()
        .expect("a list")
        .iter()
        .find(|c| c["pid"] == job.pid)
        .expect("the client");
    for counter in [
        "gated",
        "passed_by",
        "managed",
        "hand_overs",
        "evicted",
        "evict_ns",
        "restored",
        "restore_ns",
        "copied_out",
        "copied_in",
    ] {
        assert!(client["counters"][counter].is_u64(), "{counter}: {client}");
    }
    assert!(client["held_ms"].is_u64());
    assert_eq!(client["usage"][0]["gpu"], "GPU-51600000-0000-4000-8000-000000000000");
    // Without --all, only clients that are there.
    wait_until("it is known to be gone", || {
        let output = Scheduler::ctl(&world, &["clients", "--json"]);
        String::from_utf8_lossy(&output.stdout).contains("\"clients\": []")
    });
    let (good, out, _) = text(&Scheduler::ctl(&world, &["clients"]));
    assert!(good && out == "no clients\n", "{out}");
}

#[test]
fn without_a_scheduler_every_command_says_so() {
    let world = World::simulated(CARD);
    for arguments in [&["status"][..], &["clients"], &["watch"], &["set-tq", "5"], &["on"], &["off"]] {
        let (good, out, error) = text(&Scheduler::ctl(&world, arguments));
        assert!(!good && out.is_empty(), "{arguments:?}: {out}");
        assert!(error.starts_with("nvshare-ctl: no scheduler answers at "), "{error}");
    }
}

/// The command line without a world's variables: a user who knows only the clients' socket.
fn as_a_user(world: &World, arguments: &[&str]) -> Output {
    Command::new(&Artifacts::get().ctl)
        .args(arguments)
        .env_remove("NVSHARE_ADMIN_SOCKET")
        .env_remove("XDG_RUNTIME_DIR")
        .env("NVSHARE_SOCKET", world.socket())
        .output()
        .expect("nvshare-ctl runs")
}

/// Root may have a folder of its own, as after a login, and root's scheduler may not run yet.
#[test]
fn containers_of_root_get_the_folder_of_roots_scheduler() {
    let world = World::simulated(CARD);
    let output = Command::new(&Artifacts::get().ctl)
        .args(["cdi", "generate"])
        .env("NVSHARE_LIBRARY", &Artifacts::get().library)
        .env("XDG_RUNTIME_DIR", world.dir())
        .env_remove("NVSHARE_SOCKET")
        .output()
        .expect("nvshare-ctl runs");
    let (good, out, error) = text(&output);
    assert!(good, "{error}");
    let made: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    let folder = made["devices"][0]["containerEdits"]["mounts"][1]["hostPath"].as_str();
    let is_root = std::fs::metadata("/proc/self").expect("this process").uid() == 0;
    if is_root || Path::new(SYSTEM_SOCKET).exists() {
        assert_eq!((folder, error.as_str()), (Some("/var/run/nvshare"), ""));
    } else {
        assert_eq!(folder, world.dir().join("nvshare").to_str());
        assert!(error.contains("your own scheduler"), "{error}");
    }
}

#[test]
fn everybody_may_look_and_administrators_alone_may_change() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "7"]);
    let job = Program::workload(&world, "job", JOB).until_told().waits_for_go().start();
    Running::go(&[&job]);
    let (good, out, error) = text(&as_a_user(&world, &["status", "--json"]));
    assert!(good, "{error}");
    let status: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!((&status["scheduler"]["restricted"], &status["schema"]), (&true.into(), &1.into()), "{out}");
    // The program is this user's own.
    assert_eq!(status["clients"][0]["pid"], job.pid(), "{out}");
    assert_eq!(status["gpus"][0]["others"]["clients"], 0, "{out}");
    for arguments in [&["set-tq", "5"][..], &["on"], &["off"], &["reset"]] {
        let (good, out, error) = text(&as_a_user(&world, arguments));
        assert!(!good && out.is_empty(), "{arguments:?}: {out}");
        let expected =
            "nvshare-ctl: changes need the administrators' socket /var/run/nvshare-admin/admin.sock (";
        assert!(error.starts_with(expected), "{error}");
    }
    assert_eq!(Scheduler::status(&world).scheduler.quantum_ms, 7000);
    world.stop();
    job.finish().intact();
}

#[test]
fn status_says_who_is_who_and_why_somebody_waits() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "300"]);
    let jobs = two_jobs(&world);
    let turn = |status: &Status| {
        let gpu = &status.gpus[0];
        Some((gpu.turns, *gpu.holders.first()?, *gpu.waiters.first()?))
    };
    // On a busy machine a holder can look idle, and then its turn is over.
    let (mut status, mut out) = (Scheduler::status(&world), String::new());
    wait_until("one waits, before and after", || {
        let before = turn(&status);
        out = text(&Scheduler::ctl(&world, &["status"])).1;
        status = Scheduler::status(&world);
        before.is_some() && before == turn(&status)
    });
    let (_, holder, waiter) = turn(&status).expect("one waits");
    assert!(
        out.contains(&format!(
            "client {waiter} waits for its turn on GPU-51600000, number 1 in the queue: client {holder} holds it; a turn lasts 300 s\n"
        )),
        "{out}"
    );
    assert!(out.contains("  nvshare-workload a --memory 768MiB"), "a program with its arguments: {out}");
    let process = status.clients[0].process.as_ref().expect("the kernel tells");
    assert!(process.command.ends_with("--block 64MiB --kernel-us 1000"), "{process:?}");
    for (sort, key) in [("waited", "waited_ms"), ("held", "held_ms")] {
        let sorted = Scheduler::ctl(&world, &["clients", "--json", "--sort", sort]);
        let sorted: serde_json::Value = serde_json::from_slice(&sorted.stdout).expect("JSON");
        let [first, second] = [0, 1].map(|i| sorted["clients"][i][key].as_u64().expect("a number"));
        assert!(first >= second, "{sort}: {sorted}");
    }
    world.stop_intact(jobs);
}

#[test]
fn tables_fit_terminals_of_every_width() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let job = Program::workload(&world, "job", JOB).until_told().waits_for_go().start();
    Running::go(&[&job]);
    for command in ["status", "clients"] {
        let at = |width: &str, more: &[&str]| {
            let output = Command::new(&Artifacts::get().ctl)
                .arg(command)
                .args(more)
                .env("COLUMNS", width)
                .env("NVSHARE_ADMIN_SOCKET", world.admin_socket())
                .output()
                .expect("it runs");
            assert!(output.status.success(), "{output:?}");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        for width in [20, 80, 132] {
            let text = at(&width.to_string(), &[]);
            // The first line and the notes are sentences.
            let tables = text.lines().filter(|line| !line.contains(&['(', ':'][..]));
            assert!(tables.clone().count() > 1, "{text}");
            tables.for_each(|line| assert!(line.chars().count() <= width, "{width}: {text}"));
        }
        let wide = at("20", &["--wide"]);
        assert!(wide.contains("--kernel-us 1000"), "{wide}");
    }
    world.stop();
    job.finish().intact();
}

#[test]
fn gpus_are_listed_when_idle_and_named_by_number() {
    let world = World::simulated(CARD);
    let gpus = world.dir().join("gpus");
    for (place, model, uuid) in [
        ("0000:17:00.0", "Tesla T4", "GPU-51600000-0000-4000-8000-000000000000"),
        ("0000:65:00.0", "NVIDIA H100", "GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"),
    ] {
        std::fs::create_dir_all(gpus.join(place)).expect("a folder");
        let text = format!("Model: \t\t {model}\nGPU UUID: \t {uuid}\n");
        std::fs::write(gpus.join(place).join("information"), text).expect("a file");
    }
    let _scheduler = Scheduler::start(&world, &["--gpu-descriptions", &gpus.to_string_lossy()]);
    let (_, out, _) = text(&Scheduler::ctl(&world, &["status"]));
    assert!(out.contains("Tesla T4") && out.contains("NVIDIA H100"), "{out}");
    let (good, out, error) = text(&Scheduler::ctl(&world, &["set-tq", "0.5", "--gpu", "1"]));
    assert!(good && out == "quantum of GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0 is 0.5 s\n", "{out}{error}");
    assert!(Scheduler::ctl(&world, &["set-tq", "0.5", "--gpu", "GPU-0f1e"]).status.success());
    let gpus = Scheduler::status(&world).gpus;
    assert_eq!(gpus.iter().map(|gpu| gpu.quantum_ms).collect::<Vec<_>>(), [30_000, 500]);
    for (gpu, expected) in [
        ("2", "there is no GPU 2; there is GPU 0, GPU 1"),
        ("GPU-abc", "no GPU has a UUID that begins so; there is GPU 0, GPU 1"),
        ("GPU-", "is neither a GPU's number nor its UUID"),
        ("-1", "unexpected argument '-1'"),
        ("first", "is neither a GPU's number nor its UUID"),
        ("99999999999", "is neither a GPU's number nor its UUID"),
        ("GPU-00000000-0000-0000-0000-000000000001", "unknown GPU GPU-00000000"),
    ] {
        let (good, _, error) = text(&Scheduler::ctl(&world, &["set-tq", "5", "--gpu", gpu]));
        assert!(!good && error.contains(expected), "{gpu}: {error}");
    }
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &[]);
    let full = std::fs::File::options().write(true).open("/dev/full").expect("a device");
    let output = Command::new(&Artifacts::get().ctl)
        .arg("status")
        .env("NVSHARE_ADMIN_SOCKET", world.admin_socket())
        .stdout(full)
        .output()
        .expect("it runs");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).2.starts_with("nvshare-ctl: standard output: No space left"), "{output:?}");
}

#[test]
fn a_stopped_scheduler_is_called_that() {
    let world = World::simulated(CARD);
    let scheduler = Scheduler::start(&world, &[]);
    scheduler.signal(libc::SIGSTOP);
    let (good, _, error) = text(&Scheduler::ctl_once(&world, &["status"]));
    scheduler.signal(libc::SIGCONT);
    assert!(!good && error.contains("does not answer within 5 s: it is stopped or overloaded"), "{error}");
}

#[test]
fn arguments_that_mean_nothing_are_refused() {
    let world = World::simulated(CARD);
    for arguments in [
        &[][..],
        &["everything"],
        &["status", "--sort", "beauty"],
        &["status", "--sort"],
        &["status", "5"],
        &["clients", "--all", "yes"],
        &["set-tq"],
        &["set-tq", "5", "6"],
        &["on", "--force"],
        &["off", "--force", "now"],
        &["reset", "all"],
        &["run"],
        &["run", "--limit", "4", "--", "true"],
        &["run", "--limit", "-4g", "--", "true"],
        &["run", "--limit"],
        &["install-library"],
        &["doctor", "--driver"],
    ] {
        let output = Scheduler::ctl(&world, arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{arguments:?}");
    }
}
