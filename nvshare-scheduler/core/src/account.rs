//! A client's memory on one GPU.

use std::time::Duration;

use nvshare_proto::units::{GIB, MIB};
use nvshare_proto::{MemoryMode, Usage};

use crate::Time;
use crate::cost::SwitchCost;

/// An EVICT on its way or being followed, until EVICTED answers it. Room that the client gives back by itself
/// meanwhile does not: what was ordered may still leave after it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Order {
    /// Bytes that are still to come back.
    pub(crate) bytes: u64,
    /// Bytes that came back since it was given.
    pub(crate) came: u64,
    /// When it was given.
    pub(crate) given: Time,
    /// When it was given, or last followed in part.
    pub(crate) since: Time,
}

/// What an allocation waited for is not asked back before it could be made: else two that grow would take the same
/// room from each other without end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Promise {
    /// What the client will have allocated then, in bytes.
    pub(crate) allocated: u64,
    /// Who has not used it by now does not need it.
    pub(crate) until: Time,
}

/// Memory that was asked for and stayed: the host has none to take it, it cannot be moved, or the client does not answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Stays {
    /// All that the client had left then, in bytes. What it brings back to the card later can leave again.
    pub(crate) bytes: u64,
    /// It is not asked for before this time.
    pub(crate) until: Time,
}

/// A client's contexts and modules are taken to need no more than this: what is beyond it is something else that we do
/// not know of, such as memory that another process shares with it.
pub(crate) const MOST_OVERHEAD: u64 = 4 * GIB;
/// Overhead is counted in steps, so that each module that is loaded is no news.
const OVERHEAD_STEP: u64 = 64 * MIB;
/// No GPU and no host has this much memory: whatever a client says, sums of it stay numbers.
pub(crate) const MOST_BYTES: u64 = 1 << 50;

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
    /// What it brings back under its grant: what it had said by then that was absent.
    pub(crate) restores: u64,
    /// What was asked for and did not come back.
    pub(crate) stays: Option<Stays>,
    /// An administrator has read that its memory stays where it is.
    pub(crate) reported_short: bool,
    /// How fast its memory moves, as the scheduler timed it; in bytes per second.
    pub(crate) rates: Rates,
    /// What its hand-overs cost on this GPU.
    pub(crate) cost: SwitchCost,
    /// What was found beside what it says that it has: the last time, and the time before.
    beside: [u64; 2],
    /// What it said that it has and was not found, at the same times.
    unseen: [u64; 2],
}

/// How fast memory is moved, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rates {
    pub(crate) evict: f64,
    pub(crate) restore: f64,
}

impl Default for Rates {
    /// Until measured: what managed memory does over PCIe 3.
    fn default() -> Self {
        Self { evict: 4e9, restore: 8e9 }
    }
}

/// The slowest and the fastest that memory is moved, in bytes per second: a disk that swaps, and more than any link.
const POSSIBLE: (f64, f64) = (1e8, 1e13);

impl Rates {
    /// What it costs to move this much out and as much in.
    pub(crate) fn there_and_back(self, bytes: u64) -> Duration {
        let bytes = bytes as f64;
        Duration::try_from_secs_f64(bytes / self.evict + bytes / self.restore).unwrap_or(Duration::MAX)
    }

    /// A measured rate moves the known one half of the way.
    pub(crate) fn blend(rate: &mut f64, bytes: u64, took: Duration) {
        if bytes >= 64 * MIB && !took.is_zero() {
            let measured = (bytes as f64 / took.as_secs_f64()).clamp(POSSIBLE.0, POSSIBLE.1);
            *rate = (*rate + measured) / 2.0;
        }
    }
}

impl Account {
    pub(crate) fn new(usage: Usage, rates: Rates) -> Self {
        let mut account = Self {
            usage,
            budget: 0,
            order: None,
            needs: 0,
            promised: None,
            restores: 0,
            stays: None,
            reported_short: false,
            rates,
            cost: SwitchCost::default(),
            beside: [0; 2],
            unseen: [0; 2],
        };
        account.told(usage);
        account
    }

    /// What cannot be moved while the client does not run.
    pub(crate) fn pinned(&self, memory: MemoryMode) -> u64 {
        if memory == MemoryMode::Off { self.budget } else { self.staying() }
    }

    /// What of the budget is not worth asking for at present.
    pub(crate) fn staying(&self) -> u64 {
        self.stays.map_or(0, |stays| stays.bytes.min(self.budget))
    }

    /// The client says what it has. What clients say is not to be trusted to add up.
    pub(crate) fn told(&mut self, usage: Usage) {
        let allocated = usage.allocated.min(MOST_BYTES);
        self.usage = Usage {
            total: usage.total.min(MOST_BYTES),
            limit: usage.limit.min(MOST_BYTES),
            allocated,
            absent: usage.absent.min(allocated),
            immovable: usage.immovable.min(allocated),
            ..usage
        };
    }

    /// Its process was looked at: what it has on the card but for managed memory.
    pub(crate) fn measure(&mut self, used: u64) {
        let beside = used.saturating_sub(self.usage.immovable);
        self.beside = [beside.min(MOST_OVERHEAD), self.beside[0]];
    }

    /// NVML sees all that a process has which is the driver's own: what of it is only said is charged no more. It may
    /// have been allocated, or freed, around the look: it takes two in a row. Returns how much that was.
    pub(crate) fn disbelieve(&mut self, seen: u64, memory: MemoryMode) -> u64 {
        if memory != MemoryMode::Off {
            return 0;
        }
        self.unseen = [self.resident().saturating_sub(seen), self.unseen[0]];
        let unseen = self.unseen[0].min(self.unseen[1]);
        if unseen < OVERHEAD_STEP {
            return 0;
        }
        self.unseen = [0; 2];
        self.usage.allocated = self.usage.allocated.saturating_sub(unseen);
        self.budget = self.budget.saturating_sub(unseen);
        unseen
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

    /// What a client wants resident when it runs: all that it has allocated, or what one client may have.
    pub(crate) fn demand(&self, capacity: u64) -> u64 {
        // Room that does not come back is as good as used.
        self.wanted().max(self.staying()).min(capacity)
    }

    /// On the card, as the client last said.
    pub(crate) fn resident(&self) -> u64 {
        self.usage.allocated.saturating_sub(self.usage.absent)
    }
}
