//! Frees memory that work may still use: the driver's own free waits for that work, an unmapping does not.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::memory::allocations::Allocation;
use crate::process::lock::lock;
use crate::process::{lifecycle, threads};
use crate::work::captures;
use crate::work::drain::Drain;

/// An allocation whose work is not known to be complete.
#[derive(Debug)]
struct Waiting {
    allocation: Arc<Allocation>,
    before: Drain,
}

static WAITING: Mutex<Vec<Waiting>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Beside a capture, a look at all work may never come to an end.
const PATIENCE_BESIDE_CAPTURE: Duration = Duration::from_millis(50);

fn end(allocation: &Allocation) {
    if let Some(mapped) = &allocation.mapped {
        mapped.end(allocation.base, &allocation.context);
    }
}

/// Frees an allocation that is off the list. If it `waits`, the work before it has to be complete first. `None`:
/// [`sweep`] frees the allocation later.
pub(crate) fn free(allocation: Arc<Allocation>, waits: bool) -> Option<Arc<Allocation>> {
    if waits {
        let begin = Instant::now();
        let mut before = Drain::of(allocation.device);
        while before.poll() > 0 && !lifecycle::is_exiting() {
            if captures::open() > 0 && begin.elapsed() >= PATIENCE_BESIDE_CAPTURE {
                let mut waiting = lock(&WAITING);
                waiting.push(Waiting { allocation, before });
                COUNT.store(waiting.len(), Ordering::Relaxed);
                return None;
            }
            threads::pause();
        }
    }
    end(&allocation);
    Some(allocation)
}

/// Whether allocations wait to be freed.
pub(crate) fn is_waiting() -> bool {
    COUNT.load(Ordering::Relaxed) > 0 && !lifecycle::is_forked()
}

/// Frees waiting allocations whose work is complete by now. Returns them: they are still in the account.
pub(crate) fn sweep() -> Vec<Arc<Allocation>> {
    if !is_waiting() {
        return Vec::new();
    }
    let mut waiting = lock(&WAITING);
    let mut done = Vec::new();
    waiting.retain_mut(|waiting| {
        let is_done = waiting.before.poll() == 0;
        if is_done {
            done.push(Arc::clone(&waiting.allocation));
        }
        !is_done
    });
    COUNT.store(waiting.len(), Ordering::Relaxed);
    drop(waiting);
    done.iter().for_each(|allocation| end(allocation));
    done
}
