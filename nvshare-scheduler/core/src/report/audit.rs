//! The state as a test checks it.

use nvshare_proto::GpuUuid;

use crate::state::State;
use crate::state::client::{ClientId, Phase};
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
        for gpu in self.gpus() {
            let uuid = &gpu.uuid;
            gpu.ledger.audit()?;
            let clients = self.clients().filter_map(|client| client.accounts.get(uuid));
            let departed = gpu.departed.values().map(|departed| departed.bytes);
            let given: u128 = clients.map(|account| account.room).chain(departed).map(u128::from).sum();
            if given != gpu.ledger.sums().room {
                return Err(format!(
                    "{uuid}: {given} bytes of room are given, the ledger says {}",
                    gpu.ledger.sums().room
                ));
            }
            let sums = gpu.ledger.sums();
            // An event is to come: an answer, or a time.
            let elsewhere = |id: ClientId| {
                self.client(id).is_some_and(|client| client.accounts.len() > 1 || client.gang.is_some())
            };
            let going_on = sums.orders + sums.leaving + sums.holders.count + gpu.ledger.departed().len() > 0
                || gpu
                    .ledger
                    .next()
                    .iter()
                    .copied()
                    .chain(gpu.waiting())
                    .any(|place| elsewhere(place.client));
            let answers = |id: &ClientId| {
                self.unit(*id).iter().any(|&id| {
                    matches!(
                        self.phase(id),
                        Some(Phase::Next(_) | Phase::Granted { .. } | Phase::Dropping { .. })
                    )
                })
            };
            let answers = sums.orders
                + gpu.ledger.departed().len()
                + gpu.ledger.holders().iter().filter(|id| answers(id)).count();
            // A client that uses other GPUs too may wait for those.
            let can_go = |id| {
                let has_room = self.client(id).is_none_or(|client| self.no_room_for(client).is_none());
                has_room && !self.is_stopped(&self.unit(id))
            };
            let only_here = |place: &Place| !elsewhere(place.client) && can_go(place.client);
            let waits = gpu.has_waiter && gpu.waiting().any(|place| only_here(&place));
            let others = self.gpus().filter(|other| other.uuid != *uuid);
            let mut watchers = others.flat_map(|other| &other.watched_by);
            let watches = watchers.any(|&id| self.gpus_of(&self.unit(id)).contains(uuid));
            if self.is_scheduling()
                && waits
                && answers == 0
                && gpu.ledger.next().is_empty()
                && gpu.deadline.is_none()
                && !watches
            {
                return Err(format!("somebody waits for {uuid}, and nothing ends the turn: {gpu:?}"));
            }
            for Place { client: id, .. } in gpu.waiting().chain(gpu.ledger.next().iter().copied()) {
                let elsewhere = elsewhere(id);
                if self.is_scheduling() && !going_on && gpu.deadline.is_none() && !elsewhere && can_go(id) {
                    return Err(format!("client {id} waits for {uuid}, and nothing is to happen: {gpu:?}"));
                }
            }
        }
        Ok(())
    }
}
