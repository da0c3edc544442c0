//! The bell that wakes the session's thread out of its wait. Every layer may ring it.
//!
//! The bell is a pair of sockets and not an `eventfd` or a pipe. If the program closes a socket, the wait ends. Each socket is
//! a file of its own, so a foreign file under its number is recognised. Ringing raises no SIGPIPE.

use std::ffi::c_int;
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use super::descriptor::{Descriptor, beyond_standard};

static READING: Descriptor = Descriptor::none();
static WRITING: Descriptor = Descriptor::none();

static BELLS: Bells = Bells::new();

/// The bells that have been made, and the last one of them that a thread could not ring.
#[derive(Debug)]
struct Bells {
    /// The number of the present bell. Zero: none has been made.
    present: AtomicU32,
    /// A thread cannot ring a bell if it has other descriptors than the session's, or if a filter forbids the call. Zero: none.
    /// Each new bell rings, so a ring that was lost before it does no harm.
    unrung: AtomicU32,
}

impl Bells {
    const fn new() -> Self {
        Self { present: AtomicU32::new(0), unrung: AtomicU32::new(0) }
    }

    fn present(&self) -> u32 {
        self.present.load(Ordering::SeqCst)
    }

    fn add(&self) {
        self.present.fetch_add(1, Ordering::SeqCst);
    }

    /// Notes that a thread could not ring this bell.
    fn note_unrung(&self, bell: u32) {
        self.unrung.fetch_max(bell, Ordering::SeqCst);
    }

    fn is_present_unrung(&self) -> bool {
        let unrung = self.unrung.load(Ordering::SeqCst);
        unrung > 0 && unrung == self.present()
    }
}

/// Wakes the session's thread, because something changed that the scheduler may have to know. If the bell is already ringing, that
/// suffices. If this fails otherwise, the thread wakes up by itself from then on ([`is_broken`]).
pub(crate) fn ring() {
    // Read first: a bell that is made meanwhile rings.
    let bell = BELLS.present();
    let is_rung = WRITING.get().is_some_and(|number| {
        // A raw system call: `send` is a cancellation point, and a cancelled thread would not have rung.
        // SAFETY: a readable byte and no address; the descriptor does not block.
        let sent = unsafe {
            libc::syscall(libc::SYS_sendto, number, c"!".as_ptr(), 1usize, libc::MSG_NOSIGNAL, 0usize, 0usize)
        };
        sent >= 0 || io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock
    });
    if !is_rung {
        BELLS.note_unrung(bell);
    }
}

/// Whether a thread could not ring the present bell.
pub(crate) fn is_broken() -> bool {
    BELLS.is_present_unrung()
}

/// The descriptor that becomes readable when the bell rings. If the program closed the old one, this makes a new one.
/// Returns -1 if that fails. Only the session's thread calls this.
pub(crate) fn descriptor() -> c_int {
    if let (Some(number), Some(_)) = (READING.get(), WRITING.get()) {
        return number;
    }
    close();
    let mut ends = [-1; 2];
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: a place for two descriptors.
    if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) } != 0 {
        return -1;
    }
    // SAFETY: both are new and ours.
    let [reading, writing] =
        ends.map(|end| unsafe { beyond_standard(OwnedFd::from_raw_fd(end)).into_raw_fd() });
    READING.set(reading);
    WRITING.set(writing);
    BELLS.add();
    // A ring between the old pair and this one was lost.
    ring();
    reading
}

/// Reads the rings that have come from a [`descriptor`].
pub(crate) fn take_rings(descriptor: c_int) {
    let mut rings = [0u8; 64];
    // SAFETY: writable bytes of the given length; the descriptor does not block.
    unsafe { libc::read(descriptor, rings.as_mut_ptr().cast(), rings.len()) };
}

/// Closes the bell, if it still is ours. A forked child calls this: the bell is its parent's.
pub(crate) fn close() {
    for end in [&READING, &WRITING] {
        if let Some(number) = end.take() {
            // SAFETY: a descriptor of ours.
            unsafe { libc::close(number) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Bells;

    #[test]
    fn a_bell_is_broken_only_if_that_very_one_could_not_be_rung() {
        let bells = Bells::new();
        // A thread rings before there is a bell.
        bells.note_unrung(bells.present());
        assert!(!bells.is_present_unrung());
        bells.add();
        assert!(!bells.is_present_unrung());
        bells.note_unrung(bells.present());
        assert!(bells.is_present_unrung());
        bells.add();
        assert!(!bells.is_present_unrung());
        // The ring of a thread that was still at the bell before.
        bells.note_unrung(1);
        assert!(!bells.is_present_unrung());
    }
}
