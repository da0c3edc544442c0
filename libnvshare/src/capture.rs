//! Stream captures: nothing runs on a capturing stream, and nothing of ours may break it.
//!
//! Open captures are kept in a list, so that streams are asked only while there are any. Once a capture is open on
//! a stream that synchronises with its context's legacy stream, an event recorded on that would break it, and the
//! program cannot submit there either: an event from before the capture stands for all there is.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use crate::cuda::{CUcontext, CUgraph, CUresult, CUstream};
use crate::driver::{self, Event};
use crate::streams::{self, StreamKey};

/// How many captures are open, for a look without a lock.
static OPEN: AtomicUsize = AtomicUsize::new(0);
static CAPTURES: Mutex<Vec<Capture>> = Mutex::new(Vec::new());
/// Held by who begins a capture, alone, and by all who need that none begins.
static BEGINNING: RwLock<()> = RwLock::new(());

#[derive(Debug)]
struct Capture {
    stream: StreamKey,
    /// Whose stream it is, if it is a thread's own.
    thread: Option<libc::pid_t>,
    context: CUcontext,
    /// Behind the work that was on the stream when the capture began.
    before: Option<Arc<Event>>,
    /// What is known of the legacy stream, from when the capture began.
    legacy: Legacy,
    /// The stream synchronises with it.
    blocking: bool,
}

/// What may be done with a context's legacy stream while captures are open.
#[derive(Debug, Clone)]
pub(crate) enum Legacy {
    /// Recording there disturbs none of them.
    Free,
    /// It would; what was submitted there is behind this event, if there is anything.
    Stands(Option<Arc<Event>>),
    /// It would, and nobody knows what was submitted there.
    Unknown,
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
pub(crate) fn hold_off() -> RwLockReadGuard<'static, ()> {
    BEGINNING.read().unwrap_or_else(PoisonError::into_inner)
}

/// See [`Legacy`].
pub(crate) fn legacy(context: CUcontext) -> Legacy {
    if open() == 0 {
        return Legacy::Free;
    }
    // Only the first of several could record one, and the others have it too.
    let known = captures()
        .iter()
        .find(|capture| capture.blocking && capture.context == context)
        .map(|capture| capture.legacy.clone());
    match known {
        Some(known) => known,
        // A capture that began elsewhere may have spread to such a stream by an event.
        None if streams::is_a_blocking_one_capturing(context) => Legacy::Unknown,
        None => Legacy::Free,
    }
}

/// Tells threads' own streams of one name apart.
fn thread_of(stream: StreamKey) -> Option<libc::pid_t> {
    // SAFETY: it takes nothing and cannot fail.
    stream.is_per_thread().then(|| unsafe { libc::gettid() })
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

/// A context is gone, and its captures with it.
pub(crate) fn forget_context(context: CUcontext) {
    if open() > 0 {
        // Events are not destroyed after their context.
        std::mem::forget(remove(|capture| capture.context == context));
    }
}

/// Captures on their own streams of threads that have ended will never end otherwise.
pub(crate) fn forget_dead_threads() {
    let is_dead = |thread: libc::pid_t| {
        // SAFETY: no signal is sent; it is only asked whether the thread is there.
        let asked = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, 0) };
        asked != 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
    };
    remove(|capture| capture.thread.is_some_and(is_dead));
}

fn remove(which: impl Fn(&Capture) -> bool) -> Vec<Capture> {
    let mut captures = captures();
    let (gone, left) = std::mem::take(&mut *captures).into_iter().partition(which);
    *captures = left;
    OPEN.store(captures.len(), Ordering::SeqCst);
    gone
}

/// Begins a capture by `call`, with the books kept.
fn beginning(stream: StreamKey, call: impl FnOnce() -> CUresult) -> CUresult {
    let _alone = BEGINNING.write().unwrap_or_else(PoisonError::into_inner);
    let context = driver::context_of(stream.handle());
    let blocking = !driver::is_capturing(stream.handle()) && !driver::is_non_blocking(stream.handle());
    let behind = |context, stream: StreamKey| {
        driver::in_context(context, || Event::behind(stream.handle())).ok().map(Arc::new)
    };
    let (mut before, mut legacy_stream) = (None, Legacy::Free);
    if let Ok(context) = context {
        before = behind(context, stream);
        legacy_stream = match legacy(context) {
            Legacy::Free if blocking => Legacy::Stands(behind(context, StreamKey::LEGACY)),
            known => known,
        };
    }
    let result = call();
    if let (CUresult::SUCCESS, Ok(context)) = (result, context) {
        let mut captures = captures();
        let thread = thread_of(stream);
        captures.push(Capture { stream, thread, context, before, legacy: legacy_stream, blocking });
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
        let thread = thread_of(key);
        remove(|capture| capture.stream == key && capture.thread == thread);
    }
    result
}
