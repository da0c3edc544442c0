//! Random legal CUDA programs that know every result in advance, and the runs of many of them under nvshare.
//!
//! `run` is one such program and needs only a driver. `storm` runs many: natively, then under the library and a
//! scheduler, beside each other. `docs/internals/testing.md` says how to use it.

mod caps;
mod exec;
mod many;
mod plan;
mod rng;
mod watch;

use std::collections::BTreeSet;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use nvshare_proto::units::parse_bytes;

use nvshare_test_cuda::Driver;
use plan::Recipe;

/// Composes and runs random programs.
#[derive(Debug, Parser)]
#[command(name = "nvshare-storm")]
struct Options {
    #[command(subcommand)]
    mode: Mode,
}

#[derive(Debug, Subcommand)]
enum Mode {
    /// Run the program of one seed, on the driver of this machine
    Run(RunOptions),
    /// Print the driver's capabilities that programs are composed of, separated by commas
    Caps,
    /// Run many seeds: natively, then under the library and a scheduler, beside each other
    Storm(Box<many::StormOptions>),
    /// Run a steady neighbour, until SIGTERM
    Neighbour {
        /// Memory that the neighbour works on
        #[arg(long, value_parser = parse_bytes)]
        memory: u64,
    },
    /// Open the memory that a program shares, as it asks on standard input
    Partner,
    /// Print the bytes that the simulated cards moved by themselves, by faults and pushed out, and those that left in use
    Observe,
}

/// Options of one program.
#[derive(Debug, Clone, Args)]
struct RunOptions {
    /// Seed of the program
    #[arg(long)]
    seed: u64,
    /// Programs of this many seeds, one after the other in this process: all but the last have one context, which stays
    #[arg(long, default_value_t = 1)]
    count: u64,
    /// Another program follows in this process: the last one, too, has the context that stays
    #[arg(long)]
    shared: bool,
    /// Number of random choices
    #[arg(long, default_value_t = 100)]
    steps: usize,
    /// Number of threads; 0: as the seed says
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Most memory that the program allocates
    #[arg(long, default_value = "256MiB", value_parser = parse_bytes)]
    memory: u64,
    /// The driver's capabilities, as `caps` prints them; without this, the driver is asked first
    #[arg(long)]
    caps: Option<String>,
    /// Numbers of choices to leave out
    #[arg(long, value_delimiter = ',', num_args = 0..)]
    skip: Vec<usize>,
    /// Names of choices to leave out
    #[arg(long, value_delimiter = ',')]
    without: Vec<String>,
    /// The process's limit in bytes, beyond which allocations are refused
    #[arg(long, value_parser = parse_bytes)]
    limited: Option<u64>,
    /// On a simulated driver: no kernel may be the first to touch memory
    #[arg(long)]
    populated: bool,
    /// Print the program and do not run it
    #[arg(long)]
    print: bool,
    /// Print each step before it is carried out
    #[arg(long)]
    verbose: bool,
}

/// Features that are left out of a program that is not the last of its process.
const OF_CONTEXTS: [&str; 2] = ["context made", "context ended"];

impl RunOptions {
    /// The options of each of the programs alone.
    fn each(&self) -> impl Iterator<Item = Self> {
        let last = self.seed + self.count - 1;
        (self.seed..=last).map(move |seed| {
            let mut one = Self { seed, count: 1, shared: false, ..self.clone() };
            if seed < last || self.shared {
                one.without.extend(OF_CONTEXTS.map(str::to_owned));
            }
            one
        })
    }

    /// The options of the programs before a seed, if there are any.
    fn before(&self, seed: u64) -> Option<Self> {
        let count = seed.checked_sub(self.seed).filter(|&count| count > 0)?;
        Some(Self { count, shared: true, ..self.clone() })
    }

    /// The options of the programs behind a seed, if there are any.
    fn behind(&self, seed: u64) -> Option<Self> {
        let count = (self.seed + self.count).checked_sub(seed + 1).filter(|&count| count > 0)?;
        Some(Self { seed: seed + 1, count, ..self.clone() })
    }

    /// The recipe of the first program.
    fn recipe(&self, caps: BTreeSet<String>) -> Recipe {
        Recipe {
            seed: self.seed,
            steps: self.steps,
            threads: self.threads,
            memory: self.memory,
            caps,
            skip: self.skip.iter().copied().collect(),
            without: self.without.iter().cloned().collect(),
        }
    }
}

fn main() -> ExitCode {
    // As many queues as possible: no stream waits for another only because they share one.
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
    let done = match Options::parse().mode {
        Mode::Run(options) => run(&options),
        Mode::Storm(options) => many::storm(&options),
        Mode::Neighbour { memory } => many::neighbour::work(memory),
        Mode::Partner => exec::partner::serve(),
        Mode::Observe => many::neighbour::observe(),
        Mode::Caps => look().map(|caps| println!("{}", names(&caps))),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("storm: {error}");
            ExitCode::FAILURE
        }
    }
}

fn names(caps: &BTreeSet<String>) -> String {
    caps.iter().cloned().collect::<Vec<_>>().join(",")
}

fn look() -> Result<BTreeSet<String>, String> {
    caps::look(&Driver::open()?).map_err(|error| error.to_string())
}

fn run(options: &RunOptions) -> Result<(), String> {
    let known = options.caps.as_ref().map(|text| {
        text.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect::<BTreeSet<_>>()
    });
    if options.print {
        let caps = known.unwrap_or_else(|| caps::ALL.iter().map(|&name| name.to_owned()).collect());
        options.each().for_each(|one| println!("{}", plan::compose(&one.recipe(caps.clone()))));
        return Ok(());
    }
    watch::begin();
    let driver: &'static Driver = Box::leak(Box::new(Driver::open()?));
    let caps = match known {
        Some(caps) => caps,
        None => caps::look(driver).map_err(|error| error.to_string())?,
    };
    let new = |one: &RunOptions| -> &'static exec::Run {
        let plan = plan::compose(&one.recipe(caps.clone()));
        Box::leak(Box::new(exec::Run::new(driver, plan, one.limited, one.verbose, one.populated)))
    };
    let mut programs: Vec<RunOptions> = options.each().collect();
    let last = if options.shared { None } else { programs.pop() };
    if !programs.is_empty() {
        // The context that the programs share: making one costs a card more than a program does.
        let kept = exec::KeptContext::new(driver).map_err(|error| error.to_string())?;
        programs.iter().for_each(|one| new(one).run_and_sweep());
        kept.end().map_err(|error| error.to_string())?;
    }
    match last {
        Some(last) => new(&last).run(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Parser)]
    struct Only {
        #[command(flatten)]
        options: RunOptions,
    }

    fn batch(arguments: &[&str]) -> RunOptions {
        Only::parse_from(["run", "--seed"].iter().chain(arguments)).options
    }

    /// Seeds, and whether each may make contexts.
    fn programs(options: &RunOptions) -> Vec<(u64, bool)> {
        options.each().map(|one| (one.seed, one.without.is_empty())).collect()
    }

    #[test]
    fn the_rest_of_a_batch_means_the_same_programs() {
        let whole = batch(&["10", "--count", "4"]);
        assert_eq!(programs(&whole), [(10, false), (11, false), (12, false), (13, true)]);
        assert_eq!(programs(&whole.before(12).unwrap()), [(10, false), (11, false)]);
        assert_eq!(programs(&whole.behind(11).unwrap()), [(12, false), (13, true)]);
        assert_eq!(programs(&whole.before(12).unwrap().behind(10).unwrap()), [(11, false)]);
        assert!(whole.before(10).is_none() && whole.behind(13).is_none());
    }
}
