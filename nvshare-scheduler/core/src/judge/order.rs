//! The order of turns: each client's place on a GPU.
//!
//! A client of one GPU has the place of its job. A client of several GPUs stands where it is least behind, and
//! comes forward as it waits (see [`crate::policy::order`]). Such a place counts from the GPU's clock, so it
//! stays while the clock moves.

use crate::state::State;
use crate::state::client::{Client, ClientId};
use crate::state::gpu::Gpu;
use crate::state::place::Place;

impl State {
    /// Returns a client's place in the order of turns on a GPU, as it is now.
    pub(crate) fn place_now(&self, gpu: &Gpu, client: &Client) -> Place {
        let time = if client.uses_several() {
            gpu.shares.clock() + self.lead_on_all(client)
        } else {
            gpu.shares.time(client.job)
        };
        let time = time.saturating_sub(gpu.head_start_of(client));
        Place { time, since: client.waiting_since, client: client.id }
    }

    /// Returns a client's place in a GPU's queue; that of a client which is not in it, as it is now.
    pub(crate) fn place_on(&self, gpu: &Gpu, client: &Client) -> Place {
        let place = gpu.ledger.place_of(gpu.shares.clock(), client.id);
        place.unwrap_or_else(|| self.place_now(gpu, client))
    }

    /// Returns the clients in the order of their turn on a GPU.
    pub(crate) fn by_turn(&self, gpu: &Gpu, ids: impl Iterator<Item = ClientId>) -> Vec<ClientId> {
        let ids: Vec<ClientId> = ids.collect();
        if ids.len() < 2 {
            return ids;
        }
        let mut places: Vec<Place> =
            self.clients_of(&ids).map(|client| self.place_now(gpu, client)).collect();
        places.sort_unstable();
        places.into_iter().map(|place| place.client).collect()
    }

    /// Returns the clients that stay on a GPU, the furthest behind first.
    pub(crate) fn staying_by_turn(&self, gpu: &Gpu) -> Vec<ClientId> {
        self.by_turn(gpu, gpu.ledger.staying().iter().copied())
    }
}
