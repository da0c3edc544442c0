//! The queue of one GPU: waiters are judged in the order of their turn, and what follows is done.

use nvshare_proto::GpuUuid;

use crate::policy::next;
use crate::state::client::{ClientId, Why};
use crate::state::gpu::{Gpu, Source};
use crate::state::ledger::{Group, Key};
use crate::steps::gangs::Unit;
use crate::steps::turns::case::Case;
use crate::{Core, Time};

/// The first client of a GPU's queue that does not fit beside the others: clients behind it must not delay it.
#[derive(Debug, Clone, Copy)]
struct Head {
    /// The largest demand of the clients whose turn comes before, in bytes.
    ahead: u128,
    /// Bytes that stay when the head comes: members that keep running beside it, and memory that cannot be moved.
    stays: u128,
}

/// What is to become of a waiter, as the look at one GPU sees it.
#[derive(Debug, Clone, Copy)]
enum Verdict {
    /// It must wait as things are.
    Hopeless,
    /// Some of its gang give the lock back.
    Leaves,
    /// It would delay the head of the queue.
    Behind,
    /// A compute limit keeps it waiting until then.
    Paced(Time),
    /// Others are ahead of it on another GPU.
    Barred,
    /// It fits beside those who stay.
    Fits,
    /// Others would have to leave for it.
    NeedsTurn,
}

impl Core {
    /// Makes waiters next: those that fit beside the others and delay nobody ahead of them, at once; the first that does
    /// not fit, when the turn is over.
    pub(crate) fn choose(&mut self, uuid: GpuUuid) {
        let Some(gpu) = self.gpus.get_mut(&uuid) else { return };
        gpu.contested = false;
        let mut head: Option<Head> = None;
        let mut at: Option<Key> = None;
        let mut judged: Vec<u64> = Vec::new();
        while let Some(key) = self.waiter_behind(uuid, at) {
            at = Some(key);
            self.steps += 1;
            let id = key.2;
            // What others of its job got meanwhile may have moved it behind others: then it is met again.
            self.refresh_place(id);
            if self.place_on(uuid, id).is_some_and(|place| place > key) {
                continue;
            }
            if let Some(gang) = self.gang_of(id) {
                if judged.contains(&gang) {
                    continue;
                }
                judged.push(gang);
            }
            if let Some(head) = &head {
                if self.nobody_else_fits(uuid) {
                    return;
                }
                if self.everybody_else_waits_for(uuid, head) {
                    self.mark_contested(uuid);
                    return;
                }
            }
            let case = self.case_of(id);
            let verdict = self.judge(uuid, id, &case, head.as_ref());
            self.act(verdict, uuid, id, &case, &mut head);
        }
    }

    /// What is to become of a waiter, as the look at one GPU sees it.
    fn judge(&self, uuid: GpuUuid, id: ClientId, case: &Case, head: Option<&Head>) -> Verdict {
        if case.is_hopeless {
            return Verdict::Hopeless;
        }
        if case.is_leaving {
            return Verdict::Leaves;
        }
        let delays = head.is_some_and(|head| !self.delays_nobody(uuid, &case.unit, head));
        if delays && !self.has_its_turn(uuid, id) {
            return Verdict::Behind;
        }
        let outlook = self.outlook(case);
        match outlook.paced_until {
            Some(until) => Verdict::Paced(until),
            None if outlook.is_barred_beside(uuid) => Verdict::Barred,
            None if outlook.contested.is_empty() => Verdict::Fits,
            None => Verdict::NeedsTurn,
        }
    }

    fn act(&mut self, verdict: Verdict, uuid: GpuUuid, id: ClientId, case: &Case, head: &mut Option<Head>) {
        match verdict {
            Verdict::Hopeless => {
                // A client is waited for even if it does not drain, and has to bound its work in flight.
                if self.somebody_defers(uuid) {
                    self.mark_contested(uuid);
                }
                if let Some(until) = self.waits_for_members_until(id).filter(|&until| until > self.now) {
                    self.wake_at(uuid, until);
                }
                // The room may be lacking on a GPU where a member of its gang runs.
                self.watch(case, &self.gpus_of(&case.unit), id);
            }
            Verdict::Leaves => {}
            Verdict::Behind => {
                self.mark_contested(uuid);
                self.line_up(uuid, &case.unit, head.as_mut());
            }
            Verdict::Paced(until) => self.wake_at(uuid, until),
            // Until those ahead have gone, the waiter is in nobody's way here.
            Verdict::Barred => {
                if self.outlook(case).is_contested(uuid) {
                    self.mark_contested(uuid);
                }
            }
            Verdict::Fits => self.make_next(&case.unit, Why::Joins),
            Verdict::NeedsTurn => {
                self.mark_all_contested(uuid, case);
                if self.recall_part_of_gang(&case.unit) {
                    return;
                }
                match head {
                    Some(head) => self.line_up(uuid, &case.unit, Some(head)),
                    None => *head = self.take_turn_or_wait(uuid, id, case),
                }
            }
        }
    }

    /// The first waiter that does not fit takes the turn if it is over. Else it waits, as the head of the queue.
    fn take_turn_or_wait(&mut self, uuid: GpuUuid, id: ClientId, case: &Case) -> Option<Head> {
        let (unit, contested) = (&case.unit, &self.outlook(case).contested);
        let (splits, end) = self.turn_before(case);
        match end {
            Some(end) if end.at <= self.now => {
                let mut leavers: Vec<ClientId> =
                    splits.iter().flat_map(|split| &split.leavers).copied().collect();
                // A client may be in the way on several GPUs.
                if splits.len() > 1 {
                    leavers.sort_unstable();
                    leavers.dedup();
                }
                self.steps += leavers.len() as u64;
                self.claim(unit, contested, leavers, end.in_turn > self.now);
                return None;
            }
            Some(end) => self.wake_at(uuid, end.at),
            // The turn that it waits for may be on another GPU: when something changes there, its GPUs are looked at again.
            None => self.watch(case, contested, id),
        }
        Some(match splits.iter().find(|split| split.gpu == uuid) {
            Some(split) => self.head_beside(uuid, unit, split.kept),
            None => self.head(uuid, unit),
        })
    }

    /// A waiter waits behind the head: those who come later delay it no more than the head.
    fn line_up(&self, uuid: GpuUuid, unit: &Unit, head: Option<&mut Head>) {
        if let Some(head) = head {
            head.ahead = head.ahead.max(self.demand_of(uuid, unit));
        }
    }

    /// Others are waited for on each GPU that a waiter does not fit: noted once in a round, and at the look at each.
    fn mark_all_contested(&mut self, uuid: GpuUuid, case: &Case) {
        let outlook = self.outlook(case);
        if outlook.marked.set(()).is_ok() {
            for &gpu in &outlook.contested {
                self.mark_contested(gpu);
            }
        } else if outlook.is_contested(uuid) {
            self.mark_contested(uuid);
        }
    }

    /// When something changes on one of these GPUs, those of the waiter are looked at again.
    fn watch(&mut self, case: &Case, gpus: &[GpuUuid], by: ClientId) {
        if case.watches.set(()).is_err() {
            return;
        }
        for uuid in gpus {
            if let Some(gpu) = self.gpus.get_mut(uuid) {
                gpu.watched_by.insert(by);
            }
        }
    }

    fn wake_at(&mut self, uuid: GpuUuid, time: Time) {
        if let Some(gpu) = self.gpus.get_mut(&uuid) {
            gpu.wake_at(time);
        }
    }

    fn waiter_behind(&self, uuid: GpuUuid, at: Option<Key>) -> Option<Key> {
        let gpu = self.gpus.get(&uuid)?;
        gpu.ledger.waiting_behind(gpu.shares.clock(), at)
    }

    fn mark_contested(&mut self, uuid: GpuUuid) {
        if let Some(gpu) = self.gpus.get_mut(&uuid) {
            gpu.contested = true;
        }
    }

    /// Whether the turn is that of a client's job: it ends for the whole job at once, so a client that joins it delays
    /// nobody.
    fn has_its_turn(&self, uuid: GpuUuid, id: ClientId) -> bool {
        let Some((gpu, client)) = self.gpus.get(&uuid).zip(self.clients.get(&id)) else { return false };
        gpu.ledger.sums().leaving == 0 && gpu.shares.is_holding(client.job)
    }

    fn somebody_defers(&self, uuid: GpuUuid) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return false };
        let defers = |id| self.clients.get(id).is_some_and(|client| client.stubborn_until.is_some());
        gpu.ledger.holders().iter().any(defers)
    }

    fn head(&self, uuid: GpuUuid, unit: &Unit) -> Head {
        let (kept, _) = self.keep_what_fits(uuid, Some(unit), self.members(uuid, false));
        self.head_beside(uuid, unit, kept)
    }

    /// The head of a GPU's queue, beside the members that keep running when it comes.
    fn head_beside(&self, uuid: GpuUuid, unit: &Unit, kept: Group) -> Head {
        let ahead = self.demand_of(uuid, unit);
        let pinned = self.gpus.get(&uuid).map_or(0, |gpu| gpu.ledger.pinned_beside(kept));
        Head { ahead, stays: kept.demand - ahead + pinned }
    }

    /// Whether no waiter is small enough to fit beside the members.
    fn nobody_else_fits(&self, uuid: GpuUuid) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        let Some(least) = gpu.ledger.least_waiting_demand() else { return true };
        let members = gpu.ledger.sums().members;
        members.count > 0 && members.demand + u128::from(least) > u128::from(gpu.capacity)
    }

    /// Whether all other waiters would delay the head: even the smallest, if the turn is not that of its job.
    fn everybody_else_waits_for(&self, uuid: GpuUuid, head: &Head) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        let Some(least) = gpu.ledger.least_waiting_demand() else { return true };
        gpu.source != Source::Disputed
            && (gpu.ledger.sums().leaving > 0 || !gpu.ledger.has_waiter_in_turn())
            && !self.is_in_nobodys_way(gpu, u128::from(least), head, gpu.capacity)
    }

    fn delays_nobody(&self, uuid: GpuUuid, unit: &Unit, head: &Head) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        let capacity = unit.first().map_or(0, |&id| self.capacity(uuid, id));
        self.is_in_nobodys_way(gpu, self.demand_of(uuid, unit), head, capacity)
    }

    fn is_in_nobodys_way(&self, gpu: &Gpu, demand: u128, head: &Head, capacity: u64) -> bool {
        !(self.config.exclusive || gpu.takes_slices())
            && next::delays_nobody(demand, head.ahead, head.stays, capacity)
    }

    /// Whether no client is ahead of a waiter on a GPU, apart from clients that cannot have room, that fit at once, or that
    /// the waiter does not delay.
    pub(super) fn may_go(&self, uuid: GpuUuid, unit: &Unit) -> bool {
        let Some(gpu) = self.gpus.get(&uuid) else { return true };
        let Some(own) = unit.on(uuid).iter().filter_map(|&id| self.place_on(uuid, id)).min() else {
            return true;
        };
        let mut head: Option<Head> = None;
        for key in gpu.waiting() {
            if unit.contains(&key.2) || key >= own {
                break;
            }
            let other = self.unit(key.2);
            if self.no_room_on(key.2).is_some() || self.fits_beside_members(uuid, &other) {
                continue;
            }
            let ahead = self.demand_of(uuid, &other);
            match &mut head {
                Some(head) => head.ahead = head.ahead.max(ahead),
                None => head = Some(self.head(uuid, &other)),
            }
            if head.is_some_and(|head| !self.delays_nobody(uuid, unit, &head)) {
                return false;
            }
        }
        true
    }
}
