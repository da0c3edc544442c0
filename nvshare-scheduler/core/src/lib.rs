//! Decides which clients hold each GPU's lock, and whose memory is on the GPU.
//!
//! The core is a pure state machine: events and the time come in, outputs go out, and it touches nothing
//! else. It applies each event to the state and then looks at the state as a whole (`reconcile`). This look
//! grants, asks for the lock back, and makes room. A lost or late event can therefore delay a decision and
//! not derail it.
//!
//! An event comes in through `inputs`, which take `steps`. A step changes the `state`, and writes what goes
//! out into the `report`. It acts on the answers to questions about the state (`judge`), which ask a `policy`
//! with the numbers. From the highest layer to the lowest: `inputs`, `steps`, `report`, `judge`, `state`,
//! `policy`. A layer uses only layers below it; `libnvshare/tests/layers.rs` checks that.
//!
//! Invariants, each with a property test in `libnvshare/client/tests/joint/properties.rs`:
//! - clients that hold a GPU at the same time fit it together;
//! - the memory that clients may have resident on a GPU never exceeds its capacity, once they registered in
//!   time;
//! - every client that requests the lock eventually gets it;
//! - a client that is gone holds nothing.

#![forbid(unsafe_code)]

mod core;
mod inputs;
mod judge;
mod policy;
mod report;
mod state;
mod steps;

use std::time::Duration;

pub use core::Core;
pub use inputs::{Event, Measured};
pub use policy::exchange::Exchange;
pub use policy::quantum::AutoTarget;
pub use report::Output;
pub use report::incidents::Incident;
pub use state::client::{ClientId, Gang, Identity, MAX_GPUS_PER_CLIENT};
pub use state::config::{Config, GpuConfig};
#[cfg(feature = "test-api")]
pub use state::cost::{HandOverCosts, RecentMean};
pub use state::rule::Rule;

/// Time since the scheduler started. The core never looks at a clock.
pub type Time = Duration;
