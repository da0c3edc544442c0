//! The sums of a quota page, which processes and the scheduler change at the same time.
//!
//! The loom tests (`libnvshare/tests/loom`) put atomics of their own in the place of `super::atomics`.

use super::atomics::{AtomicU64, Ordering};

/// The index of a GPU's name in the list. The first call enters the name; `None` when the list is full.
pub(super) fn column(gpus: &[AtomicU64], name: u64) -> Option<usize> {
    gpus.iter().position(|column| {
        column
            .compare_exchange(0, name, Ordering::SeqCst, Ordering::SeqCst)
            .map_or_else(|known| known == name, |_| true)
    })
}

/// Adds bytes to the sum of a process (`own`) and of its tenant (`used`), unless the tenant's would exceed `limit`.
///
/// # Errors
/// The tenant's sum, if it would exceed the limit; nothing is changed.
pub(super) fn charge(used: &AtomicU64, own: &AtomicU64, bytes: u64, limit: u64) -> Result<(), u64> {
    used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |used| {
        used.checked_add(bytes).filter(|&sum| sum <= limit)
    })?;
    // In this order: a process that is killed in between leaves too much in the sum, never too little.
    own.fetch_add(bytes, Ordering::SeqCst);
    Ok(())
}

/// Takes bytes from the sums of a process and of its tenant.
pub(super) fn discharge(used: &AtomicU64, own: &AtomicU64, bytes: u64) {
    // Bytes that were taken back already are not taken from the tenant's other processes.
    take(used, take(own, bytes));
}

/// A process is gone: its bytes are free.
pub(super) fn reclaim(used: &AtomicU64, own: &AtomicU64) {
    take(used, own.swap(0, Ordering::SeqCst));
}

/// Takes up to `bytes`; returns how many it took.
fn take(from: &AtomicU64, bytes: u64) -> u64 {
    let less = |value: u64| Some(value.saturating_sub(bytes));
    let before = from.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).unwrap_or_else(|same| same);
    before.min(bytes)
}
