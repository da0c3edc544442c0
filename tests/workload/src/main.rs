//! A program that uses a GPU as programs do, and knows what its memory must hold.
//!
//! It fills its memory with a pattern, adds to all of it in every step, and reads it back in the end. One JSON
//! line says what came of it. With `GO=path` it touches `path.NAME` when it is set up, and starts when `path`
//! exists. With `STOP=path` it goes on until `path` exists, however long that is. With `WAKE=path` steps leave the
//! first allocations (`--zeros`, `--mixed`, `--still`) as they are until `path` exists; when the first
//! step has changed them, it touches `path.NAME`.

mod driver;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use driver::{Driver, Kernel};
use nvshare_proto::units::{MIB, parse_bytes};
use nvshare_test_cuda::{CudaError, Words};
use serde::Serialize;

/// Uses a GPU, and checks what it did.
#[derive(Debug, Parser)]
struct Options {
    /// A name for the result's line
    name: String,
    /// Device memory
    #[arg(long, default_value = "1GiB", value_parser = parse_bytes)]
    memory: u64,
    /// Memory of each allocation
    #[arg(long, default_value = "256MiB", value_parser = parse_bytes)]
    block: u64,
    /// Passes over the memory; 0: as many as fit into --seconds
    #[arg(long, default_value_t = 0)]
    steps: u32,
    /// How long, without --steps
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Least length of each kernel in microseconds; there is one for each allocation in each step
    #[arg(long, default_value_t = 500)]
    kernel_us: u32,
    /// Host work between steps, in milliseconds
    #[arg(long, default_value_t = 0)]
    host_ms: u64,
    /// Never wait for the GPU between steps
    #[arg(long)]
    ahead: bool,
    /// Capture each step as a graph, slowly, and launch that
    #[arg(long)]
    graph: bool,
    /// Free and allocate one block anew in each step
    #[arg(long)]
    churn: bool,
    /// Allocate in stream order, of the device's pool
    #[arg(long)]
    ordered: bool,
    /// First allocations, which are all zero, and which steps leave as they are
    #[arg(long, default_value_t = 0)]
    zeros: usize,
    /// Allocations behind those, of whose pieces of 2 MiB each third is all zero, and which steps leave as they are
    #[arg(long, default_value_t = 0)]
    mixed: usize,
    /// Allocations behind those, which steps leave as they are
    #[arg(long, default_value_t = 0)]
    still: usize,
    /// Read back every word, not a sample of each 2 MiB
    #[arg(long)]
    full_check: bool,
    /// Read back every word after each step as well, and stop at the first that is wrong
    #[arg(long)]
    check_steps: bool,
    /// The first word of the pattern
    #[arg(long, default_value_t = 1)]
    seed: u32,
}

#[derive(Debug, Default, Serialize)]
struct Outcome {
    name: String,
    steps: u32,
    setup_s: f64,
    seconds: f64,
    /// Longest step.
    longest_s: f64,
    words_checked: u64,
    wrong_words: u64,
    /// Times that every word was read back.
    full_checks: u64,
    free: u64,
    total: u64,
    error: Option<String>,
}

/// Bytes of which each begins its own pattern.
const PIECE: u64 = 2 * MIB;

/// An allocation and the value that was added to it since it was filled.
struct Block {
    address: u64,
    bytes: u64,
    seed: u32,
    added: u32,
    /// The pattern that filled it.
    begin: Begin,
    /// Steps leave it as it is, until they are told otherwise.
    still: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begin {
    Pattern,
    Zeros,
    Mixed,
}

impl Begin {
    /// Whether a piece was all zero.
    fn is_zero(self, at: u64) -> bool {
        self == Self::Zeros || self == Self::Mixed && (at / PIECE).is_multiple_of(3)
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    let mut outcome = Outcome { name: options.name.clone(), ..Outcome::default() };
    if let Err(error) = run(&options, &mut outcome) {
        outcome.error = Some(error);
    }
    let good = outcome.error.is_none() && outcome.wrong_words == 0;
    println!("{}", serde_json::to_string(&outcome).unwrap_or_default());
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(options: &Options, outcome: &mut Outcome) -> Result<(), String> {
    let begin = Instant::now();
    let driver = Driver::open(options.ordered)?;
    let text = |error: CudaError| error.to_string();
    let mut blocks = Vec::new();
    let mut left = options.memory;
    while left > 0 {
        let bytes = options.block.min(left);
        left -= bytes;
        let seed = options.seed.wrapping_add(blocks.len() as u32 * 7919);
        blocks.push((bytes, seed));
    }
    let make = |(i, (bytes, seed))| {
        let begin = match i {
            i if i < options.zeros => Begin::Zeros,
            i if i < options.zeros + options.mixed => Begin::Mixed,
            _ => Begin::Pattern,
        };
        let block = fill(&driver, bytes, seed, begin)?;
        Ok(Block { still: i < options.zeros + options.mixed + options.still, ..block })
    };
    let mut blocks: Vec<Block> =
        blocks.into_iter().enumerate().map(make).collect::<Result<_, _>>().map_err(text)?;
    driver.synchronize().map_err(text)?;
    (outcome.free, outcome.total) = driver.memory().map_err(text)?;
    outcome.setup_s = begin.elapsed().as_secs_f64();
    wait_for_go(&options.name);
    let start = Instant::now();
    let limit = Duration::from_secs_f64(options.seconds);
    let stop = std::env::var_os("STOP").map(PathBuf::from);
    let goes_on = |steps| match &stop {
        Some(stop) => !stop.exists(),
        None if options.steps > 0 => steps < options.steps,
        None => start.elapsed() < limit,
    };
    while goes_on(outcome.steps) {
        let began = Instant::now();
        let awake = is_awake();
        step(&driver, options, &mut blocks, outcome.steps, awake).map_err(text)?;
        outcome.longest_s = outcome.longest_s.max(began.elapsed().as_secs_f64());
        outcome.steps += 1;
        if awake && let Some(mut mine) = std::env::var_os("WAKE") {
            mine.push(format!(".{}", options.name));
            let _ = std::fs::write(mine, "");
        }
        if options.check_steps {
            driver.synchronize().map_err(text)?;
            check_all(&driver, &blocks, true, outcome).map_err(text)?;
            if outcome.wrong_words > 0 {
                return Err(format!("memory is wrong after {} steps", outcome.steps));
            }
        }
        std::thread::sleep(Duration::from_millis(options.host_ms));
    }
    driver.synchronize().map_err(text)?;
    outcome.seconds = start.elapsed().as_secs_f64();
    check_all(&driver, &blocks, options.full_check || options.check_steps, outcome).map_err(text)
}

fn fill(driver: &Driver, bytes: u64, seed: u32, begin: Begin) -> Result<Block, CudaError> {
    let address = driver.allocate(bytes)?;
    if begin != Begin::Zeros {
        driver.launch(Kernel::Fill, Words { address, words: bytes / 4, value: seed, micros: 0 })?;
    }
    for at in (0..bytes).step_by(PIECE as usize).filter(|&at| begin.is_zero(at)) {
        driver.zero(address + at, PIECE.min(bytes - at))?;
    }
    Ok(Block { address, bytes, seed, added: 0, begin, still: false })
}

fn step(
    driver: &Driver,
    options: &Options,
    blocks: &mut [Block],
    number: u32,
    awake: bool,
) -> Result<(), CudaError> {
    let value = number.wrapping_mul(2_246_822_519).wrapping_add(1);
    if options.churn && !blocks.is_empty() {
        driver.synchronize()?;
        let at = number as usize % blocks.len();
        let old = &blocks[at];
        driver.free(old.address)?;
        blocks[at] = fill(driver, old.bytes, old.seed.wrapping_add(1), Begin::Pattern)?;
    }
    let is_stepped = |block: &Block| awake || !block.still;
    // Forward and backward in turn, as training does.
    let launch_all = |pause: Duration| {
        for i in 0..blocks.len() {
            let block = &blocks[if number.is_multiple_of(2) { i } else { blocks.len() - 1 - i }];
            if !is_stepped(block) {
                continue;
            }
            let words =
                Words { address: block.address, words: block.bytes / 4, value, micros: options.kernel_us };
            driver.launch(Kernel::Step, words)?;
            std::thread::sleep(pause);
        }
        Ok(())
    };
    if options.graph {
        // Slowly, so that other programs have their chance in the middle of it.
        let exec = driver.capture(|| launch_all(Duration::from_millis(5)))?;
        driver.launch_graph(exec)?;
    } else {
        launch_all(Duration::ZERO)?;
    }
    for block in blocks.iter_mut().filter(|block| is_stepped(block)) {
        block.added = block.added.wrapping_add(value);
    }
    if options.ahead { Ok(()) } else { driver.synchronize() }
}

fn check_all(driver: &Driver, blocks: &[Block], full: bool, outcome: &mut Outcome) -> Result<(), CudaError> {
    for block in blocks {
        check(driver, block, full, outcome)?;
    }
    outcome.full_checks += u64::from(full);
    Ok(())
}

/// Holds every word read against what `fill` and the steps must have left.
fn check(driver: &Driver, block: &Block, full: bool, outcome: &mut Outcome) -> Result<(), CudaError> {
    let mut words = vec![0u32; if full { PIECE as usize / 4 } else { 64 * 1024 / 4 }];
    for at in (0..block.bytes).step_by(PIECE as usize) {
        let length = words.len().min((block.bytes - at) as usize / 4);
        let words = &mut words[..length];
        driver.read(words, block.address + at)?;
        let pattern = |i: usize| {
            block
                .seed
                .wrapping_add(((at / PIECE) as u32).wrapping_mul(0x9e37_79b1))
                .wrapping_add((i % 1024) as u32 * 2_654_435)
        };
        let is_zero = block.begin.is_zero(at);
        let expected = |i: usize| if is_zero { 0 } else { pattern(i) }.wrapping_add(block.added);
        outcome.wrong_words +=
            words.iter().enumerate().filter(|&(i, &word)| word != expected(i)).count() as u64;
        outcome.words_checked += length as u64;
    }
    Ok(())
}

/// Whether steps change all memory.
fn is_awake() -> bool {
    std::env::var_os("WAKE").is_some_and(|wake| PathBuf::from(wake).exists())
}

/// The barrier of several programs that start together.
fn wait_for_go(name: &str) {
    let Some(go) = std::env::var_os("GO") else { return };
    let mut mine = go.clone();
    mine.push(format!(".{name}"));
    let _ = std::fs::write(mine, "");
    while !std::path::Path::new(&go).exists() {
        std::thread::sleep(Duration::from_millis(2));
    }
}
