//! `nvshare-ctl`: shows and tunes a scheduler, and runs programs under it.

#![deny(unsafe_code)]

mod arguments;
mod commands;
mod elf;
mod events;
mod gpu;
mod library;
mod output;
mod show;
mod timeline;
mod top;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use nvshare_admin::Scheduler;

pub use commands::install::papers;

use commands::{
    cdi, clients, doctor, give, install, run, set_tq, sleep, status, switch, timeline as timeline_command,
    top as top_command, watch,
};

/// Shows and tunes an nvshare scheduler, and runs programs under it.
#[derive(Debug, Parser)]
#[command(name = "nvshare-ctl", version, max_term_width = 100)]
struct Options {
    /// The scheduler's socket for administrators; for `run` and `cdi` the one for clients [variables: NVSHARE_ADMIN_SOCKET,
    /// NVSHARE_SOCKET] [default: the socket of root's scheduler, else of the user's own]
    #[arg(long, global = true, value_name = "PATH")]
    socket: Option<PathBuf>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the scheduler, its GPUs, and the clients that hold them and wait for them
    Status(status::Options),
    /// Show the clients, the time that each had, and the memory that each moved
    Clients(clients::Options),
    /// Print events as they happen
    Watch(watch::Options),
    /// Show the GPUs and their clients in this terminal, as they change
    Top(top_command::Options),
    /// Draw who held the GPUs, and what moved
    Timeline(timeline_command::Options),
    /// Set how long a client keeps a GPU while another waits
    SetTq(set_tq::Options),
    /// Limit the time or the memory that a client may have
    SetLimit(give::LimitOptions),
    /// Set how much of its GPUs' time a client gets against others
    SetWeight(give::WeightOptions),
    /// Set the priority of a client's work: low, normal or high
    SetPriority(give::PriorityOptions),
    /// Pause a client; its memory makes way when others want the room
    Pause(give::ClientOptions),
    /// Let a paused client go on
    Resume(give::ClientOptions),
    /// Take an idle client with NVSHARE_SLEEP=1 off the GPU; the next call of its program brings it back
    Sleep(sleep::Options),
    /// Bring a client back to the GPU as soon as there is room
    Wake(sleep::Options),
    /// Switch scheduling on
    On,
    /// Switch scheduling off: all programs run at the same time
    Off(switch::OffOptions),
    /// Follow the configuration again, quantum and scheduling; limits and weights of clients stay
    Reset,
    /// Check this machine, and say how to correct each problem
    Doctor(doctor::Options),
    /// Run a program under nvshare
    Run(run::Options),
    /// Describe nvshare to container engines, as a device that a container asks for
    Cdi(cdi::Options),
    /// Install or upgrade nvshare; running programs and schedulers are not disturbed
    Install(install::Options),
    /// Copy only the library into a folder, such as a volume that containers share
    InstallLibrary(install::LibraryOptions),
    /// Remove the files that `install` installed
    Uninstall(install::Options),
    /// Talk to the driver as a program does, and say what it answers; for `doctor`
    #[command(hide = true)]
    Probe,
}

/// The command line, in clap's form.
#[must_use]
pub fn command() -> clap::Command {
    Options::command()
}

/// The whole program.
#[must_use]
pub fn main() -> ExitCode {
    let Options { socket, command } = Options::parse();
    let scheduler = || socket.clone().map_or_else(Scheduler::usual, Scheduler::at);
    let done = match command {
        Command::Status(options) => status::run(&scheduler(), &options),
        Command::Clients(options) => clients::run(&scheduler(), &options),
        Command::Watch(options) => watch::run(&scheduler(), &options),
        Command::Top(options) => top_command::run(scheduler(), &options),
        Command::Timeline(options) => timeline_command::run(&scheduler(), &options),
        Command::SetTq(options) => set_tq::run(&scheduler(), &options),
        Command::SetLimit(options) => give::limit(&scheduler(), &options),
        Command::SetWeight(options) => give::weight(&scheduler(), &options),
        Command::SetPriority(options) => give::priority(&scheduler(), &options),
        Command::Pause(options) => give::pause(&scheduler(), &options, true),
        Command::Resume(options) => give::pause(&scheduler(), &options, false),
        Command::Sleep(options) => sleep::sleep(&scheduler(), &options),
        Command::Wake(options) => sleep::wake(&scheduler(), &options),
        Command::On => switch::on(&scheduler()),
        Command::Off(options) => switch::off(&scheduler(), &options),
        Command::Reset => switch::reset(&scheduler()),
        Command::Doctor(options) => doctor::run(&scheduler(), &options),
        Command::Run(options) => run::run(&options, socket.as_deref()),
        Command::Cdi(options) => cdi::run(&options, socket.as_deref()),
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
