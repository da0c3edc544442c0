//! The identity of the process at the other end of a connection, as the kernel says.

#![allow(
    unsafe_code,
    reason = "no crate asks for the process descriptor of a peer, and tokio takes descriptors on a promise"
)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Once;

use nvshare_core::Identity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{fstat, fstatfs};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tracing::warn;

use super::control_groups::Groups;

/// Why the end of some processes is not known by itself.
const ENDS_WITH_CONNECTION: &str = "before Linux 6.5 the end of a process whose number cannot be seen (a container, without hostPID) is known by the end of its connection only";

/// The process at the other end of a connection.
#[derive(Debug)]
pub(crate) struct Peer {
    /// The kernel's facts about the process.
    pub(crate) identity: Identity,
    /// Its control groups when it connected.
    pub(crate) groups: Groups,
    /// Becomes readable when the process is gone, and with it all its memory on GPUs.
    descriptor: Option<AsyncFd<OwnedFd>>,
}

impl Peer {
    /// Asks the kernel for the peer of a connection.
    #[must_use]
    pub(crate) fn of(stream: &UnixStream) -> Self {
        // In another pid namespace the number is 0.
        let pid = stream.peer_cred().ok().and_then(|cred| cred.pid()).filter(|&pid| pid > 0);
        // A peer that has ended has no descriptor, and its number may be another process's.
        let descriptor = peer_descriptor(stream).or_else(|error| match pid {
            Some(pid) if is_unknown_to_kernel(&error) => open(pid),
            _ => Err(error),
        });
        if descriptor.as_ref().is_err_and(is_unknown_to_kernel) {
            static SAID: Once = Once::new();
            SAID.call_once(|| warn!("{ENDS_WITH_CONNECTION}"));
        }
        let process = descriptor.as_ref().ok().and_then(unique);
        let pid = pid.map(i32::cast_unsigned);
        let identity = Identity { pid, process, ..Identity::default() };
        let mut peer =
            Self { identity, groups: Groups::default(), descriptor: descriptor.and_then(register).ok() };
        if let Some(pid) = pid {
            peer.groups = peer.read(|| Groups::of(pid)).unwrap_or_default();
            peer.identity.process = process.or_else(|| peer.read(|| started(pid)).flatten());
        }
        peer
    }

    /// Whether the process is known to live.
    #[must_use]
    pub(crate) fn lives(&self) -> bool {
        self.has_ended() == Some(false)
    }

    /// The answer of `read` about the process by its number; none if the process has ended meanwhile: then the number may be another
    /// process's.
    pub(crate) fn read<T>(&self, read: impl FnOnce() -> T) -> Option<T> {
        let said = read();
        (self.has_ended() != Some(true)).then_some(said)
    }

    /// Whether the process has ended; none where the kernel cannot tell.
    fn has_ended(&self) -> Option<bool> {
        let mut watched = [PollFd::new(self.descriptor.as_ref()?.get_ref(), PollFlags::IN)];
        Some(poll(&mut watched, Some(&Timespec::default())) != Ok(0))
    }

    /// Waits until the process is gone; for ever where the kernel cannot tell.
    pub(crate) async fn gone(&self) {
        match &self.descriptor {
            Some(descriptor) => {
                let _ = descriptor.readable().await;
            }
            None => std::future::pending().await,
        }
    }
}

/// The descriptor of the process that connected, even if its number belongs to another process by now. Since Linux 6.5.
fn peer_descriptor(stream: &UnixStream) -> io::Result<OwnedFd> {
    let mut descriptor: i32 = -1;
    let mut length = size_of::<i32>() as libc::socklen_t;
    // SAFETY: a place for the answer and its length.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut descriptor).cast(),
            &raw mut length,
        )
    };
    if result != 0 || descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Whether the kernel is too old for [`peer_descriptor`]. A process that has ended gives other errors.
fn is_unknown_to_kernel(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOPROTOOPT)
}

/// A number that no two processes share: since Linux 6.9 each process has an inode of its own in pidfs.
fn unique(descriptor: &OwnedFd) -> Option<u64> {
    const PID_FS_MAGIC: u64 = 0x5049_4446;
    let is_pidfs = fstatfs(descriptor).is_ok_and(|filesystem| filesystem.f_type as u64 == PID_FS_MAGIC);
    is_pidfs.then(|| fstat(descriptor).ok()).flatten().map(|file| file.st_ino)
}

/// The same before Linux 6.9, of a process that can be seen: its number, of 22 bits, and the time of its start in ticks since the
/// machine's, the 22nd field of the main thread's `stat` (proc(5)). No two processes with one number start in one tick.
fn started(pid: u32) -> Option<u64> {
    // For `/proc/PID/stat` the kernel goes through all threads of the process.
    let stat = std::fs::read(format!("/proc/{pid}/task/{pid}/stat")).ok()?;
    // The name of the program stands in the second field, in parentheses. It may be any bytes, parentheses too.
    let behind_name = stat.get(stat.iter().rposition(|&byte| byte == b')')? + 1..)?;
    let ticks: u64 = std::str::from_utf8(behind_name).ok()?.split_whitespace().nth(19)?.parse().ok()?;
    Some(ticks << 22 | u64::from(pid))
}

fn register(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an owned descriptor gives the same one for as long as it lives.
    unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }.map_err(io::Error::from)
}

fn open(pid: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::NotFound)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn processes_differ_by_when_they_started() {
        let mut children = [(); 2].map(|()| Command::new("cat").stdin(Stdio::piped()).spawn().unwrap());
        let own = std::process::id();
        let [one, other] = children.each_ref().map(|child| started(child.id()).unwrap());
        assert!(one != other && started(own) != Some(one) && started(own) == started(own));
        // The same number, which another process has by then, stands for another start.
        assert!(one >> 22 >= started(own).unwrap() >> 22, "a child starts after its parent");
        for child in &mut children {
            drop(child.stdin.take());
            child.wait().unwrap();
        }
        assert_eq!(started(children[0].id()), None, "it has ended");
    }

    #[tokio::test]
    async fn a_number_is_read_for_as_long_as_the_process_lives() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let descriptor = open(child.id().cast_signed()).and_then(register).unwrap();
        let peer =
            Peer { identity: Identity::default(), groups: Groups::default(), descriptor: Some(descriptor) };
        assert_eq!((peer.lives(), peer.read(|| 1)), (true, Some(1)));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!((peer.lives(), peer.read(|| 1)), (false, None));
        let unknown = Peer { identity: Identity::default(), groups: Groups::default(), descriptor: None };
        assert_eq!((unknown.lives(), unknown.read(|| 1)), (false, Some(1)));
    }
}
