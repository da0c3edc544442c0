//! The world in which programs run: a folder with simulated cards, a scheduler, and its log.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nvshare_admin::Scheduler;
use nvshare_harness::Status;
use nvshare_proto::AdminRequest;

use super::parts::Parts;

/// Bytes that moved on simulated cards and should not have.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Moved {
    /// Brought to the card because a kernel touched them.
    pub(crate) faulted: u64,
    /// Pushed out because the card was full.
    pub(crate) pushed_out: u64,
    /// Ordered to leave while a kernel of their process ran.
    pub(crate) in_use: u64,
}

impl Moved {
    /// The bytes that were added since.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            faulted: self.faulted.saturating_sub(before.faulted),
            pushed_out: self.pushed_out.saturating_sub(before.pushed_out),
            in_use: self.in_use.saturating_sub(before.in_use),
        }
    }
}

impl std::iter::Sum for Moved {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            faulted: sum.faulted + one.faulted,
            pushed_out: sum.pushed_out + one.pushed_out,
            in_use: sum.in_use + one.in_use,
        })
    }
}

impl fmt::Display for Moved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { faulted, pushed_out, in_use } = self;
        let kib = |bytes: &u64| bytes >> 10;
        write!(
            f,
            "{} KiB came by faults, {} KiB were pushed out, {} KiB left while they were in use",
            kib(faulted),
            kib(pushed_out),
            kib(in_use)
        )
    }
}

/// Lines that the library logs when the scheduler does not answer in time, or not at all. The program runs alone then, or will soon.
const ALONE: [&str; 3] = [
    "connection to the scheduler lost",
    "does not answer; the program waits",
    "the program runs as if alone",
];

/// How often a log says that its program runs without the scheduler.
pub(crate) fn said_alone(log: &str) -> usize {
    log.lines().filter(|line| ALONE.iter().any(|alone| line.contains(alone))).count()
}

/// A folder, and cards in it unless they are real.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) dir: PathBuf,
    pub(crate) parts: Parts,
    memory: u64,
    /// Programs have both kinds of memory, by their seeds.
    mixed: bool,
    scheduler: Mutex<Option<Child>>,
    /// Turns that earlier schedulers have counted, and the last count of the present one.
    turns: Mutex<(u64, u64)>,
    /// Programs that run on though their card is lost. Their memory cannot leave it.
    on_lost_cards: AtomicUsize,
}

/// A program whose card is lost, while it runs.
#[derive(Debug)]
pub(crate) struct OnLostCard<'a>(&'a World);

impl Drop for OnLostCard<'_> {
    fn drop(&mut self) {
        self.0.on_lost_cards.fetch_sub(1, Ordering::SeqCst);
    }
}

impl World {
    pub(crate) fn new(parts: &Parts, name: &str, memory: u64, mixed: bool) -> Result<Self, String> {
        let memory_folder = Path::new("/dev/shm");
        let base = if memory_folder.is_dir() { memory_folder.to_owned() } else { std::env::temp_dir() };
        let dir = base.join(format!("nvshare-storm-{}-{name}", std::process::id()));
        let text = |error: std::io::Error| format!("{}: {error}", dir.display());
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(dir.join("lib")).map_err(text)?;
        if let Some(simulator) = &parts.simulator {
            symlink(simulator, dir.join("lib/libcuda.so.1")).map_err(text)?;
        }
        let parts = parts.clone();
        Ok(Self {
            dir,
            parts,
            memory,
            mixed,
            scheduler: Mutex::default(),
            turns: Mutex::default(),
            on_lost_cards: AtomicUsize::new(0),
        })
    }

    /// A program of this binary, in this world.
    pub(crate) fn program(&self, mode: &str) -> Command {
        let mut command = Command::new(&self.parts.storm);
        command.arg(mode).stdin(Stdio::null());
        self.furnish(&mut command);
        command
    }

    /// A program of this binary under the library, in this world. `seed` says which kind of memory it has where both are mixed.
    pub(crate) fn client(&self, mode: &str, seed: u64) -> Command {
        let mut command = self.program(mode);
        command.env("LD_PRELOAD", &self.parts.library).env("NVSHARE_SLEEP", "1");
        if self.mixed {
            // The seed's remainder by eight is the driver's mood.
            command.env("NVSHARE_MEMORY", if (seed / 8).is_multiple_of(2) { "managed" } else { "swap" });
        }
        command
    }

    fn furnish(&self, command: &mut Command) {
        command
            .env("NVSHARE_SOCKET", self.dir.join("scheduler.sock"))
            .env("NVSHARE_ADMIN_SOCKET", self.dir.join("admin.sock"));
        if self.parts.simulator.is_some() {
            command
                .env("NVSIM_DIR", &self.dir)
                .env("LD_LIBRARY_PATH", self.dir.join("lib"))
                .env("NVSIM_GPUS", "2")
                // Each small allocation takes a whole block of a simulated card and is charged its own size: the card
                // has room for the difference, so that bytes that it pushes out come from memory that nobody charged.
                .env("NVSIM_MEMORY", (self.memory / 2 * 3).to_string())
                // Small stores and fast links: tests need to know when memory moves, not how long that takes.
                .env("NVSIM_SCALE", "512")
                // Addresses of ended handles come again at once, as with malloc.
                .env("NVSIM_REUSE_HANDLES", "1")
                .env("NVSIM_BACKTRACE", "1")
                .env("NVSIM_TO_DEVICE", "48")
                .env("NVSIM_TO_HOST", "24")
                .env("NVSIM_FAULT", "8")
                .env("NVSIM_FIRST_TOUCH", "100")
                // Frames that managed memory gives up are not free for memory of the other kind.
                .env("NVSIM_KEEPS_PAGES", if self.mixed { "1" } else { "0" });
        }
    }

    /// Starts a scheduler, and waits until it serves.
    pub(crate) fn start_scheduler(&self, tq: f64) -> Result<(), String> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.dir.join("scheduler.log"))
            .map_err(|error| error.to_string())?;
        let mut command = Command::new(&self.parts.scheduler);
        self.furnish(&mut command);
        command
            .args(["--log", "info", "--tq", &format!("{tq:.3}"), "--gpu-memory", &self.memory.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let child = command.spawn().map_err(|error| format!("the scheduler: {error}"))?;
        *self.scheduler.lock().unwrap_or_else(PoisonError::into_inner) = Some(child);
        let begin = Instant::now();
        while std::os::unix::net::UnixStream::connect(self.dir.join("admin.sock")).is_err() {
            if begin.elapsed() > Duration::from_secs(300) {
                return Err("the scheduler does not serve".to_owned());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Ends the scheduler without a chance to clean up.
    pub(crate) fn kill_scheduler(&self) {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        *turns = (turns.0 + turns.1, 0);
        drop(turns);
        if let Some(mut child) = self.scheduler.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Whether the scheduler has ended by itself, which it must not.
    pub(crate) fn scheduler_died(&self) -> bool {
        let mut scheduler = self.scheduler.lock().unwrap_or_else(PoisonError::into_inner);
        scheduler.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(Some(_))))
    }

    /// The scheduler's status, if it answers.
    pub(crate) fn status(&self) -> Option<Status> {
        serde_json::from_str(&self.ctl(&["status", "--json"])?).ok()
    }

    /// The scheduler's status, its last events, and the end of its log.
    pub(crate) fn what_the_scheduler_knows(&self) -> String {
        let told = |arguments: &[&str]| {
            self.ctl(arguments).unwrap_or_else(|| format!("no answer to {arguments:?}\n"))
        };
        let events = told(&["watch", "--kept", "--no-follow"]);
        let log = std::fs::read_to_string(self.dir.join("scheduler.log")).unwrap_or_default();
        format!("{}{}\n{}", told(&["status"]), super::trial::tail(&events, 40), super::trial::tail(&log, 25))
    }

    /// Switches scheduling off; whether that was done. Together the programs have more than the card, and page faults move the
    /// rest. Of memory that the library maps nothing comes by faults: where that does not fit it stays on.
    pub(crate) fn switch_off(&self) -> bool {
        let is_swap = std::env::var_os("NVSHARE_MEMORY").is_some_and(|memory| memory == "swap");
        let force = !is_swap && !self.mixed;
        self.administrator().change(AdminRequest::Off { force }).is_ok()
    }

    /// The administrator's connection to the scheduler.
    pub(crate) fn administrator(&self) -> Scheduler {
        Scheduler::at(self.dir.join("admin.sock"))
    }

    pub(crate) fn ctl(&self, arguments: &[&str]) -> Option<String> {
        let mut command = Command::new(&self.parts.ctl);
        self.furnish(&mut command);
        let output = command.args(arguments).stdin(Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Counts the turns on all cards so far; returns the sum over all schedulers.
    pub(crate) fn count_turns(&self) -> u64 {
        let now: u64 = self.status().iter().flat_map(|status| &status.gpus).map(|gpu| gpu.turns).sum();
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.1 = turns.1.max(now);
        turns.0 + turns.1
    }

    /// How often programs of this world have said that they run without the scheduler, in the logs whose names begin so.
    pub(crate) fn said_alone(&self, logs: &str) -> usize {
        let is_log = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(logs) && name.ends_with(".log")
        };
        let all = std::fs::read_dir(&self.dir).into_iter().flatten().flatten().map(|entry| entry.path());
        all.filter(is_log).map(|log| said_alone(&std::fs::read_to_string(log).unwrap_or_default())).sum()
    }

    /// The card of a program is lost from now on, until this is dropped.
    pub(crate) fn lose_card(&self) -> OnLostCard<'_> {
        self.on_lost_cards.fetch_add(1, Ordering::SeqCst);
        OnLostCard(self)
    }

    /// Whether a program runs whose card is lost.
    pub(crate) fn has_lost_card(&self) -> bool {
        self.on_lost_cards.load(Ordering::SeqCst) > 0
    }

    /// Bytes that moved on the simulated cards without an order, or while in use.
    ///
    /// # Errors
    /// The cards could not be looked at.
    pub(crate) fn moved_by_itself(&self) -> Result<Moved, String> {
        if self.parts.simulator.is_none() {
            return Ok(Moved::default());
        }
        let output = self.program("observe").output().map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&output.stdout);
        let numbers: Vec<u64> = text.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        match numbers[..] {
            [faulted, pushed_out, in_use, ..] => Ok(Moved { faulted, pushed_out, in_use }),
            _ => Err(format!("{}: {text}{}", output.status, String::from_utf8_lossy(&output.stderr))),
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.kill_scheduler();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
