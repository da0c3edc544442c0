//! Asks a scheduler.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nvshare_proto::{
    AdminReply, AdminRequest, ClientStatus, GpuStatus, Reply, Request, SchedulerStatus, codec, paths,
};
use serde::Serialize;

/// Where a scheduler is.
#[derive(Debug)]
pub(crate) struct Scheduler {
    path: PathBuf,
}

/// All there is to show.
#[derive(Debug, Serialize)]
pub(crate) struct Status {
    pub(crate) scheduler: SchedulerStatus,
    pub(crate) gpus: Vec<GpuStatus>,
    pub(crate) clients: Vec<ClientStatus>,
}

/// A scheduler that does not answer for this long is stuck.
const PATIENCE: Duration = Duration::from_secs(5);

impl Scheduler {
    /// At this socket, or at the usual one.
    pub(crate) fn at(path: Option<PathBuf>) -> Self {
        let system = Path::new(paths::SYSTEM_ADMIN_SOCKET);
        Self { path: path.unwrap_or_else(|| paths::admin_socket(system.exists())) }
    }

    /// Has a change made; the line that says what was done.
    pub(crate) fn change(&self, request: AdminRequest) -> Result<String, String> {
        match self.ask(request)?.into_iter().next() {
            Some(AdminReply::Done { text }) => Ok(text),
            other => Err(format!("the scheduler answered {other:?}")),
        }
    }

    /// Asks for everything.
    pub(crate) fn status(&self) -> Result<Status, String> {
        let (mut scheduler, mut gpus, mut clients) = (None, Vec::new(), Vec::new());
        for reply in self.ask(AdminRequest::Status)? {
            match reply {
                AdminReply::Scheduler(row) => scheduler = Some(row),
                AdminReply::Gpu(row) => gpus.push(row),
                AdminReply::Client(row) => clients.push(*row),
                AdminReply::End | AdminReply::Done { .. } => {}
            }
        }
        let scheduler = scheduler.ok_or("the scheduler's answer is incomplete")?;
        Ok(Status { scheduler, gpus, clients })
    }

    fn ask(&self, request: AdminRequest) -> Result<Vec<AdminReply>, String> {
        let path = self.path.display();
        let io = |error: std::io::Error| format!("{path}: {error}");
        let mut stream = UnixStream::connect(&self.path)
            .map_err(|error| format!("no scheduler answers at {path}: {error}"))?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(io)?;
        stream.set_write_timeout(Some(PATIENCE)).map_err(io)?;
        let frame = codec::encode(&Request::Admin(request)).map_err(|error| error.to_string())?;
        stream.write_all(&frame).map_err(io)?;
        let mut replies = Vec::new();
        let mut buffer = Vec::new();
        loop {
            while let Some((used, reply)) =
                codec::decode::<Reply>(&buffer).map_err(|error| format!("{path}: {error}"))?
            {
                buffer.drain(..used);
                match reply {
                    Reply::Admin(AdminReply::End) => return Ok(replies),
                    Reply::Admin(done @ AdminReply::Done { .. }) => return Ok(vec![done]),
                    Reply::Admin(row) => replies.push(row),
                    Reply::Refused { reason } => return Err(reason),
                    Reply::Client(_) => return Err("the scheduler takes this for a client".to_owned()),
                }
            }
            let mut chunk = [0; 8192];
            match stream.read(&mut chunk).map_err(io)? {
                0 => return Err(format!("{path}: the scheduler closed the connection")),
                read => buffer.extend_from_slice(&chunk[..read]),
            }
        }
    }
}
