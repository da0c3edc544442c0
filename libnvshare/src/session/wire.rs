//! The socket: frames in, frames out.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::mem::{ManuallyDrop, offset_of};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use nvshare_proto::{ClientMessage, Reply, Request, SchedulerMessage, VERSION, codec};

use super::report;
use crate::process::descriptor::{Descriptor, beyond_standard};
use crate::process::lock::lock;
use crate::process::{bell, config, passing, threads};

/// The descriptor of the connection. A forked child closes it, and the exit sends the last message through it.
static DESCRIPTOR: Descriptor = Descriptor::none();
/// Why the connection cannot be used any more.
const CLOSED_BY_HOST: &str = "the program closed its descriptor";
/// The protocol's version that is spoken on the connection.
static SPOKEN: AtomicU16 = AtomicU16::new(VERSION);
/// Held while a frame is written, so that frames do not mix.
static WRITING: Mutex<()> = Mutex::new(());

/// A scheduler whose queue of connections is full for this long does not answer. The session's thread does nothing else meanwhile.
const QUEUE_PATIENCE: Duration = Duration::from_millis(500);
/// A scheduler that does not read for this long is lost.
const WRITE_PATIENCE: Duration = Duration::from_secs(2);

/// A connection to the scheduler.
#[derive(Debug)]
pub(super) struct Wire {
    /// Closed only if the file behind it still is ours.
    stream: ManuallyDrop<UnixStream>,
    buffer: Vec<u8>,
    /// Frames that go out together.
    outgoing: Vec<u8>,
    /// The descriptors that came with frames, for each such frame.
    passed: VecDeque<Vec<OwnedFd>>,
}

impl Drop for Wire {
    fn drop(&mut self) {
        let _writing = lock(&WRITING);
        if DESCRIPTOR.take().is_some() {
            // SAFETY: it is used no more.
            unsafe { ManuallyDrop::drop(&mut self.stream) };
        }
    }
}

/// Connects. If the scheduler's queue of connections is full, this waits for a place in it, for about this long at most. A scheduler that
/// is stopped makes no place: connections that their programs have closed stay in the queue.
///
/// # Errors
/// The system's; [`ErrorKind::WouldBlock`]: there was no place.
fn connect(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let (address, length) = address_of(path)?;
    // SAFETY: no pointers.
    let number = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and ours.
    let stream = UnixStream::from(beyond_standard(unsafe { OwnedFd::from_raw_fd(number) }));
    // The time limit of writes is that of this call, too.
    stream.set_write_timeout(Some(patience))?;
    let until = Instant::now() + patience;
    loop {
        // SAFETY: an address of the given length.
        if unsafe { libc::connect(stream.as_raw_fd(), (&raw const address).cast(), length) } == 0 {
            return Ok(stream);
        }
        // A signal of the program ends a call with a time limit early, whatever its handler asks for.
        match io::Error::last_os_error() {
            error if error.kind() != ErrorKind::Interrupted => return Err(error),
            _ if Instant::now() >= until => return Err(ErrorKind::WouldBlock.into()),
            _ => {}
        }
    }
}

/// The address of a socket's file.
fn address_of(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // The standard library refuses a path that is too long, or has a zero in it.
    SocketAddr::from_pathname(path)?;
    let bytes = path.as_os_str().as_bytes();
    // SAFETY: plain memory, for which zeros are valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (place, byte) in address.sun_path.iter_mut().zip(bytes) {
        *place = *byte as libc::c_char;
    }
    // A zero ends it.
    Ok((address, (offset_of!(libc::sockaddr_un, sun_path) + bytes.len() + 1) as libc::socklen_t))
}

impl Wire {
    /// Connects, if a scheduler listens. This version is spoken on the connection.
    pub(super) fn connect(version: u16) -> io::Result<Self> {
        SPOKEN.store(version, Ordering::Relaxed);
        let stream = connect(config::socket(), QUEUE_PATIENCE)?;
        stream.set_write_timeout(Some(WRITE_PATIENCE))?;
        DESCRIPTOR.set(stream.as_raw_fd());
        let (buffer, outgoing) = (Vec::new(), Vec::new());
        Ok(Self { stream: ManuallyDrop::new(stream), buffer, outgoing, passed: VecDeque::new() })
    }

    /// Takes the descriptors that came with the next frame that has any. Some may be missing, if the process has too many open.
    pub(super) fn take_passed(&mut self) -> Vec<OwnedFd> {
        self.passed.pop_front().unwrap_or_default()
    }

    /// Puts a frame behind those that [`Self::flush`] sends. An older scheduler is not sent what it does not know.
    pub(super) fn put(&mut self, request: &Request) -> Result<(), String> {
        let frame = encode(request).map_err(|error| error.to_string())?;
        self.outgoing.extend_from_slice(&frame.unwrap_or_default());
        Ok(())
    }

    /// Sends the frames that were put, in one go: all that a hand-over has to say wakes the scheduler once. A scheduler that has closed the
    /// connection is no error here: the frames that it sent before, such as a refusal, are read first.
    pub(super) fn flush(&mut self) -> Result<(), String> {
        if self.outgoing.is_empty() {
            return Ok(());
        }
        let _writing = lock(&WRITING);
        let sent = write_all(DESCRIPTOR.get().ok_or(CLOSED_BY_HOST)?, &self.outgoing);
        self.outgoing.clear();
        match sent {
            Err(error) if !is_end(&error) => Err(error.to_string()),
            _ => Ok(()),
        }
    }

    /// Reads the frames that have come. The end of the connection comes with the whole frames before it.
    pub(super) fn receive(&mut self) -> Result<Vec<Reply>, (Vec<Reply>, End)> {
        let lost = |why: String| Err((Vec::new(), End::Lost(why)));
        if DESCRIPTOR.get().is_none() {
            return lost(CLOSED_BY_HOST.to_owned());
        }
        let mut chunk = [0; 4096];
        let read = match receive_with(self.stream.as_raw_fd(), &mut chunk, &mut self.passed) {
            Ok(0) => return lost("closed by the scheduler".to_owned()),
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(Vec::new()),
            Err(error) => return lost(error.to_string()),
        };
        self.buffer.extend_from_slice(chunk.get(..read).unwrap_or_default());
        let mut replies = Vec::new();
        loop {
            if let Some(version) = codec::falls_back(SPOKEN.load(Ordering::Relaxed), &self.buffer) {
                return Err((replies, End::Older { version }));
            }
            match codec::decode(&self.buffer) {
                Ok(Some((used, reply))) => {
                    self.buffer.drain(..used);
                    replies.push(reply);
                }
                Ok(None) => return Ok(replies),
                Err(error) => return Err((replies, End::Lost(error.to_string()))),
            }
        }
    }
}

/// The end of a connection.
#[derive(Debug)]
pub(super) enum End {
    /// The scheduler is older, and speaks a version that this library speaks as well.
    Older {
        /// That version.
        version: u16,
    },
    /// It is lost, for this reason.
    Lost(String),
}

/// A frame in the connection's version; none: that version has no such message.
fn encode(request: &Request) -> Result<Option<Vec<u8>>, codec::Error> {
    codec::encode_if_known(SPOKEN.load(Ordering::Relaxed), request)
}

/// How long a process without a session waits for a scheduler that does not answer.
const LOOK_PATIENCE: Duration = Duration::from_secs(2);

/// The scheduler's answer to a process that asks for the page of its tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TenantPage<T> {
    /// No scheduler answers.
    NoAnswer,
    /// There is no page, as no process of the tenant uses a GPU.
    None,
    /// The page.
    Page(T),
}

/// Asks for the page of this process's tenant on a connection of its own: its row and the descriptor.
pub(super) fn ask_for_page(run: Option<u64>) -> TenantPage<(u32, OwnedFd)> {
    try_to_ask(run, VERSION).unwrap_or(TenantPage::NoAnswer)
}

fn try_to_ask(run: Option<u64>, version: u16) -> Option<TenantPage<(u32, OwnedFd)>> {
    let stream = connect(config::socket(), LOOK_PATIENCE).ok()?;
    stream.set_read_timeout(Some(LOOK_PATIENCE)).ok()?;
    stream.set_write_timeout(Some(LOOK_PATIENCE)).ok()?;
    write_all(stream.as_raw_fd(), &codec::encode_in(version, &Request::Look { run }).ok()?).ok()?;
    let (mut bytes, mut passed) = ([0; 256], VecDeque::new());
    // A signal of the program ends a call with a time limit early, whatever its handler asks for.
    let until = Instant::now() + LOOK_PATIENCE;
    let read = loop {
        match receive_with(stream.as_raw_fd(), &mut bytes, &mut passed) {
            Err(error) if error.kind() == ErrorKind::Interrupted && Instant::now() < until => {}
            read => break read.ok()?,
        }
    };
    let answer = bytes.get(..read)?;
    if let Some(older) = codec::falls_back(version, answer) {
        return try_to_ask(run, older);
    }
    match codec::decode(answer) {
        Ok(Some((_, Reply::Client(SchedulerMessage::Quota { row })))) => {
            Some(TenantPage::Page((row, passed.pop_front()?.pop()?)))
        }
        Ok(Some((_, Reply::Refused { .. }))) => Some(TenantPage::None),
        _ => None,
    }
}

/// Reads bytes, and puts the descriptors that come with them behind those of earlier frames.
fn receive_with(descriptor: i32, bytes: &mut [u8], passed: &mut VecDeque<Vec<OwnedFd>>) -> io::Result<usize> {
    let (read, came) = passing::receive(descriptor, bytes)?;
    passed.extend(came);
    Ok(read)
}

/// Whether the other side has closed the connection.
fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
}

/// Writes without raising SIGPIPE in the program.
fn write_all(descriptor: i32, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        // SAFETY: readable bytes of the given length.
        let sent = unsafe { libc::send(descriptor, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
        if sent < 0 {
            let error = io::Error::last_os_error();
            if error.kind() == ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        }
        bytes = bytes.get(sent as usize..).unwrap_or_default();
    }
    Ok(())
}

/// Waits until the socket is readable, the bell rings, or the time is over. Returns whether the socket is readable.
pub(super) fn wait(wire: Option<&Wire>, timeout: Option<Duration>) -> bool {
    let socket = match (wire, DESCRIPTOR.get()) {
        // The program has closed the descriptor. Reading reports this.
        (Some(_), None) => return true,
        (Some(_), Some(number)) => number,
        (None, _) => -1,
    };
    // Without a bell, no other thread can wake this one. The first thread that cannot ring may do so at any time.
    let bell = bell::descriptor();
    let longest = if bell < 0 || bell::is_broken() { DEAF } else { LONGEST };
    let timeout = timeout.unwrap_or(longest).min(longest);
    let mut watched = [
        libc::pollfd { fd: bell, events: libc::POLLIN, revents: 0 },
        libc::pollfd { fd: socket, events: libc::POLLIN, revents: 0 },
    ];
    // Rounded up: a wait that ends before its time would be followed by another.
    let millis = timeout.as_micros().div_ceil(1000).max(1) as i32;
    // SAFETY: two valid entries; a negative descriptor is passed over.
    let polled = unsafe { libc::poll(watched.as_mut_ptr(), watched.len() as libc::nfds_t, millis) };
    if polled < 0 && io::Error::last_os_error().kind() != ErrorKind::Interrupted {
        // The program may have forbidden itself new descriptors, which forbids this call, or the call.
        threads::sleep(timeout.min(DEAF));
        bell::take_rings(bell);
        return wire.is_some() && has_come(socket);
    }
    let [bell_state, socket_state] = watched;
    if bell_state.revents != 0 {
        bell::take_rings(bell);
    }
    socket_state.revents != 0
}

/// Whether there are bytes to read, or the connection is over.
fn has_come(socket: i32) -> bool {
    let mut byte = 0u8;
    // SAFETY: a writable byte, which stays in the socket.
    let read = unsafe { libc::recv(socket, (&raw mut byte).cast(), 1, libc::MSG_PEEK | libc::MSG_DONTWAIT) };
    read >= 0 || io::Error::last_os_error().kind() != ErrorKind::WouldBlock
}

/// How often the thread wakes up by itself if there is no bell.
const DEAF: Duration = Duration::from_millis(20);
/// How often it does if there is one, so that a ring that is lost is noticed.
const LONGEST: Duration = Duration::from_secs(5);

/// Closes the parent's connection in a forked child.
pub(super) fn close_after_fork() {
    if let Some(descriptor) = DESCRIPTOR.take() {
        // SAFETY: a descriptor of ours, which nothing in the child uses.
        unsafe { libc::close(descriptor) };
    }
}

/// Sends the counters a last time, from the thread that exits.
pub(super) fn send_counters() {
    // The session's thread may be writing. If it is stuck, this thread does not wait for it.
    let Some(_writing) = (0..50)
        .find_map(|_| WRITING.try_lock().inspect_err(|_| threads::sleep(Duration::from_micros(100))).ok())
    else {
        return;
    };
    let Some(descriptor) = DESCRIPTOR.get() else { return };
    let counters = Request::Client(ClientMessage::Counters(report::counters()));
    if let Ok(Some(frame)) = encode(&counters) {
        // SAFETY: readable bytes of the given length; a short write loses a line of statistics.
        unsafe {
            let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
            libc::send(descriptor, frame.as_ptr().cast(), frame.len(), flags);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_place_in_a_full_queue_is_waited_for_as_long_as_is_said() {
        const PATIENCE: Duration = Duration::from_millis(200);
        let path = std::env::temp_dir().join(format!("nvshare-queue-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let connect = |path: &Path| connect(path, PATIENCE).map_err(|error| error.kind());
        let listener = UnixListener::bind(&path).unwrap();
        // SAFETY: a listening socket of ours. A second call sets the length of the queue: it has one place.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
        // It keeps the place when it is closed.
        drop(connect(&path).unwrap());
        let begin = Instant::now();
        assert_eq!(connect(&path).unwrap_err(), ErrorKind::WouldBlock);
        let waited = begin.elapsed();
        assert!(waited >= PATIENCE * 9 / 10 && waited < Duration::from_secs(5), "{waited:?}");
        drop(listener.accept().unwrap());
        drop(connect(&path).unwrap());
        drop(listener);
        assert_eq!(connect(&path).unwrap_err(), ErrorKind::ConnectionRefused);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(connect(&path).unwrap_err(), ErrorKind::NotFound);
        assert_eq!(connect(&path.join("x".repeat(108))).unwrap_err(), ErrorKind::InvalidInput);
    }
}
