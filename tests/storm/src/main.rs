//! Random legal CUDA programs that know every result in advance, and the runs of many of them under nvshare.
//!
//! `run` is one such program: it needs nothing but a driver. `storm` runs many: natively, then under the library and a
//! scheduler, beside each other. `docs/testing.md` says how it is used.

mod caps;
mod driver;
mod exec;
mod many;
mod plan;
mod rng;
mod watch;

use std::collections::BTreeSet;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use nvshare_proto::units::parse_bytes;

use driver::Driver;
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
    /// One program of a seed, on the driver that there is
    Run(RunOptions),
    /// What the driver has that programs are composed of, separated by commas
    Caps,
    /// Many seeds: natively, then under the library and a scheduler beside each other
    Storm(Box<many::StormOptions>),
    /// A steady neighbour, until SIGTERM
    Neighbour {
        /// Memory that it works on
        #[arg(long, value_parser = parse_bytes)]
        memory: u64,
    },
    /// What the simulated cards moved by themselves, in bytes, by faults and pushed out; and what left them in use
    Observe,
}

/// Of one program.
#[derive(Debug, Clone, Args)]
struct RunOptions {
    /// What the program is made from
    #[arg(long)]
    seed: u64,
    /// Programs of so many seeds, one after the other in this process: all but the last have one context, which stays
    #[arg(long, default_value_t = 1)]
    count: u64,
    /// Another program was to follow in this process: the last one has the context that stays, too
    #[arg(long)]
    shared: bool,
    /// Random choices that are made
    #[arg(long, default_value_t = 100)]
    steps: usize,
    /// Threads; 0: the seed says how many
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Memory that it allocates at most
    #[arg(long, default_value = "256MiB", value_parser = parse_bytes)]
    memory: u64,
    /// What the driver has, as `caps` prints it; without it, the driver is looked at first
    #[arg(long)]
    caps: Option<String>,
    /// Numbers of choices to leave out
    #[arg(long, value_delimiter = ',', num_args = 0..)]
    skip: Vec<usize>,
    /// Names of choices to leave out
    #[arg(long, value_delimiter = ',')]
    without: Vec<String>,
    /// The process has a limit of this many bytes, beyond which allocations are refused
    #[arg(long, value_parser = parse_bytes)]
    limited: Option<u64>,
    /// On a simulated driver: no kernel may be the first to touch memory
    #[arg(long)]
    populated: bool,
    /// Print the program and do not run it
    #[arg(long)]
    print: bool,
    /// Print each step before it is done
    #[arg(long)]
    verbose: bool,
}

/// Left out where a program is not the last of its process.
const OF_CONTEXTS: [&str; 2] = ["context made", "context ended"];

impl RunOptions {
    /// The options of each of its programs alone.
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

    /// Those before a seed, if there are any.
    fn before(&self, seed: u64) -> Option<Self> {
        let count = seed.checked_sub(self.seed).filter(|&count| count > 0)?;
        Some(Self { count, shared: true, ..self.clone() })
    }

    /// Those behind a seed, if there are any.
    fn behind(&self, seed: u64) -> Option<Self> {
        let count = (self.seed + self.count).checked_sub(seed + 1).filter(|&count| count > 0)?;
        Some(Self { seed: seed + 1, count, ..self.clone() })
    }

    /// Of its first program.
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
    // As many queues as there are: no stream waits for another only because they share one.
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
    let done = match Options::parse().mode {
        Mode::Run(options) => run(&options),
        Mode::Storm(options) => many::storm(&options),
        Mode::Neighbour { memory } => many::neighbour::work(memory),
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
        // What the programs share: a context costs a card more than a program does.
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
    fn what_is_left_of_a_batch_means_the_same_programs() {
        let whole = batch(&["10", "--count", "4"]);
        assert_eq!(programs(&whole), [(10, false), (11, false), (12, false), (13, true)]);
        assert_eq!(programs(&whole.before(12).unwrap()), [(10, false), (11, false)]);
        assert_eq!(programs(&whole.behind(11).unwrap()), [(12, false), (13, true)]);
        assert_eq!(programs(&whole.before(12).unwrap().behind(10).unwrap()), [(11, false)]);
        assert!(whole.before(10).is_none() && whole.behind(13).is_none());
    }
}
