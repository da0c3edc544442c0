//! The driver's reserve: memory of pools whose allocations are freed, and memory of graphs.
//!
//! The reserve is on the card. So it counts towards the limit, and the scheduler is told of it. The driver releases the part
//! that is not in use on request (`cuMemPoolTrimTo`, `cuDeviceGraphMemTrim`), and by itself when the card is full. The library
//! requests this before it refuses an allocation, and before it evicts memory of the process.
//!
//! A pool keeps all freed memory, trimmed or not, until somebody synchronizes with the stream that freed it, or with the context.
//! A query is not enough (measured). Then it keeps as much as its release threshold, which is zero unless the program sets it. So
//! the library [synchronizes](see_frees) before it gives the lock back. Until it asks the driver again, freed memory counts as kept,
//! and new allocations of the pool are taken from it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nvshare_client::DriverReserve;
use nvshare_proto::units::MIB;

use super::allocations::Allocation;
use super::devices::{self, Device};
use super::pools;
use crate::driver::{self, Relaxed};
use crate::process::{bell, lifecycle, threads};
use crate::work::contexts::{self, Context};
use crate::work::drain::Drain;

/// Whether memory was freed to a pool.
static POOLS: AtomicBool = AtomicBool::new(false);
/// Whether the process has graphs that allocate.
static GRAPHS: AtomicBool = AtomicBool::new(false);
/// Whether memory of graphs has exceeded the limit on a device.
static OVER: AtomicBool = AtomicBool::new(false);
/// Bytes that were freed to pools since the library last asked the driver.
static FREED: AtomicU64 = AtomicU64::new(0);

/// After this many bytes freed to pools, the library asks the driver again.
const LOOK_AFTER: u64 = 64 * MIB;

/// Notes that there are graphs that allocate.
pub(crate) fn note_graphs() {
    GRAPHS.store(true, Ordering::Relaxed);
}

/// Whether there are graphs that allocate.
pub(crate) fn has_graphs() -> bool {
    GRAPHS.load(Ordering::Relaxed)
}

/// Whether memory was freed to a pool, which may keep it.
pub(crate) fn is_kept_by_pools() -> bool {
    POOLS.load(Ordering::Relaxed)
}

/// Notes that an allocation of a pool was freed, of which `charged` bytes were charged.
pub(crate) fn note_freed(device: &Device, allocation: &Allocation, charged: u64) {
    let bytes = allocation.size;
    POOLS.store(true, Ordering::Relaxed);
    // The stream that frees it is of the current context, as a rule. The allocation's own may have ended: a pool outlives it.
    contexts::current().as_ref().unwrap_or(&allocation.context).note_unseen_frees();
    device.update(|account| account.keep(bytes, charged, allocation.kind));
    if FREED.fetch_add(bytes, Ordering::Relaxed) + bytes >= LOOK_AFTER {
        FREED.store(0, Ordering::Relaxed);
        refresh(device);
    }
}

/// Synchronizes with those contexts in which memory was freed to a pool, when their work is complete. `wait` waits for that, and
/// may give it up.
pub(crate) fn see_frees(contexts: impl Iterator<Item = Arc<Context>>, wait: impl Fn(&mut Drain) -> bool) {
    let contexts: Vec<Arc<Context>> = contexts.filter(|context| context.take_unseen_frees()).collect();
    let is_complete = || wait(&mut Drain::of_contexts(contexts.iter().cloned()));
    let synchronize = || Drain::synchronize(&contexts).is_some_and(|mut work| wait(&mut work));
    let are_seen = contexts.is_empty() || is_complete() && synchronize();
    if !are_seen {
        contexts.iter().for_each(|context| context.note_unseen_frees());
    }
}

/// The same, within a limited time.
pub(crate) fn see_frees_within(patience: Duration, contexts: impl Iterator<Item = Arc<Context>>) {
    let begin = Instant::now();
    see_frees(contexts, |work| {
        while work.poll() > 0 {
            if begin.elapsed() >= patience || lifecycle::is_exiting() {
                return false;
            }
            threads::pause();
        }
        true
    });
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
    let mut kept = DriverReserve::default();
    if POOLS.load(Ordering::Relaxed) {
        let are_seen = !contexts::of_device(device.ordinal).any(|context| context.has_unseen_frees());
        pools::each(device.ordinal, |pool, kind| {
            if let Some(kept) = kept.of(kind) {
                *kept += driver::pool_keeps(pool, are_seen).unwrap_or(0);
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

/// Makes the driver release the part of its reserve on a device that is not in use. Returns whether the account has less
/// than before.
pub(crate) fn release_unused(device: &Device) -> bool {
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

/// Notes that the device's primary context has ended, and its pools with it.
pub(crate) fn forget(device: &Device) {
    pools::forget(device.ordinal);
    device.set_reserve(DriverReserve::default());
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
    let over = over();
    OVER.store(over, Ordering::Relaxed);
    over
}
