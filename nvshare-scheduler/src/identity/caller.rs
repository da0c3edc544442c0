//! Whose a connection is: the seat's whose listener accepted it, or else what the kernel says of the process. It is settled once, when
//! the connection is accepted.

use nvshare_proto::{GpuUuid, SeatName};
use tokio::net::UnixStream;

use super::peer::Peer;
use super::processes::{self, Described};
use super::tenants::Tenant;
use super::whom::Whom;
use crate::seats::Inside;

/// The process at the other end, and for whom it counts.
#[derive(Debug)]
pub(crate) struct Caller {
    pub(crate) peer: Peer,
    pub(crate) user: Option<u32>,
    /// The seat at whose socket it is.
    pub(crate) seat: Option<Inside>,
}

impl Caller {
    /// The one at the other end of a connection that a seat's listener accepted, or else the common one.
    pub(crate) fn at(stream: &UnixStream, seat: Option<Inside>) -> Self {
        let user = stream.peer_cred().ok().map(|cred| cred.uid());
        Self { peer: Peer::of(stream), user, seat }
    }

    /// For whom its connections, questions and registrations count.
    pub(crate) fn whom(&self) -> Whom {
        match &self.seat {
            Some(seat) => Whom::Seat(seat.name),
            None => self.peer.groups.whom(self.user),
        }
    }

    /// Its tenant, if it has one. The outer none: the process has ended, and whoever has its socket now may be of another tenant.
    pub(crate) fn tenant(&self, run: Option<u64>) -> Option<Option<Tenant>> {
        self.peer.read(|| match &self.seat {
            Some(seat) => Some(Tenant::Seat(seat.name)),
            None => Tenant::of(&self.peer.groups, self.user, run),
        })
    }

    /// The viewer that it is on a socket for clients.
    pub(crate) fn viewer(&self) -> Viewer {
        match &self.seat {
            Some(seat) => Viewer::Seat(seat.name),
            None => Viewer::Process(self.described()),
        }
    }

    /// The kernel's description of the process.
    pub(crate) fn described(&self) -> Option<Described> {
        let (pid, user) = (self.peer.identity.pid?, self.user?);
        self.peer.read(|| processes::describe(pid, user, &self.peer.groups))?
    }

    /// Why the process may not use one of these GPUs, if it may not: its seat has others.
    pub(crate) fn refusal(&self, gpus: impl IntoIterator<Item = GpuUuid>) -> Option<String> {
        let seat = self.seat.as_ref()?;
        let other = gpus.into_iter().find(|gpu| !seat.gpus.contains(gpu))?;
        let own: Vec<String> = seat.gpus.iter().map(ToString::to_string).collect();
        Some(format!("{other} is no GPU of this seat, which has {}", own.join(", ")))
    }
}

/// The one that asks on a socket for clients.
#[derive(Debug, Clone)]
pub(crate) enum Viewer {
    /// A process at the common socket; none if the kernel cannot tell, as for a process in another pid namespace.
    Process(Option<Described>),
    /// Any process at a seat's socket.
    Seat(SeatName),
}
