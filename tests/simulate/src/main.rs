//! `cargo simulate`: the effect of a policy on many clients, in virtual time.
//!
//! There are no sockets and no real time: modelled clients answer a scheduler's messages in virtual time. The
//! project's own scheduler is the core that the daemon runs; others are modelled by what their sources and papers
//! say. The same seed gives the same numbers.

mod card;
mod client;
mod curve;
mod measure;
mod pieces;
mod policies;
mod random;
mod show;
#[cfg(test)]
mod tests;
mod trace;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use nvshare_core::{Config, Rule};
use nvshare_proto::{QuantumRule, units};

use card::Link;
use measure::Summary;
use policies::{ByTurns, Ours, Scheduler};
use trace::{Job, Mix};
use world::World;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Policy {
    /// First come, first served, fixed quanta, page faults: the original nvshare
    Fcfs,
    /// All at once below 90 % of the card, else one at a time, page faults: a fork of it
    RunOrSerialise,
    /// This project, managed memory moved in bulk
    Managed,
    /// This project, memory moved by explicit copies, one client's to the card while another's leaves
    Swap,
    /// The same where all that leaves is copied, whether it has changed or not
    Copies,
}

/// Runs a trace of clients through policies, side by side.
#[derive(Debug, Parser)]
#[command(name = "simulate")]
struct Options {
    /// Number of clients
    #[arg(long, default_value_t = 64)]
    clients: usize,
    /// Number of GPUs
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=64))]
    gpus: u8,
    /// Memory of each GPU that all clients together may fill
    #[arg(long, default_value = "80GiB", value_parser = units::parse_limit)]
    gpu_memory: u64,
    /// Length of the simulation, in minutes of virtual time
    #[arg(long, default_value_t = 60.0)]
    minutes: f64,
    /// Seed of the trace
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Classes of clients and their proportion, as in steady=30,training=25,bursty=20,inference=20,gang=5
    #[arg(long)]
    mix: Option<Mix>,
    /// Reads the trace from a file instead
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Writes the trace to a file
    #[arg(long)]
    save: Option<PathBuf>,
    /// Policies to compare, instead of all
    #[arg(long, value_enum, value_delimiter = ',')]
    policy: Vec<Policy>,
    /// The quantum in seconds; of this project's scheduler also "auto 5% 30", as in `nvshare-ctl set-tq`
    #[arg(long, default_value = "30", value_parser = units::parse_rule)]
    tq: QuantumRule,
    /// Prints for quanta that follow from these overheads, in per cent, how long short work takes and what long work loses
    #[arg(long, value_delimiter = ',', value_parser = units::parse_overhead)]
    overheads: Vec<u32>,
    /// With overheads: how long work may wait, in seconds
    #[arg(long, default_value_t = 30.0, requires = "overheads")]
    max_wait: f64,
    /// Draws the table as a picture
    #[arg(long)]
    svg: Option<PathBuf>,
}

fn main() -> ExitCode {
    match simulate(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("simulate: {why}");
            ExitCode::FAILURE
        }
    }
}

fn simulate(options: &Options) -> Result<(), String> {
    let until = Duration::try_from_secs_f64(options.minutes * 60.0)
        .map_err(|_| "a time without meaning".to_owned())?;
    let trace = the_trace(options)?;
    if let Some(path) = &options.save {
        let lines: String = trace.iter().map(|job| format!("{job}\n")).collect();
        std::fs::write(path, lines).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    if !options.overheads.is_empty() {
        return curve::print(options, &trace, until);
    }
    let policies = if options.policy.is_empty() { Policy::value_variants() } else { &options.policy };
    let mut rows = Vec::new();
    for &policy in policies {
        let (name, scheduler, link) = scheduler(policy, options)?;
        let world =
            World::new(&trace, scheduler, usize::from(options.gpus), options.gpu_memory, link, options.seed);
        rows.push((name, Summary::of(&world.run(until))));
    }
    let title = format!(
        "{} clients, {} GPUs of {}, {} min, seed {}",
        trace.len(),
        options.gpus,
        units::Bytes(options.gpu_memory),
        options.minutes,
        options.seed
    );
    println!("{title}\n\n{}", show::table(&rows));
    if let Some(path) = &options.svg {
        let picture = show::picture(&title, &rows);
        std::fs::write(path, picture).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

fn the_trace(options: &Options) -> Result<Vec<Job>, String> {
    let gpus = usize::from(options.gpus);
    match &options.trace {
        Some(path) => {
            let text =
                std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
            trace::parse(&text, gpus).map_err(|why| format!("{}: {why}", path.display()))
        }
        None => {
            let mix = options.mix.clone().unwrap_or_default();
            let card = options.gpu_memory as f64 / (1u64 << 30) as f64;
            Ok(trace::generate(&mix, options.clients, gpus, card, options.minutes * 60.0, options.seed))
        }
    }
}

fn scheduler(policy: Policy, options: &Options) -> Result<(String, Box<dyn Scheduler>, Link), String> {
    let (gpus, card) = (usize::from(options.gpus), options.gpu_memory);
    let rule = Rule::from(options.tq);
    let quantum = match rule {
        Rule::Fixed(quantum) => quantum,
        Rule::Auto(_) => Config::default().quantum,
    };
    let seconds = quantum.as_secs_f64();
    Ok(match policy {
        Policy::Fcfs => (
            format!("fcfs, TQ {seconds} s"),
            Box::new(ByTurns::new(policies::Rule::Fcfs(quantum), gpus, card)),
            Link::FAULTS,
        ),
        Policy::RunOrSerialise => (
            "run or serialise".to_owned(),
            Box::new(ByTurns::new(policies::Rule::RunOrSerialise, gpus, card)),
            Link::FAULTS,
        ),
        Policy::Managed | Policy::Swap | Policy::Copies => {
            let (name, link) = match policy {
                Policy::Swap => ("swap", Link::SWAP),
                Policy::Copies => ("copies", Link::COPIES),
                _ => ("managed", Link::MANAGED),
            };
            let tq = if matches!(rule, Rule::Auto(_)) { "auto".to_owned() } else { format!("{seconds} s") };
            let mut config = Config::default();
            config.set_rule(None, rule);
            (format!("ours, {name}, TQ {tq}"), Box::new(Ours::new(config, card, link.memory())), link)
        }
    })
}
