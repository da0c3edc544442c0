//! A simulated CUDA driver: `libcuda.so.1` for machines without a GPU.
//!
//! Processes share simulated cards through a file. Host and device memory are separate stores with a link of given rates
//! between them; streams, events, captures and graphs behave as the driver's do, as far as programs that share a GPU depend
//! on it. The simulator knows nothing of nvshare, but for the function of its one kernel (`content.rs`).
//!
//! The simulator does not do: time slicing below a kernel (kernels of all processes run one at a time), and any computation
//! but the two kernels of the workload client, and nvshare's.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "the exported functions hand raw arguments on by one line each"
)]

mod api;
mod capture;
mod checkpoint;
mod config;
mod content;
mod contexts;
mod exit;
mod handles;
mod host_functions;
mod memory;
mod objects;
mod pool;
mod process;
mod ranges;
mod sharing;
mod stacks;
mod stream;
mod tables;
mod vmm;
mod world;

use std::ffi::c_void;

/// The address of an entry point.
#[derive(Debug, Clone, Copy)]
struct Address(*const c_void);

// SAFETY: the address of a function, which is code.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

fn address_of(name: &str) -> Option<*mut c_void> {
    api::names().find(|(known, _)| *known == name).map(|(_, address)| address.0.cast_mut())
}
