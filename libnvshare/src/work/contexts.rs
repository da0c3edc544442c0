//! The contexts that live. A drain looks at them, and memory is moved in them.
//!
//! The library learns a context from the hooks that create it or make it current. The driver's private tables create some
//! contexts without a hook; the library learns those from the calls that use them.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::life::{Gone, Life};
use crate::driver::types::{CUcontext, CUdevice, CUresult, CUstream};
use crate::driver::{self, Relaxed};
use crate::process::lock::lock;
use crate::process::{lifecycle, threads};

/// A context of the program.
#[derive(Debug)]
pub(crate) struct Context {
    handle: CUcontext,
    device: CUdevice,
    life: Life,
    /// How many times it has to be detached until it ends: once, and once more for each `cuCtxAttach`.
    attached: AtomicU32,
    /// The library's own stream in it, for moving memory.
    ours: OnceLock<CUstream>,
    /// Held while a move is under way on this stream.
    moves: Mutex<()>,
    /// Held while a capture begins or spreads in it.
    beginnings: Mutex<()>,
    /// The primary context of which this is a part, if it is a green one.
    primary: OnceLock<Arc<Context>>,
    /// The driver's error for which memory of it was given up; 0: it has all its memory.
    failure: AtomicI32,
    /// A thread of the library waits for all its work.
    waited_for: AtomicBool,
    /// How often memory was freed to a pool here.
    pool_frees: AtomicU64,
    /// As many of these frees the library has synchronized with.
    seen_frees: AtomicU64,
}

/// The one wait for all work of a context that is under way.
#[derive(Debug)]
pub(crate) struct Wait(Arc<Context>);

impl Drop for Wait {
    fn drop(&mut self) {
        self.0.waited_for.store(false, Ordering::SeqCst);
    }
}

static CONTEXTS: Mutex<Vec<Arc<Context>>> = Mutex::new(Vec::new());
static GENERATION: AtomicU64 = AtomicU64::new(1);
/// The number of contexts that the program is ending now.
static ENDS: AtomicUsize = AtomicUsize::new(0);

/// The time that a piece of memory waits for contexts that are being ended, and the time afterwards in which none waits.
const LET_THEM_END: Duration = Duration::from_millis(100);

/// Waits while the program ends a context, but for a limited time. The driver's call takes many times the locks that it holds
/// while memory moves. So the end of a context would wait for one piece after the other. The mover calls this before each.
/// Returns earlier if it is `given_up`.
pub(crate) fn let_them_end(given_up: impl Fn() -> bool) {
    static GIVEN_UP: Mutex<Option<Instant>> = Mutex::new(None);
    let is_recent = |at: &Instant| at.elapsed() < LET_THEM_END;
    if ENDS.load(Ordering::SeqCst) == 0 || lock(&GIVEN_UP).as_ref().is_some_and(is_recent) {
        return;
    }
    let begin = Instant::now();
    while ENDS.load(Ordering::SeqCst) > 0 && !given_up() && !lifecycle::is_exiting() {
        if begin.elapsed() >= LET_THEM_END {
            *lock(&GIVEN_UP) = Some(Instant::now());
            return;
        }
        threads::pause();
    }
}

/// Counts as the end of a context until it is dropped.
struct End;

impl End {
    fn begins() -> Self {
        ENDS.fetch_add(1, Ordering::SeqCst);
        Self
    }
}

impl Drop for End {
    fn drop(&mut self) {
        ENDS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A number that changes when a context ends. Handles that a thread remembers may belong to other contexts and streams then.
#[inline(always)]
pub(crate) fn generation() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

impl Context {
    pub(crate) fn handle(&self) -> CUcontext {
        self.handle
    }

    pub(crate) fn device(&self) -> CUdevice {
        self.device
    }

    pub(crate) fn life(&self) -> &Life {
        &self.life
    }

    /// Held while a capture begins or spreads in it. A look at a primary context may break a capture in a green one, so both have one.
    pub(crate) fn beginnings(&self) -> &Mutex<()> {
        self.primary.get().map_or(&self.beginnings, |primary| &primary.beginnings)
    }

    pub(crate) fn is_green(&self) -> bool {
        self.primary.get().is_some()
    }

    /// Notes that this is a green context, a part of this primary one.
    pub(crate) fn mark_green(&self, primary: Arc<Self>) {
        let _ = self.primary.set(primary);
    }

    /// The context to which memory belongs that is made while this one is current. Memory that is made in a green context belongs
    /// to the primary one, and outlives the green one (measured on an H200). So do arrays, and page-locked memory of the host.
    pub(crate) fn of_memory(self: &Arc<Self>) -> Arc<Self> {
        Arc::clone(self.primary.get().unwrap_or(self))
    }

    /// The driver's error because of which memory of the context has not come back and never will. Its work would reach addresses
    /// without memory, so calls that submit some answer this error.
    pub(crate) fn failure(&self) -> Option<CUresult> {
        Some(CUresult(self.failure.load(Ordering::SeqCst))).filter(|&error| error != CUresult::SUCCESS)
    }

    /// Notes that memory of the context is given up because of an error, before the gate opens.
    pub(crate) fn fail(&self, error: CUresult) {
        self.failure.store(error.0, Ordering::SeqCst);
    }

    /// Begins the wait for all its work. `None`: an earlier one is not over, as the driver's call cannot be given up.
    pub(crate) fn begin_wait(self: &Arc<Self>) -> Option<Wait> {
        (!self.waited_for.swap(true, Ordering::SeqCst)).then(|| Wait(Arc::clone(self)))
    }

    /// Notes that memory was freed to a pool, in the order of a stream of the context.
    pub(crate) fn note_pool_free(&self) {
        self.pool_frees.fetch_add(1, Ordering::SeqCst);
    }

    /// How often this was noted.
    pub(crate) fn pool_frees(&self) -> u64 {
        self.pool_frees.load(Ordering::SeqCst)
    }

    /// Notes that the library has synchronized with the context after this many frees to pools.
    pub(crate) fn saw_frees(&self, frees: u64) {
        self.seen_frees.fetch_max(frees, Ordering::SeqCst);
    }

    /// Whether there are frees to pools with which the library has not synchronized.
    pub(crate) fn has_unseen_frees(&self) -> bool {
        self.pool_frees() > self.seen_frees.load(Ordering::SeqCst)
    }

    /// Notes that `cuCtxAttach` succeeded.
    pub(crate) fn attach(&self) {
        self.attached.fetch_add(1, Ordering::SeqCst);
    }

    /// Notes that `cuCtxDetach` is about to be called. Returns whether this call ends the context.
    pub(crate) fn detach(&self) -> bool {
        let less = |attached: u32| attached.checked_sub(1).filter(|&left| left > 0);
        self.attached.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_err()
    }

    /// Makes a driver call with the context current, in RELAXED mode, while the context lives and the program does not
    /// exit. The thread's own context is current again afterwards.
    pub(crate) fn with<T>(
        &self,
        call: impl FnOnce() -> Result<T, CUresult>,
    ) -> Result<Result<T, CUresult>, Gone> {
        let Some(_running) = lifecycle::hold_off_exit() else { return Err(Gone::Ending) };
        let _alive = self.life.enter()?;
        let _relaxed = Relaxed::begin();
        Ok(driver::with_current(self.handle, call))
    }

    /// Moves memory by `call` on the library's own stream, and waits for it. Only one move is under way at a time. The driver
    /// queues a move behind an incomplete one, and a running host function blocks that queue (measured). It does a move on an
    /// idle stream within the call. The context must be current and live through the call, with [`Relaxed`] in force.
    pub(crate) fn move_in_order(
        &self,
        call: impl FnOnce(CUstream) -> Result<(), CUresult>,
    ) -> Result<(), CUresult> {
        let _order = lock(&self.moves);
        let stream = self.stream_of_ours()?;
        call(stream)?;
        driver::synchronize_stream(stream)
    }

    /// Begins moving memory by `call` on the library's own stream, and does not wait for it. The context must be current
    /// and live through the call, with [`Relaxed`] in force.
    pub(crate) fn begin_move<T>(
        &self,
        call: impl FnOnce(CUstream) -> Result<T, CUresult>,
    ) -> Result<T, CUresult> {
        let _order = lock(&self.moves);
        call(self.stream_of_ours()?)
    }

    /// Whether work of the context has failed, so that the driver refuses all that follows. Without a stream of the library's
    /// there, that is not known.
    pub(crate) fn is_broken(&self) -> bool {
        let Some(stream) = self.ours.get() else { return false };
        let answer = self.with(|| driver::query_stream(*stream));
        answer.is_ok_and(|answer| answer.is_err_and(CUresult::ends_all_work))
    }

    /// The library's own stream. The context must be current and live through the call, with [`Relaxed`] in force.
    fn stream_of_ours(&self) -> Result<CUstream, CUresult> {
        if let Some(stream) = self.ours.get() {
            return Ok(*stream);
        }
        let stream = driver::create_stream()?;
        // If two threads create one, the second stream stays unused until the context ends.
        Ok(*self.ours.get_or_init(|| stream))
    }
}

/// The contexts that live, or are ending.
pub(crate) fn all() -> Vec<Arc<Context>> {
    lock(&CONTEXTS).clone()
}

/// Whether memory of any context was given up.
pub(crate) fn has_any_failed() -> bool {
    lock(&CONTEXTS).iter().any(|context| context.failure().is_some())
}

/// The contexts of a device.
pub(crate) fn of_device(device: CUdevice) -> impl Iterator<Item = Arc<Context>> {
    all().into_iter().filter(move |context| context.device == device)
}

/// A context of a device for memory that belongs to none: the first that lives, and not a green one if there is another.
pub(crate) fn lasting(device: CUdevice) -> Option<Arc<Context>> {
    of_device(device).filter(|context| context.life.is_alive()).min_by_key(|context| context.is_green())
}

/// The context with this handle, if the library knows it.
pub(crate) fn find(handle: CUcontext) -> Option<Arc<Context>> {
    lock(&CONTEXTS).iter().find(|context| context.handle == handle).cloned()
}

/// The calling thread's current context. The library learns it if necessary. `None`: there is none, or it does not live.
pub(crate) fn current() -> Option<Arc<Context>> {
    let handle = driver::current_context().ok()?;
    if let Some(known) = find(handle) {
        return Some(known);
    }
    // The driver still returns a context that another thread has destroyed, but creates nothing in it (measured).
    let _relaxed = Relaxed::begin();
    match driver::create_event() {
        Ok(event) => driver::destroy_event(event),
        Err(CUresult::NOT_SUPPORTED) => {}
        Err(_) => return None,
    }
    Some(learn(handle, driver::current_device().ok()?))
}

/// Learns the calling thread's current context, as it may get work from now on.
pub(crate) fn learn_current() {
    static LAST: AtomicUsize = AtomicUsize::new(0);
    let Ok(handle) = driver::current_context() else { return };
    let seen = (handle.0 as usize).rotate_left(16) ^ generation() as usize;
    if LAST.load(Ordering::Relaxed) != seen && current().is_some() {
        LAST.store(seen, Ordering::Relaxed);
    }
}

/// Learns a context of a device. The driver has just returned it, so it lives.
pub(crate) fn learn(handle: CUcontext, device: CUdevice) -> Arc<Context> {
    let mut contexts = lock(&CONTEXTS);
    if let Some(known) = contexts.iter().find(|known| known.handle == handle && known.life.is_alive()) {
        return Arc::clone(known);
    }
    let context = Arc::new(Context {
        handle,
        device,
        life: Life::begun(),
        attached: AtomicU32::new(1),
        ours: OnceLock::new(),
        moves: Mutex::new(()),
        beginnings: Mutex::new(()),
        primary: OnceLock::new(),
        failure: AtomicI32::new(0),
        waited_for: AtomicBool::new(false),
        pool_frees: AtomicU64::new(0),
        seen_frees: AtomicU64::new(0),
    });
    // A context that is just ending under this handle is another context.
    contexts.retain(|known| known.handle != handle);
    contexts.push(Arc::clone(&context));
    context
}

/// Ends a context by `call`. Returns the driver's answer, and whether the context has ended: not if the driver reports an
/// error, nor if `lives_on` says so.
pub(crate) fn end(
    context: &Arc<Context>,
    call: impl FnOnce() -> CUresult,
    lives_on: impl FnOnce() -> bool,
) -> (CUresult, bool) {
    // If the thread is cancelled inside the call, nothing is known of the handle any more.
    let undo = crate::process::unwind::OnUnwind::new(|| forget(context));
    let is_ending = End::begins();
    context.life.end();
    let result = call();
    drop(is_ending);
    undo.done();
    let kept = result != CUresult::SUCCESS || lives_on();
    let contexts = lock(&CONTEXTS);
    if kept && contexts.iter().any(|known| Arc::ptr_eq(known, context)) {
        context.life.begin();
        return (result, false);
    }
    drop(contexts);
    forget(context);
    (result, true)
}

fn forget(context: &Arc<Context>) {
    context.life.over();
    lock(&CONTEXTS).retain(|known| !Arc::ptr_eq(known, context));
    GENERATION.fetch_add(1, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(address: usize) -> CUcontext {
        CUcontext(address as *mut _)
    }

    #[test]
    fn a_context_ends_when_the_driver_has_ended_it() {
        let context = learn(handle(0x1_0000), 0);
        assert!(Arc::ptr_eq(&context, &learn(handle(0x1_0000), 0)));
        let before = generation();
        assert_eq!(end(&context, || CUresult::INVALID_VALUE, || false), (CUresult::INVALID_VALUE, false));
        assert_eq!(end(&context, || CUresult::SUCCESS, || true), (CUresult::SUCCESS, false));
        assert!(context.life().is_alive());
        assert_eq!(end(&context, || CUresult::SUCCESS, || false), (CUresult::SUCCESS, true));
        assert!(!context.life().is_alive() && find(handle(0x1_0000)).is_none());
        assert_ne!(generation(), before);
    }

    #[test]
    fn memory_moves_when_no_context_is_ending_any_more_or_after_a_while() {
        let moves = || {
            let begin = Instant::now();
            let_them_end(|| false);
            begin.elapsed()
        };
        let (context, over) = (&learn(handle(0x4_0000), 0), &AtomicBool::new(false));
        std::thread::scope(|scope| {
            let (begun, begins) = std::sync::mpsc::channel();
            let (may_end, ends) = std::sync::mpsc::channel();
            scope.spawn(move || {
                let call = || {
                    begun.send(()).unwrap();
                    ends.recv().unwrap();
                    over.store(true, Ordering::SeqCst);
                    CUresult::SUCCESS
                };
                end(context, call, || false)
            });
            begins.recv().unwrap();
            // It takes too long: the next piece does not wait as well.
            assert!(moves() >= LET_THEM_END && !over.load(Ordering::SeqCst));
            moves();
            let_them_end(|| true);
            assert!(!over.load(Ordering::SeqCst));
            std::thread::sleep(LET_THEM_END);
            let waits = scope.spawn(moves);
            may_end.send(()).unwrap();
            waits.join().unwrap();
        });
        assert!(over.load(Ordering::SeqCst));
    }

    #[test]
    fn a_handle_that_comes_again_is_another_context() {
        let old = learn(handle(0x2_0000), 0);
        let mut new = None;
        // Another thread gets the handle before the driver's call returns to this one.
        let ended = end(
            &old,
            || {
                new = Some(learn(handle(0x2_0000), 0));
                CUresult::SUCCESS
            },
            || false,
        );
        assert_eq!(ended, (CUresult::SUCCESS, true));
        let new = new.unwrap();
        assert!(!Arc::ptr_eq(&old, &new) && new.life().is_alive() && !old.life().is_alive());
        assert!(Arc::ptr_eq(&find(handle(0x2_0000)).unwrap(), &new));
    }

    #[test]
    fn a_context_is_detached_once_more_than_it_was_attached() {
        let context = learn(handle(0x3_0000), 0);
        context.attach();
        context.attach();
        assert_eq!([(); 3].map(|()| context.detach()), [false, false, true]);
    }
}
