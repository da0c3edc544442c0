//! One run of one program, and its result.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::rng::Rng;
use crate::{RunOptions, watch};

use super::moods::{self, Mood};
use super::world::World;

/// A forbidden result of a run.
#[derive(Debug, Clone)]
pub(crate) struct Finding {
    /// One word or two: findings of one kind are taken for the same.
    pub(crate) kind: String,
    pub(crate) text: String,
    /// The seed, if a process ran several.
    pub(crate) seed: Option<u64>,
}

impl Finding {
    /// Whether the driver refused an allocation of a program without a scheduler, as it does when other programs have
    /// filled the card.
    pub(crate) fn is_refused_alone(&self) -> bool {
        let refused = self.kind.starts_with("failed cuMem") && self.text.contains(" returned 2, expected 0");
        refused && self.text.contains("no scheduler at ")
    }

    /// Whether an allocation was refused since other programs keep their memory on the card.
    pub(crate) fn is_refused_beside_others(&self) -> bool {
        let refused = self.kind.starts_with("failed cuMem") && self.text.contains(" returned 2, expected 0");
        refused && self.text.contains("other programs keep their memory on the GPU")
    }

    /// Whether the program ended because its card was lost, as it must.
    pub(crate) fn is_loss(&self) -> bool {
        self.kind == LOSS
    }
}

/// The kind of the end of a program whose card was lost.
const LOSS: &str = "the card was lost";
/// A card is lost in this time, in milliseconds: about as long as a program takes.
const LOST_WITHIN: u64 = 1500;

/// Answers of calls on a lost card, where the program expects something else.
const SAID_OF_LOST: [&str; 2] = [" returned 214, expected 0", "CudaError(214, "];

/// Processes that run now, so that some can be stopped.
#[derive(Debug, Default)]
pub(crate) struct Running(Mutex<Vec<u32>>);

impl Running {
    pub(crate) fn signal_one(&self, random: usize, signal: i32) -> Option<u32> {
        let running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let pid = *running.get(random.checked_rem(running.len())?)?;
        // SAFETY: a child of ours that was not waited for: it is struck off under this lock first.
        unsafe { libc::kill(pid.cast_signed(), signal) };
        Some(pid)
    }

    /// Signals a process if it still runs; whether it did.
    pub(crate) fn signal(&self, pid: u32, signal: i32) -> bool {
        let running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as above.
        running.contains(&pid) && unsafe { libc::kill(pid.cast_signed(), signal) } == 0
    }
}

/// The program of a recipe, as a command.
pub(crate) fn command(world: &World, options: &RunOptions, caps: &str) -> Command {
    tell(world.program("run"), world, options, caps)
}

/// Tells a program its recipe.
fn tell(mut command: Command, world: &World, options: &RunOptions, caps: &str) -> Command {
    command
        .args([
            "--seed",
            &options.seed.to_string(),
            "--count",
            &options.count.to_string(),
            "--steps",
            &options.steps.to_string(),
        ])
        .args(["--threads", &options.threads.to_string(), "--memory", &options.memory.to_string()])
        .args(["--caps", caps]);
    if options.shared {
        command.arg("--shared");
    }
    if let Some(mood) = mood(world, options).filter(|mood| mood.is_native()) {
        command.env(mood.setting.0, mood.setting.1);
    }
    if !options.skip.is_empty() {
        let skip: Vec<String> = options.skip.iter().map(usize::to_string).collect();
        command.args(["--skip", &skip.join(",")]);
    }
    if !options.without.is_empty() {
        command.args(["--without", &options.without.join(",")]);
    }
    command
}

/// The program of a recipe, under the library, as a command.
pub(crate) fn under(world: &World, options: &RunOptions, caps: &str, log: &str) -> Command {
    let mut command = tell(world.client("run", options.seed), world, options, caps);
    command.env("NVSHARE_LOG", log);
    if let Some(mood) = mood(world, options).filter(|mood| mood.is_slow()) {
        command.env(mood.setting.0, mood.setting.1);
    }
    // Each program is a tenant of its own, so that its limits are its own.
    command.env("NVSHARE_RUN", next_tenant().to_string());
    if let Some(limit) = options.limited {
        command.args(["--limited", &limit.to_string()]).env("NVSHARE_MEM_LIMIT", limit.to_string());
    }
    command
}

/// The simulated driver's mood for a program.
pub(super) fn mood(world: &World, options: &RunOptions) -> Option<&'static Mood> {
    moods::of(options.seed).filter(|_| world.parts.simulator.is_some())
}

fn next_tenant() -> u64 {
    static LAST: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    LAST.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// Runs the programs of one process to their end; returns the time, or a finding. `patience` is how
/// long nothing may go on: see [`watch`]. `turns`: whose scheduler the programs wait for; a hang says what it knows of them.
pub(crate) fn trial(
    mut command: Command,
    programs: &RunOptions,
    log: &Path,
    patience: Duration,
    running: &Running,
    turns: Option<&World>,
) -> Result<Duration, Finding> {
    let other = |text: String| Finding { kind: "not run".to_owned(), text, seed: None };
    let out = log.with_extension("out");
    let file =
        |path: &Path| File::create(path).map_err(|error| other(format!("{}: {error}", path.display())));
    command.stdout(file(&out)?).stderr(file(log)?);
    let loses = turns.and_then(|world| mood(world, programs)).filter(|mood| mood.is_loss());
    let mut loss = loses.map(|mood| {
        let place = log.with_extension("lost");
        let _ = std::fs::remove_file(&place);
        command.env(mood.setting.0, &place);
        (place, Duration::from_millis(Rng::part(programs.seed, 0x1057).range(0, LOST_WITHIN)))
    });
    let begin = Instant::now();
    let mut child = command.spawn().map_err(|error| other(error.to_string()))?;
    running.0.lock().unwrap_or_else(PoisonError::into_inner).push(child.id());
    let (mut stacks, mut on_lost_card) = (None, None);
    let (mut length, mut progress) = (0, begin);
    let status = loop {
        {
            let mut list = running.0.lock().unwrap_or_else(PoisonError::into_inner);
            match child.try_wait() {
                Ok(Some(status)) => {
                    list.retain(|&pid| pid != child.id());
                    break status;
                }
                Ok(None) => {}
                Err(error) => return Err(other(error.to_string())),
            }
        }
        if let Some((place, _)) = loss.take_if(|(_, after)| begin.elapsed() > *after) {
            on_lost_card = turns.map(World::lose_card);
            File::create(place).map_err(|error| other(error.to_string()))?;
        }
        if super::INTERRUPTED.load(std::sync::atomic::Ordering::SeqCst) {
            let _ = child.kill();
        }
        let now = out.metadata().map_or(0, |out| out.len());
        if now != std::mem::replace(&mut length, now) {
            progress = Instant::now();
        }
        if stacks.is_none() && progress.elapsed() > patience {
            running.signal(child.id(), libc::SIGCONT);
            ask_where(&child, &out, length);
            let known = turns.map(World::what_the_scheduler_knows).unwrap_or_default();
            stacks = Some(format!("\n{known}\n{}", stacks_of(&child)));
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    drop(on_lost_card);
    let took = begin.elapsed();
    let said = std::fs::read_to_string(&out).unwrap_or_default();
    let logged = std::fs::read_to_string(log).unwrap_or_default();
    let told = || format!("{}{}", tail(&said, 25), tail(&logged, 25));
    let finding = |kind: String, text: String| Finding { kind, text, seed: last_seed(&said) };
    if let Some(stacks) = stacks {
        let text = format!("nothing went on for {:.0} s\n{}{stacks}", patience.as_secs_f64(), told());
        return Err(finding("hang".to_owned(), text));
    }
    if let Some(signal) = status.signal() {
        // The simulated driver logs the call before it stops the process.
        let last = logged.lines().rev().find_map(|line| line.split_once("nvsim: "));
        let kind = last.map_or_else(
            || format!("signal {signal}"),
            |(_, said)| said.split(' ').filter(|word| !word.starts_with("0x")).collect::<Vec<_>>().join(" "),
        );
        return Err(finding(kind, told()));
    }
    if said.contains("HANG") {
        return Err(finding("hang".to_owned(), told()));
    }
    if !status.success() || said.matches("words as expected").count() as u64 != programs.count {
        let first = said.lines().find(|line| line.contains(" step ")).unwrap_or_default();
        let is_loss =
            loses.is_some() && loss.is_none() && SAID_OF_LOST.iter().any(|said| first.contains(said));
        let kind = if is_loss {
            LOSS.to_owned()
        } else if first.contains("words are wrong") {
            "wrong data".to_owned()
        } else if first.contains("first to touch") {
            "memory was not populated".to_owned()
        } else {
            let call = first.split(' ').find(|word| word.starts_with("cu"));
            format!("failed {}", call.unwrap_or("elsewhere"))
        };
        return Err(finding(kind, format!("{status}\n{}", told())));
    }
    Ok(took)
}

/// Has a process say where its threads are, which it does if it can.
fn ask_where(child: &Child, out: &Path, length: u64) {
    // SAFETY: a child of ours that was not waited for.
    unsafe { libc::kill(child.id().cast_signed(), watch::SIGNAL) };
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(2) && out.metadata().map_or(0, |out| out.len()) == length {
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_millis(50));
}

/// The seed that a process has named last.
fn last_seed(said: &str) -> Option<u64> {
    let named = |line: &str| {
        let rest = line.strip_prefix("storm: seed ")?;
        rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    said.lines().rev().find_map(named)
}

/// Where each thread of a process is: in the kernel, as far as that can be seen, and in the program, if there is a debugger.
fn stacks_of(child: &Child) -> String {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).into_iter().flatten().flatten();
    let in_kernel = tasks.map(|task| {
        let read = |what: &str| std::fs::read_to_string(task.path().join(what)).unwrap_or_default();
        format!("{} {} {}\n{}", task.file_name().display(), read("comm").trim(), read("wchan"), read("stack"))
    });
    let in_kernel: String = in_kernel.collect();
    let gdb = Command::new("timeout")
        .args([
            "--kill-after=5",
            "20",
            "gdb",
            "-p",
            &child.id().to_string(),
            "-batch",
            "-ex",
            "thread apply all bt 12",
        ])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    let text = gdb.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let useful = |line: &&str| line.starts_with("Thread ") || line.starts_with('#');
    format!("{in_kernel}{}", text.lines().filter(useful).collect::<Vec<_>>().join("\n"))
}

pub(crate) fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
