//! The data of `top`: the last status, and each client's activity since the one before. `keys.rs` handles keys, and `view.rs` draws
//! the screen.

pub(crate) mod keys;
pub(crate) mod view;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use nvshare_admin::Status;
use nvshare_proto::{ClientState, ClientStatus};

use self::keys::{Prompt, Typed};
use crate::show::Sort;

/// Samples that are kept of a client.
const SAMPLES: usize = 32;

/// All data that is shown.
#[derive(Debug)]
pub(crate) struct Top {
    /// The last status; none: there has been none yet.
    pub(crate) status: Option<Status>,
    /// The reason why there is no scheduler at the moment.
    pub(crate) lost: Option<String>,
    pub(crate) sort: Sort,
    pub(crate) clients: BTreeMap<u64, History>,
    /// The last change, or the reason why it was refused.
    pub(crate) message: Option<String>,
    /// The client that keys apply to.
    pub(crate) selected: Option<u64>,
    /// The text that the user is typing.
    pub(crate) prompt: Option<Prompt>,
    /// The keys are shown in the place of the clients.
    pub(crate) shows_keys: bool,
    /// Whether colours may be used.
    pub(crate) colours: bool,
}

/// A client's recent activity.
#[derive(Debug)]
pub(crate) struct History {
    /// Part of the time that it held the lock, in thousandths, at each look.
    pub(crate) held: VecDeque<u64>,
    /// Bytes a second that it moved, out and in.
    pub(crate) moved: VecDeque<u64>,
    /// The time since when the client waits.
    pub(crate) waits_since: Option<Instant>,
    last: (Instant, u64, u64),
}

pub(crate) fn waits(client: &ClientStatus) -> bool {
    matches!(client.state, ClientState::Waiting | ClientState::Blocked | ClientState::Next)
}

fn moved_in_all(client: &ClientStatus) -> u64 {
    client.counters.evicted.saturating_add(client.counters.restored)
}

impl Top {
    pub(crate) fn new(colours: bool) -> Self {
        Self {
            status: None,
            lost: None,
            sort: Sort::Client,
            clients: BTreeMap::new(),
            message: None,
            selected: None,
            prompt: None,
            shows_keys: false,
            colours,
        }
    }

    /// Takes in a new status, or the reason why there is none.
    pub(crate) fn look(&mut self, looked: Result<Status, String>, now: Instant) {
        let status = match looked {
            Ok(status) => status,
            // The last status is shown on, and called old.
            Err(why) => return self.lost = Some(why),
        };
        self.lost = None;
        self.clients.retain(|id, _| status.clients.iter().any(|row| row.client == *id && !row.gone));
        for client in status.clients.iter().filter(|client| !client.gone) {
            let last = (now, client.held_ms, moved_in_all(client));
            let history = self.clients.entry(client.client).or_insert_with(|| History {
                held: VecDeque::new(),
                moved: VecDeque::new(),
                waits_since: None,
                last,
            });
            history.add(last);
            history.waits_since = waits(client).then(|| history.waits_since.unwrap_or(now));
        }
        // Another scheduler gives the same numbers to other clients. In a pod its process has the same number as the one before.
        let is_same = self.status.as_ref().is_none_or(|before| {
            let (before, now) = (&before.scheduler, &status.scheduler);
            before.pid == now.pid && before.uptime_s <= now.uptime_s
        });
        let is_there = |id: &u64| is_same && self.clients.contains_key(id);
        if let Some(gone) = self.selected.take_if(|id| !is_there(id)) {
            // A text typed for it is for no other client.
            self.prompt.take_if(|prompt| prompt.what != Typed::Quantum);
            self.message = Some(format!("client {gone} has gone"));
        }
        self.status = Some(status);
        self.sort_clients();
    }

    fn sort_clients(&mut self) {
        if let Some(status) = &mut self.status {
            self.sort.sort(&mut status.clients);
        }
    }

    fn client(&self, id: u64) -> Option<&ClientStatus> {
        self.status.as_ref()?.clients.iter().find(|client| client.client == id && !client.gone)
    }
}

impl History {
    fn add(&mut self, (now, held_ms, moved): (Instant, u64, u64)) {
        let (then, held_then, moved_then) = std::mem::replace(&mut self.last, (now, held_ms, moved));
        let millis = now.saturating_duration_since(then).as_millis() as u64;
        if millis == 0 {
            return;
        }
        let keep = |samples: &mut VecDeque<u64>, sample| {
            samples.push_back(sample);
            while samples.len() > SAMPLES {
                samples.pop_front();
            }
        };
        keep(&mut self.held, (held_ms.saturating_sub(held_then).saturating_mul(1000) / millis).min(1000));
        keep(&mut self.moved, moved.saturating_sub(moved_then).saturating_mul(1000) / millis);
    }

    /// Time that the client has waited.
    pub(crate) fn waits(&self, now: Instant) -> Option<Duration> {
        self.waits_since.map(|since| now.saturating_duration_since(since))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use nvshare_proto::{Counters, GpuStatus, GpuUuid, SchedulerStatus, Usage};

    pub(crate) const GIB: u64 = 1 << 30;

    pub(crate) fn client(client: u64, state: ClientState, held_ms: u64, evicted: u64) -> ClientStatus {
        let gpu = GpuUuid([7; 16]);
        let usage = Usage { gpu, total: 16 * GIB, limit: 0, allocated: 12 * GIB, absent: 0, immovable: 0 };
        ClientStatus {
            pid: 70 + client as u32,
            name: format!("job{client}"),
            state,
            usage: vec![usage],
            resident: 12 * GIB,
            held_ms,
            counters: Counters { evicted, ..Counters::default() },
            ..ClientStatus::parked(client)
        }
    }

    pub(crate) fn status(clients: Vec<ClientStatus>) -> Status {
        let gpu = GpuStatus {
            index: Some(0),
            name: Some("Tesla T4".to_owned()),
            capacity: 16 * GIB,
            allocated: 24 * GIB,
            resident: 12 * GIB,
            quantum_ms: 30_000,
            holders: vec![1],
            waiters: vec![2],
            ..GpuStatus::idle(GpuUuid([7; 16]))
        };
        let scheduler = SchedulerStatus {
            version: "0.1.0".to_owned(),
            pid: 5,
            uptime_s: 61,
            scheduling: true,
            quantum_ms: 30_000,
            restricted: false,
            host_memory: None,
        };
        let memory = nvshare_proto::MemoryStatus::default();
        Status {
            schema: 1,
            scheduler,
            gpus: vec![gpu],
            clients,
            seats: Vec::new(),
            unused_seats: Vec::new(),
            asleep: Vec::new(),
            memory,
        }
    }

    #[test]
    fn activity_of_clients_follows_from_two_looks() {
        let (mut top, begin) = (Top::new(false), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        top.look(
            Ok(status(vec![client(1, ClientState::Running, 0, 0), client(2, ClientState::Waiting, 0, 0)])),
            begin,
        );
        top.look(
            Ok(status(vec![
                client(1, ClientState::Running, 500, 8 * GIB),
                client(2, ClientState::Waiting, 0, 0),
            ])),
            at(2),
        );
        assert_eq!((&top.clients[&1].held, &top.clients[&1].moved), (&[250].into(), &[4 * GIB].into()));
        assert_eq!(top.clients[&2].waits(at(5)), Some(Duration::from_secs(5)));
        top.look(Err("gone".to_owned()), at(3));
        assert!(top.lost.is_some() && top.status.is_some(), "what was seen last is kept");
        // Another scheduler counts from zero again.
        top.look(Ok(status(vec![client(1, ClientState::Running, 100, 0)])), at(4));
        assert_eq!((top.lost.is_none(), top.clients.len(), top.clients[&1].held.back()), (true, 1, Some(&0)));
    }
}
