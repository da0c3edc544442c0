//! One connection: a request, and the replies to it.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nvshare_proto::{AdminReply, AdminRequest, Reply, Request, VERSION, codec};

use crate::Error;

/// A scheduler that does not answer for this long is stuck.
const PATIENCE: Duration = Duration::from_secs(5);

/// A connection to a scheduler.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: PathBuf,
    stream: UnixStream,
    /// The protocol's version that is spoken on it.
    version: u16,
    /// The request that waits for its first reply, in case the scheduler is older.
    request: Option<Request>,
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
        Ok(prepared.map(|()| Self {
            socket: socket.to_owned(),
            stream,
            version: VERSION,
            request: None,
            received: Vec::new(),
            read: 0,
        }))
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
        self.put(Request::Admin(request))
    }

    fn put(&mut self, request: Request) -> Result<(), Error> {
        let frame =
            codec::encode_in(self.version, &request).map_err(|error| self.broken(error.to_string()))?;
        self.request = Some(request);
        self.stream.write_all(&frame).map_err(|error| self.failed(&error))
    }

    /// The scheduler is older than this program: asks again on another connection, in its version.
    fn fall_back(&mut self, version: u16) -> Result<(), Error> {
        let mut again = Self::open(&self.socket)?.map_err(|error| self.failed(&error))?;
        again.version = version;
        self.request.take().map_or(Ok(()), |request| again.put(request))?;
        *self = again;
        Ok(())
    }

    /// Waits for a reply.
    pub(crate) fn receive(&mut self) -> Result<AdminReply, Error> {
        loop {
            let unread = &self.received[self.read..];
            if let Some(version) = codec::falls_back(self.version, unread) {
                self.fall_back(version)?;
                continue;
            }
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

    /// A scheduler of the version before refuses what it does not know, in its own version, and ends the connection.
    #[test]
    fn a_scheduler_of_the_version_before_is_asked_in_its_version() {
        let socket = std::env::temp_dir().join(format!("nvshare-admin-{}-older.sock", std::process::id()));
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        let older = VERSION - 1;
        let plays = thread::spawn(move || {
            let mut heard = Vec::new();
            while heard.last() != Some(&older) {
                let (mut stream, _) = listener.accept().unwrap();
                let mut bytes = [0; 4096];
                let read = stream.read(&mut bytes).unwrap();
                let version = codec::version(&bytes[..read]).unwrap();
                heard.push(version);
                let reply = if version == older {
                    Reply::Admin(AdminReply::Done { text: "done".to_owned() })
                } else {
                    Reply::Refused { reason: format!("protocol version {version}; this is version {older}") }
                };
                stream.write_all(&codec::encode_in(older, &reply).unwrap()).unwrap();
            }
            heard
        });
        let done = Scheduler::at(socket.clone()).change(AdminRequest::On);
        assert_eq!(done.unwrap(), "done");
        assert_eq!(plays.join().unwrap(), [VERSION, older]);
        std::fs::remove_file(&socket).unwrap();
    }
}
