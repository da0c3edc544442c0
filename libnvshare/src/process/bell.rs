//! The bell that wakes the session's thread out of its wait. Every layer may ring it.
//!
//! Two sockets: if the host closes them, the wait ends, where it would not for an `eventfd`; each is a file of its
//! own, where an `eventfd` cannot be told from another; and ringing raises no SIGPIPE, as a pipe would.

use std::ffi::c_int;

use super::descriptor::Descriptor;

static READING: Descriptor = Descriptor::none();
static WRITING: Descriptor = Descriptor::none();

/// Wakes the session's thread: something changed that the scheduler may have to know. A bell that cannot be rung is being
/// rung already, or the thread looks by itself.
pub(crate) fn ring() {
    if let Some(number) = WRITING.get() {
        // By its number: in `send` a thread of the host may be cancelled, and then nobody has rung.
        // SAFETY: a readable byte and no address; the descriptor does not block.
        unsafe {
            libc::syscall(
                libc::SYS_sendto,
                number,
                c"!".as_ptr(),
                1usize,
                libc::MSG_NOSIGNAL,
                0usize,
                0usize,
            );
        }
    }
}

/// The descriptor that becomes readable when the bell rings; a new one if the host took the old one. -1: there is none.
/// For the session's thread.
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
    let [reading, writing] = ends;
    READING.set(reading);
    WRITING.set(writing);
    // Who rang meanwhile was not heard.
    ring();
    reading
}

/// Takes the rings that have come, from what [`descriptor`] returned.
pub(crate) fn take_rings(descriptor: c_int) {
    let mut rings = [0u8; 64];
    // SAFETY: writable bytes of the given length; the descriptor does not block.
    unsafe { libc::read(descriptor, rings.as_mut_ptr().cast(), rings.len()) };
}

/// There is no bell any more: in a forked child it is the parent's.
pub(crate) fn close() {
    for end in [&READING, &WRITING] {
        if let Some(number) = end.take() {
            // SAFETY: a descriptor of ours.
            unsafe { libc::close(number) };
        }
    }
}
