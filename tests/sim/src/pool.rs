//! Memory in stream order: pools, which may keep freed memory, and memory that graphs allocate when they run.
//!
//! Each card has a plain pool, its default one; programs make others, plain and managed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::capture::{Graph, Kind};
use crate::memory::{Allocation, Attributes};
use crate::objects::Stream;
use crate::process::{CAPTURE_INVALIDATED, Failure, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, Process};
use crate::stream::{Point, Work, unique};
use crate::tables::Tables;
use crate::world::{BLOCK, Sort, Way};

/// Memory that a graph allocates when it runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Node {
    base: u64,
    bytes: u64,
    gpu: usize,
}

/// Memory that was freed in the order of a stream, which has not come so far.
#[derive(Debug)]
struct Freed {
    /// The number of the free: the memory may be handed out again on the stream and freed again.
    id: u64,
    stream: u64,
    point: Point,
}

/// A pool.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) gpu: usize,
    pub(crate) managed: bool,
    /// Unless it is zero, the pool keeps freed memory.
    pub(crate) threshold: u64,
}

/// Memory that is freed and kept.
#[derive(Debug)]
struct Kept {
    pool: usize,
    allocation: Arc<Allocation>,
    /// The free that nobody has synchronized with so far.
    unseen: Option<Free>,
}

/// A free that a stream has come to.
#[derive(Debug, Clone)]
pub(crate) struct Free {
    stream: Arc<Stream>,
    point: Point,
}

/// The memory that pools have handed out, and that they keep.
#[derive(Debug, Default)]
pub(crate) struct Ordered {
    /// The pool of each allocation that was handed out, by base.
    used: HashMap<u64, usize>,
    /// Memory that waits for its stream to free it, by base.
    freed: HashMap<u64, Freed>,
    /// Memory that is freed and kept: a pool with a threshold keeps it until it is trimmed. Any pool keeps it, trimmed or not,
    /// until somebody synchronizes with the stream that freed it, with an event behind the free, or with the context. Queries
    /// change nothing (measured).
    idle: Vec<Kept>,
    /// The default pool and the current one of each card.
    default: HashMap<usize, usize>,
    current: HashMap<usize, usize>,
    /// The default pool of each card's managed memory, from the first call on that asks for it.
    managed: HashMap<usize, usize>,
    /// Memory of graphs, by base.
    graphs: BTreeMap<u64, usize>,
    /// Lengths of the memory that captures have allocated, by base.
    nodes: BTreeMap<u64, u64>,
    /// The ends of launches of graphs that allocate.
    pub(crate) launches: Vec<Point>,
    /// Calls that are about to launch a graph: its memory stays.
    pub(crate) launching: usize,
}

impl Ordered {
    /// Whether an allocation is one that a pool has handed out.
    pub(crate) fn is_handed_out(&self, base: u64) -> bool {
        self.used.contains_key(&base)
    }

    /// Whether an allocation is freed as soon as its stream comes so far.
    pub(crate) fn is_freed(&self, base: u64) -> bool {
        self.freed.contains_key(&base)
    }

    /// Memory that is freed and kept.
    pub(crate) fn idle(&self) -> impl Iterator<Item = &Arc<Allocation>> {
        self.idle.iter().map(|kept| &kept.allocation)
    }

    /// Takes memory that is freed and kept out of the pools.
    fn take_kept(&mut self, is_taken: impl Fn(&Kept) -> bool) -> Vec<Kept> {
        let (gone, left) = std::mem::take(&mut self.idle).into_iter().partition(is_taken);
        self.idle = left;
        gone
    }

    /// Whether a graph will have memory at an address when it runs.
    pub(crate) fn is_of_graph(&self, address: u64, bytes: u64) -> bool {
        let before = self.nodes.range(..=address).next_back();
        before.is_some_and(|(base, length)| address + bytes <= base + length)
    }

    /// Forgets an allocation that is gone.
    pub(crate) fn forget(&mut self, base: u64) {
        self.used.remove(&base);
        self.graphs.remove(&base);
    }
}

impl Tables {
    /// A card's default pool.
    pub(crate) fn default_pool(&mut self, gpu: usize) -> usize {
        if let Some(&known) = self.pool.default.get(&gpu) {
            return known;
        }
        let made = self.pools.add(Pool { gpu, managed: false, threshold: 0 });
        self.pool.default.insert(gpu, made);
        made
    }

    /// The default pool of a card's managed memory.
    pub(crate) fn default_managed_pool(&mut self, gpu: usize) -> usize {
        let made = || self.pools.add(Pool { gpu, managed: true, threshold: 0 });
        *self.pool.managed.entry(gpu).or_insert_with(made)
    }

    /// The pool for allocations on a card that name no pool.
    pub(crate) fn current_pool(&mut self, gpu: usize) -> usize {
        let default = self.default_pool(gpu);
        self.pool.current.get(&gpu).copied().unwrap_or(default)
    }

    pub(crate) fn set_current_pool(&mut self, gpu: usize, pool: usize) -> Result<(), Failure> {
        let known = self.pools.get(pool)?;
        if known.gpu != gpu {
            return Err(INVALID_VALUE);
        }
        // A managed pool never takes the place of the plain one (measured).
        if !known.managed {
            self.pool.current.insert(gpu, pool);
        }
        Ok(())
    }
}

impl Process {
    /// Allocates memory of a pool, in the order of a stream.
    pub(crate) fn allocate_ordered(&self, stream: &Stream, pool: usize, size: u64) -> Result<u64, Failure> {
        if size == 0 {
            return Err(INVALID_VALUE);
        }
        let mut tables = self.tables();
        let Pool { gpu, managed, .. } = *tables.pools.get(pool)?;
        let count = size.div_ceil(BLOCK) as usize;
        let fits = |a: &Arc<Allocation>| a.blocks.len() == count;
        // Memory that the same stream freed before can be used behind that.
        let behind = tables.pool.freed.iter().find(|(base, freed)| {
            freed.stream == stream.id
                && tables.pool.used.get(base) == Some(&pool)
                && tables.memory.get(base).is_some_and(fits)
        });
        if let Some((&base, _)) = behind {
            tables.pool.freed.remove(&base);
            return Ok(base);
        }
        let again = tables.pool.idle.iter().position(|kept| kept.pool == pool && fits(&kept.allocation));
        if let Some(again) = again {
            let Kept { allocation, .. } = tables.pool.idle.swap_remove(again);
            let base = allocation.base;
            tables.memory.insert(base, allocation);
            tables.pool.used.insert(base, pool);
            return Ok(base);
        }
        drop(tables);
        let allocate = || self.allocate_on(gpu, size, Sort::of(managed), None);
        let base = allocate().or_else(|failure| {
            if failure != OUT_OF_MEMORY {
                return Err(failure);
            }
            // Memory that the pool keeps, or that is about to be freed, may be enough.
            let points: Vec<Point> = self.tables().pool.freed.values().map(|f| f.point.clone()).collect();
            points.iter().for_each(Point::wait);
            let is_kept = self.take_kept_of(|kept| kept.pool == pool);
            if is_kept || !points.is_empty() { allocate() } else { Err(failure) }
        })?;
        if managed {
            // The driver populates the memory that such a pool hands out (measured).
            self.prefetch(base, size, Way::ToDevice)?;
        }
        self.tables().pool.used.insert(base, pool);
        Ok(base)
    }

    /// Frees memory of any kind when the stream comes so far.
    pub(crate) fn free_in_order(&'static self, base: u64, stream: &Arc<Stream>) -> Result<(), Failure> {
        let mut tables = self.tables();
        if tables.is_capturing(stream) {
            // Memory of the graph, or memory that the program had before: the graph frees it when it runs.
            let is_known = tables.memory.contains_key(&base) && !tables.pool.graphs.contains_key(&base);
            let work: Work = Arc::new(move || {
                if is_known {
                    let _ = self.end_ordered(base, None);
                }
            });
            let captured = tables.capture_node(stream, Kind::Memory, Some(&work), None)?;
            return if captured { Ok(()) } else { Err(CAPTURE_INVALIDATED) };
        }
        let managed = tables.memory.get(&base).ok_or(INVALID_VALUE)?.managed;
        if managed && !tables.pool.used.contains_key(&base) {
            return Err(NOT_SUPPORTED);
        }
        if tables.pool.freed.contains_key(&base) {
            return Err(INVALID_VALUE);
        }
        tables.legacy_is_free(stream)?;
        let point = tables.mark(stream);
        if point.is_reached() {
            // Nothing is queued before the free.
            drop(tables);
            return self.end_ordered(base, Some(Free { stream: Arc::clone(stream), point }));
        }
        let (id, on) = (unique(), Arc::clone(stream));
        let work: Work = Arc::new(move || {
            let mut tables = self.tables();
            if tables.pool.freed.get(&base).is_some_and(|freed| freed.id == id)
                && let Some(Freed { point, .. }) = tables.pool.freed.remove(&base)
            {
                drop(tables);
                let _ = self.end_ordered(base, Some(Free { stream: Arc::clone(&on), point }));
            }
        });
        // The work looks for the free under the lock that is held.
        let point = tables.enqueue(stream, Some(work), Vec::new());
        tables.pool.freed.insert(base, Freed { id, stream: stream.id, point });
        Ok(())
    }

    /// Frees memory of any kind that no work uses any more, by a free in the order of a stream, or otherwise.
    pub(crate) fn end_ordered(&self, base: u64, unseen: Option<Free>) -> Result<(), Failure> {
        let mut tables = self.tables();
        let allocation = tables.memory.remove(&base).ok_or(INVALID_VALUE)?;
        let pool = tables.pool.used.remove(&base);
        // A pool that was destroyed keeps nothing.
        let keeps = |pool: &usize| {
            tables.pools.find_value(*pool).is_some_and(|pool| unseen.is_some() || pool.threshold > 0)
        };
        if let Some(pool) = pool.filter(keeps) {
            tables.pool.idle.push(Kept { pool, allocation, unseen });
            return Ok(());
        }
        let of_graph = tables.pool.graphs.contains_key(&base);
        tables.pool.forget(base);
        drop(tables);
        if of_graph {
            // The graph keeps its addresses for as long as it lives.
            self.world.free(allocation.gpu, &allocation.blocks.all());
        } else {
            self.give_back(&allocation);
        }
        Ok(())
    }

    /// Somebody has synchronized with all work up to these points.
    pub(crate) fn see_frees(&self, points: &[Point]) {
        self.see_frees_of(|free| points.iter().any(|point| point.covers(&free.point)));
    }

    /// Somebody has synchronized with these frees, of which a pool without a threshold keeps nothing.
    fn see_frees_of(&self, are: impl Fn(&Free) -> bool) {
        let mut tables = self.tables();
        for kept in &mut tables.pool.idle {
            kept.unseen.take_if(|free| are(free));
        }
        let Tables { pool, pools, .. } = &mut *tables;
        let keeps = |pool: usize| pools.find_value(pool).is_some_and(|pool| pool.threshold > 0);
        let gone = pool.take_kept(|kept| kept.unseen.is_none() && !keeps(kept.pool));
        drop(tables);
        self.give_kept_back(&gone);
    }

    /// Somebody has synchronized with a context, or ended it.
    pub(crate) fn see_frees_in(&self, context: u64) {
        let is_in = |free: &Free| free.stream.context == context || free.stream.family == context;
        self.see_frees_of(|free| is_in(free) && free.point.is_reached());
    }

    /// A stream ends, which takes what it has freed from the pools (measured).
    pub(crate) fn see_frees_on(&self, stream: u64) {
        self.see_frees_of(|free| free.stream.id == stream && free.point.is_reached());
    }

    /// Whether an allocation belongs to a pool.
    pub(crate) fn is_pooled(&self, base: u64) -> bool {
        self.tables().pool.used.contains_key(&base)
    }

    /// Frees an allocation of a pool when all submitted work is done.
    pub(crate) fn free_pooled(&self, base: u64) -> Result<(), Failure> {
        let mut tables = self.tables();
        if tables.pool.is_freed(base) {
            return Err(INVALID_VALUE);
        }
        tables.unsafe_call()?;
        let points = tables.ends(|_| true);
        drop(tables);
        points.iter().for_each(Point::wait);
        self.end_ordered(base, None)
    }

    /// Bytes that a pool has handed out, and bytes that it keeps.
    pub(crate) fn pool_bytes(&self, pool: usize) -> (u64, u64) {
        let tables = self.tables();
        let idle = tables.pool.idle.iter().filter(|kept| kept.pool == pool);
        let (mut used, mut kept) = (0, idle.map(|kept| kept.allocation.bytes()).sum());
        for (base, _) in tables.pool.used.iter().filter(|(_, of)| **of == pool) {
            let bytes = tables.memory.get(base).map_or(0, |a| a.bytes());
            // Freed memory is not used any more, and still there.
            *if tables.pool.is_freed(*base) { &mut kept } else { &mut used } += bytes;
        }
        (used, kept)
    }

    pub(crate) fn trim_pool(&self, pool: usize) {
        self.take_kept_of(|kept| kept.pool == pool && kept.unseen.is_none());
    }

    fn give_kept_back(&self, gone: &[Kept]) {
        gone.iter().for_each(|kept| self.give_back(&kept.allocation));
    }

    /// Gives back what the pools of a card keep, for memory that finds no room; but for frees that nobody has synchronized with,
    /// whose memory serves its own pool alone (measured). Returns whether there was any.
    pub(crate) fn take_all_kept(&self, gpu: usize) -> bool {
        self.take_kept_of(|kept| kept.allocation.gpu == gpu && kept.unseen.is_none())
    }

    fn take_kept_of(&self, is_taken: impl Fn(&Kept) -> bool) -> bool {
        let gone = self.tables().pool.take_kept(is_taken);
        self.give_kept_back(&gone);
        !gone.is_empty()
    }

    /// Ends a pool that a program made. Memory that it has handed out stays.
    pub(crate) fn destroy_pool(&self, pool: usize) -> Result<(), Failure> {
        let mut tables = self.tables();
        if tables.pool.default.values().any(|&default| default == pool) {
            return Err(INVALID_VALUE);
        }
        tables.pools.end(pool)?;
        tables.pool.current.retain(|_, current| *current != pool);
        let gone = tables.pool.take_kept(|kept| kept.pool == pool);
        drop(tables);
        self.give_kept_back(&gone);
        Ok(())
    }

    /// The memory of a graph's allocation node.
    pub(crate) fn graph_node(&self, gpu: usize, bytes: u64) -> Result<Node, Failure> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let base = self.reserve(bytes);
        self.tables().pool.nodes.insert(base, bytes.next_multiple_of(BLOCK));
        Ok(Node { base, bytes, gpu })
    }

    /// Allocates the memory of a graph that is about to run.
    pub(crate) fn allocate_for_graph(&self, graph: &Graph) -> Result<(), Failure> {
        graph.allocations().try_for_each(|node| {
            if self.tables().pool.graphs.contains_key(&node.base) {
                return Ok(());
            }
            let count = node.bytes.div_ceil(BLOCK) as usize;
            let blocks = self.world.allocate(node.gpu, count, Sort::Plain).ok_or(OUT_OF_MEMORY)?;
            let (base, gpu) = (node.base, node.gpu);
            let attributes = Attributes::default();
            let allocation =
                Allocation { base, gpu, blocks: blocks.into(), managed: false, context: None, attributes };
            let mut tables = self.tables();
            tables.memory.insert(base, Arc::new(allocation));
            tables.pool.graphs.insert(base, gpu);
            Ok(())
        })
    }

    pub(crate) fn graph_bytes(&self, gpu: usize) -> u64 {
        let tables = self.tables();
        let graphs = tables.pool.graphs.iter().filter(|(_, on)| **on == gpu);
        graphs.filter_map(|(base, _)| tables.memory.get(base)).map(|a| a.bytes()).sum()
    }

    /// Gives up memory of graphs, unless a graph may be running.
    pub(crate) fn trim_graphs(&self, gpu: usize) -> Result<(), Failure> {
        let mut tables = self.tables();
        tables.pool.launches.retain(|point| !point.is_reached());
        if !tables.pool.launches.is_empty() || tables.pool.launching > 0 {
            return Ok(());
        }
        // Under the lock: a graph that is launched from here on finds none, and gets new memory.
        let bases: Vec<u64> =
            tables.pool.graphs.iter().filter(|(_, on)| **on == gpu).map(|(base, _)| *base).collect();
        let forget = |base: u64| {
            tables.pool.forget(base);
            tables.memory.remove(&base)
        };
        let gone: Vec<Arc<Allocation>> = bases.into_iter().filter_map(forget).collect();
        drop(tables);
        // The graphs keep their addresses for as long as they live.
        gone.iter().for_each(|allocation| self.world.free(allocation.gpu, &allocation.blocks.all()));
        Ok(())
    }
}

impl Node {
    pub(crate) fn base(self) -> u64 {
        self.base
    }
}
