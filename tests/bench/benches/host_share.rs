//! The host's share: CPU time of the scheduler, and of the library's own threads in its clients, on two cores.
//!
//! One case has clients that hold memory and do nothing, the other clients that take turns on one GPU: half of them launch ahead of
//! their work, and the others wait for each kernel. Memory stays where it is, since moving it costs by the byte (`moves`). The
//! programs and the simulated driver are told apart by their threads' names, and do not count. The work of the library in
//! the programs' own threads is estimated from the number of launches.
//!
//! `cargo bench -p nvshare-bench --bench host_share`

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nvshare_harness::{Program, Running, Scheduler, World, guest};

/// The library's time in a launch while another client waits (`docs/benchmarks.md`, "Calls of the library").
const LAUNCH: Duration = Duration::from_nanos(5);

/// The time and wake-ups that a thread, or several, took from the host.
#[derive(Debug, Clone, Copy, Default)]
struct Taken {
    time: Duration,
    /// Times that a thread went to sleep by itself, and was woken.
    wakes: u64,
}

impl Taken {
    fn add(&mut self, other: Self) {
        self.time += other.time;
        self.wakes += other.wakes;
    }
}

/// A thread of the kernel's number, by its name. A thread that ends meanwhile is not seen.
type Threads = BTreeMap<u32, (String, Taken)>;

/// The times that each thread of a process has taken since it began; none where it has just ended.
fn threads(pid: u32) -> Threads {
    let of = |task: &Path| {
        let read = |name| fs::read_to_string(task.join(name)).ok();
        let nanos = read("schedstat")?.split(' ').next()?.parse().ok()?;
        let status = read("status")?;
        let wakes = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        let taken = Taken { time: Duration::from_nanos(nanos), wakes: wakes.trim().parse().ok()? };
        Some((task.file_name()?.to_str()?.parse().ok()?, (read("comm")?.trim().to_owned(), taken)))
    };
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process lives").flatten();
    tasks.filter_map(|task| of(&task.path())).collect()
}

/// Whose the time of a thread is.
fn part_of(name: &str, is_scheduler: bool) -> &str {
    match name {
        _ if is_scheduler => "scheduler",
        name if name.starts_with("nvshare-") => name,
        _ => PROGRAMS,
    }
}

/// The part that does not count.
const PROGRAMS: &str = "(programs, driver)";

/// The time that each part takes meanwhile.
fn measure(scheduler: &Scheduler, programs: &[Running], time: Duration) -> BTreeMap<String, Taken> {
    let pids = || programs.iter().map(Running::pid).chain([scheduler.pid()]);
    let before: Vec<Threads> = pids().map(threads).collect();
    std::thread::sleep(time);
    let mut parts: BTreeMap<String, Taken> = BTreeMap::new();
    for (pid, before) in pids().zip(before) {
        for (thread, (name, after)) in threads(pid) {
            let before = before.get(&thread).map_or_else(Taken::default, |(_, taken)| *taken);
            let part = parts.entry(part_of(&name, pid == scheduler.pid()).to_owned()).or_default();
            part.add(Taken { time: after.time - before.time, wakes: after.wakes - before.wakes });
        }
    }
    parts
}

/// Launches and turns of all programs so far.
fn done(world: &World) -> (u64, u64) {
    let clients = Scheduler::status(world).clients;
    let counters = || clients.iter().map(|client| client.counters);
    (counters().map(|counters| counters.gated).sum(), counters().map(|counters| counters.hand_overs).sum())
}

fn case(title: &str, arguments: &[&str], kinds: &[&str], count: usize, time: Duration) {
    let world = World::simulated(&[]);
    let scheduler = Scheduler::start(&world, &[arguments, &["--log", "info"]].concat());
    let start = |number: usize| {
        let mut command = Command::new(guest("host_share", false));
        command.arg(kinds[number % kinds.len()]);
        Program::of(&world, &number.to_string(), command).preloaded().env("NVSHARE_LOG", "warn").start()
    };
    let programs: Vec<Running> = (0..count).map(start).collect();
    Scheduler::until(&world, "all programs are there", |status| {
        let is_there =
            |program: &Running| status.find(program.pid()).is_some_and(|client| !client.usage.is_empty());
        programs.iter().all(is_there)
    });
    // Until each is measured, the scheduler asks NVML more often.
    std::thread::sleep(time / 4);
    let (begin, (launches, turns)) = (Instant::now(), done(&world));
    let parts = measure(&scheduler, &programs, time);
    let (launches_after, turns_after) = done(&world);
    let a_second = |count: u64| count as f64 / begin.elapsed().as_secs_f64();
    let (launches, turns) = (a_second(launches_after - launches), a_second(turns_after - turns));
    println!("{count} {title}: {launches:.0} launches and {turns:.1} hand-overs a second");
    let row = |part: &str, taken: Taken| {
        let seconds = time.as_secs_f64();
        let percent = taken.time.as_secs_f64() / seconds * 100.0;
        println!("  {part:<20} {percent:>8.3} {:>10.1}", taken.wakes as f64 / seconds);
    };
    let mut all = Taken::default();
    for (part, &taken) in parts.iter().filter(|(part, _)| *part != PROGRAMS) {
        row(part, taken);
        all.add(taken);
    }
    row("in all", all);
    row(PROGRAMS, parts.get(PROGRAMS).copied().unwrap_or_default());
    println!("  {:<20} {:>8.3}", "(hooks, estimated)", launches * LAUNCH.as_secs_f64() * 100.0);
}

/// Keeps this process, and all that it starts, on the first two of its cores.
fn stay_on_two_cores() {
    // SAFETY: sets of processors are plain memory; the calls fill it and read it.
    unsafe {
        let mut all: libc::cpu_set_t = std::mem::zeroed();
        let mut two: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(0, size_of_val(&all), &raw mut all), 0);
        let cores = (0..libc::CPU_SETSIZE as usize).filter(|&core| libc::CPU_ISSET(core, &all));
        cores.take(2).for_each(|core| libc::CPU_SET(core, &mut two));
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&two), &raw const two), 0);
    }
}

fn main() {
    // Under `--test` it only has to run. The name of a case chooses it.
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let tests = arguments.iter().any(|argument| argument == "--test");
    let is_chosen =
        |case: &str| arguments.iter().all(|argument| argument.starts_with('-') || argument == case);
    let (idle, busy, seconds) = if tests { (8, 4, 1) } else { (1000, 64, 30) };
    let time = Duration::from_secs(seconds);
    stay_on_two_cores();
    println!("  {:<20} {:>8} {:>10}", "", "% a core", "wakes/s");
    if is_chosen("idle") {
        case("idle", &[], &["idle"], idle, time);
    }
    if is_chosen("busy") {
        case("busy", &["--exclusive", "--tq", "1"], &["ahead", "waits"], busy, time);
    }
}
