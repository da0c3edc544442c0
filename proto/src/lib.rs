//! Definitions that all parts of nvshare use: messages and their bytes, units, socket paths, environment names.
//!
//! This crate knows nothing of sockets, of CUDA or (without its `tokio` feature) of an async runtime.

#![forbid(unsafe_code)]

pub mod codec;
pub mod env;
mod gpu;
mod message;
pub mod paths;
pub mod quota;
mod repeated;
mod share;
pub mod units;
mod watch;

pub use gpu::{GpuUuid, ParseGpuUuidError};
pub use message::{
    AdminReply, AdminRequest, ClientMessage, ClientState, ClientStatus, Counters, Epoch, Gate, GpuStatus,
    Hold, MemoryMode, Others, PIECE, ProcessInfo, QuantumRule, Register, Reply, Request, Room,
    SchedulerMessage, SchedulerStatus, Usage,
};

pub use repeated::{LeftOut, Repeated, SILENCE};
pub use share::{
    Asked, ComputeLimit, Enforcement, GangName, Given, LONGEST_GANG, MOST_MEMBERS, MOST_WEIGHT, Priority,
    ShareStatus, USUAL_WEIGHT,
};
pub use watch::{EventKind, WatchEvent, WatchFrom};

/// Version of the wire protocol. Both ends of a connection must speak the same one.
pub const VERSION: u16 = 9;
