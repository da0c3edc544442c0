//! The sums of a process's memory on one device, and the decisions that follow from them.
//!
//! Invariants, each after every call:
//!
//! 1. `charged <= allocated`: bytes on the card are allocated. The others are *absent*: evicted, or not brought there yet.
//! 2. `allocated` is the sum of the allocations, of the driver's reserve and of memory set aside. `charged` is the sum of their
//!    charged bytes and of the reserve, which is always on the card.
//! 3. While room is counted, `charged + room + made + lost` is the room that the scheduler gave this process and has not got
//!    back. Taking room charges as much. Memory that leaves the card becomes room again, or `made` until the scheduler is told.
//!    `lost` is room that the card does not have. `room` is below zero while more is charged than was given, or while room is
//!    lost; then room is lacking. The driver's reserve, or a process that ran alone before, may charge more.
//! 4. No allocation passes the limit of the process or, together with other processes, that of the tenant. Memory that
//!    has to have its room at once has it when it is admitted.
//! 5. `unmapped` is the part of [mapped memory](Kind::Mapped) that is not on the card: while there is any, the lock is not held.
//! 6. No allocation waits for room (`awaited` is zero) once room came, was refused, or is not counted, or if none waits.
//!
//! The account does not know which bytes of an allocation are absent: each allocation's [`Residency`](crate::Residency), or
//! another backing's record, does. The account counts bytes alone: [`Account::charge`] before they come, and
//! [`Account::discharge`] when they have left.

mod admission;
mod told;
mod waiting;

use nvshare_proto::{GpuUuid, Usage};

use crate::kind::Kind;
pub use admission::{Admission, Caller, Refusal};
pub use waiting::{Patience, Wait};

/// The limit that a tenant's processes share on a device, and the bytes that they have together.
pub trait TenantQuota: Copy {
    /// Bytes that the tenant's processes have together.
    fn used(&self) -> u64;

    /// Adds to the bytes of this process, unless the tenant's processes would then have more than `limit`.
    ///
    /// # Errors
    /// Bytes of the tenant's processes, if they would; nothing is changed.
    fn charge(&self, bytes: u64, limit: u64) -> Result<(), u64>;

    /// Takes from the bytes of this process.
    fn discharge(&self, bytes: u64);
}

/// Facts about a device that hold as long as the process lives, or until it [moves](Account::set_gpu).
#[derive(Debug, Clone, Copy)]
pub struct DeviceFacts {
    /// The GPU's name.
    pub gpu: GpuUuid,
    /// Bytes that the GPU has, as the driver says.
    pub total: u64,
    /// The process's, or its tenant's, limit in bytes.
    pub limit: Option<u64>,
    /// The limit is a seat's: its processes have it together, and none has any of it before the scheduler has answered.
    pub is_of_seat: bool,
    /// One program may have more than fits: the part beyond comes and goes by page faults.
    pub oversubscribe: bool,
}

/// The process's part in its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LimitUse {
    /// No scheduler has answered: it is not known which processes share the limit.
    Unknown,
    /// The scheduler has registered the process. It says next which do, and what the capacity is.
    Coming,
    /// The scheduler has said which do, or there is no scheduler.
    Known,
    /// Other processes may have the whole limit: nothing is admitted.
    ShutOut,
}

/// The driver's reserve on a device, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DriverReserve {
    /// Freed by the program, and kept by pools of plain memory.
    pub plain_pools: u64,
    /// Freed by the program, and kept by managed pools.
    pub managed_pools: u64,
    /// Memory of graphs.
    pub graphs: u64,
}

impl DriverReserve {
    /// The reserve of pools of this kind of memory.
    pub fn of(&mut self, kind: Kind) -> Option<&mut u64> {
        match kind {
            Kind::PlainPool => Some(&mut self.plain_pools),
            Kind::ManagedPool => Some(&mut self.managed_pools),
            Kind::DeviceAsManaged | Kind::Mapped | Kind::ProgramsManaged | Kind::Plain | Kind::SmallPlain => {
                None
            }
        }
    }

    /// The sum of all parts.
    #[must_use]
    pub fn sum(self) -> u64 {
        self.plain_pools + self.managed_pools + self.graphs
    }
}

/// After this many turns, lost room is tried again: the process that had it may be gone.
pub const TURNS_WITHOUT: u32 = 16;

/// How absent memory that would fit comes back, when the process gets the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absent {
    /// It is restored before the process holds the lock.
    ComesFirst,
    /// Page faults bring it when it is touched.
    ComesByFaults,
}

/// Sums that the scheduler was told, in bytes. Lost room is in both.
#[derive(Debug, Clone, Copy, Default)]
struct Reported {
    allocated: u64,
    charged: u64,
}

/// See the [module's documentation](self). All sizes are bytes.
#[derive(Debug, Clone, Copy)]
pub struct Account<T> {
    facts: DeviceFacts,
    /// Allocated bytes, wherever they are; with the driver's reserve.
    allocated: u64,
    /// The part of `allocated` that can be moved; without the driver's reserve.
    movable: u64,
    /// The part of `allocated` that the program asked for as managed memory: the driver lets it exceed the card.
    managed: u64,
    /// The part of `allocated` that is the driver's reserve.
    reserve: DriverReserve,
    /// The part of `allocated` that no allocation has: it is [kept](Self::set_aside), and is in no limit.
    aside: u64,
    /// The part of `allocated` that is on the card: room was taken for it.
    charged: u64,
    /// The part of mapped memory without memory on the card behind its addresses: nothing may touch it.
    unmapped: u64,
    /// Bytes that may be charged in addition.
    room: i64,
    /// Bytes that the GPU's clients may fill together, as the scheduler says.
    capacity: Option<u64>,
    /// The process holds the lock: new memory becomes resident at once.
    holding: bool,
    /// There is no scheduler, or it does not schedule: room is not counted.
    unmetered: bool,
    /// The scheduler was lost a short time ago and may come back.
    expected: bool,
    /// Bytes that the largest allocation that waits has to have room for.
    awaited: u64,
    /// Allocations that wait.
    waiting: u32,
    /// Room that the scheduler was asked for, and does not have. 0: all that was asked for came.
    refused: u64,
    /// Room that an eviction has made and the scheduler has not been told of. A registration names the charged bytes
    /// of its moment, and so includes this room.
    made: u64,
    /// Room that the scheduler gave and the driver has no memory for. Contexts that are not measured yet have it, or a process
    /// without the library.
    lost: u64,
    /// Turns that have ended since room was lost.
    turns_without: u32,
    /// The sums that the scheduler was last told.
    reported: Reported,
    /// The limit is shared with the tenant's other processes.
    tenant: Option<T>,
    limit_use: LimitUse,
}

impl<T: TenantQuota> Account<T> {
    /// The account of a device that the process has not used yet.
    #[must_use]
    pub fn new(facts: DeviceFacts) -> Self {
        Self {
            facts,
            allocated: 0,
            movable: 0,
            managed: 0,
            reserve: DriverReserve::default(),
            aside: 0,
            charged: 0,
            unmapped: 0,
            room: 0,
            capacity: None,
            holding: false,
            unmetered: false,
            expected: false,
            awaited: 0,
            waiting: 0,
            refused: 0,
            made: 0,
            lost: 0,
            turns_without: 0,
            reported: Reported::default(),
            tenant: None,
            limit_use: LimitUse::Unknown,
        }
    }

    /// Bytes that are allocated, wherever they are; with the driver's reserve.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        self.allocated
    }

    /// The part of [`Self::allocated`] that the program has freed, and that is kept for its next allocation.
    #[must_use]
    pub fn aside(&self) -> u64 {
        self.aside
    }

    /// Bytes that are allocated and on the card, as far as they are counted.
    #[must_use]
    pub fn charged(&self) -> u64 {
        self.charged
    }

    /// Bytes that are allocated and not charged: evicted, or not yet brought to the card.
    #[must_use]
    pub fn absent(&self) -> u64 {
        self.allocated.saturating_sub(self.charged)
    }

    /// Bytes that could leave the card, and are there.
    #[must_use]
    pub fn movable_on_card(&self) -> u64 {
        self.charged.saturating_sub(self.allocated.saturating_sub(self.movable))
    }

    /// The driver's reserve.
    #[must_use]
    pub fn reserve(&self) -> DriverReserve {
        self.reserve
    }

    /// Bytes that the GPU's clients may fill together, if a scheduler has said so.
    #[must_use]
    pub fn capacity(&self) -> Option<u64> {
        self.capacity
    }

    /// Whether the process holds the lock: new memory becomes resident at once.
    #[must_use]
    pub fn is_holding(&self) -> bool {
        self.holding
    }

    /// The process's place among its tenant's, where the limit is shared.
    #[must_use]
    pub fn tenant(&self) -> Option<T> {
        self.tenant
    }

    /// Bytes that count towards the limit: those of all processes of the tenant, where they share it.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.tenant.map_or(self.allocated - self.aside, |tenant| tenant.used())
    }

    /// Bytes that one process may have on the card at most.
    fn most_on_card(&self) -> u64 {
        self.capacity.unwrap_or(self.facts.total)
    }

    /// Bytes that are allocated beyond what the card can hold.
    #[must_use]
    pub fn never_fits(&self) -> u64 {
        self.allocated.saturating_sub(self.most_on_card())
    }

    /// Bytes that have to be on the card at once: what is there, and mapped memory that is not.
    #[must_use]
    pub fn needed_at_once(&self) -> u64 {
        self.charged.saturating_add(self.unmapped)
    }

    /// Whether the card has become too small for mapped memory that is to come back.
    #[must_use]
    pub fn has_outgrown_card(&self) -> bool {
        !self.unmetered && self.unmapped > 0 && self.needed_at_once() > self.most_on_card()
    }

    /// Whether the process may have more than the card holds: memory that the program asked for as managed takes no place.
    #[must_use]
    pub fn may_exceed_card(&self) -> bool {
        self.managed > 0
    }

    /// NEED_ROOM after a restore found no room for `bytes`, and for `unmapped` bytes of mapped memory: see
    /// [`Self::to_ask_for`]. Nobody waits for memory that can never be on the card at the same time. Unmapped memory all
    /// counts, since page faults do not bring it.
    #[must_use]
    pub fn to_ask_for_after_restore(&self, bytes: u64, unmapped: u64) -> u64 {
        match bytes.saturating_sub(self.never_fits()) + unmapped {
            0 => 0,
            absent => self.to_ask_for(self.lacks(absent)),
        }
    }

    /// The bytes of NEED_ROOM if `lacking` bytes of room are lacking: all room that the process wants. That is the room that it
    /// was given and has not given back, and the room that it lacks. So room on its way is not asked for twice. 0: none is
    /// lacking.
    #[must_use]
    pub fn to_ask_for(&self, lacking: u64) -> u64 {
        let given = self.charged + self.made + self.lost;
        let given = given.saturating_add_signed(self.room);
        if lacking == 0 { 0 } else { given.saturating_add(lacking) }
    }

    /// Charges up to `bytes` that come to the card, as far as there is room; returns how many.
    pub fn charge(&mut self, bytes: u64) -> u64 {
        let bytes = if self.unmetered { bytes } else { bytes.min(self.unused_room()) };
        self.take_room(bytes);
        self.charged += bytes;
        bytes
    }

    /// Charges `bytes` that come to the card in one piece, or nothing; returns whether it does. No other thread
    /// finds room gone that is given back at once.
    pub fn charge_all(&mut self, bytes: u64) -> bool {
        let fits = self.lacks(bytes) == 0;
        if fits {
            self.charge(bytes);
        }
        fits
    }

    /// Charges as much of an allocation as the card can hold beside the bytes that are charged; returns how many bytes.
    ///
    /// # Errors
    /// The bytes that there is no room for in one piece.
    pub fn charge_whole(&mut self, bytes: u64) -> Result<u64, u64> {
        let fits = self.most_on_card().saturating_sub(self.charged);
        let wanted = if self.unmetered { bytes } else { bytes.min(fits) };
        if wanted > 0 && self.lacks(wanted) > 0 { Err(wanted) } else { Ok(self.charge(wanted)) }
    }

    /// Charged bytes did not come to the card: their room is unused again.
    pub fn uncharge(&mut self, bytes: u64) {
        self.charged = self.charged.saturating_sub(bytes);
        self.return_room(bytes);
    }

    /// Charged bytes have left the card for the host. Their room belongs to the scheduler, which learns of it by
    /// [`Self::take_made`].
    pub fn discharge(&mut self, bytes: u64) {
        self.charged = self.charged.saturating_sub(bytes);
        self.made += bytes;
    }

    /// Mapped memory of an allocation has left the card.
    pub fn unmap(&mut self, bytes: u64) {
        self.discharge(bytes);
        self.unmapped += bytes;
    }

    /// Mapped memory, charged before, is on the card now.
    pub fn map(&mut self, bytes: u64) {
        self.unmapped = self.unmapped.saturating_sub(bytes);
    }

    /// Bytes of mapped memory without memory on the card behind their addresses.
    #[must_use]
    pub fn unmapped(&self) -> u64 {
        self.unmapped
    }

    /// Memory that could be moved cannot be moved any more.
    pub fn pin(&mut self, bytes: u64) {
        self.movable = self.movable.saturating_sub(bytes);
    }

    /// Memory that cannot be moved any more is about to be freed: [`Self::release`] takes it for movable.
    pub fn unpin(&mut self, bytes: u64) {
        self.movable = self.movable.saturating_add(bytes);
    }

    /// Gives up to `bytes` of unused room to the eviction that is under way; returns how many.
    pub fn evict_unused(&mut self, bytes: u64) -> u64 {
        let taken = bytes.min(self.unused_room());
        self.part_with(taken);
        self.made += taken;
        taken
    }

    /// The driver has no memory for `bytes` of room. They count as used, so that the scheduler is asked for other room, which
    /// another process has to leave.
    pub fn lose(&mut self, bytes: u64) {
        if !self.unmetered {
            self.room = self.room.saturating_sub_unsigned(bytes);
            self.lost += bytes;
            self.turns_without = 0;
        }
    }

    /// Lost room is as good as other room again: the card may have it now.
    pub(crate) fn find_lost(&mut self) {
        self.room = self.room.saturating_add_unsigned(std::mem::take(&mut self.lost));
        self.turns_without = 0;
    }

    /// Gives up to `bytes` of lost room to the eviction that is under way; returns how many.
    pub fn evict_lost(&mut self, bytes: u64) -> u64 {
        let taken = bytes.min(self.lost);
        self.lost -= taken;
        self.made += taken;
        taken
    }

    /// Takes up to `bytes` of unused room; returns how many.
    pub fn take_unused(&mut self, bytes: u64) -> u64 {
        self.take_unused_but(0, bytes)
    }

    /// Takes up to `bytes` of unused room that absent memory does not need when it comes back; returns how many.
    pub fn take_spare(&mut self, bytes: u64) -> u64 {
        self.take_unused_but(self.absent(), bytes)
    }

    fn take_unused_but(&mut self, stays: u64, bytes: u64) -> u64 {
        let taken = bytes.min(self.unused_room().saturating_sub(stays));
        self.part_with(taken);
        taken
    }

    /// Unused room goes back to the scheduler.
    fn part_with(&mut self, room: u64) {
        self.room -= room.cast_signed();
    }

    /// Unused room that no waiting allocation is about to take.
    #[must_use]
    pub fn unused(&self) -> u64 {
        // Room that has just come belongs to the allocation that waited and is about to take it.
        let is_awaited = self.waiting > 0 && self.lacks(self.awaited) == 0;
        if self.unmetered || is_awaited { 0 } else { self.unused_room() }
    }

    /// The process has the lock: memory becomes resident when it is allocated. False: the lock is no use yet. Absent memory
    /// would fit and has to come back first, or memory is unmapped, and no page fault brings it back.
    pub fn hold(&mut self, absent: Absent) -> bool {
        if self.unmapped > 0 {
            return false;
        }
        if absent == Absent::ComesFirst && self.absent() > self.never_fits() {
            return false;
        }
        self.holding = true;
        true
    }

    /// A turn of the process is over.
    pub fn end_turn(&mut self) {
        self.turns_without += 1;
        if self.turns_without >= TURNS_WITHOUT {
            self.find_lost();
        }
    }

    /// The process does not hold the lock any more, or not yet: another of its devices cannot be held.
    pub fn let_go(&mut self) {
        self.holding = false;
        self.awaited = 0;
    }

    /// Room is not counted any more: no other client needs it.
    pub fn stop_metering(&mut self) {
        self.unmetered = true;
        self.awaited = 0;
        self.lost = 0;
    }

    /// The scheduler was lost and may come back soon, or is not waited for any more.
    pub fn expect_scheduler(&mut self, expected: bool) {
        self.expected = expected;
    }

    /// Whether the scheduler was lost and may come back soon: it has others leave the card then.
    #[must_use]
    pub fn is_scheduler_expected(&self) -> bool {
        self.expected
    }

    /// Whether room is counted.
    #[must_use]
    pub fn is_metered(&self) -> bool {
        !self.unmetered
    }

    /// Room is counted again. The scheduler has charged the sum that it was last told.
    pub fn start_metering(&mut self) {
        self.unmetered = false;
        self.lost = 0;
        // Room that an eviction has made belongs to the scheduler already, though it has not been told.
        self.room =
            self.reported.charged.cast_signed() - self.charged.cast_signed() - self.made.cast_signed();
    }

    /// Room is counted again by a scheduler that is told what is charged now. That sum is without memory that has left the card, so the
    /// room of such memory is told no more.
    pub fn start_metering_anew(&mut self) -> Usage {
        self.unmetered = false;
        self.usage_to_register()
    }

    /// Bytes that may be charged in addition, also those that a waiting allocation is about to take.
    #[must_use]
    pub fn unused_room(&self) -> u64 {
        self.room.max(0).cast_unsigned()
    }

    fn take_room(&mut self, bytes: u64) {
        if !self.unmetered {
            self.room = self.room.saturating_sub_unsigned(bytes);
        }
    }

    fn return_room(&mut self, bytes: u64) {
        if !self.unmetered {
            self.room = self.room.saturating_add_unsigned(bytes);
        }
    }

    /// The room that is lacking for `bytes`.
    fn lacks(&self, bytes: u64) -> u64 {
        if self.unmetered { 0 } else { bytes.cast_signed().saturating_sub(self.room).max(0).cast_unsigned() }
    }
}
