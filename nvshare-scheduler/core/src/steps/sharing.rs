//! Gangs of clients that share memory, as long as they do, and gangs that end as they do not fit: see
//! [`state::gangs`](crate::state::gangs).

use nvshare_proto::{GpuUuid, MAX_GANG_MEMBERS};

use crate::state::circles::{Circle, Circles};
use crate::state::client::{Client, ClientId, GangId};
use crate::state::gangs::Unit;
use crate::steps::books::Books;

impl Books {
    /// A client says which memory it shares now, with those that say the same numbers.
    pub(crate) fn on_shares(&mut self, id: ClientId, numbers: &[u64]) {
        let numbers = numbers.get(..MAX_GANG_MEMBERS as usize).unwrap_or(numbers);
        let note = |client: &mut Client| std::mem::replace(&mut client.shares, numbers.to_vec());
        let Some(before) = self.change_client(id, note) else { return };
        let over: Vec<u64> = before.iter().copied().filter(|number| !numbers.contains(number)).collect();
        if !over.is_empty() {
            self.forget_sharer(id, &over);
            self.take_apart(id);
        }
        if numbers.iter().any(|number| !before.contains(number)) {
            self.unite_sharers(&[id]);
        }
    }

    /// Makes these clients, and all whom they share memory with, gangs.
    fn unite_sharers(&mut self, ids: &[ClientId]) {
        let mut circles = Circles::default();
        for &id in ids {
            let numbers = self.state().client(id).map(|client| client.shares.clone());
            for number in numbers.into_iter().flatten() {
                let first = self.first_sharer(number, id);
                circles.join(self.state(), [first, id], number);
            }
        }
        for circle in circles.into_made() {
            self.unite(&circle);
        }
    }

    /// Ends the gang of a client whose members share memory, if they do not all hang together any more. Those that do become gangs.
    pub(crate) fn take_apart(&mut self, id: ClientId) {
        let state = self.state();
        let unit = state.unit(id);
        let Some(gang) = state.gang_of(id).filter(|&gang| state.are_sharers(gang)) else { return };
        if state.hangs_together(&unit) {
            return;
        }
        self.dissolve(&unit, gang, false);
        self.report_mut().info(format!("client {id} and others share no memory any more"));
        self.unite_sharers(&unit);
    }

    /// Makes the clients of a circle one gang: some of them may be one already.
    fn unite(&mut self, circle: &Circle) {
        let members = &circle.ids[..];
        self.step_back(members);
        let gang = self.add_sharers(circle);
        for &id in members {
            self.change_client(id, |client| client.gang = Some(gang));
        }
        let Some(&one) = members.first() else { return };
        self.gather_gang(one);
        self.apply_pauses(members.to_vec());
        for &id in members {
            self.rewrite_entries(id);
        }
        self.tell_later(members.iter().copied());
        self.follow_united(gang);
        self.release_drained(one);
        let unit = self.state().unit(one);
        self.queue(self.state().gpus_of(&unit));
        self.report_mut().info(format!(
            "client {one} and others share memory: they hold their GPUs together, with {} members",
            members.len()
        ));
    }

    /// Ends a gang that does not fit a GPU: its members go on, each by itself. Those that share memory do so for good.
    pub(crate) fn disband(&mut self, id: ClientId, gang: GangId, uuid: GpuUuid) {
        let (unit, are_sharers) = (self.state().unit(id), self.state().are_sharers(gang));
        self.dissolve(&unit, gang, are_sharers);
        self.report_mut().warn(format!(
            "the gang of client {id} does not fit {uuid}: its {} members go on, each by itself",
            unit.len()
        ));
    }

    /// Ends a gang: each of its members goes on by itself; for good, if `alone`.
    fn dissolve(&mut self, unit: &Unit, gang: GangId, alone: bool) {
        self.remove_gang(gang);
        for &member in unit.iter() {
            let changed = self.change_client(member, |client| {
                // The drains of another member may have failed.
                client.forget_deferrals();
                client.gang = None;
                client.goes_alone |= alone;
                client.shares.clone()
            });
            if let Some(numbers) = changed.filter(|_| alone) {
                self.forget_sharer(member, &numbers);
            }
        }
        self.apply_pauses(unit.to_vec());
        for &member in unit.iter() {
            self.rewrite_entries(member);
            self.release_drained(member);
            self.tell_later([member]);
        }
        // Members on other GPUs may have waited for those on one of these.
        self.queue(self.state().gpus_of(unit));
    }

    /// Ends the gangs of clients that share memory which hold a GPU and have grown beyond it.
    pub(crate) fn disband_outgrown_sharers(&mut self, uuid: GpuUuid) {
        loop {
            let state = self.state();
            let Some(gpu) = state.known_gpu(uuid) else { return };
            let is_outgrown = |&(id, gang): &(ClientId, GangId)| {
                state.are_sharers(gang) && !state.fits_alone(gpu, &state.unit(id))
            };
            let mut gangs = gpu.ledger.staying().iter().filter_map(|&id| Some((id, state.gang_of(id)?)));
            let Some((id, gang)) = gangs.find(is_outgrown) else { return };
            self.disband(id, gang, uuid);
        }
    }
}
