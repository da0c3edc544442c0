//! Stream captures. Nothing runs on a capturing stream, and the library must not break a capture.
//!
//! The following was measured with calls from another thread in RELAXED mode. An event of a context breaks every open capture
//! in it. A query of the legacy stream breaks captures on blocking streams. An event on another stream breaks none, nor does
//! asking whether a stream captures. No call in one context breaks a capture in another. So this module lists the open
//! captures. No capture begins, and no stream joins one, while a drain looks at the driver ([`hold_off`]). Before the first
//! capture begins in a context, an event is recorded there behind all work that there is.
//!
//! A program that begins a capture calls the driver in the capture's own context only. While a thread waits for a place in a
//! full queue, all calls in that context wait (measured). The program may need the capture to make a place in the queue of
//! another context.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::contexts::{self, Context};
use super::event::Event;
use super::stream_key::{Kind, StreamKey};
use crate::driver;
use crate::driver::types::{CUresult, CUstream};
use crate::process::lock::{Counted, lock};
use crate::process::threads;

/// The captures of the process; the open ones are counted.
static CAPTURES: Counted<Captures> =
    Counted::new(Captures { open: Vec::new(), before: Vec::new(), spread: false }, |captures| {
        captures.open.len()
    });

#[derive(Debug)]
struct Captures {
    open: Vec<Capture>,
    /// Events, each behind all work that there was in a context when the first of its captures began.
    before: Vec<Arc<Event>>,
    /// A stream of a context in which no capture began has joined one.
    spread: bool,
}

impl Captures {
    fn are_of(&self, context: &Arc<Context>) -> bool {
        self.open.iter().any(|capture| capture.is_of(context))
    }

    fn before(&self, context: &Arc<Context>) -> Vec<Arc<Event>> {
        self.before.iter().filter(|event| Arc::ptr_eq(event.context(), context)).cloned().collect()
    }

    fn blocking(&self, context: &Arc<Context>) -> Blocking {
        let is_blocking = |capture: &&Capture| capture.is_of(context) && capture.kind != Kind::NonBlocking;
        let mut first = self.open.iter().filter(is_blocking).map(|capture| capture.first).peekable();
        if first.peek().is_none() {
            Blocking::None
        } else if first.all(|first| first) {
            Blocking::FromTheStart
        } else {
            Blocking::Later
        }
    }
}

#[derive(Debug)]
struct Capture {
    stream: StreamKey,
    /// The thread, if the stream is a per-thread stream.
    thread: Option<libc::pid_t>,
    context: Option<Arc<Context>>,
    kind: Kind,
    /// No other capture was open in the context when it began, so `Captures::before` covers all earlier work.
    first: bool,
    /// An event behind the work that was on the stream when the capture began.
    before: Option<Arc<Event>>,
}

impl Capture {
    /// Whether a look at a context may break it. An event of a primary context covers green contexts. If the capture's own
    /// context is not known, a look at any context may.
    fn is_of(&self, context: &Arc<Context>) -> bool {
        self.context.as_ref().is_none_or(|of| {
            let shares = of.device() == context.device() && (of.is_green() || context.is_green());
            Arc::ptr_eq(of, context) || shares
        })
    }
}

/// The number of captures that are open in this process.
#[inline(always)]
pub(crate) fn open() -> usize {
    CAPTURES.count()
}

/// Whether a stream is capturing. Only the program's own calls with this stream may ask.
pub(crate) fn is_capturing(stream: StreamKey) -> bool {
    open() > 0 && driver::is_capturing(stream.handle())
}

/// The number of looks at the driver that are under way, and of captures that are about to begin or to spread. One of the
/// two is always zero, except while one side finds out about the other.
static LOOKS: AtomicUsize = AtomicUsize::new(0);
static BEGINNINGS: AtomicUsize = AtomicUsize::new(0);

/// Counts as a look or a beginning until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn(&'static AtomicUsize);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Whether a capture may be open in a context.
pub(crate) fn may_be_in(context: &Arc<Context>) -> bool {
    open() > 0 && CAPTURES.read(|captures| captures.spread || captures.are_of(context))
}

/// No capture begins, and no stream joins one, while the result lives. It must not live longer than one driver call. `None`: a
/// capture may be open in the context, or is about to begin.
pub(crate) fn hold_off(context: &Arc<Context>) -> Option<Turn> {
    hold_off_beside().filter(|_| !may_be_in(context))
}

/// The same, but captures may be open.
pub(crate) fn hold_off_beside() -> Option<Turn> {
    LOOKS.fetch_add(1, Ordering::SeqCst);
    let turn = Turn(&LOOKS);
    (BEGINNINGS.load(Ordering::SeqCst) == 0).then_some(turn)
}

/// Waits until no look is under way. No look begins while the result lives.
fn alone() -> Turn {
    /// A look takes microseconds. A look that takes longer waits in the driver for a thread of the program, which may itself
    /// wait for this thread. So the wait is bounded.
    const MAX_TRIES: u32 = 2000;
    BEGINNINGS.fetch_add(1, Ordering::SeqCst);
    let turn = Turn(&BEGINNINGS);
    for _ in 0..MAX_TRIES {
        if LOOKS.load(Ordering::SeqCst) == 0 {
            break;
        }
        threads::pause();
    }
    turn
}

/// The open captures of a context on streams that synchronise with its legacy stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocking {
    None,
    /// No other capture was open in the context when they began, so events cover all earlier work.
    FromTheStart,
    /// Other captures were open when one of them began.
    Later,
}

/// The events behind all work that there was in a context when its first open capture began, and which captures are open
/// there. `None`: no event covers that work.
pub(crate) fn of_context(context: &Arc<Context>) -> Option<(Vec<Arc<Event>>, Blocking)> {
    let (before, blocking) = CAPTURES.read(|captures| (captures.before(context), captures.blocking(context)));
    // If the driver has events of contexts, nothing else covers the work of streams that were destroyed before.
    (!before.is_empty() || !driver::can_record_context()).then_some((before, blocking))
}

/// The event behind the work that was on a stream when a capture began there; none, if the events of its context cover that work. `None`:
/// no capture began on this stream, or the driver made no event.
pub(crate) fn before(stream: StreamKey) -> Option<Vec<Arc<Event>>> {
    CAPTURES.read(|captures| {
        let began = captures.open.iter().find(|capture| capture.stream == stream)?;
        (began.first || began.before.is_some()).then(|| began.before.iter().cloned().collect())
    })
}

/// Distinguishes per-thread streams, which all have the same handle.
fn thread_of(stream: StreamKey) -> Option<libc::pid_t> {
    // SAFETY: it takes nothing and cannot fail.
    stream.is_per_thread().then(|| unsafe { libc::gettid() })
}

/// Removes a stream's capture: the stream is about to be destroyed.
pub(crate) fn forget(stream: StreamKey) {
    if open() > 0 {
        remove(|capture| capture.stream == stream);
    }
}

/// Removes the captures of a context that has ended.
pub(crate) fn forget_context(context: &Arc<Context>) {
    if open() > 0 {
        remove(|capture| capture.context.as_ref().is_some_and(|of| Arc::ptr_eq(of, context)));
    }
}

/// Removes captures on per-thread streams of threads that have ended: nothing else would end them.
pub(crate) fn forget_dead_threads() {
    remove(|capture| capture.thread.is_some_and(threads::is_gone));
}

fn remove(which: impl Fn(&Capture) -> bool) {
    let gone = CAPTURES.change(|captures| {
        let (gone, left): (Vec<_>, _) = std::mem::take(&mut captures.open).into_iter().partition(which);
        captures.open = left;
        captures.spread &= !captures.open.is_empty();
        let before = std::mem::take(&mut captures.before);
        let (kept, before): (Vec<_>, _) =
            before.into_iter().partition(|event| captures.are_of(event.context()));
        captures.before = kept;
        (gone, before)
    });
    // Dropping the events calls the driver, so it happens without the lock.
    drop(gone);
}

/// In a context, captures begin and spread one at a time, so that the second finds the first in the list. Each caller is in a
/// driver call in this context, so it waits for nothing that its own call would not wait for.
fn one_by_one<T>(context: Option<&Arc<Context>>, body: impl FnOnce() -> T) -> T {
    static UNKNOWN: Mutex<()> = Mutex::new(());
    let _one = lock(context.map_or(&UNKNOWN, |context| context.beginnings()));
    body()
}

/// Begins a capture by `call` on a stream of this kind, and enters it into the list.
pub(crate) fn begin(stream: StreamKey, kind: Kind, call: impl FnOnce() -> CUresult) -> CUresult {
    let _alone = alone();
    let context = driver::context_of(stream.handle()).ok().and_then(contexts::find);
    one_by_one(context.as_ref(), || {
        let is_first = context.as_ref().is_some_and(|context| !may_be_in(context));
        // If the open captures end before this one begins, the events behind earlier work are still needed.
        let mut before = context
            .as_ref()
            .map_or_else(Vec::new, |context| CAPTURES.read(|captures| captures.before(context)));
        if let Some(context) = context.as_ref().filter(|_| is_first && driver::can_record_context())
            && let Ok(Ok(event)) = context.with(|| Event::behind_context(context))
        {
            before.push(Arc::new(event));
        }
        let first = is_first && !before.is_empty();
        // This is never the legacy stream, which cannot capture.
        let on_stream = (!first)
            .then(|| {
                let context = context.as_ref()?;
                let behind = context.with(|| Event::behind_stream(context, stream.handle()));
                behind.ok()?.ok().map(Arc::new)
            })
            .flatten();
        let result = call();
        if result == CUresult::SUCCESS {
            let (thread, context) = (thread_of(stream), context.clone());
            CAPTURES.change(|captures| {
                if !context.as_ref().is_some_and(|context| captures.are_of(context)) {
                    captures.before.append(&mut before);
                }
                captures.open.push(Capture { stream, thread, context, kind, first, before: on_stream });
            });
        }
        result
    })
}

/// Ends a capture by `call`.
pub(crate) fn end(stream: StreamKey, call: impl FnOnce() -> CUresult) -> CUresult {
    let result = call();
    // A broken capture also ends, with an error. A capture that this thread may not end stays open.
    if open() > 0 && !driver::is_capturing(stream.handle()) {
        let thread = thread_of(stream);
        remove(|capture| capture.stream == stream && capture.thread == thread);
    }
    result
}

/// Makes a stream wait for an event by `call`. The stream may join a capture by this.
pub(crate) fn spread(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    if open() == 0 {
        return call();
    }
    let _alone = alone();
    let context = driver::context_of(stream).ok().and_then(contexts::find);
    one_by_one(context.as_ref(), || {
        let result = call();
        // The legacy stream cannot join a capture, so a null stream that has joined is the thread's own.
        let joined = StreamKey::with_per_thread(stream).handle();
        let is_known = |context: &Arc<Context>| CAPTURES.read(|captures| captures.are_of(context));
        if result == CUresult::SUCCESS
            && !context.as_ref().is_some_and(is_known)
            && driver::is_capturing(joined)
        {
            CAPTURES.change(|captures| captures.spread = true);
        }
        result
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::types::{CUcontext, CUstream};

    fn key(address: usize) -> StreamKey {
        StreamKey::with_legacy(CUstream(address as *mut _))
    }

    /// All in one test, as the list is the process's.
    #[test]
    fn captures_are_listed_until_they_end_and_no_look_overlaps_a_beginning() {
        let context = contexts::learn(CUcontext(0x100_0000 as *mut _), 0);
        let blocking = || of_context(&context).map(|(_, blocking)| blocking);
        assert!(hold_off(&context).is_some());
        assert_eq!(
            begin(key(0x100_0100), Kind::Blocking, || CUresult::INVALID_VALUE),
            CUresult::INVALID_VALUE
        );
        assert_eq!((open(), before(key(0x100_0100)).is_some()), (0, false));
        let began = begin(key(0x100_0100), Kind::Blocking, || {
            assert!(hold_off_beside().is_none(), "a capture is about to begin");
            CUresult::SUCCESS
        });
        assert_eq!((began, open()), (CUresult::SUCCESS, 1));
        assert!(hold_off(&context).is_none() && hold_off_beside().is_some());
        // Without a driver its context is not known, so it may be in this one; and no event covers earlier work.
        assert_eq!(blocking(), Some(Blocking::Later));
        assert!(before(key(0x100_0100)).is_none() && before(key(0x100_0200)).is_none());
        spread(CUstream(0x100_0100 as *mut _), || {
            assert!(hold_off_beside().is_none(), "a stream is about to join");
            CUresult::SUCCESS
        });
        assert_eq!(end(key(0x100_0100), || CUresult::SUCCESS), CUresult::SUCCESS);
        assert_eq!((open(), blocking()), (0, Some(Blocking::None)));
        let begin_again = || begin(key(0x100_0100), Kind::NonBlocking, || CUresult::SUCCESS);
        begin_again();
        assert_eq!(blocking(), Some(Blocking::None));
        forget(key(0x100_0100));
        assert_eq!(open(), 0);
        begin_again();
        // Its context is not known, so it goes with none.
        forget_context(&context);
        assert_eq!(open(), 1);
        forget(key(0x100_0100));
    }
}
