//! The process that the library lives in: its start, exit and forks, its environment, descriptors and libraries.

pub(crate) mod config;
pub(crate) mod counters;
pub(crate) mod descriptor;
pub(crate) mod fork;
pub(crate) mod host_memory;
pub(crate) mod lifecycle;
pub(crate) mod log;
pub(crate) mod unwind;
