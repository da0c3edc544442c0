//! The past as a picture or as a trace: built from events, drawn by `svg.rs` and `trace.rs`.

pub(crate) mod svg;
pub(crate) mod trace;

use std::collections::BTreeMap;

use nvshare_proto::{ClientState, EventKind, GpuUuid};

use crate::events::{self, Line};

/// A part of the time of one scheduler. Times are in microseconds since the scheduler started.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    /// The title over the picture, if there are several.
    pub(crate) title: Option<String>,
    pub(crate) begin: u64,
    pub(crate) end: u64,
    pub(crate) gpus: BTreeMap<GpuUuid, BTreeMap<u64, Lane>>,
}

/// A client on a GPU.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    pub(crate) name: String,
    pub(crate) pid: Option<u32>,
    pub(crate) spans: Vec<Span>,
    pub(crate) moves: Vec<Move>,
    /// Phases that are parts of spans.
    pub(crate) phases: Vec<Phase>,
    pub(crate) marks: Vec<Mark>,
    /// The client's state at the last event, and the time since when it has it.
    stands: Option<(u64, ClientState)>,
}

/// A time in which a client was in one state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Span {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) state: ClientState,
}

/// Memory that moved.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Move {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) bytes: u64,
    pub(crate) out: bool,
    pub(crate) phases: Vec<Phase>,
}

/// A phase of a hand-over. Each is one sum, though phases of a move alternate, so they are drawn one behind the other.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Phase {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) name: String,
}

/// The phases of an event, from this time on, and no longer than until the event.
fn lay_out(phases: &[events::Phase], mut from: u64, until: u64) -> Vec<Phase> {
    let one = |told: &events::Phase| {
        let to = from.saturating_add(told.took_us).min(until);
        Phase { from: std::mem::replace(&mut from, to), to, name: told.phase.clone() }
    };
    phases.iter().map(one).collect()
}

/// Cuts off what was before this time.
fn cut(phases: &mut Vec<Phase>, begin: u64) {
    phases.iter_mut().for_each(|phase| phase.from = phase.from.max(begin));
    phases.retain(|phase| phase.from < phase.to);
}

/// A moment that is marked in the picture.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Mark {
    pub(crate) at: u64,
    pub(crate) kind: EventKind,
}

fn kind_of(line: &Line) -> Option<EventKind> {
    EventKind::ALL.into_iter().find(|kind| kind.name() == line.event)
}

impl Timeline {
    /// The last `seconds` before `end`, as far as there are events. None: no client did anything.
    pub(crate) fn of(lines: &[Line], seconds: f64, end: Option<u64>) -> Option<Self> {
        // A scheduler that was started again counts from zero: events before that are left out.
        let start = lines.iter().rposition(|line| line.event == EventKind::Started.name()).unwrap_or(0);
        let lines = &lines[start..];
        let ups = lines.iter().filter(|line| line.client.is_some()).filter_map(|line| line.up_us);
        let (first, last) = (ups.clone().min()?, ups.max()?);
        let end = end.unwrap_or(last).max(last).max(first + 1);
        let window = (seconds * 1e6) as u64;
        let mut timeline = Self { begin: first.max(end.saturating_sub(window)), end, ..Self::default() };
        for line in lines {
            timeline.follow(line);
        }
        timeline.finish();
        (!timeline.gpus.is_empty()).then_some(timeline)
    }

    fn follow(&mut self, line: &Line) {
        let (Some(client), Some(at), Some(kind)) = (line.client, line.up_us, kind_of(line)) else { return };
        for &gpu in &line.gpus {
            let lane = self.gpus.entry(gpu).or_default().entry(client).or_default();
            if let Some(name) = &line.name {
                lane.name.clone_from(name);
            }
            lane.pid = line.pid.or(lane.pid);
            let since = lane.stands.map_or(at, |(since, _)| since);
            if let Some(state) = kind.state() {
                lane.stand(at, state);
            }
            let moved = line.bytes.filter(|&bytes| bytes > 0).zip(line.took_us);
            match (kind, moved) {
                (EventKind::Evicted | EventKind::Restored, Some((bytes, took))) => {
                    let (from, out) = (at.saturating_sub(took), kind == EventKind::Evicted);
                    let phases = lay_out(&line.phases, from, at);
                    lane.moves.push(Move { from, to: at, bytes, out, phases });
                }
                (EventKind::Released, _) => lane.phases.extend(lay_out(&line.phases, since, at)),
                (EventKind::Running, _) => {
                    let took = line.phases.iter().map(|phase| phase.took_us).fold(0, u64::saturating_add);
                    let from = at.saturating_sub(took).max(since);
                    lane.phases.extend(lay_out(&line.phases, from, at));
                }
                (EventKind::Deferred | EventKind::Refused | EventKind::Stuck | EventKind::Stays, _) => {
                    lane.marks.push(Mark { at, kind });
                }
                _ => {}
            }
        }
    }

    /// Ends the spans that go on, and cuts off those outside the window.
    fn finish(&mut self) {
        let (begin, end) = (self.begin, self.end);
        for lanes in self.gpus.values_mut() {
            for lane in lanes.values_mut() {
                lane.stand(end, ClientState::Gone);
                lane.spans.iter_mut().for_each(|span| span.from = span.from.max(begin));
                lane.spans.retain(|span| span.from < span.to);
                for moved in &mut lane.moves {
                    moved.from = moved.from.max(begin);
                    cut(&mut moved.phases, begin);
                }
                cut(&mut lane.phases, begin);
                lane.moves.retain(|moved| moved.from <= moved.to && moved.to > begin);
                lane.marks.retain(|mark| mark.at >= begin);
            }
            lanes.retain(|_, lane| !lane.spans.is_empty());
        }
        self.gpus.retain(|_, lanes| !lanes.is_empty());
    }

    pub(crate) fn length(&self) -> u64 {
        self.end - self.begin
    }

    /// Times longer than a tenth of it in which nothing happens: clients have nothing to do, and no memory moves.
    pub(crate) fn folds(&self) -> Vec<(u64, u64)> {
        let mut busy: Vec<(u64, u64)> = Vec::new();
        for lane in self.gpus.values().flat_map(BTreeMap::values) {
            let spans = lane.spans.iter().filter(|span| span.state != ClientState::Idle);
            busy.extend(spans.map(|span| (span.from, span.to)));
            busy.extend(lane.moves.iter().map(|moved| (moved.from, moved.to)));
            busy.extend(lane.marks.iter().map(|mark| (mark.at, mark.at)));
        }
        busy.push((self.end, self.end));
        busy.sort_unstable();
        let (mut folds, mut since) = (Vec::new(), self.begin);
        for (from, to) in busy {
            if from.saturating_sub(since) > self.length() / 10 {
                folds.push((since, from));
            }
            since = since.max(to);
        }
        folds
    }
}

impl Lane {
    /// The client has this state from now on.
    fn stand(&mut self, at: u64, state: ClientState) {
        if let Some((from, before)) = self.stands {
            let shown = !matches!(before, ClientState::Gone | ClientState::Parked);
            match self.spans.last_mut() {
                // Spans of one state without a break become one.
                Some(last) if shown && last.to == from && last.state == before => last.to = at,
                _ if shown && from < at => self.spans.push(Span { from, to: at, state: before }),
                _ => {}
            }
        }
        self.stands = Some((at, state));
    }

    /// Time that the client was in one of these states, in microseconds.
    pub(crate) fn spent(&self, states: &[ClientState]) -> u64 {
        let spans = self.spans.iter().filter(|span| states.contains(&span.state));
        spans.map(|span| span.to - span.from).sum()
    }

    /// Time from open gate to drained.
    pub(crate) fn held(&self) -> u64 {
        self.spent(&[ClientState::Running, ClientState::Draining])
    }

    /// Bytes that moved: out, and in.
    pub(crate) fn moved(&self) -> [u64; 2] {
        [true, false].map(|out| {
            let moves = self.moves.iter().filter(|moved| moved.out == out);
            moves.fold(0, |sum: u64, moved| sum.saturating_add(moved.bytes))
        })
    }
}

/// The state's name, the same as in schemas.
pub(crate) fn state_name(state: ClientState) -> &'static str {
    crate::show::state(state)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Two clients that take turns.
    pub(crate) fn story() -> Vec<Line> {
        lines(&[
            ("registered", 1, 1.0, 0, 0.0),
            ("waiting", 1, 1.0, 0, 0.0),
            ("granted", 1, 1.0, 0, 0.0),
            ("running", 1, 1.0, 0, 0.0),
            ("registered", 2, 2.0, 0, 0.0),
            ("waiting", 2, 2.0, 0, 0.0),
            ("drop", 1, 5.0, 0, 0.0),
            ("deferred", 1, 5.5, 0, 0.5),
            ("drop", 1, 6.0, 0, 0.0),
            ("next", 2, 6.0, 0, 0.0),
            ("released", 1, 6.5, 0, 0.5),
            ("waiting", 1, 6.5, 0, 0.0),
            ("evicted", 1, 8.5, 8, 2.0),
            ("granted", 2, 8.5, 0, 0.0),
            ("restored", 2, 9.5, 4, 1.0),
            ("running", 2, 9.5, 4, 1.0),
            ("gone", 2, 11.0, 0, 0.0),
        ])
    }

    /// Events: what happened, client, seconds, GiB, duration in seconds.
    pub(crate) fn lines(told: &[(&str, u64, f64, u64, f64)]) -> Vec<Line> {
        let line = |&(event, client, at, gib, took): &(&str, u64, f64, u64, f64)| {
            let text = format!(
                r#"{{"schema":1,"time":"","time_us":0,"up_us":{},"seq":1,"event":"{event}","client":{client},"pid":{},
                "name":"job {client}","gpus":["GPU-51600000-0000-4000-8000-000000000000"],"bytes":{},"took_us":{},
                "count":null,"why":null}}"#,
                (at * 1e6) as u64,
                client + 70,
                gib << 30,
                (took * 1e6) as u64
            );
            serde_json::from_str(&text).unwrap()
        };
        told.iter().map(line).collect()
    }

    fn seconds(spans: &[Span]) -> Vec<(f64, f64, ClientState)> {
        spans.iter().map(|span| (span.from as f64 / 1e6, span.to as f64 / 1e6, span.state)).collect()
    }

    #[test]
    fn spans_follow_from_events() {
        let timeline = Timeline::of(&story(), 60.0, None).unwrap();
        assert_eq!((timeline.begin, timeline.end), (1_000_000, 11_000_000));
        let lanes: Vec<&Lane> = timeline.gpus.values().flat_map(BTreeMap::values).collect();
        assert_eq!(
            seconds(&lanes[0].spans),
            [
                (1.0, 5.0, ClientState::Running),
                (5.0, 5.5, ClientState::Draining),
                (5.5, 6.0, ClientState::Running),
                (6.0, 6.5, ClientState::Draining),
                (6.5, 11.0, ClientState::Waiting)
            ]
        );
        assert_eq!(
            seconds(&lanes[1].spans),
            [
                (2.0, 6.0, ClientState::Waiting),
                (6.0, 8.5, ClientState::Next),
                (8.5, 9.5, ClientState::Restoring),
                (9.5, 11.0, ClientState::Running)
            ]
        );
        assert_eq!((lanes[0].held(), lanes[1].held()), (5_500_000, 1_500_000));
        assert_eq!((lanes[0].moved(), lanes[1].moved()), ([8 << 30, 0], [0, 4 << 30]));
        assert_eq!(lanes[0].marks, [Mark { at: 5_500_000, kind: EventKind::Deferred }]);
    }

    #[test]
    fn a_window_cuts_off_earlier_events() {
        let timeline = Timeline::of(&story(), 3.0, Some(12_000_000)).unwrap();
        assert_eq!((timeline.begin, timeline.end), (9_000_000, 12_000_000));
        let lanes: Vec<&Lane> = timeline.gpus.values().flat_map(BTreeMap::values).collect();
        assert_eq!(seconds(&lanes[0].spans), [(9.0, 12.0, ClientState::Waiting)]);
        assert_eq!(lanes[0].moves, [], "it was over before");
        assert_eq!(
            lanes[1].moves,
            [Move { from: 9_000_000, to: 9_500_000, bytes: 4 << 30, out: false, phases: Vec::new() }]
        );
        assert!(Timeline::of(&[], 60.0, None).is_none());
    }

    #[test]
    fn a_time_in_which_nothing_happens_is_folded() {
        let told = [
            ("running", 1, 0.0, 0, 0.0),
            ("idle", 1, 4.0, 0, 0.0),
            ("running", 1, 7.0, 0, 0.0),
            ("idle", 1, 10.0, 0, 0.0),
            ("evicted", 1, 60.0, 1, 1.0),
            ("running", 1, 90.0, 0, 0.0),
            ("gone", 1, 100.0, 0, 0.0),
        ];
        let timeline = Timeline::of(&lines(&told), 200.0, None).unwrap();
        let folds = timeline.folds().into_iter().map(|(from, to)| (from as f64 / 1e6, to as f64 / 1e6));
        assert_eq!(Vec::from_iter(folds), [(10.0, 59.0), (60.0, 90.0)], "three seconds are too short");
        let later = Timeline::of(&lines(&told[..2]), 200.0, Some(50_000_000)).unwrap();
        assert_eq!(later.folds(), [(4_000_000, 50_000_000)]);
    }
}
