//! The order of turns: each client's place on a GPU.

use crate::policy::next;
use crate::state::State;
use crate::state::client::{Client, ClientId};
use crate::state::gpu::Gpu;
use crate::state::ledger::Place;
use crate::state::virtual_time::Virtual;

impl State {
    /// How far a client's job is ahead of the clock on each GPU that the client uses.
    fn ahead_on_each(&self, client: &Client) -> impl Iterator<Item = Virtual> {
        client.accounts.keys().filter_map(|uuid| {
            let shares = &self.gpus.get(uuid)?.shares;
            Some(shares.time(client.job) - shares.clock())
        })
    }

    /// How far a client is ahead of the clock on the GPU where it is furthest ahead, of all that it uses, or its gang.
    pub(crate) fn ahead_on_all(&self, client: &Client) -> Virtual {
        let of_gang = client.gang.and_then(|gang| self.gangs.get(&gang));
        let known = of_gang.map_or(&client.ahead, |members| &members.ahead);
        known.get_or_compute(self.events, || match of_gang {
            Some(members) => {
                let clients = members.ids().filter_map(|id| self.clients.get(&id));
                next::ahead_on_all(clients.flat_map(|client| self.ahead_on_each(client)))
            }
            None => next::ahead_on_all(self.ahead_on_each(client)),
        })
    }

    /// A client's place in the order of turns on a GPU, as it is now.
    pub(crate) fn place_now(&self, gpu: &Gpu, client: &Client) -> Place {
        let time = if client.uses_several() {
            gpu.shares.clock() + self.ahead_on_all(client)
        } else {
            gpu.shares.time(client.job)
        };
        (time.saturating_sub(gpu.lent_to(client)), client.waiting_since, client.id)
    }

    /// A client's place in a GPU's queue; that of a client which is not in it, as it is now.
    pub(crate) fn place_on(&self, gpu: &Gpu, client: &Client) -> Place {
        let place = gpu.ledger.place_of(gpu.shares.clock(), client.id);
        place.unwrap_or_else(|| self.place_now(gpu, client))
    }

    /// Clients in the order of their turn on a GPU.
    pub(crate) fn by_turn(&self, gpu: &Gpu, ids: impl Iterator<Item = ClientId>) -> Vec<ClientId> {
        let ids: Vec<ClientId> = ids.collect();
        if ids.len() < 2 {
            return ids;
        }
        let mut keys: Vec<Place> = self.clients_of(&ids).map(|client| self.place_now(gpu, client)).collect();
        keys.sort_unstable();
        keys.into_iter().map(|key| key.2).collect()
    }

    /// Members of a GPU, the furthest behind first.
    pub(crate) fn members(&self, gpu: &Gpu) -> Vec<ClientId> {
        self.by_turn(gpu, gpu.ledger.members().iter().copied())
    }
}
