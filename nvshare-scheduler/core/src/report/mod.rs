//! What goes out: messages to clients, lines of the log, events for those who watch, and the state as an administrator sees it.

pub(crate) mod contention;
pub(crate) mod happened;
pub(crate) mod status;
pub(crate) mod warnings;

use nvshare_proto::SchedulerMessage;

use crate::state::client::ClientId;

/// A task for the caller of the core.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// Send a message.
    Send {
        /// The client that it goes to.
        client: ClientId,
        /// The message.
        message: SchedulerMessage,
    },
    /// A line for the administrator's log.
    Note {
        /// Whether the line asks for attention.
        warning: bool,
        /// The text of the line.
        text: String,
    },
}
