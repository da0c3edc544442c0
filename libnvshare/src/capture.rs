//! Stream captures: nothing runs on a capturing stream, and nothing of ours may break it.
//!
//! Open captures are counted, so that streams are asked only while there are any. When the first one opens, an
//! event is recorded on each context's legacy stream: once a capture is open on a stream that synchronises with
//! the legacy stream, recording there would break it, and the program cannot submit there either.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cuda::{CUcontext, CUgraph, CUresult, CUstream};
use crate::driver::{self, Event, Relaxed};
use crate::streams::StreamKey;

static OPEN: AtomicUsize = AtomicUsize::new(0);
static LEGACY_EVENTS: Mutex<LegacyEvents> = Mutex::new(LegacyEvents { blocking: 0, events: Vec::new() });
/// Held by who begins a capture, and by who needs that none begins.
static BEGINNING: Mutex<()> = Mutex::new(());

#[derive(Debug)]
struct LegacyEvents {
    /// Open captures on streams that synchronise with the legacy stream.
    blocking: usize,
    events: Vec<(CUcontext, Arc<Event>)>,
}

/// What may be done with a context's legacy stream while captures are open.
#[derive(Debug)]
pub(crate) enum Legacy {
    /// Recording there disturbs none of them.
    Free,
    /// It would; this event stands behind all that was submitted there.
    Recorded(Arc<Event>),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Captures that are open in this process.
pub(crate) fn open() -> usize {
    OPEN.load(Ordering::SeqCst)
}

/// Whether a stream is capturing.
pub(crate) fn is_capturing(stream: StreamKey) -> bool {
    open() > 0 && driver::is_capturing(stream.handle())
}

/// While the answer lives, no capture begins.
pub(crate) fn hold_off() -> MutexGuard<'static, ()> {
    lock(&BEGINNING)
}

/// See [`Legacy`].
pub(crate) fn legacy_event(context: CUcontext) -> Legacy {
    let legacy = lock(&LEGACY_EVENTS);
    if legacy.blocking == 0 {
        return Legacy::Free;
    }
    legacy.events.iter().find(|(of, _)| *of == context).map_or(Legacy::Free, |(_, event)| Legacy::Recorded(Arc::clone(event)))
}

/// Begins a capture by `call`, with the books kept.
fn beginning(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    let _alone = hold_off();
    let blocking = !driver::is_non_blocking(stream);
    let context = driver::stream_context(stream).or_else(|_| driver::current_context());
    let mut recorded = None;
    if blocking && lock(&LEGACY_EVENTS).blocking == 0 {
        let _relaxed = Relaxed::begin();
        if let (Ok(context), Ok(event)) = (context, Event::behind(StreamKey::LEGACY.handle())) {
            recorded = Some((context, Arc::new(event)));
        }
    }
    let result = call();
    let mut legacy = lock(&LEGACY_EVENTS);
    if result == CUresult::SUCCESS {
        OPEN.fetch_add(1, Ordering::SeqCst);
        if blocking {
            legacy.blocking += 1;
        }
        legacy.events.extend(recorded);
    }
    result
}

type BeginV1 = unsafe extern "C-unwind" fn(CUstream) -> CUresult;
type Begin = unsafe extern "C-unwind" fn(CUstream, c_int) -> CUresult;
type BeginToGraph =
    unsafe extern "C-unwind" fn(CUstream, CUgraph, *const c_void, *const c_void, usize, c_int) -> CUresult;
type End = unsafe extern "C-unwind" fn(CUstream, *mut CUgraph) -> CUresult;

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn begin_v1(real: BeginV1, stream: CUstream) -> CUresult {
    // SAFETY: the caller's arguments.
    beginning(stream, || unsafe { real(stream) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn begin(real: Begin, stream: CUstream, mode: c_int) -> CUresult {
    // SAFETY: the caller's arguments.
    beginning(stream, || unsafe { real(stream, mode) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn begin_to_graph(
    real: BeginToGraph,
    stream: CUstream,
    graph: CUgraph,
    dependencies: *const c_void,
    data: *const c_void,
    count: usize,
    mode: c_int,
) -> CUresult {
    // SAFETY: the caller's arguments.
    beginning(stream, || unsafe { real(stream, graph, dependencies, data, count, mode) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn end(real: End, stream: CUstream, graph: *mut CUgraph) -> CUresult {
    let was_capturing = open() > 0 && driver::is_capturing(stream);
    let blocking = !driver::is_non_blocking(stream);
    // SAFETY: the caller's arguments.
    let result = unsafe { real(stream, graph) };
    // A capture that was broken ends as well, with an error.
    if was_capturing {
        OPEN.fetch_sub(1, Ordering::SeqCst);
        let mut legacy = lock(&LEGACY_EVENTS);
        if blocking {
            legacy.blocking = legacy.blocking.saturating_sub(1);
        }
        if legacy.blocking == 0 {
            legacy.events.clear();
        }
    }
    result
}
