//! Records events: as events for watchers, and as figures for readers of metrics.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nvshare_core::{ClientId, Incident, Time};
use nvshare_proto::units::saturate;
use nvshare_proto::{
    Counters, EventKind, GpuUuid, HandOverPhase, PhaseTime, ProcessInfo, SeatName, WatchEvent, short_command,
};

use super::journal::Journal;
use crate::metrics::{Counted, OfTenant};

/// Records events.
#[derive(Debug)]
pub(crate) struct Recorder {
    journal: Arc<Journal>,
    clients: BTreeMap<ClientId, Known>,
    /// None: no metrics are served.
    counted: Option<Counted>,
}

/// Facts about a client that its events contain.
#[derive(Debug)]
struct Known {
    pid: u32,
    name: String,
    /// The phases that it has told last, as far as no event has them yet.
    phases: Vec<PhaseTime>,
}

impl Known {
    /// The phases of an event. They are parts of its time: longer ones are about something else, or not true.
    fn take_phases(&mut self, incident: &Incident) -> Vec<PhaseTime> {
        let is_part = |told: &mut PhaseTime| {
            told.phase.part_of() == incident.kind && told.gpu.is_none_or(|gpu| incident.gpus.contains(&gpu))
        };
        let phases: Vec<PhaseTime> = self.phases.extract_if(.., is_part).collect();
        let sum = phases.iter().fold(0, |sum: u64, phase| sum.saturating_add(phase.micros));
        if incident.took.is_some_and(|took| sum <= micros(took)) { phases } else { Vec::new() }
    }
}

fn micros(time: Duration) -> u64 {
    saturate(time.as_micros())
}

/// Largest number of phases that an event has: all of eight GPUs. Many events are kept, and a client says what it likes.
const MAX_PHASES: usize = 8 * HandOverPhase::ALL.len();

/// Longest name of a client in an event, in letters.
const MAX_NAME: usize = 40;

/// A command without the program's folder, and with as many of its arguments as a line has room for.
fn in_short(command: &str) -> String {
    let whole = short_command(command);
    if whole.chars().count() <= MAX_NAME {
        return whole;
    }
    whole.chars().take(MAX_NAME - 1).chain(['…']).collect()
}

impl Recorder {
    pub(crate) fn new(journal: Arc<Journal>, counted: Option<Counted>) -> Self {
        let mut recorder = Self { journal, clients: BTreeMap::new(), counted };
        let (kind, gpus) = (EventKind::Started, Vec::new());
        recorder.record(Incident { kind, client: None, gpus, bytes: None, took: None }, Time::ZERO);
        recorder
    }

    /// A client is about to register.
    pub(crate) fn expect(
        &mut self,
        client: ClientId,
        pid: u32,
        name: &str,
        process: Option<&ProcessInfo>,
        seat: Option<SeatName>,
    ) {
        self.clients.insert(client, Known { pid, name: name.to_owned(), phases: Vec::new() });
        if let Some(counted) = &mut self.counted {
            counted.expect(client, seat.map_or_else(|| OfTenant::of(process, name), OfTenant::of_seat));
        }
    }

    /// A client's command is known: several clients may have one name.
    pub(crate) fn describe(&mut self, client: ClientId, command: &str) {
        self.rename(client, &in_short(command));
    }

    /// A client's events have another name from now on.
    pub(crate) fn rename(&mut self, client: ClientId, name: &str) {
        if let Some(known) = self.clients.get_mut(&client) {
            name.clone_into(&mut known.name);
        }
    }

    /// The core's task took this long for one event.
    pub(crate) fn passed(&self, took: Duration) {
        if let Some(counted) = &self.counted {
            counted.passed(took);
        }
    }

    /// A client has said its counters.
    pub(crate) fn said(&mut self, client: ClientId, counters: &Counters) {
        if let Some(counted) = &mut self.counted {
            counted.said(client, counters);
        }
    }

    /// A client has said the phases of the event that is next.
    pub(crate) fn note_phases(&mut self, client: ClientId, phases: &[PhaseTime]) {
        if let Some(known) = self.clients.get_mut(&client) {
            known.phases = phases.iter().copied().take(MAX_PHASES).collect();
        }
    }

    /// The machine has this GPU.
    pub(crate) fn know(&mut self, gpu: GpuUuid, up: Time) {
        if let Some(counted) = &mut self.counted {
            counted.know(gpu, up);
        }
    }

    /// Counts all times up to now.
    pub(crate) fn count_all(&mut self, up: Time) {
        if let Some(counted) = &mut self.counted {
            counted.count_all(up);
        }
    }

    /// Records an event, at this time since the start.
    pub(crate) fn record(&mut self, incident: Incident, up: Time) {
        if let Some(counted) = &mut self.counted {
            counted.record(&incident, up);
        }
        let mut known = incident.client.and_then(|client| self.clients.get_mut(&client));
        let phases = known.as_mut().map(|known| known.take_phases(&incident)).unwrap_or_default();
        let event = WatchEvent {
            seq: 0,
            time_us: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, micros),
            up_us: micros(up),
            event: incident.kind,
            client: incident.client,
            pid: known.as_ref().map(|known| known.pid),
            name: known.map(|known| known.name.clone()),
            gpus: incident.gpus,
            bytes: incident.bytes,
            took_us: incident.took.map(micros),
        };
        self.journal.push(event, phases);
        if let (EventKind::Gone | EventKind::Ended, Some(client)) = (incident.kind, incident.client) {
            self.clients.remove(&client);
        }
    }
}

#[cfg(test)]
mod tests {
    use nvshare_proto::WatchFrom;

    use super::*;

    const CLIENT: ClientId = 3;

    /// The names of the phases that the last event has.
    fn last(journal: &Journal) -> Vec<&'static str> {
        let last = journal.first(WatchFrom::Now) - 1;
        let entry = journal.read(last, 1).entries.remove(0);
        entry.phases.iter().map(|phase| phase.phase.name()).collect()
    }

    #[test]
    fn an_event_has_the_phases_that_its_client_told_last_and_that_are_parts_of_it() {
        let journal = Journal::new(7);
        let mut recorder = Recorder::new(Arc::clone(&journal), None);
        recorder.expect(CLIENT, 70, "job", None, None);
        let [gpu, other] = [GpuUuid([1; 16]), GpuUuid([2; 16])];
        let happens = |recorder: &mut Recorder, kind, gpu| {
            let took = Some(Duration::from_micros(100));
            let incident = Incident { kind, client: Some(CLIENT), gpus: vec![gpu], bytes: None, took };
            recorder.record(incident, Time::ZERO);
            last(&journal)
        };
        assert!(happens(&mut recorder, EventKind::Restored, gpu).is_empty(), "it has told none");
        let of = |gpu, phase, micros| PhaseTime { gpu, phase, micros };
        let told = [
            of(Some(gpu), HandOverPhase::Map, 40),
            of(Some(gpu), HandOverPhase::CopyIn, 60),
            of(Some(other), HandOverPhase::Map, 101),
            of(None, HandOverPhase::Open, 5),
        ];
        recorder.note_phases(CLIENT, &told);
        let mut happens = |kind, gpu| happens(&mut recorder, kind, gpu);
        assert_eq!(happens(EventKind::Restored, gpu), ["map", "copy"]);
        assert!(happens(EventKind::Restored, gpu).is_empty(), "another event has them");
        assert!(happens(EventKind::Restored, other).is_empty(), "a part is not longer than the whole");
        assert_eq!(happens(EventKind::Running, gpu), ["open"]);
    }

    #[test]
    fn an_event_has_no_more_phases_than_a_hand_over_can_have() {
        let journal = Journal::new(7);
        let mut recorder = Recorder::new(Arc::clone(&journal), None);
        recorder.expect(CLIENT, 70, "job", None, None);
        recorder.note_phases(CLIENT, &[PhaseTime { gpu: None, phase: HandOverPhase::Open, micros: 0 }; 5000]);
        let (kind, took) = (EventKind::Running, Some(Duration::ZERO));
        let incident = Incident { kind, client: Some(CLIENT), gpus: Vec::new(), bytes: None, took };
        recorder.record(incident, Time::ZERO);
        assert_eq!(last(&journal).len(), MAX_PHASES);
    }
}
