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
    let text = fs::read(path).map_err(|why| format!("{}: {why}", path.display()))?;
    lines(&text).map_err(|text| format!("{}: {text}", path.display()).into())
}

/// The events in a file's text. The last line of a file that is still written may be incomplete, and is left out then.
fn lines(text: &[u8]) -> Result<Vec<Line>, String> {
    let mut events = Vec::new();
    let mut rest = text.split_inclusive(|&byte| byte == b'\n').enumerate().peekable();
    while let Some((number, line)) = rest.next() {
        let is_cut = rest.peek().is_none() && !line.ends_with(b"\n");
        match serde_json::from_slice(line) {
            Ok(event) => events.push(event),
            Err(_) if line.trim_ascii().is_empty() || is_cut && !events.is_empty() => {}
            Err(_) => return Err(format!("line {} is no event of `watch --json`", number + 1)),
        }
    }
    Ok(events)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::tests::story;

    fn event(name: &str) -> String {
        serde_json::to_string(&Line { name: Some(name.to_owned()), ..story()[0].clone() }).unwrap()
    }

    #[test]
    fn a_file_that_is_still_written_is_read() {
        let event = event("ünknown");
        let whole = format!("{event}\n\n{event}\n");
        assert_eq!(lines(whole.as_bytes()).unwrap().len(), 2);
        let in_a_character = event.find('ü').unwrap() + 1;
        for end in [1, in_a_character, event.len() - 1] {
            let cut = [whole.as_bytes(), &event.as_bytes()[..end]].concat();
            assert_eq!(lines(&cut).unwrap().len(), 2, "{end}");
        }
        assert_eq!(lines(format!("{whole}{event}").as_bytes()).unwrap().len(), 3);
    }

    #[test]
    fn a_file_of_another_kind_is_refused() {
        let event = event("x");
        let log = "2026-11-28T10:00:00Z INFO";
        for (text, number) in
            [(log.to_owned(), 1), (format!("{event}\n{log}\n"), 2), (format!("{log}\n{event}\n"), 1)]
        {
            let refused = format!("line {number} is no event of `watch --json`");
            assert_eq!(lines(text.as_bytes()).unwrap_err(), refused, "{text}");
        }
    }
}
