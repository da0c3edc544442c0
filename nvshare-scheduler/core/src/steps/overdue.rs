//! Overdue things: answers that do not come, promises that are over, drains that may be tried again.

use nvshare_proto::GpuUuid;
use nvshare_proto::units::Bytes;

use crate::report::warnings::Topic;
use crate::state::client::{Client, ClientId, Phase};
use crate::steps::books::Books;

impl Books {
    /// Ends what is overdue on a GPU, once for each client: another change brings the GPU up again.
    pub(crate) fn expire_overdue(&mut self, uuid: GpuUuid) {
        let now = self.state().now();
        let due: Vec<ClientId> =
            self.state().gpu(uuid).map_or(Vec::new(), |gpu| gpu.ledger.due_by(now).collect());
        for id in due {
            if self.state().client(id).is_some() {
                self.expire_for_client(id, uuid);
            } else {
                self.report_departed(id, uuid);
            }
        }
    }

    fn expire_for_client(&mut self, id: ClientId, uuid: GpuUuid) {
        let (now, grace) = (self.state().now(), self.state().config().grace);
        let unanswered = self.change_client(id, |client| client.expire(uuid, now, grace)).unwrap_or_default();
        if unanswered.eviction {
            let text = format!(
                "client {id} was asked for memory of {uuid} and does not answer; others go on without it"
            );
            self.warn_of_client(Topic::NoAnswer, id, Some(uuid), &text);
        }
        match unanswered.lock {
            Some(Phase::Dropping { .. }) => self.count_as_stuck(id, "give the lock back"),
            Some(_) => self.count_as_stuck(id, "run under its grant"),
            None => {}
        }
        if unanswered.wake {
            self.count_as_late(id);
        }
    }

    /// Marks a client as stuck that did not do what it should: nobody waits for it any longer.
    fn count_as_stuck(&mut self, id: ClientId, what: &str) {
        let now = self.state().now();
        self.change_client(id, |client| {
            client.is_unresponsive = true;
            client.count_turn_as_begun();
        });
        self.change_each_gpu_of(id, |gpu, _| gpu.turn.begin_if_none(now));
        self.release_drained(id);
        if let Some(client @ Client { name, pid, .. }) = self.state().client(id) {
            let keeps = Bytes(client.room());
            // A number that the client chose itself is another process's here.
            let advice = client.identity.pid.map_or_else(
                || "the end of its pod or container frees its memory".to_owned(),
                |pid| format!("`kill -CONT {pid}` lets it go on, and `kill -KILL {pid}` frees its memory"),
            );
            let text = format!(
                "client {id} ({name}, pid {pid}) does not answer: it should {what}, and keeps {keeps}; if its process is stopped, \
                 {advice}"
            );
            self.warn_of_client(Topic::Stuck, id, None, &text);
        }
    }
}
