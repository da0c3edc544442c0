//! How a process behaves.

use nvshare_core::Gang;
use nvshare_proto::{GpuUuid, MemoryMode, Wishes};

use crate::world::gpu;

/// How a process behaves. Times are in milliseconds.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) gpus: Vec<GpuUuid>,
    /// How its memory moves.
    pub(crate) memory: MemoryMode,
    /// GiB that it allocates first, on each GPU.
    pub(crate) gib: u64,
    /// GPU time that it wants; 0: it only sits there.
    pub(crate) work: u64,
    /// It pauses for this long after each 100 ms of work.
    pub(crate) pause: u64,
    /// Milliseconds of work after which it allocates one more GiB, again and again.
    pub(crate) grows_every: Option<u64>,
    /// Later allocations are of a pool.
    pub(crate) pools: bool,
    /// Another thread of it allocates one GiB whenever its work in flight has to complete.
    pub(crate) grows_in_drains: bool,
    /// N: each N-th drain depends on a thread that sleeps at the gate.
    pub(crate) defers_every: Option<u64>,
    /// Milliseconds until its work in flight is complete; 0: up to 60, or 20 if it is quick.
    pub(crate) drains_in: u64,
    /// Its kernels are short.
    pub(crate) quick: bool,
    /// Its drains make progress for as long as they take.
    pub(crate) drains_slowly: bool,
    /// Its host has no memory for evictions.
    pub(crate) cannot_evict: bool,
    /// It runs, without a scheduler, before it registers.
    pub(crate) runs_already: bool,
    /// It ends when its work is done.
    pub(crate) exits: bool,
    /// It starts when this one has ended.
    pub(crate) after: Option<usize>,
    /// The tenant that it belongs to.
    pub(crate) tenant: Option<u64>,
    /// The gang that it names: its work depends on the others of it.
    pub(crate) gang: Option<Gang>,
    /// It shares memory of this number from this time on.
    pub(crate) shares: Option<(u64, u64)>,
    /// It shares that no more from this time on.
    pub(crate) closes_at: Option<u64>,
    /// The part of the GPUs' time that it asks for.
    pub(crate) asked: Wishes,
    pub(crate) starts_at: u64,
    pub(crate) dies_at: Option<u64>,
}

/// A process that computes without a pause.
pub(crate) fn steady(gib: u64, work: u64) -> Plan {
    Plan {
        gpus: vec![gpu(0)],
        memory: MemoryMode::Managed,
        gib,
        work,
        pause: 0,
        grows_every: None,
        grows_in_drains: false,
        pools: false,
        defers_every: None,
        drains_in: 0,
        quick: false,
        drains_slowly: false,
        cannot_evict: false,
        runs_already: false,
        exits: false,
        after: None,
        tenant: None,
        gang: None,
        shares: None,
        closes_at: None,
        asked: Wishes::default(),
        starts_at: 0,
        dies_at: None,
    }
}
