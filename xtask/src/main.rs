//! Tasks of the project: `cargo demo`, `cargo dist-local`, `cargo image`, `cargo deb-local`, `cargo break-rules`.

mod break_rules;
mod demo;
mod dist;
mod image;
mod package;
mod papers;
mod shipped;
mod supervise;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tasks of the project.
#[derive(Debug, Parser)]
#[command(name = "xtask")]
struct Options {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run programs that together need more memory than the GPU has, and show what happens
    Demo(demo::Options),
    /// Break each safety rule on purpose, and see its test go red
    BreakRules {
        /// Only rules with this in their text, or in the name of their test
        only: Option<String>,
        /// See random programs notice, and print at which seed they do: for the rules that name a defect of theirs
        #[arg(long)]
        storm: bool,
        /// Seeds to try at most, for each rule
        #[arg(long, default_value_t = 2000, requires = "storm")]
        seeds: u64,
    },
    /// Make dist/ and a release tarball: stripped programs, the library, the papers
    Dist,
    /// Build the container image of dist/
    Image(image::Options),
    /// Build a Debian package of dist/
    Deb(package::Options),
}

fn main() -> ExitCode {
    let task = Options::parse().task;
    if let Task::Demo(options) = &task
        && !supervise::is_supervised()
    {
        // Mistakes in the options are reported here, before anything is started.
        return options.check().and_then(|()| supervise::supervise()).unwrap_or_else(|error| {
            eprintln!("{error}");
            ExitCode::FAILURE
        });
    }
    let done = match task {
        Task::Demo(options) => demo::run(&options),
        Task::BreakRules { only, storm: true, seeds } => break_rules::storm(only.as_deref(), seeds),
        Task::BreakRules { only, .. } => break_rules::run(only.as_deref()),
        Task::Dist => dist::run(),
        Task::Image(options) => image::run(&options),
        Task::Deb(options) => package::run(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
