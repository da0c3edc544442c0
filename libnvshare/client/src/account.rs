//! The sums of a process's memory on one device, and what follows from them.
//!
//! Invariants, each after every call:
//!
//! 1. `charged <= allocated`: what is on the card is allocated. The rest, *absent*, was evicted or not brought there yet.
//! 2. `allocated` is the sum of the allocations and of the driver's reserve; `charged` the sum of their charged bytes and
//!    of the reserve, which is on the card always.
//! 3. While room is counted, `charged + room + made` is what the scheduler has given this process and not got back:
//!    whatever takes room charges as much, and whatever leaves the card is room again, or `made` until the scheduler is
//!    told. `room` is below zero while the driver's reserve, or what a process that ran alone brought along, takes more
//!    than was given; then it is lacking.
//! 4. No allocation passes the limit or, with its tenant's, the tenant's limit, and what has to have its room at once has
//!    it when it is admitted.
//! 5. `unmapped` is the part of [mapped memory](Kind::Mapped) that is not on the card: while there is any, the lock is not held.
//! 6. Nobody waits for room (`needs` is zero) once it came, was refused, or is not counted.
//!
//! What is absent of which allocation is not known here: that is each allocation's [`Residency`](crate::Residency), or
//! another backing's record. The account is told bytes alone: [`Account::charge`] before they come, and
//! [`Account::discharge`] when they have left.

mod admission;
mod told;
mod waiting;

use nvshare_proto::GpuUuid;

use crate::kind::Kind;
pub use admission::{Admission, Refusal};

/// The limit that a tenant's processes share on a device, and what they have together.
pub trait Tenant: Copy {
    /// Bytes that the tenant's processes have together.
    fn used(&self) -> u64;

    /// Adds to what this process has, unless all would have more than `limit` then.
    ///
    /// # Errors
    /// What the tenant has, when it would; nothing is changed.
    fn charge(&self, bytes: u64, limit: u64) -> Result<(), u64>;

    /// Takes from what this process has.
    fn discharge(&self, bytes: u64);
}

/// What holds for a device as long as the process lives.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// Which GPU it is.
    pub gpu: GpuUuid,
    /// Bytes that the driver says it has.
    pub total: u64,
    /// The process's, or its tenant's, limit in bytes.
    pub limit: Option<u64>,
    /// One program may have more than fits: what does not comes and goes by page faults.
    pub oversubscribe: bool,
}

/// What the driver keeps for itself on a device, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DriverReserve {
    /// Freed, and kept by pools of the driver's own memory.
    pub ordered: u64,
    /// Freed, and kept by managed pools.
    pub pooled: u64,
    /// Of graphs.
    pub graphs: u64,
}

impl DriverReserve {
    /// What pools of this kind of memory keep.
    pub fn of(&mut self, kind: Kind) -> Option<&mut u64> {
        match kind {
            Kind::Ordered => Some(&mut self.ordered),
            Kind::Pooled => Some(&mut self.pooled),
            Kind::Device | Kind::Mapped | Kind::Managed | Kind::Plain | Kind::Small => None,
        }
    }

    /// All of it.
    #[must_use]
    pub fn sum(self) -> u64 {
        self.ordered + self.pooled + self.graphs
    }
}

/// See the [module's documentation](self). All sizes are bytes.
#[derive(Debug, Clone, Copy)]
pub struct Account<T> {
    terms: Terms,
    /// Allocated, wherever it is; with the driver's reserve.
    allocated: u64,
    /// Of these, what can be moved; without the driver's reserve.
    movable: u64,
    /// Of these, the program's own managed memory: the driver lets it have more than the card holds.
    managed: u64,
    /// Of what is allocated, what the driver keeps for itself.
    reserve: DriverReserve,
    /// Of what is allocated, on the card: room was taken for it.
    charged: u64,
    /// Of mapped memory, what has no memory on the card behind its addresses: nothing may touch it.
    unmapped: u64,
    /// What may be charged beyond that.
    room: i64,
    /// What the GPU's clients may fill together, as the scheduler says.
    capacity: Option<u64>,
    /// The process holds the lock: new memory becomes resident at once.
    holding: bool,
    /// There is no scheduler, or it does not schedule: room is not counted.
    unmetered: bool,
    /// What waiting allocations lack.
    needs: u64,
    /// Allocations that wait.
    waiting: u32,
    /// The scheduler has no room for them.
    refused: bool,
    /// Room that an eviction has made and the scheduler has not been told of. A registration says what is charged then,
    /// and so takes it in.
    made: u64,
    /// What the scheduler was last told: allocated and charged.
    reported: (u64, u64),
    /// The limit is shared with the tenant's other processes.
    tenant: Option<T>,
}

impl<T: Tenant> Account<T> {
    /// The account of a device that the process has not come to yet.
    #[must_use]
    pub fn new(terms: Terms) -> Self {
        Self {
            terms,
            allocated: 0,
            movable: 0,
            managed: 0,
            reserve: DriverReserve::default(),
            charged: 0,
            unmapped: 0,
            room: 0,
            capacity: None,
            holding: false,
            unmetered: false,
            needs: 0,
            waiting: 0,
            refused: false,
            made: 0,
            reported: (0, 0),
            tenant: None,
        }
    }

    /// Allocated, wherever it is; with the driver's reserve.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        self.allocated
    }

    /// Allocated and on the card, as far as it is counted.
    #[must_use]
    pub fn charged(&self) -> u64 {
        self.charged
    }

    /// Allocated and not charged: evicted, or not brought to the card yet.
    #[must_use]
    pub fn absent(&self) -> u64 {
        self.allocated.saturating_sub(self.charged)
    }

    /// What the driver keeps for itself.
    #[must_use]
    pub fn reserve(&self) -> DriverReserve {
        self.reserve
    }

    /// What the GPU's clients may fill together, if a scheduler has said so.
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

    /// What counts towards the limit: of all processes of the tenant, where that is known.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.tenant.map_or(self.allocated, |tenant| tenant.used())
    }

    /// What one process may have on the card at most.
    fn most_on_card(&self) -> u64 {
        self.capacity.unwrap_or(self.terms.total)
    }

    /// What is allocated beyond what the card can hold.
    #[must_use]
    pub fn never_fits(&self) -> u64 {
        self.allocated.saturating_sub(self.most_on_card())
    }

    /// What a restore asks the scheduler for that found no room for `bytes`, and for so much of what is `unmapped`: see
    /// [`Self::to_ask_for`]. What can never be on the card at the same time is not waited for, but nothing else will do for
    /// what is unmapped.
    #[must_use]
    pub fn to_ask_for_after_restore(&self, bytes: u64, unmapped: u64) -> u64 {
        match bytes.saturating_sub(self.never_fits()) + unmapped {
            0 => 0,
            absent => self.to_ask_for(self.lacks(absent)),
        }
    }

    /// What NEED_ROOM says where so much room is lacking: all that the process wants on the card, which is what it was given
    /// and has not given back, and what it lacks. So room that is on its way meanwhile is not asked for twice. 0: nothing
    /// is lacking.
    #[must_use]
    pub fn to_ask_for(&self, lacking: u64) -> u64 {
        let given = self.charged.saturating_add(self.made).saturating_add_signed(self.room);
        if lacking == 0 { 0 } else { given.saturating_add(lacking) }
    }

    /// Charges up to so much for what comes to the card, as far as there is room; returns how much.
    pub fn charge(&mut self, bytes: u64) -> u64 {
        let bytes = if self.unmetered { bytes } else { bytes.min(self.unused_room()) };
        self.take_room(bytes);
        self.charged += bytes;
        bytes
    }

    /// Charges as much of an allocation as the card can hold beside what is charged; returns how much.
    ///
    /// # Errors
    /// The room that is lacking for that.
    pub fn charge_whole(&mut self, bytes: u64) -> Result<u64, u64> {
        let fits = self.most_on_card().saturating_sub(self.charged);
        let wanted = if self.unmetered { bytes } else { bytes.min(fits) };
        match self.lacks(wanted) {
            0 => Ok(self.charge(wanted)),
            lacks => Err(lacks),
        }
    }

    /// Something that was charged did not come to the card: its room is unused again.
    pub fn uncharge(&mut self, bytes: u64) {
        self.charged = self.charged.saturating_sub(bytes);
        self.return_room(bytes);
    }

    /// What was charged has left the card for the host; its room is the scheduler's, which is told by
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

    /// Of mapped memory, what has no memory on the card behind its addresses.
    #[must_use]
    pub fn unmapped(&self) -> u64 {
        self.unmapped
    }

    /// Memory that could be moved cannot be moved any more.
    pub fn pin(&mut self, bytes: u64) {
        self.movable = self.movable.saturating_sub(bytes);
    }

    /// Gives up to so much unused room to the eviction that is under way; returns how much.
    pub fn evict_unused(&mut self, bytes: u64) -> u64 {
        let taken = bytes.min(self.unused_room());
        self.room -= taken.cast_signed();
        self.made += taken;
        taken
    }

    /// Takes up to `bytes` of unused room; returns how much. If what is absent is about to come back, its room stays.
    pub fn take_unused(&mut self, bytes: u64, coming_back: bool) -> u64 {
        let stays = if coming_back { self.absent() } else { 0 };
        let taken = bytes.min(self.unused_room().saturating_sub(stays));
        self.room -= taken.cast_signed();
        taken
    }

    /// Unused room that nobody is about to take.
    #[must_use]
    pub fn unused(&self) -> u64 {
        // What has just come is somebody's who is about to take it.
        let is_awaited = self.waiting > 0 && self.needs == 0;
        if self.unmetered || is_awaited { 0 } else { self.unused_room() }
    }

    /// The lock is ours: memory becomes resident when it is allocated. False: some is absent that would fit, and
    /// the lock is no use yet, unless `anyway`; or some is unmapped, which no page fault brings back.
    pub fn hold(&mut self, anyway: bool) -> bool {
        if self.unmapped > 0 {
            return false;
        }
        if self.absent() > self.never_fits() && !anyway {
            return false;
        }
        self.holding = true;
        true
    }

    /// The lock is not ours any more.
    pub fn let_go(&mut self) {
        self.holding = false;
        self.needs = 0;
    }

    /// Room is not counted any more: there is nobody to share with.
    pub fn unlimit(&mut self) {
        self.unmetered = true;
        self.needs = 0;
    }

    /// Room is counted again. The scheduler has charged what it was last told.
    pub fn limit(&mut self) {
        self.unmetered = false;
        // What an eviction has made and is still to be told is the scheduler's already.
        self.room = self.reported.1.cast_signed() - self.charged.cast_signed() - self.made.cast_signed();
    }

    /// What may be charged beyond what is, whoever is about to take it.
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

    /// The room that is lacking for so much.
    fn lacks(&self, bytes: u64) -> u64 {
        if self.unmetered { 0 } else { bytes.cast_signed().saturating_sub(self.room).max(0).cast_unsigned() }
    }
}
