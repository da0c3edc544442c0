//! `libnvshare.so`: preloaded into a program, it shares the GPU with others.
//!
//! The way of a call: the [table] makes a hook of each entry point; a submission passes the [gate] and
//! goes to the [driver]; an allocation passes the books of its [device](devices) into the [ledger]; the
//! [session] closes the gate, has the [mover] drain and evict, restore and open again, as the scheduler says.
//!
//! The library is a guest. It never exits, panics, prints to standard output or touches signals; when anything
//! of its own fails, the program runs on as if alone. Limits are the exception: they fail closed.

#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::print_stderr
)]
#![allow(rustdoc::private_intra_doc_links, reason = "nothing here is public but the driver's own names")]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

mod callbacks;
mod config;
mod counters;
mod cuda;
mod descriptor;
mod devices;
mod dl;
mod driver;
mod entry;
mod exit;
mod fork;
mod gate;
mod hooks;
mod hostmem;
mod init;
mod ledger;
mod log;
mod memory;
mod mover;
mod nvml;
mod plain;
mod pointers;
mod quota;
mod resolve;
mod session;
mod sharing;
mod table;
mod unwind;
mod work;
