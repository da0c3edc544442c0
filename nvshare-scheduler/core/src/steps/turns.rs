//! Turns: the waiters of a GPU are judged in the order of their turn, and what follows is done.

use std::collections::BTreeSet;

use nvshare_proto::GpuUuid;

use crate::judge::short::{idle_detection_time, is_interactive};
use crate::judge::waiter::{Case, Head, TurnPlan, Verdict, head_beside, nobody_else_fits};
use crate::state::client::{Client, ClientId, GangId, NextReason, Phase};
use crate::state::gangs::Unit;
use crate::state::gpu::Gpu;
use crate::state::place::Place;
use crate::state::rule::Rule;
use crate::steps::books::Books;
use crate::steps::round::Round;

/// When a waiter takes the turn of the clients that leave for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Takeover {
    /// Their turn is over.
    AtTurnEnd,
    /// Their turn is over, and the waiter's work is short.
    ShortAtTurnEnd,
    /// The waiter's work is short, and goes ahead of their turn.
    Interrupting,
}

impl Round<'_> {
    /// Judges the waiters of a GPU in their order. A waiter that fits beside the others, and delays no waiter
    /// ahead of it, becomes next at once. The first that does not fit becomes next when the turn is over.
    pub(crate) fn judge_waiters(&mut self, uuid: GpuUuid) {
        self.books.change_gpu(uuid, |gpu| gpu.has_waiter = false);
        let mut head: Option<Head> = None;
        let mut at: Option<Place> = None;
        let mut judged_gangs: Vec<GangId> = Vec::new();
        while let Some(place) = self.books.waiter_behind(uuid, at) {
            at = Some(place);
            self.books.count_work(1);
            let id = place.client;
            // Others of its job may have run meanwhile, and moved it behind others: then it is met again.
            self.books.refresh_place(id);
            let Some((gpu, client)) = self.books.waiter(uuid, id) else { return };
            if self.state().place_on(gpu, client) > place {
                continue;
            }
            if let Some(gang) = client.gang {
                if judged_gangs.contains(&gang) {
                    continue;
                }
                judged_gangs.push(gang);
            }
            if let Some(head) = &head {
                if nobody_else_fits(gpu) {
                    return;
                }
                if self.state().would_everybody_delay(gpu, head) {
                    self.books.note_waiter(uuid);
                    return self.complete_gangs(uuid, head);
                }
            }
            let case = self.open_case(id);
            let judge = |(gpu, client)| self.state().judge(gpu, client, &case, head.as_ref());
            let Some(verdict) = self.books.waiter(uuid, id).map(judge) else { return };
            self.carry_out(verdict, uuid, id, &case, &mut head);
        }
    }

    /// Judges those of the other waiters that may delay the head: ranks of gangs that run in part.
    fn complete_gangs(&mut self, uuid: GpuUuid, head: &Head) {
        for id in self.state().waiters_of_half_gangs(uuid) {
            self.books.count_work(1);
            let case = self.open_case(id);
            let judge = |(gpu, client)| self.state().judge(gpu, client, &case, Some(head));
            let Some(verdict) = self.books.waiter(uuid, id).map(judge) else { return };
            self.carry_out(verdict, uuid, id, &case, &mut Some(*head));
        }
    }

    /// Does what follows from a verdict.
    fn carry_out(
        &mut self,
        verdict: Verdict,
        uuid: GpuUuid,
        id: ClientId,
        case: &Case,
        head: &mut Option<Head>,
    ) {
        match verdict {
            Verdict::MustWait => {
                // A holder that gave up its drains is still told that a client waits, so that it bounds its
                // work in flight.
                if self.state().gpu(uuid).is_some_and(|gpu| self.state().somebody_defers(gpu)) {
                    self.books.note_waiter(uuid);
                }
                if let Some(until) = self.state().gang_waits_until(id) {
                    self.books.wake_at(uuid, until);
                }
                // The room may be lacking on a GPU where a member of its gang runs.
                self.watch(case, &self.state().gpus_of(&case.unit), id);
            }
            Verdict::GangIsLeaving => {}
            Verdict::WouldDelayHead => {
                self.books.note_waiter(uuid);
                self.books.line_up(uuid, &case.unit, head.as_mut());
            }
            Verdict::Paced(until) => self.books.wake_at(uuid, until),
            // Until those ahead have gone, the waiter is in nobody's way here.
            Verdict::NotFirstElsewhere => {
                if self.state().outlook(case).does_not_fit_on(uuid) {
                    self.books.note_waiter(uuid);
                }
                self.look_at_order_again(uuid, id, case);
            }
            Verdict::Fits => self.books.make_next(&case.unit, NextReason::Joins),
            Verdict::NeedsTurn => {
                self.note_waiter_on_full_gpus(uuid, case);
                if self.books.recall_part_of_gang(&case.unit) {
                    return;
                }
                match head {
                    Some(head) => self.books.line_up(uuid, &case.unit, Some(head)),
                    None => *head = self.take_turn_or_wait(uuid, id, case),
                }
            }
        }
    }

    /// Gives the turn to the first waiter that does not fit, if the turn is over. Else the waiter waits.
    /// Returns it as the head of the queue then.
    fn take_turn_or_wait(&mut self, uuid: GpuUuid, id: ClientId, case: &Case) -> Option<Head> {
        let (unit, full_gpus) = (&case.unit, &self.state().outlook(case).full_gpus);
        let TurnPlan { splits, end } = self.state().turn_plan(case);
        match *end {
            Some(end) if end.at <= self.state().now() => {
                let mut leavers: Vec<ClientId> =
                    splits.iter().flat_map(|split| &split.leavers).copied().collect();
                // A client may be in the way on several GPUs.
                if splits.len() > 1 {
                    leavers.sort_unstable();
                    leavers.dedup();
                }
                self.books.count_work(leavers.len() as u64);
                let state = self.state();
                let takeover = match (is_interactive(state, unit), end.in_turn > state.now()) {
                    (false, _) => Takeover::AtTurnEnd,
                    (true, false) => Takeover::ShortAtTurnEnd,
                    (true, true) => Takeover::Interrupting,
                };
                self.books.take_turn(unit, full_gpus, leavers, takeover);
                return None;
            }
            Some(end) => self.books.wake_at(uuid, end.at),
            // The turn that it waits for may be on another GPU: when something changes there, its GPUs are
            // looked at again.
            None => self.watch(case, &self.state().outlook(case).gpus_in_its_way(), id),
        }
        let gpu = self.state().known_gpu(uuid)?;
        Some(match splits.iter().find(|split| split.gpu == uuid) {
            Some(split) => head_beside(gpu, unit, split.kept),
            None => self.state().head(gpu, unit),
        })
    }

    /// Notes a waiter on each GPU that it does not fit. A round does this for all of them once, and then for
    /// the GPU that is looked at.
    fn note_waiter_on_full_gpus(&mut self, uuid: GpuUuid, case: &Case) {
        let outlook = self.state().outlook(case);
        if self.noted.insert(case.unit.first()) {
            for &gpu in &outlook.full_gpus {
                self.books.note_waiter(gpu);
            }
        } else if outlook.does_not_fit_on(uuid) {
            self.books.note_waiter(uuid);
        }
    }

    /// Has the GPUs of a waiter that is not first on all of them looked at again: when something changes where others are in its way, since the
    /// order there may change, and with it the one on its other GPUs, where nothing else happens. Places move with time as well, and not all
    /// at once. So no order is believed for longer than a turn.
    fn look_at_order_again(&mut self, uuid: GpuUuid, id: ClientId, case: &Case) {
        if let Some(quantum) = self.state().gpu(uuid).map(|gpu| gpu.quantum) {
            self.books.wake_at(uuid, self.state().now().saturating_add(quantum));
        }
        self.watch(case, &self.state().outlook(case).gpus_in_its_way(), id);
    }

    /// Lets the GPUs of the waiter be looked at again when something changes on one of these GPUs.
    fn watch(&mut self, case: &Case, gpus: &[GpuUuid], by: ClientId) {
        if !self.watching.insert(case.unit.first()) {
            return;
        }
        for &uuid in gpus {
            self.books.change_gpu(uuid, |gpu| _ = gpu.watched_by.insert(by));
        }
    }
}

impl Books {
    fn waiter_behind(&self, uuid: GpuUuid, at: Option<Place>) -> Option<Place> {
        let gpu = self.state().known_gpu(uuid)?;
        gpu.ledger.waiting_behind(gpu.shares.clock(), at)
    }

    /// Returns a waiter, and the GPU that is looked at.
    fn waiter(&self, uuid: GpuUuid, id: ClientId) -> Option<(&Gpu, &Client)> {
        let client = self.state().client(id);
        debug_assert!(client.is_some(), "a client that is gone waits for nothing");
        self.state().known_gpu(uuid).zip(client)
    }

    /// Counts a waiter behind the head.
    fn line_up(&self, uuid: GpuUuid, unit: &Unit, head: Option<&mut Head>) {
        if let Some((head, gpu)) = head.zip(self.state().gpu(uuid)) {
            head.line_up(gpu.demand_of(unit));
        }
    }

    fn note_waiter(&mut self, uuid: GpuUuid) {
        self.change_gpu(uuid, |gpu| gpu.has_waiter = true);
    }

    /// Makes the parked clients of a unit next: they get the lock as soon as there is room.
    fn make_next(&mut self, unit: &Unit, why: NextReason) {
        for &id in unit.iter() {
            if self.state().phase(id) == Some(Phase::Parked) {
                self.change_client(id, |client| client.make_next(why));
            }
        }
    }

    /// Gives the turn to a waiter: clients that do not fit beside it leave.
    fn take_turn(&mut self, unit: &Unit, full_gpus: &[GpuUuid], leavers: Vec<ClientId>, takeover: Takeover) {
        let gpus_of_leavers = leavers.iter().flat_map(|&leaver| self.state().gpus_used_by(leaver));
        let passing: BTreeSet<GpuUuid> = gpus_of_leavers.chain(full_gpus.iter().copied()).collect();
        for &uuid in &passing {
            self.pass_turn(uuid, unit, &leavers, takeover);
        }
        // They contain whole gangs: see `State::split_for`.
        self.ask_these_to_leave(&leavers);
        for &uuid in &passing {
            self.begin_hand_over(uuid, unit, takeover);
        }
        self.make_next(unit, NextReason::Claims);
    }

    /// Passes the turn of one GPU to a unit. If it goes ahead of others because its work is short, it pays for
    /// that, and comes again soon.
    fn pass_turn(&mut self, uuid: GpuUuid, unit: &Unit, leavers: &[ClientId], takeover: Takeover) {
        let state = self.state();
        let (now, stood_still) = (state.now(), idle_detection_time(state, leavers));
        let Some(gpu) = state.known_gpu(uuid) else { return };
        let to_move = state.bytes_to_move(gpu, unit);
        let cost = state.hand_over_cost(gpu, unit, to_move);
        let Some(client) = state.clients_of(unit).next() else { return };
        let (job, asks_again_within) = (client.job, client.rhythm.asks_again_within());
        for &id in unit.on(uuid) {
            self.change_account(id, uuid, |account| account.moved_for_turn = to_move);
        }
        let is_here = !unit.on(uuid).is_empty();
        self.change_gpu(uuid, |gpu| {
            gpu.budget.spend(stood_still);
            if is_here && takeover != Takeover::AtTurnEnd && matches!(gpu.rule, Rule::Auto(_)) {
                gpu.shares.charge(job, cost);
                gpu.expect_waiter(now.saturating_add(asks_again_within));
            }
            match takeover {
                Takeover::Interrupting => {
                    let runs = |id: &ClientId| gpu.ledger.entry(*id).is_some_and(|entry| entry.is_running);
                    let here = leavers.iter().copied().filter(runs);
                    gpu.turn.interrupt(here, now);
                }
                // The interrupted turn stays interrupted: more short work may come before it goes on.
                Takeover::ShortAtTurnEnd => {}
                Takeover::AtTurnEnd => gpu.turn.pass_to(unit),
            }
        });
    }

    /// Begins the hand-over of a GPU to a unit, after the leavers were asked. With an `auto` rule, the unit's
    /// quantum follows from the cost of this hand-over.
    fn begin_hand_over(&mut self, uuid: GpuUuid, unit: &Unit, takeover: Takeover) {
        let Some(gpu) = self.state().known_gpu(uuid) else { return };
        let to_move = self.state().bytes_to_move(gpu, unit);
        let quantum = self.state().quantum(gpu, unit, to_move);
        self.change_gpu(uuid, |gpu| {
            gpu.released.clear();
            if matches!(gpu.rule, Rule::Auto(_)) && to_move > 0 && takeover == Takeover::AtTurnEnd {
                gpu.quantum = quantum;
            }
        });
    }
}
