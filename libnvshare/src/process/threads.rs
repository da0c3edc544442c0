//! Threads: those of the library, and questions about the program's.

use std::io;

/// Starts a thread of ours that no signal of the host's is delivered to.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> bool {
    // SAFETY: signal sets are plain memory, filled before use; the thread's mask is put back as it was.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut before = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(body);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        spawned.is_ok()
    }
}

/// Whether a thread of this process has ended. What cannot be asked has not.
pub(crate) fn is_gone(thread: libc::pid_t) -> bool {
    // SAFETY: signal 0 only asks whether the thread exists.
    let asked = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, 0) };
    asked != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
}

/// A short pause for those who poll. No thread of the host is cancelled in it, as it would be in `nanosleep`.
pub(crate) fn pause() {
    let time = libc::timespec { tv_sec: 0, tv_nsec: 50_000 };
    // SAFETY: a valid time; how much is left of it is not asked for.
    unsafe { libc::syscall(libc::SYS_nanosleep, &raw const time, 0usize) };
}
