//! The driver's reserve: memory of pools whose allocations are freed, and memory of graphs.
//!
//! The reserve is on the card. So it counts towards the limit, and the scheduler is told of it. The driver releases the part
//! that is not in use on request (`cuMemPoolTrimTo`, `cuDeviceGraphMemTrim`), and by itself when the card is full. The library
//! requests this before it refuses an allocation, and before it evicts memory of the process.
//!
//! A pool keeps freed memory only up to its release threshold, which is zero unless the program sets it. Memory beyond the
//! threshold returns at the next synchronisation and is not counted. Until the library asks the driver again, freed memory
//! counts as kept, and new allocations of the pool are taken from it. One pool has no use of the memory that another keeps.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nvshare_client::DriverReserve;
use nvshare_proto::units::MIB;

use super::allocations::{Allocation, Kind};
use super::devices::{self, Device};
use super::pools;
use crate::driver::types::CUmemoryPool;
use crate::driver::{self, Relaxed};
use crate::process::{bell, lifecycle};

/// Whether a pool has a release threshold.
static POOLS: AtomicBool = AtomicBool::new(false);
/// Whether the process has graphs that allocate.
static GRAPHS: AtomicBool = AtomicBool::new(false);
/// Whether memory of graphs has exceeded the limit on a device.
static OVER: AtomicBool = AtomicBool::new(false);
/// Bytes that were freed to pools since the library last asked the driver.
static FREED: AtomicU64 = AtomicU64::new(0);

/// After this many bytes freed to pools, the library asks the driver again.
const LOOK_AFTER: u64 = 64 * MIB;

/// Notes that a pool keeps freed memory from now on.
pub(crate) fn note_pools() {
    POOLS.store(true, Ordering::Relaxed);
}

/// Notes that there are graphs that allocate.
pub(crate) fn note_graphs() {
    GRAPHS.store(true, Ordering::Relaxed);
}

/// Whether there are graphs that allocate.
pub(crate) fn has_graphs() -> bool {
    GRAPHS.load(Ordering::Relaxed)
}

/// Whether pools keep freed memory.
pub(crate) fn is_kept_by_pools() -> bool {
    POOLS.load(Ordering::Relaxed)
}

/// Notes that an allocation of a pool was freed, of which `charged` bytes were charged.
pub(crate) fn note_freed(device: &Device, allocation: &Allocation, charged: u64) {
    let bytes = allocation.size;
    device.update(|account| account.keep(bytes, charged, allocation.kind));
    if FREED.fetch_add(bytes, Ordering::Relaxed) + bytes >= LOOK_AFTER {
        FREED.store(0, Ordering::Relaxed);
        refresh(device);
    }
}

/// Bytes that a pool keeps, out of those that the account has for pools of its kind. `None` is the default pool.
///
/// While no other pool was ever asked, these are all of them: a program with one pool pays for no call. Else the driver says. Two
/// threads that ask it at the same time may count on the same bytes, until the next [`refresh`].
pub(crate) fn kept_for(device: &Device, kind: Kind, pool: Option<CUmemoryPool>) -> u64 {
    if !kind.is_pools() {
        return 0;
    }
    if device.note_pool(pool.map_or(0, |pool| pool.0.addr())) {
        return u64::MAX;
    }
    if device.account().reserve().of(kind).is_none_or(|kept| *kept == 0) {
        return 0;
    }
    let _relaxed = Relaxed::begin();
    let unused = match pool {
        None => driver::default_pool(device.ordinal).and_then(driver::pool_unused),
        Some(pool) => pools::while_it_lives(pool, driver::pool_unused),
    };
    unused.unwrap_or(0)
}

/// Whether there can be a reserve.
fn in_use() -> bool {
    // In a forked child, a lock may be held by a thread that does not exist there.
    (POOLS.load(Ordering::Relaxed) || GRAPHS.load(Ordering::Relaxed)) && !lifecycle::is_forked()
}

/// Asks the driver for its reserve on a device, and enters it into the account.
pub(crate) fn refresh(device: &Device) {
    if !in_use() {
        return;
    }
    let _relaxed = Relaxed::begin();
    let known = device.account().reserve();
    // The second one counts, whatever changes: a program that never rests is measured all the same.
    if !device.set_reserve_unless_changed(known, measure(device)) {
        device.set_reserve(measure(device));
    }
    if is_over_limit_by_graphs(device) {
        OVER.store(true, Ordering::Relaxed);
    }
    if device.lacking() > 0 || device.unused() > 0 || device.is_usage_stale() {
        bell::ring();
    }
}

/// Asks the driver for its reserve on a device.
fn measure(device: &Device) -> DriverReserve {
    let mut kept = DriverReserve::default();
    if POOLS.load(Ordering::Relaxed) {
        pools::each(device.ordinal, |pool, kind| {
            if let Some(kept) = kept.of(kind) {
                *kept += driver::pool_keeps(pool).unwrap_or(0);
            }
        });
    }
    if GRAPHS.load(Ordering::Relaxed) {
        kept.graphs = driver::graph_memory(device.ordinal).unwrap_or(0);
    }
    kept
}

/// Makes the driver release the part of its reserve on a device that is not in use. Returns whether the account has less
/// than before.
pub(crate) fn release_unused(device: &Device) -> bool {
    if !in_use() {
        return false;
    }
    // Other threads free to pools meanwhile, which changes the reserve, and not the sum.
    let allocated = || device.account().allocated();
    let before = allocated();
    refresh(device);
    if allocated() < before {
        return true;
    }
    let _relaxed = Relaxed::begin();
    if POOLS.load(Ordering::Relaxed) {
        pools::each(device.ordinal, |pool, _| {
            let _ = driver::trim_pool(pool);
        });
    }
    if GRAPHS.load(Ordering::Relaxed) {
        let _ = driver::trim_graph_memory(device.ordinal);
    }
    refresh(device);
    allocated() < before
}

fn is_over_limit_by_graphs(device: &Device) -> bool {
    device.account().is_over_limit_by_graphs()
}

/// Whether memory of graphs exceeds the limit on a device, even after the driver has released what it can.
pub(crate) fn is_over_by_graphs() -> bool {
    if !OVER.load(Ordering::Relaxed) {
        return false;
    }
    let over = || devices::used().any(is_over_limit_by_graphs);
    if over() {
        devices::used().for_each(|device| {
            release_unused(device);
        });
    }
    // The launch of another thread may exceed the limit while this one looks.
    OVER.store(false, Ordering::Relaxed);
    let over = over();
    if over {
        OVER.store(true, Ordering::Relaxed);
    }
    over
}
