//! The part of a slot that the closer of the gate reads: which thread owns the slot, and whether that thread is inside.

use super::atomics::{AtomicI32, AtomicU32, Ordering};
use super::fence::Fence;

#[derive(Debug)]
pub(super) struct Marks {
    /// 1: between step in and step out.
    pub(super) inside: AtomicU32,
    /// The thread that owns the slot; 0: none.
    pub(super) owner: AtomicI32,
}

impl Marks {
    /// Takes the slot for a thread. False: another thread owns it.
    pub(super) fn take(&self, thread: i32) -> bool {
        self.owner.compare_exchange(0, thread, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Gives the slot back, by the thread that had it and stepped out.
    pub(super) fn give_back(&self) {
        self.owner.store(0, Ordering::Release);
    }

    #[inline(always)]
    pub(super) fn is_outside(&self) -> bool {
        self.inside.load(Ordering::Relaxed) == 0
    }

    /// Marks the thread as inside, before its look at the gate.
    #[inline(always)]
    pub(super) fn step_in(&self, fence: &Fence) {
        self.inside.store(1, Ordering::Relaxed);
        fence.after_mark();
    }

    #[inline(always)]
    pub(super) fn step_out(&self) {
        self.inside.store(0, Ordering::Release);
    }

    /// Whether nobody is inside by this slot: not marked, or marked by a thread that is gone.
    pub(super) fn is_vacant(&self, is_gone: impl Fn(i32) -> bool) -> bool {
        if self.inside.load(Ordering::SeqCst) == 0 {
            return true;
        }
        self.has_no_owner(is_gone)
    }

    /// Whether the slot belongs to no thread, or to one that is gone.
    pub(super) fn has_no_owner(&self, is_gone: impl Fn(i32) -> bool) -> bool {
        let owner = self.owner.load(Ordering::Acquire);
        owner == 0 || is_gone(owner)
    }
}
