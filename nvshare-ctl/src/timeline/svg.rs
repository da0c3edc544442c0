//! Draws timelines.

use std::fmt::Write;

use nvshare_proto::units::{Bytes, GIB};
use nvshare_proto::{ClientState, EventKind};

use super::{Lane, Timeline, state_name};
use crate::show;

const WIDTH: f64 = 1120.0;
/// The left end of the time axis.
const LEFT: f64 = 176.0;
const RIGHT: f64 = WIDTH - 136.0;
const LANE: f64 = 46.0;
const BAR: f64 = 22.0;
const STRIP: f64 = 12.0;
/// The width of a time that is folded.
const FOLD: f64 = 30.0;

/// Colours that can be told apart, by most people with a colour vision of their own too (after Okabe and Ito).
const COLOURS: [&str; 8] =
    ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#6a51a3", "#8c6d31"];

const WAITS: &str = "#d1d5db";
const BLOCKED: &str = "#dc2626";
const DRAINS: &str = "#111827";
const LEAVES: &str = "#9ca3af";
const DEFERRED: &str = "#f59e0b";
const FAILED: &str = "#dc2626";
const FOLDED: &str = "#e5e7eb";

const STYLE: &str = "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#1f2937}\
.t{font-size:19px;font-weight:650}.s{font-size:12px;fill:#6b7280}.g{font-size:13px;font-weight:600}\
.n{font-size:13px;font-weight:600}.p{font-size:11px;fill:#6b7280}.m{font-size:10.5px;fill:#4b5563}\
.i{font-size:11px;fill:#fff;font-weight:600}.r{font-size:13px;font-weight:600;text-anchor:end}\
.q{font-size:11px;fill:#6b7280;text-anchor:end}.a{font-size:11px;fill:#6b7280;text-anchor:middle}";

/// A text in XML.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn shorten(text: &str, length: usize) -> String {
    if text.chars().count() <= length {
        return text.to_owned();
    }
    text.chars().take(length - 1).chain(['…']).collect()
}

fn seconds(micros: u64) -> String {
    match micros as f64 / 1e6 {
        s if s < 10.0 => format!("{s:.2} s"),
        s if s < 100.0 => format!("{s:.1} s"),
        s => format!("{s:.0} s"),
    }
}

fn size(bytes: u64) -> String {
    if bytes >= GIB { format!("{:.1} GiB", bytes as f64 / GIB as f64) } else { Bytes(bytes).to_string() }
}

/// A picture in the making.
struct Canvas {
    text: String,
    /// The height at which the next element goes.
    y: f64,
    scale: Scale,
}

/// The place of each moment of a timeline.
#[derive(Default)]
struct Scale {
    begin: u64,
    /// Times that are drawn as narrow as [`FOLD`], because nothing happens in them.
    folds: Vec<(u64, u64)>,
    /// The width of a microsecond.
    micro: f64,
}

impl Scale {
    /// The largest scale on which each of them fits.
    fn of_all(timelines: &[Timeline]) -> f64 {
        let fits = |timeline: &Timeline| {
            let folds = timeline.folds();
            let folded: u64 = folds.iter().map(|(from, to)| to - from).sum();
            let length = timeline.length().saturating_sub(folded).max(1);
            (RIGHT - LEFT - FOLD * folds.len() as f64) / length as f64
        };
        timelines.iter().map(fits).fold(f64::MAX, f64::min)
    }

    fn x(&self, at: u64) -> f64 {
        let (mut x, mut since) = (LEFT, self.begin);
        for &(from, to) in self.folds.iter().take_while(|(from, _)| *from < at) {
            x += (from - since) as f64 * self.micro;
            if at < to {
                return x + FOLD * (at - from) as f64 / (to - from) as f64;
            }
            (x, since) = (x + FOLD, to);
        }
        x + at.saturating_sub(since) as f64 * self.micro
    }

    fn is_folded(&self, at: u64) -> bool {
        self.folds.iter().any(|(from, to)| (from + 1..*to).contains(&at))
    }

    /// The distance of the marks of the axis, in microseconds.
    fn tick(&self) -> u64 {
        let length = ((RIGHT - LEFT) / self.micro) as u64;
        let steps = [1u64, 2, 5].into_iter();
        let mut all = (0..10).flat_map(|power| steps.clone().map(move |step| step * 10u64.pow(power)));
        all.find(|tick| length / tick <= 12).unwrap_or(length).max(1)
    }

    /// The marks of the axis, counted from the begin of the timeline.
    fn ticks(&self, length: u64) -> Vec<u64> {
        let all = (0..=length).step_by(usize::try_from(self.tick()).unwrap_or(usize::MAX));
        all.filter(|at| !self.is_folded(self.begin + at)).collect()
    }
}

/// Draws timelines under each other, on one scale.
pub(crate) fn draw(timelines: &[Timeline]) -> String {
    let micro = Scale::of_all(timelines);
    let mut canvas = Canvas { text: String::new(), y: 24.0, scale: Scale { micro, ..Scale::default() } };
    canvas.head(timelines);
    for timeline in timelines {
        canvas.timeline(timeline);
    }
    canvas.legend();
    let height = canvas.y + 12.0;
    let patterns: String = COLOURS
        .iter()
        .enumerate()
        .map(|(i, colour)| {
            format!(
                "<pattern id=\"h{i}\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
                 <rect width=\"6\" height=\"6\" fill=\"{colour}\" fill-opacity=\".22\"/><rect width=\"2.4\" height=\"6\" fill=\"{colour}\" fill-opacity=\".75\"/></pattern>"
            )
        })
        .collect();
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height:.0}\" viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\">\n\
         <title>Who held the GPU</title><style>{STYLE}</style><defs>{patterns}</defs>\n\
         <rect x=\".5\" y=\".5\" width=\"{:.0}\" height=\"{:.0}\" rx=\"10\" fill=\"#fff\" stroke=\"#d1d5db\"/>\n{}</svg>\n",
        WIDTH - 1.0,
        height - 1.0,
        canvas.text
    )
}

impl Canvas {
    fn put(&mut self, class: &str, x: f64, y: f64, text: &str) {
        let _ =
            writeln!(self.text, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escape(text));
    }

    fn rect(&mut self, [x, y, w, h]: [f64; 4], fill: &str, title: &str) {
        let title =
            if title.is_empty() { String::new() } else { format!("<title>{}</title>", escape(title)) };
        let _ = writeln!(
            self.text,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{h:.1}\" rx=\"{:.1}\" fill=\"{fill}\">{title}</rect>",
            w.max(0.8),
            (h / 8.0).min(w / 2.0).max(0.0)
        );
    }

    fn line(&mut self, [x1, y1, x2, y2]: [f64; 4], style: &str) {
        let _ = writeln!(
            self.text,
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" {style}/>"
        );
    }

    fn head(&mut self, timelines: &[Timeline]) {
        self.put("t", 24.0, self.y + 14.0, "Who held the GPU, and what moved");
        let text = match timelines {
            [one] => {
                let lanes = one.gpus.values().flat_map(|lanes| lanes.values());
                let [out, back] = lanes.map(Lane::moved).fold([0, 0], |a, b| [a[0] + b[0], a[1] + b[1]]);
                format!("{} · {} out · {} back in", seconds(one.length()), size(out), size(back))
            }
            several => {
                let each = several.iter().map(|one| {
                    format!("{}: {}", one.title.as_deref().unwrap_or_default(), seconds(one.length()))
                });
                each.collect::<Vec<_>>().join(" · ")
            }
        };
        self.put("s", 24.0, self.y + 34.0, &text);
        self.y += 56.0;
    }

    fn timeline(&mut self, timeline: &Timeline) {
        if let Some(title) = &timeline.title {
            self.put("g", 24.0, self.y + 8.0, title);
            self.put("r", WIDTH - 24.0, self.y + 8.0, &seconds(timeline.length()));
            self.y += 20.0;
        }
        (self.scale.begin, self.scale.folds) = (timeline.begin, timeline.folds());
        let ticks = self.scale.ticks(timeline.length());
        let top = self.y;
        let height: f64 = timeline.gpus.values().map(|lanes| 34.0 + lanes.len() as f64 * LANE).sum::<f64>();
        for at in &ticks {
            let x = self.scale.x(timeline.begin + at);
            self.line([x, top, x, top + height], "stroke=\"#eef0f3\"");
        }
        for (gpu, lanes) in &timeline.gpus {
            self.gpu(timeline, &show::short_uuid(*gpu), lanes.values().collect());
        }
        self.folds(top, height);
        self.axis(&ticks);
        self.y += 30.0;
    }

    /// Covers what is folded, and says how long it is.
    fn folds(&mut self, top: f64, height: f64) {
        for (from, to) in self.scale.folds.clone() {
            let x = self.scale.x(from);
            self.rect(
                [x + 1.0, top, FOLD - 2.0, height],
                FOLDED,
                &format!("nothing happens for {}", seconds(to - from)),
            );
            self.put("a", x + FOLD / 2.0, top + 12.0, &format!("+{}", seconds(to - from)));
        }
    }

    fn axis(&mut self, ticks: &[u64]) {
        let is_whole = self.scale.tick() >= 1_000_000;
        for &at in ticks {
            let value = at as f64 / 1e6;
            let text = if is_whole { format!("{value:.0}") } else { format!("{value}") };
            let text = if at == 0 { "0 s".to_owned() } else { text };
            self.put("a", self.scale.x(self.scale.begin + at), self.y + 12.0, &text);
        }
    }

    fn gpu(&mut self, timeline: &Timeline, name: &str, mut lanes: Vec<&Lane>) {
        // The same program has the same colour in each of several timelines.
        lanes.sort_by(|one, other| one.name.cmp(&other.name));
        let together = together(&lanes);
        let held: u64 = together.iter().map(|(from, to, _)| to - from).sum();
        self.put("g", 24.0, self.y + 13.0, name);
        let percent = held as f64 / timeline.length() as f64 * 100.0;
        self.put("q", WIDTH - 24.0, self.y + 13.0, &format!("busy {percent:.0} %"));
        self.rect([LEFT, self.y + 2.0, self.scale.x(timeline.end) - LEFT, STRIP], "#f3f4f6", "");
        for (from, to, holders) in together {
            let [from, to] = [from, to].map(|at| self.scale.x(at));
            // Those who hold the GPU at the same time share the height.
            let height = STRIP / holders.len() as f64;
            for (place, lane) in holders.into_iter().enumerate() {
                let y = self.y + 2.0 + place as f64 * height;
                self.rect([from, y, to - from, height], COLOURS[lane % COLOURS.len()], "");
            }
        }
        self.y += 26.0;
        let all: u64 = lanes.iter().map(|lane| lane.held()).sum();
        for (i, lane) in lanes.into_iter().enumerate() {
            self.lane(i, lane, all);
            self.y += LANE;
        }
        self.y += 8.0;
    }

    fn lane(&mut self, i: usize, lane: &Lane, all: u64) {
        let colour = COLOURS[i % COLOURS.len()];
        let (y, middle) = (self.y, self.y + 4.0 + BAR / 2.0);
        self.rect([24.0, y + 4.0, 4.0, BAR], colour, "");
        self.put("n", 36.0, y + 14.0, &shorten(&lane.name, 18));
        let pid = lane.pid.map(|pid| format!("pid {pid}")).unwrap_or_default();
        self.put("p", 36.0, y + 28.0, &pid);
        self.put("r", WIDTH - 24.0, y + 14.0, &format!("held {}", seconds(lane.held())));
        let share = lane.held() as f64 / all.max(1) as f64 * 100.0;
        self.put("q", WIDTH - 24.0, y + 28.0, &format!("{share:.0} % of held time"));
        for span in &lane.spans {
            let [from, to] = [span.from, span.to].map(|at| self.scale.x(at));
            let title = format!("{} for {}", state_name(span.state), seconds(span.to - span.from));
            let bar = [from, y + 4.0, to - from, BAR];
            let thin = [from, middle - 1.5, to - from, 3.0];
            match span.state {
                ClientState::Running | ClientState::Free => self.rect(bar, colour, &title),
                ClientState::Draining => {
                    self.rect(bar, colour, &title);
                    self.rect([from, y + 4.0, to - from, 5.0], DRAINS, &title);
                }
                ClientState::Restoring => self.rect(bar, &format!("url(#h{})", i % COLOURS.len()), &title),
                ClientState::Idle => self.rect([from, middle - 5.0, to - from, 10.0], colour, &title),
                ClientState::Blocked => self.rect(thin, BLOCKED, &title),
                ClientState::Next => self.rect(thin, colour, &title),
                _ => self.rect(thin, WAITS, &title),
            }
        }
        for moved in &lane.moves {
            let [from, to] = [moved.from, moved.to].map(|at| self.scale.x(at));
            let arrow = if moved.out { "↓" } else { "↑" };
            let way = if moved.out { "out" } else { "in" };
            let rate = moved.bytes as f64 / GIB as f64 / ((moved.to - moved.from).max(1) as f64 / 1e6);
            let title = format!("{} {way}, {rate:.1} GiB/s", size(moved.bytes));
            let fill = if moved.out { LEAVES } else { colour };
            self.rect([from, y + BAR + 7.0, to - from, 4.0], fill, &title);
            let label = format!("{arrow} {}", size(moved.bytes));
            if moved.bytes >= GIB / 2 && (to - from) > 22.0 {
                self.put("m", from, y + BAR + 21.0, &label);
            }
        }
        for mark in &lane.marks {
            let x = self.scale.x(mark.at);
            let fill = if mark.kind == EventKind::Deferred { DEFERRED } else { FAILED };
            self.mark([x, y + 4.0], fill, mark.kind.name());
        }
    }

    /// A mark whose tip is here.
    fn mark(&mut self, [x, y]: [f64; 2], fill: &str, title: &str) {
        let _ = writeln!(
            self.text,
            "<path d=\"M{x:.1} {y:.1} l4 -7 h-8 z\" fill=\"{fill}\"><title>{}</title></path>",
            escape(title)
        );
    }

    /// Says what each sign means, in as many rows as it takes.
    fn legend(&mut self) {
        let colour = COLOURS[0];
        let bars: [(&str, &str, f64); 9] = [
            ("runs", colour, 12.0),
            ("drains", colour, 12.0),
            ("brings its memory back", "url(#h0)", 12.0),
            ("has nothing to do", colour, 7.0),
            ("waits", WAITS, 3.0),
            ("is next: room is made", colour, 3.0),
            ("waits: others' memory cannot leave", BLOCKED, 3.0),
            ("memory moves out", LEAVES, 4.0),
            ("memory moves in", colour, 4.0),
        ];
        let marks = [
            ("keeps the GPU: its kernels are not done", DEFERRED),
            ("is refused memory, or does not answer", FAILED),
        ];
        let mut x = 24.0;
        let texts =
            bars.iter().map(|bar| bar.0).chain(marks.iter().map(|mark| mark.0)).chain(["nothing happens"]);
        for (i, text) in texts.enumerate() {
            let width = 28.0 + text.len() as f64 * 6.4 + 18.0;
            if x + width > WIDTH - 12.0 {
                (x, self.y) = (24.0, self.y + 18.0);
            }
            let y = self.y + 7.0;
            if let Some((_, fill, height)) = bars.get(i) {
                self.rect([x, y - height / 2.0, 22.0, *height], fill, "");
                if *text == *"drains" {
                    self.rect([x, y - 6.0, 22.0, 4.0], DRAINS, "");
                }
            } else if let Some((_, fill)) = marks.get(i - bars.len()) {
                self.mark([x + 11.0, y + 4.0], fill, "");
            } else {
                self.rect([x, y - 6.0, 22.0, 12.0], FOLDED, "");
            }
            self.put("s", x + 28.0, y + 4.0, text);
            x += width;
        }
        self.y += 24.0;
    }
}

fn holds(state: ClientState) -> bool {
    matches!(state, ClientState::Running | ClientState::Draining | ClientState::Free)
}

/// The times in which some of them held the GPU: from, to, and the numbers of those who did.
fn together(lanes: &[&Lane]) -> Vec<(u64, u64, Vec<usize>)> {
    let held = |lane: &&Lane| {
        lane.spans.iter().filter(|span| holds(span.state)).map(|span| (span.from, span.to)).collect()
    };
    let held: Vec<Vec<(u64, u64)>> = lanes.iter().map(held).collect();
    let mut bounds: Vec<u64> = held.iter().flatten().flat_map(|&(from, to)| [from, to]).collect();
    bounds.sort_unstable();
    bounds.dedup();
    let mut parts: Vec<(u64, u64, Vec<usize>)> = Vec::new();
    for bound in bounds.windows(2) {
        let (from, to) = (bound[0], bound[1]);
        let is_held = |spans: &[(u64, u64)]| spans.iter().any(|span| span.0 <= from && to <= span.1);
        let holders: Vec<usize> = (0..held.len()).filter(|&lane| is_held(&held[lane])).collect();
        match parts.last_mut() {
            Some((_, until, before)) if *until == from && *before == holders => *until = to,
            _ if holders.is_empty() => {}
            _ => parts.push((from, to, holders)),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::tests::{lines, story};

    #[test]
    fn a_picture_names_everybody_and_is_well_formed() {
        let mut lines = story();
        lines.iter_mut().for_each(|line| line.name = line.name.as_ref().map(|name| format!("<{name}>")));
        let timeline = Timeline::of(&lines, 60.0, None).unwrap();
        let text = draw(&[timeline]);
        for part in [
            "&lt;job 1&gt;",
            "pid 71",
            "held 5.50 s",
            "79 % of held time",
            "↓ 8.0 GiB",
            "8.0 GiB out · 4.0 GiB back in",
            "busy 70 %",
            ">deferred<",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("<job"), "names are escaped");
        // Each element that is opened is closed.
        let opened = text.matches('<').count() - text.matches("</").count() - text.matches("/>").count();
        assert_eq!(opened, text.matches("</").count());
        assert!(!text.contains("NaN") && !text.contains("inf") && !text.contains("=\"-"), "{text}");
    }

    #[test]
    fn several_are_drawn_on_one_scale() {
        let titled = |title: &str, seconds| {
            let timeline = Timeline::of(&story(), seconds, None).unwrap();
            Timeline { title: Some(title.to_owned()), ..timeline }
        };
        let text = draw(&[titled("in bulk", 5.0), titled("by page faults", 60.0)]);
        assert!(text.contains(">in bulk<") && text.contains(">by page faults<"), "{text}");
        assert!(text.contains(">in bulk: 5.00 s · by page faults: 10.0 s<"), "{text}");
    }

    #[test]
    fn those_who_hold_the_gpu_at_the_same_time_share_its_row() {
        let told = [
            ("running", 1, 0.0, 0, 0.0),
            ("running", 2, 4.0, 0, 0.0),
            ("gone", 1, 6.0, 0, 0.0),
            ("gone", 2, 10.0, 0, 0.0),
        ];
        let timeline = Timeline::of(&lines(&told), 60.0, None).unwrap();
        let lanes: Vec<&Lane> = timeline.gpus.values().flat_map(|lanes| lanes.values()).collect();
        const S: u64 = 1_000_000;
        let expected = [(0, 4 * S, vec![0]), (4 * S, 6 * S, vec![0, 1]), (6 * S, 10 * S, vec![1])];
        assert_eq!(together(&lanes), expected);
        let text = draw(&[timeline]);
        let of_both = text.matches(&format!("height=\"{:.1}\"", STRIP / 2.0)).count();
        assert_eq!(of_both, 2, "{text}");
        assert!(text.contains("busy 100 %"), "{text}");
    }

    #[test]
    fn a_folded_time_takes_little_room_and_says_how_long_it_is() {
        let told = [
            ("running", 1, 0.0, 0, 0.0),
            ("idle", 1, 5.0, 0, 0.0),
            ("running", 1, 3600.0, 0, 0.0),
            ("gone", 1, 3605.0, 0, 0.0),
        ];
        let timeline = Timeline::of(&lines(&told), 1e4, None).unwrap();
        let (micro, folds) = (Scale::of_all(std::slice::from_ref(&timeline)), timeline.folds());
        let scale = Scale { begin: timeline.begin, folds, micro };
        let x = |second: u64| scale.x(second * 1_000_000).round();
        assert_eq!([x(0), x(3605)], [LEFT, RIGHT]);
        assert_eq!(x(3600) - x(5), FOLD);
        assert_eq!(x(5) - x(0), x(3605) - x(3600));
        let text = draw(&[timeline]);
        assert!(text.contains(">+3595 s<") && text.contains(">3602<") && !text.contains(">20<"), "{text}");
    }

    #[test]
    fn the_legend_has_every_sign() {
        let text = draw(&[Timeline::of(&story(), 60.0, None).unwrap()]);
        let (_, legend) = text.rsplit_once(">0 s<").expect("an axis");
        for sign in [WAITS, BLOCKED, DRAINS, LEAVES, DEFERRED, FAILED, FOLDED, "url(#h0)", COLOURS[0]] {
            assert!(legend.contains(sign), "{sign}: {legend}");
        }
    }
}
