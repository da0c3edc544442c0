//! Where each thread says whether it is inside the gate.
//!
//! A slot belongs to one thread at a time. It is found through a thread-local pointer without a destructor, and
//! given back by a key's destructor when the thread ends (also by `pthread_cancel`); slots themselves live for
//! ever and are used again. What a thread left behind counts for nothing: a slot is void when its thread is gone,
//! and a mark whose stack frame is gone is taken back when the thread comes again.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use super::fence;
use crate::streams::StreamKey;

/// Streams that a thread remembers having met.
const REMEMBERED: usize = 4;

#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Slot {
    /// 1: between step in and step out.
    inside: AtomicU32,
    /// The thread; 0: nobody's.
    owner: AtomicI32,
    /// Where on its stack the thread stepped in.
    frame: AtomicUsize,
    /// What the gate has met in this thread, by address.
    met: [AtomicUsize; REMEMBERED],
    /// [`crate::streams::generation`] when that was true; 0: never.
    met_at: AtomicU64,
    gated: AtomicU64,
    passed_by: AtomicU64,
    next: AtomicPtr<Slot>,
}

static FIRST: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());

thread_local! {
    static MINE: Cell<*const Slot> = const { Cell::new(ptr::null()) };
}

/// This thread's slot, or null if it has none yet.
#[inline(always)]
pub(super) fn current() -> *const Slot {
    MINE.try_with(Cell::get).unwrap_or(ptr::null())
}

/// This thread's slot; it gets one if it has none.
pub(super) fn acquire() -> *const Slot {
    let mine = current();
    if !mine.is_null() {
        return mine;
    }
    // SAFETY: no arguments, cannot fail.
    let me = unsafe { libc::gettid() };
    let free = |slot: &&Slot| slot.owner.compare_exchange(0, me, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let slot: *const Slot = match all().find(free) {
        Some(slot) => slot,
        None => push(me),
    };
    let _ = MINE.try_with(|mine| mine.set(slot));
    give_back_at_exit(slot);
    slot
}

/// In a forked child the slot belongs to the parent's thread.
pub(super) fn forget_current() {
    let _ = MINE.try_with(|mine| mine.set(ptr::null()));
}

/// Every slot there ever was.
pub(super) fn all() -> impl Iterator<Item = &'static Slot> {
    let mut next = FIRST.load(Ordering::Acquire);
    std::iter::from_fn(move || {
        // SAFETY: slots are leaked, and linked before they are published.
        let slot = unsafe { next.as_ref() }?;
        next = slot.next.load(Ordering::Acquire);
        Some(slot)
    })
}

fn push(owner: i32) -> &'static Slot {
    let slot = Box::leak(Box::new(Slot {
        inside: AtomicU32::new(0),
        owner: AtomicI32::new(owner),
        frame: AtomicUsize::new(0),
        met: [const { AtomicUsize::new(0) }; REMEMBERED],
        met_at: AtomicU64::new(0),
        gated: AtomicU64::new(0),
        passed_by: AtomicU64::new(0),
        next: AtomicPtr::new(FIRST.load(Ordering::Acquire)),
    }));
    let mut first = slot.next.load(Ordering::Relaxed);
    while let Err(now) = FIRST.compare_exchange(first, slot, Ordering::AcqRel, Ordering::Acquire) {
        first = now;
        slot.next.store(first, Ordering::Relaxed);
    }
    slot
}

/// Has the slot given back when this thread ends.
fn give_back_at_exit(slot: *const Slot) {
    unsafe extern "C" fn give_back(slot: *mut c_void) {
        let _ = MINE.try_with(|mine| mine.set(ptr::null()));
        // SAFETY: the value set below, a slot.
        if let Some(slot) = unsafe { slot.cast::<Slot>().as_ref() } {
            slot.inside.store(0, Ordering::SeqCst);
            slot.met_at.store(0, Ordering::Relaxed);
            slot.owner.store(0, Ordering::Release);
        }
    }
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    let key = KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: a place for the key and a destructor that is never unmapped (the library is not unloaded).
        (unsafe { libc::pthread_key_create(&raw mut key, Some(give_back)) } == 0).then_some(key)
    });
    if let Some(key) = key {
        // SAFETY: a key that exists. If this fails, the slot is void once its thread is gone.
        unsafe { libc::pthread_setspecific(*key, slot.cast()) };
    }
}

impl Slot {
    #[inline(always)]
    pub(super) fn is_outside(&self) -> bool {
        self.inside.load(Ordering::Relaxed) == 0
    }

    /// Marks the thread as inside, before its look at the gate.
    #[inline(always)]
    pub(super) fn step_in(&self, frame: usize) {
        self.frame.store(frame, Ordering::Relaxed);
        fence::mark(&self.inside);
    }

    #[inline(always)]
    pub(super) fn step_out(&self) {
        self.inside.store(0, Ordering::Release);
    }

    /// Whether the frame that stepped in is still on the stack above the given one.
    pub(super) fn is_above(&self, frame: usize) -> bool {
        self.frame.load(Ordering::Relaxed) > frame
    }

    /// Whether the gate has met this stream in this thread, with the contexts as they are.
    #[inline(always)]
    pub(super) fn knows(&self, stream: StreamKey) -> bool {
        self.met_at.load(Ordering::Relaxed) == crate::streams::generation()
            && self
                .met
                .get(stream.bucket(REMEMBERED))
                .is_some_and(|met| met.load(Ordering::Relaxed) == stream.address())
    }

    pub(super) fn learn(&self, stream: StreamKey) {
        let generation = crate::streams::generation();
        if self.met_at.load(Ordering::Relaxed) != generation {
            self.met.iter().for_each(|met| met.store(0, Ordering::Relaxed));
            self.met_at.store(generation, Ordering::Relaxed);
        }
        if let Some(met) = self.met.get(stream.bucket(REMEMBERED)) {
            met.store(stream.address(), Ordering::Relaxed);
        }
    }

    /// Only the owner counts, so a plain addition will do.
    #[inline(always)]
    pub(super) fn count(&self) {
        self.gated.store(self.gated.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    pub(super) fn count_passed_by(&self) {
        self.passed_by.store(self.passed_by.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    pub(super) fn totals(&self) -> (u64, u64) {
        (self.gated.load(Ordering::Relaxed), self.passed_by.load(Ordering::Relaxed))
    }

    /// Whether nobody is inside by this slot: not marked, or marked by a thread that is gone.
    pub(super) fn is_vacant(&self) -> bool {
        if self.inside.load(Ordering::SeqCst) == 0 {
            return true;
        }
        let owner = self.owner.load(Ordering::Acquire);
        // SAFETY: signal 0 only asks whether the thread exists.
        owner == 0 || unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), owner, 0) } != 0
    }
}
