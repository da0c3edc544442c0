//! The atomics of the handshake between a thread that steps in and a closer, and the kernel's fence on all threads. The loom
//! tests (`libnvshare/tests/loom`) put their own in the place of this module.

use std::time::Duration;

use crate::process::threads;

pub(super) use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering, compiler_fence, fence};

fn membarrier(command: i32) -> bool {
    // SAFETY: the call reads nothing but its arguments.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Asks the kernel for its fences when the library is loaded. In a process with one thread that takes a microsecond. Later the kernel
/// waits until all its processors have switched. That takes 5 to 28 ms (measured on an H200's host), and the first allocation would
/// wait for it.
// SAFETY: the loader calls what this section points to, before `main`. The function needs nothing that is set up later.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = {
    extern "C" fn ask() {
        can_fence_all_threads();
    }
    ask
};

/// Whether the kernel will run fences on all threads of this process.
pub(super) fn can_fence_all_threads() -> bool {
    membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)
}

/// Has the kernel run a full fence on every thread of this process. False: it did not.
pub(super) fn fence_all_threads() -> bool {
    membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)
}

/// Waits until the stores of other threads are visible to all.
pub(super) fn outwait_stores() {
    /// No processor keeps a store to itself for that long.
    const LONG: Duration = Duration::from_millis(1);
    threads::sleep(LONG);
}
