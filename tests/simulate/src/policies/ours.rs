//! This project's scheduler: the same core that the daemon runs.

use std::time::Duration;

use nvshare_core::{Config, Core, Event, Identity, Output, Time};
use nvshare_proto::{ClientMessage, GpuUuid, MemoryMode, Register, SchedulerMessage, Usage, Wishes};

use super::{Faults, Newcomer, Scheduler};

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Ours {
    core: Core,
    card: u64,
    memory: MemoryMode,
}

/// A GPU's name, by its number.
pub(crate) fn uuid(gpu: usize) -> GpuUuid {
    GpuUuid([gpu as u8; 16])
}

/// A GPU's number, by its name.
pub(crate) fn number(uuid: GpuUuid) -> usize {
    usize::from(uuid.0[0])
}

impl Ours {
    pub(crate) fn new(config: Config, card: u64, memory: MemoryMode) -> Self {
        Self { core: Core::new(Config { gpu_memory: Some(card), ..config }), card, memory }
    }
}

impl Scheduler for Ours {
    fn comes(&mut self, newcomer: &Newcomer, now: Time) {
        let usage = |&gpu: &usize| Usage {
            gpu: uuid(gpu),
            total: self.card,
            limit: 0,
            allocated: newcomer.bytes,
            absent: newcomer.bytes,
            immovable: 0,
        };
        let register = Register {
            memory: self.memory,
            usage: newcomer.gpus.iter().map(usage).collect(),
            asked: Wishes { weight: Some(newcomer.weight), ..Wishes::default() },
            ..Register::newcomer(newcomer.client as u32, "")
        };
        let process = Some(newcomer.client as u64);
        let identity = Identity { pid: Some(register.pid), process, ..Identity::default() };
        self.core.handle(Event::Registered { client: newcomer.client as u64, identity, register }, now);
    }

    fn says(&mut self, client: usize, message: ClientMessage, now: Time) {
        self.core.handle(Event::Message { client: client as u64, message }, now);
    }

    fn goes(&mut self, client: usize, now: Time) {
        self.core.handle(Event::Disconnected { client: client as u64, process_remains: false }, now);
    }

    fn due(&mut self, now: Time) {
        self.core.handle(Event::Deadline, now);
    }

    fn deadline(&self) -> Option<Time> {
        self.core.next_deadline()
    }

    fn told(&mut self) -> Option<(usize, SchedulerMessage)> {
        loop {
            if let Output::Send { client, message } = self.core.poll_output()? {
                return Some((client as usize, message));
            }
        }
    }

    fn idle_after(&self) -> Option<Duration> {
        None
    }

    fn faults(&mut self, _client: usize) -> Option<Vec<Faults>> {
        None
    }
}
