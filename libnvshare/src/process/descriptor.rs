//! The library's descriptors in the program's process.
//!
//! A program may close descriptors that it did not open, and later get the same number for a file of its own. A write to
//! that number would end up in the program's file. So the library looks at the file behind the number before each use.
//!
//! A program may have closed its standard descriptors and still write to them. So none of the library's has such a number ([`beyond_standard`]).

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// Gives a new descriptor another number if it has a standard one. With no number left, it keeps the one that it has.
pub(crate) fn beyond_standard(descriptor: OwnedFd) -> OwnedFd {
    if descriptor.as_raw_fd() > libc::STDERR_FILENO {
        return descriptor;
    }
    // SAFETY: an open descriptor of ours.
    let number =
        unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_DUPFD_CLOEXEC, libc::STDERR_FILENO + 1) };
    // SAFETY: the descriptor is new and ours.
    if number < 0 { descriptor } else { unsafe { OwnedFd::from_raw_fd(number) } }
}

/// A descriptor, and the file behind it when the library opened it.
#[derive(Debug)]
pub(crate) struct Descriptor {
    number: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

impl Descriptor {
    /// No descriptor.
    pub(crate) const fn none() -> Self {
        Self { number: AtomicI32::new(-1), device: AtomicU64::new(0), inode: AtomicU64::new(0) }
    }

    /// Remembers this descriptor and the file behind it.
    pub(crate) fn set(&self, number: c_int) {
        let (device, inode) = file_of(number).unwrap_or((0, 0));
        self.number.store(-1, Ordering::SeqCst);
        self.device.store(device, Ordering::SeqCst);
        self.inode.store(inode, Ordering::SeqCst);
        self.number.store(number, Ordering::SeqCst);
    }

    /// Forgets the descriptor. Returns its number if the file behind it still is ours.
    pub(crate) fn take(&self) -> Option<c_int> {
        let number = self.get();
        self.number.store(-1, Ordering::SeqCst);
        number
    }

    /// The number, if the file behind it still is ours.
    pub(crate) fn get(&self) -> Option<c_int> {
        let number = self.number.load(Ordering::SeqCst);
        let file = (self.device.load(Ordering::SeqCst), self.inode.load(Ordering::SeqCst));
        (number >= 0 && file_of(number) == Some(file)).then_some(number)
    }
}

/// A descriptor that is closed with this, if the file behind it still is ours.
#[derive(Debug)]
pub(crate) struct Held(Descriptor);

impl Held {
    pub(crate) fn new(descriptor: OwnedFd) -> Self {
        let held = Descriptor::none();
        held.set(beyond_standard(descriptor).into_raw_fd());
        Self(held)
    }

    /// The number, if the file behind it still is ours.
    pub(crate) fn get(&self) -> Option<c_int> {
        self.0.get()
    }

    /// The number, which this does not close any more.
    pub(crate) fn into_number(self) -> Option<c_int> {
        self.0.take()
    }

    /// From now on it is not closed with this.
    pub(crate) fn forget(&self) {
        self.0.number.store(-1, Ordering::SeqCst);
    }

    /// Closes it, as a forked child does with what is its parent's.
    pub(crate) fn close(&self) {
        if let Some(number) = self.0.take() {
            // A raw system call: `close` is a cancellation point, and this is no place to unwind from.
            // SAFETY: a descriptor of ours, which is used no more.
            unsafe { libc::syscall(libc::SYS_close, number) };
        }
    }
}

/// The number of descriptors that the process may have open.
pub(crate) fn limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a place for the answer.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur
}

impl Drop for Held {
    fn drop(&mut self) {
        self.close();
    }
}

fn file_of(number: c_int) -> Option<(u64, u64)> {
    status(number).map(|status| (status.st_dev, status.st_ino))
}

/// The kernel's description of the file behind a number; `None`: it is not open.
pub(crate) fn status(number: c_int) -> Option<libc::stat> {
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: a place for the answer, which is written if the call succeeds.
    unsafe { (libc::fstat(number, status.as_mut_ptr()) == 0).then(|| status.assume_init()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsRawFd;

    #[test]
    fn another_file_under_the_same_number_is_not_ours() {
        let descriptor = Descriptor::none();
        assert_eq!(descriptor.get(), None);
        let number = File::open("/proc/self/status").unwrap().into_raw_fd();
        descriptor.set(number);
        assert_eq!(descriptor.get(), Some(number));
        let other = File::open("/dev/null").unwrap();
        // SAFETY: both are this test's own.
        unsafe { libc::dup2(other.as_raw_fd(), number) };
        assert_eq!(descriptor.get(), None);
        // SAFETY: as above.
        unsafe { libc::close(number) };
        assert_eq!(descriptor.take(), None);
    }
}
