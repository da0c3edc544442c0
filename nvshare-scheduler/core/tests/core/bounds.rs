//! The cost of one event does not grow with the number of clients that wait, however many GPUs each of them names.

use std::collections::BTreeMap;

use nvshare_core::{Event, Gang, Identity};
use nvshare_proto::{
    Amount, ClientMessage, ComputeLimit, Epoch, Gate, Register, SchedulerMessage, Usage, Wishes,
};

use crate::table::{CAPACITY, GIB, MS, Table, config, gpu, newcomer};

/// Clients that all use the same GPUs, and answer at once.
struct Crowd {
    table: Table,
    gpus: u8,
    bytes: u64,
    resident: BTreeMap<(u64, u8), u64>,
    most: u64,
}

impl Crowd {
    fn new(gpus: u8, bytes: u64) -> Self {
        Self { table: Table::new(config(false)), gpus, bytes, resident: BTreeMap::new(), most: 0 }
    }

    fn usage(&self, client: u64, on: u8) -> Usage {
        let resident = self.resident.get(&(client, on)).copied().unwrap_or(0);
        Usage {
            gpu: gpu(on),
            total: CAPACITY,
            limit: 0,
            allocated: self.bytes,
            absent: self.bytes - resident,
            immovable: 0,
        }
    }

    fn register(&mut self, client: u64, identity: Identity, asked: Wishes) {
        let usage: Vec<Usage> = (0..self.gpus).map(|on| self.usage(client, on)).collect();
        let register = Register { usage, asked, ..newcomer(Gate::Closed, self.usage(client, 0)) };
        self.happens(Event::Registered { client, identity, register });
    }

    fn say(&mut self, client: u64, message: ClientMessage) {
        self.happens(Event::Message { client, message });
    }

    /// An event, and all that follows from it. Each is counted for itself.
    fn happens(&mut self, event: Event) {
        let mut sent = self.table.happens(event);
        self.most = self.most.max(self.table.core.steps());
        let mut at = 0;
        while let Some((client, message)) = sent.get(at).cloned() {
            at += 1;
            for answer in self.answers(client, message) {
                sent.append(&mut self.table.say(client, answer));
                self.most = self.most.max(self.table.core.steps());
            }
        }
    }

    fn answers(&mut self, client: u64, message: SchedulerMessage) -> Vec<ClientMessage> {
        match message {
            SchedulerMessage::LockOk { epoch, .. } => {
                for on in 0..self.gpus {
                    self.resident.insert((client, on), self.bytes);
                }
                let usages = (0..self.gpus).map(|on| ClientMessage::Usage(self.usage(client, on)));
                [ClientMessage::Running { epoch }].into_iter().chain(usages).collect()
            }
            SchedulerMessage::DropLock { epoch, .. } => Self::gives_back(epoch),
            SchedulerMessage::Evict(Amount { gpu: uuid, bytes }) => {
                let resident = self.resident.entry((client, uuid.0[0])).or_default();
                *resident -= bytes.min(*resident);
                let usage = self.usage(client, uuid.0[0]);
                vec![
                    ClientMessage::Usage(usage),
                    ClientMessage::Room(Amount { gpu: uuid, bytes }),
                    ClientMessage::Evicted { gpu: uuid, short: 0 },
                ]
            }
            _ => Vec::new(),
        }
    }

    fn gives_back(epoch: Epoch) -> Vec<ClientMessage> {
        vec![ClientMessage::LockReleased { epoch }, ClientMessage::ReqLock]
    }

    /// All ask for the lock, and turns follow each other for a while. Returns the most steps that one event took.
    fn take_turns(&mut self, clients: u64, until: u64) -> u64 {
        self.most = 0;
        for client in 0..clients {
            self.say(client, ClientMessage::ReqLock);
        }
        while let Some(deadline) = self.table.core.next_deadline().filter(|&deadline| deadline <= MS(until)) {
            self.table.now = self.table.now.max(deadline.as_millis() as u64 + 1);
            self.happens(Event::Deadline);
        }
        assert!(!self.resident.is_empty(), "somebody had a turn");
        self.most
    }
}

fn process(client: u64) -> Identity {
    Identity { process: Some(client), ..Identity::default() }
}

#[test]
fn of_clients_that_use_many_gpus() {
    for (gpus, crowds, most) in [(1, [20, 200], 40), (8, [20, 200], 250), (64, [10, 40], 2000)] {
        let mut took = Vec::new();
        for clients in crowds {
            let mut crowd = Crowd::new(gpus, 12 * GIB);
            for client in 0..clients {
                crowd.register(client, process(client), Wishes::default());
            }
            let registering = crowd.most;
            assert!(registering <= 40 + 4 * u64::from(gpus), "{registering} to register with {gpus} GPUs");
            took.push(crowd.take_turns(clients, 5000));
        }
        assert!(took.iter().all(|&steps| steps <= most), "{took:?} of at most {most} with {gpus} GPUs");
    }
}

#[test]
fn of_processes_of_one_job_with_limits() {
    let limits = |n| (0..n).map(|n| ComputeLimit { gpu: gpu(n as u8), percent: 50 }).collect();
    let mut crowd = Crowd::new(1, GIB / 64);
    for client in 0..500 {
        let asked = Wishes { compute: limits(3500), ..Wishes::default() };
        crowd.register(client, Identity { tenant: Some(1), ..process(client) }, asked);
    }
    for client in 0..400 {
        crowd.happens(Event::Disconnected { client, process_remains: false });
    }
    assert!(crowd.most <= 60, "{}", crowd.most);
}

#[test]
fn of_a_gang() {
    let mut crowd = Crowd::new(1, GIB / 64);
    for client in 0..64 {
        let gang = Some(Gang { number: 1, size: 0 });
        crowd.register(client, Identity { gang, ..process(client) }, Wishes::default());
    }
    let most = crowd.take_turns(64, 1000);
    assert!(most <= 64 * 10, "{most}");
}

/// One process has many connections, and says over and over that they share memory, and that they do not.
#[test]
fn of_clients_that_share_memory_and_do_so_no_more() {
    let with_each = |client: u64| (0..64).map(|other| client.min(other) << 32 | client.max(other)).collect();
    let with_all = |_| vec![7];
    let numbers: [&dyn Fn(u64) -> Vec<u64>; 2] = [&with_all, &with_each];
    for with in numbers {
        let mut crowd = Crowd::new(1, GIB / 64);
        for client in 0..64 {
            crowd.register(client, process(client), Wishes::default());
        }
        for client in 0..64 {
            crowd.say(client, ClientMessage::Shares { with: with(client) });
        }
        crowd.say(0, ClientMessage::ReqLock);
        crowd.most = 0;
        for client in [63, 0, 31] {
            crowd.say(client, ClientMessage::Shares { with: Vec::new() });
            crowd.say(client, ClientMessage::Shares { with: with(client) });
        }
        assert!(crowd.most <= 64 * 12, "{}", crowd.most);
        crowd.table.core.audit().unwrap();
    }
}

/// All wait for three GPUs. Nobody uses two of them. On the third one a client runs, and another one is ahead of all.
#[test]
fn of_waiters_that_could_go_if_one_of_their_gpus_were_free() {
    for (clients, most) in [(20, 1_200), (80, 12_000)] {
        let mut crowd = Crowd::new(3, 12 * GIB);
        let single = |crowd: &mut Crowd, client| {
            let register = newcomer(Gate::Closed, crowd.usage(client, 2));
            crowd.table.happens(Event::Registered { client, identity: process(client), register });
            crowd.table.now += 1;
            crowd.table.say(client, ClientMessage::ReqLock)
        };
        for client in [1000, 1001] {
            single(&mut crowd, client);
        }
        for client in 0..clients {
            crowd.table.now += 1;
            crowd.register(client, process(client), Wishes::default());
            crowd.say(client, ClientMessage::ReqLock);
        }
        assert!(crowd.most <= most, "{} of at most {most} with {clients} clients", crowd.most);
    }
}
