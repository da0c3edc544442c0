//! Shares of the GPUs' time: what processes ask for and what administrators give.

use serde::{Deserialize, Serialize};

use crate::GpuUuid;

/// The weight of a process for which none is set.
pub const DEFAULT_WEIGHT: u32 = 100;
/// The largest weight. The smallest is 1.
pub const MAX_WEIGHT: u32 = 10_000;
/// Longest name of a gang, in bytes.
pub const MAX_GANG_NAME: usize = 128;
/// The largest number of processes of a gang.
pub const MAX_GANG_MEMBERS: u32 = 64;

/// The priority of a client. Each step multiplies its weight by 8 or divides it by 8, so its turns come sooner or
/// later and nobody starves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// For work that can wait.
    Low,
    /// The default.
    #[default]
    Normal,
    /// For work that people wait for; only an administrator gives it.
    High,
}

impl Priority {
    /// The priorities, from the lowest.
    pub const ALL: [Self; 3] = [Self::Low, Self::Normal, Self::High];

    /// The word for the priority, as variables, options and files have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Normal => "normal",
            Self::High => "high",
        }
    }
}

/// How a compute limit is enforced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Enforcement {
    /// The limit binds while others request the GPU; time that nobody requests is shared in proportion.
    #[default]
    Default,
    /// The limit binds always, also while the client is alone: it has a part of each second.
    Force,
    /// The limit has no effect.
    Disable,
}

impl Enforcement {
    /// The ways to enforce a limit.
    pub const ALL: [Self; 3] = [Self::Default, Self::Force, Self::Disable];

    /// The word for the way, as variables, options and files have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Force => "force",
            Self::Disable => "disable",
        }
    }
}

/// A limit of the time on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeLimit {
    /// The GPU.
    pub gpu: GpuUuid,
    /// Per cent of the time, 1 to 100.
    pub percent: u8,
}

/// The gang that a process names as its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GangName {
    /// The name. Processes of one tenant, or of one user outside tenants, that give the same name are one gang.
    pub name: String,
    /// Processes that the gang is to have; 0: any number.
    pub size: u32,
}

/// The share that a process asks for: it may be less than its tenant was given, not more.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wishes {
    /// Weight against others; none: the tenant's.
    pub weight: Option<u32>,
    /// Priority; none: the tenant's.
    pub priority: Option<Priority>,
    /// How its compute limits are enforced.
    pub enforcement: Enforcement,
    /// Its compute limits.
    pub compute: Vec<ComputeLimit>,
    /// Its gang.
    pub gang: Option<GangName>,
}

/// Settings that an administrator gives a tenant; none: unchanged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantSettings {
    /// Weight against others.
    pub weight: Option<u32>,
    /// Priority.
    pub priority: Option<Priority>,
    /// Per cent of the time on the GPU, or on each of its GPUs; 0: no limit.
    pub compute: Option<u8>,
    /// How the compute limit is enforced.
    pub enforcement: Option<Enforcement>,
    /// Bytes of memory on the GPU, or on each of its GPUs; 0: no limit.
    pub memory: Option<u64>,
    /// Whether the tenant stands still.
    pub paused: Option<bool>,
}

/// A client's share of the GPUs' time, as `status` shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareStatus {
    /// The weight of the client, or of its tenant.
    pub weight: u32,
    /// The priority of the client, or of its tenant.
    pub priority: Priority,
    /// How its compute limits are enforced.
    pub enforcement: Enforcement,
    /// The compute limits of the client, or of its tenant.
    pub compute: Vec<ComputeLimit>,
    /// An administrator has paused the client.
    pub paused: bool,
    /// Processes whose time is counted together with the client's, the client included.
    pub processes: u32,
}
