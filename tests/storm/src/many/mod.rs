//! Runs the programs of many seeds: each natively first, then under the library beside others and a neighbour.

mod batch;
mod chaos;
mod coverage;
mod moment;
mod moods;
pub(crate) mod neighbour;
mod parts;
mod shrink;
mod trial;
mod world;

use std::collections::BTreeSet;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nvshare_proto::units::{MIB, parse_bytes};

use crate::RunOptions;
use crate::caps::{SHARING, SLEEP};
use crate::plan::{self, Recipe};
use crate::rng::Rng;

use coverage::Coverage;
use parts::{Parts, PartsOptions};
use shrink::Conditions;
use trial::{Finding, Running};
use world::{Moved, World};

/// Time for the neighbour to check all its memory before it ends.
const NEIGHBOUR_ENDS: Duration = Duration::from_secs(300);
/// A program is not held for hanging before it takes this many times as long as natively.
const TIMES_NATIVE: u32 = 50;
/// From this many seeds on, a feature that was never composed is a finding.
const ENOUGH_SEEDS: u64 = 200;

/// Options of many seeds.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct StormOptions {
    /// Number of seeds
    #[arg(long, default_value_t = 50)]
    seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 1, env = "STORM_FIRST")]
    first: u64,
    /// Run only each N-th of the seeds: the simulated driver's ways depend on the seed modulo 8
    #[arg(long, default_value_t = 1, conflicts_with = "batch", value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,
    /// Programs that run at the same time in a world
    #[arg(long, default_value_t = 8)]
    jobs: usize,
    /// Worlds beside each other, each with cards, a scheduler and a neighbour of its own: in one, the programs wait for
    /// their turns most of the time
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "real")]
    worlds: u64,
    /// Kill the scheduler, switch it off and on, stop clients, all at random moments
    #[arg(long)]
    chaos: bool,
    /// Half of the programs have managed memory, half have memory that the library maps; the simulated driver keeps the pages that
    /// managed memory gives up
    #[arg(long)]
    mixed: bool,
    /// Begin no seed after this many seconds
    #[arg(long)]
    seconds: Option<u64>,
    /// Random choices of each program
    #[arg(long, default_value_t = 100)]
    steps: usize,
    /// Memory of each card that all programs together may fill
    #[arg(long, default_value = "512MiB", value_parser = parse_bytes)]
    capacity: u64,
    /// Names of choices to leave out of all programs
    #[arg(long, value_delimiter = ',')]
    without: Vec<String>,
    /// Go on after a finding: the program is not made smaller then
    #[arg(long)]
    keep_going: bool,
    /// Longest time for making a program smaller, in seconds
    #[arg(long, default_value_t = 120)]
    shrink_seconds: u64,
    /// Level of the library's log, of which a finding prints the end
    #[arg(long, default_value = "info")]
    log: String,
    /// Run natively only
    #[arg(long)]
    native: bool,
    /// Do not run natively, because that was done before
    #[arg(long, conflicts_with = "native")]
    skip_native: bool,
    /// Seeds that one process runs, one after the other; all but the last use one context, which stays. A card takes
    /// longer for a context than for a program
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// Shortest time after which a program is held for hanging, in seconds
    #[arg(long, default_value_t = 20)]
    patience: u64,
    #[command(flatten)]
    parts: PartsOptions,
}

/// A signal asked for the end: running programs are ended, and nothing is left behind.
pub(crate) static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn interrupt(_: i32) {
    INTERRUPTED.store(true, Ordering::SeqCst);
}

#[derive(Debug)]
struct Found {
    options: RunOptions,
    finding: Finding,
    native: bool,
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let how = if self.native { "natively" } else { "under nvshare" };
        write!(f, "storm: seed {}, {how}: {}\n{}", self.options.seed, self.finding.kind, self.finding.text)
    }
}

/// State that the jobs of all worlds share.
struct All<'a> {
    options: &'a StormOptions,
    caps: String,
    known: BTreeSet<String>,
    next: AtomicU64,
    began: Instant,
    stop: AtomicBool,
    coverage: Mutex<Coverage>,
    found: Mutex<Vec<Found>>,
    /// Seeds that ran, whatever came of it.
    tried: AtomicU64,
    native_ms: Mutex<Vec<u64>>,
    shared_ms: Mutex<Vec<u64>>,
    /// Allocations that were refused because there was no scheduler: other programs had filled the card.
    refused_alone: AtomicU64,
    /// Allocations that were refused beside a program whose card was lost, and whose memory could not leave.
    refused_beside_lost: AtomicU64,
    /// How often memory moved by itself while a program ran alone, as the scheduler had not answered in time.
    moved_alone: AtomicU64,
    /// Programs that ended because their card was lost.
    lost: AtomicU64,
}

/// One world, with a scheduler, a neighbour and jobs of its own.
struct Storm<'a> {
    all: &'a All<'a>,
    world: World,
    running: Running,
    /// Memory that had moved at the last look; and how often the neighbour and programs that had ended had said that they run alone.
    moved: Mutex<(Moved, usize)>,
    /// How often programs that have ended have said that.
    ended_alone: AtomicUsize,
}

/// Runs the programs; an error if there was a finding.
pub(crate) fn storm(options: &StormOptions) -> Result<(), String> {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: a handler that stores a flag.
        unsafe { libc::signal(signal, interrupt as extern "C" fn(i32) as libc::sighandler_t) };
    }
    let parts = Parts::find(&options.parts)?;
    let worlds: Vec<World> = (0..options.worlds)
        .map(|world| World::new(&parts, &format!("world-{world}"), options.capacity, options.mixed))
        .collect::<Result<_, _>>()?;
    let first = worlds.first().ok_or("no world")?;
    let caps = first.program("caps").stderr(Stdio::inherit()).output().map_err(|error| error.to_string())?;
    let caps = String::from_utf8_lossy(&caps.stdout).trim().to_owned();
    println!("storm: the driver has: {caps}");
    let caps = caps.split(',').filter(|cap| left_in(options, cap)).collect::<Vec<_>>().join(",");
    let all = All {
        options,
        known: caps
            .split(',')
            .map(str::to_owned)
            .chain(parts.simulator.as_ref().map(|_| coverage::SIMULATED.to_owned()))
            .collect(),
        caps,
        next: AtomicU64::new(options.first),
        began: Instant::now(),
        stop: AtomicBool::new(false),
        coverage: Mutex::default(),
        found: Mutex::default(),
        tried: AtomicU64::new(0),
        native_ms: Mutex::default(),
        shared_ms: Mutex::default(),
        refused_alone: AtomicU64::new(0),
        refused_beside_lost: AtomicU64::new(0),
        moved_alone: AtomicU64::new(0),
        lost: AtomicU64::new(0),
    };
    let new = |world| Storm {
        all: &all,
        world,
        running: Running::default(),
        moved: Mutex::default(),
        ended_alone: AtomicUsize::new(0),
    };
    let storms: Vec<Storm<'_>> = worlds.into_iter().map(new).collect();
    let mut disturbed = chaos::Done::new();
    let done: Vec<Result<chaos::Done, String>> = std::thread::scope(|scope| {
        let begin = |(number, storm)| scope.spawn(move || Storm::run(storm, number));
        let running: Vec<_> = storms.iter().enumerate().map(begin).collect();
        let panicked = |_| Err("a thread panicked".to_owned());
        running.into_iter().map(|world| world.join().unwrap_or_else(panicked)).collect()
    });
    for done in done {
        for (what, count) in done? {
            *disturbed.entry(what).or_default() += count;
        }
    }
    let turns = if options.native { 0 } else { storms.iter().map(|storm| storm.world.count_turns()).sum() };
    let moved = storms.iter().map(|storm| storm.world.moved_by_itself()).sum::<Result<Moved, String>>()?;
    all.report(&parts, &disturbed, moved, turns)
}

/// Programs share memory, and go off the card, where the library maps their memory.
fn left_in(options: &StormOptions, cap: &str) -> bool {
    let is_mapped =
        !options.mixed && std::env::var_os("NVSHARE_MEMORY").is_some_and(|memory| memory == "swap");
    options.without.iter().all(|left_out| left_out != cap)
        && (![SHARING, SLEEP].contains(&cap) || is_mapped || options.native)
}

fn start_neighbour(world: &World, capacity: u64, seed: u64) -> std::io::Result<Child> {
    let memory = (capacity * 45 / 100).to_string();
    let log = std::fs::File::create(world.dir.join("neighbour.log"))?;
    let out = std::fs::File::create(world.dir.join("neighbour.out"))?;
    let mut command = world.client("neighbour", seed);
    command.args(["--memory", &memory]).env("NVSHARE_RUN", "999999");
    command.stdout(out).stderr(log).spawn()
}

impl Storm<'_> {
    /// Runs the jobs of this world until there are no more seeds. Returns what disturbed them.
    fn run(&self, number: usize) -> Result<chaos::Done, String> {
        let options = self.all.options;
        let number = number as u64;
        let mut rng = Rng::part(options.first + number, 0x70);
        let mut neighbour = None;
        if !options.native {
            self.world.start_scheduler(chaos::quantum(&mut rng))?;
            let started = start_neighbour(&self.world, options.capacity, number * 8);
            neighbour = Some(started.map_err(|error| error.to_string())?);
        }
        let neighbour_pid = neighbour.as_ref().map(Child::id);
        let is_over = &AtomicBool::new(false);
        let disturbed = std::thread::scope(|scope| {
            let disturb = scope.spawn(move || {
                let Some(neighbour) = neighbour_pid else { return Ok(chaos::Done::new()) };
                let seed = options.first + number;
                let sleeps = self.all.known.contains(SLEEP);
                chaos::disturb(&self.world, &self.running, neighbour, is_over, seed, options.chaos, sleeps)
            });
            let jobs: Vec<_> =
                (0..options.jobs).map(|job| scope.spawn(move || self.job(number, job))).collect();
            for job in jobs {
                let _ = job.join();
            }
            is_over.store(true, Ordering::SeqCst);
            disturb.join().unwrap_or_else(|_| Err("the disturber panicked".to_owned()))
        });
        if let Some(neighbour) = neighbour {
            self.end_neighbour(neighbour);
        }
        disturbed
    }

    /// Runs one seed after the other, until there are no more.
    fn job(&self, number: u64, job: usize) {
        let name = format!("native-{number}-{job}");
        let Ok(mine) =
            World::new(&self.world.parts, &name, self.all.options.capacity, self.all.options.mixed)
        else {
            return;
        };
        loop {
            if self.is_late() || self.all.stop.load(Ordering::SeqCst) || INTERRUPTED.load(Ordering::SeqCst) {
                return;
            }
            let seed =
                self.all.next.fetch_add(self.all.options.batch * self.all.options.every, Ordering::SeqCst);
            let end = self.all.options.first + self.all.options.seeds;
            if seed >= end {
                return;
            }
            let programs = self.programs(seed, self.all.options.batch.min(end - seed));
            self.batch(&mine, &programs, job);
        }
    }

    /// Whether no seed may be begun any more.
    fn is_late(&self) -> bool {
        self.all.options.seconds.is_some_and(|limit| self.all.began.elapsed().as_secs() >= limit)
    }

    /// The options for the programs of seeds: each has 40 to 70 per cent of a card.
    fn programs(&self, seed: u64, count: u64) -> RunOptions {
        let mut rng = Rng::part(seed, 0x5eed);
        let memory = self.all.options.capacity / 100 * rng.range(40, 70) / MIB * MIB;
        RunOptions {
            seed,
            count,
            shared: false,
            steps: self.all.options.steps,
            threads: 0,
            memory,
            caps: None,
            skip: Vec::new(),
            without: self.without(seed),
            limited: seed.is_multiple_of(3).then_some(memory + 128 * MIB),
            populated: false,
            print: false,
            verbose: false,
        }
    }

    /// Features to leave out. If allocations are slow, programs have no managed memory of their own: all other memory
    /// is populated, if late.
    fn without(&self, seed: u64) -> Vec<String> {
        let slow = self.world.parts.simulator.is_some() && moods::of(seed).is_some_and(|mood| mood.is_slow());
        self.all.options.without.iter().cloned().chain(slow.then(|| "cuMemAllocManaged".to_owned())).collect()
    }

    /// In turns, memory moves only when an order says so. Only while no scheduler schedules may it move by itself: also
    /// where a program runs alone since the scheduler, on a machine that is too busy, did not answer it in time. Memory
    /// that is ordered to leave is never in use.
    fn nothing_moved_by_itself(&self, seed: u64) -> Result<(), Finding> {
        let mut before = lock(&self.moved);
        let unseen = |text| Finding { kind: "the cards were not seen".to_owned(), text, seed: None };
        let now = self.world.moved_by_itself().map_err(unseen)?;
        let said = self.ended_alone.load(Ordering::SeqCst) + self.world.said_alone("neighbour");
        let is_alone = said > before.1 || self.world.said_alone("seed-") > 0;
        let grew = now.since(before.0);
        *before = (now, said);
        let by_itself = grew.faulted + grew.pushed_out > 0 && !self.all.options.chaos;
        if by_itself && is_alone {
            self.all.moved_alone.fetch_add(1, Ordering::SeqCst);
        }
        if (!by_itself || is_alone) && grew.in_use == 0 {
            return Ok(());
        }
        let text = format!("until seed {seed} was over, {grew}; any that ran then may be it");
        Err(Finding { kind: "memory moved by itself".to_owned(), text, seed: None })
    }

    fn end_neighbour(&self, mut neighbour: Child) {
        // SAFETY: a child of ours that was not waited for.
        unsafe { libc::kill(neighbour.id().cast_signed(), libc::SIGTERM) };
        let begin = Instant::now();
        let ended = loop {
            match neighbour.try_wait() {
                Ok(Some(status)) => break status.success(),
                _ if begin.elapsed() > NEIGHBOUR_ENDS => {
                    let _ = neighbour.kill();
                    let _ = neighbour.wait();
                    break false;
                }
                _ => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let read = |name: &str| std::fs::read_to_string(self.world.dir.join(name)).unwrap_or_default();
        print!("{}", read("neighbour.out"));
        if !ended {
            let text = format!("{}{}", read("neighbour.out"), trial::tail(&read("neighbour.log"), 25));
            println!("storm: the neighbour failed\n{text}");
            let finding = Finding { kind: "the neighbour failed".to_owned(), text, seed: None };
            let options = self.programs(self.all.options.first, 1);
            lock(&self.all.found).push(Found { options, finding, native: false });
        }
    }
}

impl All<'_> {
    /// Prints what was composed, found and moved; an error if there was a finding.
    fn report(&self, parts: &Parts, disturbed: &chaos::Done, moved: Moved, turns: u64) -> Result<(), String> {
        let (table, mut missing) = lock(&self.coverage).table(&self.known);
        let lost = self.lost.load(Ordering::SeqCst);
        if parts.simulator.is_some() && !self.options.native && lost == 0 {
            missing.push("a card lost in the middle");
        }
        let found = std::mem::take(&mut *lock(&self.found));
        if !self.options.keep_going
            && let Some(first) = found.iter().find(|found| !found.native)
        {
            self.shrink(parts, first);
        }
        println!("storm: composed\n{table}");
        for (what, count) in disturbed {
            println!("storm: {what}: {count}");
        }
        let seeds = self.tried.load(Ordering::SeqCst);
        let enough = seeds >= ENOUGH_SEEDS;
        if enough && !missing.is_empty() {
            println!("storm: never composed: {}", missing.join(", "));
        }
        println!("storm: {moved}");
        let alone = self.refused_alone.load(Ordering::SeqCst);
        if alone > 0 {
            println!("storm: {alone} programs met no scheduler and a card that others had filled");
        }
        let beside = self.refused_beside_lost.load(Ordering::SeqCst);
        if beside > 0 {
            println!(
                "storm: {beside} programs met a card on which the memory of a program stayed whose card was lost"
            );
        }
        let alone = self.moved_alone.load(Ordering::SeqCst);
        if alone > 0 {
            println!(
                "storm: memory moved by itself {alone} times beside programs that the scheduler did not answer in time"
            );
        }
        println!("storm: {lost} programs ended as their card was lost");
        // Again, behind the tables: of a long log often the end alone is kept.
        found.iter().for_each(|found| println!("{found}"));
        let native = found.iter().filter(|found| found.native).count();
        println!(
            "storm: {seeds} seeds from {} in {:.0} s, median {} ms natively and {} ms in turns, {turns} hand-overs, {native} findings natively, {} findings",
            self.options.first,
            self.began.elapsed().as_secs_f64(),
            median(&lock(&self.native_ms)),
            median(&lock(&self.shared_ms)),
            found.len() - native,
        );
        if INTERRUPTED.load(Ordering::SeqCst) {
            return Err("interrupted".to_owned());
        }
        if found.is_empty() && (missing.is_empty() || !enough) {
            return Ok(());
        }
        Err("there were findings".to_owned())
    }

    fn shrink(&self, parts: &Parts, found: &Found) {
        let conditions = Conditions {
            parts: parts.clone(),
            capacity: self.options.capacity,
            mixed: self.options.mixed,
            caps: self.caps.clone(),
            jobs: self.options.jobs,
            chaos: self.options.chaos,
            patience: Duration::from_secs(self.options.patience),
        };
        println!("storm: making the program of seed {} smaller", found.options.seed);
        let limit = Duration::from_secs(self.options.shrink_seconds);
        let (options, kind) = match shrink::shrink(&conditions, &found.options, &found.finding.kind, limit) {
            Some((smaller, finding)) => {
                println!("storm: the smaller program:\n{}", finding.text);
                (smaller, "smaller program")
            }
            None => (found.options.clone(), "whole program: the finding did not come again"),
        };
        let recipe: Recipe = options.recipe(self.known.clone());
        println!("storm: {kind}\n{}", plan::compose(&recipe));
        let skip: Vec<String> = options.skip.iter().map(usize::to_string).collect();
        let skip = if skip.is_empty() { String::new() } else { format!(" --skip {}", skip.join(",")) };
        println!(
            "storm: nvshare-storm run --seed {} --steps {} --threads {} --memory {} --caps '{}'{skip}",
            options.seed, options.steps, options.threads, options.memory, self.caps,
        );
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn median(of: &[u64]) -> u64 {
    let mut sorted = of.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or(0)
}
