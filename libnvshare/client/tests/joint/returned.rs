//! Room that a process has given back, and the core did not know of when it granted the lock.

use std::collections::BTreeMap;

use nvshare_proto::{Amount, ClientMessage, GpuUuid};

/// All room that a process has given back on its connection, in bytes for each GPU.
///
/// A process that has left asks for the lock again. Room for an allocation that waited until the gate was closed may arrive
/// after that: the process gives it back, and the grant, which counts that room as the process's own, is on its way already.
/// The process restores what it can, and asks for the room that it lacks.
#[derive(Debug, Default)]
pub(crate) struct Returned {
    said: BTreeMap<GpuUuid, u64>,
    heard: BTreeMap<GpuUuid, u64>,
    heard_at_grant: BTreeMap<GpuUuid, u64>,
    crossed: BTreeMap<GpuUuid, u64>,
}

impl Returned {
    /// The process says this.
    pub(crate) fn say(&mut self, message: &ClientMessage) {
        add(&mut self.said, message);
    }

    /// The core hears this.
    pub(crate) fn hear(&mut self, message: &ClientMessage) {
        add(&mut self.heard, message);
    }

    /// The core grants the lock.
    pub(crate) fn grant_leaves(&mut self) {
        self.heard_at_grant.clone_from(&self.heard);
    }

    /// The process hears that it is granted the lock.
    pub(crate) fn grant_arrives(&mut self) {
        self.crossed.clone_from(&self.said);
        for (gpu, bytes) in &self.heard_at_grant {
            if let Some(crossed) = self.crossed.get_mut(gpu) {
                *crossed -= bytes;
            }
        }
    }

    /// Bytes that the process gave back on a GPU before it heard of its last grant, and the core had not heard of when it
    /// granted.
    pub(crate) fn crossed(&self, gpu: GpuUuid) -> u64 {
        self.crossed.get(&gpu).copied().unwrap_or(0)
    }
}

fn add(sums: &mut BTreeMap<GpuUuid, u64>, message: &ClientMessage) {
    if let ClientMessage::Room(Amount { gpu, bytes }) = message {
        *sums.entry(*gpu).or_default() += bytes;
    }
}
