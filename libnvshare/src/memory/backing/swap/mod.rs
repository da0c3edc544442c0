//! Moves memory that [the library maps](crate::memory::mapping) to the host and back, and ends it.

mod free;
mod moves;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Backing, Restored};
use crate::memory::allocations;
use crate::memory::devices::Device;
use crate::memory::mapping::host_pool;
use crate::work::contexts::Context;
pub(crate) use free::{free, is_waiting, sweep};

/// Memory that the library maps, as a [`Backing`].
#[derive(Debug)]
pub(super) struct Swap;

impl Backing for Swap {
    fn evict(&self, device: &'static Device, wanted: u64, report: &mut dyn FnMut(u64)) -> u64 {
        moves::evict(device, wanted, report)
    }

    fn restore(&self, device: &'static Device, cancelled: &dyn Fn() -> bool) -> Restored {
        moves::restore(device, cancelled)
    }
}

/// Bytes of memory that the library maps, for each context that has any.
fn by_context() -> Vec<(Arc<Context>, u64)> {
    let mut sums: Vec<(Arc<Context>, u64)> = Vec::new();
    allocations::each_mapped(|allocation| {
        match sums.iter_mut().find(|(context, _)| Arc::ptr_eq(context, &allocation.context)) {
            Some((_, sum)) => *sum += allocation.size,
            None => sums.push((Arc::clone(&allocation.context), allocation.size)),
        }
    });
    sums
}

/// Memory will have to leave the card: prepares the host's memory for it in the background. Called by a thread of the library.
pub(crate) fn foresee_eviction() {
    static GROWING: AtomicBool = AtomicBool::new(false);
    let wanted = by_context();
    if wanted.is_empty() || GROWING.swap(true, Ordering::SeqCst) {
        return;
    }
    let work = move || {
        for (context, bytes) in wanted {
            host_pool::grow_ahead(&context, bytes);
        }
        GROWING.store(false, Ordering::SeqCst);
    };
    if std::thread::Builder::new().name("nvshare-pool".to_owned()).spawn(work).is_err() {
        GROWING.store(false, Ordering::SeqCst);
    }
}
