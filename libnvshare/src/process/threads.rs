//! Threads of the library, and questions about threads of the program.

use std::cell::Cell;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, Scope, ScopedJoinHandle};
use std::time::Duration;

use crate::process::elf;

thread_local! {
    static OWN: Cell<bool> = const { Cell::new(false) };
}

/// Threads that call the driver in the background.
static WORKERS: AtomicUsize = AtomicUsize::new(0);

/// Whether the calling thread is one of the library's.
pub(crate) fn is_own() -> bool {
    OWN.try_with(Cell::get).unwrap_or(false)
}

/// Whether a thread runs that was started by [`spawn_worker`].
pub(crate) fn has_workers() -> bool {
    WORKERS.load(Ordering::SeqCst) > 0
}

/// Counts as a worker until it is dropped.
struct Worker;

impl Drop for Worker {
    fn drop(&mut self) {
        WORKERS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Starts a thread of the library that calls the driver and ends when that is done. Returns whether it was started.
pub(crate) fn spawn_worker(name: &str, body: impl FnOnce() + Send + 'static) -> bool {
    WORKERS.fetch_add(1, Ordering::SeqCst);
    let worker = Worker;
    spawn(name, move || {
        let _worker = worker;
        body();
    })
}

/// Whether a thread can have values of its own. Rust's thread needs a key for that, and ends the process if there is none.
fn has_keys() -> bool {
    let mut keys: [libc::pthread_key_t; 2] = [0; 2];
    // SAFETY: places for keys; those that are made are deleted.
    unsafe {
        let mut made = 0;
        while let Some(key) = keys.get_mut(made) {
            if libc::pthread_key_create(key, None) != 0 {
                break;
            }
            made += 1;
        }
        keys.iter().take(made).for_each(|&key| _ = libc::pthread_key_delete(key));
        made == keys.len()
    }
}

/// The stack of a thread of the library.
const STACK: usize = 2 << 20;

/// A thread of the library that is not started yet. The C library takes the memory that each thread has of the program from the stack that is asked
/// for. RUST_MIN_STACK of the program holds for its own threads.
fn builder(name: &str) -> Builder {
    Builder::new().name(name.to_owned()).stack_size(STACK + memory_of_each_thread())
}

/// Bytes that each thread has of the program and its libraries. Libraries that are loaded later have theirs elsewhere.
fn memory_of_each_thread() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(elf::memory_of_each_thread)
}

/// Has Rust look up what it needs to start threads. Its first thread asks the loader, and so waits for its lock. This caller must not hold what
/// a constructor of a library waits for, which runs under that lock.
pub(crate) fn look_up() {
    /// More than there are addresses, so no thread is started.
    const TOO_LARGE: usize = 1 << 60;
    memory_of_each_thread();
    if has_keys() {
        let _ = Builder::new().stack_size(TOO_LARGE).spawn(|| ());
    }
}

/// Starts a thread of the library, with all signals blocked. Returns whether it was started.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> bool {
    if !has_keys() {
        return false;
    }
    let body = move || {
        OWN.set(true);
        body();
    };
    // SAFETY: signal sets are plain memory and are filled before use. The calling thread's mask is restored.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut before = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let spawned = builder(name).spawn(body);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        spawned.is_ok()
    }
}

/// Starts a thread of the library that may borrow, from another thread of the library, whose signals are blocked. `None`: it was not
/// started.
pub(crate) fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    body: impl FnOnce() -> T + Send + 'scope,
) -> Option<ScopedJoinHandle<'scope, T>> {
    let body = move || {
        OWN.set(true);
        body()
    };
    if has_keys() { builder(name).spawn_scoped(scope, body).ok() } else { None }
}

/// Whether a thread of this process has ended. If the kernel does not say, it has not.
pub(crate) fn is_gone(thread: libc::pid_t) -> bool {
    // SAFETY: signal 0 only asks whether the thread exists.
    let asked = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, 0) };
    asked != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
}

/// From now on, pauses of this thread last as long as they say: by default the kernel lets each take 50 microseconds more.
pub(crate) fn be_punctual() {
    // SAFETY: changes the timer slack of the calling thread, which is the library's.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000 as libc::c_ulong) };
}

/// A short pause between two polls.
pub(crate) const PAUSE: Duration = Duration::from_micros(50);

/// Work that is complete says so within microseconds, and a pause takes far longer. So a thread polls without pauses for this time.
pub(crate) const SOON: Duration = Duration::from_micros(50);

/// Pauses for a short time between two polls.
pub(crate) fn pause() {
    sleep(PAUSE);
}

/// How far apart polls are of something that may take long: a part of the time waited so far. Its end is seen late by that part
/// at most. To wake a thread takes the processor longer than to poll.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// The time waited so far is divided by this.
    pub(crate) part: u32,
    /// The longest pause.
    pub(crate) most: Duration,
}

impl Pace {
    /// The pause after this much waiting.
    pub(crate) fn pause(self, waited: Duration) -> Duration {
        (waited / self.part).clamp(PAUSE, self.most)
    }
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
}

/// `PTHREAD_CANCEL_DISABLE`, of glibc and musl.
const CANCEL_DISABLE: libc::c_int = 1;

/// While this lives, the thread is not cancelled inside a function of the C library. Some of them are cancellation points, and Rust does
/// not unwind from them. The thread is cancelled at its next one.
#[derive(Debug)]
pub(crate) struct Uncancelled {
    before: libc::c_int,
    /// It is of the thread that made it.
    _thread: std::marker::PhantomData<*const ()>,
}

impl Uncancelled {
    pub(crate) fn begin() -> Self {
        let mut before = 0;
        // SAFETY: a place for the state before.
        unsafe { pthread_setcancelstate(CANCEL_DISABLE, &raw mut before) };
        Self { before, _thread: std::marker::PhantomData }
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: the state before; the other one is not asked for.
        unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
    }
}

/// Sleeps for less than a second. It is a raw system call, since the C library's functions are cancellation points.
pub(crate) fn sleep(time: Duration) {
    let time = libc::timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    // SAFETY: a valid time. The rest of an interrupted sleep is not asked for.
    unsafe { libc::syscall(libc::SYS_nanosleep, &raw const time, 0usize) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_counts_until_it_ends() {
        static MAY_END: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
        assert!(!is_own());
        assert!(spawn_worker("nvshare-test", || {
            assert!(is_own());
            while !MAY_END.load(Ordering::SeqCst) {
                pause();
            }
        }));
        assert!(has_workers());
        MAY_END.store(true, Ordering::SeqCst);
        while has_workers() {
            pause();
        }
    }

    /// The stack of this thread in bytes, with the memory that each thread has.
    fn own_stack() -> usize {
        let mut bytes = 0;
        // SAFETY: attributes are plain memory; they are filled, read and given back.
        unsafe {
            let mut attributes = std::mem::zeroed();
            assert_eq!(libc::pthread_getattr_np(libc::pthread_self(), &raw mut attributes), 0);
            libc::pthread_attr_getstacksize(&raw const attributes, &raw mut bytes);
            libc::pthread_attr_destroy(&raw mut attributes);
        }
        bytes
    }

    #[test]
    fn a_thread_has_a_stack_beside_the_memory_that_each_thread_has() {
        static BYTES: AtomicUsize = AtomicUsize::new(0);
        assert!(spawn("nvshare-test", || BYTES.store(own_stack(), Ordering::SeqCst)));
        while BYTES.load(Ordering::SeqCst) == 0 {
            pause();
        }
        // This test has some. The C library rounds the sum down.
        assert!(memory_of_each_thread() > 64 && BYTES.load(Ordering::SeqCst) > STACK, "{BYTES:?}");
    }

    #[test]
    fn polls_come_late_by_a_part_of_the_wait() {
        let pace = Pace { part: 16, most: Duration::from_millis(1) };
        for (waited, micros) in [(0, 50), (800, 50), (8_000, 500), (16_000, 1_000), (9_000_000, 1_000)] {
            let pause = pace.pause(Duration::from_micros(waited));
            assert_eq!(pause, Duration::from_micros(micros), "after {waited} us");
        }
    }
}
