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
    /// What the simulated cards moved by themselves, in bytes: by faults, and pushed out
    Observe,
}

/// Of one program.
#[derive(Debug, Clone, Args)]
struct RunOptions {
    /// What the program is made from
    #[arg(long)]
    seed: u64,
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
    /// Print the program and do not run it
    #[arg(long)]
    print: bool,
    /// Print each step before it is done
    #[arg(long)]
    verbose: bool,
}

impl RunOptions {
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
        println!("{}", plan::compose(&options.recipe(caps)));
        return Ok(());
    }
    let driver = Driver::open()?;
    let caps = match known {
        Some(caps) => caps,
        None => caps::look(&driver).map_err(|error| error.to_string())?,
    };
    let plan = plan::compose(&options.recipe(caps));
    let run = exec::Run::new(driver, plan, options.limited, options.verbose);
    Box::leak(Box::new(run)).run()
}
