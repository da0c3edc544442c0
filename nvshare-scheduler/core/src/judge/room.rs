//! Room: for whom what is free is reserved, and who could give memory back.

use nvshare_proto::units::{GIB, saturate};

use crate::policy::victims::{self, Candidate, NextTurn};
use crate::state::State;
use crate::state::client::{Client, ClientId};
use crate::state::entry::{Entry, Standing};
use crate::state::gangs::Unit;
use crate::state::gpu::Gpu;
use crate::state::place::Place;

/// Room given, or made, beyond what an allocation asked for, so that not every allocation has to ask. At most
/// a quarter of the free memory is given that way.
pub(crate) const SPARE_ROOM: u64 = GIB;

/// Evictions that make room.
#[derive(Debug)]
pub(crate) struct Evictions {
    /// The clients that are to give bytes back, and how many.
    pub(crate) orders: Vec<(ClientId, u64)>,
    /// With what was ordered before, they suffice; or an earlier order is still unanswered.
    pub(crate) suffice: bool,
    /// Clients that were looked at for them.
    pub(crate) clients_seen: u64,
}

impl State {
    /// Returns the bytes of a GPU's free room that are reserved before a unit that is next, or parked, may
    /// take any.
    pub(crate) fn reserved_before(&self, gpu: &Gpu, unit: &Unit) -> u64 {
        let entries = unit.on(gpu.uuid).iter().filter_map(|&id| gpu.ledger.entry(id));
        let own = entries.filter(|entry| entry.standing == Standing::Next).map(|entry| entry.place).min();
        let ahead = gpu.ledger.next().iter().take_while(|&&place| own.is_none_or(|own| place < own));
        let deficits = ahead.map(|place| gpu.deficit(place.client));
        deficits.fold(self.needed_by_holders(gpu), u64::saturating_add)
    }

    /// Returns the bytes that allocations of the GPU's holders wait for.
    pub(crate) fn needed_by_holders(&self, gpu: &Gpu) -> u64 {
        let needs = gpu.ledger.needy().iter().filter_map(|&other| {
            let holds = gpu.ledger.entry(other).is_some_and(|entry| entry.standing.holds());
            let account = self.account(other, gpu.uuid).filter(|_| holds)?;
            Some(account.needs.min(gpu.capacity.saturating_sub(account.room)))
        });
        needs.fold(0, u64::saturating_add)
    }

    /// Returns the bytes of room that a client gets with a grant: what it lacks, and some to spare.
    pub(crate) fn room_to_grant(&self, gpu: &Gpu, id: ClientId) -> u64 {
        let deficit = gpu.deficit(id);
        deficit + spare(gpu, self.free(gpu, id).saturating_sub(deficit), id)
    }

    /// Chooses the clients that give back `needed` bytes, less what is ordered already. With `beneficiaries`,
    /// these are not asked, and nothing is ordered unless all of it can be had.
    pub(crate) fn evictions(&self, gpu: &Gpu, needed: u64, beneficiaries: Option<&[ClientId]>) -> Evictions {
        let sums = gpu.ledger.sums();
        let missing = u128::from(needed).saturating_sub(sums.ordered);
        let missing = saturate(missing);
        if missing == 0 {
            return Evictions { orders: Vec::new(), suffice: true, clients_seen: 0 };
        }
        let candidates: Vec<Candidate> = gpu
            .ledger
            .entries()
            .filter(|(id, _)| beneficiaries.is_none_or(|ids| !ids.contains(id)))
            .filter(|(_, entry)| entry.room > 0 && entry.bytes_ordered_out.is_none() && !entry.is_silent)
            .filter_map(|(id, entry)| self.candidate(gpu, self.client(id)?, entry))
            .collect();
        let orders = victims::choose(missing, &candidates);
        let possible = orders.iter().fold(0, |sum: u64, &(_, bytes)| sum.saturating_add(bytes));
        if possible < missing && beneficiaries.is_some() {
            return Evictions { orders: Vec::new(), suffice: sums.orders > 0, clients_seen: 0 };
        }
        Evictions { orders, suffice: possible >= missing, clients_seen: candidates.len() as u64 }
    }

    /// Returns the memory that a client could give back, as a candidate for an eviction.
    fn candidate(&self, gpu: &Gpu, client: &Client, entry: &Entry) -> Option<Candidate> {
        let account = client.accounts.get(&gpu.uuid)?;
        // A client that holds the lock needs the room for all that it has allocated.
        // One that is next would wait for room that a process needs to come back, and keep it from that one.
        let parked = matches!(entry.standing, Standing::Parked | Standing::Waits)
            || entry.standing == Standing::Next && gpu.held_back > 0;
        let kept = if parked { account.resident() } else { account.wanted() };
        let unused = account.room.saturating_sub(kept).min(account.room - account.unevictable_bytes());
        let resident = account.room - unused;
        let movable = if parked { resident.saturating_sub(entry.pinned) } else { 0 };
        Some(Candidate { id: client.id, unused, movable, next_turn: self.next_turn(gpu, client) })
    }

    /// Returns when a client needs its memory on a GPU again, as far as that is known.
    fn next_turn(&self, gpu: &Gpu, client: &Client) -> NextTurn {
        // One for which no room can be made has no turn.
        if client.waits() && !client.must_wait {
            let Place { time, since, .. } = self.place_on(gpu, client);
            return NextTurn::InOrder { time, since };
        }
        let soon = gpu.goes_ahead(client) && client.rhythm.may_wake_soon(self.now());
        let asleep_since = client.rhythm.asleep_since().unwrap_or(client.waiting_since);
        NextTurn::Unknown { soon, asleep_since }
    }
}

/// Returns the bytes of room that a client gets beyond what it asks for: none while others wait.
pub(crate) fn spare(gpu: &Gpu, free: u64, id: ClientId) -> u64 {
    let mut waiting = gpu.active_waiters().chain(gpu.ledger.next().iter().copied());
    let has_others = waiting.any(|place| place.client != id);
    if has_others { 0 } else { SPARE_ROOM.min(free / 4) }
}

/// Returns the first client that is next, behind a place.
pub(crate) fn next_behind(gpu: &Gpu, at: Option<Place>) -> Option<Place> {
    let next = gpu.ledger.next();
    match at {
        Some(at) => next.range(at..).find(|&&place| place > at).copied(),
        None => next.first().copied(),
    }
}
