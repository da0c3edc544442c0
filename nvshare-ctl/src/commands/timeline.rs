//! `nvshare-ctl timeline`

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use nvshare_admin::{Scheduler, Told};
use nvshare_proto::WatchFrom;

use crate::events::Line;
use crate::output::{Done, Failure, print_line};
use crate::timeline::{Timeline, svg, trace};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// How much of the time until now, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    seconds: f64,

    /// Where to write it: a picture (.svg), or a trace for Perfetto or Chrome (.json)
    #[arg(short, long, value_name = "FILE", value_parser = output, default_value = "nvshare-timeline.svg")]
    output: PathBuf,

    /// Draw what `watch --json` wrote into a file, instead of asking the scheduler; several files under each other, on
    /// one scale, each by its name
    #[arg(long, value_name = "FILE")]
    from: Vec<PathBuf>,
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "a number of seconds is needed".to_owned())?;
    if (0.001..=1e9).contains(&seconds) {
        Ok(seconds)
    } else {
        Err("accepted: 0.001 to 1000000000".to_owned())
    }
}

fn output(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg" | "json") => Ok(path),
        _ => Err("the name has to end with .svg (a picture) or .json (a trace)".to_owned()),
    }
}

pub(crate) fn run(scheduler: &Scheduler, options: &Options) -> Done {
    let mut timelines = Vec::new();
    for path in &options.from {
        let title = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let timeline = Timeline::of(&read(path)?, options.seconds, None)
            .ok_or_else(|| format!("{}: no client did anything", path.display()))?;
        timelines.push(Timeline { title: title.filter(|_| options.from.len() > 1), ..timeline });
    }
    if options.from.is_empty() {
        let (lines, now) = ask(scheduler)?;
        let timeline = Timeline::of(&lines, options.seconds, now)
            .ok_or_else(|| "no client did anything in that time".to_owned())?;
        timelines.push(timeline);
    }
    let is_trace = options.output.extension().is_some_and(|extension| extension == "json");
    let text = if is_trace { trace::trace(&timelines) } else { svg::draw(&timelines) };
    fs::write(&options.output, text).map_err(|error| format!("{}: {error}", options.output.display()))?;
    let length = timelines.iter().map(Timeline::length).max().unwrap_or(0);
    print_line(&format!("{}: {:.1} s", options.output.display(), length as f64 / 1e6))
}

/// The events that the scheduler keeps, and the scheduler's present time.
fn ask(scheduler: &Scheduler) -> Result<(Vec<Line>, Option<u64>), Failure> {
    let mut watch = scheduler.watch(WatchFrom::Kept, false)?;
    let mut lines = Vec::new();
    while let Some(told) = watch.wait()? {
        if let Told::Event(event, phases) = told {
            lines.push(Line::of(&event, &phases));
        }
    }
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
    let now = lines.last().and_then(|line| {
        let passed = u64::try_from(since_1970).ok()?.saturating_sub(line.time_us);
        line.up_us?.checked_add(passed)
    });
    Ok((lines, now))
}

fn read(path: &Path) -> Result<Vec<Line>, Failure> {
    let error = |text: String| format!("{}: {text}", path.display());
    let text = fs::read_to_string(path).map_err(|why| error(why.to_string()))?;
    let line = |(number, line): (usize, &str)| {
        serde_json::from_str(line)
            .map_err(|why| error(format!("line {} is no event of `watch --json`: {why}", number + 1)).into())
    };
    text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(line).collect()
}
