//! The parts that a scheduler is started with.

use std::path::PathBuf;

use nvshare_core::Config;
use tokio::sync::mpsc;

use crate::host_memory::Budget;
use crate::metrics::Address;
use crate::seats::Opened;
use crate::settings::Store;

/// The parts that a scheduler is started with.
#[derive(Debug)]
pub struct Setup {
    /// The configuration.
    pub config: Config,
    /// The configuration, each time that it is read again.
    pub changes: mpsc::Receiver<Config>,
    /// The settings that were made at run time.
    pub store: Store,
    /// The seats of containers.
    pub seats: Opened,
    /// The folder in which the machine describes its GPUs.
    pub descriptions: PathBuf,
    /// The address at which metrics are read, if they are.
    pub metrics: Option<Address>,
    /// The host's memory that clients may have, if any.
    pub host_memory: Option<Budget>,
}
