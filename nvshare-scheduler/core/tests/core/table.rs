//! A core whose clients a test speaks for, message by message, in virtual time.

use std::collections::BTreeMap;
use std::time::Duration;

use nvshare_core::{Config, Core, Event, Identity, Measured, Output};
use nvshare_proto::{
    ClientMessage, Epoch, Gate, GpuUuid, MemoryMode, Register, SchedulerMessage, Usage, Wishes,
};

pub(crate) const CAPACITY: u64 = 16 << 30;
pub(crate) const GIB: u64 = 1 << 30;
pub(crate) const MS: fn(u64) -> Duration = Duration::from_millis;

pub(crate) fn gpu(n: u8) -> GpuUuid {
    GpuUuid([n; 16])
}

pub(crate) fn config(exclusive: bool) -> Config {
    Config { quantum: MS(1000), gpu_memory: Some(CAPACITY), exclusive, ..Config::default() }
}

/// A core whose clients a test speaks for, in virtual time.
pub(crate) struct Table {
    pub(crate) core: Core,
    pub(crate) now: u64,
    pub(crate) notes: Vec<String>,
    /// GPUs that the core wants measured.
    pub(crate) to_measure: Vec<GpuUuid>,
}

impl Table {
    pub(crate) fn new(config: Config) -> Self {
        Self { core: Core::new(config), now: 0, notes: Vec::new(), to_measure: Vec::new() }
    }

    /// The messages that the core sends, in its order.
    pub(crate) fn sent(&mut self) -> Vec<(u64, SchedulerMessage)> {
        let mut sent = Vec::new();
        while let Some(output) = self.core.poll_output() {
            match output {
                Output::Send { client, message } => sent.push((client, message)),
                Output::Log { text, .. } => self.notes.push(text),
                Output::Measure { gpu } => self.to_measure.push(gpu),
            }
        }
        sent
    }

    pub(crate) fn register(&mut self, client: u64, gate: Gate, allocated: u64, absent: u64) {
        let usage = Usage { gpu: gpu(0), total: CAPACITY, limit: 0, allocated, absent, immovable: 0 };
        self.register_with(client, gate, usage);
    }

    /// The core's messages when a client registers with this usage.
    pub(crate) fn register_with(
        &mut self,
        client: u64,
        gate: Gate,
        usage: Usage,
    ) -> Vec<(u64, SchedulerMessage)> {
        let identity = Identity { pid: Some(9), process: Some(client), ..Identity::default() };
        self.register_as(client, identity, gate, usage)
    }

    /// The same for a client of which the kernel says something else.
    pub(crate) fn register_as(
        &mut self,
        client: u64,
        identity: Identity,
        gate: Gate,
        usage: Usage,
    ) -> Vec<(u64, SchedulerMessage)> {
        self.happens(Event::Registered { client, identity, register: newcomer(gate, usage) })
    }

    pub(crate) fn happens(&mut self, event: Event) -> Vec<(u64, SchedulerMessage)> {
        self.core.handle(event, MS(self.now));
        self.sent()
    }

    /// NVML is asked about a GPU, and says at once what there is.
    pub(crate) fn sees(
        &mut self,
        on: u8,
        available: u64,
        used: BTreeMap<u64, u64>,
    ) -> Vec<(u64, SchedulerMessage)> {
        self.happens(Event::Measured(Measured { gpu: gpu(on), asked_at: MS(self.now), available, used }))
    }

    /// A client asks for the lock, gets it, and runs.
    pub(crate) fn runs(&mut self, client: u64) -> Epoch {
        let sent = self.say(client, ClientMessage::ReqLock);
        let epoch = granted(&sent, client).unwrap_or_else(|| panic!("{sent:?}"));
        self.say(client, ClientMessage::Running { epoch });
        epoch
    }

    pub(crate) fn say(&mut self, client: u64, message: ClientMessage) -> Vec<(u64, SchedulerMessage)> {
        self.core.handle(Event::Message { client, message }, MS(self.now));
        self.sent()
    }

    /// Clients give back all that they are asked for, and say what they have then. Returns the messages that were sent, and those
    /// that follow.
    pub(crate) fn give_back(
        &mut self,
        mut sent: Vec<(u64, SchedulerMessage)>,
    ) -> Vec<(u64, SchedulerMessage)> {
        let mut at = 0;
        while let Some((client, message)) = sent.get(at).cloned() {
            at += 1;
            if let SchedulerMessage::Evict(room) = message {
                sent.append(&mut self.say(client, ClientMessage::Room(room)));
                sent.append(&mut self.say(client, ClientMessage::Evicted { gpu: room.gpu, short: 0 }));
            }
        }
        sent
    }

    /// The core has nothing left to look at before time passes.
    pub(crate) fn assert_at_rest(&mut self) {
        let deadline = self.core.next_deadline();
        assert!(deadline.is_none_or(|deadline| deadline > MS(self.now)), "it would look again at once");
    }

    /// The messages that the core sends by itself until then.
    pub(crate) fn wait_until(&mut self, time: u64) -> Vec<(u64, SchedulerMessage)> {
        let mut sent = Vec::new();
        while let Some(deadline) = self.core.next_deadline().filter(|&deadline| deadline <= MS(time)) {
            self.core.handle(Event::Deadline, deadline.max(MS(self.now)));
            sent.append(&mut self.sent());
        }
        self.now = time;
        sent
    }
}

pub(crate) fn granted(sent: &[(u64, SchedulerMessage)], to: u64) -> Option<Epoch> {
    sent.iter().find_map(|(client, message)| match message {
        SchedulerMessage::LockOk { epoch, .. } if *client == to => Some(*epoch),
        _ => None,
    })
}

pub(crate) fn asked_to_leave(sent: &[(u64, SchedulerMessage)], whom: u64) -> Option<Epoch> {
    sent.iter().find_map(|(client, message)| match message {
        SchedulerMessage::DropLock { epoch, .. } if *client == whom => Some(*epoch),
        _ => None,
    })
}

/// All the room that a client was given.
pub(crate) fn room_given(sent: &[(u64, SchedulerMessage)], to: u64) -> u64 {
    let given = |message: &SchedulerMessage| match message {
        SchedulerMessage::Room(room) | SchedulerMessage::Restore(room) => room.bytes,
        SchedulerMessage::LockOk { room, .. } => room.iter().map(|room| room.bytes).sum(),
        _ => 0,
    };
    sent.iter().filter(|(client, _)| *client == to).map(|(_, message)| given(message)).sum()
}

/// The first message of a client with managed memory on one GPU that was not registered before.
pub(crate) fn newcomer(gate: Gate, usage: Usage) -> Register {
    Register {
        pid: 9,
        name: "x".into(),
        memory: MemoryMode::Managed,
        gate,
        returns: false,
        run: None,
        usage: vec![usage],
        asked: Wishes::default(),
    }
}

/// A client of 12 GiB, so much of them absent, registers; it was registered before.
pub(crate) fn registered(client: u64, gate: Gate, absent: u64) -> Event {
    let register = Register { returns: true, ..newcomer(gate, twelve_gib(absent)) };
    Event::Registered { client, identity: Identity::default(), register }
}

pub(crate) fn twelve_gib(absent: u64) -> Usage {
    Usage { gpu: gpu(0), total: CAPACITY, limit: 0, allocated: 12 * GIB, absent, immovable: 0 }
}

/// A client that a test speaks for.
pub(crate) fn say(core: &mut Core, client: u64, message: ClientMessage) -> Vec<Output> {
    core.handle(Event::Message { client, message }, MS(1));
    std::iter::from_fn(|| core.poll_output()).collect()
}
