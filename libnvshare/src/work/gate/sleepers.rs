//! The number of threads that sleep until something opens.
//!
//! A thread may leave its sleep by a jump (`siglongjmp`), and nothing says so. So each counts until the next opening at most. The threads
//! that sleep look then, and one that sleeps on counts anew.

use std::sync::atomic::{AtomicU64, Ordering};

/// The number of threads that count, in the lower half, and of openings.
#[derive(Debug)]
pub(super) struct Sleepers(AtomicU64);

/// The number of openings, in the upper half of the word.
fn openings(word: u64) -> u32 {
    (word >> u32::BITS) as u32
}

impl Sleepers {
    pub(super) const fn none() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Whether any thread counts.
    pub(super) fn are_any(&self) -> bool {
        self.0.load(Ordering::SeqCst) as u32 > 0
    }

    /// Notes an opening: nobody counts any more. The caller holds the lock under which the threads look, and wakes them then.
    pub(super) fn forget(&self) {
        let next = |word: u64| Some(u64::from(openings(word).wrapping_add(1)) << u32::BITS);
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
    }
}

/// A thread that sleeps. It does not count any more when this is dropped, also where the thread is cancelled.
#[derive(Debug)]
pub(super) struct Sleeper {
    all: &'static Sleepers,
    /// The number of openings before it was counted.
    counted: Option<u32>,
}

impl Sleeper {
    /// A thread that does not count yet.
    pub(super) fn of(all: &'static Sleepers) -> Self {
        Self { all, counted: None }
    }

    /// Counts the thread. Returns whether it did not count yet, or not any more.
    pub(super) fn count(&mut self) -> bool {
        if self.counted == Some(openings(self.all.0.load(Ordering::SeqCst))) {
            return false;
        }
        self.counted = Some(openings(self.all.0.fetch_add(1, Ordering::SeqCst)));
        true
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let counted = self.counted;
        let less = |word: u64| word.checked_sub(1).filter(|_| counted == Some(openings(word)));
        let _ = self.all.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_has_jumped_out_of_its_sleep_counts_until_the_next_opening() {
        static ALL: Sleepers = Sleepers::none();
        let (mut stays, mut is_late, mut jumps) = (Sleeper::of(&ALL), Sleeper::of(&ALL), Sleeper::of(&ALL));
        assert!(!ALL.are_any());
        assert!(stays.count() && is_late.count() && jumps.count());
        assert!(ALL.are_any() && !stays.count());
        std::mem::forget(jumps);
        ALL.forget();
        assert!(!ALL.are_any());
        // One sleeps on, and another one wakes late.
        assert!(stays.count() && !stays.count());
        drop(is_late);
        assert!(ALL.are_any());
        drop(stays);
        drop(Sleeper::of(&ALL));
        assert!(!ALL.are_any());
    }
}
