//! The sums of a quota page, which processes and the scheduler change at the same time.
//!
//! The loom tests (`libnvshare/tests/loom`) put atomics of their own in the place of `super::atomics`.

use super::atomics::{AtomicU64, Ordering};

/// The place of a GPU's name among those that are known, which may be new; `None` when there are too many.
pub(super) fn column(gpus: &[AtomicU64], name: u64) -> Option<usize> {
    gpus.iter().position(|column| {
        column
            .compare_exchange(0, name, Ordering::SeqCst, Ordering::SeqCst)
            .map_or_else(|known| known == name, |_| true)
    })
}

/// Adds to what a process has (`own`) and all of its tenant have (`used`), unless the tenant would have more than `limit`
/// then.
///
/// # Errors
/// What the tenant has, when it would; nothing is changed.
pub(super) fn charge(used: &AtomicU64, own: &AtomicU64, bytes: u64, limit: u64) -> Result<(), u64> {
    used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |used| {
        used.checked_add(bytes).filter(|&sum| sum <= limit)
    })?;
    // In this order: a process that is killed in between leaves too much in the sum, never too little.
    own.fetch_add(bytes, Ordering::SeqCst);
    Ok(())
}

/// Takes from what a process has.
pub(super) fn discharge(used: &AtomicU64, own: &AtomicU64, bytes: u64) {
    // What was taken back already is not taken from the others.
    take(used, take(own, bytes));
}

/// A process is gone: what it had is free.
pub(super) fn reclaim(used: &AtomicU64, own: &AtomicU64) {
    take(used, own.swap(0, Ordering::SeqCst));
}

/// Takes up to this much; how much.
fn take(from: &AtomicU64, bytes: u64) -> u64 {
    let less = |value: u64| Some(value.saturating_sub(bytes));
    let before = from.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).unwrap_or_else(|same| same);
    before.min(bytes)
}
