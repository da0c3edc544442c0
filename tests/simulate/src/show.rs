//! Summaries as a table, and as a picture.

use std::fmt::Write as _;

use crate::measure::{Figures, Summary};

/// One row for each policy, then one for each policy and class.
pub(crate) fn table(rows: &[(String, Summary)]) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{:<22} {:>7} {:>9} {:>9} {:>6} {:>6} {:>11} {:>10}",
        "policy", "useful", "wait p50", "wait p99", "Jain", "least", "moved GiB", "events"
    );
    for (name, summary) in rows {
        let Figures { wait_s: [p50, p99], jain, .. } = summary.all;
        let _ = writeln!(
            text,
            "{name:<22} {:>6.1}% {p50:>7.2} s {p99:>7.2} s {jain:>6.3} {:>6.3} {:>11.0} {:>10}",
            summary.efficiency * 100.0,
            summary.least_jain(),
            summary.moved_gib,
            summary.events,
        );
    }
    let _ = writeln!(
        text,
        "\n{:<22} {:<10} {:>7} {:>7} {:>9} {:>9} {:>10} {:>6}",
        "policy", "class", "clients", "got", "wait p50", "wait p99", "cycle p99", "Jain"
    );
    for (name, summary) in rows {
        for (class, figures) in &summary.classes {
            let Figures { clients, got, wait_s: [p50, p99], cycle_p99_s, jain } = figures;
            let cycle = cycle_p99_s.map_or("-".to_owned(), |s| format!("{s:.2} s"));
            let _ = writeln!(
                text,
                "{name:<22} {class:<10} {clients:>7} {:>6.1}% {p50:>7.2} s {p99:>7.2} s {cycle:>10} {jain:>6.3}",
                got * 100.0
            );
        }
    }
    text
}

const COLOURS: [&str; 6] = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2"];
const PANEL: (f64, f64) = (240.0, 220.0);
const BAR: f64 = 24.0;

/// Four panels of bars: useful work, waiting, fairness, memory moved.
pub(crate) fn picture(title: &str, rows: &[(String, Summary)]) -> String {
    type Panel = (&'static str, fn(&Summary) -> f64, fn(f64) -> String);
    let panels: [Panel; 4] = [
        ("useful work", |s| s.efficiency, |v| format!("{:.1} %", v * 100.0)),
        ("waiting, p99", |s| s.all.wait_s[1], |v| format!("{v:.1} s")),
        ("Jain's index, least class", Summary::least_jain, |v| format!("{v:.3}")),
        ("memory moved", |s| s.moved_gib, |v| format!("{v:.0} GiB")),
    ];
    let height = PANEL.1 + 60.0 + BAR * rows.len() as f64;
    let width = PANEL.0 * panels.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"12\" y=\"20\" font-size=\"14\">{}</text>\n",
        escape(title)
    );
    for (at, (what, value, shown)) in panels.into_iter().enumerate() {
        let left = PANEL.0 * at as f64 + 12.0;
        let most = rows.iter().map(|(_, s)| value(s)).fold(1e-9, f64::max);
        let _ = writeln!(svg, "<text x=\"{left:.0}\" y=\"44\">{what}</text>");
        let step = (PANEL.0 - 24.0) / rows.len().max(1) as f64;
        for ((row, (_, summary)), colour) in rows.iter().enumerate().zip(COLOURS.iter().cycle()) {
            let (value, x) = (value(summary), left + step * row as f64);
            let tall = (value / most * (PANEL.1 - 80.0)).max(1.0);
            let y = PANEL.1 + 10.0 - tall;
            let wide = step * 0.8;
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"{tall:.1}\" fill=\"{colour}\"/><text x=\"{x:.1}\" y=\"{:.1}\" font-size=\"10\">{}</text>",
                y - 4.0,
                shown(value)
            );
        }
    }
    for ((row, (name, _)), colour) in rows.iter().enumerate().zip(COLOURS.iter().cycle()) {
        let y = PANEL.1 + 30.0 + BAR * row as f64;
        let _ = writeln!(
            svg,
            "<rect x=\"12\" y=\"{y:.0}\" width=\"14\" height=\"14\" fill=\"{colour}\"/><text x=\"32\" y=\"{:.0}\">{}</text>",
            y + 12.0,
            escape(name)
        );
    }
    svg.push_str("</svg>\n");
    svg
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
