//! What the driver keeps for itself: memory of pools after its allocations are freed, and memory of graphs.
//!
//! It is on the card, so it counts, towards the limit and for the scheduler, although nobody asked for it. The driver
//! gives up what is not in use when it is told to (`cuMemPoolTrimTo`, `cuDeviceGraphMemTrim`), as it does by itself when
//! the card is full. Here it is told so before an allocation is refused, and before anything of the process is evicted.
//!
//! A pool keeps what is freed only up to its release threshold, which is zero unless the program says otherwise: what is
//! beyond it goes back at the next synchronisation, and is not counted. Until the driver is asked again, what was freed
//! counts as kept; what the pool hands out next is taken from that.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nvshare_client::DriverReserve;
use nvshare_proto::units::MIB;

use super::allocations::Allocation;
use super::devices::{self, Device};
use super::pools;
use crate::driver::{self, Relaxed};
use crate::process::{bell, lifecycle};

/// A pool has a release threshold.
static POOLS: AtomicBool = AtomicBool::new(false);
/// The process has made graphs that allocate.
static GRAPHS: AtomicBool = AtomicBool::new(false);
/// A device is over its limit by what graphs took.
static OVER: AtomicBool = AtomicBool::new(false);
/// Bytes that went back to pools since the last look.
static FREED: AtomicU64 = AtomicU64::new(0);

/// So much may go back to pools between two looks.
const LOOK_AFTER: u64 = 64 * MIB;

/// A pool keeps what is freed from now on.
pub(crate) fn uses_pools() {
    POOLS.store(true, Ordering::Relaxed);
}

/// There are graphs that allocate.
pub(crate) fn uses_graphs() {
    GRAPHS.store(true, Ordering::Relaxed);
}

/// Whether there are graphs that allocate.
pub(crate) fn has_graphs() -> bool {
    GRAPHS.load(Ordering::Relaxed)
}

/// Whether pools keep what is freed.
pub(crate) fn is_kept_by_pools() -> bool {
    POOLS.load(Ordering::Relaxed)
}

/// An allocation of a pool is freed, `charged` bytes of which were charged.
pub(crate) fn freed(device: &Device, allocation: &Allocation, charged: u64) {
    let bytes = allocation.size;
    device.update(|account| account.keep(bytes, charged, allocation.kind));
    if FREED.fetch_add(bytes, Ordering::Relaxed) + bytes >= LOOK_AFTER {
        FREED.store(0, Ordering::Relaxed);
        refresh(device);
    }
}

/// Whether there is anything to look at.
fn in_use() -> bool {
    // A forked child may have inherited a lock that nobody will open.
    (POOLS.load(Ordering::Relaxed) || GRAPHS.load(Ordering::Relaxed)) && !lifecycle::is_forked()
}

/// Asks the driver what it keeps on a device, and enters that into the books.
pub(crate) fn refresh(device: &Device) {
    if !in_use() {
        return;
    }
    let _relaxed = Relaxed::begin();
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
    device.set_reserve(kept);
    if is_over_limit_by_graphs(device) {
        OVER.store(true, Ordering::Relaxed);
    }
    if device.lacking() > 0 || device.unused() > 0 || device.is_usage_stale() {
        bell::ring();
    }
}

/// Has the driver give up what it keeps on a device and does not use. True: the books have less than before.
pub(crate) fn give_up(device: &Device) -> bool {
    if !in_use() {
        return false;
    }
    let kept = || device.account().reserve().sum();
    let before = kept();
    refresh(device);
    if kept() < before {
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
    kept() < before
}

/// The device's contexts are gone, and its pools with them.
pub(crate) fn forget(device: &Device) {
    pools::forget(device.ordinal);
    device.set_reserve(DriverReserve::default());
}

fn is_over_limit_by_graphs(device: &Device) -> bool {
    device.account().is_over_limit_by_graphs()
}

/// Whether graphs have brought a device over its limit, whatever the driver can give up.
pub(crate) fn is_over_by_graphs() -> bool {
    if !OVER.load(Ordering::Relaxed) {
        return false;
    }
    let over = || devices::used().any(is_over_limit_by_graphs);
    if over() {
        devices::used().for_each(|device| {
            give_up(device);
        });
    }
    let over = over();
    OVER.store(over, Ordering::Relaxed);
    over
}
