//! Processes that live on after their connection. The memory that they left stays charged to them until they
//! end, run another program, or are seen to have nothing.

use nvshare_proto::units::Bytes;
use nvshare_proto::{EventKind, GpuUuid};

use crate::state::client::ClientId;
use crate::state::gpu::{Departed, Gpu};
use crate::steps::books::Books;

impl Books {
    /// Frees the memory that some processes have left on a GPU, and returns them.
    pub(crate) fn forget_departed(
        &mut self,
        uuid: GpuUuid,
        which: impl Fn(ClientId, &Departed) -> bool,
    ) -> Vec<Departed> {
        // Nobody has left anything on a GPU that is not known.
        let gone = self.change_gpu(uuid, |gpu| gpu.forget_departed(which)).unwrap_or_default();
        if !gone.is_empty() {
            self.queue_with_watchers(uuid);
            self.look_for_those_that_wake(uuid);
        }
        for (id, departed) in &gone {
            self.report_mut().emit_on(EventKind::Ended, *id, uuid, departed.bytes);
        }
        gone.into_iter().map(|(_, departed)| departed).collect()
    }

    /// Reports a process that has left, and lives on for longer than its end should take.
    pub(crate) fn report_departed(&mut self, id: ClientId, uuid: GpuUuid) {
        let report = |gpu: &mut Gpu| {
            let Departed { pid, name, bytes, .. } = gpu.report_departed(id)?;
            Some(format!(
                "process {pid} ({name}) has left and lives on: {} of {uuid} stay charged to it until it ends or runs another program",
                Bytes(*bytes)
            ))
        };
        if let Some(text) = self.change_gpu(uuid, report).flatten() {
            self.queue_with_watchers(uuid);
            self.report_mut().warn(text);
        }
    }
}
