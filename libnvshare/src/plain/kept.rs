//! What the driver keeps for itself: memory of pools after its allocations are freed, and memory of graphs.
//!
//! It is on the card, so it counts, towards the limit and for the scheduler, although nobody asked for it. The driver
//! gives up what is not in use when it is told to (`cuMemPoolTrimTo`, `cuDeviceGraphMemTrim`), as it does by itself when
//! the card is full. Here it is told so before an allocation is refused, and before anything of the process is evicted.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nvshare_proto::units::MIB;

use super::ordered;
use crate::cuda::{CUgraphExec, CUresult, CUstream};
use crate::devices::{self, Device};
use crate::driver::{self, Relaxed};
use crate::streams::StreamKey;
use crate::{gate, memory, session};

/// The process has allocated in stream order.
static POOLS: AtomicBool = AtomicBool::new(false);
/// The process has made graphs that allocate.
static GRAPHS: AtomicBool = AtomicBool::new(false);
/// Bytes that went back to pools since the last look.
static FREED: AtomicU64 = AtomicU64::new(0);

/// So much may go back to pools between two looks.
const LOOK_AFTER: u64 = 64 * MIB;

/// Pools are in use.
pub(super) fn uses_pools() {
    POOLS.store(true, Ordering::Relaxed);
}

/// Graphs that allocate are in use.
pub(super) fn uses_graphs() {
    GRAPHS.store(true, Ordering::Relaxed);
}

/// An allocation went back to its pool.
pub(super) fn freed(bytes: u64) {
    if FREED.fetch_add(bytes, Ordering::Relaxed) + bytes >= LOOK_AFTER {
        FREED.store(0, Ordering::Relaxed);
        devices::used().for_each(look);
    }
}

/// Whether there is anything to look at.
fn in_use() -> bool {
    POOLS.load(Ordering::Relaxed) || GRAPHS.load(Ordering::Relaxed)
}

/// Asks the driver what it keeps on a device, and enters that into the books.
pub(crate) fn look(device: &Device) {
    if !in_use() {
        return;
    }
    let _relaxed = Relaxed::begin();
    let mut kept = 0;
    if POOLS.load(Ordering::Relaxed) {
        ordered::each_pool(device.ordinal, |pool| kept += driver::pool_unused(pool).unwrap_or(0));
    }
    if GRAPHS.load(Ordering::Relaxed) {
        kept += driver::graph_memory(device.ordinal).unwrap_or(0);
    }
    device.set_kept(kept);
    if device.lacking() > 0 || device.is_usage_stale() {
        session::wake();
    }
}

/// Has the driver give up what it keeps on a device and does not use. True: it had something.
pub(crate) fn give_up(device: &Device) -> bool {
    if !in_use() {
        return false;
    }
    look(device);
    let before = device.account().kept;
    if before == 0 {
        return false;
    }
    let _relaxed = Relaxed::begin();
    if POOLS.load(Ordering::Relaxed) {
        ordered::each_pool(device.ordinal, |pool| {
            let _ = driver::trim_pool(pool);
        });
    }
    if GRAPHS.load(Ordering::Relaxed) {
        let _ = driver::trim_graph_memory(device.ordinal);
    }
    look(device);
    device.account().kept < before
}

type GraphLaunch = unsafe extern "C-unwind" fn(CUgraphExec, CUstream) -> CUresult;

/// What a graph allocates it takes when it runs, and nobody knows before how much that is. So it counts from then on,
/// and who is over the limit by it runs no other graph until the driver has given up enough.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn graph_launch<const TWIN: bool>(
    real: GraphLaunch,
    exec: CUgraphExec,
    stream: CUstream,
) -> CUresult {
    let device =
        if GRAPHS.load(Ordering::Relaxed) { memory::target().map(|(device, _)| device) } else { None };
    if let Some(device) = device
        && device.is_over_limit()
        && (!give_up(device) || device.is_over_limit())
    {
        return CUresult::OUT_OF_MEMORY;
    }
    let pass = gate::enter(StreamKey::new(stream, TWIN));
    // SAFETY: the caller's arguments.
    let result = unsafe { real(exec, stream) };
    gate::leave(pass, result);
    if let Some(device) = device {
        look(device);
    }
    result
}
