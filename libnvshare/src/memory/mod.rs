//! The program's memory: its limits, its allocations, and where they are.

pub(crate) mod admission;
pub(crate) mod allocations;
pub(crate) mod arrays;
pub(crate) mod backing;
pub(crate) mod charge;
pub(crate) mod deferred_free;
pub(crate) mod devices;
pub(crate) mod driver_reserve;
pub(crate) mod exports;
pub(crate) mod free;
mod handles;
pub(crate) mod imports;
mod lending;
mod loans;
pub(crate) mod mapping;
pub(crate) mod mover;
pub(crate) mod physical;
mod pins;
pub(crate) mod plain;
mod pool_frees;
pub(crate) mod pools;
pub(crate) mod quota;
pub(crate) mod sharers;
pub(crate) mod sharing;
pub(crate) mod slabs;
pub(crate) mod sleep;
