//! Memory of the host that the scheduler hands out.

use serde::{Deserialize, Serialize};

use crate::units::MIB;

/// The largest size of a segment of the host's memory, in bytes. A program that exits waits for one to be page-locked.
pub const SEGMENT: u64 = 256 * MIB;
/// The largest number of segments in one frame. A process takes no more descriptors at a time.
pub const MAX_SEGMENTS: usize = 4;
/// The largest number of segments of one owner. A process that comes back lists no more.
pub const MAX_SEGMENTS_HELD: usize = 512;

/// The host memory that a scheduler hands out, as `status` shows it, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStatus {
    /// The most for all clients together.
    pub budget: u64,
    /// The most for one tenant.
    pub each: u64,
    /// Memory that clients have, and that is not free yet since they gave it back.
    pub used: u64,
}

/// A segment of the host's memory that a scheduler has handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostSegment {
    /// The segment's number. Other schedulers' segments have other numbers.
    pub number: u64,
    /// Its length in bytes, a multiple of 2 MiB.
    pub bytes: u64,
}
