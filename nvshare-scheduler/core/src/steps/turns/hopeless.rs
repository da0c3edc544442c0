//! Waiters for which no room can be made as things are.

use nvshare_proto::units::Bytes;
use nvshare_proto::{EventKind, GpuUuid};

use crate::Core;
use crate::report::warnings::Topic;
use crate::state::client::ClientId;

impl Core {
    /// Whether a client must wait as things are: no room can be made for it, or its gang lacks members. The log says once
    /// why there is no room.
    pub(crate) fn judge_hopeless(&mut self, id: ClientId) -> bool {
        let mut full = self.no_room_on(id);
        if self.part_if_too_large(id, full) {
            full = self.no_room_on(id);
        }
        let why = full.and_then(|uuid| self.why_no_room(uuid, id));
        let hopeless = full.is_some() || self.waits_for_members(id) || self.is_stopped(&self.unit(id));
        let Some(client) = self.clients.get_mut(&id) else { return true };
        let is_news = why.is_some() && !std::mem::replace(&mut client.reported_hopeless, true);
        let changed = client.hopeless != hopeless;
        if let (true, Some(why)) = (is_news, why) {
            self.tell(EventKind::Blocked, id, None, None);
            self.warn_of_client(Topic::Blocked, id, full, &format!("client {id} waits: {why}"));
        }
        if changed {
            for &member in self.unit(id).iter() {
                if let Some(client) = self.clients.get_mut(&member) {
                    client.hopeless = hopeless;
                }
                self.enter(member);
            }
        }
        hopeless
    }

    /// The reason why no room can be made on a GPU, for the log. None while a process that has just ended still frees its
    /// memory.
    pub(crate) fn why_no_room(&self, uuid: GpuUuid, id: ClientId) -> Option<String> {
        let gpu = self.gpus.get(&uuid)?;
        let (demand, capacity) = (self.demand_of(uuid, &self.unit(id)), self.capacity(uuid, id));
        if self.gang_of(id).is_some() && demand > u128::from(capacity) {
            let demand = u64::try_from(demand).unwrap_or(u64::MAX);
            return Some(format!(
                "its gang wants {} of {uuid} at once, which has {}",
                Bytes(demand),
                Bytes(capacity)
            ));
        }
        if let Some(departed) = gpu.departed.values().max_by_key(|departed| departed.bytes) {
            let (pid, bytes) = (departed.pid, Bytes(departed.bytes));
            return departed
                .reported
                .then(|| format!("process {pid} has left and lives on, with {bytes} of {uuid}"));
        }
        Some(format!("what others have on {uuid} cannot be moved and leaves no room for it"))
    }
}
