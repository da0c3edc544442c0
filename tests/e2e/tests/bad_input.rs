//! Options, configurations and variables that mean nothing, and places that cannot be written: each gets a clear line and a
//! fitting exit code, and leaves nothing behind. The tables are made from the command lines themselves, so a new option,
//! key or variable is in them without further work.
//!
//! `NVSHARE_GOLDEN=write cargo test -p nvshare-e2e bad_input::` writes the golden files anew; the difference shows
//! what a user will see.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use clap::CommandFactory;
use nvshare_e2e::golden;
use nvshare_harness::{Artifacts, Scheduler, World, patience};
use nvshare_proto::env;

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];

/// Values that an option may get by mistake; `None`: nothing follows it.
const VALUES: [Option<&[u8]>; 7] = [
    None,
    Some(b""),
    Some(b"0"),
    Some(b"-1"),
    Some(b"99999999999999999999999"),
    Some(b"words"),
    Some(b"\xff"),
];

/// The row of a command line in the table: its exit code and its messages, without parts that differ from run to run and
/// without the lines that clap adds to every complaint.
fn row(shown: &str, output: &Output, world: &World) -> String {
    let said = [&output.stdout[..], &output.stderr].concat();
    let said = String::from_utf8_lossy(&said).replace(&*world.dir().to_string_lossy(), "DIR");
    let mut text = format!("{shown}\n");
    let code = output.status.code().map_or_else(|| output.status.to_string(), |code| code.to_string());
    let mut lines = said.lines().filter(|line| {
        !line.is_empty() && !line.starts_with("For more information") && !line.starts_with("Usage:")
    });
    let _ = writeln!(text, "  {code}  {}", lines.next().map(without_time).unwrap_or_default());
    for line in lines {
        let _ = writeln!(text, "     {}", without_time(line));
    }
    text
}

/// A line of the log without its time.
fn without_time(line: &str) -> &str {
    let is_time = |word: &str| word.ends_with('Z') && word.contains('T') && word.starts_with("20");
    match line.split_once(' ') {
        Some((first, rest)) if is_time(first) => rest.trim_start(),
        _ => line,
    }
}

/// Runs a program in a folder where no file can be made.
fn run(world: &World, program: &Path, arguments: &[OsString]) -> Output {
    let artifacts = Artifacts::get();
    let mut command = Command::new(program);
    command.args(arguments).current_dir("/proc").stdin(Stdio::null());
    let kept = ["PATH", "HOME"].map(|name| (name, std::env::var_os(name).unwrap_or_default()));
    command.env_clear().envs(kept);
    command.env("NVSHARE_ADMIN_SOCKET", world.admin_socket()).env("NVSHARE_SOCKET", world.socket());
    command.env("NVSHARE_LIBRARY", &artifacts.library);
    command.env("NVSIM_DIR", world.dir()).env("LD_LIBRARY_PATH", world.dir().join("lib"));
    ends(command)
}

/// Waits for a program that has to end by itself. A program that goes on, such as a scheduler that accepts a bad option, is
/// ended here, or the test would wait for ever.
fn ends(mut command: Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    let begin = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        if begin.elapsed() > patience() {
            child.kill().expect("a child");
            let output = child.wait_with_output().expect("a child");
            panic!("{command:?} goes on: {}", String::from_utf8_lossy(&output.stderr));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child.wait_with_output().expect("a child")
}

/// An option of a command, or a positional argument.
struct Argument {
    /// `--socket`, or nothing for a positional argument.
    long: Option<String>,
    takes_value: bool,
}

fn options(command: &clap::Command) -> Vec<Argument> {
    let mut built = command.clone();
    built.build();
    let usual = ["help", "version"];
    built
        .get_arguments()
        .filter(|argument| !usual.contains(&argument.get_id().as_str()))
        .map(|argument| Argument {
            long: argument.get_long().map(|long| format!("--{long}")),
            takes_value: argument.get_action().takes_values(),
        })
        .collect()
}

/// The command lines that give each option of a command each value. `before` and `after` are the other arguments that the
/// command needs; when a positional argument is tried, the positional ones in `after` are left out.
fn tries(command: &clap::Command, before: &[&str], after: &[&str]) -> Vec<Vec<OsString>> {
    let mut tries = Vec::new();
    let mut positions = 0;
    for Argument { long, takes_value } in options(command) {
        for value in VALUES {
            let mut line: Vec<OsString> = before.iter().map(Into::into).collect();
            let value = value.map(|value| OsStr::from_bytes(value).to_owned());
            match (&long, takes_value, value) {
                // A switch takes no value at all.
                (Some(long), false, Some(value)) if value == "0" => {
                    let mut joined = OsString::from(format!("{long}="));
                    joined.push(value);
                    line.push(joined);
                }
                (Some(_), false, _) => continue,
                (Some(long), true, None) => {
                    // Nothing may come after the option, and words after `--` belong to another program.
                    line.extend(after.iter().take_while(|&&word| word != "--").map(Into::into));
                    line.push(long.into());
                    tries.push(line);
                    continue;
                }
                (Some(long), true, Some(value)) => line.extend([long.into(), value]),
                (None, _, value) => {
                    // Those before it are numbers of clients.
                    line.extend((0..positions).map(|_| "1".into()));
                    line.extend(value);
                    tries.push(line);
                    continue;
                }
            }
            line.extend(after.iter().map(Into::into));
            tries.push(line);
        }
        positions += usize::from(long.is_none());
    }
    tries
}

fn shown(program: &str, arguments: &[OsString], world: &World) -> String {
    let dir = world.dir().to_string_lossy().into_owned();
    let words = arguments.iter().map(|argument| match argument.to_string_lossy().replace(&dir, "DIR") {
        empty if empty.is_empty() => "''".to_owned(),
        text => text,
    });
    format!("{program} {}", words.collect::<Vec<_>>().join(" "))
}

#[test]
fn every_option_of_the_scheduler() {
    let world = World::simulated(CARD);
    let options = nvshare_scheduler::settings::Options::command();
    let mut text = String::new();
    for arguments in tries(&options, &[], &[]) {
        // A command line that is accepted fails at the administrators' socket, which cannot be made there.
        let mut all = arguments.clone();
        if !arguments.iter().any(|argument| argument == "--admin-socket") {
            all.splice(0..0, ["--admin-socket".into(), "/proc/nvshare/admin.sock".into()]);
        }
        if !arguments.iter().any(|argument| argument == "--config") {
            all.splice(0..0, ["--config".into(), "/dev/null".into()]);
        }
        let output = run(&world, &Artifacts::get().scheduler, &all);
        text += &row(&shown("nvshare-scheduler", &arguments, &world), &output, &world);
    }
    golden("bad_scheduler_options.txt", &text);
}

/// Shares that are just out of range, and clients that are not there.
const SHARES: [&[&str]; 12] = [
    &["set-weight", "1", "10001"],
    &["set-weight", "1", "10000"],
    &["set-limit", "1", "--compute", "101"],
    &["set-limit", "1", "--compute", "none"],
    &["set-limit", "job:", "--memory", "8g"],
    &["set-limit", "job:-1", "--memory", "8g"],
    &["pause", "job:7"],
    &["run", "--weight", "10001", "--", "true"],
    &["run", "--compute-limit", "101", "--", "true"],
    &["run", "--gang", "ranks:1", "--", "true"],
    &["run", "--gang", "ranks:1000", "--", "true"],
    &["run", "--gang", "ranks:64", "--", "true"],
];

/// The arguments that a command needs besides the option that is tried.
fn needs(command: &str) -> &'static [&'static str] {
    match command {
        "set-tq" => &["5"],
        "run" => &["--", "true"],
        "install-library" => &["folder"],
        "install" | "uninstall" => &["--prefix", "folder"],
        _ => &[],
    }
}

#[test]
fn every_option_of_every_command() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let mut text = String::new();
    let all = nvshare_ctl::command();
    for command in all.get_subcommands().filter(|command| !command.is_hide_set()) {
        let name = command.get_name();
        // The options of the whole program are options of each command.
        let mut whole = command.clone();
        whole = all
            .get_arguments()
            .filter(|argument| argument.is_global_set())
            .cloned()
            .fold(whole, clap::Command::arg);
        for arguments in tries(&whole, &[name], needs(name)) {
            let mut output = run(&world, &Artifacts::get().ctl, &arguments);
            if name == "doctor" {
                // The other lines are about this machine.
                let said = String::from_utf8_lossy(&output.stdout).into_owned();
                let is_ours = |line: &&str| {
                    let mut words = line.split_whitespace();
                    words.next() == Some("ERROR")
                        && words.next().is_some_and(|word| ["driver", "library", "scheduler"].contains(&word))
                };
                output.stdout = said.lines().filter(is_ours).collect::<Vec<_>>().join("\n").into();
                output.stderr.retain(|_| output.status.code() != Some(1));
            }
            text += &row(&shown("nvshare-ctl", &arguments, &world), &output, &world);
        }
    }
    for arguments in SHARES {
        let arguments: Vec<OsString> = arguments.iter().map(Into::into).collect();
        let output = run(&world, &Artifacts::get().ctl, &arguments);
        text += &row(&shown("nvshare-ctl", &arguments, &world), &output, &world);
    }
    let left = Scheduler::status(&world);
    assert_eq!((left.scheduler.quantum_ms, left.scheduler.scheduling), (30_000, true), "nothing was changed");
    golden("bad_ctl_options.txt", &text);
}

#[test]
fn every_key_of_the_configuration() {
    let world = World::simulated(CARD);
    let file = world.dir().join("config.toml");
    let read = |contents: &[u8]| {
        std::fs::write(&file, contents).expect("a file");
        let arguments = ["--config", &*file.to_string_lossy(), "--admin-socket", "/proc/nvshare/admin.sock"];
        run(&world, &Artifacts::get().scheduler, &arguments.map(OsString::from))
    };
    // The complaint about an unknown key names all known keys.
    let complaint = String::from_utf8_lossy(&read(b"no-such-key = 1\n").stderr).into_owned();
    let keys: Vec<&str> = complaint.split('`').skip(3).step_by(2).collect();
    assert!(keys.len() >= 9 && keys.contains(&"gpu-memory"), "{complaint}");
    let gpu = "[gpu.GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0]";
    let complaint =
        String::from_utf8_lossy(&read(format!("{gpu}\nno-such-key = 1\n").as_bytes()).stderr).into_owned();
    let own: Vec<&str> = complaint.split('`').skip(3).step_by(2).collect();
    assert!(own.len() >= 3, "{complaint}");
    let mut text = String::new();
    let mut look = |shown: &str, contents: &[u8]| text += &row(shown, &read(contents), &world);
    let keys =
        keys.iter().map(|key| (String::new(), key)).chain(own.iter().map(|key| (format!("{gpu}\n"), key)));
    for (head, key) in keys {
        for value in [
            "",
            "0",
            "-1",
            "99999999999999999999999",
            "1e400",
            "nan",
            "\"words\"",
            "\"\"",
            "true",
            "[1]",
            "{ a = 1 }",
        ] {
            let line = format!("{head}{key} = {value}");
            look(&line.replace('\n', " / "), format!("{line}\n").as_bytes());
        }
    }
    for contents in
        ["\u{feff}tq = 5", "tq 5", "tq = 5\ntq = 6", "[gpu]\nx = 1", "[gpu.0]\ntq = 5", "[[gpu]]", "TQ = 5"]
    {
        look(&contents.replace('\n', " / "), format!("{contents}\n").as_bytes());
    }
    look("bytes that are no text", b"tq = \xff\n");
    look("an empty file", b"");
    golden("bad_configuration.txt", &text);
}

#[test]
fn every_variable_of_the_library() {
    let world = World::simulated(CARD);
    let artifacts = Artifacts::get();
    let mut text = String::new();
    let hami = [env::HAMI_MEM_LIMIT, env::HAMI_LOG_LEVEL, env::HAMI_SM_LIMIT, env::HAMI_POLICY];
    let indexed = [env::MEM_LIMIT, env::HAMI_MEM_LIMIT, env::COMPUTE_LIMIT].map(|name| format!("{name}_0"));
    let names = env::KNOWN.into_iter().chain(hami).chain(indexed.iter().map(String::as_str));
    let unknown = ["NVSHARE_MEMLIMIT", "NVSHARE_TQ", "NVSHARE_MEM_LIMIT_X", "CUDA_TASK_PRIORITY"];
    for name in names.chain(unknown) {
        let out_of_range: &[&[u8]] = match name {
            env::WEIGHT => &[b"10001"],
            env::COMPUTE_LIMIT => &[b"101", b"25%"],
            env::GANG => &[b"ranks:1", b"ranks:1000"],
            _ => &[],
        };
        for value in VALUES.into_iter().flatten().chain(out_of_range.iter().copied()) {
            let value = OsStr::from_bytes(value);
            // `doctor` asks the driver for its GPUs, as a program does.
            let mut command = Command::new(&artifacts.ctl);
            command.arg("probe").current_dir("/proc").env_clear().env("LD_PRELOAD", &artifacts.library);
            command.env("NVSIM_DIR", world.dir()).env("LD_LIBRARY_PATH", world.dir().join("lib"));
            command.env("NVSIM_MEMORY", "1GiB").env(name, value);
            let mut output = ends(command);
            let answer: serde_json::Value = serde_json::from_slice(&output.stdout).expect("an answer");
            let said = match answer["gpus"]["Err"].as_str() {
                Some(error) => format!("the program is told: {error}\n"),
                None => "the program runs\n".to_owned(),
            };
            output.stdout = said.into();
            let value = value.to_string_lossy();
            text +=
                &row(&format!("{name}={}", if value.is_empty() { "''" } else { &value }), &output, &world);
        }
    }
    golden("bad_variables.txt", &text);
}

#[test]
fn empty_variables_are_as_good_as_none() {
    let world = World::simulated(CARD);
    let artifacts = Artifacts::get();
    let empty = env::KNOWN.map(|name| (name, ""));
    let own = world.dir().join("own");
    std::fs::create_dir(&own).expect("a folder");
    let run = |program: &Path, arguments: &[&str]| {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .envs(empty)
            .env("XDG_RUNTIME_DIR", &own)
            .env("HOME", &own)
            .stdin(Stdio::null());
        command
    };
    // The library of the same build is beside the program.
    let output =
        run(&artifacts.ctl, &["run", "--", "sh", "-c", "echo $LD_PRELOAD"]).output().expect("it runs");
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).trim().ends_with("/libnvshare.so"), "{output:?}");
    let (clients, admin) = (world.socket(), world.admin_socket());
    let sockets = ["--socket", &*clients.to_string_lossy(), "--admin-socket", &*admin.to_string_lossy()];
    let mut scheduler = run(&artifacts.scheduler, &sockets).stderr(Stdio::null()).spawn().expect("it runs");
    nvshare_harness::wait_until("it serves", || {
        assert_eq!(scheduler.try_wait().expect("a child"), None);
        run(&artifacts.ctl, &["status", "--socket", sockets[3]])
            .output()
            .is_ok_and(|output| output.status.success())
    });
    scheduler.kill().expect("a child");
    scheduler.wait().expect("a child");
}

/// Every file in a folder, and in those below it.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries =
        std::fs::read_dir(folder).expect("a folder").filter_map(Result::ok).map(|entry| entry.path());
    entries
        .flat_map(|path| if path.is_dir() && !path.is_symlink() { files(&path) } else { vec![path] })
        .collect()
}

#[test]
fn places_that_cannot_be_written() {
    let world = World::simulated(CARD);
    let folder = world.dir().join("places");
    std::fs::create_dir_all(folder.join("folder")).expect("a folder");
    std::fs::write(folder.join("file"), "").expect("a file");
    let before = files(&folder);
    let at = |name: &str| folder.join(name).to_string_lossy().into_owned();
    let long = at(&"long".repeat(30));
    let artifacts = Artifacts::get();
    let mut text = String::new();
    for place in [at("file"), at("folder"), at("file/below"), "/proc/nvshare/below".to_owned(), long] {
        let (one, other) = (at("scheduler.sock"), at("admin.sock"));
        for arguments in [
            &["--config", "/dev/null", "--socket", &place, "--admin-socket", &other][..],
            &["--config", "/dev/null", "--socket", &one, "--admin-socket", &place],
            &["--config", "/dev/null", "--socket", &place, "--admin-socket", &place],
        ] {
            let arguments: Vec<OsString> = arguments.iter().map(Into::into).collect();
            let output = run(&world, &artifacts.scheduler, &arguments);
            text += &row(&shown("nvshare-scheduler", &arguments[2..], &world), &output, &world);
            assert_eq!(files(&folder), before, "nothing is left behind");
        }
        for arguments in [
            &["status", "--socket", &place][..],
            &["run", "--socket", &place, "--", "true"],
            &["run", "--library", &place, "--", "true"],
        ] {
            let arguments: Vec<OsString> = arguments.iter().map(Into::into).collect();
            let output = run(&world, &artifacts.ctl, &arguments);
            text += &row(&shown("nvshare-ctl", &arguments, &world), &output, &world);
        }
    }
    for place in [at("file"), at("file/below"), "/proc/nvshare".to_owned()] {
        for command in [&["install", "--prefix"][..], &["install-library"], &["uninstall", "--prefix"]] {
            let arguments: Vec<OsString> =
                command.iter().map(Into::into).chain([place.clone().into()]).collect();
            let output = run(&world, &artifacts.ctl, &arguments);
            text += &row(&shown("nvshare-ctl", &arguments, &world), &output, &world);
            assert_eq!(files(&folder), before, "nothing is left behind");
        }
    }
    golden("bad_places.txt", &text);
}
