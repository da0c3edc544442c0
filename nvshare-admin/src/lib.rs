//! The administrator's connection to a scheduler: finds the scheduler, asks it, and says in plain words why it does not answer.

#![forbid(unsafe_code)]

mod connection;
mod places;
mod watch;

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use nvshare_proto::{
    AdminReply, AdminRequest, AsleepStatus, ClientStatus, GpuStatus, MemoryStatus, SchedulerStatus, SeatName,
    SeatStatus,
};
use serde::Serialize;

use places::Place;
pub use watch::{Told, Watch};

/// The version of the JSON of a [`Status`]. A new field does not change the version; a field that is removed, or gets
/// another meaning, does.
pub const SCHEMA: u32 = 1;

/// The sockets at which a scheduler may listen.
#[derive(Debug)]
pub struct Scheduler {
    places: Vec<Place>,
}

/// The whole status of a scheduler.
#[derive(Debug, Serialize)]
pub struct Status {
    /// See [`SCHEMA`].
    pub schema: u32,
    /// The scheduler.
    pub scheduler: SchedulerStatus,
    /// The scheduler's GPUs.
    pub gpus: Vec<GpuStatus>,
    /// The scheduler's clients, and the last few that are gone.
    pub clients: Vec<ClientStatus>,
    /// The seats of containers.
    pub seats: Vec<SeatStatus>,
    /// The names of seats that a container has, and to which no client came since.
    pub unused_seats: Vec<SeatName>,
    /// The kinds of memory on the GPUs.
    pub memory: MemoryStatus,
    /// The clients whose processes are off the GPUs.
    pub asleep: Vec<AsleepStatus>,
}

/// A socket that could not be used, and the reason.
#[derive(Debug)]
pub struct Tried {
    /// The socket.
    pub path: PathBuf,
    /// The reason.
    pub error: io::Error,
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, error } = self;
        let why = match error.kind() {
            io::ErrorKind::NotFound => "there is no such socket",
            io::ErrorKind::ConnectionRefused if !is_socket(path) => "this is not a socket",
            io::ErrorKind::ConnectionRefused => "nobody listens there any more",
            io::ErrorKind::InvalidInput => "this path is too long for a socket",
            io::ErrorKind::PermissionDenied => "this user may not open it",
            _ => return write!(f, "{} ({error})", path.display()),
        };
        write!(f, "{} ({why})", path.display())
    }
}

fn is_socket(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// Why a scheduler did not carry out a request.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No scheduler listens at any of these sockets.
    #[error("no scheduler answers at {}", list(.0))]
    NotFound(Vec<Tried>),
    /// A scheduler runs, and this user may neither change anything nor watch.
    #[error(
        "{what} need the administrators' socket {tried}; ask as the user who started the scheduler (for root's, with sudo)"
    )]
    NotAnAdministrator {
        /// The requests that need the administrators' socket.
        what: &'static str,
        /// The socket.
        tried: Tried,
    },
    /// The scheduler accepts connections and does not answer.
    #[error("the scheduler at {} does not answer within {seconds} s: it is stopped or overloaded", .socket.display())]
    Silent {
        /// The scheduler's socket.
        socket: PathBuf,
        /// Time until this was given up, in seconds.
        seconds: u64,
    },
    /// The scheduler refuses the request.
    #[error("{0}")]
    Refused(String),
    /// The scheduler's answer cannot be understood, or the connection broke.
    #[error("{}: {why}", .socket.display())]
    Broken {
        /// The scheduler's socket.
        socket: PathBuf,
        /// The reason.
        why: String,
    },
}

fn list(tried: &[Tried]) -> String {
    tried.iter().map(Tried::to_string).collect::<Vec<_>>().join(", nor at ")
}

impl Scheduler {
    /// The scheduler at a socket.
    #[must_use]
    pub fn at(socket: PathBuf) -> Self {
        Self { places: vec![Place::only(socket)] }
    }

    /// The scheduler that a program of this user and environment would join.
    #[must_use]
    pub fn usual() -> Self {
        Self { places: places::usual() }
    }

    /// Asks for a change; returns the line that says what was done.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn change(&self, request: AdminRequest) -> Result<String, Error> {
        let mut found = places::find(&self.places)?;
        if let Some(denied) = found.denied.take() {
            return Err(Error::NotAnAdministrator { what: "changes", tried: denied });
        }
        match found.connection.ask(request)?.pop() {
            Some(AdminReply::Done { text }) => Ok(text),
            other => Err(found.connection.broken(format!("an answer of another kind: {other:?}"))),
        }
    }

    /// Asks for the whole status; an ordinary user gets the part that every user may see.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn status(&self) -> Result<Status, Error> {
        let mut found = places::find(&self.places)?;
        let (mut scheduler, mut memory) = (None, MemoryStatus::default());
        let (mut gpus, mut clients) = (Vec::new(), Vec::new());
        let mut asleep = Vec::new();
        let (mut seats, mut unused_seats) = (Vec::new(), Vec::new());
        for reply in found.connection.ask(AdminRequest::Status)? {
            match reply {
                AdminReply::Scheduler(row) => scheduler = Some(row),
                AdminReply::Gpu(row) => gpus.push(row),
                AdminReply::Client(row) => clients.push(*row),
                AdminReply::Seat(row) => seats.push(*row),
                AdminReply::Memory(row) => memory = *row,
                AdminReply::Asleep(row) => asleep.push(*row),
                AdminReply::UnusedSeats(names) => unused_seats = names,
                _ => {}
            }
        }
        let scheduler =
            scheduler.ok_or_else(|| found.connection.broken("the answer is incomplete".to_owned()))?;
        Ok(Status { schema: SCHEMA, scheduler, gpus, clients, seats, unused_seats, memory, asleep })
    }
}
