//! Output on terminals: colours, small ones, and readers that go early.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use nvshare_harness::{Artifacts, Program, Running, Scheduler, Terminal, World, wait_until};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
const ESCAPE: char = '\u{1b}';

/// A variable and its value, or none.
type Variable<'a> = Option<(&'a str, &'a str)>;

/// Variables that ask for colours or not, and whether there are any then.
const COLOURS: [(Variable<'_>, bool); 4] = [
    (None, true),
    (Some(("NO_COLOR", "1")), false),
    (Some(("NO_COLOR", "")), true),
    (Some(("TERM", "dumb")), false),
];

fn on_colours(mut command: Command, variable: Variable<'_>) -> Terminal {
    command.env_remove("NO_COLOR").env("TERM", "xterm-256color").envs(variable);
    Terminal::start(command, 24, 80)
}

#[test]
fn the_log_has_colours_on_a_terminal_that_wants_them() {
    for (variable, expected) in COLOURS {
        let world = World::simulated(CARD);
        let terminal = on_colours(Scheduler::command(&world, &[]), variable);
        wait_until("it says where it serves", || terminal.text().contains("administrators at"));
        let text = terminal.text();
        assert_eq!(text.contains(ESCAPE), expected, "{variable:?}: {text:?}");
    }
}

#[test]
fn help_and_complaints_have_colours_on_a_terminal_that_wants_them() {
    let artifacts = Artifacts::get();
    for program in [&artifacts.ctl, &artifacts.scheduler] {
        for (argument, code) in [("--help", 0), ("--no-such-option", 2)] {
            for (variable, expected) in COLOURS {
                let mut command = Command::new(program);
                command.arg(argument);
                let (status, text) = on_colours(command, variable).finish();
                assert_eq!(status.code(), Some(code), "{text}");
                assert_eq!(text.contains(ESCAPE), expected, "{argument} {variable:?}: {text:?}");
            }
        }
    }
}

/// Every command that shows something, with arguments that succeed.
const SHOWN: [&[&str]; 8] = [
    &["status"],
    &["status", "--json"],
    &["clients"],
    &["clients", "--all"],
    &["set-tq", "5"],
    &["off"],
    &["on"],
    &["reset"],
];

#[test]
fn a_terminal_of_five_short_lines_is_enough() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let job = Program::workload(&world, "job", "--memory 128MiB --block 64MiB").until_told().waits_for_go();
    let job = job.start();
    Running::go(&[&job]);
    let (lines, columns) = (5, 20);
    for arguments in SHOWN {
        let mut command = Command::new(&Artifacts::get().ctl);
        command.args(arguments).env("NVSHARE_ADMIN_SOCKET", world.admin_socket()).env_remove("COLUMNS");
        let (status, text) = Terminal::start(command, lines, columns).finish();
        assert!(status.success() && !text.is_empty(), "{arguments:?}: {status} {text}");
        // The terminal wraps sentences and JSON; tables are not wrapped.
        let tables =
            text.lines().filter(|line| !line.contains(&['(', ':', '"', '{'][..]) && text.contains("CLIENT"));
        tables
            .for_each(|line| assert!(line.chars().count() <= usize::from(columns), "{arguments:?}: {text}"));
    }
    for program in [&Artifacts::get().ctl, &Artifacts::get().scheduler] {
        let mut command = Command::new(program);
        command.arg("--help").env("TERM", "dumb");
        let (status, text) = Terminal::start(command, lines, columns).finish();
        assert!(status.success(), "{text}");
        // Longer words stay whole, and so does the usage line.
        let is_long =
            |line: &&str| line.chars().count() > usize::from(columns) && line.split_whitespace().count() > 3;
        let lines = text.lines().filter(|line| !line.starts_with("Usage:"));
        assert_eq!(lines.into_iter().find(is_long), None, "{text}");
    }
    world.stop();
    job.finish().intact();
}

#[test]
fn a_reader_that_goes_early_is_no_failure() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &[]);
    let mut every: Vec<Vec<String>> =
        SHOWN.iter().map(|arguments| arguments.iter().map(ToString::to_string).collect()).collect();
    let help = |name: &str| vec![name.to_owned(), "--help".to_owned()];
    every.extend(nvshare_ctl::command().get_subcommands().map(|command| help(command.get_name())));
    every.extend([vec!["--help".to_owned()], vec!["--version".to_owned()], vec!["doctor".to_owned()]]);
    for arguments in every {
        let mut child = Command::new(&Artifacts::get().ctl)
            .args(&arguments)
            .env("NVSHARE_ADMIN_SOCKET", world.admin_socket())
            .env("NVSIM_DIR", world.dir())
            .env("LD_LIBRARY_PATH", world.dir().join("lib"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it runs");
        // The reading end is closed before anything is written.
        drop(child.stdout.take());
        let mut said = String::new();
        child.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
        let status = child.wait().expect("it ends");
        assert!(status.success() && said.is_empty(), "{arguments:?}: {status} {said}");
    }
}

#[test]
fn a_watcher_whose_reader_has_gone_ends_though_nothing_happens() {
    for is_scheduler_there in [true, false] {
        let world = World::simulated(CARD);
        let mut scheduler = Some(Scheduler::start(&world, &[]));
        let mut watcher = Command::new(&Artifacts::get().ctl)
            .args(["watch", "--json", "--kept"])
            .env("NVSHARE_ADMIN_SOCKET", world.admin_socket())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it runs");
        let mut lines = BufReader::new(watcher.stdout.take().expect("a pipe")).lines();
        let mut next = || lines.next().expect("a line").expect("text");
        assert!(next().contains("started"));
        if !is_scheduler_there {
            scheduler.take().expect("it serves").kill();
            assert!(next().contains("lost"));
        }
        drop(lines);
        wait_until("it ends", || watcher.try_wait().expect("a child").is_some());
        assert!(watcher.wait().expect("it has ended").success(), "{is_scheduler_there}");
    }
}

#[test]
fn a_scheduler_whose_log_nobody_reads_serves() {
    let world = World::simulated(CARD);
    let mut scheduler = Scheduler::command(&world, &[]).stderr(Stdio::piped()).spawn().expect("it runs");
    drop(scheduler.stderr.take());
    wait_until("it serves", || UnixStream::connect(world.admin_socket()).is_ok());
    let job = Program::workload(&world, "job", "--memory 128MiB --block 64MiB --steps 2").start().finish();
    job.intact();
    assert!(Scheduler::status(&world).find(job.pid).is_some());
    assert!(scheduler.try_wait().expect("a child").is_none(), "it goes on");
    scheduler.kill().expect("a child");
    scheduler.wait().expect("a child");
}

#[test]
fn complaints_that_cannot_be_written_change_no_exit_code() {
    let artifacts = Artifacts::get();
    for program in [&artifacts.ctl, &artifacts.scheduler] {
        let mut child =
            Command::new(program).arg("--no-such-option").stderr(Stdio::piped()).spawn().expect("it runs");
        drop(child.stderr.take());
        assert_eq!(child.wait().expect("it ends").code(), Some(2), "{}", program.display());
    }
}
