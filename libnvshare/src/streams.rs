//! The contexts and streams that work was seen on: what a drain has to look at.
//!
//! They are learnt from the hooks of their creation and, where that was not seen (the driver's private tables
//! create some), at the gate. A stream that the program destroys may still have work: its last event stays.

use std::collections::VecDeque;
use std::ffi::{c_int, c_uint};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::cuda::{CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUcontext, CUdevice, CUresult, CUstream};
use crate::driver::{self, Event, Relaxed};
use crate::window::{MARKS, Window};
use crate::{capture, gate, log};

/// A stream as the gate knows it: its handle, with the default streams by their explicit handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamKey(usize);

impl StreamKey {
    pub(crate) const LEGACY: Self = Self(CU_STREAM_LEGACY);
    const PER_THREAD: Self = Self(CU_STREAM_PER_THREAD);

    /// `per_thread`: the null stream is the calling thread's own.
    #[inline(always)]
    pub(crate) fn new(stream: CUstream, per_thread: bool) -> Self {
        match stream.0 as usize {
            0 if per_thread => Self::PER_THREAD,
            0 => Self::LEGACY,
            address => Self(address),
        }
    }

    #[inline(always)]
    pub(crate) fn address(self) -> usize {
        self.0
    }

    /// Whether it is the calling thread's own, whichever that is.
    pub(crate) fn is_per_thread(self) -> bool {
        self == Self::PER_THREAD
    }

    /// A small number that differs between most streams of a program.
    #[inline(always)]
    pub(crate) fn bucket(self, of: usize) -> usize {
        (self.0 ^ (self.0 >> 6) ^ (self.0 >> 12)) % of
    }

    pub(crate) fn handle(self) -> CUstream {
        CUstream(self.0 as *mut _)
    }
}

#[derive(Debug)]
struct Stream {
    key: StreamKey,
    /// It synchronises with its context's legacy stream, or may do so.
    blocking: bool,
    window: Window,
    /// Marks behind launches, oldest first.
    marks: VecDeque<(Event, Instant)>,
}

impl Stream {
    fn new(key: StreamKey) -> Self {
        Self { key, blocking: Self::is_blocking(key), window: Window::new(), marks: VecDeque::new() }
    }

    /// Asked when a stream is met, and never of one that is capturing: that breaks the capture.
    fn is_blocking(key: StreamKey) -> bool {
        key.address() > CU_STREAM_PER_THREAD
            && (capture::is_capturing(key) || !driver::is_non_blocking(key.handle()))
    }
}

/// Threads whose own default streams are known at a time, unless more of them have work in flight.
const MOST_OWN: usize = 64;

#[derive(Debug)]
pub(crate) struct Context {
    handle: CUcontext,
    device: CUdevice,
    streams: Vec<Stream>,
    /// A thread's own default stream was used: only a look at the whole context sees it.
    per_thread: bool,
    /// Threads' own default streams that are bounded, by thread.
    own: Vec<(libc::pid_t, Stream)>,
    /// Our own stream, for moving memory.
    ours: Option<CUstream>,
    /// The last events of streams that are destroyed.
    orphans: Vec<Arc<Event>>,
}

static CONTEXTS: Mutex<Vec<Context>> = Mutex::new(Vec::new());
static GENERATION: AtomicU64 = AtomicU64::new(1);

fn contexts() -> MutexGuard<'static, Vec<Context>> {
    CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Changes when a stream or a context is destroyed: a handle met before may mean something else now.
#[inline(always)]
pub(crate) fn generation() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

impl Context {
    fn stream(&mut self, key: StreamKey) -> Option<&mut Stream> {
        self.streams.iter_mut().find(|stream| stream.key == key)
    }

    fn meet(&mut self, key: StreamKey) {
        if key == StreamKey::PER_THREAD {
            self.per_thread = true;
        } else if self.stream(key).is_none() {
            self.streams.push(Stream::new(key));
        }
    }

    /// The calling thread's own default stream.
    fn own_stream(&mut self) -> Option<&mut Stream> {
        // SAFETY: it takes nothing and cannot fail.
        let me = unsafe { libc::gettid() };
        let at = self.own.iter().position(|(thread, _)| *thread == me).unwrap_or_else(|| {
            if self.own.len() >= MOST_OWN {
                // Threads come and go: what is complete holds nobody up.
                self.own.retain_mut(|(_, stream)| {
                    stream.marks.retain(|(event, _)| !event.is_complete());
                    !stream.marks.is_empty()
                });
            }
            self.own.push((me, Stream::new(StreamKey::PER_THREAD)));
            self.own.len() - 1
        });
        self.own.get_mut(at).map(|(_, stream)| stream)
    }

    fn forget_stream(&mut self, key: StreamKey) {
        let Some(at) = self.streams.iter().position(|stream| stream.key == key) else { return };
        self.streams.swap_remove(at);
        self.orphans.retain(|event| !event.is_complete());
        if !driver::is_capturing(key.handle()) {
            let last = driver::in_context(self.handle, || Event::behind(key.handle()));
            self.orphans.extend(last.map(Arc::new));
        }
    }

    /// What another record of the same context knows.
    fn merge(&mut self, other: Self) {
        other.streams.iter().for_each(|stream| self.meet(stream.key));
        self.per_thread |= other.per_thread;
        self.own.extend(other.own);
        self.orphans.extend(other.orphans);
        self.ours = self.ours.or(other.ours);
    }
}

/// A context is in use on a device: its default stream may carry work from now on. False: it cannot be asked.
pub(crate) fn meet_context(handle: CUcontext) -> bool {
    static LAST: AtomicUsize = AtomicUsize::new(0);
    if handle == CUcontext::NULL {
        return false;
    }
    let seen = (handle.0 as usize).rotate_left(16) ^ generation() as usize;
    if LAST.load(Ordering::Relaxed) == seen {
        return true;
    }
    let mut contexts = contexts();
    if !contexts.iter().any(|context| context.handle == handle) {
        if driver::current_context() != Ok(handle) {
            return false;
        }
        let Ok(device) = driver::current_device() else { return false };
        let mut context = Context {
            handle,
            device,
            streams: Vec::new(),
            per_thread: false,
            own: Vec::new(),
            ours: None,
            orphans: Vec::new(),
        };
        context.meet(StreamKey::LEGACY);
        contexts.push(context);
    }
    LAST.store(seen, Ordering::Relaxed);
    true
}

/// Work was submitted to a stream. False: its context cannot be asked.
pub(crate) fn meet(key: StreamKey) -> bool {
    let Ok(current) = driver::current_context() else { return false };
    if !meet_context(current) {
        return false;
    }
    let owner = driver::context_of(key.handle()).unwrap_or(current);
    let mut contexts = contexts();
    let at = |handle| move |context: &Context| context.handle == handle;
    let found = contexts.iter().position(at(owner)).or_else(|| contexts.iter().position(at(current)));
    let Some(context) = found.and_then(|at| contexts.get_mut(at)) else { return false };
    context.meet(key);
    true
}

/// What is known of a context that is about to go away. Its events go with it: they are not destroyed after it.
#[derive(Debug)]
pub(crate) struct Taken(Option<ManuallyDrop<Context>>);

/// Takes a context out of sight while the driver may destroy it.
pub(crate) fn take_context(handle: CUcontext) -> Taken {
    let mut contexts = contexts();
    let at = contexts.iter().position(|context| context.handle == handle);
    GENERATION.fetch_add(1, Ordering::SeqCst);
    Taken(at.map(|at| ManuallyDrop::new(contexts.swap_remove(at))))
}

impl Taken {
    /// The context lives on.
    pub(crate) fn put_back(self) {
        let Some(context) = self.0.map(ManuallyDrop::into_inner) else { return };
        let mut contexts = contexts();
        // Another thread may have met it again meanwhile.
        match contexts.iter_mut().find(|known| known.handle == context.handle) {
            Some(known) => known.merge(context),
            None => contexts.push(context),
        }
    }
}

/// Makes a context of a device current, and returns our own stream in it. Must be called with [`Relaxed`] in force.
pub(crate) fn stream_of_ours(device: CUdevice) -> Result<CUstream, CUresult> {
    let mut contexts = contexts();
    let context =
        contexts.iter_mut().find(|context| context.device == device).ok_or(CUresult::NOT_SUPPORTED)?;
    driver::set_context(context.handle)?;
    our_stream(context)
}

/// Our own stream in the calling thread's context. Must be called with [`Relaxed`] in force.
pub(crate) fn stream_of_ours_here() -> Result<CUstream, CUresult> {
    let current = driver::current_context()?;
    meet_context(current);
    let mut contexts = contexts();
    let context =
        contexts.iter_mut().find(|context| context.handle == current).ok_or(CUresult::NOT_SUPPORTED)?;
    our_stream(context)
}

/// The context must be current.
fn our_stream(context: &mut Context) -> Result<CUstream, CUresult> {
    if let Some(stream) = context.ours {
        return Ok(stream);
    }
    let stream = driver::create_stream()?;
    context.ours = Some(stream);
    context.meet(StreamKey::new(stream, false));
    Ok(stream)
}

/// Events behind all work that was submitted so far.
#[derive(Debug)]
pub(crate) struct Fence {
    events: Vec<Arc<Event>>,
    /// Where no event could be recorded yet.
    missing: Vec<Missing>,
}

/// A place that a capture keeps an event from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Missing {
    Stream(CUcontext, StreamKey),
    /// Threads' own default streams, which only a look at the whole context reaches.
    Whole(CUcontext),
}

/// Records an event on every stream that could carry work. Must be called with [`Relaxed`] in force, and with
/// nobody inside the gate if nothing that was submitted is to be missed.
pub(crate) fn fence() -> Fence {
    let mut fence = Fence { events: Vec::new(), missing: Vec::new() };
    for context in contexts().iter() {
        fence.events.extend(context.orphans.iter().cloned());
        fence
            .missing
            .extend(context.streams.iter().map(|stream| Missing::Stream(context.handle, stream.key)));
        fence.missing.extend(context.per_thread.then_some(Missing::Whole(context.handle)));
    }
    fence.record();
    fence
}

impl Fence {
    /// Drops what is complete; how much is left.
    pub(crate) fn poll(&mut self) -> usize {
        if !self.missing.is_empty() {
            self.record();
        }
        self.events.retain(|event| !event.is_complete());
        self.events.len() + self.missing.len()
    }

    /// Records what can be recorded without breaking a capture.
    fn record(&mut self) {
        // None may begin between the look and the record.
        let _quiet = capture::hold_off();
        let events = &mut self.events;
        self.missing.retain(|&missing| match record_one(missing) {
            Ok(event) => {
                events.extend(event);
                false
            }
            Err(error) if error.is_of_capture() => true,
            // The stream is gone, by a way that we did not see, and its work with it.
            Err(error) => {
                log::debug(format_args!("no event for {missing:?}: {error:?}"));
                false
            }
        });
    }
}

/// Whether a known stream of a context that synchronises with its legacy stream is capturing.
pub(crate) fn is_a_blocking_one_capturing(context: CUcontext) -> bool {
    let keys: Vec<StreamKey> = contexts()
        .iter()
        .filter(|known| known.handle == context)
        .flat_map(|known| known.streams.iter().filter(|stream| stream.blocking).map(|stream| stream.key))
        .collect();
    keys.iter().any(|key| driver::is_capturing(key.handle()))
}

/// An event for a place, if it needs one.
fn record_one(missing: Missing) -> Result<Option<Arc<Event>>, CUresult> {
    const IN_THE_WAY: CUresult = CUresult(900);
    match missing {
        Missing::Stream(context, key) => {
            driver::set_context(context)?;
            if key == StreamKey::LEGACY {
                match capture::legacy(context) {
                    capture::Legacy::Free => {}
                    capture::Legacy::Stands(event) => return Ok(event),
                    capture::Legacy::Unknown => return Err(IN_THE_WAY),
                }
            }
            if capture::is_capturing(key) {
                // Nothing runs on it now. What ran before is known where a capture began; where one was joined, it
                // is only known when that is over.
                return capture::before(key).ok_or(IN_THE_WAY);
            }
            Event::behind(key.handle()).map(|event| Some(Arc::new(event)))
        }
        Missing::Whole(_) if capture::open() > 0 => {
            capture::forget_dead_threads();
            Err(IN_THE_WAY)
        }
        Missing::Whole(context) => {
            driver::set_context(context)?;
            match Event::behind_everything(context) {
                Ok(event) => Ok(Some(Arc::new(event))),
                Err(CUresult::NOT_SUPPORTED) => driver::synchronize_context().map(|()| None),
                Err(error) => Err(error),
            }
        }
    }
}

/// A launch waits no longer than this for an older one: what that waits for may be this launch.
const WINDOW_PATIENCE: Duration = Duration::from_millis(200);

/// Waits until a stream may take another launch.
pub(crate) fn wait_for_window(key: StreamKey) {
    let begin = Instant::now();
    while gate::is_bounded() && begin.elapsed() < WINDOW_PATIENCE && !capture::is_capturing(key) {
        let full = with_stream(key, |stream| {
            let was_full = stream.marks.len() >= MARKS;
            while let Some((event, recorded)) = stream.marks.front() {
                if !event.is_complete() {
                    break;
                }
                if was_full && stream.marks.len() >= MARKS {
                    stream.window.waited(recorded.elapsed());
                }
                stream.marks.pop_front();
            }
            stream.marks.len() >= MARKS
        });
        if full != Some(true) {
            return;
        }
        gate::pause();
    }
}

/// A launch was made on a stream whose work in flight is bounded.
pub(crate) fn count_launch(key: StreamKey) {
    if capture::is_capturing(key) {
        return;
    }
    with_stream(key, |stream| {
        if stream.window.launched()
            && stream.marks.len() <= MARKS
            && let Ok(event) = Event::behind(key.handle())
        {
            stream.marks.push_back((event, Instant::now()));
        }
    });
}

/// Does something with what is known of a stream of the calling thread, in RELAXED mode.
fn with_stream<T>(key: StreamKey, body: impl FnOnce(&mut Stream) -> T) -> Option<T> {
    let _relaxed = Relaxed::begin();
    let current = driver::current_context().ok()?;
    let default = matches!(key, StreamKey::LEGACY | StreamKey::PER_THREAD);
    contexts()
        .iter_mut()
        .filter(|context| !default || context.handle == current)
        .find_map(
            |context| if key == StreamKey::PER_THREAD { context.own_stream() } else { context.stream(key) },
        )
        .map(body)
}

type Create = unsafe extern "C-unwind" fn(*mut CUstream, c_uint) -> CUresult;
type CreateWithPriority = unsafe extern "C-unwind" fn(*mut CUstream, c_uint, c_int) -> CUresult;
type Destroy = unsafe extern "C-unwind" fn(CUstream) -> CUresult;

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create(real: Create, stream: *mut CUstream, flags: c_uint) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(stream, flags) };
    // SAFETY: the driver answered for this place.
    unsafe { met_new(result, stream) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create_with_priority(
    real: CreateWithPriority,
    stream: *mut CUstream,
    flags: c_uint,
    priority: c_int,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(stream, flags, priority) };
    // SAFETY: the driver answered for this place.
    unsafe { met_new(result, stream) }
}

/// # Safety
/// `stream` is valid if `result` is success.
unsafe fn met_new(result: CUresult, stream: *mut CUstream) -> CUresult {
    if result == CUresult::SUCCESS && !stream.is_null() {
        // SAFETY: the driver wrote it.
        meet(StreamKey::new(unsafe { *stream }, false));
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn destroy(real: Destroy, stream: CUstream) -> CUresult {
    let key = StreamKey::new(stream, false);
    if key.address() > CU_STREAM_PER_THREAD {
        capture::forget(key);
        let _relaxed = Relaxed::begin();
        let mut known = false;
        for context in contexts().iter_mut() {
            if context.stream(key).is_some() {
                context.forget_stream(key);
                known = true;
            }
        }
        if known {
            GENERATION.fetch_add(1, Ordering::SeqCst);
        }
    }
    // SAFETY: the caller's argument.
    unsafe { real(stream) }
}
