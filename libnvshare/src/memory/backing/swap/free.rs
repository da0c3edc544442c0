//! Frees memory that work may still use: the driver's own free waits for that work, an unmapping does not.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::memory::allocations::{self, Allocation};
use crate::memory::backing::{Freed, Work};
use crate::memory::mapping::Mapped;
use crate::memory::slabs;
use crate::process::lock::lock;
use crate::process::{lifecycle, threads};
use crate::work::captures;
use crate::work::drain::Drain;

/// An allocation whose work is not known to be complete, or that is looked at.
#[derive(Debug)]
struct Waiting {
    allocation: Arc<Allocation>,
    /// The work before the free; none: it is complete.
    before: Option<Drain>,
}

static WAITING: Mutex<Vec<Waiting>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Beside a capture, a look at all work may never come to an end.
const PATIENCE_BESIDE_CAPTURE: Duration = Duration::from_millis(50);
/// A look at memory that stays is behind the program's work, which may wait for the thread that frees.
const PATIENCE_WITH_LOOK: Duration = Duration::from_millis(50);
/// Where nothing runs, the card says so within microseconds, and a pause takes far longer: a free looks without pauses at first.
const SOON: Duration = Duration::from_micros(50);

/// Ends the chunks of an allocation whose work is complete.
pub(super) fn end_chunks(allocation: &Allocation) {
    if let Some(mapped) = &allocation.mapped {
        mapped.end(allocation.base);
    }
}

/// Leaves an allocation that is off the list to [`sweep`].
fn leave(allocation: &Arc<Allocation>, before: Option<Drain>) {
    let mut waiting = lock(&WAITING);
    waiting.push(Waiting { allocation: Arc::clone(allocation), before });
    COUNT.store(waiting.len(), Ordering::Relaxed);
}

fn is_guessed(allocation: &Allocation) -> bool {
    allocation.mapped.as_ref().is_some_and(Mapped::is_guessed) && !lifecycle::is_exiting()
}

/// Whether a part of an allocation, or of its slab, is not on the card, so that no work uses it. A look at the work might see less:
/// beside a capture, it may come to no end until the program goes on, which waits until all its memory is back.
fn is_away(allocation: &Allocation) -> bool {
    let mapped = match &allocation.part {
        Some(part) => &part.slab.mapped,
        None => &allocation.mapped,
    };
    mapped.as_ref().is_some_and(Mapped::is_away)
}

/// Waits a moment until nobody looks at an allocation that leaves. Returns whether somebody still does.
fn stays_guessed(allocation: &Allocation) -> bool {
    let begin = Instant::now();
    while is_guessed(allocation) {
        if begin.elapsed() >= PATIENCE_WITH_LOOK {
            return true;
        }
        threads::pause();
    }
    false
}

/// Ends an allocation whose work is complete, and that nobody looks at. Returns the slab that has ended with it, and is off
/// the list.
fn end(allocation: &Allocation) -> Option<Arc<Allocation>> {
    end_chunks(allocation);
    let slab = slabs::give_back(allocation, allocation.part.as_ref()?)?;
    // If its context ends at the same time, it ends there.
    if !allocations::remove_hidden(&slab) {
        return None;
    }
    slab.set_leaving(true);
    if stays_guessed(&slab) {
        leave(&slab, None);
        return None;
    }
    end_chunks(&slab);
    Some(slab)
}

/// Frees an allocation that is off the list, once the work before the free is complete and nobody looks at it; or leaves that to [`sweep`].
pub(super) fn free(allocation: &Arc<Allocation>, work: Work) -> Freed {
    if work == Work::MayRun {
        let begin = Instant::now();
        let mut before = Drain::of(allocation.device);
        while !is_away(allocation) && before.poll() > 0 && !lifecycle::is_exiting() {
            if captures::open() > 0 && begin.elapsed() >= PATIENCE_BESIDE_CAPTURE {
                leave(allocation, Some(before));
                return Freed::Later;
            }
            if begin.elapsed() >= SOON {
                threads::pause();
            }
        }
    }
    if stays_guessed(allocation) {
        leave(allocation, None);
        return Freed::Later;
    }
    end(allocation).map_or(Freed::Now, Freed::WithSlab)
}

/// Whether allocations wait to be freed.
pub(super) fn is_waiting() -> bool {
    COUNT.load(Ordering::Relaxed) > 0 && !lifecycle::is_forked()
}

/// Frees waiting allocations whose work is complete by now. Returns them, and slabs that have ended with them: they are still
/// in the account.
pub(super) fn sweep() -> Vec<Arc<Allocation>> {
    if !is_waiting() {
        return Vec::new();
    }
    let mut waiting = lock(&WAITING);
    let mut done = Vec::new();
    waiting.retain_mut(|waiting| {
        let is_complete =
            is_away(&waiting.allocation) || waiting.before.as_mut().is_none_or(|before| before.poll() == 0);
        let is_done = is_complete && !is_guessed(&waiting.allocation);
        if is_done {
            done.push(Arc::clone(&waiting.allocation));
        }
        !is_done
    });
    COUNT.store(waiting.len(), Ordering::Relaxed);
    drop(waiting);
    let slabs: Vec<Arc<Allocation>> = done.iter().filter_map(|allocation| end(allocation)).collect();
    done.extend(slabs);
    done
}
