//! Other schedulers, as far as their sources and papers tell: first come, first served, without regard to memory,
//! which page faults move.
//!
//! - [`Rule::Fcfs`], the original nvshare: one client at a time on each GPU, a fixed quantum, DROP_LOCK at its end whether
//!   another client waits or not, an early release after 5 s without work.
//! - [`Rule::RunOrSerialise`], a fork of it: all run while what is allocated is less than 90 % of the card, else one at a
//!   time for 5 s for each GiB that the client has, at least 10 s and at most 300 s.
//!
//! Both know one GPU. Here each GPU has a queue of its own, and a client of several takes their locks in one order, so that
//! no two wait for each other.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use nvshare_core::Time;
use nvshare_proto::{ClientMessage, Epoch, InitialState, SchedulerMessage};

use super::{Faults, Newcomer, Scheduler};

/// The two rules.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Rule {
    /// The original, with its quantum.
    Fcfs(Duration),
    /// The fork.
    RunOrSerialise,
}

#[derive(Debug, Default)]
struct Card {
    queue: VecDeque<usize>,
    holders: BTreeSet<usize>,
    /// Resident bytes of clients, in the order in which they ran last.
    resident: VecDeque<(usize, u64)>,
    /// Bytes that the card's clients have allocated.
    allocated: u64,
}

#[derive(Debug)]
struct Client {
    gpus: Vec<usize>,
    bytes: u64,
    /// The number of the client's GPUs whose lock it has.
    has: usize,
    wants: bool,
    runs: bool,
    epoch: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct ByTurns {
    rule: Rule,
    card: u64,
    cards: Vec<Card>,
    clients: BTreeMap<usize, Client>,
    quanta: BTreeSet<(Time, usize, u64)>,
    told: VecDeque<(usize, SchedulerMessage)>,
    epochs: u64,
}

impl ByTurns {
    pub(crate) fn new(rule: Rule, gpus: usize, card: u64) -> Self {
        let cards = (0..gpus).map(|_| Card::default()).collect();
        Self {
            rule,
            card,
            cards,
            clients: BTreeMap::new(),
            quanta: BTreeSet::new(),
            told: VecDeque::new(),
            epochs: 0,
        }
    }

    fn all_run(&self, gpu: usize) -> bool {
        self.rule == Rule::RunOrSerialise && self.cards[gpu].allocated < self.card / 10 * 9
    }

    fn quantum(&self, bytes: u64) -> Duration {
        match self.rule {
            Rule::Fcfs(quantum) => quantum,
            Rule::RunOrSerialise => Duration::from_secs((5 * (bytes >> 30)).clamp(10, 300)),
        }
    }

    /// Takes the locks that a client lacks, in their order; where it cannot have one, it queues.
    fn take(&mut self, id: usize, now: Time) {
        while let Some(client) = self.clients.get(&id)
            && let Some(&gpu) = client.gpus.get(client.has)
        {
            let together = self.all_run(gpu);
            let card = &mut self.cards[gpu];
            let first = card.queue.front().is_none_or(|&first| first == id);
            if !(together || card.holders.is_empty() && first) {
                if !card.queue.contains(&id) {
                    card.queue.push_back(id);
                }
                return;
            }
            card.queue.retain(|&other| other != id);
            card.holders.insert(id);
            if let Some(client) = self.clients.get_mut(&id) {
                client.has += 1;
            }
        }
        self.epochs += 1;
        let counter = self.epochs;
        let Some(client) = self.clients.get_mut(&id) else { return };
        (client.runs, client.wants, client.epoch) = (true, false, counter);
        let bytes = client.bytes;
        let quantum = self.quantum(bytes);
        self.quanta.insert((now + quantum, id, counter));
        let epoch = Epoch { boot: 1, counter };
        self.told.push_back((id, SchedulerMessage::LockOk { epoch, quantum_ms: 0, room: Vec::new() }));
    }

    /// A client gives its locks back; the clients that are first in the queues go on.
    fn release(&mut self, id: usize, now: Time) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        (client.runs, client.has) = (false, 0);
        let gpus = client.gpus.clone();
        for gpu in gpus {
            self.cards[gpu].holders.remove(&id);
            self.cards[gpu].queue.retain(|&other| other != id);
            if self.cards[gpu].holders.is_empty() || self.all_run(gpu) {
                while let Some(&first) = self.cards[gpu].queue.front() {
                    self.take(first, now);
                    if self.cards[gpu].queue.front() == Some(&first) || !self.all_run(gpu) {
                        break;
                    }
                }
            }
        }
    }
}

impl Scheduler for ByTurns {
    fn comes(&mut self, newcomer: &Newcomer, _now: Time) {
        let client = Client {
            gpus: newcomer.gpus.clone(),
            bytes: newcomer.bytes,
            has: 0,
            wants: false,
            runs: false,
            epoch: 0,
        };
        for &gpu in &newcomer.gpus {
            self.cards[gpu].allocated += newcomer.bytes;
        }
        self.clients.insert(newcomer.client, client);
        let hold = InitialState::Parked;
        let registered = SchedulerMessage::Registered { client: newcomer.client as u64, hold };
        self.told.push_back((newcomer.client, registered));
        self.told.push_back((newcomer.client, SchedulerMessage::Waiters { waiting: true }));
        // The memory does not fit any more, so clients that ran beside others must not go on doing so.
        for &gpu in &newcomer.gpus {
            if !self.all_run(gpu) {
                let holders: Vec<usize> = self.cards[gpu].holders.iter().skip(1).copied().collect();
                for id in holders {
                    self.drop_lock(id);
                }
            }
        }
    }

    fn says(&mut self, id: usize, message: ClientMessage, now: Time) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        match message {
            ClientMessage::ReqLock if !client.wants && !client.runs => {
                client.wants = true;
                self.take(id, now);
            }
            ClientMessage::LockReleased { epoch } | ClientMessage::Idle { epoch }
                if client.runs && client.epoch == epoch.counter =>
            {
                self.release(id, now);
            }
            _ => {}
        }
    }

    fn goes(&mut self, id: usize, now: Time) {
        if let Some(client) = self.clients.get(&id) {
            for &gpu in &client.gpus {
                let card = &mut self.cards[gpu];
                card.allocated -= client.bytes;
                card.resident.retain(|(other, _)| *other != id);
            }
        }
        self.release(id, now);
        self.clients.remove(&id);
    }

    fn due(&mut self, now: Time) {
        while let Some(&(time, id, epoch)) = self.quanta.first()
            && time <= now
        {
            self.quanta.pop_first();
            let current = |client: &&Client| client.runs && client.epoch == epoch;
            let Some(client) = self.clients.get(&id).filter(current) else { continue };
            if client.gpus.iter().all(|&gpu| self.all_run(gpu)) {
                self.quanta.insert((now + self.quantum(client.bytes), id, epoch));
            } else {
                self.drop_lock(id);
            }
        }
    }

    fn deadline(&self) -> Option<Time> {
        self.quanta.first().map(|(time, _, _)| *time)
    }

    fn told(&mut self) -> Option<(usize, SchedulerMessage)> {
        self.told.pop_front()
    }

    fn idle_after(&self) -> Option<Duration> {
        Some(Duration::from_secs(5))
    }

    fn faults(&mut self, id: usize) -> Option<Vec<Faults>> {
        let client = self.clients.get(&id)?;
        let mut faults = Vec::new();
        for &gpu in &client.gpus {
            let card = &mut self.cards[gpu];
            let had = card.resident.iter().position(|(other, _)| *other == id);
            let had = had.and_then(|at| card.resident.remove(at)).map_or(0, |(_, bytes)| bytes);
            let others: u64 = card.resident.iter().map(|(_, bytes)| bytes).sum();
            let bytes = client.bytes.min(self.card);
            let mut too_much = (others + bytes).saturating_sub(self.card);
            let leave = too_much;
            for (_, theirs) in &mut card.resident {
                let goes = too_much.min(*theirs);
                *theirs -= goes;
                too_much -= goes;
            }
            card.resident.retain(|(_, bytes)| *bytes > 0);
            card.resident.push_back((id, bytes));
            faults.push(Faults { gpu, come: bytes - had, leave });
        }
        Some(faults)
    }
}

impl ByTurns {
    fn drop_lock(&mut self, id: usize) {
        let Some(client) = self.clients.get(&id).filter(|client| client.runs) else { return };
        let epoch = Epoch { boot: 1, counter: client.epoch };
        self.told.push_back((id, SchedulerMessage::DropLock { epoch, patience_ms: 60_000 }));
    }
}
