//! The sockets: how their files are made, guarded and removed, the rate at which connections are
//! accepted, and the frames that are sent on one.

mod files;
pub(crate) mod frames;
mod pace;

pub(crate) use files::{Bound, Guard, bind_from, guard};
pub use files::{Error, Sockets, is_root, random};
pub(crate) use pace::Pace;
