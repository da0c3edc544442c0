//! Questions about the state that several parts of the core ask.

use std::collections::BTreeSet;

use nvshare_proto::GpuUuid;

use crate::policy::{next, together};
use crate::state::{Account, Client, ClientId, Gpu, Phase, Time};
use crate::{Core, sum};

impl Core {
    pub(crate) fn wake_at(&mut self, time: Time) {
        self.deadline = Some(self.deadline.map_or(time, |deadline| deadline.min(time)));
    }

    /// What a client wants resident when it runs: all that it has allocated, or what one client may have.
    pub(crate) fn demand(&self, uuid: GpuUuid, id: ClientId) -> u64 {
        let Some(account) = self.account(id, uuid) else { return 0 };
        // Room that does not come back is as good as used.
        let stuck = if account.stays_until.is_some() { account.budget } else { 0 };
        account.wanted().max(stuck).min(self.capacity(uuid))
    }

    pub(crate) fn capacity(&self, uuid: GpuUuid) -> u64 {
        self.gpus.get(&uuid).map_or(0, |gpu| gpu.capacity)
    }

    /// What it lacks for that.
    pub(crate) fn deficit(&self, uuid: GpuUuid, id: ClientId) -> u64 {
        self.demand(uuid, id).saturating_sub(self.account(id, uuid).map_or(0, |account| account.budget))
    }

    /// What nobody may fill, in bytes.
    pub(crate) fn free(&self, uuid: GpuUuid) -> u64 {
        let Some(gpu) = self.gpus.get(&uuid) else { return 0 };
        gpu.capacity.saturating_sub(self.charged(uuid))
    }

    /// What clients may have resident, and what those who are gone have left, in bytes.
    pub(crate) fn charged(&self, uuid: GpuUuid) -> u64 {
        let departed = self.gpus.get(&uuid).map_or(0, Gpu::departed);
        let budgets = self.clients.values().filter_map(|c| c.accounts.get(&uuid)).map(|a| a.budget);
        sum(budgets.chain([departed]))
    }

    /// Whether these clients fit a GPU together, beside what others have there and cannot be moved.
    pub(crate) fn fit(&self, uuid: GpuUuid, members: &[ClientId]) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        let pinned = self
            .clients
            .iter()
            .filter(|(id, _)| !members.contains(id))
            .filter_map(|(_, client)| Some(client.accounts.get(&uuid)?.pinned(client.memory)))
            .chain([gpu.departed()]);
        let pinned = sum(pinned);
        let demands: Vec<u64> = members.iter().map(|&id| self.demand(uuid, id)).collect();
        together::fits(gpu.capacity, pinned, &demands, self.config.exclusive)
    }

    pub(crate) fn fits_beside_members(&self, uuid: GpuUuid, id: ClientId) -> bool {
        let mut members = self.ids(|c| c.phase.stays() && c.accounts.contains_key(&uuid));
        members.push(id);
        self.fit(uuid, &members)
    }

    pub(crate) fn account(&self, id: ClientId, uuid: GpuUuid) -> Option<&Account> {
        self.clients.get(&id)?.accounts.get(&uuid)
    }

    pub(crate) fn gpus_used_by(&self, id: ClientId) -> Vec<GpuUuid> {
        self.clients.get(&id).map(|c| c.accounts.keys().copied().collect()).unwrap_or_default()
    }

    pub(crate) fn gpus_of(&self, phase: impl Fn(Phase) -> bool) -> BTreeSet<GpuUuid> {
        self.clients.values().filter(|c| phase(c.phase)).flat_map(|c| c.accounts.keys().copied()).collect()
    }

    pub(crate) fn ids(&self, which: impl Fn(&Client) -> bool) -> Vec<ClientId> {
        self.clients.iter().filter(|(_, c)| which(c)).map(|(id, _)| *id).collect()
    }

    /// Clients in the order of their turn.
    pub(crate) fn by_turn(&self, which: impl Fn(&Client) -> bool) -> Vec<ClientId> {
        let mut ids = self.ids(which);
        ids.sort_by_key(|id| self.clients.get(id).map(|c| next::key(c.virtual_time, c.waiting_since, *id)));
        ids
    }
}
