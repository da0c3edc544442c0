//! `libnvshare.so`: preloaded into a program, it shares the GPU with other programs.
//!
//! The program calls [hooks] in place of the driver's functions. They are made from the list of [entry points](entry_points).
//! A submission of work passes the [gate](work::gate) and goes to the [driver]. An allocation is
//! [admitted](memory::admission) and entered into the [list](memory::allocations). The [session] does what the scheduler says:
//! it closes the gate, orders the [mover](memory::mover) to drain, evict and restore memory, and opens the gate again.
//!
//! The library never exits, panics, prints to standard output or touches signals. When something of its own fails, the program
//! runs on as if alone. Limits are the exception: they fail closed.
//!
//! ARCHITECTURE.md describes the layers; `tests/layers.rs` enforces them.

#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::print_stderr
)]
#![allow(rustdoc::private_intra_doc_links, reason = "nothing here is public but the driver's own names")]
#![cfg_attr(
    test,
    allow(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::disallowed_methods
    )
)]

mod driver;
mod entry_points;
mod hooks;
mod lookup;
mod memory;
mod process;
mod session;
mod work;
