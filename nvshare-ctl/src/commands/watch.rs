//! `nvshare-ctl watch`

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::Duration;

use clap::Args;
use nvshare_admin::{Error, Scheduler, Told, Watch};
use nvshare_proto::{GpuUuid, WatchFrom};

use crate::events::Line;
use crate::output::{Done, Failure, print_to_reader};
use crate::show;

/// Time between two looks for a scheduler that has gone.
const LOOK_EVERY: Duration = Duration::from_millis(500);

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Print each event as one line of JSON
    #[arg(long)]
    json: bool,

    /// Begin with the events that the scheduler still keeps
    #[arg(long)]
    kept: bool,

    /// Print the events that the scheduler still keeps, and end
    #[arg(long)]
    no_follow: bool,
}

pub(crate) fn run(scheduler: &Scheduler, options: &Options) -> Done {
    let from = if options.kept || options.no_follow { WatchFrom::Kept } else { WatchFrom::Now };
    // A scheduler that is absent at the beginning is an error; one that goes later may come back.
    let mut watch = scheduler.watch(from, !options.no_follow)?;
    let mut printer = Printer { json: options.json, gpus: names(scheduler) };
    loop {
        let line = match watch.wait() {
            Ok(Some(Told::Event(event))) => Line::of(&event),
            Ok(Some(Told::Missed(count))) => Line::missed(count),
            Ok(Some(Told::Alive)) => continue,
            Ok(None) => return Ok(()),
            Err(error) if options.no_follow => return Err(error.into()),
            Err(error) => {
                if !printer.print(&Line::lost(error.to_string()))? {
                    return Ok(());
                }
                watch = join_again(scheduler, &watch)?;
                printer.gpus = names(scheduler);
                Line::joined()
            }
        };
        if !printer.print(&line)? {
            return Ok(());
        }
    }
}

/// Waits for a scheduler, and goes on where the last one ended.
fn join_again(scheduler: &Scheduler, lost: &Watch) -> Result<Watch, Failure> {
    loop {
        sleep(LOOK_EVERY);
        match scheduler.watch(lost.place(), true) {
            Ok(watch) => return Ok(watch),
            // Another scheduler may refuse this user, or have another version: waiting does not change that.
            Err(error @ (Error::NotAnAdministrator { .. } | Error::Refused(_))) => return Err(error.into()),
            Err(_) => {}
        }
    }
}

/// The GPUs' names for people.
fn names(scheduler: &Scheduler) -> BTreeMap<GpuUuid, String> {
    let gpus = scheduler.status().map(|status| status.gpus).unwrap_or_default();
    gpus.iter().map(|gpu| (gpu.gpu, show::gpu_name(gpu))).collect()
}

struct Printer {
    json: bool,
    gpus: BTreeMap<GpuUuid, String>,
}

impl Printer {
    /// Prints a line; false: nobody reads any more.
    fn print(&self, line: &Line) -> Result<bool, Failure> {
        let text = if self.json {
            serde_json::to_string(line).map_err(|error| error.to_string())?
        } else {
            line.sentence(&self.gpus)
        };
        print_to_reader(&format!("{text}\n"))
    }
}
