//! What is asked for, and given, of the GPUs' time.

use serde::{Deserialize, Serialize};

use crate::GpuUuid;

/// The weight of who was given none.
pub const USUAL_WEIGHT: u32 = 100;
/// The largest weight. The smallest is 1.
pub const MOST_WEIGHT: u32 = 10_000;
/// Longest name of a gang, in bytes.
pub const LONGEST_GANG: usize = 128;
/// Most processes of a gang.
pub const MOST_MEMBERS: u32 = 64;

/// How much sooner a program's turns come, and how many more there are: each step is a factor of 8 of its weight, so nobody
/// starves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// For work that can wait.
    Low,
    /// What everybody has who says nothing.
    #[default]
    Normal,
    /// For work that somebody waits for; only an administrator gives it.
    High,
}

/// What a compute limit means.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Enforcement {
    /// It binds while others want the GPU; what nobody wants is shared in proportion.
    #[default]
    Default,
    /// It binds always, also alone: a part of each second.
    Force,
    /// It means nothing.
    Disable,
}

/// A limit of the time on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeLimit {
    /// The GPU.
    pub gpu: GpuUuid,
    /// Per cent of the time, 1 to 100.
    pub percent: u8,
}

/// The gang that a process says it belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GangName {
    /// Processes of one tenant, or outside of tenants of one user, that say the same are one gang.
    pub name: String,
    /// How many processes it is to have; 0: as many as come.
    pub size: u32,
}

/// What a process asks for. Less than its tenant was given it gets; more it does not.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// Its weight against others; none: what its tenant was given.
    pub weight: Option<u32>,
    /// Its priority; none: what its tenant was given.
    pub priority: Option<Priority>,
    /// What its compute limits mean.
    pub enforcement: Enforcement,
    /// Its compute limits.
    pub compute: Vec<ComputeLimit>,
    /// Its gang.
    pub gang: Option<GangName>,
}

/// What an administrator gives a tenant; none: as it was.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Given {
    /// Its weight against others.
    pub weight: Option<u32>,
    /// Its priority.
    pub priority: Option<Priority>,
    /// Per cent of the time on the GPU, or on each of its GPUs; 0: no limit.
    pub compute: Option<u8>,
    /// What the compute limit means.
    pub enforcement: Option<Enforcement>,
    /// Bytes of memory on the GPU, or on each of its GPUs; 0: no limit.
    pub memory: Option<u64>,
    /// It is to stand still, or to go on.
    pub paused: Option<bool>,
}

/// What a client has of the GPUs' time, as `status` shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareStatus {
    /// Its weight, or its tenant's.
    pub weight: u32,
    /// Its priority, or its tenant's.
    pub priority: Priority,
    /// What its compute limits mean.
    pub enforcement: Enforcement,
    /// Its compute limits, or its tenant's.
    pub compute: Vec<ComputeLimit>,
    /// An administrator has it stand still.
    pub paused: bool,
    /// The processes whose time is counted together with its own, itself included.
    pub processes: u32,
}
