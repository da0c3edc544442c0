//! A client's memory on one GPU.

use std::time::Duration;

use nvshare_proto::units::{GIB, MIB, saturate};
use nvshare_proto::{Epoch, MemoryMode, Usage};

use crate::Time;
use crate::state::cost::{HandOverCosts, MoveCost};

/// An EVICT on its way or being followed, until EVICTED answers it. Room that the client returns voluntarily
/// meanwhile does not complete it: the ordered memory may still leave after that.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct EvictOrder {
    /// Bytes that are still to come back.
    pub(crate) bytes: u64,
    /// Bytes that came back since the order was given.
    pub(crate) came: u64,
    /// When the order was given.
    pub(crate) given: Time,
    /// When the order was given, or last followed in part.
    pub(crate) since: Time,
}

/// Room that an allocation waited for is not asked back before the allocation could use it. Two clients that
/// grow would otherwise take the same room from each other without end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Promise {
    /// Bytes that the client will have allocated then.
    pub(crate) allocated: u64,
    /// A client that has not used the room by this time does not need it.
    pub(crate) until: Time,
}

/// A client that ran without being counted goes on under a grant. Its messages of the time before may still be on their way: until it
/// has read of the grant, the room that it has is known only from them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Adoption {
    /// The grant.
    pub(crate) epoch: Epoch,
    /// Bytes that were counted as its room then, less those that it has given back since. It may give back more than was counted.
    pub(crate) had: i128,
}

/// Room that a client got while it was next and others still left: see
/// [`policy::exchange`](crate::policy::exchange).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct EarlyRestore {
    /// When the client got the first of it.
    pub(crate) since: Time,
    /// Bytes that were absent then.
    pub(crate) absent: u64,
}

/// Memory that was asked for and stayed: the host has no memory to take it, it cannot be moved, or the client
/// does not answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Unevictable {
    /// All bytes that the client had left then. Memory that it restores later can leave again.
    pub(crate) bytes: u64,
    /// The memory is not asked for before this time.
    pub(crate) until: Time,
}

/// The most that a client's contexts and modules are assumed to need. Any more is something unknown, such as
/// memory that another process shares with the client.
pub(crate) const MAX_OVERHEAD: u64 = 4 * GIB;
/// Overhead is counted in steps, so that a single loaded module changes nothing.
const OVERHEAD_STEP: u64 = 64 * MIB;
/// Two looks at memory that NVML does not see are this far apart at least.
const BETWEEN_LOOKS: Duration = Duration::from_millis(500);
/// More memory than any GPU or host has: values that clients report are cut to it, so that sums do not
/// overflow.
pub(crate) const MAX_BYTES: u64 = 1 << 50;

/// A client's memory on one GPU, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Account {
    /// The usage that the client last reported.
    pub(crate) usage: Usage,
    /// Bytes that the client may have resident: room given minus room given back.
    pub(crate) room: u64,
    /// The client has not said yet that it goes on under a grant.
    pub(crate) adoption: Option<Adoption>,
    /// The client was told to give room back and has not answered yet.
    pub(crate) evict_order: Option<EvictOrder>,
    /// Bytes that a waiting allocation needs beyond the room.
    pub(crate) needs: u64,
    /// Room that was given for a waiting allocation, which may not have used it yet.
    pub(crate) promised: Option<Promise>,
    /// Bytes that the client restores for its turn: what it had reported as absent when its restore began.
    pub(crate) restores: u64,
    /// The restore began before the grant.
    pub(crate) early: Option<EarlyRestore>,
    /// Memory that was asked for and did not come back.
    pub(crate) unevictable: Option<Unevictable>,
    /// Evictions in a row that left memory where it was.
    pub(crate) failed_evictions: u32,
    /// The log says that the client's memory stays where it is.
    pub(crate) reported_unevictable: bool,
    /// The client gave a grant back, since it runs with all of its memory resident or not at all.
    pub(crate) comes_whole: bool,
    /// How fast the client's memory moves, as the scheduler timed it; in bytes per second.
    pub(crate) rates: Rates,
    /// The cost of the client's hand-overs on this GPU.
    pub(crate) cost: HandOverCosts,
    /// The same of those that move memory, by what they move.
    pub(crate) move_cost: MoveCost,
    /// Bytes that had to leave for the client when it was last made next in its turn.
    pub(crate) moved_for_turn: u64,
    /// Bytes measured on the GPU beyond what the client reports: at the last look, and at the one before.
    beside: [u64; 2],
    /// How often the client's process was measured; no more than twice counts.
    looks: u8,
    /// When the look was asked for that measured it last.
    measured_at: Time,
    /// NVML showed the process at the last look.
    is_listed: bool,
    /// At the last look it had more than is counted.
    is_more: bool,
    /// Bytes that the client reported and that were not measured, at the same looks.
    unseen: [u64; 2],
    /// When the last of these looks was.
    unseen_at: Option<Time>,
}

/// How fast memory is moved, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rates {
    pub(crate) evict: f64,
    pub(crate) restore: f64,
}

impl Default for Rates {
    /// Returns the rates until they are measured: those of managed memory over PCIe 3.
    fn default() -> Self {
        Self { evict: 4e9, restore: 8e9 }
    }
}

/// The slowest and the fastest that memory can move, in bytes per second: a disk that swaps, and more than
/// any link.
const POSSIBLE: (f64, f64) = (1e8, 1e13);

impl Rates {
    /// Returns how long it takes to move this many bytes out and as many in.
    pub(crate) fn there_and_back(self, bytes: u64) -> Duration {
        let bytes = bytes as f64;
        Duration::try_from_secs_f64(bytes / self.evict + bytes / self.restore).unwrap_or(Duration::MAX)
    }

    /// Moves the known rate one half of the way to the measured one.
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
            room: 0,
            adoption: None,
            evict_order: None,
            needs: 0,
            promised: None,
            restores: 0,
            early: None,
            unevictable: None,
            failed_evictions: 0,
            reported_unevictable: false,
            comes_whole: false,
            rates,
            cost: HandOverCosts::default(),
            move_cost: MoveCost::default(),
            moved_for_turn: 0,
            beside: [0; 2],
            looks: 0,
            measured_at: Time::ZERO,
            is_listed: false,
            is_more: false,
            unseen: [0; 2],
            unseen_at: None,
        };
        account.set_usage(usage);
        account
    }

    /// Returns the time of a hand-over for which `to_move` bytes have to leave, or `None` if there was none
    /// yet. `apart`: how long these bytes take out, and then as many in. A small hand-over may have taken
    /// long for another reason.
    pub(crate) fn cost_of_moving(&self, to_move: u64, apart: Duration) -> Option<Duration> {
        let mean = self.cost.gap.mean()?;
        let by_bytes = self.move_cost.estimate(to_move).filter(|_| to_move > 0);
        Some(by_bytes.map_or(mean, |cost| cost.min(mean.max(apart))))
    }

    /// Returns the bytes that cannot be moved while the client does not run.
    pub(crate) fn pinned(&self, memory: MemoryMode) -> u64 {
        if memory == MemoryMode::Off { self.room } else { self.unevictable_bytes() }
    }

    /// Returns the bytes of the room that it is useless to ask for at present.
    pub(crate) fn unevictable_bytes(&self) -> u64 {
        self.unevictable.map_or(0, |stays| stays.bytes.min(self.room))
    }

    /// Sets the usage that the client reports. The numbers of a client need not add up, so they are cut to
    /// what is possible.
    pub(crate) fn set_usage(&mut self, usage: Usage) {
        let allocated = usage.allocated.min(MAX_BYTES);
        self.usage = Usage {
            total: usage.total.min(MAX_BYTES),
            limit: usage.limit.min(MAX_BYTES),
            allocated,
            absent: usage.absent.min(allocated),
            immovable: usage.immovable.min(allocated),
            ..usage
        };
    }

    /// Records that the client's process has `used` bytes on the GPU, without managed memory. `holds_still`:
    /// its memory is not being moved, and has not been since the look was asked for: `asked_at`.
    ///
    /// These bytes include memory that the library maps itself, wherever it is on the GPU. The overhead
    /// beside it is not known while it moves. Managed memory of a program with such memory is taken for a
    /// part of it, so its contexts may count for less than they take. So may those of a client that has lost
    /// room, until that room is tried again.
    pub(crate) fn record_measurement(
        &mut self,
        listed: Option<u64>,
        memory: MemoryMode,
        holds_still: bool,
        asked_at: Time,
    ) {
        let used = listed.unwrap_or(0);
        let reported = match memory {
            MemoryMode::Swap if !holds_still => return,
            MemoryMode::Swap => self.room.max(self.usage.immovable),
            MemoryMode::Managed | MemoryMode::Off => self.usage.immovable,
        };
        let beside = used.saturating_sub(reported);
        self.beside = [beside.min(MAX_OVERHEAD), self.beside[0]];
        self.is_more = beside > MAX_OVERHEAD;
        self.looks = (self.looks + 1).min(2);
        self.measured_at = asked_at;
        self.is_listed = used > 0;
    }

    /// Whether the client's process was seen on the GPU since then, and what it has there is all counted.
    pub(crate) fn is_seen_since(&self, time: Time) -> bool {
        self.is_measured() && self.is_listed && !self.is_more && self.measured_at > time
    }

    /// Whether the GPU was looked at since then, and the process has nothing there: its context there has ended.
    pub(crate) fn is_absent_since(&self, time: Time) -> bool {
        self.is_measured() && self.measured_at > time && self.room == 0 && self.usage.allocated == 0
    }

    /// Takes the most that the last looks have shown for what the process needs to come back, and has then. `is_elsewhere`: the process
    /// was seen on another GPU.
    pub(crate) fn keep_most_seen(&mut self, is_elsewhere: bool) {
        self.beside = [self.beside[0].max(self.beside[1]); 2];
        if is_elsewhere && !self.is_listed && self.is_absent_since(Time::ZERO) {
            (self.is_listed, self.beside) = (true, [0; 2]);
        }
    }

    /// Whether NVML showed the process at the last look.
    pub(crate) fn is_listed(&self) -> bool {
        self.is_listed
    }

    /// Whether what the client has beside its memory is known: see [`Self::overhead`].
    pub(crate) fn is_measured(&self) -> bool {
        self.looks >= 2
    }

    /// Charges no more for memory that the client reports and NVML does not see: NVML sees all plain memory
    /// of a process. An allocation may have been made or freed around the look, so two looks in a row are
    /// needed, some time apart. Returns the bytes that are charged no more.
    pub(crate) fn uncharge_unseen(&mut self, seen: u64, memory: MemoryMode, asked_at: Time) -> u64 {
        if memory != MemoryMode::Off {
            return 0;
        }
        let now = self.resident().saturating_sub(seen);
        // Two looks within one allocation count as one.
        if self.unseen_at.is_some_and(|last| asked_at < last + BETWEEN_LOOKS) {
            self.unseen[0] = self.unseen[0].min(now);
            return 0;
        }
        self.unseen_at = Some(asked_at);
        self.unseen = [now, self.unseen[0]];
        let unseen = self.unseen[0].min(self.unseen[1]);
        if unseen < OVERHEAD_STEP {
            return 0;
        }
        self.unseen = [0; 2];
        self.usage.allocated = self.usage.allocated.saturating_sub(unseen);
        self.room = self.room.saturating_sub(unseen);
        unseen
    }

    /// Returns the bytes of the client's contexts and modules. Bytes seen only once may be an allocation that
    /// the client has not reported yet.
    pub(crate) fn overhead(&self) -> u64 {
        self.beside[0].min(self.beside[1]).next_multiple_of(OVERHEAD_STEP)
    }

    /// Returns the bytes that the client's contexts and modules need to come back: as much as was measured at one of the last looks. A
    /// process that nobody has seen on the card is assumed to need an eighth of the GPU: at least a GiB, which PyTorch takes, and at
    /// most [`MAX_OVERHEAD`] or half of the GPU.
    pub(crate) fn needs_to_return(&self) -> u64 {
        let most = if self.is_measured() && self.is_listed {
            self.beside[0].max(self.beside[1])
        } else {
            (self.usage.total / 8).clamp(GIB, MAX_OVERHEAD).min(self.usage.total / 2)
        };
        most.next_multiple_of(OVERHEAD_STEP)
    }

    /// Counts what the client has on the GPU, as far as that is known, as its room: it goes on under this grant.
    pub(crate) fn adopt(&mut self, epoch: Epoch) {
        self.room = self.resident();
        self.adoption = Some(Adoption { epoch, had: self.room.into() });
        self.evict_order = None;
        self.promised = None;
    }

    /// Counts what the client had when it read of this grant, as it has said by now, in place of what was known before.
    pub(crate) fn settle_adoption(&mut self, epoch: Epoch) {
        if let Some(Adoption { had, .. }) = self.adoption.take_if(|adoption| adoption.epoch == epoch) {
            let room = i128::from(self.room) - had + i128::from(self.resident());
            self.room = saturate(room.max(0).cast_unsigned());
        }
    }

    /// Takes back up to this much room; returns how much.
    pub(crate) fn return_room(&mut self, bytes: u64) -> u64 {
        let came = bytes.min(self.room);
        self.room -= came;
        if let Some(adoption) = &mut self.adoption {
            adoption.had -= i128::from(came);
        }
        came
    }

    /// Returns the bytes of the room that can be moved.
    pub(crate) fn movable(&self) -> u64 {
        self.room.saturating_sub(self.usage.immovable)
    }

    /// Returns the bytes that the client has allocated, or is about to allocate.
    pub(crate) fn wanted(&self) -> u64 {
        // An allocation that waits for room is a new one, or one that is absent and counted already.
        let needed = if self.needs > 0 { self.room.saturating_add(self.needs) } else { 0 };
        let promised = self.promised.map_or(0, |promise| promise.allocated);
        self.usage.allocated.max(needed).max(promised)
    }

    /// Returns the bytes that a client wants resident when it runs: all that it has allocated, at most what
    /// one client may have. One that [comes whole](Self::comes_whole) may want more. `kept`: the room that does not come back.
    pub(crate) fn demand(&self, capacity: u64, kept: u64) -> u64 {
        let most = if self.comes_whole { u64::MAX } else { capacity };
        // Room that does not come back is as good as used.
        self.wanted().max(kept).min(most)
    }

    /// Returns the bytes on the GPU, as the client last reported.
    pub(crate) fn resident(&self) -> u64 {
        self.usage.allocated.saturating_sub(self.usage.absent)
    }
}
