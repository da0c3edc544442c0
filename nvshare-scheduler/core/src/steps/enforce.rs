//! Clients that must leave though nobody waits for the GPU: their enforced compute limit is used up, or they are paused.

use std::time::Duration;

use nvshare_proto::GpuUuid;

use crate::state::client::{Client, ClientId, Phase};
use crate::steps::gangs::Unit;
use crate::{Core, Time};

impl Core {
    /// Asks clients to leave whose time is over, and looks again when the next client's time is over.
    pub(crate) fn enforce_limits(&mut self, uuid: GpuUuid) {
        let now = self.now;
        let Some(gpu) = self.gpus.get(&uuid) else { return };
        if gpu.shares.paced().is_empty() && !self.given.values().any(|given| given.paused) {
            return;
        }
        let over = |id: &ClientId| {
            let client = self.clients.get(id)?;
            if !matches!(client.phase, Phase::Granted { .. } | Phase::Running { .. } | Phase::Idle { .. }) {
                return None;
            }
            let runs = client.phase.runs();
            let pace = if runs { gpu.shares.ends_at(client.job, expected_drain(client, uuid)) } else { None };
            let over = if client.paused { Some(Time::ZERO) } else { pace };
            over.map(|over| (over.max(gpu.not_before), *id))
        };
        let over: Vec<(Time, ClientId)> = gpu.ledger.holders().iter().filter_map(over).collect();
        for &(over, id) in &over {
            if over <= now {
                self.ask_to_leave(id);
            } else if let Some(gpu) = self.gpus.get_mut(&uuid) {
                gpu.wake_at(over);
            }
        }
    }

    /// When compute limits let all of a unit run on all of its GPUs; none: at once.
    pub(crate) fn paced_until(&self, unit: &Unit) -> Option<Time> {
        let clients = unit.iter().filter_map(|id| self.clients.get(id));
        let begin = |client: &Client, uuid: &GpuUuid| {
            self.gpus.get(uuid)?.shares.begins_at(client.job, expected_drain(client, *uuid))
        };
        let begins = clients.flat_map(|c| c.accounts.keys().filter_map(move |uuid| begin(c, uuid)));
        begins.max().filter(|&at| at > self.now)
    }

    /// Whether a client's work in flight must be bounded though nobody waits: the client has to leave when its limit is
    /// used up, or as soon as it can.
    pub(crate) fn is_bounded(&self, id: ClientId) -> bool {
        let Some(client) = self.clients.get(&id) else { return false };
        let mut gpus = client.accounts.keys().filter_map(|uuid| self.gpus.get(uuid));
        client.paused || gpus.any(|gpu| gpu.shares.paced().contains(&client.job))
    }
}

/// How long a client's drain takes on a GPU, as far as is known.
fn expected_drain(client: &Client, uuid: GpuUuid) -> Duration {
    client.accounts.get(&uuid).and_then(|account| account.cost.drain.mean()).unwrap_or_default()
}
