//! Device memory that has to stay plain, because other processes (CUDA IPC), NICs or the stream's memory operations use it.
//!
//! None of them can use managed memory. So some memory is plain and does not move: that of programs whose [executable] shows the
//! need, and sizes that `NVSHARE_PLAIN` names. After a program was refused a handle, all its new allocations and pools are plain;
//! a pool that it has keeps its kind. Memory that the library maps needs no such care with CUDA IPC and
//! dma-bufs: it stays on the card once it is [shared](super::sharing). There, a refused handle of a pool's memory concerns pools alone.

mod executable;

use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use nvshare_proto::MemoryMode;

use crate::process::{config, log};

/// Whether a handle was refused that the program would have without the library.
static HAS_LOST_HANDLE: AtomicBool = AtomicBool::new(false);
/// Whether a handle was refused. New allocations and pools are plain from then on.
static REFUSED: AtomicBool = AtomicBool::new(false);
/// The same for a handle of memory of a pool, where the library maps other memory. Only memory that comes from pools is plain then.
static REFUSED_OF_POOLS: AtomicBool = AtomicBool::new(false);

/// Whether new device memory of this size has to be plain.
pub(crate) fn needs_plain(bytes: u64) -> bool {
    is_needed(|sizes| sizes.iter().any(|size| size.contains(&bytes)))
}

/// Whether new memory of this size from a pool has to be plain.
pub(crate) fn needs_plain_of_pools(bytes: u64) -> bool {
    REFUSED_OF_POOLS.load(Ordering::Relaxed) || needs_plain(bytes)
}

/// Whether new pools have to be plain, since memory of at least one size does.
pub(crate) fn needs_plain_pools() -> bool {
    REFUSED_OF_POOLS.load(Ordering::Relaxed) || is_needed(|sizes| !sizes.is_empty())
}

/// Whether plain memory is needed: after a refusal, or where `NVSHARE_PLAIN` asks for it by its sizes, or else the executable.
fn is_needed(ask_for_it: impl FnOnce(&[RangeInclusive<u64>]) -> bool) -> bool {
    REFUSED.load(Ordering::Relaxed)
        || config::get().is_ok_and(|config| match &config.plain {
            Some(sizes) => ask_for_it(sizes),
            None => executable_needs_plain(),
        })
}

/// Whether the program's executable shows that it needs plain memory. The first call reads the executable, and logs a need.
fn executable_needs_plain() -> bool {
    static NEEDS: OnceLock<bool> = OnceLock::new();
    *NEEDS.get_or_init(|| {
        let shares = config::get().is_ok_and(|config| config.memory == MemoryMode::Swap);
        let call = executable::find_refusing_call(shares);
        if let Some(call) = &call {
            log::info(format_args!(
                "the program calls {call}, which refuses managed memory: its device memory stays plain and is not \
                 moved; NVSHARE_PLAIN=none, or a list of sizes, overrides this"
            ));
        }
        call.is_some()
    })
}

/// Notes that a handle was refused for memory that is not plain. Returns whether it is the first refusal.
pub(crate) fn note_refusal() -> bool {
    !REFUSED.swap(true, Ordering::Relaxed)
}

/// Notes that a handle was refused which the program would have without the library.
pub(crate) fn note_lost_handle() {
    HAS_LOST_HANDLE.store(true, Ordering::Relaxed);
}

/// Whether such a handle was refused.
pub(crate) fn has_lost_handle() -> bool {
    HAS_LOST_HANDLE.load(Ordering::Relaxed)
}

/// The same for memory of a pool, where the library maps other memory.
pub(crate) fn note_refusal_of_pools() -> bool {
    !REFUSED_OF_POOLS.swap(true, Ordering::Relaxed)
}
