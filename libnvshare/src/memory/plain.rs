//! Device memory that has to stay plain, because other processes (CUDA IPC), NICs or the stream's memory operations use it.
//!
//! None of them can use managed memory. So some memory is plain and does not move: that of programs whose [executable] shows the
//! need, and sizes that `NVSHARE_PLAIN` names. After a program was refused a handle, all its allocations are plain. Memory that
//! the library maps needs no such care with CUDA IPC: the library [shares](super::sharing) it by itself.

mod executable;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use nvshare_proto::MemoryMode;

use crate::process::{config, log};

/// Whether a handle was refused. Allocations are plain from then on.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// Whether new device memory of this size has to be plain.
pub(crate) fn needs_plain(bytes: u64) -> bool {
    REFUSED.load(Ordering::Relaxed)
        || config::get().is_ok_and(|config| match &config.plain {
            Some(sizes) => sizes.iter().any(|size| size.contains(&bytes)),
            None => executable_needs_plain(),
        })
}

/// Whether device memory of at least one size has to be plain.
pub(crate) fn needs_some_plain() -> bool {
    config::get().is_ok_and(|config| match &config.plain {
        Some(sizes) => !sizes.is_empty(),
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

/// Notes that a handle was refused for managed memory. Returns whether it is the first refusal.
pub(crate) fn note_refusal() -> bool {
    !REFUSED.swap(true, Ordering::Relaxed)
}
