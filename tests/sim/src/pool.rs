//! Memory in stream order: pools, which may keep what is freed, and what graphs allocate when they run.
//!
//! Each card has a plain pool, its default one, and may have a managed one.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use crate::process::{Allocation, Failure, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, Process};
use crate::stream::Point;
use crate::world::{BLOCK, Way};

/// What a graph allocates when it runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Node {
    base: u64,
    bytes: u64,
    gpu: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// Handed out, by base.
    used: HashSet<u64>,
    /// Freed and kept.
    idle: Vec<Arc<Allocation>>,
    /// Anything but zero: what is freed is kept.
    pub(crate) threshold: u64,
    /// Of graphs, by base.
    graphs: BTreeMap<u64, usize>,
    /// Where the launches of such graphs end.
    pub(crate) launches: Vec<Point>,
}

fn bytes(allocation: &Allocation) -> u64 {
    allocation.blocks.len() as u64 * BLOCK
}

impl Process {
    /// Allocates of a managed pool or of a plain one.
    pub(crate) fn allocate_ordered(&self, gpu: usize, size: u64, managed: bool) -> Result<u64, Failure> {
        let mut tables = self.tables();
        let count = size.div_ceil(BLOCK) as usize;
        let fits = |a: &Arc<Allocation>| a.gpu == gpu && a.managed == managed && a.blocks.len() == count;
        let again = tables.pool.idle.iter().position(fits);
        if let Some(again) = again {
            let allocation = tables.pool.idle.swap_remove(again);
            let base = allocation.base;
            tables.memory.insert(base, allocation);
            tables.pool.used.insert(base);
            return Ok(base);
        }
        drop(tables);
        let base = self.allocate_on(gpu, size, managed)?;
        if managed {
            // The driver populates what such a pool hands out (measured).
            self.prefetch(base, size, Way::ToDevice)?;
        }
        self.tables().pool.used.insert(base);
        Ok(base)
    }

    /// Frees what any function allocated, when nobody uses it any more.
    pub(crate) fn free_ordered(&self, base: u64, wait: impl FnOnce()) -> Result<(), Failure> {
        if self.tables().memory.get(&base).ok_or(INVALID_VALUE)?.managed && !self.is_pooled(base) {
            return Err(NOT_SUPPORTED);
        }
        wait();
        let mut tables = self.tables();
        if tables.pool.used.remove(&base) && tables.pool.threshold > 0 {
            let allocation = tables.memory.remove(&base).ok_or(INVALID_VALUE)?;
            tables.pool.idle.push(allocation);
            return Ok(());
        }
        drop(tables);
        self.free(base)
    }

    /// Whether an allocation is the pool's.
    pub(crate) fn is_pooled(&self, base: u64) -> bool {
        self.tables().pool.used.contains(&base)
    }

    /// Bytes that the pool has handed out, and that it keeps.
    pub(crate) fn pool_bytes(&self, gpu: usize, managed: bool) -> (u64, u64) {
        let of_pool = |a: &&Arc<Allocation>| a.gpu == gpu && a.managed == managed;
        let tables = self.tables();
        let used = tables.pool.used.iter().filter_map(|base| tables.memory.get(base));
        let idle = tables.pool.idle.iter();
        (used.filter(of_pool).map(|a| bytes(a)).sum(), idle.filter(of_pool).map(|a| bytes(a)).sum())
    }

    pub(crate) fn trim_pool(&self, gpu: usize, managed: bool) {
        let mut tables = self.tables();
        let of_pool = |a: &Arc<Allocation>| a.gpu == gpu && a.managed == managed;
        let (gone, left) = std::mem::take(&mut tables.pool.idle).into_iter().partition(of_pool);
        tables.pool.idle = left;
        drop(tables);
        let gone: Vec<Arc<Allocation>> = gone;
        gone.iter().for_each(|allocation| self.world.free(gpu, &allocation.blocks));
    }

    /// An allocation that a graph makes.
    pub(crate) fn graph_node(&self, bytes: u64) -> Result<Node, Failure> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        Ok(Node { base: self.reserve(bytes), bytes, gpu: self.current_gpu()? })
    }

    /// A graph is about to run.
    pub(crate) fn allocate_for_graph(&self, node: Node) -> Result<(), Failure> {
        if self.tables().pool.graphs.contains_key(&node.base) {
            return Ok(());
        }
        let count = node.bytes.div_ceil(BLOCK) as usize;
        let blocks = self.world.allocate(node.gpu, count, true).ok_or(OUT_OF_MEMORY)?;
        let allocation = Allocation { base: node.base, gpu: node.gpu, blocks, managed: false };
        let mut tables = self.tables();
        tables.memory.insert(node.base, Arc::new(allocation));
        tables.pool.graphs.insert(node.base, node.gpu);
        Ok(())
    }

    pub(crate) fn graph_bytes(&self, gpu: usize) -> u64 {
        let tables = self.tables();
        let graphs = tables.pool.graphs.iter().filter(|(_, on)| **on == gpu);
        graphs.filter_map(|(base, _)| tables.memory.get(base)).map(|a| bytes(a)).sum()
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
        gone.iter().for_each(|base| {
            tables.pool.graphs.remove(base);
        });
        drop(tables);
        gone.into_iter().try_for_each(|base| self.free(base))
    }
}

impl Node {
    pub(crate) fn base(self) -> u64 {
        self.base
    }
}
