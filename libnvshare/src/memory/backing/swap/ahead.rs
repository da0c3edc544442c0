//! Host memory for an eviction: it is made ahead of the eviction, and given back when it is not needed any more.
//!
//! Memory that leaves the card needs a granule of the host for each granule that is not zero. Which ones are zero is known from
//! the last time they left, or is [looked at](content::guess) while the program still runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::content;
use crate::memory::allocations;
use crate::memory::devices;
use crate::memory::mapping::copies::HostCopy;
use crate::memory::mapping::{Chunk, GRANULE, host_pool};
use crate::process::{lifecycle, threads};
use crate::work::contexts::Context;

/// Longest wait for the kernel that looks for zeros.
const KERNEL_IS_LATE: Duration = Duration::from_secs(2);
/// Granules of a pool that hold no contents: the kernel's list.
const OTHERS: u64 = GRANULE;

/// Memory of the host that may be needed for the memory of a context.
#[derive(Debug)]
struct Needed {
    context: Arc<Context>,
    bytes: u64,
}

/// Bytes of the host that a chunk has, or is expected to need when it leaves.
fn of_chunk(chunk: &Chunk) -> u64 {
    if chunk.host.is_empty() {
        return chunk.physical.map_or(0, |_| chunk.bytes);
    }
    let zeros = chunk.host.iter().filter(|copy| **copy == HostCopy::Zero).count();
    chunk.bytes - zeros as u64 * GRANULE
}

/// The host memory that mapped memory may need, by context.
fn needed_by_context() -> Vec<Needed> {
    let mut all: Vec<Needed> = Vec::new();
    allocations::each_mapped(|allocation| {
        let Some(mapped) = &allocation.mapped else { return };
        let (context, bytes) =
            (allocation.context_to_move_in(), mapped.lock().iter().map(of_chunk).sum::<u64>());
        match all.iter_mut().find(|needed| Arc::ptr_eq(&needed.context, &context)) {
            Some(needed) => needed.bytes += bytes,
            None => all.push(Needed { context, bytes: OTHERS + bytes }),
        }
    });
    all
}

/// The work of the background: nothing, to give back what is not needed, or to make what is needed as well.
const NOTHING: u8 = 0;
const TIDY: u8 = 1;
const PREPARE: u8 = 2;
static WANTED: AtomicU8 = AtomicU8::new(NOTHING);
static WORKS: AtomicBool = AtomicBool::new(false);
/// Bytes of the scheduler's memory that other programs lack.
static OTHERS_LACK: AtomicU64 = AtomicU64::new(0);

/// Prepares the host's memory in the background.
pub(super) fn foresee_eviction() {
    let mut any = false;
    allocations::each_mapped(|_| any = true);
    if any {
        start_background(PREPARE);
    }
}

/// Gives back in the background what the host keeps for nothing, if that may be a segment or more.
pub(super) fn tidy() {
    if host_pool::may_shrink() {
        start_background(TIDY);
    }
}

/// Gives back in the background, to the scheduler, what the host has of memory that is on the card.
pub(super) fn give_way(bytes: u64) {
    OTHERS_LACK.fetch_max(bytes, Ordering::SeqCst);
    start_background(TIDY);
}

fn start_background(wanted: u8) {
    WANTED.fetch_max(wanted, Ordering::SeqCst);
    if lifecycle::is_exiting() || lifecycle::is_forked() || WORKS.swap(true, Ordering::SeqCst) {
        return;
    }
    let begun = threads::spawn("nvshare-pool", || {
        loop {
            let wanted = WANTED.swap(NOTHING, Ordering::SeqCst);
            match OTHERS_LACK.swap(0, Ordering::SeqCst) {
                0 => {}
                bytes => content::give_way(bytes),
            }
            match wanted {
                NOTHING => WORKS.store(false, Ordering::SeqCst),
                TIDY => give_back(),
                _ => prepare(),
            }
            // An order that came in between would never be carried out.
            let more = WANTED.load(Ordering::SeqCst) != NOTHING;
            let goes_on = WORKS.load(Ordering::SeqCst) || more && !WORKS.swap(true, Ordering::SeqCst);
            if !goes_on {
                return;
            }
        }
    });
    if !begun {
        WORKS.store(false, Ordering::SeqCst);
    }
}

fn prepare() {
    let deadline = Instant::now() + KERNEL_IS_LATE;
    for Needed { context, .. } in needed_by_context() {
        while content::is_loading(&context) && Instant::now() < deadline && !lifecycle::is_exiting() {
            threads::sleep(Duration::from_millis(1));
        }
    }
    devices::used().for_each(content::guess);
    for Needed { context, bytes } in needed_by_context() {
        host_pool::grow_ahead(&context, bytes);
    }
    give_back();
}

fn give_back() {
    let needed = needed_by_context();
    host_pool::shrink_all(|context| {
        let of = needed.iter().find(|needed| Arc::ptr_eq(&needed.context, context));
        of.map_or(OTHERS, |needed| needed.bytes)
    });
}
