//! Programs that use a GPU.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::{Artifacts, World, patience, wait_until};

/// The workload's own account.
#[derive(Debug, Clone, Deserialize)]
pub struct Outcome {
    /// Passes over its memory.
    pub steps: u32,
    /// Until it was set up.
    pub setup_s: f64,
    /// From then until its work was done.
    pub seconds: f64,
    /// Its longest step.
    pub longest_s: f64,
    /// Words that were read back.
    pub words_checked: u64,
    /// Those that were not what they must be.
    pub wrong_words: u64,
    /// What `cuMemGetInfo` said.
    pub free: u64,
    /// What `cuMemGetInfo` said.
    pub total: u64,
    /// Why it stopped.
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
        let artifacts = Artifacts::get();
        let mut command = Command::new(&artifacts.workload);
        command.arg(name).args(arguments.split_whitespace());
        Self::of(world, name, command).env("LD_PRELOAD", &artifacts.library.to_string_lossy())
    }

    /// Any program, in a world; not under nvshare unless it is told to be.
    #[must_use]
    pub fn of(world: &World, name: &str, mut command: Command) -> Self {
        command.envs(world.environment()).env("NVSHARE_LOG", "debug").stdin(Stdio::null());
        // It is for the tests, and the library would name it as one that it does not know.
        command.env_remove("NVSHARE_TEST_PATIENCE");
        Self { command, name: name.to_owned(), dir: world.dir().to_owned(), goes: false }
    }

    /// Sets a variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Without nvshare.
    #[must_use]
    pub fn alone(mut self) -> Self {
        self.command.env_remove("LD_PRELOAD");
        self
    }

    /// It waits for [`Running::go`] when it is set up.
    #[must_use]
    pub fn waits_for_go(mut self) -> Self {
        self.goes = true;
        let go = self.dir.join("go");
        self.command.env("GO", go);
        self
    }

    /// It goes on until [`World::stop`]: what a test waits for comes sooner or later, on any machine.
    #[must_use]
    pub fn until_told(mut self) -> Self {
        let stop = self.dir.join("stop");
        self.command.env("STOP", stop);
        self
    }

    /// Starts it.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn start(mut self) -> Running {
        let out = self.dir.join(format!("{}.out", self.name));
        let log = self.dir.join(format!("{}.log", self.name));
        self.command.stdout(File::create(&out).expect("a file")).stderr(File::create(&log).expect("a file"));
        let child = self.command.spawn().expect("the program runs");
        Running { child, name: self.name, dir: self.dir, out, log }
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
    /// Its process.
    pub pid: u32,
    /// How it ended.
    pub status: ExitStatus,
    /// What it printed.
    pub out: String,
    /// What it and the library logged.
    pub log: String,
    /// The workload's account, if it gave one.
    pub outcome: Option<Outcome>,
}

impl Running {
    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it and the library have logged so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// What it has printed so far.
    #[must_use]
    pub fn out(&self) -> String {
        std::fs::read_to_string(&self.out).unwrap_or_default()
    }

    /// Whether it still runs.
    #[must_use]
    pub fn lives(&self) -> bool {
        // SAFETY: a child of ours that was not waited for; it is looked at and left as it is.
        unsafe {
            let mut state: libc::siginfo_t = std::mem::zeroed();
            let how = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            libc::waitid(libc::P_PID, self.child.id(), &raw mut state, how) == 0 && state.si_pid() == 0
        }
    }

    /// Whether it is set up and waits.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.dir.join(format!("go.{}", self.name)).exists()
    }

    /// Lets all that wait in a world start together; when that was, in nanoseconds of the monotonic clock.
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

    /// Sends it a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: a child of ours that was not waited for.
        unsafe { libc::kill(self.child.id().cast_signed(), signal) };
    }

    /// Waits for its end.
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

/// A test that failed leaves nobody behind.
impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Finished {
    /// The workload's account of a run in which all data was intact.
    ///
    /// # Panics
    /// When it was not, or there is none.
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
