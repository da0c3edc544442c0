//! `nvshare-ctl doctor`: the problems of this machine, and how to correct them.

mod driver;
mod machine;
mod probe;
mod report;
mod sharing;

use std::path::PathBuf;

use clap::Args;
use nvshare_admin::{SCHEMA, Scheduler};
use serde::Serialize;

use crate::library::Library;
use crate::output::{Done, print, print_json};

pub(crate) use probe::probe;
use report::{Finding, Level};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The driver's libcuda.so.1 to check [default: the one that the loader finds]
    #[arg(long, value_name = "PATH")]
    driver: Option<PathBuf>,

    #[command(flatten)]
    library: Library,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The facts about this machine.
#[derive(Debug, Serialize)]
struct Findings {
    schema: u32,
    driver: Option<PathBuf>,
    /// Entry points that the driver exports.
    exports: usize,
    /// Entry points that the library does not know: work submitted through them would go around the gate.
    unknown: Vec<String>,
    library: Option<PathBuf>,
    /// The version of the scheduler that answers, if one does.
    scheduler: Option<String>,
    findings: Vec<Finding>,
}

pub(crate) fn run(scheduler: &Scheduler, options: &Options) -> Done {
    let mut findings = Vec::new();
    // A driver that was named is read and not called: the loader would load another one.
    let answer = options.driver.is_none().then(probe::unloaded);
    let loaded = answer.as_ref().and_then(|answer| answer.as_ref().ok()?.driver());
    let driver = driver::look(options.driver.as_deref().or(loaded), &mut findings);
    let library = sharing::library(&options.library, &mut findings);
    let answer = answer.filter(|_| driver.path.is_some());
    let gpus = answer.and_then(|answer| probe::alone(answer, &mut findings));
    if let (Some(gpus), Some(library)) = (&gpus, &library) {
        probe::preloaded(library, gpus, &mut findings);
    }
    machine::look(gpus.as_deref().unwrap_or_default(), &mut findings);
    let version = sharing::scheduler(scheduler, &mut findings);
    if version.is_some() {
        findings.extend(sharing::refused(scheduler));
    }
    sharing::environment(&mut findings);
    let errors = findings.iter().filter(|finding| finding.level == Level::Error).count();
    let findings = Findings {
        schema: SCHEMA,
        driver: driver.path,
        exports: driver.exports,
        unknown: driver.unknown,
        library,
        scheduler: version,
        findings,
    };
    if options.json {
        print_json(&findings)?;
    } else {
        print(&report::text(&findings.findings, &findings.unknown))?;
    }
    match errors {
        0 => Ok(()),
        1 => Err("1 error".to_owned().into()),
        more => Err(format!("{more} errors").into()),
    }
}
