//! Memory that others are to reach: other processes by CUDA IPC, NICs, the stream's own memory operations.
//!
//! Managed memory can do none of this, so such programs get the driver's own memory, which is not moved: those whose
//! [executable] shows that they need it, sizes that `NVSHARE_PLAIN` names, and everything from the moment on that a
//! handle was refused.

mod executable;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::process::{config, log};

/// A handle was refused: from now on, memory is handed out that has one.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// Whether new device memory of this size has to be the driver's own.
pub(crate) fn needs_plain(bytes: u64) -> bool {
    REFUSED.load(Ordering::Relaxed)
        || config::get().is_ok_and(|config| match &config.plain {
            Some(sizes) => sizes.iter().any(|size| size.contains(&bytes)),
            None => is_seen(),
        })
}

/// Whether any device memory has to be the driver's own.
pub(crate) fn needs_some_plain() -> bool {
    config::get().is_ok_and(|config| match &config.plain {
        Some(sizes) => !sizes.is_empty(),
        None => is_seen(),
    })
}

/// Whether the program's executable shows that it needs the driver's own memory.
fn is_seen() -> bool {
    static SEEN: OnceLock<bool> = OnceLock::new();
    *SEEN.get_or_init(|| {
        let call = executable::needs_plain();
        if let Some(call) = &call {
            log::info(format_args!(
                "the program calls {call}, which refuses managed memory: its memory stays the driver's own and is \
                 not moved; NVSHARE_PLAIN=none, or sizes, overrules this"
            ));
        }
        call.is_some()
    })
}

/// A handle was refused for memory that is moved. True: it is the first one.
pub(crate) fn was_refused() -> bool {
    !REFUSED.swap(true, Ordering::Relaxed)
}
