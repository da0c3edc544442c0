//! Checks for tests: sums agree, and a client that waits has something to wait for.

use std::collections::BTreeMap;

use nvshare_proto::{GpuUuid, MAX_GANG_MEMBERS};

use crate::state::State;
use crate::state::client::{Client, ClientId, Phase};
use crate::state::gpu::Gpu;
use crate::state::place::Place;

impl State {
    /// Recomputes the ledgers from the clients and compares. `restless`: a GPU that is still to be looked at.
    ///
    /// # Errors
    /// The difference, or the client that waits though no event is to come.
    pub(crate) fn audit(&self, restless: Option<GpuUuid>) -> Result<(), String> {
        if let Some(uuid) = restless.filter(|_| self.is_scheduling()) {
            return Err(format!("{uuid} does not come to rest: {:?}", self.gpu(uuid)));
        }
        let mut used = self.clients().flat_map(|client| client.accounts.keys());
        if let Some(uuid) = used.find(|uuid| self.gpu(**uuid).is_none()) {
            return Err(format!("a client uses {uuid}, which is not known"));
        }
        if self.is_scheduling() {
            self.audit_gangs()?;
        }
        for gpu in self.gpus() {
            self.audit_sums(gpu)?;
            if self.is_scheduling() && gpu.deadline.is_none() {
                self.audit_progress(gpu)?;
            }
        }
        Ok(())
    }

    /// Looks for members that sit there while another one waits: nobody looks at the waiter when their GPU gets free. Clients that share
    /// memory are one gang as long as they do.
    fn audit_gangs(&self) -> Result<(), String> {
        let mut sharers: BTreeMap<u64, ClientId> = BTreeMap::new();
        for client in self.clients().filter(|client| client.joins_sharers()) {
            let unit = self.unit_of(client);
            if client.gang.is_some() && !self.hangs_together(&unit) {
                return Err(format!("client {} is in a gang, and shares memory with none of it", client.id));
            }
            for number in &client.shares {
                let first = *sharers.entry(*number).or_insert(client.id);
                if !unit.contains(&first) && unit.len() + self.unit(first).len() <= MAX_GANG_MEMBERS as usize
                {
                    return Err(format!("clients {first} and {} share memory, and are no gang", client.id));
                }
            }
        }
        for waiter in self.clients().filter(|client| client.waits() && client.gang.is_some()) {
            let unit = self.unit_of(waiter);
            let sits = |client: &&Client| client.phase() == Phase::Parked && !client.wants;
            if let Some(sitter) = self.clients_of(&unit).find(sits) {
                return Err(format!("client {} waits, and its mate {} does not", waiter.id, sitter.id));
            }
        }
        Ok(())
    }

    /// Compares a GPU's ledger with what its clients have.
    fn audit_sums(&self, gpu: &Gpu) -> Result<(), String> {
        gpu.ledger.audit()?;
        let clients = self.clients().filter_map(|client| client.accounts.get(&gpu.uuid));
        let departed = gpu.departed.values().map(|departed| departed.bytes);
        let given: u128 = clients.map(|account| account.room).chain(departed).map(u128::from).sum();
        let said = gpu.ledger.sums().room;
        if given == said {
            return Ok(());
        }
        Err(format!("{}: {given} bytes of room are given, the ledger says {said}", gpu.uuid))
    }

    /// Looks for clients that wait for a GPU without a deadline, while no event is to come from others.
    fn audit_progress(&self, gpu: &Gpu) -> Result<(), String> {
        let uuid = gpu.uuid;
        // A process that comes back to the card ends this wait.
        if gpu.held_back > 0 {
            return Ok(());
        }
        let sums = gpu.ledger.sums();
        let next = gpu.ledger.next();
        // A client that uses other GPUs too may wait for those.
        let is_elsewhere = |id: ClientId| {
            self.client(id).is_some_and(|client| client.accounts.len() > 1 || client.gang.is_some())
        };
        let can_go = |id: ClientId| {
            let has_room = self.client(id).is_none_or(|client| self.no_room_for(client).is_none());
            has_room && !self.is_stopped(&self.unit(id))
        };
        let is_awaited = |id: &&ClientId| {
            self.unit(**id).iter().any(|&id| {
                matches!(
                    self.phase(id),
                    Some(Phase::Next(_) | Phase::Granted { .. } | Phase::Dropping { .. })
                )
            })
        };
        let awaited =
            sums.orders + gpu.departed.len() + gpu.ledger.holders().iter().filter(is_awaited).count();
        let waits = |place: Place| !is_elsewhere(place.client) && can_go(place.client);
        let others = self.gpus().filter(|other| other.uuid != uuid);
        let mut watchers = others.flat_map(|other| &other.watched_by);
        let is_watched = watchers.any(|&id| self.gpus_of(&self.unit(id)).contains(&uuid));
        if gpu.has_waiter && awaited == 0 && next.is_empty() && !is_watched && gpu.waiting().any(waits) {
            return Err(format!("a client waits for {uuid}, and nothing ends the turn: {gpu:?}"));
        }

        let all = || gpu.waiting().chain(next.iter().copied());
        let is_going_on = sums.orders + sums.leaving + sums.holders.count + gpu.departed.len() > 0
            || all().any(|place| is_elsewhere(place.client));
        match all().find(|&place| !is_going_on && waits(place)) {
            None => Ok(()),
            Some(Place { client, .. }) => {
                Err(format!("client {client} waits for {uuid}, and nothing is to happen: {gpu:?}"))
            }
        }
    }
}
