//! `nvshare-ctl`: shows and tunes a scheduler, and runs programs under it.

#![deny(unsafe_code)]

mod commands;
mod elf;
mod library;
mod output;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use nvshare_admin::Scheduler;

use commands::{clients, doctor, install, run, set_tq, status, switch};

/// Shows and tunes an nvshare scheduler, and runs programs under it.
#[derive(Debug, Parser)]
#[command(name = "nvshare-ctl", version, max_term_width = 100)]
struct Options {
    /// Socket of the scheduler: the administrators', or for `run` the clients' [default: root's scheduler, else the
    /// user's own; NVSHARE_ADMIN_SOCKET and NVSHARE_SOCKET name others]
    #[arg(long, global = true, value_name = "PATH")]
    socket: Option<PathBuf>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the scheduler, its GPUs, and who holds and waits for them
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
    /// Check this machine, and say what to do about what is wrong
    Doctor(doctor::Options),
    /// Run a program that shares its GPUs
    Run(run::Options),
    /// Install or upgrade nvshare; running programs and schedulers keep what they have
    Install(install::Options),
    /// Copy the library alone into a folder, such as a volume that containers share
    InstallLibrary(install::LibraryOptions),
    /// Remove what `install` has installed
    Uninstall(install::Options),
    /// Talk to the driver as a program does, and say what it answers; for `doctor`
    #[command(hide = true)]
    Probe,
}

fn main() -> ExitCode {
    let Options { socket, command } = Options::parse();
    let scheduler = || socket.clone().map_or_else(Scheduler::usual, Scheduler::at);
    let done = match command {
        Command::Status(options) => status::run(&scheduler(), &options),
        Command::Clients(options) => clients::run(&scheduler(), &options),
        Command::SetTq(options) => set_tq::run(&scheduler(), &options),
        Command::On => switch::on(&scheduler()),
        Command::Off(options) => switch::off(&scheduler(), &options),
        Command::Reset => switch::reset(&scheduler()),
        Command::Doctor(options) => doctor::run(&scheduler(), &options),
        Command::Run(options) => run::run(&options, socket.as_deref()),
        Command::Install(options) => install::install(&options),
        Command::InstallLibrary(options) => install::install_library(&options),
        Command::Uninstall(options) => install::uninstall(&options),
        Command::Probe => doctor::probe(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
