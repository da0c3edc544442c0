//! Backings of memory: how an allocation is made, leaves the card, comes back, and ends.
//!
//! | backing | an allocation is | leaves by | comes back by |
//! |---|---|---|---|
//! | [`managed`] | memory of the driver: managed memory, or plain memory, which stays | a prefetch to the host | a prefetch, or by page faults |
//! | [`swap`] | addresses of the library, with physical memory behind them in chunks | a copy; then the chunk is unmapped and released | a new chunk, mapped, and a copy |
//!
//! A backing handles memory, and keeps the account of the device true while it moves. It decides nothing. Admission, the
//! list of allocations, and their entry in the account are the callers' ([`admission`](super::admission),
//! [`free`](super::free)).

pub(crate) mod managed;
pub(crate) mod swap;

use std::ops::AddAssign;
use std::sync::Arc;

use nvshare_client::slabs::SLAB;
use nvshare_proto::MemoryMode;

use crate::driver::types::{CUdeviceptr, CUmemAllocationProp, CUmemoryPool, CUresult};
use crate::memory::allocations::{Allocation, Kind, SMALLEST_MANAGED};
use crate::memory::devices::Device;
use crate::memory::mapping::Mapped;
use crate::memory::plain;
use crate::process::lifecycle;
use crate::work::contexts::Context;

/// An allocation that the program asks for.
#[derive(Debug)]
pub(crate) struct AllocationRequest {
    pub(crate) device: &'static Device,
    pub(crate) context: Arc<Context>,
    pub(crate) kind: Kind,
    /// Bytes that the program asked for.
    pub(crate) bytes: u64,
    /// The pool that is asked for memory of a pool; none: the default pool.
    pub(crate) pool: Option<CUmemoryPool>,
    /// The properties of physical memory that the program creates and maps itself; none: it asks for an address.
    pub(crate) created: Option<CUmemAllocationProp>,
    /// The memory is a slab, which small allocations share.
    pub(crate) is_slab: bool,
}

impl AllocationRequest {
    /// A request for an address of memory of this kind.
    pub(crate) fn new(device: &'static Device, context: Arc<Context>, kind: Kind, bytes: u64) -> Self {
        Self { device, context, kind, bytes, pool: None, created: None, is_slab: false }
    }

    /// A request for device memory, whose kind the library chooses.
    pub(crate) fn for_device_memory(device: &'static Device, context: Arc<Context>, bytes: u64) -> Self {
        Self::new(device, context, kind_of_device_memory(device, bytes), bytes)
    }

    /// The backing of the memory, and the bytes that it takes.
    ///
    /// # Errors
    /// Out of memory: no memory can be that large. Or the error of [`Self::check_context`].
    pub(crate) fn plan(&self) -> Result<(&'static dyn Backing, u64), CUresult> {
        self.check_context()?;
        let backing = of(self.kind);
        Ok((backing, backing.span(self.bytes).ok_or(CUresult::OUT_OF_MEMORY)?))
    }

    /// Whether the context can have more memory.
    ///
    /// # Errors
    /// The driver's error because of which the context has lost memory.
    pub(crate) fn check_context(&self) -> Result<(), CUresult> {
        self.context.failure().map_or(Ok(()), Err)
    }

    /// The memory shares a slab with other small allocations.
    pub(crate) fn is_small(&self) -> bool {
        self.kind == Kind::Mapped && self.bytes < SLAB && self.created.is_none()
    }

    /// A request for a slab, for this small allocation.
    pub(crate) fn for_slab(&self) -> Self {
        Self { is_slab: true, ..Self::new(self.device, Arc::clone(&self.context), Kind::Mapped, SLAB) }
    }
}

/// Memory that was made.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) base: CUdeviceptr,
    /// The chunks behind the addresses, if the library maps the memory.
    pub(crate) mapped: Option<Mapped>,
}

/// The state of the work that uses memory which is being freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    MayRun,
    Complete,
}

/// The result of a free.
#[derive(Debug)]
pub(crate) enum Freed {
    /// The memory has ended.
    Now,
    /// The memory has ended, and with it its slab, which is off the list and still in the account.
    WithSlab(Arc<Allocation>),
    /// The free has succeeded for the program. The memory ends later, by [`swap::finish_frees`].
    Later,
    /// The memory lives on: the driver has answered this instead.
    Not(CUresult),
}

/// The behaviour of a restore where room is lacking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WithoutRoom {
    /// It leaves the memory where it is.
    GoOn,
    /// More room comes piece by piece: a restore that can wait does, and goes on where it was. It ends when it is cancelled, or none
    /// has come for [`ROOM_IS_LATE`](nvshare_client::machine::ROOM_IS_LATE).
    Wait,
}

/// The result of a restore, in bytes.
#[derive(Debug, Default)]
pub(crate) struct Restored {
    /// Memory without room that comes by page faults when it is touched.
    pub(crate) lacks: u64,
    /// Memory without room that nothing may touch.
    pub(crate) lacks_mapped: u64,
    /// The driver had no memory where the account had room.
    pub(crate) is_full: bool,
    /// Memory that came back to the card.
    pub(crate) back: u64,
    /// The part of it that had contents.
    pub(crate) had_contents: u64,
    /// The part of these that was copied: zeros are not.
    pub(crate) copied: u64,
}

/// The result of an eviction, in bytes.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Evicted {
    /// Memory that left the card.
    pub(crate) left: u64,
    /// The part of it that was copied.
    pub(crate) copied: u64,
}

impl AddAssign for Evicted {
    fn add_assign(&mut self, other: Self) {
        self.left += other.left;
        self.copied += other.copied;
    }
}

impl AddAssign for Restored {
    fn add_assign(&mut self, other: Self) {
        self.lacks += other.lacks;
        self.lacks_mapped += other.lacks_mapped;
        self.is_full |= other.is_full;
        self.back += other.back;
        self.had_contents += other.had_contents;
        self.copied += other.copied;
    }
}

/// The life of an allocation of some kinds: how its memory is made and how it ends.
pub(crate) trait Backing: Sync {
    /// Bytes that an allocation of `bytes` takes. `None`: more than there can be.
    fn span(&self, bytes: u64) -> Option<u64> {
        Some(bytes)
    }

    /// Makes the memory of an allocation that was admitted, `charged` bytes of which may be on the card. `call` makes
    /// it by the function that the program called.
    ///
    /// # Errors
    /// The allocation fails with this error. Nothing of it is left.
    fn allocate(
        &self,
        request: &AllocationRequest,
        charged: u64,
        call: &dyn Fn() -> Result<CUdeviceptr, CUresult>,
    ) -> Result<Made, CUresult>;

    /// Brings the first `charged` bytes of a new allocation to the card, as far as [`Self::allocate`] has not done so.
    /// Called inside the open gate. A failure changes nothing for the program: page faults bring the memory.
    fn populate(&self, _allocation: &Allocation, _charged: u64) {}

    /// Ends the memory of an allocation that is off the list and [leaving](Allocation::is_leaving). Waits for the piece
    /// that is being moved, and for `work` that may still use the memory. `call` is the driver's own free.
    fn free(&self, allocation: &Arc<Allocation>, work: Work, call: &dyn Fn() -> CUresult) -> Freed;

    /// Ends the memory of an allocation that is off the list, because its context ends. The driver's own memory ends
    /// with the context.
    fn end(&self, _allocation: &Allocation) {}
}

/// How memory of some kinds leaves the card and comes back.
trait Moving: Sync {
    /// Moves `wanted` bytes of a device to the host, and a little more rather than less, from the ends of the largest
    /// allocations. `report` is told of each part that has left the card. Returns their sum. Memory that fails to
    /// leave stays where it is, and counts there.
    fn evict(&self, device: &'static Device, wanted: u64, report: &mut dyn FnMut(u64)) -> Evicted;

    /// Restores a device's memory as far as there is room, largest allocations first. Stops soon when it is `cancelled`. Where
    /// room is [lacking](WithoutRoom), it goes on without, or may wait. Memory that fails to come back comes by page faults when it
    /// is touched. If the library maps the memory, the gate stays closed until it is back.
    fn restore(
        &self,
        device: &'static Device,
        without_room: WithoutRoom,
        cancelled: &dyn Fn() -> bool,
    ) -> Restored;
}

/// All memory that moves, in the order in which it does.
const MOVING: [&dyn Moving; 2] = [&swap::Swap, &managed::Managed];

/// Moves `wanted` bytes of a device to the host, and a little more rather than less. `report` is told of each part that has left the
/// card. Memory that fails to leave stays where it is.
pub(crate) fn evict(device: &'static Device, wanted: u64, report: &mut dyn FnMut(u64)) -> Evicted {
    let mut gone = Evicted::default();
    for moving in MOVING {
        gone += moving.evict(device, wanted.saturating_sub(gone.left), report);
    }
    gone
}

/// Restores a device's memory as far as there is room. Stops soon when it is `cancelled`.
pub(crate) fn restore(
    device: &'static Device,
    without_room: WithoutRoom,
    cancelled: &dyn Fn() -> bool,
) -> Restored {
    let mut all = Restored::default();
    for moving in MOVING {
        all += moving.restore(device, without_room, cancelled);
    }
    all
}

/// The backing of memory of a kind.
pub(crate) fn of(kind: Kind) -> &'static dyn Backing {
    if kind == Kind::Mapped { &swap::Swap } else { &managed::Managed }
}

/// The kind of memory that the program gets for device memory of this size.
fn kind_of_device_memory(device: &Device, bytes: u64) -> Kind {
    if device.memory == MemoryMode::Off || plain::needs_plain(bytes) {
        Kind::Plain
    } else if lifecycle::is_exiting() {
        Kind::SmallPlain
    } else if device.memory == MemoryMode::Swap {
        Kind::Mapped
    } else if bytes < SMALLEST_MANAGED {
        Kind::SmallPlain
    } else {
        Kind::DeviceAsManaged
    }
}
