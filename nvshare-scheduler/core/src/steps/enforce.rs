//! Clients that must leave though nobody waits for the GPU: their enforced compute limit is used up, or they
//! are paused.

use nvshare_proto::GpuUuid;

use crate::Time;
use crate::judge::limits::leaves_at;
use crate::state::client::{Client, ClientId, Phase};
use crate::steps::books::Books;

impl Books {
    /// Asks clients to leave whose time is over, and looks again when the next client's time is over.
    pub(crate) fn enforce_limits(&mut self, uuid: GpuUuid) {
        let state = self.state();
        let Some(gpu) = state.known_gpu(uuid) else { return };
        if gpu.shares.paced().is_empty() && !state.jobs().is_any_paused() {
            return;
        }
        let holds = |client: &&Client| {
            matches!(client.phase(), Phase::Granted { .. } | Phase::Running { .. } | Phase::Idle { .. })
        };
        let holders = gpu.ledger.holders().iter().filter_map(|id| state.client(*id)).filter(holds);
        let over = |client: &Client| {
            Some((leaves_at(gpu, client)?.max(state.earliest_drain(&state.unit_of(client))), client.id))
        };
        let over: Vec<(Time, ClientId)> = holders.filter_map(over).collect();
        let now = state.now();
        for (over, id) in over {
            if over <= now {
                self.ask_to_leave(id);
            } else {
                self.wake_at(uuid, over);
            }
        }
    }
}
