//! Timelines as a trace that Perfetto and Chrome open (`chrome://tracing`): a process for each GPU, a thread for each client.

use serde_json::{Value, json};

use super::{Timeline, state_name};

/// The trace of timelines, in the format of trace events.
pub(crate) fn trace(timelines: &[Timeline]) -> String {
    let mut events: Vec<Value> = Vec::new();
    let mut process = 0;
    for timeline in timelines {
        for (gpu, lanes) in &timeline.gpus {
            process += 1;
            let title = timeline.title.as_ref().map(|title| format!(" {title}")).unwrap_or_default();
            let name = |what: &str, thread: u64, name: String| json!({"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}});
            events.push(name("process_name", 0, format!("{gpu}{title}")));
            for (&client, lane) in lanes {
                let pid = lane.pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
                events.push(name("thread_name", client, format!("client {client} {}{pid}", lane.name)));
                let span = |name: &str, from: u64, to: u64, arguments: Value| {
                    json!({"ph": "X", "name": name, "cat": "nvshare", "pid": process, "tid": client,
                        "ts": from - timeline.begin, "dur": to - from, "args": arguments})
                };
                let spans = lane.spans.iter();
                events.extend(spans.map(|s| span(state_name(s.state), s.from, s.to, json!({}))));
                // Spans of one thread are nested, and a move does not belong to one state of its client.
                for moved in &lane.moves {
                    let name = if moved.out { "moves out" } else { "moves in" };
                    let id = format!("{process}.{client}.{}", moved.from);
                    let ends = [("b", moved.from), ("e", moved.to)];
                    events.extend(ends.map(|(phase, at)| {
                        json!({"ph": phase, "name": name, "cat": "memory", "id": id, "pid": process, "tid": client,
                            "ts": at - timeline.begin, "args": {"bytes": moved.bytes}})
                    }));
                }
                events.extend(lane.marks.iter().map(|mark| {
                    json!({"ph": "i", "s": "t", "name": mark.kind.name(), "cat": "nvshare", "pid": process, "tid": client,
                        "ts": mark.at - timeline.begin})
                }));
            }
        }
    }
    json!({"displayTimeUnit": "ms", "traceEvents": events}).to_string() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::tests::story;

    #[test]
    fn a_trace_has_spans_moves_and_marks() {
        let timeline = Timeline::of(&story(), 60.0, None).unwrap();
        let trace: Value = serde_json::from_str(&trace(&[timeline])).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let count = |phase: &str| events.iter().filter(|event| event["ph"] == phase).count();
        assert_eq!(["M", "X", "b", "e", "i"].map(count), [3, 9, 2, 2, 1]);
        let first = events.iter().find(|event| event["ph"] == "X").unwrap();
        assert_eq!(
            (&first["name"], &first["ts"], &first["dur"]),
            (&json!("running"), &json!(0), &json!(4_000_000))
        );
    }
}
