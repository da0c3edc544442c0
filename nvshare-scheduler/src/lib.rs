//! The scheduler of nvshare: a pure core (`nvshare-core`) that decides, and a thin shell ([server]) that talks.
//!
//! From the highest room to the lowest: [server] accepts, `connection` reads and writes, `core_task` owns the core; `identity` says
//! whose a connection is; `seats`, `events`, `metrics` and `host_memory` serve the core's task; `settings`, `gpus` and `sockets`
//! know the machine.

#![deny(unsafe_code)]

mod bucket;
mod connection;
mod core_task;
mod descriptors;
mod events;
mod gpus;
pub mod host_memory;
mod identity;
mod lock;
pub mod log;
pub mod metrics;
pub mod notify;
pub mod seats;
pub mod server;
pub mod settings;
mod setup;
pub mod sockets;
