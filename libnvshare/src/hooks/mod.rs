//! The functions that the program calls in place of the driver's, of NVML's, and of the C library's look-up, by
//! topic. The [table] is made from the list of [entry points](crate::entry_points), whose rows name the handlers.

mod arrays;
mod callbacks;
mod captures;
mod contexts;
pub(crate) mod copies;
mod dlsym;
mod graphs;
mod init;
mod ipc;
mod macros;
mod memory;
mod memory_info;
mod nodes;
mod nvml;
pub(crate) mod pointers;
mod pools;
mod stream_ordered;
mod streams;
pub(crate) mod table;
mod target;
mod thunks;
mod vmm;
