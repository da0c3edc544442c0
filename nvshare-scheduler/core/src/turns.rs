//! Whose turn it is: who is next, who has to leave for it, and when.

use std::collections::BTreeSet;
use std::time::Duration;

use nvshare_proto::{GpuUuid, SchedulerMessage};

use crate::policy::turn::{self, Turn};
use crate::state::{ClientId, Phase, Time};
use crate::{Core, patience};

impl Core {
    /// A GPU that nobody holds or is about to has no turn; one that somebody runs on has one.
    pub(crate) fn see_to_turns(&mut self, now: Time) {
        let held = self.gpus_of(|phase| phase.holds() || phase == Phase::Chosen);
        let run_on = self.gpus_of(Phase::runs);
        for (uuid, gpu) in &mut self.gpus {
            if !held.contains(uuid) {
                gpu.turn_started = None;
            } else if run_on.contains(uuid) {
                gpu.turn_started.get_or_insert(now);
            }
        }
    }

    /// Members whose demand grew until they no longer fit: those least behind leave.
    pub(crate) fn split_sets_that_outgrew(&mut self, now: Time) {
        for uuid in self.gpus.keys().copied().collect::<Vec<_>>() {
            let members = self.by_turn(|c| c.phase.stays() && c.accounts.contains_key(&uuid));
            if self.fit(uuid, &members) {
                continue;
            }
            let not_before = self.gpus.get(&uuid).map_or(Time::ZERO, |gpu| gpu.not_before);
            if now < not_before {
                self.wake_at(not_before);
                continue;
            }
            let mut kept: Vec<ClientId> = Vec::new();
            let mut asked = false;
            for id in members {
                kept.push(id);
                if self.fit(uuid, &kept) || kept.len() == 1 {
                    continue;
                }
                kept.pop();
                self.ask_to_leave(id, now);
                asked = true;
            }
            if let (true, Some(gpu)) = (asked, self.gpus.get_mut(&uuid)) {
                gpu.turn_started = gpu.turn_started.map(|_| now);
            }
        }
    }

    /// Makes waiters next: those who fit beside the others at once, those who do not when the turn is over.
    /// Returns the GPUs on which somebody has to wait.
    pub(crate) fn choose(&mut self, now: Time) -> BTreeSet<GpuUuid> {
        let mut contested_gpus = BTreeSet::new();
        // GPUs that a waiter further ahead will take when it can.
        let mut spoken_for: BTreeSet<GpuUuid> = BTreeSet::new();
        for id in self.by_turn(super::Client::waits) {
            let gpus = self.gpus_used_by(id);
            if self.is_hopeless(id) {
                continue;
            }
            let contested: Vec<GpuUuid> =
                gpus.iter().copied().filter(|&gpu| !self.fits_beside_members(gpu, id)).collect();
            if contested.is_empty() {
                self.with(id, |client| client.phase = Phase::Chosen);
                continue;
            }
            contested_gpus.extend(contested.iter().copied());
            let taken = contested.iter().any(|gpu| spoken_for.contains(gpu));
            match (!taken).then(|| self.turns_end(id, &contested)).flatten() {
                Some(ends) if ends <= now => self.claim(id, &contested, now),
                Some(ends) => self.wake_at(ends),
                None => {}
            }
            spoken_for.extend(gpus);
        }
        contested_gpus
    }

    /// When the turns on these GPUs are over for a waiter; `None` while that is not known.
    pub(crate) fn turns_end(&self, id: ClientId, contested: &[GpuUuid]) -> Option<Time> {
        let mut ends = Time::ZERO;
        for &uuid in contested {
            let gpu = self.gpus.get(&uuid)?;
            let leavers = self.leavers(uuid, id);
            // A turn that has not begun cannot be over.
            if leavers
                .iter()
                .any(|id| self.clients.get(id).is_some_and(|c| c.phase == Phase::Chosen || c.claims))
            {
                return None;
            }
            let mut idle_since = Some(Time::ZERO);
            for leaver in &leavers {
                let since = match self.clients.get(leaver).map(|c| c.phase) {
                    Some(Phase::Idle { since, .. }) => Some(since),
                    _ => None,
                };
                idle_since = idle_since.zip(since).map(|(a, b)| a.max(b));
            }
            let to_move = self.deficit(uuid, id).saturating_sub(self.free(uuid));
            let turn = Turn {
                started: gpu.turn_started,
                quantum: gpu.quantum,
                not_before: gpu.not_before,
                idle_since,
                move_cost: if to_move == 0 { Duration::ZERO } else { gpu.move_cost(to_move) },
            };
            ends = ends.max(turn::ends(&turn)?);
        }
        Some(ends)
    }

    /// The turn passes to a waiter: who does not fit beside it leaves.
    pub(crate) fn claim(&mut self, id: ClientId, contested: &[GpuUuid], now: Time) {
        for &uuid in contested {
            for leaver in self.leavers(uuid, id) {
                self.ask_to_leave(leaver, now);
            }
            if let Some(gpu) = self.gpus.get_mut(&uuid) {
                gpu.released.clear();
            }
        }
        self.with(id, |client| {
            client.phase = Phase::Chosen;
            client.claims = true;
        });
    }

    /// Members of a GPU that cannot stay beside a waiter: all but the first, in the order of their turn, that fit.
    pub(crate) fn leavers(&self, uuid: GpuUuid, id: ClientId) -> Vec<ClientId> {
        let mut kept = vec![id];
        let mut leavers = Vec::new();
        for member in self.by_turn(|c| c.phase.stays() && c.accounts.contains_key(&uuid)) {
            kept.push(member);
            if !self.fit(uuid, &kept) {
                kept.pop();
                leavers.push(member);
            }
        }
        leavers
    }

    pub(crate) fn ask_to_leave(&mut self, id: ClientId, now: Time) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        match client.phase {
            Phase::Chosen => {
                client.phase = Phase::Parked;
                client.claims = false;
            }
            // Its gate is closed and its work complete: there is nothing to ask.
            Phase::Idle { .. } => {
                client.phase = Phase::Parked;
                for uuid in client.accounts.keys() {
                    if let Some(gpu) = self.gpus.get_mut(uuid) {
                        gpu.freed_at = Some(now);
                    }
                }
            }
            Phase::Granted { epoch, .. } | Phase::Running { epoch } => {
                client.phase = Phase::Dropping { epoch, since: now };
                let patience_ms = self.patience_with(id).as_millis() as u32;
                self.send(id, SchedulerMessage::DropLock { epoch, patience_ms });
            }
            Phase::Parked | Phase::Dropping { .. } | Phase::Free => {}
        }
    }

    /// How long this client's drain may make no progress.
    pub(crate) fn patience_with(&self, id: ClientId) -> Duration {
        let gpus = self.gpus_used_by(id);
        let deferrals = gpus.iter().filter_map(|uuid| self.gpus.get(uuid)).map(|gpu| gpu.deferrals).max();
        patience(deferrals.unwrap_or(0))
    }

    /// Whether no room can be made for a client, as things are: it waits until that changes. Who looks at the log reads
    /// why, once; that a process which has ended still gives its memory back is nothing to read about.
    pub(crate) fn is_hopeless(&mut self, id: ClientId) -> bool {
        let full = self.gpus_used_by(id).into_iter().find(|&uuid| !self.fit(uuid, &[id]));
        let passing = full.and_then(|uuid| self.gpus.get(&uuid)).is_some_and(|gpu| gpu.departed() > 0);
        let blocked = full.filter(|_| !passing);
        let Some(client) = self.clients.get_mut(&id) else { return true };
        client.blocked = blocked;
        if let Some(uuid) = blocked
            && !std::mem::replace(&mut client.reported_blocked, true)
        {
            self.warn(format!(
                "client {id} waits: what others have on {uuid} cannot be moved and leaves no room for it"
            ));
        }
        full.is_some()
    }
}
