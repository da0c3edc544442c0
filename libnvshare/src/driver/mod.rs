//! The real driver: its [types], its [functions], and [calls] of them on the library's own behalf.

pub(crate) mod calls;
pub(crate) mod functions;
mod symbols;
pub(crate) mod types;

pub(crate) use calls::*;
