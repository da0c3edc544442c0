//! All that goes out: messages to clients, lines of the log, events for programs that watch, and the state as
//! an administrator sees it.

#[cfg(feature = "test-api")]
pub(crate) mod audit;
pub(crate) mod incidents;
pub(crate) mod status;
pub(crate) mod warnings;

use std::collections::VecDeque;

use nvshare_proto::{ClientStatus, GpuUuid, SchedulerMessage};

use crate::state::client::ClientId;
use incidents::Incident;
use warnings::Warnings;

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
    Log {
        /// Whether the line asks for attention.
        warning: bool,
        /// The text of the line.
        text: String,
    },
    /// Measure a GPU: a look that begins before this does not count.
    Measure {
        /// The GPU.
        gpu: GpuUuid,
    },
}

/// All that goes out, until the caller takes it.
#[derive(Debug, Default)]
pub(crate) struct Report {
    outputs: VecDeque<Output>,
    warnings: Warnings,
    /// Events for programs that watch the scheduler, since the last call of
    /// [`Core::handle`](crate::Core::handle).
    incidents: VecDeque<Incident>,
    /// The last clients that are gone, as they are shown.
    gone: VecDeque<ClientStatus>,
}

impl Report {
    pub(crate) fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    pub(crate) fn send(&mut self, client: ClientId, message: SchedulerMessage) {
        self.outputs.push_back(Output::Send { client, message });
    }

    pub(crate) fn info(&mut self, text: String) {
        self.outputs.push_back(Output::Log { warning: false, text });
    }

    pub(crate) fn measure(&mut self, gpu: GpuUuid) {
        self.outputs.push_back(Output::Measure { gpu });
    }

    pub(crate) fn warn(&mut self, text: String) {
        self.outputs.push_back(Output::Log { warning: true, text });
    }
}
