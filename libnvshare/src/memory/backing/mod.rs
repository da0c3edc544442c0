//! Backings of device memory: how memory is kept, leaves the card and comes back.
//!
//! | backing | an allocation is | leaves by | comes back by |
//! |---|---|---|---|
//! | [`managed`] | managed memory | a prefetch to the host | a prefetch, or by page faults |
//! | [`swap`] | addresses of the library, with physical memory behind them in chunks | a copy; then the chunk is unmapped and released | a new chunk, mapped, and a copy |
//!
//! A backing moves memory and keeps the account of the device true; it decides nothing. When moving fails:
//!
//! - out: the memory stays where it is, and counts there;
//! - in, managed: the pages come by faults when they are touched;
//! - in, swap: the memory stays unmapped, and the gate stays closed until it is back.

pub(crate) mod managed;
pub(crate) mod swap;

use std::ops::AddAssign;

use crate::memory::devices::Device;

/// The result of a restore, in bytes.
#[derive(Debug, Default)]
pub(crate) struct Restored {
    /// Memory without room that comes by page faults when it is touched.
    pub(crate) lacks: u64,
    /// Memory without room that nothing may touch.
    pub(crate) lacks_mapped: u64,
    /// Memory that came back to the card.
    pub(crate) back: u64,
    /// The part of it that had contents, which were copied.
    pub(crate) copied: u64,
}

impl AddAssign for Restored {
    fn add_assign(&mut self, other: Self) {
        self.lacks += other.lacks;
        self.lacks_mapped += other.lacks_mapped;
        self.back += other.back;
        self.copied += other.copied;
    }
}

/// How memory of one kind moves.
pub(crate) trait Backing: Sync {
    /// Moves `wanted` bytes of a device to the host, and a little more rather than less, from the ends of the largest
    /// allocations. `report` is told of each part that has left the card. Returns their sum.
    fn evict(&self, device: &'static Device, wanted: u64, report: &mut dyn FnMut(u64)) -> u64;

    /// Restores a device's memory as far as there is room, largest allocations first. Stops soon when it is `cancelled`.
    fn restore(&self, device: &'static Device, cancelled: &dyn Fn() -> bool) -> Restored;
}

/// All backings, in the order in which memory moves.
pub(crate) const ALL: [&dyn Backing; 2] = [&swap::Swap, &managed::Managed];
