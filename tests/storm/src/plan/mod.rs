//! A program: the steps of its threads, in an order that is legal if it were the order of one thread.
//!
//! The steps are one sequence. Each belongs to one thread, and waits for the earlier steps that used the same things.
//! So no order in which the threads run can make a program illegal, or change a result.

mod buffers;
mod captures;
mod compose;
mod contexts;
mod nodes;
#[cfg(test)]
mod order;
mod picks;
mod streams;
mod value;
mod waits;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

pub(crate) use compose::compose;
pub(crate) use value::Value;

/// The index of a thing of a program, among those of its kind.
pub(crate) type Id = usize;

/// The parameters that a program is made from.
#[derive(Debug, Clone)]
pub(crate) struct Recipe {
    pub(crate) seed: u64,
    /// Number of random choices; each makes some steps.
    pub(crate) steps: usize,
    /// Number of threads; 0: as the seed says.
    pub(crate) threads: usize,
    /// The largest number of bytes that the program allocates.
    pub(crate) memory: u64,
    /// The driver's capabilities: see [`crate::caps`].
    pub(crate) caps: BTreeSet<String>,
    /// Choices that are left out, for shrinking.
    pub(crate) skip: BTreeSet<usize>,
    /// Features that are left out, for shrinking.
    pub(crate) without: BTreeSet<String>,
}

/// Kinds of steps that must not happen at the same time: see [`crate::exec::exclude`].
pub(crate) mod flag {
    /// A host function waits for another thread.
    pub(crate) const WINDOW: usize = 0;
    /// The step may wait for work of the whole device, or make later work wait.
    pub(crate) const DISTURB: usize = 1;
    /// A capture in global mode is open.
    pub(crate) const GLOBAL: usize = 2;
    /// The step must not happen beside such a capture.
    pub(crate) const UNSAFE: usize = 3;
    /// A capture of a blocking stream is open.
    pub(crate) const BLOCKING: usize = 4;
    /// The step uses a legacy stream.
    pub(crate) const LEGACY: usize = 5;
    /// A capture is open.
    pub(crate) const CAPTURE: usize = 6;
    /// The step synchronises a context, which breaks any capture.
    pub(crate) const CONTEXT: usize = 7;
    pub(crate) const COUNT: usize = 8;
    /// Pairs of flags that cannot be held together.
    pub(crate) const CONFLICTS: [(usize, usize); 4] =
        [(WINDOW, DISTURB), (GLOBAL, UNSAFE), (BLOCKING, LEGACY), (CAPTURE, CONTEXT)];
}

/// One step of a program.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) thread: usize,
    /// The context that is current; `None`: the operation makes one current itself, if it needs one.
    pub(crate) context: Option<Id>,
    pub(crate) op: Op,
    /// Earlier steps, of other threads, that have to be over.
    pub(crate) after: Vec<usize>,
    /// Flags that the step holds: see [`flag`].
    pub(crate) excludes: Vec<usize>,
    /// The random choice that made the step.
    pub(crate) pick: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ContextKind {
    Primary,
    Created,
    Green,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ContextEnd {
    Destroy,
    Release,
    Reset,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum StreamKind {
    Blocking,
    NonBlocking,
    /// A stream with a priority; blocking or not.
    Priority(bool),
    Legacy,
    /// The default stream of one thread.
    PerThread(usize),
}

impl StreamKind {
    /// Whether the stream waits for the legacy stream, and the legacy stream for it.
    pub(crate) fn is_blocking(self) -> bool {
        matches!(self, Self::Blocking | Self::Priority(true) | Self::PerThread(_))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Door {
    Plain,
    Pitch,
    Managed,
    Async,
    FromPool,
    Mapped,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum HostKind {
    Pinned,
    Pageable,
    Registered,
}

/// A part of a buffer, which is written as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) buffer: Id,
    pub(crate) index: u64,
    pub(crate) bytes: u64,
}

/// A change of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// The kernel `step`: adds to each word.
    Add(u32, u32),
    /// The kernel `fill`.
    Pattern(u32, u32),
    /// A fill of the driver: the word, and how many bytes of it are given (1, 2 or 4).
    Set(u32, u32),
    /// A copy from another region, at least as large.
    Copy(Region),
}

/// The way of a copy between host and device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    /// On the default stream of the call: the call returns when the host's memory is free again.
    Now,
    Async,
    /// A copy in rows.
    Rows,
}

/// Work that is captured into a graph.
#[derive(Debug, Clone)]
pub(crate) struct Recording {
    pub(crate) graph: Id,
    pub(crate) stream: Id,
    /// The second stream of the capture, joined by events.
    pub(crate) second: Option<Id>,
    /// 0 global, 1 of the thread, 2 relaxed
    pub(crate) mode: i32,
    /// The regions and their effects; true: on the second stream.
    pub(crate) items: Vec<(Region, Effect, bool)>,
    /// Bytes that the graph allocates and frees itself, the word that it writes there, and the region that gets it.
    pub(crate) node: Option<(u64, u32, Region)>,
    pub(crate) pause_ms: u64,
}

impl Recording {
    /// The effects of the graph, in an order that its captures allow.
    fn effects(&self) -> Vec<(Region, Effect)> {
        let node = self.node.map(|(_, word, region)| (region, Effect::Set(word, 4)));
        self.items.iter().map(|&(region, effect, _)| (region, effect)).chain(node).collect()
    }
}

/// The regions that effects name, each once.
fn used(effects: &[(Region, Effect)]) -> Vec<Region> {
    let mut regions = Vec::new();
    for &(region, effect) in effects {
        let from = if let Effect::Copy(from) = effect { Some(from) } else { None };
        for region in [Some(region), from].into_iter().flatten() {
            if !regions.contains(&region) {
                regions.push(region);
            }
        }
    }
    regions
}

/// The calls by which a node is added and changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// A function for each kind of node.
    Older,
    /// One function for all kinds (CUDA 12).
    Any,
    /// The same, with data of edges.
    WithData,
}

/// When a node gets its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Given {
    Added,
    /// Changed in the graph.
    InGraph,
    /// Changed in the executable graph.
    InExec,
}

/// A node that is added to a graph by hand: a fill or a copy.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) region: Region,
    pub(crate) effect: Effect,
    pub(crate) form: Form,
    pub(crate) given: Given,
    /// Whether a context is named.
    pub(crate) is_named: bool,
}

#[derive(Debug, Clone)]
pub(crate) enum Op {
    ContextMake {
        context: Id,
        kind: ContextKind,
        device: i32,
    },
    ContextEnd {
        context: Id,
        how: ContextEnd,
        device: i32,
    },
    ContextSync,
    AttachDetach,
    PushPop,
    StreamMake {
        stream: Id,
        kind: StreamKind,
    },
    StreamEnd {
        stream: Id,
    },
    StreamSync {
        stream: Id,
    },
    StreamQuery {
        stream: Id,
    },
    EventMake {
        event: Id,
        timing: bool,
    },
    EventEnd {
        event: Id,
    },
    Record {
        event: Id,
        stream: Id,
    },
    EventSync {
        event: Id,
    },
    EventQuery {
        event: Id,
    },
    Wait {
        stream: Id,
        event: Id,
    },
    ModuleLoad {
        module: Id,
        warm: bool,
    },
    ModuleUnload {
        module: Id,
    },
    Allocate {
        buffer: Id,
        door: Door,
        bytes: u64,
        stream: Id,
    },
    Free {
        buffer: Id,
        door: Door,
        bytes: u64,
        stream: Option<Id>,
    },
    HostAllocate {
        host: Id,
        kind: HostKind,
        bytes: u64,
    },
    HostFree {
        host: Id,
        kind: HostKind,
    },
    HostWrite {
        host: Id,
        value: Value,
    },
    HostCheck {
        host: Id,
        value: Value,
        first: u64,
        bytes: u64,
    },
    Work {
        region: Region,
        effect: Effect,
        stream: Id,
        module: Id,
    },
    CopyIn {
        region: Region,
        host: Id,
        stream: Id,
        way: Way,
    },
    CopyOut {
        region: Region,
        host: Id,
        first: u64,
        bytes: u64,
        stream: Id,
        way: Way,
    },
    /// A copy from one context's memory to another's; it names both, or the addresses alone.
    PeerCopy {
        to: Region,
        from: Region,
        contexts: (Id, Id),
        stream: Id,
        names: bool,
    },
    /// The current context gets access to another device's context, or gives it up.
    PeerAccess {
        to: Id,
        opens: bool,
    },
    Prefetch {
        region: Region,
        stream: Id,
        device: i32,
    },
    /// The host checks managed memory, and writes to it.
    HostTouch {
        region: Region,
        value: Value,
        new: Value,
    },
    /// Another process opens the memory, checks it, writes to it, and closes it, or keeps it open.
    Share {
        region: Region,
        device: i32,
        value: Value,
        new: Value,
        keeps: bool,
    },
    Record1(Box<Recording>, Id),
    /// Makes the recorded graph executable, or updates the executable graph. A step of its own: it would break a capture of
    /// another thread that may be open by then.
    Instantiate {
        graph: Id,
        update: bool,
    },
    /// Builds an executable graph, node by node.
    Build {
        graph: Id,
        nodes: Vec<Node>,
    },
    Replay {
        graph: Id,
        stream: Id,
        times: u32,
    },
    GraphEnd {
        graph: Id,
    },
    Callback {
        stream: Id,
    },
    /// A host function on `stream` waits for the step after this one, of another thread.
    Window {
        stream: Id,
        region: Region,
        value: u32,
        module: Id,
        hold_ms: u64,
    },
    /// Does the work that the window waits for.
    Help {
        stream: Id,
        region: Region,
        values: Vec<u32>,
        module: Id,
        pause_ms: u64,
    },
    Refused {
        door: Door,
        stream: Id,
    },
    Info,
    Pause {
        ms: u64,
    },
    /// Waits until another thread is held up in a step, as it is while the process waits for its turn, or its step `last` is over.
    HeldUp {
        other: usize,
        last: usize,
    },
    Fork {
        exec: bool,
    },
    /// Leaves kernels in flight when the program ends.
    Leave {
        stream: Id,
        region: Region,
        module: Id,
    },
}

/// Number of things of each kind, dead ones included.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counts {
    pub(crate) contexts: usize,
    pub(crate) streams: usize,
    pub(crate) events: usize,
    pub(crate) modules: usize,
    pub(crate) buffers: usize,
    pub(crate) hosts: usize,
    pub(crate) graphs: usize,
    pub(crate) callbacks: usize,
}

/// The facts about a stream, which steps name by its index.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StreamFact {
    pub(crate) context: Id,
    pub(crate) kind: StreamKind,
}

/// A whole program.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) threads: usize,
    pub(crate) steps: Vec<Step>,
    pub(crate) counts: Counts,
    pub(crate) streams: Vec<StreamFact>,
    /// Number of times that each feature was composed.
    pub(crate) features: BTreeMap<String, u64>,
    /// The thread that ends the process.
    pub(crate) leaver: usize,
    pub(crate) farewell: Option<Farewell>,
}

/// The work of an exit handler of the program.
#[derive(Debug, Clone)]
pub(crate) struct Farewell {
    /// It lingers for this many milliseconds.
    pub(crate) linger_ms: u64,
    /// Then it reads a region that no work changes any more, in its context.
    pub(crate) reads: Option<(Id, Region, Value)>,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}: {} threads, {} steps", self.seed, self.threads, self.steps.len())?;
        for (stream, fact) in self.streams.iter().enumerate() {
            writeln!(f, "  stream {stream}: {:?} of context {}", fact.kind, fact.context)?;
        }
        for (index, step) in self.steps.iter().enumerate() {
            write!(f, "  {index:4} [pick {:3}] thread {:2}", step.pick, step.thread)?;
            if let Some(context) = step.context {
                write!(f, " ctx {context}")?;
            }
            write!(f, ": {:?}", step.op)?;
            if !step.after.is_empty() {
                write!(f, " after {:?}", step.after)?;
            }
            writeln!(f)?;
        }
        write!(f, "  thread {} ends the process", self.leaver)?;
        if let Some(farewell) = &self.farewell {
            write!(f, ", {farewell:?}")?;
        }
        Ok(())
    }
}
