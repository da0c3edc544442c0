//! Frees memory that work may still use: the driver's own free waits for that work, an unmapping does not.
//!
//! While a thread waits for a place in a full queue, the driver answers nothing about its context (measured). So a call of
//! the program asks about work only in contexts for which the driver's own call would wait. The library's threads ask about
//! the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::driver::types::CUresult;
use crate::memory::allocations::{self, Allocation};
use crate::memory::backing::{Freed, Work};
use crate::memory::devices::{self, Device};
use crate::memory::mapping::Mapped;
use crate::memory::slabs;
use crate::process::lock::Counted;
use crate::process::{lifecycle, threads};
use crate::work::captures;
use crate::work::contexts::Context;
use crate::work::drain::{Drain, SharedDrain};

/// An allocation whose work is not known to be complete, or that is looked at.
#[derive(Debug)]
struct Waiting {
    allocation: Arc<Allocation>,
    /// The work before the free; none: it is complete.
    before: Option<SharedDrain>,
    /// Whether a thread ends it.
    is_ending: AtomicBool,
}

impl Waiting {
    /// Whether the memory can end. Only contexts that may be `asked` are looked at, and only by one thread.
    fn is_over(&self, asked: &dyn Fn(&Context) -> bool) -> bool {
        let is_complete = || self.before.as_ref().is_none_or(|before| before.poll_in(asked));
        (is_away(&self.allocation) || is_complete()) && !is_guessed(&self.allocation)
    }

    /// Takes the allocation on, to end it. `None`: another thread ends it.
    fn take(self: &Arc<Self>) -> Option<Taken<'_>> {
        (!self.is_ending.swap(true, Ordering::SeqCst)).then_some(Taken(self))
    }
}

/// An allocation that a thread ends. It is among those that wait until it is out of the account: another allocation that is refused
/// meanwhile waits for it.
struct Taken<'a>(&'a Arc<Waiting>);

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        WAITING.change(|all| all.retain(|waiting| !Arc::ptr_eq(waiting, self.0)));
    }
}

static WAITING: Counted<Vec<Arc<Waiting>>> = Counted::new(Vec::new(), Vec::len);

/// Beside a capture, a look at all work may never come to an end.
const PATIENCE_BESIDE_CAPTURE: Duration = Duration::from_millis(50);
/// A look at memory that stays is behind the program's work, which may wait for the thread that frees.
const PATIENCE_WITH_LOOK: Duration = Duration::from_millis(50);

/// Ends the chunks of an allocation whose work is complete.
pub(super) fn end_chunks(allocation: &Allocation) {
    if let Some(mapped) = &allocation.mapped {
        mapped.end(allocation.base);
    }
}

/// Leaves an allocation that is off the list to [`finish`].
fn leave(allocation: &Arc<Allocation>, before: Option<Drain>) {
    let (allocation, before) = (Arc::clone(allocation), before.map(SharedDrain::new));
    let is_ending = AtomicBool::new(false);
    WAITING.change(|all| all.push(Arc::new(Waiting { allocation, before, is_ending })));
}

fn is_guessed(allocation: &Allocation) -> bool {
    allocation.mapped.as_ref().is_some_and(Mapped::is_guessed) && !lifecycle::is_exiting()
}

/// Whether a part of an allocation, or of its slab, is not on the card, so that no work uses it. A look at the work might not
/// end beside a capture until the program goes on, which waits until all its memory is back.
fn is_away(allocation: &Allocation) -> bool {
    let mapped = match &allocation.part {
        Some(part) => &part.slab.mapped,
        None => &allocation.mapped,
    };
    mapped.as_ref().is_some_and(Mapped::is_away)
}

/// Whether somebody looks at an allocation that leaves. A call of the program that frees it on its way, its work complete, does not wait
/// for that. All others wait a moment.
fn is_looked_at(allocation: &Allocation, work: Work) -> bool {
    if work == Work::MayRun || threads::is_own() { stays_guessed(allocation) } else { is_guessed(allocation) }
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
fn end(allocation: &Allocation, work: Work) -> Option<Arc<Allocation>> {
    end_chunks(allocation);
    let slab = slabs::give_back(allocation, allocation.part.as_ref()?)?;
    // If its context ends at the same time, it ends there.
    if !allocations::remove_hidden(&slab) {
        return None;
    }
    slab.set_leaving(true);
    if is_looked_at(&slab, work) {
        leave(&slab, None);
        return None;
    }
    end_chunks(&slab);
    Some(slab)
}

/// Frees an allocation that is off the list, once the work before the free is complete and no look at it is under way. If that
/// takes too long, [`finish`] frees it. `call` is the driver's own free.
pub(super) fn free(allocation: &Arc<Allocation>, work: Work, call: &dyn Fn() -> CUresult) -> Freed {
    if work == Work::MayRun {
        let begin = Instant::now();
        let mut before = Drain::of(allocation.device);
        while !is_away(allocation) && before.poll() > 0 && !lifecycle::is_exiting() {
            if before.is_forbidden() {
                // The function of the host would wait for itself, and the driver refuses the call.
                return Freed::Not(call());
            }
            if captures::open() > 0 && begin.elapsed() >= PATIENCE_BESIDE_CAPTURE {
                leave(allocation, Some(before));
                return Freed::Later;
            }
            if begin.elapsed() >= threads::SOON {
                threads::pause();
            }
        }
    }
    if is_looked_at(allocation, work) {
        leave(allocation, None);
        return Freed::Later;
    }
    end(allocation, work).map_or(Freed::Now, Freed::WithSlab)
}

/// Whether allocations wait to be freed.
pub(super) fn is_waiting() -> bool {
    WAITING.count() > 0 && !lifecycle::is_forked()
}

/// Frees waiting allocations whose work is complete by now, as contexts say that may be `asked`. `ended` is told of them, and of slabs that have
/// ended with them: they are still in the account.
pub(super) fn finish(asked: &dyn Fn(&Context) -> bool, ended: &mut dyn FnMut(&Arc<Allocation>)) {
    if !is_waiting() {
        return;
    }
    // The driver is asked without the lock: it may not answer before another thread of the program goes on.
    let all = WAITING.read(Vec::clone);
    for over in all.iter().filter(|waiting| waiting.is_over(asked)) {
        // An eviction that finds it charged, and not on the list, waits.
        let _under_way = devices::get(over.allocation.device).map(Device::begin_change);
        if let Some(_taken) = over.take() {
            let slab = end(&over.allocation, Work::Complete);
            [Some(&over.allocation), slab.as_ref()].into_iter().flatten().for_each(&mut *ended);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::types::CUcontext;
    use crate::memory::allocations::Kind;
    use crate::work::contexts;

    #[test]
    fn memory_that_ends_late_waits_until_it_is_out_of_the_account() {
        let context = contexts::learn(CUcontext(0x61_0000 as *mut _), 61);
        let allocation = Arc::new(Allocation::new(0x61_1000, 8, 61, context, Kind::Mapped, 0));
        leave(&allocation, None);
        let mut ended = 0;
        finish(&|_| true, &mut |gone| {
            assert!(Arc::ptr_eq(gone, &allocation));
            assert!(is_waiting(), "an allocation that is refused now waits");
            // Another thread finds it, and leaves it alone.
            finish(&|_| true, &mut |_| panic!("it ends once"));
            ended += 1;
        });
        assert_eq!((ended, is_waiting()), (1, false));
    }
}
