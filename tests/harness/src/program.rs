//! Programs that use a GPU.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::{Artifacts, World, guest, patience, wait_until};

/// The workload's own report.
#[derive(Debug, Clone, Deserialize)]
pub struct Outcome {
    /// Passes over the workload's memory.
    pub steps: u32,
    /// Seconds until the workload was set up.
    pub setup_s: f64,
    /// Seconds from then until its work was done.
    pub seconds: f64,
    /// Seconds of its longest step.
    pub longest_s: f64,
    /// Words that were read back.
    pub words_checked: u64,
    /// Words that were wrong.
    pub wrong_words: u64,
    /// Times that every word was read back.
    pub full_checks: u64,
    /// The free bytes that `cuMemGetInfo` reported.
    pub free: u64,
    /// The total bytes that `cuMemGetInfo` reported.
    pub total: u64,
    /// Why the workload stopped.
    pub error: Option<String>,
}

/// A program to be started.
#[derive(Debug)]
pub struct Program {
    command: Command,
    name: String,
    dir: PathBuf,
    goes: bool,
}

impl Program {
    /// The workload, under nvshare, with arguments separated by blanks.
    #[must_use]
    pub fn workload(world: &World, name: &str, arguments: &str) -> Self {
        let mut command = Command::new(&Artifacts::get().workload);
        command.arg(name).args(arguments.split_whitespace());
        Self::of(world, name, command).preloaded()
    }

    /// A guest, under nvshare.
    #[must_use]
    pub fn guest(world: &World, name: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new(guest(name, false));
        command.args(arguments);
        Self::of(world, name, command).preloaded()
    }

    /// Any program, in a world; without nvshare unless it is [`preloaded`](Self::preloaded).
    #[must_use]
    pub fn of(world: &World, name: &str, mut command: Command) -> Self {
        command.envs(world.environment()).env("NVSHARE_LOG", "debug").stdin(Stdio::null());
        // The variable is for the tests, and the library would warn of an unknown name.
        command.env_remove("NVSHARE_TEST_PATIENCE");
        Self { command, name: name.to_owned(), dir: world.dir().to_owned(), goes: false }
    }

    /// Sets a variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Has the simulated driver hold up calls of a kind while a file is there.
    #[must_use]
    pub fn holds_up(self, calls: &str, file: impl AsRef<Path>) -> Self {
        self.env("NVSIM_HELD", &format!("{calls}:{}", file.as_ref().display()))
    }

    /// Runs the program under nvshare.
    #[must_use]
    pub fn preloaded(self) -> Self {
        self.env("LD_PRELOAD", &Artifacts::get().library.to_string_lossy())
    }

    /// Steps of the workload leave its `--still` and `--zeros` allocations as they are until [`World::wake`].
    #[must_use]
    pub fn until_woken(self) -> Self {
        let wake = self.dir.join("wake");
        self.env("WAKE", &wake.to_string_lossy())
    }

    /// Runs the program without nvshare.
    #[must_use]
    pub fn alone(mut self) -> Self {
        self.command.env_remove("LD_PRELOAD");
        self
    }

    /// The program waits for [`Running::go`] when it is set up.
    #[must_use]
    pub fn waits_for_go(mut self) -> Self {
        self.goes = true;
        let go = self.dir.join("go");
        self.command.env("GO", go);
        self
    }

    /// The program goes on until [`World::stop`], so that a test can wait for an event on a machine of any speed.
    #[must_use]
    pub fn until_told(mut self) -> Self {
        let stop = self.dir.join("stop");
        self.command.env("STOP", stop);
        self
    }

    /// Starts the program.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn start(mut self) -> Running {
        let (out, output) = self.create_file("out");
        let (log, errors) = self.create_file("log");
        self.command.stdout(output).stderr(errors);
        let child = self.command.spawn().expect("the program runs");
        Running { child, name: self.name, dir: self.dir, out, log }
    }

    /// A file of this program alone: other programs of its name can run beside it.
    fn create_file(&self, kind: &str) -> (PathBuf, File) {
        let mut path = self.dir.join(format!("{}.{kind}", self.name));
        let mut number = 1;
        loop {
            match File::create_new(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                    number += 1;
                    path = self.dir.join(format!("{}-{number}.{kind}", self.name));
                }
                created => return (path, created.expect("a file")),
            }
        }
    }
}

/// A program that was started.
#[derive(Debug)]
pub struct Running {
    child: Child,
    name: String,
    dir: PathBuf,
    out: PathBuf,
    log: PathBuf,
}

/// A program that has ended.
#[derive(Debug)]
pub struct Finished {
    /// The program's process.
    pub pid: u32,
    /// How the program ended.
    pub status: ExitStatus,
    /// The program's standard output.
    pub out: String,
    /// The log of the program and of the library.
    pub log: String,
    /// The workload's report, if it gave one.
    pub outcome: Option<Outcome>,
}

impl Running {
    /// The program's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The log of the program and of the library so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The program's output so far.
    #[must_use]
    pub fn out(&self) -> String {
        std::fs::read_to_string(&self.out).unwrap_or_default()
    }

    /// Whether the program still runs.
    #[must_use]
    pub fn lives(&self) -> bool {
        // SAFETY: a child of ours that was not waited for; it is looked at and left as it is.
        unsafe {
            let mut state: libc::siginfo_t = std::mem::zeroed();
            let how = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            libc::waitid(libc::P_PID, self.child.id(), &raw mut state, how) == 0 && state.si_pid() == 0
        }
    }

    /// The number of the program's threads of this name.
    ///
    /// # Panics
    /// When the system does not say.
    #[must_use]
    pub fn threads(&self, name: &str) -> usize {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("a process");
        // One of them may have ended by now.
        let name_of = |task: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
        };
        tasks.filter_map(name_of).filter(|comm| comm.trim() == name).count()
    }

    /// Whether the program is set up and waits.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.dir.join(format!("go.{}", self.name)).exists()
    }

    /// Whether the workload has changed the memory that it leaves as it is until [`World::wake`].
    #[must_use]
    pub fn is_awake(&self) -> bool {
        self.dir.join(format!("wake.{}", self.name)).exists()
    }

    /// Lets programs that wait in a world start together. Returns the time of the start, in nanoseconds of the monotonic
    /// clock.
    ///
    /// # Panics
    /// When they are not set up in time.
    pub fn go(programs: &[&Self]) -> u64 {
        for program in programs {
            wait_until(&format!("{} is set up: {}", program.name, program.log()), || program.is_ready());
        }
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: a place for the answer.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
        if let Some(program) = programs.first() {
            std::fs::write(program.dir.join("go"), "").expect("a file");
        }
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }

    /// Sends the program a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: a child of ours that was not waited for.
        unsafe { libc::kill(self.child.id().cast_signed(), signal) };
    }

    /// Waits for the program's end.
    ///
    /// # Panics
    /// When it takes too long.
    #[must_use]
    pub fn finish(self) -> Finished {
        self.finish_within(patience())
    }

    /// The same for a program that may take longer, or less.
    ///
    /// # Panics
    /// When it takes too long.
    #[must_use]
    pub fn finish_within(mut self, patience: Duration) -> Finished {
        let begin = Instant::now();
        let status = loop {
            match self.child.try_wait().expect("a child") {
                Some(status) => break status,
                None if begin.elapsed() > patience => {
                    panic!("{} does not end; its log ends with {}", self.name, tail(&self.log()));
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let out = std::fs::read_to_string(&self.out).unwrap_or_default();
        let outcome = out.lines().find_map(|line| serde_json::from_str(line).ok());
        Finished { pid: self.child.id(), status, log: self.log(), out, outcome }
    }
}

/// A test that fails leaves no process behind.
impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Finished {
    /// The program itself, which has ended well.
    ///
    /// # Panics
    /// When it has failed.
    pub fn passed(&self) -> &Self {
        assert!(self.status.success(), "{}: {}", self.status, self.log);
        self
    }

    /// The workload's report of a run in which all data was intact.
    ///
    /// # Panics
    /// When data was not intact, or there is no report.
    pub fn intact(&self) -> &Outcome {
        let outcome = self
            .outcome
            .as_ref()
            .unwrap_or_else(|| panic!("no account: {:?} {}", self.status, tail(&self.log)));
        assert_eq!(outcome.error, None, "{}", tail(&self.log));
        assert_eq!(outcome.wrong_words, 0, "of {}", outcome.words_checked);
        assert!(outcome.words_checked > 0);
        assert!(self.status.success());
        outcome
    }
}

fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}
