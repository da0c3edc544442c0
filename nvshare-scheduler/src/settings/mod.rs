//! What an administrator chose: options and environment first, then the configuration file, then defaults.
//!
//! What was set at run time stands above all of these, until it is reset: see [`Store`].

mod file;
mod options;
mod store;

pub use options::{Error, Options, Settings};
pub use store::Store;
