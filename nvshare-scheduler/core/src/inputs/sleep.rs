//! Orders of administrators, and messages of clients, about sleep: see [`state::sleep`](crate::state::sleep).

use std::time::Duration;

use nvshare_proto::{EventKind, GpuUuid, MAX_ELSEWHERE, SchedulerMessage};

use crate::policy::sleep::{MAX_WAIT_FOR_IDLE, MAX_WAIT_FOR_LOOK};
use crate::state::client::{ClientId, Phase};
use crate::state::rest::Rest;
use crate::state::sleep::Sleep;
use crate::steps::books::Books;

/// The requests of administrators. Each returns a line that says what is done, or why nothing is.
impl Books {
    /// Orders a client to go off the card.
    pub(crate) fn order_sleep(&mut self, id: ClientId) -> Result<String, String> {
        let (who, sleep) = self.whom(id)?;
        match sleep {
            Sleep::No => {}
            Sleep::Ordered { .. } => return Ok(format!("{who} is going to sleep already")),
            Sleep::Told { since, .. } => {
                self.change_client(id, |client| client.sleep = Sleep::Told { since, wakes: false });
                return Ok(format!("{who} is going to sleep already"));
            }
            Sleep::Away => return Ok(format!("{who} is asleep already")),
            Sleep::Wanted { .. } | Sleep::Sent { .. } | Sleep::Waking { .. } => {
                return Err(format!("{who} is waking up"));
            }
        }
        if let Some(why) = self.state().client(id).and_then(|client| self.state().why_no_sleep(client)) {
            return Err(format!("{who} cannot sleep: {why}"));
        }
        self.change_rest(id, |rest| rest.is_cause = false);
        self.order_to_go(id);
        let seconds = MAX_WAIT_FOR_IDLE.as_secs();
        Ok(format!(
            "{who} is to go to sleep, if it has no work within {seconds} s; any call of its program wakes it"
        ))
    }

    /// Has a client come back to the card, or takes back that it was to go.
    pub(crate) fn order_wake(&mut self, id: ClientId) -> Result<String, String> {
        let (who, sleep) = self.whom(id)?;
        match sleep {
            Sleep::No => return Ok(format!("{who} is awake")),
            Sleep::Ordered { .. } => {
                self.stays_awake(id, "an administrator took it back");
                return Ok(format!("{who} stays awake"));
            }
            Sleep::Told { since, .. } => {
                self.change_client(id, |client| client.sleep = Sleep::Told { since, wakes: true });
            }
            Sleep::Away => self.want_to_wake(id),
            Sleep::Wanted { .. } | Sleep::Sent { .. } | Sleep::Waking { .. } => {
                return Ok(format!("{who} is waking up already"));
            }
        }
        Ok(format!("{who} wakes up, as soon as there is room"))
    }

    /// Returns words for a client, and how it stands to sleep.
    fn whom(&self, id: ClientId) -> Result<(String, Sleep), String> {
        let client = self.state().client(id);
        let found = client.map(|client| (format!("client {id} ({})", client.name), client.sleep));
        found.ok_or_else(|| format!("there is no client {id}; `nvshare-ctl clients` shows who is there"))
    }
}

/// The messages of clients.
impl Books {
    /// A client has work, or an allocation that waits: it does not go off the card. One that is off it is to
    /// come back.
    pub(crate) fn on_work(&mut self, id: ClientId) {
        match self.state().client(id).map(|client| client.sleep) {
            Some(Sleep::Ordered { .. } | Sleep::Told { .. }) => self.stays_awake(id, "it has work"),
            Some(Sleep::Away) => self.want_to_wake(id),
            _ => {}
        }
    }

    /// A client's process is off the card, in answer to SLEEP, or since before its connection. A client is
    /// believed, whatever it was told: it lies to its own harm alone.
    pub(crate) fn on_asleep(&mut self, id: ClientId, phase: Phase) {
        let now = self.state().now();
        let Some(sleep) = self.state().client(id).map(|client| client.sleep) else { return };
        let (took, wakes) = match sleep {
            Sleep::Told { since, wakes } => (Some(now.saturating_sub(since)), wakes),
            Sleep::No | Sleep::Ordered { .. } => (None, false),
            Sleep::Away | Sleep::Wanted { .. } | Sleep::Sent { .. } | Sleep::Waking { .. } => return,
        };
        if !matches!(phase, Phase::Parked | Phase::Free) {
            self.park(id, phase);
        }
        let was_sent = took.is_some();
        self.change_client(id, |client| {
            client.sleep = Sleep::Away;
            client.is_unresponsive = false;
            client.came_asleep_at = (!was_sent).then_some(now);
        });
        // Nothing is left either on a GPU that it used before it was sent to another one.
        if let Some(identity) = self.state().client(id).map(|client| client.identity) {
            for uuid in self.state().gpu_uuids() {
                self.forget_what_was_left(identity, uuid);
            }
        }
        if !was_sent {
            let gpus = self.state().gpus_used_by(id);
            gpus.into_iter().for_each(|uuid| self.report_mut().measure(uuid));
            self.agenda_mut().follow_sleeper_at(now + MAX_WAIT_FOR_LOOK, id);
        }
        let listed = self.state().client(id).is_some_and(|c| c.accounts.values().any(|a| a.is_listed()));
        self.change_each_gpu_of(id, |gpu, account| {
            gpu.size.overhead = gpu.size.overhead.saturating_sub(account.overhead());
            account.keep_most_seen(listed);
        });
        for uuid in self.state().gpus_used_by(id) {
            self.look_for_those_that_wake(uuid);
        }
        let needs = self.state().needs_to_return(id);
        self.emit_with(EventKind::Asleep, id, Some(needs), took);
        self.report_mut().info(format!("client {id} is asleep: its process is off the card"));
        let state = self.state();
        let has_work = state.client(id).is_some_and(|client| client.wants || client.has_need());
        if wakes || has_work || !state.is_scheduling() {
            self.want_to_wake(id);
        }
    }

    /// A client that is off the card can come back to these GPUs as well.
    pub(crate) fn on_elsewhere(&mut self, id: ClientId, mut gpus: Vec<GpuUuid>) {
        gpus.truncate(MAX_ELSEWHERE);
        let client = self.state().client(id).filter(|client| client.sleep.is_off_card() && !gpus.is_empty());
        let Some(client) = client else { return };
        // Once in each sleep.
        if client.elsewhere.is_empty() && self.state().config().wake_elsewhere {
            // The next look at all GPUs may be seconds away.
            gpus.iter().for_each(|&gpu| self.report_mut().measure(gpu));
        }
        self.change_client(id, |client| client.elsewhere = gpus);
        self.look_elsewhere(id);
    }

    /// A client's process stays on the card, in answer to SLEEP.
    pub(crate) fn on_cannot_sleep(&mut self, id: ClientId, reason: &str, for_good: bool) {
        if for_good {
            self.change_client(id, |client| client.never_sleeps = Some(reason.to_owned()));
        }
        if self.state().client(id).is_some_and(|client| matches!(client.sleep, Sleep::Told { .. })) {
            self.stays_awake(id, reason);
        }
    }

    /// A call waits in a process that is off the card.
    pub(crate) fn on_wake_wanted(&mut self, id: ClientId, phase: Phase) {
        self.on_asleep(id, phase);
        self.change_rest(id, Rest::note_in_vain);
        if self.state().client(id).is_some_and(|client| client.sleep == Sleep::Away) {
            self.want_to_wake(id);
        }
    }

    /// A client's process is back on the card, after this many microseconds.
    pub(crate) fn on_awake(&mut self, id: ClientId, took_us: u64) {
        let Some(sleep) = self.state().client(id).map(|client| client.sleep) else { return };
        if !sleep.is_off_card() {
            return;
        }
        // One that was not sent WAKE was promised no memory.
        let was_sent = matches!(sleep, Sleep::Waking { .. });
        let (now, took) = (self.state().now(), Duration::from_micros(took_us));
        // Before the client is seen to wait for its turn.
        self.emit_with(EventKind::Awake, id, None, Some(took));
        self.change_client(id, |client| {
            client.sleep = Sleep::No;
            client.is_unresponsive = false;
            client.came_asleep_at = None;
            client.awake_since = Some(now);
            client.elsewhere = Vec::new();
            client.looks_elsewhere_at = None;
        });
        self.change_each_gpu_of(id, |gpu, account| {
            gpu.size.overhead = gpu.size.overhead.saturating_add(account.overhead());
            // The next one to come back is judged before anybody measures again.
            if was_sent {
                let taken = gpu.needs_to_return(account).saturating_add(account.room);
                gpu.size.free = gpu.size.free.map(|free| free.saturating_sub(taken));
            }
        });
        // A look may have seen already that it took this memory: the next one would wait for another look.
        for uuid in self.state().gpus_used_by(id) {
            self.look_for_those_that_wake(uuid);
        }
        self.report_mut().info(format!("client {id} is awake again, after {:.3} s", took.as_secs_f64()));
        self.change_rest(id, |rest| rest.interrupt(now));
        self.follow_rest(id);
        self.catch_up_with_scheduling(id);
    }

    /// Tells a client that has woken whether scheduling is on, if that has changed since it went to sleep.
    fn catch_up_with_scheduling(&mut self, id: ClientId) {
        let is_free = self.state().phase(id) == Some(Phase::Free);
        if !self.state().is_scheduling() {
            self.change_client(id, |client| {
                client.set_free();
                client.wants = false;
            });
            self.send(id, SchedulerMessage::SchedOff);
        } else if is_free {
            let epoch = self.new_epoch();
            self.adopt(id, epoch);
            self.send(id, SchedulerMessage::SchedOn { epoch });
        }
    }
}
