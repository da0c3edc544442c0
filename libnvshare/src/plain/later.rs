//! Managed memory that is to be freed in the order of a stream, where the driver does not do that: an event behind the
//! stream's work says when, and whoever comes by after that frees it. Nobody waits: what the stream waits for may be the
//! very thread that frees.

use std::mem::ManuallyDrop;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::lock;
use crate::cuda::{CUcontext, CUdeviceptr, CUresult, CUstream};
use crate::driver::{self, Event, Relaxed};
use crate::table::real;
use crate::{gate, memory};

/// Memory that waits for its event.
#[derive(Debug)]
struct Waiting {
    base: CUdeviceptr,
    /// The memory's, and the stream's.
    contexts: [CUcontext; 2],
    /// It is not destroyed after its context.
    behind: ManuallyDrop<Event>,
}

static WAITING: Mutex<Vec<Waiting>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Frees memory once the work on a stream is complete.
pub(super) fn free(base: CUdeviceptr, context: CUcontext, stream: CUstream) -> CUresult {
    let mut waiting = lock(&WAITING);
    if waiting.iter().any(|waiting| waiting.base == base) {
        return CUresult::INVALID_VALUE;
    }
    let of_stream = driver::context_of(stream);
    let behind = of_stream.and_then(|of| driver::in_context(of, || Event::behind(stream)));
    match behind {
        Ok(event) => {
            let contexts = [context, of_stream.unwrap_or(context)];
            waiting.push(Waiting { base, contexts, behind: ManuallyDrop::new(event) });
            COUNT.store(waiting.len(), Ordering::Relaxed);
            CUresult::SUCCESS
        }
        Err(error) => error,
    }
}

/// Whether the program has freed this already.
pub(crate) fn is_freed(base: CUdeviceptr) -> bool {
    COUNT.load(Ordering::Relaxed) > 0 && lock(&WAITING).iter().any(|waiting| waiting.base == base)
}

/// Frees what its stream is done with.
pub(crate) fn sweep() {
    if COUNT.load(Ordering::Relaxed) == 0 || gate::is_forked() {
        return;
    }
    let _relaxed = Relaxed::begin();
    let mut waiting = lock(&WAITING);
    let (done, left): (Vec<_>, Vec<_>) =
        std::mem::take(&mut *waiting).into_iter().partition(|waiting| waiting.behind.is_complete());
    *waiting = left;
    COUNT.store(waiting.len(), Ordering::Relaxed);
    drop(waiting);
    for done in done {
        drop(ManuallyDrop::into_inner(done.behind));
        if let Some(free) = real::cuMemFree_v2.get() {
            // SAFETY: an allocation that the program has given back.
            unsafe { memory::free(free, done.base) };
        }
    }
}

/// A context is gone, its memory and events with it.
pub(crate) fn forget_context(context: CUcontext) {
    let mut waiting = lock(&WAITING);
    waiting.retain(|waiting| !waiting.contexts.contains(&context));
    COUNT.store(waiting.len(), Ordering::Relaxed);
}
