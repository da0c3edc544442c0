//! The contexts and streams that work was seen on: what a drain has to look at.
//!
//! They are learnt from the hooks of their creation and, where that was not seen (the driver's private tables
//! create some), at the gate. A stream that the program destroys may still have work: its last event stays.

use std::collections::VecDeque;
use std::ffi::{c_int, c_uint};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::cuda::{CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUcontext, CUdevice, CUresult, CUstream};
use crate::driver::{self, Event, Relaxed};
use crate::window::{MARKS, Window};
use crate::{capture, gate};

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
    window: Window,
    /// Marks behind launches, oldest first.
    marks: VecDeque<(Event, Instant)>,
}

#[derive(Debug)]
pub(crate) struct Context {
    handle: CUcontext,
    device: CUdevice,
    streams: Vec<Stream>,
    /// A thread's own default stream was used: only a look at the whole context sees it.
    per_thread: bool,
    /// Our own streams, for moving memory.
    ours: Vec<CUstream>,
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
            self.streams.push(Stream { key, window: Window::new(), marks: VecDeque::new() });
        }
    }

    fn forget_stream(&mut self, key: StreamKey) {
        let Some(at) = self.streams.iter().position(|stream| stream.key == key) else { return };
        self.streams.swap_remove(at);
        self.orphans.retain(|event| !event.is_complete());
        if !driver::is_capturing(key.handle()) {
            self.orphans.extend(Event::behind(key.handle()).map(Arc::new));
        }
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
            ours: Vec::new(),
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
    let owner = match key {
        StreamKey::LEGACY | StreamKey::PER_THREAD => current,
        // A green context's streams have no plain context of their own: the current one will do.
        _ => driver::stream_context(key.handle()).unwrap_or(current),
    };
    let mut contexts = contexts();
    let known = contexts.iter_mut().find(|context| context.handle == owner || context.handle == current);
    let Some(context) = known else { return false };
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
        if let Some(context) = self.0 {
            contexts().push(ManuallyDrop::into_inner(context));
        }
    }
}

/// Makes a context of a device current, and returns one of our own streams in it. Must be called with [`Relaxed`]
/// in force.
pub(crate) fn stream_of_ours(device: CUdevice, which: usize) -> Result<CUstream, CUresult> {
    let mut contexts = contexts();
    let context =
        contexts.iter_mut().find(|context| context.device == device).ok_or(CUresult::NOT_SUPPORTED)?;
    driver::set_context(context.handle)?;
    our_stream(context, which)
}

/// Our own stream in the calling thread's context. Must be called with [`Relaxed`] in force.
pub(crate) fn stream_of_ours_here() -> Result<CUstream, CUresult> {
    let current = driver::current_context()?;
    meet_context(current);
    let mut contexts = contexts();
    let context =
        contexts.iter_mut().find(|context| context.handle == current).ok_or(CUresult::NOT_SUPPORTED)?;
    our_stream(context, 0)
}

/// The context must be current.
fn our_stream(context: &mut Context, which: usize) -> Result<CUstream, CUresult> {
    while context.ours.len() <= which {
        let stream = driver::create_stream()?;
        context.ours.push(stream);
        context.meet(StreamKey::new(stream, false));
    }
    context.ours.get(which).copied().ok_or(CUresult::NOT_SUPPORTED)
}

/// Events behind all work that was submitted so far.
#[derive(Debug)]
pub(crate) struct Fence {
    events: Vec<Arc<Event>>,
    /// Contexts in which a thread's own default stream was used.
    whole: Vec<CUcontext>,
}

/// Records an event on every stream that could carry work. Must be called with [`Relaxed`] in force, and with
/// nobody inside the gate if nothing that was submitted is to be missed.
pub(crate) fn fence() -> Fence {
    let mut fence = Fence { events: Vec::new(), whole: Vec::new() };
    let captures = capture::open();
    for context in contexts().iter_mut() {
        if driver::set_context(context.handle).is_err() {
            continue;
        }
        if context.per_thread {
            fence.whole.push(context.handle);
        }
        fence.events.extend(context.orphans.iter().cloned());
        for stream in &context.streams {
            let handle = stream.key.handle();
            let may_record = match stream.key {
                // An event on the legacy stream breaks a capture on a stream that synchronises with it; then
                // nothing can have been submitted to it since the capture began, and that event serves.
                StreamKey::LEGACY if captures > 0 => match capture::legacy_event(context.handle) {
                    capture::Legacy::Free => true,
                    capture::Legacy::Recorded(event) => {
                        fence.events.push(event);
                        false
                    }
                },
                _ => captures == 0 || !driver::is_capturing(handle),
            };
            if may_record {
                fence.events.extend(Event::behind(handle).map(Arc::new));
            }
        }
    }
    fence
}

impl Fence {
    /// Drops what is complete; how much is left.
    pub(crate) fn poll(&mut self) -> usize {
        self.events.retain(|event| !event.is_complete());
        self.events.len()
    }

    /// Waits for threads' own default streams, which no event of another thread can reach. Not while a capture is
    /// open: looking at a whole context would break it.
    pub(crate) fn look_at_whole_contexts(&mut self) {
        for context in self.whole.drain(..) {
            let _quiet = capture::hold_off();
            if capture::open() == 0 && driver::set_context(context).is_ok() {
                let _ = driver::synchronize_context();
            }
        }
    }
}

/// Waits until a stream may take another launch.
pub(crate) fn wait_for_window(key: StreamKey) {
    loop {
        if capture::is_capturing(key) {
            return;
        }
        let mut full = false;
        let _relaxed = Relaxed::begin();
        for context in contexts().iter_mut() {
            let Some(stream) = context.stream(key) else { continue };
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
            full |= stream.marks.len() >= MARKS;
        }
        if !full || !gate::is_bounded() {
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
    let Ok(current) = driver::current_context() else { return };
    for context in contexts().iter_mut() {
        if matches!(key, StreamKey::LEGACY | StreamKey::PER_THREAD) && context.handle != current {
            continue;
        }
        let Some(stream) = context.stream(key) else { continue };
        if !stream.window.launched() {
            return;
        }
        let _relaxed = Relaxed::begin();
        if let Ok(event) = Event::behind(key.handle()) {
            stream.marks.push_back((event, Instant::now()));
        }
        return;
    }
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
