//! The machine's GPUs: which there are, as the kernel module lists them, and how their memory is used, as NVML says.

mod listing;
mod nvml;

pub(crate) use listing::{DESCRIPTIONS, ListedGpu, Listing, most_named};
pub(crate) use nvml::{NvmlReading, NvmlThread};
