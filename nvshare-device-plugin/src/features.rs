//! A feature file for Node Feature Discovery, whose local source makes labels of the node of it.

use std::path::Path;

use crate::devices::NodeGpu;
use crate::files;

/// The file's name in its folder.
pub const FILE: &str = "nvshare";

/// Writes how many GPUs are given out, and how many slots each has.
///
/// # Errors
/// The file cannot be written.
pub fn write(folder: &Path, gpus: &[NodeGpu], slots: u32) -> Result<(), String> {
    let text = format!("nvshare.com/gpu.count={}\nnvshare.com/gpu.slots={slots}\n", gpus.len());
    files::replace(&folder.join(FILE), text.as_bytes()).map(drop)
}
