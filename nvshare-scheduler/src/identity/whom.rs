//! The user, container or seat that connections, questions and registrations count for.

use std::fmt;

use nvshare_proto::SeatName;

/// The user, container or seat that a connection counts for, as the kernel, or the listener, says.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Whom {
    /// A container, by the path of its control group: in containers every process may be root's.
    Container(String),
    /// A seat, by the listener that accepted the connection.
    Seat(SeatName),
    /// A user; none where the kernel cannot tell.
    User(Option<u32>),
}

impl fmt::Display for Whom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Container(path) => write!(f, "container {path:?}"),
            Self::Seat(name) => write!(f, "seat {name}"),
            Self::User(Some(user)) => write!(f, "user {user}"),
            Self::User(None) => f.write_str("a user who is not known"),
        }
    }
}
