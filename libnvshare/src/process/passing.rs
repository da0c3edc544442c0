//! Messages over sockets that descriptors come with (`SCM_RIGHTS`).

use std::ffi::c_int;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use super::descriptor::beyond_standard;

/// The largest number of descriptors of one message: what fits into [`CONTROL`].
pub(crate) const MAX_DESCRIPTORS: usize = 64;

/// Words of room for the control message of as many descriptors. Words are aligned as control messages have to be.
const CONTROL: usize = 2 + MAX_DESCRIPTORS.div_ceil(2);

/// Reads bytes, and the descriptors that come with them; none came: `None`. The kernel ends a read behind the bytes that have
/// descriptors. Some may be missing, if the process has too many open.
pub(crate) fn receive(socket: c_int, bytes: &mut [u8]) -> io::Result<(usize, Option<Vec<OwnedFd>>)> {
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = [0u64; CONTROL];
    // SAFETY: a message of one part, and room for control messages, in buffers that live on. The macros that are made for it
    // walk the kernel's answer; each descriptor is new and ours.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control) as _;
        let read = libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC);
        if read < 0 {
            return Err(io::Error::last_os_error());
        }
        // The kernel leaves out those for which the process has no numbers left, and says so.
        let mut came = Vec::new();
        let mut any = message.msg_flags & libc::MSG_CTRUNC != 0;
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while let Some(control) = header.as_ref() {
            if control.cmsg_level == libc::SOL_SOCKET && control.cmsg_type == libc::SCM_RIGHTS {
                let count = (control.cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<c_int>();
                let numbers = libc::CMSG_DATA(header).cast::<c_int>();
                for i in 0..count {
                    came.push(beyond_standard(OwnedFd::from_raw_fd(numbers.add(i).read_unaligned())));
                }
                any = true;
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
        Ok((read as usize, any.then_some(came)))
    }
}

/// Sends a message with descriptors, [`MAX_DESCRIPTORS`] at most, without waiting and without raising SIGPIPE.
///
/// # Errors
/// The system's, or that these are too many.
pub(crate) fn send(socket: c_int, bytes: &[u8], descriptors: &[c_int]) -> io::Result<()> {
    if descriptors.len() > MAX_DESCRIPTORS {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = [0u64; CONTROL];
    let length = size_of_val(descriptors);
    // SAFETY: a message of one part that is read, and a control message within its buffer, which has room for as many
    // descriptors.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        if !descriptors.is_empty() {
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(length as u32) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(length as u32) as _;
            std::ptr::copy_nonoverlapping(descriptors.as_ptr().cast::<u8>(), libc::CMSG_DATA(header), length);
        }
        libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    match sent {
        sent if sent < 0 => Err(io::Error::last_os_error()),
        sent if sent as usize != bytes.len() => Err(io::ErrorKind::WriteZero.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixDatagram;

    use super::*;

    #[test]
    fn descriptors_come_with_their_message() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        let file = File::open("/dev/null").unwrap();
        for count in [0, 1, MAX_DESCRIPTORS] {
            send(ours.as_raw_fd(), b"abc", &vec![file.as_raw_fd(); count]).unwrap();
            let mut bytes = [0; 8];
            let (read, came) = receive(theirs.as_raw_fd(), &mut bytes).unwrap();
            assert_eq!((&bytes[..read], came.map_or(0, |came| came.len())), (&b"abc"[..], count));
        }
        assert!(send(ours.as_raw_fd(), b"abc", &[0; MAX_DESCRIPTORS + 1]).is_err());
    }
}
