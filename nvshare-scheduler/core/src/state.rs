//! What the core knows of clients and GPUs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use nvshare_proto::units::{GIB, MIB};
use nvshare_proto::{ClientState, Counters, Epoch, GpuUuid, MemoryMode, Register, Usage};

/// Time since the scheduler started. The core never looks at a clock.
pub type Time = Duration;

/// A client's number: the shell's number of its connection.
pub type ClientId = u64;

/// Where a client stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Its gate is closed.
    Parked,
    /// It is next: holders leave and room is made for it.
    Chosen,
    /// LOCK_OK is sent; it restores, which should not take longer than this.
    Granted { epoch: Epoch, until: Time },
    /// Its gate is open.
    Running { epoch: Epoch },
    /// DROP_LOCK is sent; it drains.
    Dropping { epoch: Epoch, since: Time },
    /// It closed its own gate, and keeps its place until somebody takes it.
    Idle { epoch: Epoch, since: Time },
    /// Scheduling is off: it runs and nothing is counted.
    Free,
}

impl Phase {
    /// Its work may be on the GPU, or may be let through without a further word from here.
    pub(crate) fn holds(self) -> bool {
        matches!(
            self,
            Self::Granted { .. } | Self::Running { .. } | Self::Dropping { .. } | Self::Idle { .. }
        )
    }

    /// It holds or will hold the lock, and nobody asked it to leave.
    pub(crate) fn stays(self) -> bool {
        self == Self::Chosen || (self.holds() && !matches!(self, Self::Dropping { .. }))
    }

    /// Wall-clock time is charged: from open gate to drained.
    pub(crate) fn runs(self) -> bool {
        matches!(self, Self::Running { .. } | Self::Dropping { .. })
    }

    pub(crate) fn shown(self, wants: bool) -> ClientState {
        match self {
            Self::Parked if wants => ClientState::Waiting,
            Self::Parked => ClientState::Parked,
            Self::Chosen => ClientState::Next,
            Self::Granted { .. } => ClientState::Restoring,
            Self::Running { .. } => ClientState::Running,
            Self::Dropping { .. } => ClientState::Draining,
            Self::Idle { .. } => ClientState::Idle,
            Self::Free => ClientState::Free,
        }
    }
}

/// An EVICT on its way or being followed, until EVICTED answers it. Room that the client gives back by itself
/// meanwhile does not: what was ordered may still leave after it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Order {
    /// Bytes that are still to come back.
    pub(crate) bytes: u64,
    /// When it was given, or last followed in part.
    pub(crate) since: Time,
}

/// What an allocation waited for is not asked back before it could be made: else two that grow would take the same
/// room from each other without end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Promise {
    /// What the client will have allocated then, in bytes.
    pub(crate) allocated: u64,
    /// Who has not used it by now does not need it.
    pub(crate) until: Time,
}

/// A client's contexts and modules are taken to need no more than this: what is beyond it is something else that we do
/// not know of, such as memory that another process shares with it.
pub(crate) const MOST_OVERHEAD: u64 = 4 * GIB;
/// Overhead is counted in steps, so that each module that is loaded is no news.
const OVERHEAD_STEP: u64 = 64 * MIB;

/// A client's memory on one GPU, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Account {
    /// As the client last said.
    pub(crate) usage: Usage,
    /// What it may have resident: room given minus room given back.
    pub(crate) budget: u64,
    /// It was told to give room back and has not answered yet.
    pub(crate) order: Option<Order>,
    /// What a waiting allocation needs beyond the budget.
    pub(crate) needs: u64,
    /// Room that a waiting allocation was given and may not have used yet.
    pub(crate) promised: Option<Promise>,
    /// Nothing comes back before this time: the host has no memory for it, or the client does not answer.
    pub(crate) stays_until: Option<Time>,
    /// An administrator has read that its memory stays where it is.
    pub(crate) reported_short: bool,
    /// What was found beside what it says that it has: the last time, and the time before.
    beside: [u64; 2],
}

impl Account {
    pub(crate) fn new(usage: Usage) -> Self {
        let mut account = Self {
            usage,
            budget: 0,
            order: None,
            needs: 0,
            promised: None,
            stays_until: None,
            reported_short: false,
            beside: [0; 2],
        };
        account.told(usage);
        account
    }

    /// What cannot be moved while the client does not run.
    pub(crate) fn pinned(&self, memory: MemoryMode) -> u64 {
        if memory == MemoryMode::Off || self.stays_until.is_some() { self.budget } else { 0 }
    }

    /// The client says what it has.
    pub(crate) fn told(&mut self, usage: Usage) {
        // What clients say is not to be trusted to add up.
        let Usage { allocated, absent, immovable, .. } = usage;
        self.usage = Usage { absent: absent.min(allocated), immovable: immovable.min(allocated), ..usage };
    }

    /// Its process was looked at: what it has on the card but for managed memory.
    pub(crate) fn measure(&mut self, used: u64) {
        let beside = used.saturating_sub(self.usage.immovable);
        self.beside = [beside.min(MOST_OVERHEAD), self.beside[0]];
    }

    /// Its contexts and modules, in bytes. What was seen but once may be an allocation that it has not told of yet.
    pub(crate) fn overhead(&self) -> u64 {
        self.beside[0].min(self.beside[1]).next_multiple_of(OVERHEAD_STEP)
    }

    /// What it has allocated, and is about to.
    pub(crate) fn wanted(&self) -> u64 {
        // What waits for room is an allocation to come, or one that is absent and counted already.
        let needed = if self.needs > 0 { self.budget.saturating_add(self.needs) } else { 0 };
        let promised = self.promised.map_or(0, |promise| promise.allocated);
        self.usage.allocated.max(needed).max(promised)
    }

    /// On the card, as the client last said.
    pub(crate) fn resident(&self) -> u64 {
        self.usage.allocated.saturating_sub(self.usage.absent)
    }
}

/// What the kernel says of a client's process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Identity {
    /// Its number, where it is in our view of processes.
    pub pid: Option<u32>,
    /// What tells it from every other process, in whatever view.
    pub process: Option<u64>,
}

impl Identity {
    /// Whether both are known to be the same process.
    pub(crate) fn is_same_process(self, other: Self) -> bool {
        match (self.process, other.process) {
            (None, None) => self.pid.is_some() && self.pid == other.pid,
            (one, other) => one.is_some() && one == other,
        }
    }
}

/// A registered process.
#[derive(Debug)]
pub(crate) struct Client {
    /// As the kernel says, or as the process itself says where the kernel cannot tell.
    pub(crate) pid: u32,
    /// What the kernel says of its process.
    pub(crate) identity: Identity,
    pub(crate) name: String,
    pub(crate) memory: MemoryMode,
    pub(crate) phase: Phase,
    /// Work waits at its gate.
    pub(crate) wants: bool,
    pub(crate) waiting_since: Time,
    pub(crate) accounts: BTreeMap<GpuUuid, Account>,
    /// See [`super::policy::next`].
    pub(crate) virtual_time: Duration,
    pub(crate) held: Duration,
    pub(crate) waited: Duration,
    pub(crate) told_waiting: bool,
    /// A new turn begins when it runs.
    pub(crate) claims: bool,
    /// When it was last looked at whether it can be next: the GPU on which what others have cannot be moved and leaves
    /// no room for it.
    pub(crate) blocked: Option<GpuUuid>,
    /// Since its grant: no memory had to move for it, and it waited when the lock was freed at this time.
    pub(crate) switch_from: Option<Time>,
    pub(crate) reported_stuck: bool,
    pub(crate) reported_blocked: bool,
    /// It was asked for its counters and has not answered.
    pub(crate) asked_counters: bool,
    pub(crate) counters: Counters,
}

impl Client {
    pub(crate) fn new(identity: Identity, register: Register, now: Time) -> Self {
        Self {
            pid: identity.pid.unwrap_or(register.pid),
            identity,
            name: register.name,
            memory: register.memory,
            phase: Phase::Parked,
            wants: false,
            waiting_since: now,
            accounts: register.usage.into_iter().map(|u| (u.gpu, Account::new(u))).collect(),
            virtual_time: Duration::ZERO,
            held: Duration::ZERO,
            waited: Duration::ZERO,
            told_waiting: false,
            claims: false,
            blocked: None,
            switch_from: None,
            reported_stuck: false,
            reported_blocked: false,
            asked_counters: false,
            counters: Counters::default(),
        }
    }

    /// It waits for the lock and is not next yet.
    pub(crate) fn waits(&self) -> bool {
        self.wants && self.phase == Phase::Parked
    }
}

/// What a client that is gone has left on a GPU, until its process is gone too or comes back.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Departed {
    /// Its process, as the kernel knows it.
    pub(crate) identity: Identity,
    pub(crate) bytes: u64,
}

/// What a GPU's capacity follows from, in bytes: see [`super::policy::capacity::usable`].
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Size {
    pub(crate) available: u64,
    pub(crate) overhead: u64,
    pub(crate) largest: u64,
}

/// One GPU.
#[derive(Debug)]
pub(crate) struct Gpu {
    /// As last measured, or as clients say.
    pub(crate) size: Size,
    /// What clients may fill together, in bytes.
    pub(crate) capacity: u64,
    pub(crate) quantum: Duration,
    /// When the turn's first client ran.
    pub(crate) turn_started: Option<Time>,
    /// A deferred drain may be tried again at this time.
    pub(crate) not_before: Time,
    /// Drains deferred in a row.
    pub(crate) deferrals: u32,
    /// Who gave the lock back in the hand-over under way.
    pub(crate) released: BTreeSet<ClientId>,
    /// When the lock was last given back.
    pub(crate) freed_at: Option<Time>,
    /// Measured rates of moving memory, in bytes per second.
    pub(crate) evict_rate: f64,
    pub(crate) restore_rate: f64,
    pub(crate) turns: u64,
    /// The last hand-overs with nothing to move, from drained to open gate.
    pub(crate) switches: VecDeque<Duration>,
    /// Memory of clients that are gone while their process is not.
    pub(crate) departed: BTreeMap<ClientId, Departed>,
}

/// Until measured: what managed memory does over PCIe 3 (evict, restore), in bytes per second.
const ASSUMED_RATES: (f64, f64) = (4e9, 8e9);
/// Hand-overs whose duration is kept.
const SWITCHES_KEPT: usize = 4096;

impl Gpu {
    pub(crate) fn new(capacity: u64, quantum: Duration) -> Self {
        Self {
            size: Size::default(),
            capacity,
            quantum,
            turn_started: None,
            not_before: Time::ZERO,
            deferrals: 0,
            released: BTreeSet::new(),
            freed_at: None,
            evict_rate: ASSUMED_RATES.0,
            restore_rate: ASSUMED_RATES.1,
            turns: 0,
            switches: VecDeque::new(),
            departed: BTreeMap::new(),
        }
    }

    /// What it costs to move this much out and as much in.
    pub(crate) fn move_cost(&self, bytes: u64) -> Duration {
        let bytes = bytes as f64;
        Duration::try_from_secs_f64(bytes / self.evict_rate + bytes / self.restore_rate)
            .unwrap_or(Duration::MAX)
    }

    /// Bytes that clients have left that are gone while their process is not.
    pub(crate) fn departed(&self) -> u64 {
        self.departed.values().fold(0, |sum, departed| sum.saturating_add(departed.bytes))
    }

    pub(crate) fn record_switch(&mut self, took: Duration) {
        if self.switches.len() == SWITCHES_KEPT {
            self.switches.pop_front();
        }
        self.switches.push_back(took);
    }

    /// Count, median, 99th percentile and longest of the hand-overs kept, in microseconds.
    pub(crate) fn switch_summary(&self) -> [u64; 4] {
        let mut sorted: Vec<Duration> = self.switches.iter().copied().collect();
        sorted.sort_unstable();
        let micros = |d: Option<&Duration>| d.map_or(0, |d| d.as_micros() as u64);
        [
            sorted.len() as u64,
            micros(sorted.get(sorted.len() / 2)),
            micros(sorted.get(sorted.len() * 99 / 100)),
            micros(sorted.last()),
        ]
    }
}
