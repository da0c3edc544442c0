//! Clients that fitted a GPU together, and whose memory grew.

use nvshare_proto::GpuUuid;

use crate::policy::patience::STUBBORN_AFTER;
use crate::state::client::ClientId;
use crate::steps::books::Books;

impl Books {
    /// Asks clients to leave whose demand grew until the clients that stay no longer fit. Before the turn is
    /// over, the clients that grew leave first, then those least behind. One client's need does not end the
    /// turn of the others.
    ///
    /// A client whose drains are given up one after the other stays, and others leave. Its drain may wait for
    /// a thread that sleeps until all of its memory is back. A gang whose last rank comes in stays as well.
    pub(crate) fn shrink_outgrown_set(&mut self, uuid: GpuUuid) {
        let now = self.state().now();
        let Some(gpu) = self.state().known_gpu(uuid) else { return };
        let quantum = gpu.quantum;
        let together = gpu.ledger.sums().staying;
        // One client fits, or waits alone for what is in its way.
        let Some(&first) = gpu.ledger.staying().first().filter(|_| together.count > 1) else { return };
        let is_over = gpu.turn.started().is_some_and(|started| started.saturating_add(quantum) <= now);
        if self.state().fit(gpu, together, first) {
            return;
        }
        self.disband_outgrown_sharers(uuid);
        let Some(gpu) = self.state().known_gpu(uuid) else { return };
        let is_stubborn =
            |id: &ClientId| self.state().client(*id).is_some_and(|client| client.deferrals >= STUBBORN_AFTER);
        let mut staying = self.state().staying_by_turn(gpu);
        if !is_over {
            let grew = |id: &ClientId| gpu.ledger.entry(*id).is_some_and(|entry| entry.has_need);
            staying.sort_by_key(grew);
        }
        // A gang whose last rank still comes in may not be able to drain.
        let complete_by = |id: &ClientId| self.state().gangs_complete_by(&self.state().unit(*id));
        staying.sort_by_cached_key(|id| complete_by(id) <= now);
        staying.sort_by_key(|id| !is_stubborn(id));
        let for_a_stubborn_one = staying.first().is_some_and(is_stubborn);
        let retry_at = self.state().retries_drains_at(&staying);
        let (_, leavers) = self.state().keep_what_fits(gpu, None, staying);
        // The drain that was given up is not tried again so soon, and it may depend on the others. For one that stays, others leave at once.
        if now < retry_at && (!for_a_stubborn_one || leavers.iter().any(is_stubborn)) {
            self.wake_at(uuid, retry_at);
            return;
        }
        let (leavers, comes_in): (Vec<ClientId>, Vec<ClientId>) =
            leavers.into_iter().partition(|id| complete_by(id) <= now);
        if let Some(at) = comes_in.iter().map(complete_by).max() {
            self.wake_at(uuid, at);
        }
        for &id in &leavers {
            self.ask_to_leave(id);
        }
        if !leavers.is_empty() {
            self.change_gpu(uuid, |gpu| gpu.turn.restart(now));
        }
    }
}
