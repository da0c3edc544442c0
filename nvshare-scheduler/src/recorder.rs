//! Writes down what happens: events for those who watch.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nvshare_core::{ClientId, Happened, Time};
use nvshare_proto::{EventKind, WatchEvent};

use crate::journal::Journal;

/// Writes down what happens.
#[derive(Debug)]
pub(crate) struct Recorder {
    journal: Arc<Journal>,
    clients: BTreeMap<ClientId, Known>,
}

/// What is told of a client with each of its events.
#[derive(Debug)]
struct Known {
    pid: u32,
    name: String,
}

impl Recorder {
    pub(crate) fn new(journal: Arc<Journal>) -> Self {
        let mut recorder = Self { journal, clients: BTreeMap::new() };
        let (kind, gpus) = (EventKind::Started, Vec::new());
        recorder.record(Happened { kind, client: None, gpus, bytes: None, took: None }, Time::ZERO);
        recorder
    }

    /// A client is about to register.
    pub(crate) fn expect(&mut self, client: ClientId, pid: u32, name: String) {
        self.clients.insert(client, Known { pid, name });
    }

    /// Something happened, at this time since the start.
    pub(crate) fn record(&mut self, happened: Happened, up: Time) {
        let known = happened.client.and_then(|client| self.clients.get(&client));
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.journal.push(WatchEvent {
            seq: 0,
            time_us: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, micros),
            up_us: micros(up),
            event: happened.kind,
            client: happened.client,
            pid: known.map(|known| known.pid),
            name: known.map(|known| known.name.clone()),
            gpus: happened.gpus,
            bytes: happened.bytes,
            took_us: happened.took.map(micros),
        });
        if let (EventKind::Gone | EventKind::Ended, Some(client)) = (happened.kind, happened.client) {
            self.clients.remove(&client);
        }
    }
}
