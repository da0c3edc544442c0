//! Stream-ordered frees of managed memory, for drivers that do not support them. An event behind the stream's work says when
//! the memory can be freed; a later call of the library then frees it. No thread waits, since the stream may wait for the
//! thread that frees.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::backing::Work;
use super::free::free as free_now;
use crate::driver::types::{CUdeviceptr, CUresult, CUstream};
use crate::driver::{self, functions};
use crate::process::lifecycle;
use crate::process::lock::lock;
use crate::work::captures;
use crate::work::contexts::{self, Context};
use crate::work::event::Event;
use crate::work::stream_key::StreamKey;

/// Memory that waits for its event.
#[derive(Debug)]
struct Waiting {
    base: CUdeviceptr,
    context: Arc<Context>,
    behind: Event,
}

static WAITING: Mutex<Vec<Waiting>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Frees memory once the work on a stream is complete. Called for the program's own call with that stream.
pub(crate) fn free(base: CUdeviceptr, context: &Arc<Context>, stream: CUstream) -> CUresult {
    let behind = behind(stream);
    let mut waiting = lock(&WAITING);
    if waiting.iter().any(|waiting| waiting.base == base) {
        return CUresult::INVALID_VALUE;
    }
    match behind {
        Ok(behind) => {
            waiting.push(Waiting { base, context: Arc::clone(context), behind });
            COUNT.store(waiting.len(), Ordering::Relaxed);
            CUresult::SUCCESS
        }
        Err(error) => error,
    }
}

/// An event behind the work on a stream. For a legacy stream it is an event behind the whole context, since an event on the
/// legacy stream would delay the context's blocking streams. Only on drivers before 12.4, and beside a capture, is the event
/// recorded on the legacy stream.
fn behind(stream: CUstream) -> Result<Event, CUresult> {
    let of_stream = driver::context_of(stream)?;
    let context = contexts::find(of_stream).ok_or(CUresult::INVALID_CONTEXT)?;
    let _relaxed = driver::Relaxed::begin();
    driver::with_current(of_stream, || {
        let quiet = (StreamKey::new(stream, false) == StreamKey::LEGACY && driver::can_record_context())
            .then(|| captures::hold_off(&context))
            .flatten();
        if quiet.is_some() { Event::behind_context(&context) } else { Event::behind_stream(&context, stream) }
    })
}

/// Whether the program has freed this already.
pub(crate) fn is_freed(base: CUdeviceptr) -> bool {
    COUNT.load(Ordering::Relaxed) > 0 && lock(&WAITING).iter().any(|waiting| waiting.base == base)
}

/// Frees the memory whose streams have reached the free.
pub(crate) fn sweep() {
    if COUNT.load(Ordering::Relaxed) == 0 || lifecycle::is_forked() {
        return;
    }
    let mut waiting = lock(&WAITING);
    let (done, left): (Vec<_>, Vec<_>) =
        std::mem::take(&mut *waiting).into_iter().partition(|waiting| waiting.behind.is_complete());
    *waiting = left;
    COUNT.store(waiting.len(), Ordering::Relaxed);
    drop(waiting);
    for Waiting { base, context, .. } in done {
        let Some(free) = functions::cuMemFree_v2.get() else { continue };
        // SAFETY: an allocation that the program has given back; its context lives through the call.
        let _ = context.with(|| free_now(base, Work::Complete, || unsafe { free(base) }).ok());
    }
}

/// Removes the memory of a context that has ended.
pub(crate) fn forget_context(context: &Arc<Context>) {
    let mut waiting = lock(&WAITING);
    waiting.retain(|waiting| !Arc::ptr_eq(&waiting.context, context));
    COUNT.store(waiting.len(), Ordering::Relaxed);
}
