//! The turn passes: a waiter is next, and those that do not fit beside it are asked to leave.

use std::collections::BTreeSet;

use nvshare_proto::{GpuUuid, SchedulerMessage};

use crate::Core;
use crate::state::client::{ClientId, Phase, Why};
use crate::state::rule::Rule;
use crate::state::short::{self, is_short};
use crate::steps::gangs::Unit;

impl Core {
    /// The clients of a unit whose gate is closed get the lock as soon as there is room.
    pub(super) fn make_next(&mut self, unit: &Unit, why: Why) {
        let now = self.now;
        for &id in unit.iter() {
            if self.phase(id) == Some(Phase::Parked) {
                self.with(id, |client| {
                    client.phase = Phase::Next(why);
                    // A member for which others of its gang asked waits on with them if it has to step back: a job that
                    // wanted the GPU only while it is next would change the shares each time.
                    if !std::mem::replace(&mut client.wants, true) {
                        client.waiting_since = now;
                    }
                });
            }
        }
    }

    /// The turn passes to a waiter: clients that do not fit beside it leave. `ahead`: before their turn is over.
    pub(super) fn claim(&mut self, unit: &Unit, contested: &[GpuUuid], leavers: Vec<ClientId>, ahead: bool) {
        let (now, short) = (self.now, is_short(&self.clients, unit));
        let noticed = short::noticed(&self.clients, &leavers);
        let left = leavers.iter().flat_map(|&leaver| self.gpus_used_by(leaver));
        let passing: BTreeSet<GpuUuid> = left.chain(contested.iter().copied()).collect();
        for uuid in &passing {
            let to_move = self.bytes_to_move(*uuid, unit);
            let job = unit.first().and_then(|id| self.clients.get(id)).map(|client| client.job);
            let Some(gpu) = self.gpus.get(uuid) else { continue };
            let cost = self.hand_over_cost(gpu, *uuid, unit, to_move);
            let runs = |id: &ClientId| gpu.ledger.entry(*id).is_some_and(|entry| entry.runs);
            let here: Vec<ClientId> = leavers.iter().copied().filter(runs).collect();
            for &id in unit.on(*uuid) {
                self.with_account(id, *uuid, |account| account.claimed = to_move);
            }
            let Some(gpu) = self.gpus.get_mut(uuid) else { continue };
            gpu.budget.spend(noticed);
            match (short, ahead) {
                (true, true) => {
                    gpu.interrupt(&here, now);
                    // The interrupted client must not pay for its return.
                    if let Some(job) = job {
                        gpu.shares.charge(job, cost);
                    }
                }
                // While the turn of others is interrupted, more short work may come.
                (true, false) => {}
                (false, _) => gpu.pass_to(unit),
            }
        }
        // Their gangs are among them.
        for leaver in leavers {
            self.ask_one_to_leave(leaver);
        }
        for uuid in &passing {
            let to_move = self.bytes_to_move(*uuid, unit);
            let quantum = self.gpus.get(uuid).map(|gpu| self.quantum(gpu, *uuid, unit, to_move));
            if let Some(gpu) = self.gpus.get_mut(uuid) {
                gpu.released.clear();
                if matches!(gpu.rule, Rule::Auto(_)) && to_move > 0 && !short {
                    gpu.quantum = quantum.unwrap_or(gpu.quantum);
                }
            }
        }
        self.make_next(unit, Why::Claims);
    }

    /// Asks a client for the lock back, and with it all members of its gang.
    pub(crate) fn ask_to_leave(&mut self, id: ClientId) {
        for &member in self.unit(id).iter() {
            self.ask_one_to_leave(member);
        }
    }

    fn ask_one_to_leave(&mut self, id: ClientId) {
        let now = self.now;
        match self.phase(id) {
            Some(Phase::Next(_)) => self.with(id, |client| client.phase = Phase::Parked),
            // The client's gate is closed and its work is complete: there is nothing to ask.
            Some(Phase::Idle { .. }) => {
                self.with(id, |client| {
                    client.phase = Phase::Parked;
                    client.note_drained();
                });
                self.wait_with_gang(id);
                for uuid in self.gpus_used_by(id) {
                    if let Some(gpu) = self.gpus.get_mut(&uuid) {
                        gpu.freed_at = Some(now);
                    }
                }
            }
            Some(Phase::Granted { epoch, .. } | Phase::Running { epoch }) => {
                let patience = self.patience_with(id);
                let grace = self.config.grace.max(patience);
                self.with(id, |client| {
                    client.phase = Phase::Dropping { epoch, since: now, due: now + client.grace(grace) };
                });
                let patience_ms = patience.as_millis() as u32;
                self.send(id, SchedulerMessage::DropLock { epoch, patience_ms });
            }
            None | Some(Phase::Parked | Phase::Dropping { .. } | Phase::Drained | Phase::Free) => {}
        }
    }
}
