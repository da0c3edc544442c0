//! The socket: frames in, frames out.

use std::io::{ErrorKind, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nvshare_proto::{ClientMessage, Reply, Request, codec, paths};

use crate::counters;

/// The descriptor, for a forked child to close and for the last word at exit; -1: none.
static DESCRIPTOR: AtomicI32 = AtomicI32::new(-1);
/// Held while a frame is written, so that two never mix.
static WRITING: Mutex<()> = Mutex::new(());

/// A scheduler that does not read for this long is lost.
const WRITE_PATIENCE: Duration = Duration::from_secs(2);

/// Where the scheduler is looked for.
pub(super) fn path() -> PathBuf {
    let system = Path::new(paths::SYSTEM_SOCKET);
    paths::clients_socket(system.exists())
}

/// A connection to the scheduler.
#[derive(Debug)]
pub(super) struct Wire {
    stream: UnixStream,
    buffer: Vec<u8>,
}

impl Drop for Wire {
    fn drop(&mut self) {
        let _writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
        DESCRIPTOR.store(-1, Ordering::SeqCst);
    }
}

impl Wire {
    /// Connects, if a scheduler listens.
    pub(super) fn connect() -> Result<Self, String> {
        let path = path();
        let describe = |error: std::io::Error| format!("{}: {error}", path.display());
        let stream = UnixStream::connect(&path).map_err(describe)?;
        stream.set_write_timeout(Some(WRITE_PATIENCE)).map_err(describe)?;
        DESCRIPTOR.store(stream.as_raw_fd(), Ordering::SeqCst);
        Ok(Self { stream, buffer: Vec::new() })
    }

    /// Sends a frame.
    pub(super) fn send(&mut self, request: &Request) -> Result<(), String> {
        let frame = codec::encode(request).map_err(|error| error.to_string())?;
        let _writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
        write_all(self.stream.as_raw_fd(), &frame)
    }

    /// Reads what has come; an error comes with what was whole before it.
    pub(super) fn receive(&mut self) -> Result<Vec<Reply>, (Vec<Reply>, String)> {
        let mut chunk = [0; 4096];
        let read = match self.stream.read(&mut chunk) {
            Ok(0) => return Err((Vec::new(), "closed by the scheduler".to_owned())),
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(Vec::new()),
            Err(error) => return Err((Vec::new(), error.to_string())),
        };
        self.buffer.extend_from_slice(chunk.get(..read).unwrap_or_default());
        let mut replies = Vec::new();
        loop {
            match codec::decode(&self.buffer) {
                Ok(Some((used, reply))) => {
                    self.buffer.drain(..used);
                    replies.push(reply);
                }
                Ok(None) => return Ok(replies),
                Err(error) => return Err((replies, error.to_string())),
            }
        }
    }
}

/// Writes without raising SIGPIPE in the host.
fn write_all(descriptor: i32, mut bytes: &[u8]) -> Result<(), String> {
    while !bytes.is_empty() {
        // SAFETY: readable bytes of the given length.
        let sent = unsafe { libc::send(descriptor, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
        if sent < 0 {
            let error = std::io::Error::last_os_error();
            if error.kind() == ErrorKind::Interrupted {
                continue;
            }
            return Err(error.to_string());
        }
        bytes = bytes.get(sent as usize..).unwrap_or_default();
    }
    Ok(())
}

/// Waits until the scheduler says something (true), the bell rings, or the time is over.
pub(super) fn wait(wire: Option<&Wire>, bell: i32, timeout: Option<Duration>) -> bool {
    let socket = wire.map_or(-1, |wire| wire.stream.as_raw_fd());
    let mut watched = [
        libc::pollfd { fd: bell, events: libc::POLLIN, revents: 0 },
        libc::pollfd { fd: socket, events: libc::POLLIN, revents: 0 },
    ];
    let millis = timeout.map_or(-1, |timeout| timeout.as_millis().clamp(1, 60_000) as i32);
    // SAFETY: two valid entries; a negative descriptor is passed over.
    unsafe { libc::poll(watched.as_mut_ptr(), watched.len() as libc::nfds_t, millis) };
    let [bell_state, socket_state] = watched;
    if bell_state.revents != 0 {
        let mut rings = 0u64;
        // SAFETY: eight writable bytes; the descriptor does not block.
        unsafe { libc::read(bell, (&raw mut rings).cast(), size_of::<u64>()) };
    }
    socket_state.revents != 0
}

/// In a forked child: the parent's connection must not live on in it.
pub(super) fn close_after_fork() {
    let descriptor = DESCRIPTOR.swap(-1, Ordering::SeqCst);
    if descriptor >= 0 {
        // SAFETY: a descriptor of ours, which nothing in the child uses.
        unsafe { libc::close(descriptor) };
    }
}

/// Has the counters sent a last time when the program exits.
pub(super) fn send_counters_at_exit() {
    extern "C" fn last_word() {
        // The session may just be writing; its thread is not to be waited for, should it be stuck.
        let Some(_writing) = (0..50).find_map(|_| {
            WRITING.try_lock().inspect_err(|_| std::thread::sleep(Duration::from_micros(100))).ok()
        }) else {
            return;
        };
        let descriptor = DESCRIPTOR.load(Ordering::SeqCst);
        if descriptor < 0 {
            return;
        }
        let counters = Request::Client(ClientMessage::Counters(counters::snapshot()));
        if let Ok(frame) = codec::encode(&counters) {
            // SAFETY: readable bytes of the given length; a short write loses a line of statistics.
            unsafe {
                let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
                libc::send(descriptor, frame.as_ptr().cast(), frame.len(), flags);
            }
        }
    }
    // SAFETY: a function that is never unmapped.
    unsafe { libc::atexit(last_word) };
}
