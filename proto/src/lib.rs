//! Definitions that all parts of nvshare use: messages and their bytes, units, socket paths, environment names.
//!
//! This crate knows nothing of sockets, of CUDA or (without its `tokio` feature) of an async runtime.

#![forbid(unsafe_code)]

pub mod cdi;
pub mod codec;
pub mod env;
mod gpu;
mod host;
mod message;
pub mod pace;
pub mod paths;
pub mod quota;
mod repeated;
mod seat;
mod share;
mod status;
pub mod units;
mod watch;

pub use gpu::{GpuUuid, ParseGpuUuidError};
pub use host::{HostSegment, HostStatus, MAX_SEGMENTS, MAX_SEGMENTS_HELD, SEGMENT};
pub use message::{
    AdminReply, AdminRequest, Amount, ClientMessage, Counters, ELSEWHERE, Epoch, Gate, InitialState,
    MAX_ELSEWHERE, MemoryMode, NO_PLACE, OLDEST, QuantumRule, ROOM_PIECE, Register, Reply, Request,
    SchedulerMessage, Usage, VERSION,
};

pub use repeated::{LeftOut, Repeated, SILENCE, ThrottledLine};
pub use seat::{
    MAX_SEATS, Occupant, ParseSeatNameError, ParseSlotError, Seat, SeatName, SeatStatus, Slot, stable_hash,
};
pub use share::{
    ComputeLimit, DEFAULT_WEIGHT, Enforcement, GangName, MAX_GANG_MEMBERS, MAX_GANG_NAME, MAX_WEIGHT,
    Priority, ShareStatus, TenantSettings, Wishes,
};
pub use status::{
    AsleepStatus, ClientMemory, ClientState, ClientStatus, GpuStatus, MemoryStatus, Others, ProcessInfo,
    SchedulerStatus, short_command,
};
pub use watch::{EventKind, HandOverPhase, PhaseTime, WatchEvent, WatchFrom};
