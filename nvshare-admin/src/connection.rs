//! One connection: a request, and the replies to it.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nvshare_proto::{AdminReply, AdminRequest, Reply, Request, codec};

use crate::Error;

/// A scheduler that does not answer for this long is stuck.
const PATIENCE: Duration = Duration::from_secs(5);

/// A connection to a scheduler.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: PathBuf,
    stream: UnixStream,
    /// Bytes that were received; the first `read` of them are decoded.
    received: Vec<u8>,
    read: usize,
}

impl Connection {
    /// Connects. The inner error is the reason why no scheduler can be reached.
    pub(crate) fn open(socket: &Path) -> Result<io::Result<Self>, Error> {
        let (answer, answered) = mpsc::channel();
        let path = socket.to_owned();
        // `connect` waits for ever if the queue of a stopped scheduler is full; the thread ends with the program.
        let started = thread::Builder::new().spawn(move || {
            let _ = answer.send(UnixStream::connect(path));
        });
        if let Err(error) = started {
            return Ok(Err(error));
        }
        let stream = match answered.recv_timeout(PATIENCE) {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Ok(Err(error)),
            Err(_) => return Err(silent(socket)),
        };
        let prepared =
            stream.set_read_timeout(Some(PATIENCE)).and_then(|()| stream.set_write_timeout(Some(PATIENCE)));
        Ok(prepared.map(|()| Self { socket: socket.to_owned(), stream, received: Vec::new(), read: 0 }))
    }

    /// The error for a connection that cannot be used any more.
    pub(crate) fn broken(&self, why: String) -> Error {
        Error::Broken { socket: self.socket.clone(), why }
    }

    fn failed(&self, error: &io::Error) -> Error {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => silent(&self.socket),
            _ => self.broken(error.to_string()),
        }
    }

    /// Sends a request, and waits for the whole answer.
    pub(crate) fn ask(&mut self, request: AdminRequest) -> Result<Vec<AdminReply>, Error> {
        self.send(request)?;
        let mut replies = Vec::new();
        loop {
            match self.receive()? {
                AdminReply::End => return Ok(replies),
                done @ AdminReply::Done { .. } => return Ok(vec![done]),
                row => replies.push(row),
            }
        }
    }

    /// Sends a request.
    pub(crate) fn send(&mut self, request: AdminRequest) -> Result<(), Error> {
        let frame =
            codec::encode(&Request::Admin(request)).map_err(|error| self.broken(error.to_string()))?;
        self.stream.write_all(&frame).map_err(|error| self.failed(&error))
    }

    /// Waits for a reply.
    pub(crate) fn receive(&mut self) -> Result<AdminReply, Error> {
        loop {
            let unread = &self.received[self.read..];
            let decoded = codec::decode::<Reply>(unread).map_err(|error| self.broken(error.to_string()))?;
            if let Some((used, reply)) = decoded {
                self.read += used;
                return match reply {
                    Reply::Admin(reply) => Ok(reply),
                    Reply::Refused { reason } => Err(Error::Refused(reason)),
                    Reply::Client(_) => Err(self.broken("the scheduler takes this for a client".to_owned())),
                };
            }
            self.received.drain(..self.read);
            self.read = 0;
            let mut chunk = [0; 8192];
            match self.stream.read(&mut chunk).map_err(|error| self.failed(&error))? {
                0 => return Err(self.broken("the scheduler closed the connection".to_owned())),
                read => self.received.extend_from_slice(&chunk[..read]),
            }
        }
    }
}

fn silent(socket: &Path) -> Error {
    Error::Silent { socket: socket.to_owned(), seconds: PATIENCE.as_secs() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scheduler;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_scheduler_that_says_nothing_is_silent_and_not_unavailable() {
        let socket = std::env::temp_dir().join(format!("nvshare-admin-{}.sock", std::process::id()));
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        let error = Scheduler::at(socket.clone()).status().unwrap_err().to_string();
        assert!(error.ends_with("does not answer within 5 s: it is stopped or overloaded"), "{error}");
        drop(listener);
        let error = Scheduler::at(socket.clone()).status().unwrap_err().to_string();
        assert_eq!(
            error,
            format!("no scheduler answers at {} (nobody listens there any more)", socket.display())
        );
        std::fs::remove_file(&socket).unwrap();
        let error = Scheduler::at(socket).change(AdminRequest::On).unwrap_err().to_string();
        assert!(error.ends_with("(there is no such socket)"), "{error}");
    }
}
