//! Limits that bind a client though nobody waits: an enforced compute limit, a pause, and a stopped process.

use std::collections::BTreeSet;
use std::time::Duration;

use nvshare_proto::GpuUuid;

use crate::Time;
use crate::state::State;
use crate::state::client::{Client, ClientId};
use crate::state::gangs::Unit;
use crate::state::gpu::Gpu;
use crate::state::sleep::Sleep;

/// Returns when a client that holds a GPU has to leave because of its limit or a pause, or `None` if it may
/// stay.
pub(crate) fn leaves_at(gpu: &Gpu, client: &Client) -> Option<Time> {
    let runs = client.phase().is_running_or_draining();
    let pace = if runs { gpu.shares.ends_at(client.job, expected_drain(client, gpu.uuid)) } else { None };
    if client.paused { Some(Time::ZERO) } else { pace }
}

impl State {
    /// Returns when compute limits let all of a unit run on all of its GPUs, or `None` if at once.
    pub(crate) fn paced_until(&self, unit: &Unit) -> Option<Time> {
        let begin = |client: &Client, uuid: &GpuUuid| {
            self.gpu(*uuid)?.shares.begins_at(client.job, expected_drain(client, *uuid))
        };
        let clients = self.clients_of(unit);
        let begins = clients.flat_map(|c| c.accounts.keys().filter_map(move |uuid| begin(c, uuid)));
        begins.max().filter(|&at| at > self.now())
    }

    /// Whether a client's work in flight must be bounded though nobody waits. The client has to leave when
    /// its limit is used up, or as soon as it can.
    pub(crate) fn is_bounded(&self, client: &Client) -> bool {
        let mut gpus = client.accounts.keys().filter_map(|uuid| self.gpu(*uuid));
        client.paused || gpus.any(|gpu| gpu.shares.paced().contains(&client.job))
    }

    /// Returns the clients whose processes are stopped, or may be stopped to the harm of others. The caller
    /// looks at them now and then.
    pub(crate) fn suspects(&self) -> Vec<ClientId> {
        let is_wanted =
            |gpu: &&Gpu| gpu.ledger.count_waiting() + gpu.ledger.next().len() + gpu.ledger.needy().len() > 0;
        let wanted: BTreeSet<GpuUuid> = self.gpus().filter(is_wanted).map(|gpu| gpu.uuid).collect();
        let is_near = |client: &Client| client.accounts.keys().any(|uuid| wanted.contains(uuid));
        let is_expected = |client: &Client| !matches!(client.sleep, Sleep::No | Sleep::Away);
        let is_suspect = |client: &&Client| client.stopped || is_near(client) || is_expected(client);
        let near = self.clients().filter(is_suspect);
        near.map(|client| client.id).collect()
    }

    /// Whether a process of a unit is stopped, or off the card: the others would wait for it on the GPU.
    pub(crate) fn is_stopped(&self, unit: &[ClientId]) -> bool {
        self.clients_of(unit).any(|client| client.stopped || client.sleep.is_off_card())
    }
}

/// Returns how long a client's drain takes on a GPU, as far as is known.
fn expected_drain(client: &Client, uuid: GpuUuid) -> Duration {
    client.accounts.get(&uuid).and_then(|account| account.cost.drain.mean()).unwrap_or_default()
}
