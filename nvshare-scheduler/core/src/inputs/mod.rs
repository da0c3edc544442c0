//! All that comes in: events, and the requests of administrators.

pub(crate) mod admin;
pub(crate) mod arrivals;
pub(crate) mod departures;
pub(crate) mod measured;
pub(crate) mod messages;
pub(crate) mod sleep;
pub(crate) mod stopped;

use std::collections::BTreeMap;

use nvshare_proto::{ClientMessage, GpuUuid, Register};

use crate::Time;
use crate::state::client::{ClientId, Identity};

/// An event that the core is told of.
#[derive(Debug, Clone)]
pub enum Event {
    /// A process registered on its connection.
    Registered {
        /// The connection.
        client: ClientId,
        /// The process, as the kernel describes it.
        identity: Identity,
        /// The client's REGISTER message.
        register: Register,
    },
    /// A registered process sent a message.
    Message {
        /// The client that sent it.
        client: ClientId,
        /// The message.
        message: ClientMessage,
    },
    /// A connection ended.
    Disconnected {
        /// The client of that connection.
        client: ClientId,
        /// Whether its process is known to live on, or to be still freeing its memory.
        process_remains: bool,
    },
    /// A process of clients that had disconnected has ended, or runs another program: all that it had is
    /// free.
    Exited {
        /// The last client of that process.
        client: ClientId,
        /// The process: all that its earlier clients had left is free as well.
        identity: Identity,
    },
    /// The process of a client was stopped by a signal, or goes on.
    Stopped {
        /// The client.
        client: ClientId,
        /// Whether the process is stopped.
        stopped: bool,
    },
    /// A GPU was measured.
    Measured(Measured),
    /// Nothing measures a GPU at present.
    Unmeasured {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// The time that [`Core::next_deadline`](crate::Core::next_deadline) named has come.
    Deadline,
}

/// Facts about a GPU from other sources than its clients, in bytes.
#[derive(Debug, Clone)]
pub struct Measured {
    /// The GPU.
    pub gpu: GpuUuid,
    /// When the look was asked for: it may not show what has changed since.
    pub asked_at: Time,
    /// Its memory, less what processes without the library have there.
    pub available: u64,
    /// Bytes that clients' processes have there, without managed memory: their own allocations, contexts and
    /// modules. A client that is missing here has nothing, or cannot be seen.
    pub used: BTreeMap<ClientId, u64>,
}
