//! The settings of an administrator: options and environment first, then the configuration file, then
//! defaults.
//!
//! `options.rs` declares each option once, for the command line and for the file. The values that are written
//! have types of their own (`values.rs`). Settings made at run time come before all of these, until they are
//! reset: see [`Store`].

mod file;
mod in_force;
pub(crate) mod limits;
mod options;
mod store;
mod values;

pub use file::Error;
pub use in_force::Settings;
pub use options::Options;
pub use store::Store;

pub(crate) use file::parse;
pub(crate) use store::replace;
