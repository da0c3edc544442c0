//! Stream captures. Nothing runs on a capturing stream, and the library must not break a capture.
//!
//! Measured with calls from another thread in RELAXED mode: an event of a context breaks every open capture in it; a query
//! of the legacy stream breaks captures on blocking streams; an event on another stream breaks none, nor does asking whether
//! a stream captures. So this module lists the open captures. No capture begins, and no stream joins one, while a drain looks
//! at the driver ([`hold_off`]). Before the first capture begins, an event is recorded behind all work that there is.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::contexts::{self, Context};
use super::event::Event;
use super::stream_key::{Kind, StreamKey};
use crate::driver;
use crate::driver::types::CUresult;
use crate::process::threads;

/// The number of open captures, which can be read without the lock.
static OPEN: AtomicUsize = AtomicUsize::new(0);
static CAPTURES: Mutex<Captures> = Mutex::new(Captures { open: Vec::new(), before: Vec::new() });

#[derive(Debug)]
struct Captures {
    open: Vec<Capture>,
    /// Events behind all work that there was when the first of them began.
    before: Vec<Arc<Event>>,
}

#[derive(Debug)]
struct Capture {
    stream: StreamKey,
    /// The thread, if the stream is a per-thread stream.
    thread: Option<libc::pid_t>,
    context: Option<Arc<Context>>,
    kind: Kind,
    /// No other capture was open when it began, so `Captures::before` covers all earlier work.
    first: bool,
    /// An event behind the work that was on the stream when the capture began.
    before: Option<Arc<Event>>,
}

fn captures() -> MutexGuard<'static, Captures> {
    CAPTURES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of captures that are open in this process.
#[inline(always)]
pub(crate) fn open() -> usize {
    OPEN.load(Ordering::SeqCst)
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

/// No capture begins, and no stream joins one, while the result lives. It must not live longer than one driver call. `None`: a
/// capture is open, or is about to begin.
pub(crate) fn hold_off() -> Option<Turn> {
    hold_off_beside().filter(|_| open() == 0)
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

/// The open captures of a context on streams that synchronise with its legacy stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocking {
    None,
    /// No other capture was open when they began, so events cover all earlier work.
    FromTheStart,
    /// Other captures were open when one of them began.
    Later,
}

/// Events behind all work that there was when the first open capture began, and which captures are open in a context.
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

/// The event behind the work that was on a stream when a capture began there. `None`: no capture began on this stream.
pub(crate) fn before(stream: StreamKey) -> Option<Vec<Arc<Event>>> {
    let captures = captures();
    let began = captures.open.iter().find(|capture| capture.stream == stream)?;
    Some(began.before.iter().cloned().collect())
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
    let mut captures = captures();
    let (gone, left): (Vec<_>, _) = std::mem::take(&mut captures.open).into_iter().partition(which);
    captures.open = left;
    let before = if captures.open.is_empty() { std::mem::take(&mut captures.before) } else { Vec::new() };
    OPEN.store(captures.open.len(), Ordering::SeqCst);
    drop(captures);
    // Dropping the events calls the driver, so it happens without the lock.
    drop((gone, before));
}

/// Begins a capture by `call` on a stream of this kind, and enters it into the list.
pub(crate) fn begin(stream: StreamKey, kind: Kind, call: impl FnOnce() -> CUresult) -> CUresult {
    /// Captures begin one at a time, so that the second finds the first in the list.
    static ONE: Mutex<()> = Mutex::new(());
    let _alone = alone();
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let context = driver::context_of(stream.handle()).ok().and_then(contexts::find);
    let first = open() == 0;
    // If the open captures end before this one begins, the events behind earlier work are still needed.
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
    // This is never the legacy stream, which cannot capture.
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
    // A broken capture also ends, with an error. A capture that this thread may not end stays open.
    if open() > 0 && !driver::is_capturing(stream.handle()) {
        let thread = thread_of(stream);
        remove(|capture| capture.stream == stream && capture.thread == thread);
    }
    result
}

/// Makes a stream wait for an event by `call`. The stream may join a capture by this.
pub(crate) fn spread(call: impl FnOnce() -> CUresult) -> CUresult {
    let _alone = (open() > 0).then(alone);
    call()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::types::{CUcontext, CUstream};

    fn key(address: usize) -> StreamKey {
        StreamKey::new(CUstream(address as *mut _), false)
    }

    /// All in one test, as the list is the process's.
    #[test]
    fn captures_are_listed_until_they_end_and_no_look_overlaps_a_beginning() {
        let context = contexts::learn(CUcontext(0x100_0000 as *mut _), 0);
        assert!(hold_off().is_some());
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
        assert!(hold_off().is_none() && hold_off_beside().is_some());
        // Without a driver its context is not known, so it may be in this one; and no event covers earlier work.
        assert_eq!(of_context(&context).1, Blocking::Later);
        assert!(before(key(0x100_0100)).is_some() && before(key(0x100_0200)).is_none());
        spread(|| {
            assert!(hold_off_beside().is_none(), "a stream is about to join");
            CUresult::SUCCESS
        });
        assert_eq!(end(key(0x100_0100), || CUresult::SUCCESS), CUresult::SUCCESS);
        assert_eq!((open(), of_context(&context).1), (0, Blocking::None));
        let begin_again = || begin(key(0x100_0100), Kind::NonBlocking, || CUresult::SUCCESS);
        begin_again();
        assert_eq!(of_context(&context).1, Blocking::None);
        forget(key(0x100_0100));
        assert_eq!(open(), 0);
        begin_again();
        // Its context is not known, so it goes with none.
        forget_context(&context);
        assert_eq!(open(), 1);
        forget(key(0x100_0100));
    }
}
