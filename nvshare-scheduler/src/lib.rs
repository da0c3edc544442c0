//! The scheduler of nvshare: a pure core (`nvshare-core`) that decides, and a thin shell ([server]) that talks.

#![deny(unsafe_code)]

mod bounds;
mod bucket;
mod caller;
mod commands;
mod connection;
mod core_task;
mod foresight;
mod frames;
pub mod gpus;
mod groups;
pub mod host_memory;
pub mod identity;
mod journal;
mod limits;
mod lock;
pub mod log;
pub mod metrics;
pub mod notify;
pub mod nvml;
pub mod processes;
mod recorder;
pub mod seats;
pub mod server;
pub mod settings;
mod setup;
pub mod sockets;
pub mod tenants;
mod view;
mod watchers;
