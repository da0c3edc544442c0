//! `nvshare-ctl`: shows and tunes a scheduler, and runs programs under it.

#![forbid(unsafe_code)]

mod commands;
mod connection;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use commands::{clients, doctor, run, set_tq, status, switch};

/// Shows and tunes an nvshare scheduler, and runs programs under it.
#[derive(Debug, Parser)]
#[command(name = "nvshare-ctl", version, max_term_width = 100)]
struct Options {
    /// Administrators' socket of the scheduler
    #[arg(long, global = true, value_name = "PATH", env = "NVSHARE_ADMIN_SOCKET")]
    socket: Option<PathBuf>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the scheduler, its GPUs and who holds them
    Status(status::Options),
    /// Show the scheduler's clients and what they have moved
    Clients(clients::Options),
    /// Set how long a client keeps a GPU while another waits
    SetTq(set_tq::Options),
    /// Switch scheduling on
    On,
    /// Switch scheduling off: everybody runs
    Off(switch::OffOptions),
    /// Forget what was set at run time: the scheduler follows its configuration again
    Reset,
    /// Look at this machine: the driver's entry points, the library, the scheduler
    Doctor(doctor::Options),
    /// Run a program that shares its GPUs
    Run(run::Options),
}

fn main() -> ExitCode {
    let options = Options::parse();
    let scheduler = connection::Scheduler::at(options.socket);
    let done = match options.command {
        Command::Status(options) => status::run(&scheduler, &options),
        Command::Clients(options) => clients::run(&scheduler, &options),
        Command::SetTq(options) => set_tq::run(&scheduler, &options),
        Command::On => switch::on(&scheduler),
        Command::Off(options) => switch::off(&scheduler, &options),
        Command::Reset => switch::reset(&scheduler),
        Command::Doctor(options) => doctor::run(&scheduler, &options),
        Command::Run(options) => run::run(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nvshare-ctl: {error}");
            ExitCode::FAILURE
        }
    }
}
