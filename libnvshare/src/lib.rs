//! `libnvshare.so`: preloaded into a program, it shares the GPU with others.
//!
//! The way of a call: the list of [entry points](entry_points) makes [hooks]; a submission passes the [gate](work::gate) and
//! goes to the [driver]; an allocation passes the books of its [device](memory::devices) into the
//! [list](memory::allocations); the [session] closes the gate, has the [mover](memory::mover) drain and evict, restore and
//! open again, as the scheduler says.
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
