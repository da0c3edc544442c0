//! The ways to get memory for an allocation before it is refused.

use std::time::{Duration, Instant};

use nvshare_client::Wait;

use crate::driver::types::CUresult;
use crate::memory::allocations::Kind;
use crate::memory::deferred_free::{self, LateFrees};
use crate::memory::devices::{Awaited, Device};
use crate::memory::mapping::DRIVER_IS_LATE;
use crate::memory::{driver_reserve, free, pools};
use crate::process::{bell, threads};

/// How often one allocation finds that the driver has less than the account says, before it fails.
const MAX_LOSSES: u32 = 16;
/// Pause between two tries of an allocation for which the driver has no memory yet.
const BETWEEN_TRIES: Duration = Duration::from_millis(1);
/// How long one allocation that exceeds a limit is tried again.
const MAX_CLIMB: Duration = Duration::from_secs(10);

/// Why an allocation cannot be made now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shortage {
    /// It would exceed a limit, or the card of a process without a scheduler.
    Limit,
    /// There is no room for this many bytes.
    Room(u64),
    /// The driver has no memory for it, though this many bytes were charged. The program has freed more than the driver has
    /// back, or others have what the scheduler has given.
    Driver(u64),
}

/// The ladder that an allocation climbs before it is refused.
///
/// Each rung is a way to get memory, from the cheapest to the one that takes longest. The allocation is tried again after the first
/// rung that has helped, and starts from the lowest rung if it fails again.
///
/// | rung | limit | room | driver |
/// |---|---|---|---|
/// | end spare slabs | x | x | x |
/// | wait for room | | x | |
/// | have the driver release its reserve | x | x | |
/// | wait for memory that ends later than it was freed | x | x | |
/// | try again for a moment | | | x |
/// | ask for other room | | | x |
/// | wait for a scheduler that may come back | | | x |
#[derive(Debug)]
pub(super) struct Ladder {
    device: &'static Device,
    bytes: u64,
    kind: Kind,
    late_frees: LateFrees,
    /// Room that came for the allocation, until the next try has taken it.
    awaited: Option<Awaited<'static>>,
    /// How often the driver had less than the account said.
    losses: u32,
    /// When the driver first had less.
    lost_since: Option<Instant>,
    /// When it first would have exceeded a limit.
    limited_since: Option<Instant>,
}

impl Ladder {
    /// An allocation of `bytes` bytes is about to be tried for the first time.
    pub(super) fn new(device: &'static Device, bytes: u64, kind: Kind) -> Self {
        deferred_free::free_without_waiting();
        Self {
            device,
            bytes,
            kind,
            late_frees: LateFrees::begin(),
            awaited: None,
            losses: 0,
            lost_since: None,
            limited_since: None,
        }
    }

    /// Climbs to the first rung that helps.
    ///
    /// # Errors
    /// Out of memory: none helps, so the allocation is refused.
    pub(super) fn climb(&mut self, shortage: Shortage) -> Result<(), CUresult> {
        // Other threads may free small memory over and over, and none of it may ever be enough.
        if shortage == Shortage::Limit
            && self.limited_since.get_or_insert_with(Instant::now).elapsed() > MAX_CLIMB
        {
            return Err(CUresult::OUT_OF_MEMORY);
        }
        let has_helped = self.end_spare_slabs()
            || match shortage {
                Shortage::Limit => self.release_reserve() || self.wait_for_late_frees(),
                Shortage::Room(bytes) => {
                    self.wait_for_room(bytes) || self.release_reserve() || self.wait_for_late_frees()
                }
                Shortage::Driver(charged) => {
                    self.wait_for_driver(charged)
                        || self.ask_for_other_room(charged)
                        || self.wait_for_scheduler()
                }
            };
        if has_helped { Ok(()) } else { Err(CUresult::OUT_OF_MEMORY) }
    }

    /// The allocation has been tried, and has taken the room that came for it.
    pub(super) fn end_waiting(&mut self) {
        self.awaited = None;
    }

    fn end_spare_slabs(&self) -> bool {
        free::end_spare_slabs(self.device)
    }

    fn wait_for_room(&mut self, bytes: u64) -> bool {
        self.awaited.iter_mut().for_each(Awaited::keep_need);
        self.awaited = self.device.wait_for_room(bytes, Wait::of(self.kind), bell::ring);
        self.awaited.is_some()
    }

    fn release_reserve(&self) -> bool {
        driver_reserve::release_unused(self.device)
    }

    fn wait_for_late_frees(&mut self) -> bool {
        let (device, bytes) = (self.device, self.bytes);
        let is_enough = |back: u64| device.account().has_left(bytes.saturating_sub(back));
        self.late_frees.wait(device.ordinal, is_enough)
    }

    /// Whether the driver has less plain memory than the scheduler has given. A pool may refuse because it has a largest size.
    fn is_plain_lacking(&self, charged: u64) -> bool {
        let may_be_bounded = self.kind.is_pools() && pools::are_any_bounded();
        charged > 0 && !self.kind.is_movable() && !may_be_bounded && self.device.is_room_given()
    }

    /// Memory that others gave back reaches the driver a moment later. The making of mapped memory has waited for that.
    fn wait_for_driver(&mut self, charged: u64) -> bool {
        let is_worth_it = self.is_plain_lacking(charged)
            && self.lost_since.get_or_insert_with(Instant::now).elapsed() < DRIVER_IS_LATE;
        if is_worth_it {
            threads::sleep(BETWEEN_TRIES);
        }
        is_worth_it
    }

    /// Not for memory that comes by page faults.
    fn ask_for_other_room(&mut self, charged: u64) -> bool {
        let is_asked = (self.kind == Kind::Mapped || self.is_plain_lacking(charged))
            && self.losses < MAX_LOSSES
            && self.device.lose_room(charged, bell::ring);
        self.losses += u32::from(is_asked);
        is_asked
    }

    fn wait_for_scheduler(&self) -> bool {
        self.device.wait_for_scheduler(self.bytes)
    }
}
