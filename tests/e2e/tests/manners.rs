//! Parts of the program that the library leaves alone.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use nvshare_e2e::golden;
use nvshare_harness::{Artifacts, Program, Scheduler, World, wait_until};

#[test]
fn a_program_without_cuda_gets_no_thread_and_no_socket() {
    let world = World::simulated(&[]);
    let _scheduler = Scheduler::start(&world, &[]);
    let mut child = Command::new("cat")
        .env("LD_PRELOAD", &Artifacts::get().library)
        .env("NVSHARE_SOCKET", world.socket())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("cat runs");
    // When the program answers, it is well past its start.
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(b"!").expect("it reads");
    child.stdout.as_mut().expect("a pipe").read_exact(&mut [0]).expect("it answers");
    let proc = format!("/proc/{}", child.id());
    let maps = std::fs::read_to_string(format!("{proc}/maps")).expect("maps");
    assert!(maps.contains("libnvshare.so"), "the library is loaded");
    assert!(!maps.contains("libcuda"), "the driver is not");
    assert_eq!(std::fs::read_dir(format!("{proc}/task")).expect("tasks").count(), 1);
    let descriptors: BTreeSet<String> = std::fs::read_dir(format!("{proc}/fd"))
        .expect("descriptors")
        .filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok())
        .map(|path| path.to_string_lossy().into_owned())
        .collect();
    assert!(
        descriptors.iter().all(|path| !path.contains("socket") && !path.contains("eventfd")),
        "{descriptors:?}"
    );
    drop(stdin);
    assert!(child.wait().expect("a child").success());
    assert!(Scheduler::status(&world).clients.is_empty());
}

/// With more threads the kernel takes many milliseconds for that, and the program's first allocation would wait.
#[test]
fn the_kernel_is_asked_for_fences_before_a_program_has_threads() {
    let world = World::simulated(&[]);
    let fence = format!(
        "import ctypes; raise SystemExit(ctypes.CDLL(None).syscall({}, {}, 0, 0))",
        libc::SYS_membarrier,
        libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED
    );
    let ended = |library: &str| {
        let mut python = Command::new("python3");
        python.args(["-c", &fence]).env("LD_PRELOAD", library).env("NVSHARE_SOCKET", world.socket());
        python.status().expect("python3 runs").success()
    };
    assert!(!ended(""), "the kernel answers a process that has not asked");
    assert!(ended(&Artifacts::get().library.to_string_lossy()));
}

#[test]
fn the_library_never_writes_to_standard_output_and_survives_closed_streams() {
    let world = World::simulated(&[("NVSIM_MEMORY", "1GiB")]);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let job =
        Program::workload(&world, "verbose", "--memory 256MiB --block 64MiB --steps 2").start().finish();
    job.intact();
    assert_eq!(job.out.lines().count(), 1, "{}", job.out);
    // Standard streams closed, and logging on. The program succeeds only if its data was intact.
    let line = format!(
        "exec {} closed --memory 256MiB --block 64MiB --steps 2 <&- >&- 2>&-",
        Artifacts::get().workload.display()
    );
    let mut command = Command::new("sh");
    command.args(["-c", &line]);
    let closed = Program::of(&world, "closed", command).preloaded().start().finish();
    assert!(closed.status.success(), "{:?}", closed.status);
}

/// How often a thread of this name has gone to sleep.
fn sleeps_of(pid: u32, name: &str) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    let statuses = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok());
    let status = statuses.into_iter().find(|status| status.contains(name)).expect("the thread");
    let switches = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    switches.expect("a count").trim().parse().expect("a number")
}

#[test]
fn an_idle_program_costs_no_processor() {
    let world = World::simulated(&[("NVSIM_MEMORY", "1GiB")]);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let idle = Program::workload(&world, "idle", "--memory 64MiB --block 64MiB").waits_for_go().start();
    wait_until("it is set up", || idle.is_ready());
    let sleeps = || sleeps_of(idle.pid(), "nvshare-session");
    // It tells of its set-up before.
    std::thread::sleep(Duration::from_secs(1));
    let before = sleeps();
    std::thread::sleep(Duration::from_secs(3));
    let woke = sleeps() - before;
    assert!(woke <= 6, "its session woke {woke} times in three seconds");
}

/// The symbols that a shared object exports.
fn exports(path: &std::path::Path) -> BTreeSet<String> {
    let output = Command::new("nm")
        .args(["--dynamic", "--defined-only", "--format=posix"])
        .arg(path)
        .output()
        .expect("nm");
    assert!(output.status.success());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

#[test]
fn exactly_the_drivers_names_are_exported() {
    let exported = exports(&Artifacts::get().library);
    let golden = include_str!("golden/exports.txt");
    let golden: BTreeSet<String> = golden.lines().map(str::to_owned).collect();
    let missing: Vec<_> = golden.difference(&exported).collect();
    let extra: Vec<_> = exported.difference(&golden).collect();
    assert!(missing.is_empty() && extra.is_empty(), "missing {missing:?}, extra {extra:?}");
}

#[test]
fn help_is_as_documented() {
    let artifacts = Artifacts::get();
    let help = |program: &std::path::Path, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).env_clear().output().expect("it runs");
        assert!(output.status.success());
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let mut text = help(&artifacts.scheduler, &["--help"]);
    let all = nvshare_ctl::command();
    let names = all.get_subcommands().filter(|command| !command.is_hide_set()).map(clap::Command::get_name);
    for arguments in [vec!["--help"]].into_iter().chain(names.map(|name| vec![name, "--help"])) {
        text.push_str("\n----\n");
        text.push_str(&help(&artifacts.ctl, &arguments));
    }
    golden("help.txt", &text);
}
