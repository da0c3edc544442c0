//! Traces: the arrival, memory and work of each client, generated from a seed or read from a file.
//!
//! A file has a line for each client: `class arrives_s gpus gib busy_ms gap_ms cycles [weight]`, for example
//! `training 12.5 0,1 20 80 60 0 100`. GPUs are numbers with commas between them. `busy_ms` is a range `20..200` where
//! lengths are drawn, and so is `gap_ms`, or the mean of random gaps behind a `~`, as in `~300`. `cycles` 0: until the end of the
//! simulation. `#` begins a comment.
//!
//! Behind these may stand `phase=30:12:20`: every 30 s the program changes between its own `busy_ms` and `gap_ms` and these; and
//! `launches=5..15`: it launches that much in a millisecond of work, anew for each cycle; and `changes=1.6`: in a second of work it
//! writes 1.6 GiB of its memory, one part after the other. Without that, all of it changes in each turn.

use std::fmt;

use crate::random::Random;

/// The kind of a client's program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    /// Fills the card without a gap.
    Steady,
    /// Seconds of work, and seconds without.
    Bursty,
    /// Steps with host work between them.
    Training,
    /// Short requests.
    Inference,
    /// Steps on several GPUs at once.
    Gang,
}

pub(crate) const CLASSES: [(Class, &str); 5] = [
    (Class::Steady, "steady"),
    (Class::Bursty, "bursty"),
    (Class::Training, "training"),
    (Class::Inference, "inference"),
    (Class::Gang, "gang"),
];

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = CLASSES.iter().find(|(class, _)| class == self).map_or("", |(_, name)| name);
        f.pad(name)
    }
}

/// The length of gaps between work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Gap {
    /// Always this many milliseconds.
    Fixed(f64),
    /// Any from the one to the other.
    Between(f64, f64),
    /// Exponentially distributed with this mean.
    Random(f64),
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(ms) => write!(f, "{ms:.1}"),
            Self::Between(from, to) => write!(f, "{from:.1}..{to:.1}"),
            Self::Random(ms) => write!(f, "~{ms:.1}"),
        }
    }
}

/// One client of a trace.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Job {
    pub(crate) class: Class,
    pub(crate) arrives_s: f64,
    pub(crate) gpus: Vec<usize>,
    pub(crate) gib: f64,
    /// Time on the GPU in one cycle, in milliseconds: from, to.
    pub(crate) busy_ms: (f64, f64),
    pub(crate) gap: Gap,
    /// 0: without end.
    pub(crate) cycles: u64,
    pub(crate) weight: u32,
    pub(crate) phase: Option<Phase>,
    /// Launches in a millisecond of work.
    pub(crate) launches: (f64, f64),
    /// GiB of its memory that change in a second of work; none: all of it changes at once.
    pub(crate) changes: Option<f64>,
}

/// Other work that a program does now and then.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Phase {
    /// How long the program does the one and the other, in seconds.
    pub(crate) every_s: f64,
    pub(crate) busy_ms: (f64, f64),
    pub(crate) gap: Gap,
}

const LAUNCHES: (f64, f64) = (10.0, 10.0);

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gpus: Vec<String> = self.gpus.iter().map(usize::to_string).collect();
        let (from, to) = self.busy_ms;
        write!(
            f,
            "{} {:.3} {} {:.2} {from:.1}..{to:.1} ",
            self.class,
            self.arrives_s,
            gpus.join(","),
            self.gib
        )?;
        write!(f, "{} {} {}", self.gap, self.cycles, self.weight)?;
        if let Some(Phase { every_s, busy_ms: (from, to), gap }) = self.phase {
            write!(f, " phase={every_s:.1}:{from:.1}..{to:.1}:{gap}")?;
        }
        if self.launches != LAUNCHES {
            write!(f, " launches={:.1}..{:.1}", self.launches.0, self.launches.1)?;
        }
        if let Some(changes) = self.changes {
            write!(f, " changes={changes:.3}")?;
        }
        Ok(())
    }
}

impl Job {
    /// Its work comes to an end from time to time.
    pub(crate) fn ends_cycles(&self) -> bool {
        self.busy_ms.1 < 1e9
    }
}

/// The proportion of each class among the clients.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mix(Vec<(Class, f64)>);

impl Default for Mix {
    fn default() -> Self {
        use Class::{Bursty, Gang, Inference, Steady, Training};
        Self(vec![(Steady, 30.0), (Training, 25.0), (Bursty, 20.0), (Inference, 20.0), (Gang, 5.0)])
    }
}

impl std::str::FromStr for Mix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let part = |part: &str| {
            let (name, number) = part.split_once('=').unwrap_or((part, "1"));
            let class = class(name)?;
            let number: f64 = number.parse().map_err(|_| format!("{number:?} is no number"))?;
            if number > 0.0 { Ok((class, number)) } else { Err(format!("{part:?}: less than nothing")) }
        };
        text.split(',').map(part).collect::<Result<Vec<_>, String>>().map(Self)
    }
}

fn class(name: &str) -> Result<Class, String> {
    let known = || CLASSES.map(|(_, name)| name).join(", ");
    let found = CLASSES.iter().find(|(_, known)| *known == name.trim());
    found.map(|(class, _)| *class).ok_or_else(|| format!("{name:?} is no class; there are {}", known()))
}

impl Mix {
    fn draw(&self, random: &mut Random) -> Class {
        let mut at = random.unit() * self.0.iter().map(|(_, part)| part).sum::<f64>();
        for &(class, part) in &self.0 {
            if at < part {
                return class;
            }
            at -= part;
        }
        Class::Steady
    }
}

/// Generates a trace of `clients` on GPUs with this much memory each, over this time.
pub(crate) fn generate(
    mix: &Mix,
    clients: usize,
    gpus: usize,
    card_gib: f64,
    seconds: f64,
    seed: u64,
) -> Vec<Job> {
    let random = &mut Random::new(seed);
    let job = |at: usize| {
        let class = mix.draw(random);
        let (busy_ms, gap, size) = match class {
            Class::Steady => ((1e12, 1e12), Gap::Fixed(0.0), (0.2, 0.6)),
            Class::Bursty => ((200.0, 3000.0), Gap::Random(4000.0), (0.1, 0.3)),
            Class::Training => ((60.0, 120.0), Gap::Fixed(random.between(20.0, 80.0)), (0.15, 0.5)),
            Class::Inference => ((5.0, 40.0), Gap::Random(random.between(200.0, 1500.0)), (0.1, 0.3)),
            Class::Gang => ((100.0, 200.0), Gap::Fixed(20.0), (0.3, 0.6)),
        };
        let wide = if class == Class::Gang { (2 + (random.unit() * 3.0) as usize).min(gpus) } else { 1 };
        let first = if wide > 1 { (random.unit() * gpus as f64) as usize } else { at };
        let mut on: Vec<usize> = (0..wide).map(|n| (first + n) % gpus).collect();
        on.sort_unstable();
        Job {
            class,
            arrives_s: random.between(0.0, seconds / 10.0),
            gpus: on,
            gib: card_gib * random.between(size.0, size.1),
            busy_ms,
            gap,
            cycles: 0,
            weight: 100,
            phase: None,
            launches: LAUNCHES,
            changes: None,
        }
    };
    (0..clients).map(job).collect()
}

/// Reads a trace. An error names the line and what is wrong with it.
pub(crate) fn parse(text: &str, gpus: usize) -> Result<Vec<Job>, String> {
    let lines =
        text.lines().enumerate().map(|(at, line)| (at + 1, line.split('#').next().unwrap_or("").trim()));
    lines
        .filter(|(_, line)| !line.is_empty())
        .map(|(at, line)| parse_line(line, gpus).map_err(|why| format!("line {at}: {why}")))
        .collect()
}

fn parse_line(line: &str, gpus: usize) -> Result<Job, String> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [name, arrives, on, gib, busy, gap, cycles, rest @ ..] = fields.as_slice() else {
        return Err("a client is `class arrives_s gpus gib busy_ms gap_ms cycles [weight]`".to_owned());
    };
    let one = |text: &str| match text.parse::<usize>() {
        Ok(gpu) if gpu < gpus => Ok(gpu),
        Ok(gpu) => Err(format!("there is no GPU {gpu} among {gpus}")),
        Err(_) => Err(format!("{text:?} is no GPU's number")),
    };
    let mut on = on.split(',').map(one).collect::<Result<Vec<usize>, _>>()?;
    on.sort_unstable();
    on.dedup();
    let mut job = Job {
        class: class(name)?,
        arrives_s: number(arrives)?,
        gpus: on,
        gib: number(gib)?,
        busy_ms: range(busy)?,
        gap: parse_gap(gap)?,
        cycles: cycles.parse().map_err(|_| format!("{cycles:?} is no number of cycles"))?,
        weight: 100,
        phase: None,
        launches: LAUNCHES,
        changes: None,
    };
    for (at, more) in rest.iter().enumerate() {
        match more.split_once('=') {
            None if at == 0 => job.weight = more.parse().map_err(|_| format!("{more:?} is no weight"))?,
            Some(("launches", per_ms)) => job.launches = range(per_ms)?,
            Some(("changes", gib)) => job.changes = Some(number(gib)?),
            Some(("phase", phase)) => job.phase = Some(parse_phase(phase)?),
            _ => return Err(format!("{more:?} is one field too many")),
        }
    }
    Ok(job)
}

fn number(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok().filter(|n: &f64| n.is_finite() && *n >= 0.0);
    number.ok_or_else(|| format!("{text:?} is no number"))
}

fn range(text: &str) -> Result<(f64, f64), String> {
    let (from, to) = text.split_once("..").unwrap_or((text, text));
    let range = (number(from)?, number(to)?);
    if range.0 <= 0.0 || range.1 < range.0 {
        return Err(format!("{text:?} is no time on a GPU"));
    }
    Ok(range)
}

fn parse_gap(text: &str) -> Result<Gap, String> {
    Ok(match text.strip_prefix('~') {
        Some(mean) => Gap::Random(number(mean)?),
        None => match text.split_once("..") {
            Some((from, to)) => Gap::Between(number(from)?, number(to)?),
            None => Gap::Fixed(number(text)?),
        },
    })
}

fn parse_phase(text: &str) -> Result<Phase, String> {
    match text.split(':').collect::<Vec<_>>().as_slice() {
        [every, busy, gap] => {
            Ok(Phase { every_s: number(every)?.max(0.001), busy_ms: range(busy)?, gap: parse_gap(gap)? })
        }
        _ => Err(format!("{text:?} is no phase: it is `every_s:busy_ms:gap_ms`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_that_is_written_is_read_again() {
        let trace = generate(&Mix::default(), 200, 8, 80.0, 3600.0, 1);
        let text: Vec<String> = trace.iter().map(Job::to_string).collect();
        let again = parse(&text.join("\n"), 8).unwrap();
        assert_eq!(again.iter().map(Job::to_string).collect::<Vec<_>>(), text);
        assert!(CLASSES.iter().all(|(class, _)| trace.iter().any(|job| job.class == *class)));
        assert_eq!(
            trace,
            generate(&Mix::default(), 200, 8, 80.0, 3600.0, 1),
            "the same seed, the same trace"
        );
    }

    #[test]
    fn lines_that_cannot_be_read_are_named() {
        for (text, why) in [
            ("steady 0 0 20 80 60", "a client is"),
            ("\nnone 0 0 20 80 60 0", "line 2: \"none\" is no class"),
            ("steady 0 8 20 80 60 0", "no GPU 8 among 8"),
            ("steady x 0 20 80 60 0", "\"x\" is no number"),
            ("steady 0 0 20 -1 60 0", "\"-1\" is no number"),
            ("steady 0 0 20 9..1 60 0", "no time on a GPU"),
            ("steady 0 0 20 80 ~NaN 0", "no number"),
            ("steady 0 0 20 80 1..x 0", "no number"),
            ("steady 0 0 20 80 60 x", "no number of cycles"),
            ("steady 0 0 20 80 60 0 -1", "no weight"),
            ("steady 0 0 20 80 60 0 100 7", "too many"),
            ("steady 0 0 20 80 60 0 100 what=7", "too many"),
            ("steady 0 0 20 80 60 0 phase=7:8", "no phase"),
            ("steady 0 0 20 80 60 0 launches=x", "no number"),
            ("steady 0 0 20 80 60 0 changes=-1", "no number"),
        ] {
            let error = parse(text, 8).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        assert_eq!(parse("# nothing\n\n", 8), Ok(Vec::new()));
        let gap = parse("steady 0 0 20 80 60..90 0", 8).unwrap()[0].gap;
        assert_eq!(gap, Gap::Between(60.0, 90.0));
        let line = "steady 0.000 0 20.00 80.0..80.0 60.0 0 100 phase=30.0:5.0..6.0:~20.0 launches=5.0..15.0 changes=1.600";
        assert_eq!(parse(line, 8).unwrap()[0].to_string(), line);
    }
}
