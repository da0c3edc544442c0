//! The state of the deferred frees: how far each is, the thread that frees memory, and the allocations that wait.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::driver::types::CUdevice;
use crate::memory::allocations::Allocation;
use crate::process::lock::Counted;
use crate::work::contexts::Context;
use crate::work::event::Event;

/// Memory that the program has freed in stream order, and that the driver still has.
#[derive(Debug)]
pub(super) struct DeferredFree {
    pub(super) allocation: Arc<Allocation>,
    pub(super) stage: Stage,
}

/// How far a deferred free is. Each goes through the stages in this order.
#[derive(Debug)]
pub(super) enum Stage {
    /// The work before the free may not be complete.
    Behind(Arc<Event>),
    /// The work is complete, so the memory can be freed.
    Due,
    /// The memory is being freed.
    BeingFreed(By),
}

/// The thread that frees memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// A thread of the program, or the mover.
    Caller,
    /// The thread that frees memory while the device has nothing to do.
    OwnThread,
}

impl DeferredFree {
    pub(super) fn is_in(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.allocation.context, context)
    }

    pub(super) fn is_due(&self) -> bool {
        matches!(self.stage, Stage::Due)
    }
}

/// See [`DeferredFrees`].
#[derive(Debug)]
struct State {
    frees: Vec<DeferredFree>,
    /// Whether the thread runs that frees memory.
    has_thread: bool,
    /// How often that thread has asked which work is complete.
    looks: usize,
    /// The number of allocations that wait for such memory.
    waiting: usize,
    /// The number of those that do not wait for an idle device any more.
    urgent: usize,
}

/// All deferred frees of the process.
///
/// Any thread may call any method: all state is behind one lock, which a method holds for its own steps alone. No method calls the
/// driver under the lock, as the driver may wait for a thread that wants the lock. For that reason, none drops the last
/// reference to an event there either.
#[derive(Debug)]
pub(super) struct DeferredFrees(Counted<State>);

pub(super) static DEFERRED: DeferredFrees = DeferredFrees(Counted::new(
    State { frees: Vec::new(), has_thread: false, looks: 0, waiting: 0, urgent: 0 },
    |state| state.frees.len(),
));

impl DeferredFrees {
    /// Whether there is none. This takes no lock.
    pub(super) fn is_empty(&self) -> bool {
        self.0.count() == 0
    }

    /// The number of them. This takes no lock.
    pub(super) fn count(&self) -> usize {
        self.0.count()
    }

    /// Whether there is one of this kind.
    pub(super) fn has(&self, which: impl Fn(&DeferredFree) -> bool) -> bool {
        self.0.read(|state| state.frees.iter().any(which))
    }

    /// Bytes of a device that all frees together give back.
    pub(super) fn bytes_on(&self, device: CUdevice) -> u64 {
        let is_on = |free: &&DeferredFree| free.allocation.device == device;
        // Small memory may give its slab back.
        let bytes = |free: &DeferredFree| {
            let part = free.allocation.part.as_ref();
            part.map_or(free.allocation.size, |part| part.asked)
        };
        self.0.read(|state| state.frees.iter().filter(is_on).map(bytes).sum())
    }

    /// Enters memory whose free is behind an event. False: the memory is among them already.
    pub(super) fn add(&self, allocation: &Arc<Allocation>, behind: &Arc<Event>) -> bool {
        self.0.change(|state| {
            let is_new = !state.frees.iter().any(|free| Arc::ptr_eq(&free.allocation, allocation));
            if is_new {
                let stage = Stage::Behind(Arc::clone(behind));
                state.frees.push(DeferredFree { allocation: Arc::clone(allocation), stage });
            }
            is_new
        })
    }

    /// Enters memory that is due.
    #[cfg(test)]
    pub(super) fn add_due(&self, allocation: &Arc<Allocation>) {
        let free = DeferredFree { allocation: Arc::clone(allocation), stage: Stage::Due };
        self.0.change(|state| state.frees.push(free));
    }

    /// The events that frees are behind, in contexts that may be `asked`.
    pub(super) fn events(&self, asked: impl Fn(&Context) -> bool) -> Vec<Arc<Event>> {
        let event_of = |free: &DeferredFree| match &free.stage {
            Stage::Behind(event) if asked(event.context()) => Some(Arc::clone(event)),
            _ => None,
        };
        self.0.read(|state| state.frees.iter().filter_map(event_of).collect())
    }

    /// Frees behind these events are due. Returns whether any free is.
    pub(super) fn complete(&self, events: &[Arc<Event>]) -> bool {
        let reached: BTreeSet<*const Event> = events.iter().map(Arc::as_ptr).collect();
        self.0.change(|state| {
            for free in &mut state.frees {
                if matches!(&free.stage, Stage::Behind(event) if reached.contains(&Arc::as_ptr(event))) {
                    free.stage = Stage::Due;
                }
            }
            state.frees.iter().any(DeferredFree::is_due)
        })
    }

    /// The memory of the first free that is due.
    pub(super) fn first_due(&self) -> Option<Arc<Allocation>> {
        let first = |free: &&DeferredFree| free.is_due();
        self.0.read(|state| state.frees.iter().find(first).map(|free| Arc::clone(&free.allocation)))
    }

    /// Takes on the first free of this kind that is due: the caller frees its memory, and then [removes](Self::remove) it.
    pub(super) fn begin_due(&self, which: impl Fn(&DeferredFree) -> bool, by: By) -> Option<Arc<Allocation>> {
        self.0.change(|state| {
            let free = state.frees.iter_mut().find(|free| free.is_due() && which(free))?;
            free.stage = Stage::BeingFreed(by);
            Some(Arc::clone(&free.allocation))
        })
    }

    /// Memory that was [taken on](Self::begin_due) is not freed yet: it is due as before, behind the others.
    pub(super) fn put_off(&self, allocation: &Arc<Allocation>) {
        self.0.change(|state| {
            let is_it = |free: &DeferredFree| Arc::ptr_eq(&free.allocation, allocation);
            if let Some(at) = state.frees.iter().position(is_it) {
                let free = state.frees.remove(at);
                state.frees.push(DeferredFree { stage: Stage::Due, ..free });
            }
        });
    }

    /// Removes the first free of this kind that is due: the memory belongs to the caller.
    pub(super) fn take_due(&self, which: impl Fn(&DeferredFree) -> bool) -> Option<Arc<Allocation>> {
        self.0.change(|state| {
            let at = state.frees.iter().position(|free| free.is_due() && which(free))?;
            Some(state.frees.swap_remove(at).allocation)
        })
    }

    /// Removes memory that has been freed.
    pub(super) fn remove(&self, allocation: &Arc<Allocation>) {
        self.0.change(|state| state.frees.retain(|free| !Arc::ptr_eq(&free.allocation, allocation)));
    }

    /// Removes the memory of a context. The caller drops it, and with it the events, which calls the driver.
    pub(super) fn remove_context(&self, context: &Arc<Context>) -> Vec<DeferredFree> {
        self.0.change(|state| {
            let (gone, left) =
                std::mem::take(&mut state.frees).into_iter().partition(|free| free.is_in(context));
            state.frees = left;
            gone
        })
    }

    /// Notes that the thread is about to begin. False: it runs already.
    pub(super) fn begin_thread(&self) -> bool {
        self.0.change(|state| !std::mem::replace(&mut state.has_thread, true))
    }

    /// Notes that the thread has ended, or could not begin.
    pub(super) fn end_thread(&self) {
        self.0.change(|state| state.has_thread = false);
    }

    /// Notes that the thread has asked which work is complete.
    pub(super) fn note_look(&self) {
        self.0.change(|state| state.looks = state.looks.wrapping_add(1));
    }

    /// How often the thread has asked which work is complete.
    pub(super) fn looks(&self) -> usize {
        self.0.read(|state| state.looks)
    }

    /// Notes that an allocation begins to wait.
    pub(super) fn begin_waiting(&self) {
        self.0.change(|state| state.waiting += 1);
    }

    /// Notes that a waiting allocation has become urgent.
    pub(super) fn press(&self) {
        self.0.change(|state| state.urgent += 1);
    }

    /// Notes that an allocation waits no longer, which was urgent or not.
    pub(super) fn end_waiting(&self, was_urgent: bool) {
        self.0.change(|state| {
            state.waiting -= 1;
            state.urgent -= usize::from(was_urgent);
        });
    }

    /// Whether an allocation waits.
    pub(super) fn is_awaited(&self) -> bool {
        self.0.read(|state| state.waiting > 0)
    }

    /// Whether an allocation waits that is urgent.
    pub(super) fn is_urgent(&self) -> bool {
        self.0.read(|state| state.urgent > 0)
    }
}
