//! The objects that handles stand for.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::host_functions::DriverQueue;
use crate::stream::{Door, Point, Queue, unique};

/// A context: a program's own, a device's primary one, or a green one.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) id: u64,
    pub(crate) handle: usize,
    pub(crate) gpu: usize,
    /// The primary context that a green one is part of; else the context itself.
    pub(crate) family: u64,
    pub(crate) legacy: Arc<Stream>,
    pub(crate) door: Arc<Door>,
    /// The queue of the context's host functions.
    pub(crate) host_functions: Arc<DriverQueue>,
    /// The number of attachments to the context.
    pub(crate) usage: u32,
}

impl Context {
    pub(crate) fn new(handle: usize, gpu: usize, family: Option<u64>) -> Self {
        let id = unique();
        let family = family.unwrap_or(id);
        let door = Arc::new(Door::default());
        let host_functions = Arc::new(DriverQueue::default());
        let legacy = Stream {
            id: unique(),
            queue: Arc::default(),
            door: Arc::clone(&door),
            host_functions: Arc::clone(&host_functions),
            context: id,
            context_handle: handle,
            family,
            gpu,
            non_blocking: false,
            behind: None,
        };
        Self { id, handle, gpu, family, legacy: Arc::new(legacy), door, host_functions, usage: 1 }
    }

    /// Whether a look at the whole context sees a stream: a primary context includes the streams of its green ones.
    pub(crate) fn sees(&self, stream: &Stream) -> bool {
        stream.context == self.id || stream.family == self.id
    }

    pub(crate) fn new_stream(&self, non_blocking: bool) -> Arc<Stream> {
        Arc::new(Stream {
            id: unique(),
            queue: Arc::default(),
            door: Arc::clone(&self.door),
            host_functions: Arc::clone(&self.host_functions),
            context: self.id,
            context_handle: self.handle,
            family: self.family,
            gpu: self.gpu,
            non_blocking,
            behind: Some(Arc::clone(&self.legacy.queue)),
        })
    }
}

/// A stream or a default stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) id: u64,
    pub(crate) queue: Arc<Queue>,
    /// The door of the stream's context.
    pub(crate) door: Arc<Door>,
    /// The queue of its context's host functions.
    pub(crate) host_functions: Arc<DriverQueue>,
    pub(crate) context: u64,
    pub(crate) context_handle: usize,
    pub(crate) family: u64,
    pub(crate) gpu: usize,
    /// The stream and the legacy stream do not wait for each other.
    pub(crate) non_blocking: bool,
    /// The legacy stream of the stream's context; `None`: this stream is the legacy one.
    pub(crate) behind: Option<Arc<Queue>>,
}

impl Stream {
    pub(crate) fn is_legacy(&self) -> bool {
        self.behind.is_none()
    }

    /// Whether the stream and the legacy stream of a context wait for each other.
    pub(crate) fn is_blocking_in(&self, context: u64) -> bool {
        self.context == context && !self.non_blocking && !self.is_legacy()
    }
}

/// The work that an event was recorded behind.
#[derive(Debug, Clone)]
pub(crate) enum Mark {
    Nothing,
    Stream(Point),
    /// The ends of all streams of a context.
    Context(Vec<Point>),
    /// In a capture: its number, and the nodes that the event is behind.
    Captured(u64, Vec<usize>),
}

impl Mark {
    pub(crate) fn points(&self) -> Vec<Point> {
        match self {
            Self::Stream(point) => vec![point.clone()],
            Self::Context(points) => points.clone(),
            Self::Nothing | Self::Captured(..) => Vec::new(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Event {
    /// The door of the event's context.
    pub(crate) door: Arc<Door>,
    pub(crate) context: u64,
    pub(crate) family: u64,
    pub(crate) mark: Mark,
}

#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) id: u64,
    pub(crate) context: u64,
    pub(crate) family: u64,
    /// The names of the kernels in the module.
    pub(crate) entries: Vec<String>,
    /// Where the memory is that the module takes of its card.
    pub(crate) memory: Option<u64>,
}

#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) module: u64,
    pub(crate) context: u64,
    pub(crate) family: u64,
    pub(crate) name: String,
    /// Whether the function was launched before.
    pub(crate) is_loaded: Arc<AtomicBool>,
}
