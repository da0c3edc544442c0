//! `nvshare-ctl watch`

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::Duration;

use clap::Args;
use nvshare_admin::{Error, Scheduler, Told, Watch};
use nvshare_proto::{EventKind, GpuUuid, WatchFrom};

use crate::events::Line;
use crate::output::{Done, Failure, has_reader, print_to_reader};
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
    let mut printer = Printer { json: options.json, gpus: names(scheduler), left: Left::default() };
    loop {
        let goes_on = match watch.wait() {
            Ok(Some(Told::Event(event, phases))) => printer.print(Line::of(&event, &phases))?,
            Ok(Some(Told::Missed(count))) => printer.print(Line::missed(count))?,
            Ok(Some(Told::Alive)) => printer.print_rest()? && has_reader(),
            Ok(None) => return printer.print_rest().map(drop),
            Err(error) if options.no_follow => return Err(error.into()),
            Err(error) => {
                if !printer.print(Line::lost(error.to_string()))? {
                    return Ok(());
                }
                let Some(joined) = join_again(scheduler, &watch)? else { return Ok(()) };
                watch = joined;
                printer.gpus = names(scheduler);
                printer.print(Line::joined())?
            }
        };
        if !goes_on {
            return Ok(());
        }
    }
}

/// Waits for a scheduler, and goes on where the last one ended; none: nobody reads any more.
fn join_again(scheduler: &Scheduler, lost: &Watch) -> Result<Option<Watch>, Failure> {
    loop {
        sleep(LOOK_EVERY);
        if !has_reader() {
            return Ok(None);
        }
        match scheduler.watch(lost.place(), true) {
            Ok(watch) => return Ok(Some(watch)),
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

/// How soon a process ends that exits: its connections end first.
const EXITS_WITHIN: Duration = Duration::from_secs(1);

/// The lines that a process has left and lives on. They are printed when it is known that the process does not only exit.
#[derive(Debug, Default)]
struct Left(Vec<Line>);

impl Left {
    /// The lines to print when this one comes.
    fn lines_with(&mut self, line: Line) -> Vec<Line> {
        let is_old = |left: &mut Line| {
            Duration::from_micros(line.time_us.saturating_sub(left.time_us)) >= EXITS_WITHIN
        };
        let mut lines: Vec<Line> = self.0.extract_if(.., is_old).collect();
        if line.event == EventKind::Ended.name() {
            self.0.retain(|left| left.client != line.client);
        }
        let is_left = line.event == EventKind::Left.name();
        if is_left {
            self.0.push(line)
        } else {
            lines.push(line)
        }
        lines
    }
}

struct Printer {
    json: bool,
    gpus: BTreeMap<GpuUuid, String>,
    left: Left,
}

impl Printer {
    /// Prints a line; false: nobody reads any more. Programs get each event at once.
    fn print(&mut self, line: Line) -> Result<bool, Failure> {
        let lines = if self.json { vec![line] } else { self.left.lines_with(line) };
        self.write(&lines)
    }

    /// Nothing has happened for a while: prints what was kept back.
    fn print_rest(&mut self) -> Result<bool, Failure> {
        let left = std::mem::take(&mut self.left.0);
        self.write(&left)
    }

    fn write(&self, lines: &[Line]) -> Result<bool, Failure> {
        for line in lines {
            let text = if self.json {
                serde_json::to_string(line).map_err(|error| error.to_string())?
            } else {
                line.sentence(&self.gpus)
            };
            if !print_to_reader(&format!("{text}\n"))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(event: &str, client: u64, millis: u64) -> Line {
        Line { event: event.to_owned(), client: Some(client), time_us: millis * 1000, ..Line::joined() }
    }

    /// The events that are printed when these come, each of a client after milliseconds.
    fn printed(told: &[(&str, u64, u64)]) -> Vec<(String, Option<u64>)> {
        let mut left = Left::default();
        let come =
            told.iter().flat_map(|&(event, client, millis)| left.lines_with(line(event, client, millis)));
        let mut lines = Vec::from_iter(come);
        lines.append(&mut left.0);
        lines.into_iter().map(|line| (line.event, line.client)).collect()
    }

    #[test]
    fn a_process_that_exits_is_said_to_have_ended_alone() {
        let said = |told: &[(&str, u64)]| {
            Vec::from_iter(told.iter().map(|&(event, client)| (event.to_owned(), Some(client))))
        };
        let exits = [("left", 1, 5), ("running", 2, 6), ("ended", 1, 7)];
        assert_eq!(printed(&exits), said(&[("running", 2), ("ended", 1)]));
        let lives_on = [("left", 1, 5), ("ended", 2, 6), ("running", 2, 1100), ("ended", 1, 2000)];
        assert_eq!(printed(&lives_on), said(&[("ended", 2), ("left", 1), ("running", 2), ("ended", 1)]));
        assert_eq!(printed(&[("left", 1, 5), ("left", 2, 6)]), said(&[("left", 1), ("left", 2)]));
    }
}
