//! The real driver: its types, and calls of it on the library's own behalf.

pub(crate) mod calls;
pub(crate) mod types;

pub(crate) use calls::*;
