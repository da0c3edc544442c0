//! The streams that live.
//!
//! There is one record for each address that a handle of a stream has had. Records are never freed, so a thread may remember
//! one; a new stream at the same address gets the same record. The library learns a stream when it is created. A stream that a
//! function without a hook has created is learnt at the gate. It may also end without a hook, so its handle is used only within
//! the program's own calls.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use dashmap::DashMap;

use super::captures;
use super::contexts::{self, Context};
use super::event::Event;
use super::launch_window::LaunchWindow;
use super::life::Life;
use super::stream_key::{Kind, StreamKey};
use crate::driver::types::{CU_STREAM_PER_THREAD, CUresult, CUstream};
use crate::driver::{self, Relaxed};
use crate::process::lifecycle;
use crate::process::lock::lock;
use crate::process::threads::{self, Pace};

/// The facts about a stream.
#[derive(Debug)]
struct About {
    context: Option<Arc<Context>>,
    kind: Kind,
}

/// The record of a stream.
#[derive(Debug)]
pub(crate) struct Stream {
    key: StreamKey,
    life: Life,
    /// Counts the streams that have had this address.
    incarnation: AtomicU64,
    about: Mutex<About>,
    pub(crate) launch_window: LaunchWindow,
}

/// One of the streams that have had an address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Incarnation {
    stream: &'static Stream,
    number: u64,
}

impl Stream {
    pub(crate) const fn none(key: StreamKey) -> Self {
        Self {
            key,
            life: Life::none(),
            incarnation: AtomicU64::new(0),
            about: Mutex::new(About { context: None, kind: Kind::Foreign }),
            launch_window: LaunchWindow::new(),
        }
    }

    #[inline(always)]
    pub(crate) fn key(&self) -> StreamKey {
        self.key
    }

    fn about(&self) -> MutexGuard<'_, About> {
        lock(&self.about)
    }

    fn begin(&self, kind: Kind, context: Option<Arc<Context>>) {
        self.launch_window.reset();
        let mut about = self.about();
        self.incarnation.fetch_add(1, Ordering::SeqCst);
        *about = About { context, kind };
        self.life.begin();
    }

    /// Waits until the launch window is open, or launches are not bounded any more (`are_bounded`). Called by a thread that is
    /// about to launch on the stream.
    pub(crate) fn wait_for_launch_window(&self, are_bounded: fn() -> bool) {
        /// Behind the oldest mark, the others are in flight.
        const PACE: Pace = Pace { part: 8, most: Duration::from_micros(500) };
        let _relaxed = Relaxed::begin();
        let current = contexts::current();
        let begin = Instant::now();
        while are_bounded() && !lifecycle::is_exiting() && !captures::is_capturing(self.key) {
            if self.launch_window.look(|mark| self.is_in(mark.context(), current.as_ref())) {
                return;
            }
            if begin.elapsed() >= self.launch_window.patience() {
                self.launch_window.gave_up();
                return;
            }
            threads::sleep(PACE.pause(begin.elapsed()));
        }
    }

    /// Whether the stream is in this context, for a thread with that current context. A stream that was created is in one context, and a default
    /// stream in each.
    fn is_in(&self, context: &Arc<Context>, current: Option<&Arc<Context>>) -> bool {
        let is_default = self.key == StreamKey::LEGACY || self.key.is_per_thread();
        !is_default || current.is_some_and(|current| Arc::ptr_eq(current, context))
    }

    /// Records a mark behind the launch that the calling thread has just made on the stream.
    pub(crate) fn mark(&self) {
        let current = contexts::current();
        let is_own = |mark: &Event| self.is_in(mark.context(), current.as_ref());
        self.launch_window.mark(is_own, || {
            if captures::is_capturing(self.key) {
                return None;
            }
            let context = current.clone()?;
            let _relaxed = Relaxed::begin();
            if self.key != StreamKey::LEGACY {
                let of_stream = driver::context_of(self.key.handle()).ok()?;
                if of_stream == context.handle() {
                    return Event::behind_stream(&context, self.key.handle()).ok();
                }
                let context = contexts::find(of_stream)?;
                let record = || Event::behind_stream(&context, self.key.handle());
                return driver::with_current(of_stream, record).ok();
            }
            // An event on the legacy stream would be a barrier.
            let _quiet = captures::hold_off(&context)?;
            Event::behind_context(&context).ok()
        });
    }
}

impl Incarnation {
    pub(crate) fn key(self) -> StreamKey {
        self.stream.key()
    }

    /// Makes a driver call with the stream, in its context, while both live. `None`: the stream has ended.
    pub(crate) fn with<T>(
        self,
        call: impl FnOnce(CUstream) -> Result<T, CUresult>,
    ) -> Option<Result<T, CUresult>> {
        let _alive = self.stream.life.enter().ok()?;
        if self.stream.incarnation.load(Ordering::SeqCst) != self.number {
            return None;
        }
        let context = self.stream.about().context.clone()?;
        context.with(|| call(self.stream.key.handle())).ok()
    }
}

/// Streams by address.
fn streams() -> &'static DashMap<usize, &'static Stream> {
    static STREAMS: OnceLock<DashMap<usize, &'static Stream>> = OnceLock::new();
    STREAMS.get_or_init(DashMap::new)
}

/// One record for the legacy streams of all contexts.
static LEGACY: Stream = Stream::none(StreamKey::LEGACY);
/// Whether any thread has used its per-thread stream.
static PER_THREAD_USED: AtomicBool = AtomicBool::new(false);

fn record_of(key: StreamKey) -> &'static Stream {
    *streams().entry(key.address()).or_insert_with(|| Box::leak(Box::new(Stream::none(key))))
}

/// Notes a stream that was created in a context by a function with a hook.
pub(crate) fn made(stream: CUstream, kind: Kind, context: Option<Arc<Context>>) {
    let key = StreamKey::with_legacy(stream);
    if key.address() > CU_STREAM_PER_THREAD {
        record_of(key).begin(kind, context);
    }
}

/// The record of a stream that the calling thread has submitted work to. It is not a per-thread stream.
pub(crate) fn learn(key: StreamKey) -> &'static Stream {
    if key == StreamKey::LEGACY {
        return &LEGACY;
    }
    let record = record_of(key);
    if !record.life.is_alive() {
        let context = driver::context_of(key.handle()).ok().and_then(contexts::find);
        record.begin(Kind::Foreign, context);
    }
    record
}

/// The error for which memory of a stream's context was given up, if it was. Called for the program's own call with the stream.
pub(crate) fn failure(key: StreamKey) -> Option<CUresult> {
    match driver::context_of(key.handle()) {
        Ok(context) => contexts::find(context)?.of_memory().failure(),
        // A call that needs a context hears from the driver that there is none. Others concern memory of any context.
        Err(CUresult::INVALID_CONTEXT) => None,
        // The driver says so itself.
        Err(error) => Some(error).filter(|error| error.ends_all_work()),
    }
}

/// Notes that the calling thread has submitted work to its per-thread stream.
pub(crate) fn note_per_thread() {
    PER_THREAD_USED.store(true, Ordering::Relaxed);
}

/// Whether any thread has used its per-thread stream.
pub(crate) fn are_per_thread_used() -> bool {
    PER_THREAD_USED.load(Ordering::Relaxed)
}

/// The kind of a stream.
pub(crate) fn kind_of(key: StreamKey) -> Kind {
    match key {
        StreamKey::LEGACY | StreamKey::PER_THREAD => Kind::Blocking,
        _ => streams()
            .get(&key.address())
            .filter(|s| s.life.is_alive())
            .map_or(Kind::Foreign, |s| s.about().kind),
    }
}

/// The streams of a context that live. `None`: some of them may have ended without a hook.
pub(crate) fn of_context(context: &Arc<Context>) -> Option<Vec<(Incarnation, Kind)>> {
    let mut found = Vec::new();
    for stream in streams() {
        let stream = *stream;
        let number = stream.incarnation.load(Ordering::SeqCst);
        if !stream.life.is_alive() {
            continue;
        }
        let about = stream.about();
        match (&about.context, about.kind) {
            (Some(of), kind) if Arc::ptr_eq(of, context) => {
                if kind == Kind::Foreign {
                    return None;
                }
                found.push((Incarnation { stream, number }, kind));
            }
            (None, _) => return None,
            _ => {}
        }
    }
    Some(found)
}

/// Destroys a stream by `call`.
pub(crate) fn end(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    let key = StreamKey::with_legacy(stream);
    let known = (key.address() > CU_STREAM_PER_THREAD).then(|| streams().get(&key.address())).flatten();
    let Some(known) = known.map(|known| *known).filter(|known| known.life.is_alive()) else {
        return call();
    };
    captures::forget(key);
    remember_work(known);
    let number = known.incarnation.load(Ordering::SeqCst);
    known.life.end();
    let result = call();
    // As soon as the driver has ended the stream, a new stream may have this address and have begun the record anew.
    let _about = known.about();
    if known.incarnation.load(Ordering::SeqCst) == number {
        if result == CUresult::SUCCESS {
            known.life.over();
        } else {
            known.life.begin();
        }
    }
    result
}

/// Records an event behind the work of a stream that is about to end, as the work continues after its end. This is not
/// necessary if a drain can record an event behind the whole context, or a capture that begins from now on does so. One that is
/// about to begin may have done so before this work was submitted.
fn remember_work(stream: &Stream) {
    let key = stream.key;
    let Some(context) = stream.about().context.clone() else { return };
    if driver::can_record_context() && captures::hold_off(&context).is_some() {
        return;
    }
    if !captures::is_capturing(key) {
        let _relaxed = Relaxed::begin();
        let record = || Event::behind_stream(&context, key.handle());
        driver::with_current(context.handle(), record).into_iter().for_each(adopt);
    }
}

/// Events behind the work of streams that ended while no event behind a whole context could be recorded.
static ORPHANS: Mutex<Vec<Arc<Event>>> = Mutex::new(Vec::new());

/// Keeps an event behind the work of a stream that is about to end.
fn adopt(event: Event) {
    // The driver is called without the lock. A call with an event of another context might wait for a thread there, which may wait for
    // this one.
    let known = orphans_of(event.context());
    let complete: Vec<Arc<Event>> = known.into_iter().filter(|event| event.is_complete()).collect();
    let is_complete = |event: &Arc<Event>| complete.iter().any(|of| Arc::ptr_eq(of, event));
    let mut orphans = lock(&ORPHANS);
    orphans.retain(|event| !is_complete(event));
    orphans.push(Arc::new(event));
    drop(orphans);
}

/// The events behind the work of ended streams of a context.
pub(crate) fn orphans_of(context: &Arc<Context>) -> Vec<Arc<Event>> {
    lock(&ORPHANS).iter().filter(|event| Arc::ptr_eq(event.context(), context)).cloned().collect()
}

/// Notes that the streams of a context have ended with it.
pub(crate) fn forget_context(context: &Arc<Context>) {
    lock(&ORPHANS).retain(|event| !Arc::ptr_eq(event.context(), context));
    LEGACY.launch_window.forget_context(context);
    for stream in streams() {
        // The lock is held, since a new stream may be beginning at this address.
        let about = stream.about();
        if about.context.as_ref().is_some_and(|of| Arc::ptr_eq(of, context)) {
            stream.life.over();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::types::CUcontext;

    fn stream(address: usize) -> CUstream {
        CUstream(address as *mut _)
    }

    fn context(address: usize) -> Arc<Context> {
        contexts::learn(CUcontext(address as *mut _), 0)
    }

    fn succeed() -> CUresult {
        CUresult::SUCCESS
    }

    /// Whether the stream may be used. Without a driver the call itself is not made.
    fn may_be_used(stream: Incarnation) -> bool {
        stream.with(|_| Ok(())).is_some()
    }

    #[test]
    fn a_stream_that_ends_is_foreign_until_its_handle_comes_again() {
        let (handle, key) = (stream(0x1100), StreamKey::with_legacy(stream(0x1100)));
        let context = context(0x1000);
        made(handle, Kind::NonBlocking, Some(Arc::clone(&context)));
        assert_eq!(kind_of(key), Kind::NonBlocking);
        assert_eq!(end(handle, || CUresult::INVALID_VALUE), CUresult::INVALID_VALUE);
        assert_eq!(kind_of(key), Kind::NonBlocking, "the driver has not ended it");
        assert_eq!(end(handle, succeed), CUresult::SUCCESS);
        assert_eq!(kind_of(key), Kind::Foreign);
        made(handle, Kind::Blocking, Some(context));
        assert_eq!(kind_of(key), Kind::Blocking);
    }

    #[test]
    fn a_new_stream_at_an_address_has_the_old_record_and_is_another_stream() {
        let context = context(0x2000);
        let of_this = || of_context(&context).unwrap().into_iter().map(|(stream, _)| stream).next();
        made(stream(0x2100), Kind::NonBlocking, Some(Arc::clone(&context)));
        let old = of_this().unwrap();
        assert!(may_be_used(old));
        assert_eq!(end(stream(0x2100), succeed), CUresult::SUCCESS);
        assert!(!may_be_used(old) && of_this().is_none());
        made(stream(0x2100), Kind::Blocking, Some(Arc::clone(&context)));
        let new = of_this().unwrap();
        assert!(std::ptr::eq(old.stream, new.stream));
        assert!(may_be_used(new) && !may_be_used(old));
    }

    #[test]
    fn a_stream_that_begins_while_the_old_one_ends_lives() {
        let (handle, key) = (stream(0x3100), StreamKey::with_legacy(stream(0x3100)));
        let context = context(0x3000);
        made(handle, Kind::Blocking, Some(Arc::clone(&context)));
        // The driver gives the address to another thread before its call returns to this one.
        let result = end(handle, || {
            made(handle, Kind::NonBlocking, Some(context));
            CUresult::SUCCESS
        });
        assert_eq!((result, kind_of(key)), (CUresult::SUCCESS, Kind::NonBlocking));
    }

    #[test]
    fn streams_end_with_their_context() {
        let context = context(0x4000);
        made(stream(0x4100), Kind::Blocking, Some(Arc::clone(&context)));
        let known = of_context(&context).unwrap();
        assert_eq!(known.iter().map(|(_, kind)| *kind).collect::<Vec<_>>(), [Kind::Blocking]);
        forget_context(&context);
        assert!(known.iter().all(|&(stream, _)| !may_be_used(stream)));
        assert_eq!(of_context(&context).unwrap().len(), 0);
    }
}
