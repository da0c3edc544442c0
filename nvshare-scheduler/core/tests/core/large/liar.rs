//! A client that says anything, at any time, and answers to nothing but by chance.

use std::time::Duration;

use nvshare_core::{Gang, Identity};
use nvshare_proto::{
    Amount, ClientMessage, Counters, Epoch, Gate, GpuUuid, MemoryMode, Register, SchedulerMessage, Usage,
};

use super::{Act, Behaviour, Plan, Seen};
use crate::table::{CAPACITY, GIB, MS, gpu};

#[derive(Debug)]
pub(crate) struct Liar {
    seed: u64,
    /// The first of the GPUs that it speaks of.
    first: u8,
    /// The number of GPUs that it speaks of.
    gpus: u8,
    /// The last grant that it heard of.
    epoch: Epoch,
    client: u64,
}

impl Liar {
    pub(crate) fn new(seed: u64, first: u8, gpus: u8) -> Self {
        Self { seed: seed | 1, first, gpus, epoch: Epoch { boot: 1, counter: 0 }, client: 0 }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed % below.max(1)
    }

    fn gpu(&mut self) -> GpuUuid {
        let more = self.random(u64::from(self.gpus)) as u8;
        gpu(self.first + more)
    }

    fn bytes(&mut self) -> u64 {
        match self.random(8) {
            0 => 0,
            1 => 1,
            2 => u64::MAX,
            3 => 1 << 63,
            4 => CAPACITY,
            n => n * GIB / 2,
        }
    }

    fn epoch(&mut self) -> Epoch {
        match self.random(4) {
            0 => Epoch { boot: self.random(3), counter: self.random(100) },
            _ => self.epoch,
        }
    }

    fn usage(&mut self) -> Usage {
        let total = if self.random(3) == 0 { self.bytes() } else { CAPACITY };
        let [limit, allocated, absent, immovable] = [(); 4].map(|()| self.bytes());
        Usage { gpu: self.gpu(), total, limit, allocated, absent, immovable }
    }

    fn message(&mut self) -> ClientMessage {
        let epoch = self.epoch();
        match self.random(19) {
            0 => ClientMessage::Usage(self.usage()),
            1 | 2 => ClientMessage::ReqLock,
            3 | 4 => ClientMessage::Running { epoch },
            5 => ClientMessage::LockReleased { epoch },
            6 => ClientMessage::DropDeferred { epoch },
            7 => ClientMessage::Idle { epoch },
            8 => ClientMessage::NeedRoom(Amount { gpu: self.gpu(), bytes: self.bytes() }),
            9 => ClientMessage::Room(Amount { gpu: self.gpu(), bytes: self.bytes() }),
            10 => ClientMessage::Evicted { gpu: self.gpu(), short: self.bytes() },
            11 => ClientMessage::Asleep,
            12 => {
                let for_good = self.random(9) == 0;
                ClientMessage::CannotSleep { reason: "no".into(), for_good }
            }
            13 => ClientMessage::WakeWanted,
            14 => ClientMessage::Awake { took_us: self.bytes() },
            15 => ClientMessage::CannotShare,
            16 => {
                let count = self.random(4);
                ClientMessage::Shares { with: (0..count).map(|_| 100 + self.random(5)).collect() }
            }
            _ => ClientMessage::Counters(Counters { gated: self.bytes(), ..Counters::default() }),
        }
    }
}

impl Behaviour for Liar {
    fn begins(&mut self, client: u64, _now: Duration) -> (Identity, Register, Plan) {
        self.client = client;
        let usage = (0..self.random(4)).map(|_| self.usage()).collect();
        let flag = |n: u64| n == 0;
        let register = Register {
            asked: nvshare_proto::Wishes::default(),
            pid: self.random(3) as u32,
            name: "\u{202e}".into(),
            memory: if flag(self.random(3)) { MemoryMode::Off } else { MemoryMode::Managed },
            gate: if flag(self.random(3)) { Gate::Open } else { Gate::Closed },
            returns: flag(self.random(2)),
            run: None,
            usage,
        };
        let gang =
            flag(self.random(3)).then(|| Gang { number: self.random(3), size: self.random(1 << 32) as u32 });
        let tenant = flag(self.random(3)).then(|| 1000 + self.random(3));
        let identity = Identity { pid: Some(client as u32), process: Some(client), tenant, gang };
        (identity, register, vec![(MS(1), Act::Own(0))])
    }

    fn hears(&mut self, message: SchedulerMessage, _now: Duration) -> Plan {
        if let SchedulerMessage::LockOk { epoch, .. } | SchedulerMessage::DropLock { epoch, .. } = message {
            self.epoch = epoch;
        }
        if self.random(2) == 0 { Vec::new() } else { vec![(MS(self.random(20)), Act::Say(self.message()))] }
    }

    fn does(&mut self, _what: u64, _now: Duration) -> Plan {
        if self.random(60) == 0 {
            return vec![(Duration::ZERO, Act::End(Some(MS(self.random(500)))))];
        }
        let said = self.message();
        vec![(Duration::ZERO, Act::Say(said)), (MS(1 + self.random(200)), Act::Own(0))]
    }

    fn seen(&self) -> Seen {
        Seen { gpu: self.first, ..Seen::default() }
    }
}
