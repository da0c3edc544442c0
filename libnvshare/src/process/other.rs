//! Another process, and whether it has ended.

use std::ffi::c_int;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use super::descriptor::Held;

/// Another process of this machine. The kernel's descriptor of it (`pidfd_open`, Linux 5.3) cannot be mistaken for a later process of
/// the same number.
#[derive(Debug)]
pub(crate) struct OtherProcess {
    pub(crate) number: libc::pid_t,
    /// None: the system does not say when it ends.
    end: Option<Held>,
    /// It would say so, but this process has no descriptor left.
    pub(crate) lacks_descriptor: bool,
}

impl OtherProcess {
    /// The process that has a number now; `None`: there is none.
    pub(crate) fn find(number: libc::pid_t) -> Option<Self> {
        // SAFETY: no pointers.
        let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, number, 0) };
        if opened < 0 {
            let error = io::Error::last_os_error().raw_os_error();
            let lacks_descriptor = matches!(error, Some(libc::EMFILE | libc::ENFILE));
            return (error != Some(libc::ESRCH)).then_some(Self { number, end: None, lacks_descriptor });
        }
        // SAFETY: the descriptor is new and ours.
        let end = Held::new(unsafe { OwnedFd::from_raw_fd(opened as c_int) });
        Some(Self { number, end: Some(end), lacks_descriptor: false })
    }

    /// A descriptor that can be read when the process has ended, with all its threads.
    pub(crate) fn watched(&self) -> Option<c_int> {
        self.end.as_ref()?.get()
    }

    /// Whether the process is known to have ended. The program may have closed the descriptor, and have one of its own files under the
    /// number. Where kernels give all such files one inode, only the kernel can tell a process's from others.
    pub(crate) fn has_ended(&self) -> bool {
        let Some(number) = self.watched() else { return false };
        let mut end = libc::pollfd { fd: number, events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry.
        let readable = unsafe { libc::poll(&raw mut end, 1, 0) } == 1 && end.revents & libc::POLLIN != 0;
        readable && is_of_process(number)
    }

    /// The descriptor is neither used nor closed any more: the number may be another file's.
    pub(crate) fn forget(&self) {
        self.end.iter().for_each(Held::forget);
    }

    /// Closes the descriptor, as a forked child does with what is its parent's.
    pub(crate) fn close(&self) {
        self.end.iter().for_each(Held::close);
    }
}

/// Whether a descriptor is one of a process.
fn is_of_process(number: c_int) -> bool {
    // SAFETY: no signal is sent; no pointer is read.
    let sent = unsafe {
        libc::syscall(libc::SYS_pidfd_send_signal, number, 0, std::ptr::null::<libc::siginfo_t>(), 0)
    };
    sent == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::EBADF)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_has_ended_when_the_kernel_says_so() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let number = child.id() as libc::pid_t;
        let other = OtherProcess::find(number).unwrap();
        assert!(!other.has_ended());
        child.kill().unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while !other.has_ended() {
            assert!(std::time::Instant::now() < deadline);
        }
        child.wait().unwrap();
        assert!(other.has_ended() && OtherProcess::find(number).is_none());
    }

    #[test]
    fn what_is_not_known_has_not_ended() {
        let nobody = OtherProcess::find(0).unwrap();
        assert!(nobody.watched().is_none() && !nobody.has_ended());
        // The number of a file of the program.
        // SAFETY: the descriptor is new and the test's.
        let event = unsafe { OwnedFd::from_raw_fd(libc::eventfd(1, libc::EFD_CLOEXEC)) };
        let mistaken = OtherProcess { number: 1, end: Some(Held::new(event)), lacks_descriptor: false };
        assert!(!mistaken.has_ended());
    }
}
