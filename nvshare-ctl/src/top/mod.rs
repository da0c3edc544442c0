//! What `top` knows: the last status, and of each client what it did since the one before. `view.rs` draws it.

pub(crate) mod view;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use nvshare_admin::Status;
use nvshare_proto::units::parse_quantum;
use nvshare_proto::{AdminRequest, ClientState, ClientStatus};

use crate::show::Sort;

/// Samples that are kept of a client.
const SAMPLES: usize = 32;

/// Everything that is shown.
#[derive(Debug)]
pub(crate) struct Top {
    /// The last status; none: there was none yet.
    pub(crate) status: Option<Status>,
    /// Why there is no scheduler at the moment.
    pub(crate) lost: Option<String>,
    pub(crate) sort: Sort,
    pub(crate) clients: BTreeMap<u64, History>,
    /// What was done last, or refused.
    pub(crate) message: Option<String>,
    /// The quantum that is being typed.
    pub(crate) typed: Option<String>,
    /// Whether colours may be used.
    pub(crate) colours: bool,
}

/// What a client did of late.
#[derive(Debug)]
pub(crate) struct History {
    /// Part of the time that it held the lock, in thousandths, at each look.
    pub(crate) held: VecDeque<u64>,
    /// Bytes a second that it moved, out and in.
    pub(crate) moved: VecDeque<u64>,
    /// Since when it waits.
    pub(crate) waits_since: Option<Instant>,
    last: (Instant, u64, u64),
}

/// A key, as far as it means something here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Key {
    Char(char),
    Enter,
    Escape,
    Backspace,
}

/// What a key asks for.
#[derive(Debug, PartialEq)]
pub(crate) enum Wish {
    Nothing,
    Quit,
    Change(AdminRequest),
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
            typed: None,
            colours,
        }
    }

    /// Takes in a look at the scheduler, or why there was none.
    pub(crate) fn look(&mut self, looked: Result<Status, String>, now: Instant) {
        let status = match looked {
            Ok(status) => status,
            // What was seen last is shown on, and said to be old.
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
        self.status = Some(status);
        self.sort_clients();
    }

    fn sort_clients(&mut self) {
        if let Some(status) = &mut self.status {
            self.sort.sort(&mut status.clients);
        }
    }

    /// What a key asks for.
    pub(crate) fn press(&mut self, key: Key) -> Wish {
        if let Some(typed) = &mut self.typed {
            match key {
                Key::Char(c) if c.is_ascii_digit() || c == '.' => typed.push(c),
                Key::Backspace => drop(typed.pop()),
                Key::Escape => self.typed = None,
                Key::Enter => {
                    let typed = self.typed.take().unwrap_or_default();
                    match parse_quantum(&typed) {
                        Ok(quantum) => {
                            let millis = quantum.as_millis() as u64;
                            return Wish::Change(AdminRequest::SetQuantum {
                                gpu: None,
                                quantum: nvshare_proto::QuantumRule::Fixed { millis },
                            });
                        }
                        Err(error) => self.message = Some(error.to_string()),
                    }
                }
                Key::Char(_) => {}
            }
            return Wish::Nothing;
        }
        self.message = None;
        match key {
            Key::Char('q') | Key::Escape => return Wish::Quit,
            Key::Char('t') => self.typed = Some(String::new()),
            Key::Char('o') => {
                let on = self.status.as_ref().is_none_or(|status| status.scheduler.scheduling);
                let change = if on { AdminRequest::Off { force: false } } else { AdminRequest::On };
                return Wish::Change(change);
            }
            Key::Char('s') => {
                let all = Sort::value_variants();
                let next = all.iter().position(|&sort| sort == self.sort).map_or(0, |at| at + 1);
                self.sort = all[next % all.len()];
                self.sort_clients();
            }
            _ => {}
        }
        Wish::Nothing
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

    /// For how long it has waited.
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
            share: nvshare_proto::ShareStatus::default(),
            client,
            pid: 70 + client as u32,
            name: format!("job{client}"),
            process: None,
            state,
            blocked_on: None,
            stuck: false,
            gone: false,
            usage: vec![usage],
            resident: 12 * GIB,
            overhead: 0,
            held_ms,
            waited_ms: 0,
            counters: Counters { evicted, ..Counters::default() },
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
        };
        Status { schema: 1, scheduler, gpus: vec![gpu], clients }
    }

    #[test]
    fn what_clients_do_follows_from_two_looks() {
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

    #[test]
    fn keys_ask_for_changes() {
        let mut top = Top::new(false);
        top.look(Ok(status(Vec::new())), Instant::now());
        assert_eq!(top.press(Key::Char('o')), Wish::Change(AdminRequest::Off { force: false }));
        for key in [
            Key::Char('t'),
            Key::Char('2'),
            Key::Char('x'),
            Key::Char('7'),
            Key::Backspace,
            Key::Char('.'),
            Key::Char('5'),
        ] {
            assert_eq!(top.press(key), Wish::Nothing);
        }
        let change = Wish::Change(AdminRequest::SetQuantum {
            gpu: None,
            quantum: nvshare_proto::QuantumRule::Fixed { millis: 2500 },
        });
        assert_eq!(top.press(Key::Enter), change);
        for key in [Key::Char('t'), Key::Char('0'), Key::Enter] {
            assert_eq!(top.press(key), Wish::Nothing);
        }
        assert!(top.message.as_ref().is_some_and(|message| message.contains("accepted: seconds")));
        assert_eq!((top.press(Key::Char('s')), top.sort), (Wish::Nothing, Sort::User));
        assert_eq!(top.press(Key::Char('q')), Wish::Quit);
    }
}
