//! Memory in stream order: pools, which may keep what is freed, and what graphs allocate when they run.
//!
//! Each card has a plain pool, its default one, and may have a managed one.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use crate::capture::{Graph, Kind};
use crate::memory::Allocation;
use crate::objects::Stream;
use crate::process::{CAPTURE_INVALIDATED, Failure, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, Process};
use crate::stream::{Point, Work, unique};
use crate::world::{BLOCK, Way};

/// What a graph allocates when it runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Node {
    base: u64,
    bytes: u64,
    gpu: usize,
}

/// Freed in the order of a stream that has not come so far.
#[derive(Debug)]
struct Freed {
    /// Which free it is: the memory may be handed out again on the stream and freed again.
    id: u64,
    stream: u64,
    point: Point,
}

#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// Handed out, by base.
    used: HashSet<u64>,
    /// By base.
    freed: HashMap<u64, Freed>,
    /// Freed and kept.
    idle: Vec<Arc<Allocation>>,
    /// Anything but zero: what is freed is kept.
    pub(crate) threshold: u64,
    /// Of graphs, by base.
    graphs: BTreeMap<u64, usize>,
    /// What captures have allocated: how long it will be, by base.
    nodes: BTreeMap<u64, u64>,
    /// Where the launches of such graphs end.
    pub(crate) launches: Vec<Point>,
}

impl Pool {
    /// Whether an allocation is freed as soon as its stream comes so far.
    pub(crate) fn is_freed(&self, base: u64) -> bool {
        self.freed.contains_key(&base)
    }

    /// Whether a graph will have memory there when it runs.
    pub(crate) fn is_of_graph(&self, address: u64, bytes: u64) -> bool {
        let before = self.nodes.range(..=address).next_back();
        before.is_some_and(|(base, length)| address + bytes <= base + length)
    }

    /// An allocation is gone.
    pub(crate) fn forget(&mut self, base: u64) {
        self.used.remove(&base);
        self.graphs.remove(&base);
    }
}

impl Process {
    /// Allocates of a managed pool or of a plain one.
    pub(crate) fn allocate_ordered(
        &self,
        stream: &Stream,
        gpu: usize,
        size: u64,
        managed: bool,
    ) -> Result<u64, Failure> {
        if size == 0 {
            return Err(INVALID_VALUE);
        }
        let mut tables = self.tables();
        let count = size.div_ceil(BLOCK) as usize;
        let fits = |a: &Arc<Allocation>| a.gpu == gpu && a.managed == managed && a.blocks.len() == count;
        // What the same stream frees is there for who comes behind.
        let behind = tables.pool.freed.iter().find(|(base, freed)| {
            freed.stream == stream.id
                && tables.pool.used.contains(base)
                && tables.memory.get(base).is_some_and(fits)
        });
        if let Some((&base, _)) = behind {
            tables.pool.freed.remove(&base);
            return Ok(base);
        }
        let again = tables.pool.idle.iter().position(fits);
        if let Some(again) = again {
            let allocation = tables.pool.idle.swap_remove(again);
            let base = allocation.base;
            tables.memory.insert(base, allocation);
            tables.pool.used.insert(base);
            return Ok(base);
        }
        drop(tables);
        let base = self.allocate_on(gpu, size, managed, None).or_else(|failure| {
            // What is about to be freed may be enough.
            let points: Vec<Point> = self.tables().pool.freed.values().map(|f| f.point.clone()).collect();
            if failure != OUT_OF_MEMORY || points.is_empty() {
                return Err(failure);
            }
            points.iter().for_each(Point::wait);
            self.allocate_on(gpu, size, managed, None)
        })?;
        if managed {
            // The driver populates what such a pool hands out (measured).
            self.prefetch(base, size, Way::ToDevice)?;
        }
        self.tables().pool.used.insert(base);
        Ok(base)
    }

    /// Frees what any function allocated, when the stream comes so far.
    pub(crate) fn free_in_order(&'static self, base: u64, stream: &Arc<Stream>) -> Result<(), Failure> {
        let mut tables = self.tables();
        if tables.is_capturing(stream) {
            // Memory of the graph, or that the program had before: it goes when the graph runs.
            let is_known = tables.memory.contains_key(&base) && !tables.pool.graphs.contains_key(&base);
            let work: Work = Arc::new(move || {
                if is_known {
                    let _ = self.end_ordered(base);
                }
            });
            let captured = tables.capture_node(stream, Kind::Memory, Some(&work), None)?;
            return if captured { Ok(()) } else { Err(CAPTURE_INVALIDATED) };
        }
        let managed = tables.memory.get(&base).ok_or(INVALID_VALUE)?.managed;
        if managed && !tables.pool.used.contains(&base) {
            return Err(NOT_SUPPORTED);
        }
        if tables.pool.freed.contains_key(&base) {
            return Err(INVALID_VALUE);
        }
        tables.legacy_is_free(stream)?;
        if tables.mark(stream).is_reached() {
            // Nothing is before it.
            drop(tables);
            return self.end_ordered(base);
        }
        let id = unique();
        let work: Work = Arc::new(move || {
            let mut tables = self.tables();
            if tables.pool.freed.get(&base).is_some_and(|freed| freed.id == id) {
                tables.pool.freed.remove(&base);
                drop(tables);
                let _ = self.end_ordered(base);
            }
        });
        // The work looks for it under the lock that is held.
        let point = tables.enqueue(stream, Some(work), Vec::new());
        tables.pool.freed.insert(base, Freed { id, stream: stream.id, point });
        Ok(())
    }

    /// Frees memory of a pool, or of any function, that nobody uses any more.
    pub(crate) fn end_ordered(&self, base: u64) -> Result<(), Failure> {
        let mut tables = self.tables();
        let allocation = tables.memory.remove(&base).ok_or(INVALID_VALUE)?;
        if tables.pool.used.remove(&base) && tables.pool.threshold > 0 {
            tables.pool.idle.push(allocation);
            return Ok(());
        }
        let of_graph = tables.pool.graphs.contains_key(&base);
        tables.pool.forget(base);
        drop(tables);
        if of_graph {
            // The graph has its addresses for as long as it lives.
            self.world.free(allocation.gpu, &allocation.blocks);
        } else {
            self.give_back(&allocation);
        }
        Ok(())
    }

    /// Whether an allocation is the pool's.
    pub(crate) fn is_pooled(&self, base: u64) -> bool {
        self.tables().pool.used.contains(&base)
    }

    /// Frees an allocation of the pool when all that was submitted is done.
    pub(crate) fn free_pooled(&self, base: u64) -> Result<(), Failure> {
        let mut tables = self.tables();
        if tables.pool.is_freed(base) {
            return Err(INVALID_VALUE);
        }
        tables.unsafe_call()?;
        let points = tables.ends(|_| true);
        drop(tables);
        points.iter().for_each(Point::wait);
        self.end_ordered(base)
    }

    /// Bytes that the pool has handed out, and that it keeps.
    pub(crate) fn pool_bytes(&self, gpu: usize, managed: bool) -> (u64, u64) {
        let of_pool = |a: &&Arc<Allocation>| a.gpu == gpu && a.managed == managed;
        let tables = self.tables();
        let (mut used, mut kept) = (0, tables.pool.idle.iter().filter(of_pool).map(|a| a.bytes()).sum());
        for base in &tables.pool.used {
            let bytes = tables.memory.get(base).filter(of_pool).map_or(0, |a| a.bytes());
            // What is freed is not used any more, and still there.
            *if tables.pool.is_freed(*base) { &mut kept } else { &mut used } += bytes;
        }
        (used, kept)
    }

    pub(crate) fn trim_pool(&self, gpu: usize, managed: bool) {
        let mut tables = self.tables();
        let of_pool = |a: &Arc<Allocation>| a.gpu == gpu && a.managed == managed;
        let (gone, left) = std::mem::take(&mut tables.pool.idle).into_iter().partition(of_pool);
        tables.pool.idle = left;
        drop(tables);
        let gone: Vec<Arc<Allocation>> = gone;
        gone.iter().for_each(|allocation| self.give_back(allocation));
    }

    /// An allocation that a graph makes.
    pub(crate) fn graph_node(&self, gpu: usize, bytes: u64) -> Result<Node, Failure> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let base = self.reserve(bytes);
        self.tables().pool.nodes.insert(base, bytes.next_multiple_of(BLOCK));
        Ok(Node { base, bytes, gpu })
    }

    /// A graph is about to run.
    pub(crate) fn allocate_for_graph(&self, graph: &Graph) -> Result<(), Failure> {
        graph.allocations().try_for_each(|node| {
            if self.tables().pool.graphs.contains_key(&node.base) {
                return Ok(());
            }
            let count = node.bytes.div_ceil(BLOCK) as usize;
            let blocks = self.world.allocate(node.gpu, count, true).ok_or(OUT_OF_MEMORY)?;
            let (base, gpu) = (node.base, node.gpu);
            let allocation = Allocation { base, gpu, blocks, managed: false, context: None };
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

    /// Gives up what graphs have, unless one may be running.
    pub(crate) fn trim_graphs(&self, gpu: usize) -> Result<(), Failure> {
        let mut tables = self.tables();
        tables.pool.launches.retain(|point| !point.is_reached());
        if !tables.pool.launches.is_empty() {
            return Ok(());
        }
        let gone: Vec<u64> =
            tables.pool.graphs.iter().filter(|(_, on)| **on == gpu).map(|(b, _)| *b).collect();
        drop(tables);
        gone.into_iter().try_for_each(|base| self.end_ordered(base))
    }
}

impl Node {
    pub(crate) fn base(self) -> u64 {
        self.base
    }
}
