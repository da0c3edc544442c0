//! A client as the core meets it: what it is doing, and how it behaves.

use std::collections::BTreeMap;
use std::time::Duration;

use nvshare_proto::{Asked, Epoch, GpuUuid};

use crate::world::{GIB, gpu};

/// What a model client is doing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum State {
    Parked,
    Restoring(Epoch),
    Running(Epoch),
    Draining(Epoch),
    /// Asked to leave before it ran.
    Withdrawing(Epoch),
    Idle(Epoch),
}

/// How a model client behaves.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) gpus: Vec<GpuUuid>,
    pub(crate) gib: u64,
    /// GPU time that it wants, in ms; 0: it only sits there.
    pub(crate) work: u64,
    /// It pauses for this long after each 100 ms of work.
    pub(crate) pause: u64,
    /// Allocates one more GiB every so many ms of work, up to the GPU's capacity.
    pub(crate) grows_every: Option<u64>,
    /// Every so many drains is deferred.
    pub(crate) defers_every: Option<u64>,
    /// Its work cannot be interrupted for so many ms: with less patience, its drain is deferred.
    pub(crate) drains_in: u64,
    /// Its host has no memory for evictions.
    pub(crate) cannot_evict: bool,
    /// It runs when it registers: it was there before its scheduler.
    pub(crate) runs_already: bool,
    /// Its drains take as long as they take, and are not given up: they make progress.
    pub(crate) drains_slowly: bool,
    /// It ends when its work is done.
    pub(crate) exits: bool,
    /// It starts when this one has ended.
    pub(crate) after: Option<usize>,
    /// The tenant that it belongs to.
    pub(crate) tenant: Option<u64>,
    /// The gang of which it is a member.
    pub(crate) gang: Option<nvshare_core::Gang>,
    /// Where nothing has to move, it runs at once, and its drains are short.
    pub(crate) quick: bool,
    /// What it asks for of the GPUs' time.
    pub(crate) asked: Asked,
    pub(crate) starts_at: u64,
    pub(crate) dies_at: Option<u64>,
}

#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) plan: Plan,
    pub(crate) state: State,
    pub(crate) connected: bool,
    pub(crate) dead: bool,
    pub(crate) allocated: u64,
    /// What it may have, as the scheduler says.
    pub(crate) capacity: BTreeMap<GpuUuid, u64>,
    pub(crate) resident: BTreeMap<GpuUuid, u64>,
    pub(crate) room: BTreeMap<GpuUuid, u64>,
    pub(crate) asked: bool,
    /// Its last grant called it back from leaving.
    pub(crate) recalled: bool,
    pub(crate) waiters: bool,
    pub(crate) needs: bool,
    pub(crate) served: Duration,
    pub(crate) since: Duration,
    pub(crate) drains: u64,
    pub(crate) paused_until: Duration,
    pub(crate) grown_at: Duration,
    pub(crate) wanted_since: Option<Duration>,
    pub(crate) longest_wait: Duration,
}

impl Model {
    pub(crate) fn may_grow(&self) -> bool {
        self.capacity.values().all(|&capacity| self.allocated + GIB <= capacity)
    }
}

/// Plans that differ in little from this one.
pub(crate) fn steady(gib: u64, work: u64) -> Plan {
    Plan {
        gpus: vec![gpu(0)],
        gib,
        work,
        pause: 0,
        grows_every: None,
        defers_every: None,
        drains_in: 0,
        cannot_evict: false,
        runs_already: false,
        drains_slowly: false,
        exits: false,
        after: None,
        tenant: None,
        gang: None,
        quick: false,
        asked: Asked::default(),
        starts_at: 0,
        dies_at: None,
    }
}
