//! Tasks of the project: `cargo demo`, `cargo dist-local`, `cargo break-rules`.

mod break_rules;
mod demo;
mod dist;

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
    BreakRules,
    /// Make dist/ and a release tarball: stripped programs, the library, the papers
    Dist,
}

fn main() -> ExitCode {
    let done = match Options::parse().task {
        Task::Demo(options) => demo::run(&options),
        Task::BreakRules => break_rules::run(),
        Task::Dist => dist::run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
