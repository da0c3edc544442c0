//! The places where a scheduler may listen: root's first, then the user's own, as for the library.

use std::path::PathBuf;

use nvshare_proto::env;
use nvshare_proto::paths::{self, SYSTEM_ADMIN_SOCKET, SYSTEM_SOCKET};

use crate::connection::Connection;
use crate::{Error, Tried};

/// A scheduler's sockets.
#[derive(Debug)]
pub(crate) struct Place {
    admin: PathBuf,
    /// The scheduler's clients' socket, which shows the status to every user.
    clients: Option<PathBuf>,
}

impl Place {
    /// A scheduler of which only one socket is known.
    pub(crate) fn only(socket: PathBuf) -> Self {
        Self { admin: socket, clients: None }
    }
}

/// A scheduler that was found.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) connection: Connection,
    /// The reason why the administrators' socket cannot be used, if the connection is to the clients' socket.
    pub(crate) denied: Option<Tried>,
}

/// The places of this user and environment.
pub(crate) fn usual() -> Vec<Place> {
    let named = env::path(env::SOCKET);
    if let Some(admin) = env::path(env::ADMIN_SOCKET) {
        return vec![Place { admin, clients: named }];
    }
    let place = |admin, clients| Place { admin, clients: named.clone().or(Some(clients)) };
    let own = paths::own_directory().map(|own| place(own.join("admin.sock"), own.join("scheduler.sock")));
    [place(SYSTEM_ADMIN_SOCKET.into(), SYSTEM_SOCKET.into())].into_iter().chain(own).collect()
}

/// The first place where a scheduler listens.
pub(crate) fn find(places: &[Place]) -> Result<Found, Error> {
    let mut tried = Vec::new();
    for place in places {
        let denied = match Connection::open(&place.admin)? {
            Ok(connection) => return Ok(Found { connection, denied: None }),
            Err(error) => Tried { path: place.admin.clone(), error },
        };
        match place.clients.as_ref().map(|clients| (clients, Connection::open(clients))) {
            Some((_, Ok(Ok(connection)))) => return Ok(Found { connection, denied: Some(denied) }),
            Some((_, Err(silent))) => return Err(silent),
            Some((path, Ok(Err(error)))) => tried.extend([denied, Tried { path: path.clone(), error }]),
            None => tried.push(denied),
        }
    }
    tried.dedup_by(|second, first| second.path == first.path);
    Err(Error::NotFound(tried))
}
