//! Stream captures: nothing runs on a capturing stream, and nothing of ours may break it.
//!
//! Measured, of a look at a context from another thread in RELAXED mode: a context's event breaks every capture that is open
//! in it; a query of the legacy stream breaks those on blocking streams; events on other streams and the question whether
//! a stream captures break none. So the captures that are open are kept in a list; none begins, and no stream joins one, during a
//! look ([`hold_off`]); and before the first one begins, an event is recorded behind all work that there is.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::contexts::{self, Context};
use super::event::Event;
use super::stream_key::{Kind, StreamKey};
use crate::driver;
use crate::driver::types::CUresult;
use crate::process::threads;

/// How many captures are open, for a look without a lock.
static OPEN: AtomicUsize = AtomicUsize::new(0);
static CAPTURES: Mutex<Captures> = Mutex::new(Captures { open: Vec::new(), before: Vec::new() });

#[derive(Debug)]
struct Captures {
    open: Vec<Capture>,
    /// Behind all work that there was when the first of them began.
    before: Vec<Arc<Event>>,
}

#[derive(Debug)]
struct Capture {
    stream: StreamKey,
    /// Whose stream it is, if it is a thread's own.
    thread: Option<libc::pid_t>,
    context: Option<Arc<Context>>,
    kind: Kind,
    /// It was the first, so work from before it is known.
    first: bool,
    /// Behind the work that was on the stream when the capture began.
    before: Option<Arc<Event>>,
}

fn captures() -> MutexGuard<'static, Captures> {
    CAPTURES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Captures that are open in this process.
#[inline(always)]
pub(crate) fn open() -> usize {
    OPEN.load(Ordering::SeqCst)
}

/// Whether a stream is capturing. To be asked by the program's own calls with this stream.
pub(crate) fn is_capturing(stream: StreamKey) -> bool {
    open() > 0 && driver::is_capturing(stream.handle())
}

/// Looks that are under way, and captures that are about to begin or to spread: never both.
static LOOKS: AtomicUsize = AtomicUsize::new(0);
static BEGINNINGS: AtomicUsize = AtomicUsize::new(0);

/// One of either, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn(&'static AtomicUsize);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// While the answer lives, no capture begins and no stream joins one. `None`: one is doing so, or the driver would have to
/// be asked beside one that is open. It must live no longer than one driver call.
pub(crate) fn hold_off() -> Option<Turn> {
    hold_off_beside().filter(|_| open() == 0)
}

/// The same where captures may be open.
pub(crate) fn hold_off_beside() -> Option<Turn> {
    LOOKS.fetch_add(1, Ordering::SeqCst);
    let turn = Turn(&LOOKS);
    (BEGINNINGS.load(Ordering::SeqCst) == 0).then_some(turn)
}

/// Waits until no look is under way; none begins while the answer lives.
fn alone() -> Turn {
    /// A look takes microseconds. One that takes longer waits in the driver for a thread of the program, and that may wait
    /// for this one.
    const MOST: u32 = 2000;
    BEGINNINGS.fetch_add(1, Ordering::SeqCst);
    let turn = Turn(&BEGINNINGS);
    for _ in 0..MOST {
        if LOOKS.load(Ordering::SeqCst) == 0 {
            break;
        }
        threads::pause();
    }
    turn
}

/// Captures that are open in a context on streams that synchronise with its legacy stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocking {
    None,
    /// The first of all captures that are open, so that work from before them is known.
    FromTheStart,
    /// They began when others were open.
    Later,
}

/// The events behind all work that there was when the first of the open captures began; and what is open in a context.
pub(crate) fn of_context(context: &Arc<Context>) -> (Vec<Arc<Event>>, Blocking) {
    let captures = captures();
    let of_this = |capture: &&Capture| capture.context.as_ref().is_none_or(|of| Arc::ptr_eq(of, context));
    let is_blocking = |capture: &&Capture| capture.kind != Kind::NonBlocking;
    let mut first =
        captures.open.iter().filter(of_this).filter(is_blocking).map(|capture| capture.first).peekable();
    let kind = if first.peek().is_none() {
        Blocking::None
    } else if first.all(|first| first) {
        Blocking::FromTheStart
    } else {
        Blocking::Later
    };
    (captures.before.clone(), kind)
}

/// The event behind the work that was on a stream when a capture began there; `None`: none began there.
pub(crate) fn before(stream: StreamKey) -> Option<Vec<Arc<Event>>> {
    let captures = captures();
    let began = captures.open.iter().find(|capture| capture.stream == stream)?;
    Some(began.before.iter().cloned().collect())
}

/// Tells threads' own streams of one name apart.
fn thread_of(stream: StreamKey) -> Option<libc::pid_t> {
    // SAFETY: it takes nothing and cannot fail.
    stream.is_per_thread().then(|| unsafe { libc::gettid() })
}

/// A stream is about to be destroyed, and a capture on it with it.
pub(crate) fn forget(stream: StreamKey) {
    if open() > 0 {
        remove(|capture| capture.stream == stream);
    }
}

/// A context is gone, and its captures with it.
pub(crate) fn forget_context(context: &Arc<Context>) {
    if open() > 0 {
        remove(|capture| capture.context.as_ref().is_some_and(|of| Arc::ptr_eq(of, context)));
    }
}

/// Captures on their own streams of threads that have ended will never end otherwise.
pub(crate) fn forget_dead_threads() {
    remove(|capture| capture.thread.is_some_and(threads::is_gone));
}

fn remove(which: impl Fn(&Capture) -> bool) {
    let mut captures = captures();
    let (gone, left): (Vec<_>, _) = std::mem::take(&mut captures.open).into_iter().partition(which);
    captures.open = left;
    let before = if captures.open.is_empty() { std::mem::take(&mut captures.before) } else { Vec::new() };
    OPEN.store(captures.open.len(), Ordering::SeqCst);
    drop(captures);
    // Their events are destroyed by calls of the driver: without the lock.
    drop((gone, before));
}

/// Begins a capture by `call` on a stream of this kind, with the books kept.
pub(crate) fn begin(stream: StreamKey, kind: Kind, call: impl FnOnce() -> CUresult) -> CUresult {
    /// Of two that begin, the second one must find the first.
    static ONE: Mutex<()> = Mutex::new(());
    let _alone = alone();
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let context = driver::context_of(stream.handle()).ok().and_then(contexts::find);
    let first = open() == 0;
    // Should those that are open end before this one begins, the work before them is to be known still.
    let mut before_all = captures().before.clone();
    let mut complete = driver::can_record_context();
    if first && complete {
        for context in contexts::all() {
            match context.with(|| Event::behind_context(&context)) {
                Ok(Ok(event)) => before_all.push(Arc::new(event)),
                _ => complete = false,
            }
        }
    }
    // Not of the legacy stream, which cannot capture.
    let before = (!first || !complete)
        .then(|| {
            let context = context.as_ref()?;
            let behind = context.with(|| Event::behind_stream(context, stream.handle()));
            behind.ok()?.ok().map(Arc::new)
        })
        .flatten();
    let result = call();
    if result == CUresult::SUCCESS {
        let mut captures = captures();
        let first = first && complete && captures.open.is_empty();
        if captures.open.is_empty() {
            captures.before = before_all;
        }
        let thread = thread_of(stream);
        captures.open.push(Capture { stream, thread, context, kind, first, before });
        OPEN.store(captures.open.len(), Ordering::SeqCst);
    }
    result
}

/// Ends a capture by `call`.
pub(crate) fn end(stream: StreamKey, call: impl FnOnce() -> CUresult) -> CUresult {
    let result = call();
    // A capture that was broken ends as well, with an error; one that this thread may not end goes on.
    if open() > 0 && !driver::is_capturing(stream.handle()) {
        let thread = thread_of(stream);
        remove(|capture| capture.stream == stream && capture.thread == thread);
    }
    result
}

/// Has a stream wait for an event by `call`, and so perhaps join a capture.
pub(crate) fn spread(call: impl FnOnce() -> CUresult) -> CUresult {
    let _alone = (open() > 0).then(alone);
    call()
}
