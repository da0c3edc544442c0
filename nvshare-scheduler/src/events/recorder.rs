//! Records events: as events for watchers, and as figures for readers of metrics.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nvshare_core::{ClientId, Incident, Time};
use nvshare_proto::units::saturate;
use nvshare_proto::{Counters, EventKind, ProcessInfo, SeatName, WatchEvent, short_command};

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
}

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
        self.clients.insert(client, Known { pid, name: name.to_owned() });
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
        let known = incident.client.and_then(|client| self.clients.get(&client));
        let micros = |time: Duration| saturate(time.as_micros());
        self.journal.push(WatchEvent {
            seq: 0,
            time_us: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, micros),
            up_us: micros(up),
            event: incident.kind,
            client: incident.client,
            pid: known.map(|known| known.pid),
            name: known.map(|known| known.name.clone()),
            gpus: incident.gpus,
            bytes: incident.bytes,
            took_us: incident.took.map(micros),
        });
        if let (EventKind::Gone | EventKind::Ended, Some(client)) = (incident.kind, incident.client) {
            self.clients.remove(&client);
        }
    }
}
