//! The objects of the process by handle, and the rules by which streams wait for each other.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use crate::capture::{Capture, Exec, Graph};
use crate::handles::Handles;
use crate::memory::Allocation;
use crate::objects::{Context, Event, Function, Module, Stream};
use crate::pool::{Ordered, Pool};
use crate::process::{self, Bound, CONTEXT_IS_DESTROYED, Failure, INVALID_CONTEXT};
use crate::sharing::Shared;
use crate::stacks::Stacks;
use crate::stream::{Point, Work};
use crate::vmm::Vmm;

/// A device's primary context, whose handle stays.
#[derive(Debug)]
pub(crate) struct Primary {
    pub(crate) handle: usize,
    pub(crate) retained: u32,
    pub(crate) context: Option<Context>,
}

/// Work of a stream that has ended.
#[derive(Debug)]
struct Orphan {
    stream: Arc<Stream>,
    point: Point,
}

#[derive(Debug)]
pub(crate) struct Tables {
    pub(crate) contexts: Handles<Context>,
    /// Primary contexts, by card.
    pub(crate) primary: HashMap<usize, Primary>,
    /// Green contexts: the handles of their contexts.
    pub(crate) green: Handles<usize>,
    pub(crate) streams: Handles<Arc<Stream>>,
    pub(crate) events: Handles<Event>,
    pub(crate) modules: Handles<Module>,
    pub(crate) functions: Handles<Function>,
    pub(crate) graphs: Handles<Arc<Graph>>,
    pub(crate) execs: Handles<Exec>,
    /// All streams that live, default streams too.
    every: BTreeMap<u64, Arc<Stream>>,
    orphans: Vec<Orphan>,
    /// The open captures.
    pub(crate) captures: Vec<Capture>,
    pub(crate) memory: BTreeMap<u64, Arc<Allocation>>,
    /// Addresses of freed allocations, by their number of blocks.
    pub(crate) addresses: HashMap<usize, Vec<u64>>,
    pub(crate) vmm: Vmm,
    pub(crate) shared: Shared,
    /// Page-locked memory of the host: its length, its context, and whether it is the driver's own.
    pub(crate) host: BTreeMap<usize, (usize, u64, bool)>,
    /// Contexts that may reach the memory of a card that is not their own.
    pub(crate) peers: HashSet<(u64, u64)>,
    /// The stacks of contexts that are no green ones.
    pub(crate) stacks: HashMap<u64, Stacks>,
    pub(crate) pools: Handles<Pool>,
    pub(crate) pool: Ordered,
}

impl Default for Tables {
    fn default() -> Self {
        Self {
            contexts: Handles::of("context"),
            primary: HashMap::new(),
            green: Handles::of("green context"),
            streams: Handles::of("stream"),
            events: Handles::of("event"),
            modules: Handles::of("module"),
            functions: Handles::of("function"),
            graphs: Handles::of("graph"),
            execs: Handles::of("executable graph"),
            every: BTreeMap::new(),
            orphans: Vec::new(),
            captures: Vec::new(),
            memory: BTreeMap::new(),
            addresses: HashMap::new(),
            vmm: Vmm::default(),
            shared: Shared::default(),
            host: BTreeMap::new(),
            peers: HashSet::new(),
            stacks: HashMap::new(),
            pools: Handles::of("memory pool"),
            pool: Ordered::default(),
        }
    }
}

/// The null stream, the legacy stream and the calling thread's own.
const NULL: usize = 0;
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

impl Tables {
    /// The context of a handle.
    pub(crate) fn context(&self, handle: usize) -> Result<&Context, Failure> {
        match self.primary.values().find(|primary| primary.handle == handle) {
            Some(primary) => primary.context.as_ref().ok_or(CONTEXT_IS_DESTROYED),
            None => self.contexts.get(handle),
        }
    }

    /// The context that is current in the calling thread.
    pub(crate) fn current(&self) -> Result<&Context, Failure> {
        let Bound { handle, context } = process::bound().ok_or(INVALID_CONTEXT)?;
        if let Some(primary) = self.primary.values().find(|primary| primary.handle == handle) {
            return primary.context.as_ref().ok_or(CONTEXT_IS_DESTROYED);
        }
        // Another context may have the handle by now.
        self.all_contexts().find(|known| known.id == context).ok_or(CONTEXT_IS_DESTROYED)
    }

    pub(crate) fn all_contexts(&self) -> impl Iterator<Item = &Context> {
        let primary = self.primary.values().filter_map(|primary| primary.context.as_ref());
        self.contexts.values().chain(primary)
    }

    /// Makes a context current.
    pub(crate) fn bind(&self, handle: usize) -> Result<Bound, Failure> {
        Ok(Bound { handle, context: self.context(handle)?.id })
    }

    /// Adds the default stream of a context, which begins with it.
    pub(crate) fn meet(&mut self, stream: &Arc<Stream>) {
        self.every.insert(stream.id, Arc::clone(stream));
    }

    /// Makes a stream of the current context. Returns its handle.
    pub(crate) fn new_stream(&mut self, non_blocking: bool) -> Result<usize, Failure> {
        let stream = self.current()?.new_stream(non_blocking);
        self.meet(&stream);
        Ok(self.streams.add(stream))
    }

    /// Makes a stream of a context. Returns its handle.
    pub(crate) fn new_stream_in(&mut self, context: usize, non_blocking: bool) -> Result<usize, Failure> {
        let stream = self.context(context)?.new_stream(non_blocking);
        self.meet(&stream);
        Ok(self.streams.add(stream))
    }

    /// The stream of a handle; `per_thread` says what the null handle means.
    pub(crate) fn stream(&mut self, handle: usize, per_thread: bool) -> Result<Arc<Stream>, Failure> {
        match handle {
            NULL | LEGACY if handle == LEGACY || !per_thread => Ok(Arc::clone(&self.current()?.legacy)),
            NULL | PER_THREAD => {
                let context = self.current()?;
                let stream = process::own_stream(context.id, || context.new_stream(false));
                self.meet(&stream);
                Ok(stream)
            }
            _ => self.streams.get(handle).cloned(),
        }
    }

    /// Ends a stream; its submitted work goes on to its end.
    pub(crate) fn end_stream(&mut self, stream: &Arc<Stream>) {
        if self.every.remove(&stream.id).is_none() {
            return;
        }
        self.leave_capture(stream);
        stream.queue.close();
        self.orphans.retain(|orphan| !orphan.point.is_reached());
        self.orphans.push(Orphan { stream: Arc::clone(stream), point: stream.queue.end() });
    }

    /// Removes a context and its objects. Returns its memory, which the caller gives back.
    pub(crate) fn end_context(&mut self, context: &Context) -> Vec<Arc<Allocation>> {
        let id = context.id;
        self.streams.end_those(|stream| stream.context == id);
        let streams: Vec<Arc<Stream>> =
            self.every.values().filter(|stream| stream.context == id).cloned().collect();
        streams.iter().for_each(|stream| self.end_stream(stream));
        self.events.end_those(|event| event.context == id);
        self.modules.end_those(|module| module.context == id);
        self.functions.end_those(|function| function.context == id);
        self.peers.retain(|&(from, to)| from != id && to != id);
        self.stacks.remove(&id);
        let host: Vec<usize> = self.host.iter().filter(|(_, of)| of.1 == id).map(|(&base, _)| base).collect();
        for base in host {
            if let Some((_, _, true)) = self.host.remove(&base) {
                // SAFETY: the driver's own memory, which its context takes with it.
                unsafe { libc::free(base as *mut _) };
            }
        }
        let gone: Vec<u64> = self
            .memory
            .iter()
            .filter(|(_, allocation)| allocation.context == Some(id))
            .map(|(&base, _)| base)
            .collect();
        gone.into_iter().filter_map(|base| self.memory.remove(&base)).collect()
    }

    fn streams_and_orphans(&self) -> impl Iterator<Item = (&Arc<Stream>, Point)> {
        let live = self.every.values().map(|stream| (stream, stream.queue.end()));
        live.chain(self.orphans.iter().map(|orphan| (&orphan.stream, orphan.point.clone())))
    }

    /// The ends of the work that streams have now, streams that have ended included.
    pub(crate) fn ends(&self, which: impl Fn(&Stream) -> bool) -> Vec<Point> {
        let mut ends = self.all_ends(which);
        ends.retain(|point| !point.is_reached());
        ends
    }

    /// The same, with those that are reached.
    pub(crate) fn all_ends(&self, which: impl Fn(&Stream) -> bool) -> Vec<Point> {
        self.streams_and_orphans().filter(|(stream, _)| which(stream)).map(|(_, point)| point).collect()
    }

    /// Gives work to a stream, behind points and behind the work that the stream waits for anyway.
    pub(crate) fn enqueue(&mut self, stream: &Stream, work: Option<Work>, mut after: Vec<Point>) -> Point {
        match &stream.behind {
            // The legacy stream waits for the present work of blocking streams.
            None => after.extend(self.ends(|other| other.is_blocking_in(stream.context))),
            Some(_) if stream.non_blocking => {}
            // And blocking streams wait for the present work of the legacy stream.
            Some(legacy) => after.push(legacy.end()),
        }
        stream.queue.submit(work, after)
    }

    /// Gives a stream an empty item, for an event.
    pub(crate) fn mark(&mut self, stream: &Stream) -> Point {
        self.enqueue(stream, None, Vec::new())
    }

    /// Whether all work that a query of a stream sees is complete: for the legacy stream, the work of blocking streams too.
    pub(crate) fn is_idle(&self, stream: &Stream) -> bool {
        let own = stream.queue.end().is_reached();
        own && (!stream.is_legacy() || self.ends(|other| other.is_blocking_in(stream.context)).is_empty())
    }
}
