//! Fitting a GPU: the bytes that a client may fill, those that are free, and the clients that can be there
//! together.

use nvshare_proto::GpuUuid;
use nvshare_proto::units::{Bytes, saturate};

use crate::policy::together;
use crate::state::State;
use crate::state::client::{Client, ClientId, Phase};
use crate::state::entry::{Entry, Standing};
use crate::state::gangs::Unit;
use crate::state::gpu::{CapacityFigures, CapacitySource, Gpu};
use crate::state::ledger::Group;

impl State {
    /// Returns the bytes that a client may fill.
    pub(crate) fn capacity(&self, gpu: &Gpu, id: ClientId) -> u64 {
        if gpu.source != CapacitySource::Disputed {
            return gpu.capacity;
        }
        let said = self.account(id, gpu.uuid).map_or(0, |account| account.usage.total);
        self.config().usable(gpu.uuid, CapacityFigures { available: said, ..CapacityFigures::default() })
    }

    /// Returns the free bytes of the part of a GPU that a client may fill.
    pub(crate) fn free(&self, gpu: &Gpu, id: ClientId) -> u64 {
        let most = self.capacity(gpu, id).saturating_sub(gpu.held_back);
        let free = u128::from(most).saturating_sub(gpu.ledger.sums().room);
        saturate(free)
    }

    /// Returns the bytes that other clients have beyond all that this client may fill, since it may see less
    /// of the GPU than they do. Until they have given these bytes back, nothing else that they give back
    /// makes room for it.
    pub(crate) fn overfull(&self, gpu: &Gpu, id: ClientId) -> u64 {
        let most = self.capacity(gpu, id).saturating_sub(gpu.held_back);
        let beyond = gpu.ledger.sums().room.saturating_sub(u128::from(most));
        saturate(beyond)
    }

    /// Returns the bytes that have to leave a GPU so that a unit has its whole demand there.
    pub(crate) fn bytes_to_move(&self, gpu: &Gpu, unit: &Unit) -> u64 {
        let deficits = unit.on(gpu.uuid).iter().map(|&id| gpu.deficit(id)).fold(0, u64::saturating_add);
        deficits.saturating_sub(self.free(gpu, unit.first()))
    }

    /// Whether a group fits a GPU together, beside the pinned memory of others; judged by the capacity that
    /// `seen_by` may fill.
    pub(crate) fn fit(&self, gpu: &Gpu, group: Group, seen_by: ClientId) -> bool {
        self.fit_within(gpu, self.capacity(gpu, seen_by), group)
    }

    fn fit_within(&self, gpu: &Gpu, capacity: u64, group: Group) -> bool {
        if group.mixed && gpu.takes_slices() {
            return false;
        }
        let alone = self.config().exclusive || gpu.source == CapacitySource::Disputed;
        together::fits(capacity, gpu.ledger.pinned_beside(group), group.demand, group.count, alone)
    }

    /// Whether a unit fits a GPU together with a group. `is_in`: the standings whose clients the group contains
    /// already. A unit that is not there is in nobody's way.
    fn fits_with(&self, gpu: &Gpu, group: Group, unit: &Unit, is_in: fn(Standing) -> bool) -> bool {
        gpu.one_of(unit).is_none_or(|one| self.fit(gpu, gpu.with_unit(group, unit, is_in), one))
    }

    pub(crate) fn fits_alone(&self, gpu: &Gpu, unit: &Unit) -> bool {
        self.fits_with(gpu, Group::default(), unit, |_| false)
    }

    pub(crate) fn fits_beside_staying(&self, gpu: &Gpu, unit: &Unit) -> bool {
        self.fits_with(gpu, gpu.ledger.sums().staying, unit, Standing::is_staying)
    }

    /// Whether the clients that still hold a GPU, and may be expected to leave, have no place for a unit that is next.
    pub(crate) fn is_in_the_way(&self, gpu: &Gpu, unit: &Unit) -> bool {
        let holders = gpu.ledger.sums().awaited_holders();
        holders.count > 0 && !self.fits_with(gpu, holders, unit, |standing| standing != Standing::Next)
    }

    /// Whether a client, with its gang, would fit if all others had drained: then only memory that cannot be
    /// moved is in its way.
    pub(crate) fn fits_once_all_have_drained(&self, gpu: &Gpu, id: ClientId) -> bool {
        let unit = self.unit(id);
        // A program can be told that an allocation failed, but not that the memory which it has does not come
        // back.
        let restores = matches!(self.phase(id), Some(Phase::Granted { .. }));
        let stays = |other, entry: &Entry| match self.client(other) {
            Some(client) => client.accounts.get(&gpu.uuid).map_or(0, |account| {
                let is_lost =
                    client.stopped && client.may_go_on_until.is_none() || client.sleep.is_off_card();
                if is_lost && !restores { client.pinned(account) } else { account.pinned(client.memory) }
            }),
            None => entry.pinned,
        };
        let others = gpu.ledger.entries().filter(|(other, _)| !unit.contains(other));
        let pinned = others.fold(0, |sum, (other, entry)| sum + u128::from(stays(other, entry)));
        together::fits(self.capacity(gpu, id), pinned, gpu.demand_of(&unit), 1, false)
    }

    /// Returns a GPU on which no room can be made for a client and its gang, as things are.
    pub(crate) fn no_room_for(&self, client: &Client) -> Option<&Gpu> {
        let unit = self.unit_of(client);
        let mut gpus = self.each_gpu_of(&unit).filter_map(|uuid| self.gpu(uuid));
        gpus.find(|gpu| !self.fits_alone(gpu, &unit))
    }

    /// Returns the UUID of a GPU on which no room can be made for a client and its gang.
    pub(crate) fn gpu_without_room_for(&self, id: ClientId) -> Option<GpuUuid> {
        self.no_room_for(self.client(id)?).map(|gpu| gpu.uuid)
    }

    /// Returns the reason why no room can be made for a client on a GPU, for the log. Returns `None` while a
    /// process that has just ended still frees its memory.
    pub(crate) fn why_no_room(&self, gpu: &Gpu, client: &Client) -> Option<String> {
        let uuid = gpu.uuid;
        let (demand, capacity) = (gpu.demand_of(&self.unit_of(client)), self.capacity(gpu, client.id));
        if demand > u128::from(capacity) {
            let (who, demand) = (if client.gang.is_some() { "its gang" } else { "it" }, saturate(demand));
            return Some(format!(
                "{who} wants {} of {uuid} at once, which has {}",
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

    /// Splits the clients that stay on a GPU into those that fit it together with a unit, and those that do
    /// not. They are taken in the order of turns. A gang stays as a whole, or leaves as a whole.
    pub(crate) fn keep_what_fits(
        &self,
        gpu: &Gpu,
        first: Option<&Unit>,
        staying: Vec<ClientId>,
    ) -> (Group, Vec<ClientId>) {
        let mut kept =
            first.map_or(Group::default(), |first| gpu.with_unit(Group::default(), first, |_| false));
        let mut leavers = Vec::new();
        // Where clients say different capacities, no two of them fit, whoever is asked.
        let seen_by = first.and_then(|first| gpu.one_of(first)).or(staying.first().copied());
        let capacity = seen_by.map_or(0, |id| self.capacity(gpu, id));
        // The gangs that were judged, by their first members.
        let mut judged: Vec<ClientId> = Vec::new();
        for id in staying {
            let unit = self.unit(id);
            if first.is_some_and(|first| first.contains(&id)) {
                continue;
            }
            if unit.len() > 1 {
                if judged.contains(&unit.first()) {
                    continue;
                }
                judged.push(unit.first());
            }
            let stays = |id: &ClientId| gpu.ledger.entry(*id).filter(|entry| entry.standing.is_staying());
            let more = unit.on(gpu.uuid).iter().filter_map(stays).fold(kept, Group::with);
            if kept.count == 0 || self.fit_within(gpu, capacity, more) {
                kept = more;
            } else {
                leavers.extend(unit.on(gpu.uuid).iter().copied().filter(|id| stays(id).is_some()));
            }
        }
        (kept, leavers)
    }
}
