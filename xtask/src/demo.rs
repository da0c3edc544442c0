//! The main job, live: programs that together need more memory than the GPU has.

use std::ffi::{c_int, c_uint, c_void};
use std::io::{IsTerminal, Write};
use std::mem::transmute_copy;
use std::time::{Duration, Instant};

use clap::Args;
use nvshare_harness::{Artifacts, Finished, Program, Running, Scheduler, Status, World};
use nvshare_proto::ClientStatus;
use nvshare_proto::units::{Bytes, GIB, gib_per_second, parse_bytes};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Programs
    #[arg(long, default_value_t = 2)]
    programs: usize,
    /// Memory of each; three quarters of what they may fill together, unless given
    #[arg(long, value_parser = parse_bytes)]
    memory: Option<u64>,
    /// What they may fill together; 16 GiB, or less on a smaller card, unless given
    #[arg(long, value_parser = parse_bytes)]
    gpu_memory: Option<u64>,
    /// Quantum in seconds
    #[arg(long, default_value = "4")]
    tq: String,
    /// GPU time that each program wants, in seconds; 10, and 5 with --faults, unless given
    #[arg(long)]
    seconds: Option<f64>,
    /// Bring evicted memory back by page faults, as managed memory does by itself, instead of in bulk: takes minutes
    #[arg(long)]
    faults: bool,
    /// On the simulated driver, even if there is a real one
    #[arg(long)]
    simulate: bool,
}

/// Allocations of the programs.
const BLOCK: u64 = 256 << 20;
/// Length of a kernel.
const KERNEL_US: u32 = 20_000;

pub(crate) fn run(options: &Options) -> Result<(), String> {
    Artifacts::get();
    let card = if options.simulate { None } else { real_card() };
    let total = card.unwrap_or(16 * GIB);
    // Contexts and the driver itself need some of a real card.
    let spare = if card.is_some() { 3 * GIB / 2 } else { 0 };
    let capacity = options.gpu_memory.unwrap_or((16 * GIB).min(total.saturating_sub(spare)));
    let memory = options.memory.unwrap_or(capacity / 4 * 3) / BLOCK * BLOCK;
    if memory == 0 || capacity == 0 {
        return Err("there is no memory for programs".to_owned());
    }
    let world = if card.is_some() { World::real() } else { World::simulated(&[]) };
    match card {
        Some(total) => println!("real driver, a card of {}", Bytes(total)),
        None => {
            println!("simulated driver: a card of {} with the link and the faults of a T4", Bytes(16 * GIB))
        }
    }
    println!(
        "{} programs of {} each; together they may fill {}; TQ {} s; memory comes back {}",
        options.programs,
        Bytes(memory),
        Bytes(capacity),
        options.tq,
        if options.faults { "by page faults" } else { "in bulk" }
    );
    let mut scheduler =
        Scheduler::start(&world, &["--gpu-memory", &capacity.to_string(), "--tq", &options.tq]);
    // A step is a kernel on each block.
    let step = f64::from(KERNEL_US) / 1e6 * (memory / BLOCK) as f64;
    let seconds = options.seconds.unwrap_or(if options.faults { 5.0 } else { 10.0 });
    let steps = (seconds / step).ceil().max(1.0);
    // The simulated stores keep 32 KiB of each 2 MiB, which a sample of 64 KiB reads whole.
    let check = if card.is_some() { "--full-check" } else { "" };
    let arguments =
        format!("--memory {memory} --block {BLOCK} --steps {steps} --kernel-us {KERNEL_US} {check}");
    let names: Vec<String> =
        (0..options.programs).map(|i| char::from(b'a' + (i % 26) as u8).to_string()).collect();
    let programs: Vec<Running> = names
        .iter()
        .map(|name| {
            let program =
                Program::workload(&world, name, &arguments).env("NVSHARE_LOG", "info").waits_for_go();
            if options.faults { program.env("NVSHARE_RESTORE", "0") } else { program }.start()
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
    if intact { Ok(()) } else { Err("data was not intact".to_owned()) }
}

/// Page faults take minutes where bulk copies take seconds: that is what is to be seen.
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

/// The table; whether all data was intact.
fn report(names: &[String], finished: &[Finished], status: &Status) -> bool {
    let clients: Vec<&ClientStatus> = finished.iter().map(|f| status.client(f.pid)).collect();
    let held: u64 = clients.iter().map(|client| client.held_ms).sum();
    println!();
    println!(
        "{:<8} {:>8} {:>7} {:>11} {:>11} {:>11} {:>9} {:>9} {:>9}  DATA",
        "PROGRAM", "TIME s", "SHARE", "HAND-OVERS", "OUT", "IN", "OUT GiB/s", "IN GiB/s", "PASSED BY"
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
            "{name:<8} {:>8.1} {:>6.0}% {:>11} {:>11} {:>11} {:>9.1} {:>9.1} {:>9}  {data}",
            finished.outcome.as_ref().map_or(0.0, |outcome| outcome.seconds),
            client.held_ms as f64 / held.max(1) as f64 * 100.0,
            counters.hand_overs,
            Bytes(counters.evicted),
            Bytes(counters.restored),
            gib_per_second(counters.evicted, Duration::from_nanos(counters.evict_ns)),
            gib_per_second(counters.restored, Duration::from_nanos(counters.restore_ns)),
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
