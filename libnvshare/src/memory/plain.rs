//! Device memory that has to stay plain, because other processes (CUDA IPC), NICs or the stream's memory operations use it.
//!
//! None of them can use managed memory. So these get plain memory, which is not moved: programs whose [executable] shows that
//! they need it, sizes that `NVSHARE_PLAIN` names, and all later allocations of a program that was refused a handle.

mod executable;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::process::{config, log};

/// Whether a handle was refused. Allocations are plain from then on.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// Whether new device memory of this size has to be plain.
pub(crate) fn needs_plain(bytes: u64) -> bool {
    REFUSED.load(Ordering::Relaxed)
        || config::get().is_ok_and(|config| match &config.plain {
            Some(sizes) => sizes.iter().any(|size| size.contains(&bytes)),
            None => is_seen(),
        })
}

/// Whether device memory of any size has to be plain.
pub(crate) fn needs_some_plain() -> bool {
    config::get().is_ok_and(|config| match &config.plain {
        Some(sizes) => !sizes.is_empty(),
        None => is_seen(),
    })
}

/// Whether the program's executable shows that it needs plain memory.
fn is_seen() -> bool {
    static SEEN: OnceLock<bool> = OnceLock::new();
    *SEEN.get_or_init(|| {
        let call = executable::needs_plain();
        if let Some(call) = &call {
            log::info(format_args!(
                "the program calls {call}, which refuses managed memory: its device memory stays plain and is not \
                 moved; NVSHARE_PLAIN=none, or a list of sizes, overrides this"
            ));
        }
        call.is_some()
    })
}

/// Notes that a handle was refused for managed memory. Returns whether it is the first one.
pub(crate) fn was_refused() -> bool {
    !REFUSED.swap(true, Ordering::Relaxed)
}
