//! Messages and questions to the core's task: from connections, NVML's thread and readers of metrics.

use nvshare_core::{ClientId, Config, Identity};
use nvshare_proto::{AdminRequest, ClientMessage, GpuUuid, Register, Reply, SchedulerMessage, SeatName};
use tokio::sync::{mpsc, oneshot};

use crate::gpus::NvmlReading;
use crate::identity::{Described, Viewer};
use crate::metrics::Question;

/// A process that registers.
#[derive(Debug)]
pub(crate) struct Newcomer {
    pub(crate) client: ClientId,
    pub(crate) identity: Identity,
    pub(crate) process: Option<Described>,
    /// The seat at whose socket it is.
    pub(crate) seat: Option<SeatName>,
    /// Slurm's job that it is of.
    pub(crate) job: Option<u32>,
    pub(crate) register: Register,
    /// Where messages to it go.
    pub(crate) outgoing: mpsc::Sender<SchedulerMessage>,
}

/// A message of a connection, or of another task, to the core's task.
#[derive(Debug)]
pub(crate) enum Command {
    /// A process registers.
    Register(Box<Newcomer>),
    /// A registered process sends a message.
    Message { client: ClientId, message: ClientMessage },
    /// A look at a registered process found its command.
    Described { client: ClientId, command: String },
    /// A registered process's connection ended.
    Disconnected { client: ClientId, process_remains: bool },
    /// The process of a client that had disconnected has ended.
    Exited { client: ClientId, identity: Identity },
    /// A look at the processes of these clients found those that are stopped.
    Stopped(Vec<(ClientId, bool)>),
    /// NVML was asked about a GPU: its answer, if it knows the GPU.
    Looked { gpu: GpuUuid, seen: Option<NvmlReading> },
    /// An administrator makes a request.
    Admin { request: AdminRequest, answer: oneshot::Sender<Vec<Reply>> },
    /// A process asks for the status on the clients' socket.
    Look { viewer: Viewer, answer: oneshot::Sender<Vec<Reply>> },
    /// Seats have other limits or other holders, or are not there any more.
    SeatsChanged(Vec<SeatName>),
    /// A reader of metrics asks.
    Ask(Question),
    /// The configuration was read again.
    Configure(Config),
}
