//! Captures and graphs.
//!
//! A capture spreads to other streams by events. Its nodes are kept in the order in which they were captured, each with the
//! nodes that it is behind; a graph runs them in that order, which is one of those that the driver may choose.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::objects::{Context, Mark, Stream};
use crate::pool;
use crate::process::{
    self, CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_MERGE, CAPTURE_UNJOINED,
    CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED, CAPTURE_WRONG_THREAD, CAPTURED_EVENT, Failure,
    GRAPH_UPDATE_FAILURE, ILLEGAL_STATE, INVALID_VALUE, Process,
};
use crate::stream::{Point, Work, unique};
use crate::tables::Tables;

/// Modes of captures and of threads.
const GLOBAL: i32 = 0;
pub(crate) const RELAXED: i32 = 2;

/// The kind of a node, as far as two graphs have to agree about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Kernel,
    Copy,
    Fill,
    Host,
    Memory,
    Value,
    Child,
}

#[derive(Clone)]
pub(crate) struct Node {
    kind: Kind,
    after: BTreeSet<usize>,
    work: Option<Work>,
    /// The memory that the node allocates.
    allocates: Option<pool::Node>,
    /// The context that the node runs in.
    context: u64,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("kind", &self.kind).field("after", &self.after).finish_non_exhaustive()
    }
}

/// A capture that is open.
#[derive(Debug)]
pub(crate) struct Capture {
    id: u64,
    /// The stream where it began.
    origin: u64,
    thread: u64,
    mode: i32,
    broken: bool,
    /// The capture's streams, and for each the nodes that its next node is behind.
    members: BTreeMap<u64, (Arc<Stream>, BTreeSet<usize>)>,
    nodes: Vec<Node>,
}

/// A captured graph.
#[derive(Debug, Default)]
pub(crate) struct Graph {
    nodes: Vec<Node>,
}

/// A graph that can be launched.
#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) graph: Arc<Graph>,
    /// The end of the graph's last launch: the next launch waits for it.
    pub(crate) last: Option<Point>,
}

impl Capture {
    fn add(&mut self, stream: &Stream, kind: Kind, work: Option<Work>, allocates: Option<pool::Node>) {
        let index = self.nodes.len();
        if let Some((_, tips)) = self.members.get_mut(&stream.id) {
            let after = std::mem::replace(tips, BTreeSet::from([index]));
            self.nodes.push(Node { kind, after, work, allocates, context: stream.context });
        }
    }

    /// Whether every node leads to the point where the capture's first stream is.
    fn is_joined(&self) -> bool {
        let Some((_, tips)) = self.members.get(&self.origin) else { return false };
        let mut reached = tips.clone();
        let mut open: Vec<usize> = tips.iter().copied().collect();
        while let Some(index) = open.pop() {
            let before = self.nodes.get(index).map(|node| node.after.clone()).unwrap_or_default();
            open.extend(before.into_iter().filter(|&index| reached.insert(index)));
        }
        self.members.values().all(|(_, tips)| tips.is_subset(&reached))
    }
}

impl Graph {
    /// The same graph with one more node, behind those at these places, which begin at 1.
    pub(crate) fn with(
        &self,
        kind: Kind,
        after: &[usize],
        work: Work,
        context: u64,
    ) -> Result<Self, Failure> {
        let mut nodes = self.nodes.clone();
        let place = |&place: &usize| place.checked_sub(1).filter(|&index| index < nodes.len());
        let after = after.iter().map(place).collect::<Option<BTreeSet<usize>>>().ok_or(INVALID_VALUE)?;
        nodes.push(Node { kind, after, work: Some(work), allocates: None, context });
        Ok(Self { nodes })
    }

    /// The same graph with other work of the node at a place, which begins at 1, in another context if there is one.
    pub(crate) fn with_work(
        &self,
        place: usize,
        kind: Kind,
        work: Work,
        context: Option<u64>,
    ) -> Result<Self, Failure> {
        let mut nodes = self.nodes.clone();
        let node = place.checked_sub(1).and_then(|index| nodes.get_mut(index)).ok_or(INVALID_VALUE)?;
        if node.kind != kind {
            return Err(INVALID_VALUE);
        }
        node.work = Some(work);
        node.context = context.unwrap_or(node.context);
        Ok(Self { nodes })
    }

    /// Whether each node runs in the same context as that of another graph.
    pub(crate) fn runs_where(&self, other: &Self) -> bool {
        self.nodes.iter().zip(&other.nodes).all(|(a, b)| a.context == b.context)
    }

    pub(crate) fn allocations(&self) -> impl Iterator<Item = pool::Node> {
        self.nodes.iter().filter_map(|node| node.allocates)
    }

    /// Whether the graph has nodes that allocate or free.
    pub(crate) fn has_memory(&self) -> bool {
        self.nodes.iter().any(|node| node.kind == Kind::Memory)
    }

    /// Whether a node runs in a context that has ended.
    pub(crate) fn is_lost(&self, tables: &Tables) -> bool {
        let lives = |id| tables.all_contexts().any(|context| context.id == id);
        !self.nodes.iter().all(|node| lives(node.context))
    }

    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn run(&self) {
        self.nodes.iter().filter_map(|node| node.work.as_ref()).for_each(|work| work());
    }

    /// Whether another graph can take this one's place in an executable graph.
    pub(crate) fn can_become(&self, other: &Self) -> Result<(), Failure> {
        let same = self.nodes.len() == other.nodes.len()
            && self.nodes.iter().zip(&other.nodes).all(|(a, b)| a.kind == b.kind && a.after == b.after);
        if same && !self.has_memory() { Ok(()) } else { Err(GRAPH_UPDATE_FAILURE) }
    }
}

impl Tables {
    pub(crate) fn capture_of(&mut self, stream: &Stream) -> Option<&mut Capture> {
        self.captures.iter_mut().find(|capture| capture.members.contains_key(&stream.id))
    }

    pub(crate) fn is_capturing(&self, stream: &Stream) -> bool {
        self.captures.iter().any(|capture| capture.members.contains_key(&stream.id))
    }

    /// Whether a stream is not capturing, capturing, or in a capture that is broken; and the capture's number.
    pub(crate) fn capture_status(&mut self, stream: &Stream) -> Result<(i32, u64), Failure> {
        // This query breaks no capture.
        let is_blocking = |capture: &Capture| {
            capture.members.values().any(|(member, _)| member.is_blocking_in(stream.context))
        };
        if stream.is_legacy() && self.captures.iter().any(is_blocking) {
            return Err(CAPTURE_IMPLICIT);
        }
        Ok(self.capture_of(stream).map_or((0, 0), |capture| (1 + i32::from(capture.broken), capture.id)))
    }

    /// Breaks captures. Returns whether there was one.
    fn break_those(&mut self, which: impl Fn(&Capture) -> bool) -> bool {
        let those = self.captures.iter_mut().filter(|capture| which(capture));
        those.map(|capture| capture.broken = true).count() > 0
    }

    /// Refuses a call that must not be made beside a capture, unless the thread is in RELAXED mode.
    pub(crate) fn unsafe_call(&mut self) -> Result<(), Failure> {
        let (me, mode) = (process::this_thread(), process::mode());
        let forbids = |capture: &Capture| {
            mode != RELAXED
                && (capture.thread == me && capture.mode != RELAXED
                    || mode == GLOBAL && capture.mode == GLOBAL)
        };
        if self.break_those(forbids) { Err(CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// A look at a whole context, which breaks every capture in it, whatever the modes.
    pub(crate) fn look_at_context(&mut self, context: u64, family: u64) -> Result<(), Failure> {
        let seen =
            |stream: &Stream| stream.context == context || context == family && stream.family == family;
        if self.break_those(|capture| capture.members.values().any(|(stream, _)| seen(stream))) {
            return Err(CAPTURE_UNSUPPORTED);
        }
        Ok(())
    }

    /// A look at a stream, which breaks its capture, whatever the modes.
    pub(crate) fn look_at_stream(&mut self, stream: &Stream) -> Result<(), Failure> {
        if self.break_those(|capture| capture.members.contains_key(&stream.id)) {
            return Err(CAPTURE_UNSUPPORTED);
        }
        self.legacy_is_free(stream)
    }

    /// The legacy stream waits for blocking streams: if one of them is capturing, that wait would be a part of the capture.
    pub(crate) fn legacy_is_free(&mut self, stream: &Stream) -> Result<(), Failure> {
        if !stream.is_legacy() {
            return Ok(());
        }
        let blocking =
            |capture: &Capture| capture.members.values().any(|(s, _)| s.is_blocking_in(stream.context));
        if self.break_those(blocking) { Err(CAPTURE_IMPLICIT) } else { Ok(()) }
    }

    /// Submits work to a stream, or records it if the stream is capturing: then there is no point to wait for.
    pub(crate) fn submit(
        &mut self,
        stream: &Stream,
        kind: Kind,
        work: Work,
        after: Vec<Point>,
    ) -> Result<Option<Point>, Failure> {
        if self.capture_node(stream, kind, Some(&work), None)? {
            return Ok(None);
        }
        Ok(Some(self.enqueue(stream, Some(work), after)))
    }

    /// Records a node if the stream is capturing. False: it is not capturing.
    pub(crate) fn capture_node(
        &mut self,
        stream: &Stream,
        kind: Kind,
        work: Option<&Work>,
        allocates: Option<pool::Node>,
    ) -> Result<bool, Failure> {
        if let Some(capture) = self.capture_of(stream) {
            if capture.broken {
                return Err(CAPTURE_INVALIDATED);
            }
            capture.add(stream, kind, work.cloned(), allocates);
            return Ok(true);
        }
        self.legacy_is_free(stream)?;
        Ok(false)
    }

    /// The point that an event stands for when it is recorded on a stream now.
    pub(crate) fn record(&mut self, stream: &Stream) -> Result<Mark, Failure> {
        if let Some(capture) = self.capture_of(stream) {
            if capture.broken {
                return Err(CAPTURE_INVALIDATED);
            }
            let tips = capture.members.get(&stream.id).map(|(_, tips)| tips.iter().copied().collect());
            return Ok(Mark::Captured(capture.id, tips.unwrap_or_default()));
        }
        self.legacy_is_free(stream)?;
        Ok(Mark::Stream(self.mark(stream)))
    }

    /// A stream waits for an event; this is how a capture spreads.
    pub(crate) fn wait_event(&mut self, stream: &Arc<Stream>, mark: Mark) -> Result<(), Failure> {
        match &mark {
            Mark::Nothing => self
                .capture_of(stream)
                .map_or(Ok(()), |capture| if capture.broken { Err(CAPTURE_INVALIDATED) } else { Ok(()) }),
            Mark::Stream(_) | Mark::Context(_) => {
                if let Some(capture) = self.capture_of(stream) {
                    capture.broken = true;
                    return Err(CAPTURE_ISOLATION);
                }
                self.legacy_is_free(stream)?;
                self.enqueue(stream, None, mark.points());
                Ok(())
            }
            Mark::Captured(id, tips) => self.join(stream, *id, tips),
        }
    }

    fn join(&mut self, stream: &Arc<Stream>, id: u64, tips: &[usize]) -> Result<(), Failure> {
        if let Some(capture) = self.capture_of(stream)
            && capture.id != id
        {
            capture.broken = true;
            self.break_those(|capture| capture.id == id);
            return Err(CAPTURE_MERGE);
        }
        // The capture that the event belongs to may be over.
        let capture = self.captures.iter_mut().find(|capture| capture.id == id).ok_or(CAPTURE_ISOLATION)?;
        if capture.broken {
            return Err(CAPTURE_INVALIDATED);
        }
        if stream.is_legacy() {
            capture.broken = true;
            return Err(CAPTURE_IMPLICIT);
        }
        let (_, before) =
            capture.members.entry(stream.id).or_insert_with(|| (Arc::clone(stream), BTreeSet::new()));
        before.extend(tips);
        Ok(())
    }

    /// A wait for an event, or a query of it.
    pub(crate) fn look_at_event(&mut self, mark: &Mark) -> Result<Vec<Point>, Failure> {
        if let Mark::Captured(id, _) = mark {
            self.break_those(|capture| capture.id == *id);
            return Err(CAPTURED_EVENT);
        }
        self.unsafe_call()?;
        Ok(mark.points())
    }

    pub(crate) fn begin_capture(&mut self, stream: &Arc<Stream>, mode: i32) -> Result<(), Failure> {
        if !(GLOBAL..=RELAXED).contains(&mode) {
            return Err(INVALID_VALUE);
        }
        if stream.is_legacy() {
            return Err(CAPTURE_UNSUPPORTED);
        }
        if self.is_capturing(stream) {
            return Err(ILLEGAL_STATE);
        }
        self.captures.push(Capture {
            id: unique(),
            origin: stream.id,
            thread: process::this_thread(),
            mode,
            broken: false,
            members: BTreeMap::from([(stream.id, (Arc::clone(stream), BTreeSet::new()))]),
            nodes: Vec::new(),
        });
        Ok(())
    }

    pub(crate) fn end_capture(&mut self, stream: &Stream) -> Result<Graph, Failure> {
        let Some(at) = self.captures.iter().position(|capture| capture.members.contains_key(&stream.id))
        else {
            return Err(ILLEGAL_STATE);
        };
        let Some(capture) = self.captures.get_mut(at) else { return Err(ILLEGAL_STATE) };
        if capture.origin != stream.id {
            capture.broken = true;
            return Err(CAPTURE_UNMATCHED);
        }
        if capture.mode != RELAXED && capture.thread != process::this_thread() {
            return Err(CAPTURE_WRONG_THREAD);
        }
        let capture = self.captures.swap_remove(at);
        if capture.broken {
            return Err(CAPTURE_INVALIDATED);
        }
        if !capture.is_joined() {
            return Err(CAPTURE_UNJOINED);
        }
        Ok(Graph { nodes: capture.nodes })
    }

    /// A stream ends: a capture that began on it ends too, and any other capture of it is broken.
    pub(crate) fn leave_capture(&mut self, stream: &Stream) {
        self.captures.retain(|capture| capture.origin != stream.id);
        if let Some(capture) = self.capture_of(stream) {
            capture.broken = true;
            capture.members.remove(&stream.id);
        }
    }
}

impl Process {
    /// Waits until all work of a context is complete. Breaks the captures in it.
    pub(crate) fn synchronize_context(&self) -> Result<(), Failure> {
        let mut tables = self.tables();
        let Context { id, family, .. } = *tables.current()?;
        tables.look_at_context(id, family)?;
        let points = tables.ends(|stream| stream.context == id || stream.family == id);
        drop(tables);
        points.iter().for_each(Point::wait);
        self.see_frees_in(id);
        self.sticky()
    }
}
