//! The main job, live: programs that together need more memory than the GPU has.

use std::ffi::{c_int, c_uint, c_void};
use std::io::{IsTerminal, Write};
use std::mem::transmute_copy;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use nvshare_harness::{Artifacts, Finished, Program, Running, Scheduler, Status, World};
use nvshare_proto::ClientStatus;
use nvshare_proto::units::{Bytes, GIB, gib_per_second, parse_limit, parse_quantum};

/// The options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Programs
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=26))]
    programs: u32,
    /// Memory of each; three quarters of what they may fill together, unless given
    #[arg(long, value_parser = parse_limit)]
    memory: Option<u64>,
    /// Memory that all programs may fill together; 16 GiB, or less on a smaller card, unless given
    #[arg(long, value_parser = parse_limit)]
    gpu_memory: Option<u64>,
    /// Quantum in seconds
    #[arg(long, default_value = "4", value_parser = parse_quantum)]
    tq: Duration,
    /// GPU time that each program wants, in seconds; 10, and 5 with --faults or --compare, unless given
    #[arg(long, value_parser = parse_quantum)]
    seconds: Option<Duration>,
    /// Bring evicted memory back by page faults, as managed memory does by itself, instead of in bulk: takes minutes
    #[arg(long)]
    faults: bool,
    /// Run both ways, in bulk and by page faults, and say which is how much faster: takes minutes
    #[arg(long, conflicts_with = "faults")]
    compare: bool,
    /// Programs get memory that the library maps, and that moves as copies (NVSHARE_MEMORY=swap), instead of managed memory
    #[arg(long, conflicts_with_all = ["faults", "compare"])]
    swap: bool,
    /// Draw who held the GPU, and what moved, into this file
    #[arg(long, value_name = "FILE", value_parser = picture)]
    svg: Option<PathBuf>,
    /// On the simulated driver, even if there is a real one
    #[arg(long)]
    simulate: bool,
}

/// A picture's name.
fn picture(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let is_picture = path.extension().is_some_and(|extension| extension == "svg");
    if is_picture { Ok(path) } else { Err("the name has to end with .svg".to_owned()) }
}

/// How evicted memory comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    InBulk,
    ByFaults,
    AsCopies,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::InBulk => "in bulk",
            Self::ByFaults => "by page faults",
            Self::AsCopies => "as copies",
        }
    }

    /// The variables by which the programs are told.
    fn variables(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::InBulk => &[("NVSHARE_MEMORY", "managed")],
            Self::ByFaults => &[("NVSHARE_MEMORY", "managed"), ("NVSHARE_RESTORE", "0")],
            Self::AsCopies => &[("NVSHARE_MEMORY", "swap")],
        }
    }
}

/// One finished run.
struct Done {
    way: Way,
    /// From the start of all programs to the end of the last, in seconds.
    seconds: f64,
    /// The events that the scheduler told.
    events: String,
}

/// Memory of the simulated card.
const SIMULATED: u64 = 16 * GIB;
/// Allocations of the programs.
const BLOCK: u64 = 256 << 20;
/// Length of a kernel.
const KERNEL_US: u32 = 20_000;

/// The sizes of a run.
struct Sizes {
    /// Bytes of the real card; none: the simulated one.
    card: Option<u64>,
    /// Bytes that the programs may fill together.
    capacity: u64,
    /// Bytes of each program.
    memory: u64,
}

impl Options {
    /// # Errors
    /// When the programs could never run.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.sizes().map(|_| ())
    }

    /// The ways to run, one after the other.
    fn ways(&self) -> &'static [Way] {
        match (self.compare, self.faults, self.swap) {
            (true, ..) => &[Way::InBulk, Way::ByFaults],
            (_, true, _) => &[Way::ByFaults],
            (.., true) => &[Way::AsCopies],
            _ => &[Way::InBulk],
        }
    }

    fn sizes(&self) -> Result<Sizes, String> {
        let card = if self.simulate { None } else { real_card() };
        let total = card.unwrap_or(SIMULATED);
        // Contexts and the driver itself need some memory of a real card.
        let spare = if card.is_some() { 3 * GIB / 2 } else { 0 };
        let most = total.saturating_sub(spare);
        let capacity = self.gpu_memory.unwrap_or((16 * GIB).min(most));
        if capacity > most {
            return Err(format!(
                "--gpu-memory {} is more than programs can have of this card: it has {}, of which {} are the driver's",
                Bytes(capacity),
                Bytes(total),
                Bytes(spare)
            ));
        }
        let memory = self.memory.unwrap_or(capacity / 4 * 3) / BLOCK * BLOCK;
        if memory == 0 {
            return Err(format!(
                "a program needs {} at least: it allocates blocks of that size",
                Bytes(BLOCK)
            ));
        }
        if memory > capacity {
            return Err(format!(
                "--memory {}: a program that needs more than {} does not run",
                Bytes(memory),
                Bytes(capacity)
            ));
        }
        Ok(Sizes { card, capacity, memory })
    }
}

pub(crate) fn run(options: &Options) -> Result<(), String> {
    let sizes = options.sizes()?;
    Artifacts::get();
    match sizes.card {
        Some(total) => println!("real driver, a card of {}", Bytes(total)),
        None => {
            println!("simulated driver: a card of {} with the link and the faults of a T4", Bytes(SIMULATED))
        }
    }
    let done =
        options.ways().iter().map(|&way| one_way(options, &sizes, way)).collect::<Result<Vec<_>, _>>()?;
    if let Some(picture) = &options.svg {
        draw(picture, &done)?;
    }
    if let [bulk, faults] = &done[..] {
        println!();
        println!("{}", verdict(bulk.seconds, faults.seconds));
    }
    Ok(())
}

/// A sentence that says which way was how much faster.
fn verdict(bulk: f64, faults: f64) -> String {
    let times = faults / bulk;
    let times = if times < 10.0 { format!("{times:.1}") } else { format!("{times:.0}") };
    format!("in bulk {bulk:.1} s, by page faults {faults:.1} s: {times} times faster than by page faults")
}

/// Runs the programs once.
fn one_way(options: &Options, sizes: &Sizes, way: Way) -> Result<Done, String> {
    let Sizes { card, capacity, memory } = *sizes;
    let world = if card.is_some() { World::real() } else { World::simulated(&[]) };
    println!(
        "{} programs of {} each; together they may fill {}; TQ {} s; memory comes back {}",
        options.programs,
        Bytes(memory),
        Bytes(capacity),
        options.tq.as_secs_f64(),
        way.name()
    );
    let mut scheduler = Scheduler::start(
        &world,
        &["--gpu-memory", &capacity.to_string(), "--tq", &options.tq.as_secs_f64().to_string()],
    );
    // A step is a kernel on each block.
    let step = f64::from(KERNEL_US) / 1e6 * (memory / BLOCK) as f64;
    let short = options.faults || options.compare;
    let seconds = options.seconds.map_or(if short { 5.0 } else { 10.0 }, |seconds| seconds.as_secs_f64());
    let steps = (seconds / step).ceil().max(1.0);
    // The simulated stores keep 32 KiB of each 2 MiB, which a sample of 64 KiB reads whole.
    let check = if card.is_some() { "--full-check" } else { "" };
    let arguments =
        format!("--memory {memory} --block {BLOCK} --steps {steps} --kernel-us {KERNEL_US} {check}");
    let names: Vec<String> = ('a'..='z').take(options.programs as usize).map(String::from).collect();
    let programs: Vec<Running> = names
        .iter()
        .map(|name| {
            let program =
                Program::workload(&world, name, &arguments).env("NVSHARE_LOG", "info").waits_for_go();
            let program =
                way.variables().iter().fold(program, |program, (name, value)| program.env(name, value));
            program.start()
        })
        .collect();
    println!("setting up …");
    Running::go(&programs.iter().collect::<Vec<_>>());
    let finished = watch(&world, &names, programs);
    let status = Scheduler::status(&world);
    let intact = report(&names, &finished, &status);
    if !scheduler.lives() {
        return Err(format!("the scheduler ended: {}", scheduler.log()));
    }
    if !intact {
        return Err("data was not intact".to_owned());
    }
    let seconds = finished.iter().filter_map(|f| Some(f.outcome.as_ref()?.seconds)).fold(0.0, f64::max);
    let told = Scheduler::ctl(&world, &["watch", "--json", "--no-follow"]);
    let events = named(&String::from_utf8_lossy(&told.stdout), &names, &finished)?;
    Ok(Done { way, seconds, events })
}

/// Events of the programs, with the names that the programs have here.
fn named(events: &str, names: &[String], finished: &[Finished]) -> Result<String, String> {
    let mut text = String::new();
    for line in events.lines() {
        let mut event: serde_json::Value =
            serde_json::from_str(line).map_err(|error| format!("{line}: {error}"))?;
        if let Some(which) = finished.iter().position(|finished| event["pid"] == finished.pid) {
            event["name"] = format!("program {}", names[which]).into();
        }
        text += &format!("{event}\n");
    }
    Ok(text)
}

/// Draws the runs into a picture.
fn draw(picture: &Path, done: &[Done]) -> Result<(), String> {
    let folder = std::env::temp_dir().join("events");
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut command = std::process::Command::new(&Artifacts::get().ctl);
    command.args(["timeline", "--seconds", "1000000", "--output"]).arg(picture);
    for done in done {
        let file = folder.join(format!("{}.jsonl", done.way.name()));
        std::fs::write(&file, &done.events).map_err(|error| format!("{}: {error}", file.display()))?;
        command.arg("--from").arg(file);
    }
    let status = command.status().map_err(|error| error.to_string())?;
    if status.success() { Ok(()) } else { Err("the picture could not be drawn".to_owned()) }
}

/// Page faults take minutes where bulk copies take seconds: the demo is to show that.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Shows who holds the GPU until all programs have ended.
fn watch(world: &World, names: &[String], programs: Vec<Running>) -> Vec<Finished> {
    let begin = Instant::now();
    let live = std::io::stdout().is_terminal();
    let pids: Vec<u32> = programs.iter().map(Running::pid).collect();
    let waiting: Vec<_> =
        programs.into_iter().map(|program| std::thread::spawn(|| program.finish_within(PATIENCE))).collect();
    let mut last = String::new();
    while !waiting.iter().all(std::thread::JoinHandle::is_finished) {
        let status = Scheduler::status(world);
        let states: Vec<String> = names
            .iter()
            .zip(&pids)
            .map(|(name, &pid)| {
                let state = status.clients.iter().rev().find(|c| c.pid == pid);
                let state = state.map_or("-".to_owned(), |c| format!("{:?}", c.state).to_lowercase());
                format!("{name} {state:<10}")
            })
            .collect();
        let text = states.join("  ");
        if live {
            print!("\r{:6.1} s  {text}", begin.elapsed().as_secs_f64());
            let _ = std::io::stdout().flush();
        } else if text != last {
            println!("{:6.1} s  {text}", begin.elapsed().as_secs_f64());
        }
        last = text;
        std::thread::sleep(Duration::from_millis(100));
    }
    if live {
        println!();
    }
    waiting.into_iter().map(|thread| thread.join().expect("a program")).collect()
}

/// Prints the table. Returns whether all data was intact.
fn report(names: &[String], finished: &[Finished], status: &Status) -> bool {
    let clients: Vec<&ClientStatus> = finished.iter().map(|f| status.client(f.pid)).collect();
    let held: u64 = clients.iter().map(|client| client.held_ms).sum();
    println!();
    println!(
        "{:<8} {:>8} {:>7} {:>11} {:>11} {:>11} {:>11} {:>11} {:>9} {:>9} {:>9}  DATA",
        "PROGRAM",
        "TIME s",
        "SHARE",
        "HAND-OVERS",
        "OUT",
        "COPIED",
        "IN",
        "COPIED",
        "OUT GiB/s",
        "IN GiB/s",
        "PASSED BY"
    );
    let mut all_intact = true;
    for ((name, finished), client) in names.iter().zip(finished).zip(clients) {
        let counters = client.counters;
        let data = match &finished.outcome {
            Some(outcome) if outcome.error.is_none() && outcome.wrong_words == 0 => {
                format!("intact ({} words read)", outcome.words_checked)
            }
            Some(outcome) => {
                all_intact = false;
                outcome.error.clone().unwrap_or_else(|| format!("{} WRONG WORDS", outcome.wrong_words))
            }
            None => {
                all_intact = false;
                format!("ended with {}", finished.status)
            }
        };
        println!(
            "{name:<8} {:>8.1} {:>6.0}% {:>11} {:>11} {:>11} {:>11} {:>11} {:>9.1} {:>9.1} {:>9}  {data}",
            finished.outcome.as_ref().map_or(0.0, |outcome| outcome.seconds),
            client.held_ms as f64 / held.max(1) as f64 * 100.0,
            counters.hand_overs,
            Bytes(counters.evicted),
            Bytes(counters.copied_out),
            Bytes(counters.restored),
            Bytes(counters.copied_in),
            gib_per_second(counters.copied_out, Duration::from_nanos(counters.evict_ns)),
            gib_per_second(counters.copied_in, Duration::from_nanos(counters.restore_ns)),
            counters.passed_by,
        );
    }
    all_intact
}

/// Bytes of the first real card, if there is one.
fn real_card() -> Option<u64> {
    // SAFETY: a C string; the library stays open.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    if library.is_null() {
        return None;
    }
    let find = |name: &std::ffi::CStr| -> Option<*mut c_void> {
        // SAFETY: an open library and a C string.
        let address = unsafe { libc::dlsym(library, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    };
    let (init, get, total) = (find(c"cuInit")?, find(c"cuDeviceGet")?, find(c"cuDeviceTotalMem_v2")?);
    let mut device = 0;
    let mut bytes = 0usize;
    // SAFETY: the driver's functions of these names have these signatures; the answers have places.
    let failed = unsafe {
        transmute_copy::<_, unsafe extern "C" fn(c_uint) -> c_int>(&init)(0)
            | transmute_copy::<_, unsafe extern "C" fn(*mut c_int, c_int) -> c_int>(&get)(&raw mut device, 0)
            | transmute_copy::<_, unsafe extern "C" fn(*mut usize, c_int) -> c_int>(&total)(
                &raw mut bytes,
                device,
            )
    };
    (failed == 0).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Wrapped {
        #[command(flatten)]
        options: Options,
    }

    fn sizes(arguments: &[&str]) -> Result<(u64, u64), String> {
        let arguments = ["demo", "--simulate"].iter().chain(arguments);
        let options = Wrapped::try_parse_from(arguments).map_err(|error| error.to_string())?.options;
        options.sizes().map(|sizes| (sizes.capacity, sizes.memory))
    }

    #[test]
    fn a_verdict_has_figures_that_mean_something() {
        assert_eq!(
            verdict(20.0, 50.04),
            "in bulk 20.0 s, by page faults 50.0 s: 2.5 times faster than by page faults"
        );
        assert_eq!(
            verdict(20.0, 241.0),
            "in bulk 20.0 s, by page faults 241.0 s: 12 times faster than by page faults"
        );
    }

    #[test]
    fn an_option_says_how_memory_moves() {
        let ways = |arguments: &[&str]| {
            let arguments = ["demo"].iter().chain(arguments);
            Wrapped::try_parse_from(arguments)
                .map(|wrapped| wrapped.options.ways())
                .map_err(|e| e.to_string())
        };
        assert_eq!(ways(&[]).unwrap(), [Way::InBulk]);
        assert_eq!(ways(&["--faults"]).unwrap(), [Way::ByFaults]);
        assert_eq!(ways(&["--compare"]).unwrap(), [Way::InBulk, Way::ByFaults]);
        assert_eq!(ways(&["--swap"]).unwrap(), [Way::AsCopies]);
        assert_eq!(Way::AsCopies.variables(), [("NVSHARE_MEMORY", "swap")]);
    }

    #[test]
    fn a_demo_that_could_never_run_is_refused() {
        assert_eq!(sizes(&[]), Ok((16 * GIB, 12 * GIB)));
        assert_eq!(sizes(&["--gpu-memory", "8g", "--memory", "6g"]), Ok((8 * GIB, 6 * GIB)));
        for (arguments, why) in [
            (&["--gpu-memory", "17g"][..], "is more than programs can have of this card"),
            (&["--gpu-memory", "0"], "the least is 64.0 MiB"),
            (&["--gpu-memory", "64m"], "a program needs 256.0 MiB at least"),
            (&["--memory", "17g"], "does not run"),
            (&["--memory", "4"], "the least is 64.0 MiB"),
            (&["--tq", "0"], "is not a quantum; accepted"),
            (&["--tq", "soon"], "is not a quantum; accepted"),
            (&["--programs", "0"], "0 is not in 1..=26"),
            (&["--programs", "27"], "27 is not in 1..=26"),
            (&["--compare", "--faults"], "cannot be used with"),
            (&["--swap", "--faults"], "cannot be used with"),
            (&["--swap", "--compare"], "cannot be used with"),
            (&["--svg", "picture.png"], "the name has to end with .svg"),
            (&["--seconds", "-1"], "unexpected argument"),
            (&["--seconds", "0"], "accepted: seconds"),
            (&["--seconds", "NaN"], "accepted: seconds"),
        ] {
            let error = sizes(arguments).unwrap_err();
            assert!(error.contains(why), "{arguments:?}: {error}");
        }
    }
}
