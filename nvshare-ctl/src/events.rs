//! A scheduler's events as lines: as JSON, and for people. `docs/events.md` describes both.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nvshare_proto::units::{Bytes, gib_per_second};
use nvshare_proto::{EventKind, GpuUuid, PhaseTime, WatchEvent};
use serde::{Deserialize, Serialize};

use crate::show;

/// The version of the JSON. A new field, or a new event, does not change the version; a field that is removed, or
/// gets another meaning, does.
pub(crate) const SCHEMA: u32 = 1;

/// An event in the form of the JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Line {
    pub(crate) schema: u32,
    /// The event's time, as a date.
    pub(crate) time: String,
    /// The event's time, in microseconds since 1970.
    pub(crate) time_us: u64,
    /// The event's time, in microseconds since the scheduler started.
    pub(crate) up_us: Option<u64>,
    pub(crate) seq: Option<u64>,
    pub(crate) event: String,
    pub(crate) client: Option<u64>,
    pub(crate) pid: Option<u32>,
    pub(crate) name: Option<String>,
    pub(crate) gpus: Vec<GpuUuid>,
    pub(crate) bytes: Option<u64>,
    pub(crate) took_us: Option<u64>,
    /// The phases of a hand-over that are parts of that time. Lines of an earlier version have none.
    #[serde(default)]
    pub(crate) phases: Vec<Phase>,
    /// The number of events that were missed.
    pub(crate) count: Option<u64>,
    /// The reason why the scheduler was lost.
    pub(crate) why: Option<String>,
}

/// A phase of a hand-over, in the form of the JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Phase {
    pub(crate) phase: String,
    /// The time that it took, in microseconds.
    pub(crate) took_us: u64,
}

impl From<&PhaseTime> for Phase {
    fn from(time: &PhaseTime) -> Self {
        Self { phase: time.phase.name().to_owned(), took_us: time.micros }
    }
}

impl Line {
    /// The line of an event of the scheduler, which has these phases.
    pub(crate) fn of(event: &WatchEvent, phases: &[PhaseTime]) -> Self {
        Self {
            schema: SCHEMA,
            time: date(event.time_us),
            time_us: event.time_us,
            up_us: Some(event.up_us),
            seq: Some(event.seq),
            event: event.event.name().to_owned(),
            client: event.client,
            pid: event.pid,
            name: event.name.clone(),
            gpus: event.gpus.clone(),
            bytes: event.bytes,
            took_us: event.took_us,
            phases: phases.iter().map(Phase::from).collect(),
            count: None,
            why: None,
        }
    }

    /// The line of an event that this program notices itself.
    fn own(event: &str) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let time_us = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        Self {
            schema: SCHEMA,
            time: date(time_us),
            time_us,
            up_us: None,
            seq: None,
            event: event.to_owned(),
            client: None,
            pid: None,
            name: None,
            gpus: Vec::new(),
            bytes: None,
            took_us: None,
            phases: Vec::new(),
            count: None,
            why: None,
        }
    }

    /// Events were missed.
    pub(crate) fn missed(count: u64) -> Self {
        Self { count: Some(count), ..Self::own("missed") }
    }

    /// The scheduler has gone, or does not answer any more.
    pub(crate) fn lost(why: String) -> Self {
        Self { why: Some(why), ..Self::own("lost") }
    }

    /// There is a scheduler again.
    pub(crate) fn joined() -> Self {
        Self::own("joined")
    }

    /// The line for people. GPUs have the names given, or the beginnings of their UUIDs.
    pub(crate) fn sentence(&self, gpus: &BTreeMap<GpuUuid, String>) -> String {
        let time = self.time.get(11..23).unwrap_or(&self.time);
        let name = |gpu: &GpuUuid| gpus.get(gpu).cloned().unwrap_or_else(|| show::short_uuid(*gpu));
        let where_ = self.gpus.iter().map(name).collect::<Vec<_>>().join(",");
        let who = match (self.client, &self.name) {
            (Some(client), Some(name)) => format!("client {client} {name}"),
            (Some(client), None) => format!("client {client}"),
            (None, _) => "-".to_owned(),
        };
        let where_ = if where_.is_empty() { "-" } else { &where_ };
        format!("{time}  {where_:<8}  {who:<24}  {:<10}  {}", self.event, self.detail()).trim_end().to_owned()
    }

    /// The details of the event, beside its name.
    fn detail(&self) -> String {
        let bytes = self.bytes.unwrap_or(0);
        let size = Bytes(bytes);
        let took = self.took_us.map(Duration::from_micros);
        let took_text = took.map(|took| format!("{:.3} s", took.as_secs_f64())).unwrap_or_default();
        let moved = || {
            let took = took.unwrap_or_default();
            format!("{size} in {took_text} ({:.1} GiB/s)", gib_per_second(bytes, took))
        };
        let Some(kind) = EventKind::ALL.into_iter().find(|kind| kind.name() == self.event) else {
            return match (self.count, &self.why) {
                (Some(count), _) => format!("{count} events were read too late"),
                (_, Some(why)) => why.clone(),
                _ => String::new(),
            };
        };
        match kind {
            EventKind::Registered => format!("pid {}, {size} allocated", self.pid.unwrap_or(0)),
            EventKind::Granted if bytes > 0 => format!("{size} come back"),
            EventKind::Running if took.is_none() => "it ran already".to_owned(),
            // Memory may have come back before the grant, so its rate is that of `restored`.
            EventKind::Running if bytes > 0 => format!("after {took_text}, with {size} back"),
            EventKind::Running => format!("after {took_text}"),
            EventKind::Restored => moved(),
            EventKind::Released if took.is_some() => format!("drained in {took_text}"),
            EventKind::Deferred => format!("its drain was given up after {took_text}"),
            EventKind::Evict => format!("{size} are to leave"),
            // Unused room moves no bytes, so a rate would say nothing.
            EventKind::Evicted => format!("{size} are free after {took_text}"),
            EventKind::Stays => format!("{size} cannot leave"),
            EventKind::NeedRoom => format!("an allocation waits for {size}"),
            EventKind::Room => format!("{size} for an allocation"),
            EventKind::Refused => format!("an allocation of {size}: no room can be made"),
            EventKind::Stuck => "it does not answer".to_owned(),
            EventKind::Left => format!("its process lives on with {size}"),
            EventKind::Ended => format!("{size} are free"),
            EventKind::Blocked => "what others have cannot be moved and leaves no room".to_owned(),
            EventKind::Quantum => took_text,
            EventKind::Asleep if took.is_some() => format!("{size} are free after {took_text}"),
            EventKind::Asleep => "it is off the GPU already".to_owned(),
            EventKind::StaysAwake => "it does not go off the GPU".to_owned(),
            EventKind::WakeWanted => format!("it waits for {size} to come back"),
            EventKind::Wake if took.is_some() => format!("there is room, after {took_text}"),
            EventKind::Awake => format!("back in {took_text}"),
            EventKind::CannotShare => "its program needs NVSHARE_MEMORY=swap to share memory".to_owned(),
            _ => String::new(),
        }
    }
}

/// A time as RFC 3339 writes it, in UTC, to the microsecond.
pub(crate) fn date(time_us: u64) -> String {
    let (seconds, micros) = (time_us / 1_000_000, time_us % 1_000_000);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days are counted in eras of 400 years that begin on a 1 March.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

#[cfg(test)]
mod tests {
    use nvshare_proto::HandOverPhase;

    use super::*;

    fn event(kind: EventKind, bytes: Option<u64>, took_us: Option<u64>) -> WatchEvent {
        WatchEvent {
            seq: 9,
            time_us: 1_763_793_188_123_456,
            up_us: 5,
            event: kind,
            client: Some(3),
            pid: Some(77),
            name: Some("python3".to_owned()),
            gpus: vec![GpuUuid([7; 16])],
            bytes,
            took_us,
        }
    }

    #[test]
    fn times_are_written_as_dates() {
        for (time_us, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_399_999_999, "2000-02-28T23:59:59.999999Z"),
            (951_782_400_000_000, "2000-02-29T00:00:00.000000Z"),
            (1_763_793_188_123_456, "2025-11-22T06:33:08.123456Z"),
            (4_107_542_400_000_000, "2100-03-01T00:00:00.000000Z"),
        ] {
            assert_eq!(date(time_us), text);
        }
    }

    #[test]
    fn events_are_sentences_for_people() {
        let said = |kind, bytes, took| Line::of(&event(kind, bytes, took), &[]).sentence(&BTreeMap::new());
        assert_eq!(
            said(EventKind::Running, Some(8 << 30), Some(800_000)),
            "06:33:08.123  GPU-07070707  client 3 python3          running     after 0.800 s, with 8.00 GiB back"
        );
        assert_eq!(
            said(EventKind::Restored, Some(8 << 30), Some(800_000)),
            "06:33:08.123  GPU-07070707  client 3 python3          restored    8.00 GiB in 0.800 s (10.0 GiB/s)"
        );
        assert_eq!(
            said(EventKind::Asleep, Some(1 << 30), Some(400_000)),
            "06:33:08.123  GPU-07070707  client 3 python3          asleep      1.00 GiB are free after 0.400 s"
        );
        assert_eq!(
            said(EventKind::Awake, None, Some(700_000)),
            "06:33:08.123  GPU-07070707  client 3 python3          awake       back in 0.700 s"
        );
        assert_eq!(
            said(EventKind::Drop, None, None),
            "06:33:08.123  GPU-07070707  client 3 python3          drop"
        );
        let known = BTreeMap::from([(GpuUuid([7; 16]), "GPU 0".to_owned())]);
        assert_eq!(
            Line::of(&event(EventKind::Evicted, Some(0), Some(0)), &[]).sentence(&known),
            "06:33:08.123  GPU 0     client 3 python3          evicted     0 are free after 0.000 s"
        );
        assert!(Line::missed(5).sentence(&known).ends_with("missed      5 events were read too late"));
    }

    #[test]
    fn lines_that_are_written_can_be_read_and_are_documented() {
        let phase = PhaseTime { gpu: None, phase: HandOverPhase::CopyOut, micros: 7 };
        let line = Line::of(&event(EventKind::Evicted, Some(5), None), &[phase]);
        let text = serde_json::to_string(&line).unwrap();
        assert_eq!(serde_json::from_str::<Line>(&text).unwrap(), line);
        let phases = r#""phases":[{"phase":"copy","took_us":7}],"#;
        let before = serde_json::from_str::<Line>(&text.replace(phases, "")).unwrap();
        assert_eq!(before, Line { phases: Vec::new(), ..line.clone() }, "of a version without phases");
        let page = include_str!("../../docs/events.md");
        let fields = serde_json::to_value(&line).unwrap();
        let fields = fields.as_object().unwrap().keys().map(String::as_str);
        let own = ["missed", "lost", "joined"];
        let names = EventKind::ALL.iter().map(|kind| kind.name()).chain(own).chain(fields);
        let phases = HandOverPhase::ALL.iter().map(|phase| phase.name());
        let names = names.chain(phases);
        let missing: Vec<_> = names.filter(|name| !page.contains(&format!("`{name}`"))).collect();
        assert!(missing.is_empty(), "docs/events.md does not say what these are: {missing:?}");
        assert!(page.contains(&format!("`schema` is {SCHEMA}.")));
    }
}
