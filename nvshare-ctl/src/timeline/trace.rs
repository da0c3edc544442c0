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
                // A viewer puts a span that is within another one below it.
                events.extend(lane.phases.iter().map(|p| span(&p.name, p.from, p.to, json!({}))));
                // Spans of one thread are nested, and a move does not belong to one state of its client.
                for moved in &lane.moves {
                    let name = if moved.out { "moves out" } else { "moves in" };
                    let id = format!("{process}.{client}.{}", moved.from);
                    let end = |which: &str, name: &str, at: u64, arguments: Value| {
                        json!({"ph": which, "name": name, "cat": "memory", "id": id, "pid": process, "tid": client,
                            "ts": at - timeline.begin, "args": arguments})
                    };
                    events.push(end("b", name, moved.from, json!({"bytes": moved.bytes})));
                    for phase in &moved.phases {
                        events.push(end("b", &phase.name, phase.from, json!({})));
                        events.push(end("e", &phase.name, phase.to, json!({})));
                    }
                    events.push(end("e", name, moved.to, json!({"bytes": moved.bytes})));
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
    use crate::events::Phase;
    use crate::timeline::{self, tests::story};

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

    #[test]
    fn phases_are_within_what_they_are_parts_of_and_in_their_order() {
        let mut story = story();
        let told: [(&str, &[(&str, u64)]); 4] = [
            ("released", &[("drain", 400_000)]),
            ("evicted", &[("look", 200_000), ("copy", 1_500_000), ("unmap", 100_000)]),
            ("restored", &[("map", 200_000), ("copy", 500_000)]),
            ("running", &[("open", 100_000)]),
        ];
        for (event, phases) in told {
            let line = story.iter_mut().rfind(|line| line.event == event).unwrap();
            let phase = |&(phase, took_us): &(&str, u64)| Phase { phase: phase.to_owned(), took_us };
            line.phases = phases.iter().map(phase).collect();
        }
        let timeline = Timeline::of(&story, 60.0, None).unwrap();
        let trace: Value = serde_json::from_str(&trace(&[timeline])).unwrap();
        let of = |phase: &str, client: u64| {
            let events = trace["traceEvents"].as_array().unwrap().iter();
            let is_it = move |event: &&Value| event["ph"] == phase && event["tid"] == client;
            let told =
                |event: &Value| (event["name"].as_str().unwrap().to_owned(), event["ts"].as_u64().unwrap());
            events.filter(is_it).map(told).collect::<Vec<_>>()
        };
        let named =
            |told: &[(&str, u64)]| Vec::from_iter(told.iter().map(|&(name, at)| (name.to_owned(), at)));
        // A wait for the scheduler is left between the last phase and the end of the whole.
        assert_eq!(
            [of("b", 1), of("e", 1)],
            [
                named(&[
                    ("moves out", 5_500_000),
                    ("look", 5_500_000),
                    ("copy", 5_700_000),
                    ("unmap", 7_200_000)
                ]),
                named(&[
                    ("look", 5_700_000),
                    ("copy", 7_200_000),
                    ("unmap", 7_300_000),
                    ("moves out", 7_500_000)
                ]),
            ]
        );
        assert_eq!(of("b", 2), named(&[("moves in", 7_500_000), ("map", 7_500_000), ("copy", 7_700_000)]));
        assert_eq!(of("X", 1).pop(), Some(("drain".to_owned(), 5_000_000)));
        assert_eq!(of("X", 2).pop(), Some(("open".to_owned(), 8_400_000)));
    }

    #[test]
    fn a_phase_ends_with_what_it_is_a_part_of_and_begins_with_the_picture() {
        let mut story = story();
        let evicted = story.iter_mut().find(|line| line.event == "evicted").unwrap();
        evicted.phases = [("look", 1_000_000), ("copy", 9_000_000)]
            .map(|(phase, took_us)| Phase { phase: phase.to_owned(), took_us })
            .to_vec();
        // The eviction is from 6.5 s to 8.5 s after the start, and the picture begins at 8 s.
        let timeline = Timeline::of(&story, 3.0, Some(11_000_000)).unwrap();
        let moved = timeline.gpus.values().flat_map(|lanes| lanes.values()).flat_map(|lane| &lane.moves);
        let phases = Vec::from_iter(moved.flat_map(|moved| &moved.phases).cloned());
        let copy = timeline::Phase { from: 8_000_000, to: 8_500_000, name: "copy".to_owned() };
        assert_eq!(phases, [copy]);
    }
}
