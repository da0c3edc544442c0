//! A running scheduler, and the answers of its command line.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

use nvshare_proto::{ClientStatus, GpuStatus, SchedulerStatus, SeatStatus};
use serde::Deserialize;

use crate::{Artifacts, Running, World, patience, wait_until};

/// The output of `nvshare-ctl status --json`.
#[derive(Debug, Clone, Deserialize)]
pub struct Status {
    /// The scheduler.
    pub scheduler: SchedulerStatus,
    /// The GPUs in use.
    pub gpus: Vec<GpuStatus>,
    /// The clients, and the last few that are gone.
    pub clients: Vec<ClientStatus>,
    /// The seats.
    pub seats: Vec<SeatStatus>,
    /// The kinds of memory.
    pub memory: nvshare_proto::MemoryStatus,
}

impl Status {
    /// The client of a process, if there is one.
    #[must_use]
    pub fn find(&self, pid: u32) -> Option<&ClientStatus> {
        self.clients.iter().rev().find(|client| client.pid == pid)
    }

    /// The client of a process.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn client(&self, pid: u32) -> &ClientStatus {
        self.find(pid).unwrap_or_else(|| panic!("no client {pid} in {self:?}"))
    }
}

/// A scheduler that runs until it is dropped.
#[derive(Debug)]
pub struct Scheduler {
    child: Child,
    log: PathBuf,
}

impl Scheduler {
    /// Starts a scheduler in a world, with arguments of its own, and waits until it serves.
    ///
    /// # Panics
    /// When it does not.
    #[must_use]
    pub fn start(world: &World, arguments: &[&str]) -> Self {
        Self::start_by(world, Self::command(world, arguments))
    }

    /// The same by a [command](Self::command) that a test has changed.
    ///
    /// # Panics
    /// As [`Scheduler::start`].
    #[must_use]
    pub fn start_by(world: &World, mut command: Command) -> Self {
        let log = world.dir().join("scheduler.log");
        let file = File::options().create(true).append(true).open(&log).expect("a log");
        let child = command.stdin(Stdio::null()).stderr(file).spawn().expect("the scheduler runs");
        let mut scheduler = Self { child, log };
        wait_until("the scheduler serves", || {
            let ended = scheduler.child.try_wait().expect("a child");
            assert!(ended.is_none(), "the scheduler ended: {}", scheduler.log());
            std::os::unix::net::UnixStream::connect(world.admin_socket()).is_ok()
        });
        scheduler
    }

    /// The command that starts a scheduler.
    #[must_use]
    pub fn command(world: &World, arguments: &[&str]) -> Command {
        let mut command = Command::new(&Artifacts::get().scheduler);
        if !arguments.contains(&"--log") {
            command.args(["--log", "debug"]);
        }
        command.args(arguments).envs(world.environment()).stdin(Stdio::null());
        command
    }

    /// The scheduler's log so far.
    ///
    /// # Panics
    /// When the log cannot be read.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).expect("a log")
    }

    /// Waits until the log contains a text. A thread of its own writes the log, so an answer of the scheduler may come before the line.
    ///
    /// # Panics
    /// When the log does not come to contain it.
    pub fn wait_for_log(&self, text: &str) {
        wait_until(&format!("the scheduler's log says {text:?}"), || self.log().contains(text));
    }

    /// The scheduler's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends the scheduler a signal.
    ///
    /// # Panics
    /// When the system does not let us.
    pub fn signal(&self, signal: i32) {
        // SAFETY: a child of ours that was not waited for.
        assert_eq!(unsafe { libc::kill(self.pid().cast_signed(), signal) }, 0);
    }

    /// Whether the scheduler still runs.
    ///
    /// # Panics
    /// When the system does not say.
    pub fn lives(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    /// Ends the scheduler without a chance to clean up.
    ///
    /// # Panics
    /// When the system does not let us.
    pub fn kill(mut self) {
        self.child.kill().expect("a child");
        self.child.wait().expect("a child");
    }

    /// Runs `nvshare-ctl`; again, as long as the scheduler does not answer it in time.
    ///
    /// # Panics
    /// When it cannot be run.
    #[must_use]
    pub fn ctl(world: &World, arguments: &[&str]) -> Output {
        let begin = Instant::now();
        loop {
            let output = Self::ctl_once(world, arguments);
            let is_late = String::from_utf8_lossy(&output.stderr).contains("does not answer within");
            if !is_late || begin.elapsed() > patience() {
                return output;
            }
        }
    }

    /// Runs `nvshare-ctl`, whatever comes of it.
    ///
    /// # Panics
    /// When it cannot be run.
    #[must_use]
    pub fn ctl_once(world: &World, arguments: &[&str]) -> Output {
        Command::new(&Artifacts::get().ctl)
            .args(arguments)
            .envs(world.environment())
            .output()
            .expect("nvshare-ctl runs")
    }

    /// `nvshare-ctl status --json`
    ///
    /// # Panics
    /// When it fails.
    #[must_use]
    pub fn status(world: &World) -> Status {
        let output = Self::ctl(world, &["status", "--json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).expect("status is JSON")
    }

    /// Waits until programs have taken `turns` turns each, or until one of them has ended: its own check then says why.
    ///
    /// # Panics
    /// When they take none.
    pub fn until_turns(world: &World, programs: &[&Running], turns: u64) {
        Self::until(world, "turns are taken", |status| {
            let took = |program: &&Running| {
                status.find(program.pid()).is_some_and(|client| client.counters.hand_overs >= turns)
            };
            programs.iter().all(took) || programs.iter().any(|program| !program.lives())
        });
    }

    /// Waits until each program has begun this many more turns, if all live on.
    ///
    /// # Panics
    /// As [`Self::until`].
    pub fn until_more_turns(world: &World, programs: &[&Running], more: u64) {
        let status = Self::status(world);
        let took = |program: &&Running| status.find(program.pid()).map(|client| client.counters.hand_overs);
        let so_far = programs.iter().filter_map(took).max().unwrap_or(0);
        Self::until_turns(world, programs, so_far + more);
    }

    /// Waits for a condition on `status`.
    ///
    /// # Panics
    /// When the condition does not become true.
    pub fn until(world: &World, what: &str, mut is_so: impl FnMut(&Status) -> bool) {
        wait_until(what, || is_so(&Self::status(world)));
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        // SAFETY: a child of ours that was not waited for.
        unsafe { libc::kill(self.child.id().cast_signed(), libc::SIGTERM) };
        let _ = self.child.wait();
    }
}
