//! The slots in which threads note whether they are inside the gate.
//!
//! A slot belongs to one thread at a time. It is found through a thread-local pointer without a destructor. A key's destructor
//! gives it back when the thread ends, also by `pthread_cancel`. Slots themselves live for ever and are used again. Marks that
//! a thread left behind do not count. A slot is void when its thread is gone, and a mark whose stack frame is gone is removed
//! when the thread comes again.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use super::marks::Marks;
use super::{FENCE, FrameMark, Inside, door};
use crate::process::threads;
use crate::work::contexts;
use crate::work::stream_key::StreamKey;
use crate::work::streams::Stream;

/// Places for streams that a thread knows; a power of two.
const PLACES: usize = 128;
/// Places in which a stream may be.
const TRIES: usize = 4;

#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Slot {
    marks: Marks,
    /// The [`FrameMark`] of the call that stepped in.
    mark: AtomicUsize,
    /// The word in that mark.
    word: AtomicUsize,
    /// The streams that the thread has submitted to, by a hash of their addresses.
    known: [AtomicPtr<Stream>; PLACES],
    /// The [`contexts::generation`] in which these streams were learnt; 0: none.
    known_at: AtomicU64,
    /// The record of the thread's own default streams.
    own: Stream,
    gated: AtomicU64,
    passed_by: AtomicU64,
    /// The calls of this thread that the [door] counts, one inside the other.
    calls: AtomicU32,
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
    let free = |slot: &&Slot| slot.marks.take(me);
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

/// All slots that exist.
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
        marks: Marks { inside: AtomicU32::new(0), owner: AtomicI32::new(owner) },
        mark: AtomicUsize::new(0),
        word: AtomicUsize::new(0),
        known: [const { AtomicPtr::new(ptr::null_mut()) }; PLACES],
        known_at: AtomicU64::new(0),
        own: Stream::none(StreamKey::PER_THREAD),
        gated: AtomicU64::new(0),
        passed_by: AtomicU64::new(0),
        calls: AtomicU32::new(0),
        next: AtomicPtr::new(FIRST.load(Ordering::Acquire)),
    }));
    let mut first = slot.next.load(Ordering::Relaxed);
    while let Err(now) = FIRST.compare_exchange(first, slot, Ordering::AcqRel, Ordering::Acquire) {
        first = now;
        slot.next.store(first, Ordering::Relaxed);
    }
    slot
}

/// Makes the end of this thread give the slot back.
fn give_back_at_exit(slot: *const Slot) {
    unsafe extern "C" fn give_back(slot: *mut c_void) {
        let _ = MINE.try_with(|mine| mine.set(ptr::null()));
        // SAFETY: the value set below, a slot.
        if let Some(slot) = unsafe { slot.cast::<Slot>().as_ref() } {
            slot.marks.step_out();
            slot.forget_streams();
            // To end marks takes the driver. While the process is off the card, they stay for the thread that has the slot next.
            let _ = slot.begin_call();
            if door::WORD.load(Ordering::SeqCst) != door::CLOSED {
                slot.own.launch_window.reset();
            }
            slot.calls.store(0, Ordering::Release);
            slot.marks.give_back();
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
        self.marks.is_outside()
    }

    /// Marks the thread as inside, before its look at the gate.
    #[inline(always)]
    pub(super) fn step_in(&self, mark: &FrameMark) {
        // The word changes each time, so that a word that an earlier frame has left on the stack is not taken for this one's.
        let word = self.word.load(Ordering::Relaxed).wrapping_add(STEP);
        self.word.store(word, Ordering::Relaxed);
        mark.write(word);
        self.mark.store(ptr::from_ref(mark) as usize, Ordering::Relaxed);
        self.marks.step_in(&FENCE);
    }

    #[inline(always)]
    pub(super) fn step_out(&self) {
        self.marks.step_out();
    }

    /// The state of this slot for another call of the same thread, whose mark is `mark`.
    pub(super) fn inside(&self, mark: &FrameMark) -> Inside {
        let theirs = self.mark.load(Ordering::Relaxed);
        // Stacks grow downwards. A frame that is above may be gone all the same, with others in its place. Or it may be on the
        // stack of a coroutine that is unmapped by now. So the kernel reads the word.
        let lives = theirs > ptr::from_ref(mark) as usize
            && match read_word(theirs) {
                Word::Is(word) => word == self.word.load(Ordering::Relaxed),
                Word::Nowhere => false,
                // Going around the gate is better than a call that waits for its own thread.
                Word::Unknown => true,
            };
        if lives { Inside::Nested } else { Inside::Left }
    }

    /// The stream's record, if the thread has submitted to the stream and no context has ended since.
    #[inline(always)]
    pub(super) fn find(&self, stream: StreamKey) -> Option<&'static Stream> {
        if self.known_at.load(Ordering::Relaxed) != contexts::generation() {
            return None;
        }
        let first = place_of(stream);
        (0..TRIES).find_map(|try_| {
            let known = self.known.get((first + try_) % PLACES)?.load(Ordering::Relaxed);
            // SAFETY: null, or a record of a stream or of this slot; both live for ever.
            unsafe { known.as_ref() }.filter(|known| known.key() == stream)
        })
    }

    pub(super) fn learn(&self, stream: &'static Stream) {
        let generation = contexts::generation();
        if self.known_at.load(Ordering::Relaxed) != generation {
            self.known.iter().for_each(|known| known.store(ptr::null_mut(), Ordering::Relaxed));
            self.known_at.store(generation, Ordering::Relaxed);
        }
        let places =
            || (0..TRIES).filter_map(|try_| self.known.get((place_of(stream.key()) + try_) % PLACES));
        // If all places are taken, the first one is overwritten.
        let free = places().find(|known| known.load(Ordering::Relaxed).is_null()).or_else(|| places().next());
        if let Some(free) = free {
            free.store(ptr::from_ref(stream).cast_mut(), Ordering::Relaxed);
        }
    }

    /// Forgets which streams the thread has submitted to.
    pub(super) fn forget_streams(&self) {
        self.known_at.store(0, Ordering::Relaxed);
    }

    /// The record of the thread's own default streams, in whatever context.
    pub(super) fn own(&'static self) -> &'static Stream {
        &self.own
    }

    /// Only the owner counts, so a plain addition is enough.
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
        self.marks.is_vacant(threads::is_gone)
    }

    /// Counts a call, before its look at the door. Returns whether it is made from inside no other.
    #[inline(always)]
    pub(super) fn begin_call(&self) -> bool {
        let before = self.calls.load(Ordering::Relaxed);
        self.calls.store(before + 1, Ordering::Relaxed);
        FENCE.after_mark();
        before == 0
    }

    #[inline(always)]
    pub(super) fn end_call(&self) {
        self.calls.store(self.calls.load(Ordering::Relaxed) - 1, Ordering::Release);
    }

    /// Whether no call is counted, or only calls of a thread that is gone.
    pub(super) fn has_no_call(&self) -> bool {
        self.calls.load(Ordering::SeqCst) == 0 || self.marks.has_no_owner(threads::is_gone)
    }
}

/// The step from one word of a mark to the next. It is odd, so that all words occur, and large, so that few look like a
/// program's.
const STEP: usize = 0x9e37_79b9_7f4a_7c15;

/// The first place in which a stream's record may be.
#[inline(always)]
fn place_of(stream: StreamKey) -> usize {
    (stream.address() >> 4).wrapping_mul(STEP) >> (usize::BITS - PLACES.trailing_zeros())
}

/// The result of reading an address.
enum Word {
    Is(usize),
    /// There is no memory.
    Nowhere,
    /// The kernel does not say.
    Unknown,
}

/// The word at an address of this process, if there is one.
fn read_word(address: usize) -> Word {
    let mut word = 0usize;
    let to = libc::iovec { iov_base: (&raw mut word).cast(), iov_len: size_of::<usize>() };
    let from = libc::iovec { iov_base: address as *mut c_void, iov_len: size_of::<usize>() };
    // SAFETY: a place for the word; the kernel checks the other end.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &raw const to, 1, &raw const from, 1, 0) };
    if read == size_of::<usize>().cast_signed() {
        return Word::Is(word);
    }
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::EFAULT) => Word::Nowhere,
        _ => Word::Unknown,
    }
}
