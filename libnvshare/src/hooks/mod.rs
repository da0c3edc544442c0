//! What the program calls in place of the driver, by topic: the handlers that rows of the [table](crate::entry_points) name.

pub(crate) mod arrays;
pub(crate) mod callbacks;
pub(crate) mod captures;
pub(crate) mod contexts;
pub(crate) mod dlsym;
pub(crate) mod graphs;
pub(crate) mod init;
pub(crate) mod macros;
pub(crate) mod memory;
pub(crate) mod nvml;
pub(crate) mod pointers;
pub(crate) mod pools;
pub(crate) mod stream_ordered;
pub(crate) mod streams;
pub(crate) mod vmm;
