//! The sockets: how their files are made, guarded and removed, and the frames that are sent on a connection.

mod files;
pub(crate) mod frames;

pub(crate) use files::{Bound, bind_from};
pub use files::{Error, Sockets, is_root, random};
