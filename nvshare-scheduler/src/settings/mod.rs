//! The settings of an administrator: options and environment first, then the configuration file, then defaults.
//!
//! Settings made at run time come before all of these, until they are reset: see [`Store`].

mod file;
pub(crate) mod limits;
mod options;
mod store;

pub use options::{Error, Options, Settings};
pub use store::Store;

pub(crate) use file::parse;
pub(crate) use store::replace;
