//! The fence between a thread's mark and its look at the gate, at the closer's expense.
//!
//! A thread marks itself and looks at the gate with every launch, and the gate closes once in a turn. So the closer has the
//! kernel run a full fence on every thread of the process (`membarrier`, Linux 4.14 and newer). The thread only keeps the
//! compiler from changing the order. Either the thread's mark was there before that fence, and the closer sees it. Or the
//! thread looks after the fence, and sees the gate closed. If the kernel has no such call, or a sandbox forbids it, each thread
//! runs a fence of its own.

use super::atomics::{self, AtomicBool, Ordering};

/// The side that runs the fence.
#[derive(Debug)]
pub(super) struct Fence {
    /// The closer runs it for all threads.
    pub(super) for_all: AtomicBool,
}

impl Fence {
    /// Asks the kernel whether it runs fences for all threads. Before that, and if it does not, each thread runs its own.
    pub(super) fn prepare(&self) {
        if atomics::can_fence_all_threads() {
            self.for_all.store(true, Ordering::SeqCst);
        }
    }

    /// Between a thread's mark and its look.
    #[inline(always)]
    pub(super) fn after_mark(&self) {
        if self.for_all.load(Ordering::Relaxed) {
            atomics::compiler_fence(Ordering::SeqCst);
        } else {
            atomics::fence(Ordering::SeqCst);
        }
    }

    /// Between the closer's change of the gate and its look at the marks.
    pub(super) fn before_look(&self) {
        if self.for_all.load(Ordering::SeqCst) && !atomics::fence_all_threads() {
            // The program has entered a sandbox since.
            self.for_all.store(false, Ordering::SeqCst);
            atomics::outwait_stores();
        }
        atomics::fence(Ordering::SeqCst);
    }
}
