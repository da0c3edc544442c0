//! Stream captures: nothing runs on a capturing stream, and nothing of ours may break it.
//!
//! Open captures are kept in a list, so that streams are asked only while there are any. Once a capture is open on
//! a stream that synchronises with its context's legacy stream, an event recorded on that would break it, and the
//! program cannot submit there either: an event from before the capture stands for all there is.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cuda::{CUcontext, CUgraph, CUresult, CUstream};
use crate::driver::{self, Event};
use crate::streams::StreamKey;

/// How many captures are open, for a look without a lock.
static OPEN: AtomicUsize = AtomicUsize::new(0);
static CAPTURES: Mutex<Vec<Capture>> = Mutex::new(Vec::new());
/// Held by who begins a capture, and by who needs that none begins.
static BEGINNING: Mutex<()> = Mutex::new(());

#[derive(Debug)]
struct Capture {
    stream: StreamKey,
    context: CUcontext,
    /// Behind the work that was on the stream when the capture began.
    before: Option<Arc<Event>>,
    /// The stream synchronises with the legacy stream; behind that, when the capture began, stood this event.
    legacy: Option<Arc<Event>>,
    blocking: bool,
}

/// What may be done with a context's legacy stream while captures are open.
#[derive(Debug)]
pub(crate) enum Legacy {
    /// Recording there disturbs none of them.
    Free,
    /// It would; what was submitted there is behind this event, if there is anything.
    Stands(Option<Arc<Event>>),
}

fn captures() -> MutexGuard<'static, Vec<Capture>> {
    CAPTURES.lock().unwrap_or_else(PoisonError::into_inner)
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
    BEGINNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// See [`Legacy`].
pub(crate) fn legacy(context: CUcontext) -> Legacy {
    let captures = captures();
    let mut of_context =
        captures.iter().filter(|capture| capture.blocking && capture.context == context).peekable();
    if of_context.peek().is_none() {
        return Legacy::Free;
    }
    // Only the first of several could record one, and the others have it too.
    Legacy::Stands(of_context.find_map(|capture| capture.legacy.clone()))
}

/// The event behind the work that was on a stream when a capture began there; `None`: none began there.
pub(crate) fn before(stream: StreamKey) -> Option<Option<Arc<Event>>> {
    captures().iter().find(|capture| capture.stream == stream).map(|capture| capture.before.clone())
}

/// A stream is about to be destroyed, and a capture on it with it.
pub(crate) fn forget(stream: StreamKey) {
    if open() > 0 {
        remove(|capture| capture.stream == stream);
    }
}

fn remove(which: impl Fn(&Capture) -> bool) {
    let mut captures = captures();
    captures.retain(|capture| !which(capture));
    OPEN.store(captures.len(), Ordering::SeqCst);
}

/// Begins a capture by `call`, with the books kept.
fn beginning(stream: StreamKey, call: impl FnOnce() -> CUresult) -> CUresult {
    let _alone = hold_off();
    let context = driver::context_of(stream.handle());
    let blocking = !driver::is_non_blocking(stream.handle());
    let behind = |context, stream: StreamKey| {
        driver::in_context(context, || Event::behind(stream.handle())).ok().map(Arc::new)
    };
    let (mut before, mut legacy_event) = (None, None);
    if let Ok(context) = context {
        before = behind(context, stream);
        legacy_event = match legacy(context) {
            Legacy::Free if blocking => behind(context, StreamKey::LEGACY),
            Legacy::Free => None,
            Legacy::Stands(event) => event,
        };
    }
    let result = call();
    if let (CUresult::SUCCESS, Ok(context)) = (result, context) {
        let mut captures = captures();
        captures.push(Capture { stream, context, before, legacy: legacy_event, blocking });
        OPEN.store(captures.len(), Ordering::SeqCst);
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
pub(crate) unsafe fn begin_v1<const PER_THREAD: bool>(real: BeginV1, stream: CUstream) -> CUresult {
    // SAFETY: the caller's arguments.
    beginning(StreamKey::new(stream, PER_THREAD), || unsafe { real(stream) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn begin<const PER_THREAD: bool>(real: Begin, stream: CUstream, mode: c_int) -> CUresult {
    // SAFETY: the caller's arguments.
    beginning(StreamKey::new(stream, PER_THREAD), || unsafe { real(stream, mode) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn begin_to_graph<const PER_THREAD: bool>(
    real: BeginToGraph,
    stream: CUstream,
    graph: CUgraph,
    dependencies: *const c_void,
    data: *const c_void,
    count: usize,
    mode: c_int,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { real(stream, graph, dependencies, data, count, mode) };
    beginning(StreamKey::new(stream, PER_THREAD), call)
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn end<const PER_THREAD: bool>(
    real: End,
    stream: CUstream,
    graph: *mut CUgraph,
) -> CUresult {
    let key = StreamKey::new(stream, PER_THREAD);
    // SAFETY: the caller's arguments.
    let result = unsafe { real(stream, graph) };
    // A capture that was broken ends as well, with an error; one that this thread may not end goes on.
    if open() > 0 && !driver::is_capturing(key.handle()) {
        remove(|capture| capture.stream == key);
    }
    result
}
