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

/// Colours that can be told apart, by most people with a colour vision of their own too (after Okabe and Ito).
const COLOURS: [&str; 8] =
    ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#6a51a3", "#8c6d31"];

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
    /// Microseconds that the whole width stands for.
    length: u64,
}

/// Draws timelines under each other, on one scale.
pub(crate) fn draw(timelines: &[Timeline]) -> String {
    let length = timelines.iter().map(Timeline::length).max().unwrap_or(1).max(1);
    let mut canvas = Canvas { text: String::new(), y: 24.0, length };
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

    /// The place of a time, counted from the begin of its timeline.
    fn x(&self, micros: u64) -> f64 {
        LEFT + (RIGHT - LEFT) * micros as f64 / self.length as f64
    }

    fn head(&mut self, timelines: &[Timeline]) {
        self.put("t", 24.0, self.y + 14.0, "Who held the GPU, and what moved");
        let text = match timelines {
            [one] => {
                let lanes = one.gpus.values().flat_map(|lanes| lanes.values());
                let [out, back] = lanes.map(Lane::moved).fold([0, 0], |a, b| [a[0] + b[0], a[1] + b[1]]);
                format!("{} · {} out · {} back in", seconds(self.length), size(out), size(back))
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
        let top = self.y;
        let height: f64 = timeline.gpus.values().map(|lanes| 34.0 + lanes.len() as f64 * LANE).sum::<f64>();
        self.grid(top, top + height, timeline.length());
        for (gpu, lanes) in &timeline.gpus {
            self.gpu(timeline, &show::short_uuid(*gpu), lanes.values().collect());
        }
        self.axis(timeline.length());
        self.y += 30.0;
    }

    /// The distance of the marks of the axis, in microseconds.
    fn tick(&self) -> u64 {
        let steps = [1u64, 2, 5].into_iter();
        let mut all = (0..10).flat_map(|power| steps.clone().map(move |step| step * 10u64.pow(power)));
        all.find(|tick| self.length / tick <= 12).unwrap_or(self.length).max(1)
    }

    fn grid(&mut self, top: f64, bottom: f64, length: u64) {
        for at in (0..=length).step_by(usize::try_from(self.tick()).unwrap_or(usize::MAX)) {
            let x = self.x(at);
            self.line([x, top, x, bottom], "stroke=\"#eef0f3\"");
        }
    }

    fn axis(&mut self, length: u64) {
        let tick = self.tick();
        for at in (0..=length).step_by(usize::try_from(tick).unwrap_or(usize::MAX)) {
            let value = at as f64 / 1e6;
            let text = if tick >= 1_000_000 { format!("{value:.0}") } else { format!("{value}") };
            let text = if at == 0 { "0 s".to_owned() } else { text };
            self.put("a", self.x(at), self.y + 12.0, &text);
        }
    }

    fn gpu(&mut self, timeline: &Timeline, name: &str, mut lanes: Vec<&Lane>) {
        // The same program has the same colour in each of several timelines.
        lanes.sort_by(|one, other| one.name.cmp(&other.name));
        let held: u64 = covered(&lanes);
        self.put("g", 24.0, self.y + 13.0, name);
        let percent = held as f64 / timeline.length() as f64 * 100.0;
        self.put("q", WIDTH - 24.0, self.y + 13.0, &format!("busy {percent:.0} %"));
        self.rect([LEFT, self.y + 2.0, self.x(timeline.length()) - LEFT, STRIP], "#f3f4f6", "");
        for (i, lane) in lanes.iter().enumerate() {
            for span in lane.spans.iter().filter(|span| holds(span.state)) {
                let (from, to) = (self.x(span.from - timeline.begin), self.x(span.to - timeline.begin));
                let y = self.y + 2.0;
                self.rect([from, y, to - from, STRIP], COLOURS[i % COLOURS.len()], "");
            }
        }
        self.y += 26.0;
        let all: u64 = lanes.iter().map(|lane| lane.held()).sum();
        for (i, lane) in lanes.into_iter().enumerate() {
            self.lane(timeline, i, lane, all);
            self.y += LANE;
        }
        self.y += 8.0;
    }

    fn lane(&mut self, timeline: &Timeline, i: usize, lane: &Lane, all: u64) {
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
            let (from, to) = (self.x(span.from - timeline.begin), self.x(span.to - timeline.begin));
            let title = format!("{} for {}", state_name(span.state), seconds(span.to - span.from));
            let bar = [from, y + 4.0, to - from, BAR];
            let thin = [from, middle - 1.5, to - from, 3.0];
            match span.state {
                ClientState::Running | ClientState::Free => self.rect(bar, colour, &title),
                ClientState::Draining => {
                    self.rect(bar, colour, &title);
                    self.rect([from, y + 4.0, to - from, 5.0], "#111827", &title);
                }
                ClientState::Restoring => self.rect(bar, &format!("url(#h{})", i % COLOURS.len()), &title),
                ClientState::Idle => self.rect([from, middle - 5.0, to - from, 10.0], colour, &title),
                ClientState::Blocked => self.rect(thin, "#dc2626", &title),
                ClientState::Next => self.rect(thin, colour, &title),
                _ => self.rect(thin, "#d1d5db", &title),
            }
        }
        for moved in &lane.moves {
            let (from, to) = (self.x(moved.from - timeline.begin), self.x(moved.to - timeline.begin));
            let arrow = if moved.out { "↓" } else { "↑" };
            let way = if moved.out { "out" } else { "in" };
            let rate = moved.bytes as f64 / GIB as f64 / ((moved.to - moved.from).max(1) as f64 / 1e6);
            let title = format!("{} {way}, {rate:.1} GiB/s", size(moved.bytes));
            let fill = if moved.out { "#9ca3af" } else { colour };
            self.rect([from, y + BAR + 7.0, to - from, 4.0], fill, &title);
            let label = format!("{arrow} {}", size(moved.bytes));
            if moved.bytes >= GIB / 2 && (to - from) > 22.0 {
                self.put("m", from, y + BAR + 21.0, &label);
            }
        }
        for mark in &lane.marks {
            let x = self.x(mark.at - timeline.begin);
            let colour = if mark.kind == EventKind::Deferred { "#f59e0b" } else { "#dc2626" };
            let _ = writeln!(
                self.text,
                "<path d=\"M{x:.1} {:.1} l4 -7 h-8 z\" fill=\"{colour}\"><title>{}</title></path>",
                y + 4.0,
                mark.kind.name()
            );
        }
    }

    fn legend(&mut self) {
        let y = self.y;
        let mut x = 24.0;
        let colour = COLOURS[0];
        let entries: [(&str, &str, f64); 6] = [
            ("runs", colour, 12.0),
            ("brings its memory back", "url(#h0)", 12.0),
            ("has nothing to do", colour, 7.0),
            ("waits", "#d1d5db", 3.0),
            ("is next: room is made", colour, 3.0),
            ("memory moves out", "#9ca3af", 4.0),
        ];
        for (text, fill, height) in entries {
            self.rect([x, y + 7.0 - height / 2.0, 22.0, height], fill, "");
            self.put("s", x + 28.0, y + 11.0, text);
            x += 28.0 + text.len() as f64 * 6.8 + 22.0;
        }
        self.rect([x, y + 1.0, 22.0, 12.0], colour, "");
        self.rect([x, y + 1.0, 22.0, 4.0], "#111827", "");
        self.put("s", x + 28.0, y + 11.0, "drains");
        self.y += 24.0;
    }
}

fn holds(state: ClientState) -> bool {
    matches!(state, ClientState::Running | ClientState::Draining | ClientState::Free)
}

/// Time in which at least one of them held the GPU.
fn covered(lanes: &[&Lane]) -> u64 {
    let spans = lanes.iter().flat_map(|lane| &lane.spans).filter(|span| holds(span.state));
    let mut spans: Vec<(u64, u64)> = spans.map(|span| (span.from, span.to)).collect();
    spans.sort_unstable();
    let (mut sum, mut to) = (0, 0);
    for (from, until) in spans {
        sum += until.saturating_sub(from.max(to));
        to = to.max(until);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::tests::story;

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
}
