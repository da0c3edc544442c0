//! The process that the library lives in: its exit and forks, its environment, threads, descriptors and libraries.

pub(crate) mod answering;
pub(crate) mod bell;
pub(crate) mod blocked;
pub(crate) mod c_library;
pub(crate) mod config;
pub(crate) mod counters;
pub(crate) mod descriptor;
pub(crate) mod elf;
pub(crate) mod host_memory;
pub(crate) mod lifecycle;
pub(crate) mod lock;
pub(crate) mod log;
pub(crate) mod other;
pub(crate) mod passing;
pub(crate) mod phases;
pub(crate) mod seat;
pub(crate) mod threads;
pub(crate) mod unwind;
