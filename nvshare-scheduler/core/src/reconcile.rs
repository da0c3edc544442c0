//! Looks at the state as a whole and does what it asks for.

use std::collections::BTreeSet;

use nvshare_proto::{GpuUuid, SchedulerMessage};

use crate::state::{Order, Phase, Time};
use crate::{Core, RETRY};

impl Core {
    pub(crate) fn reconcile(&mut self, now: Time) {
        self.deadline = None;
        if !self.scheduling {
            return;
        }
        self.see_to_turns(now);
        if now < self.settled_at {
            self.wake_at(self.settled_at);
            return;
        }
        self.ask_hosts_again(now);
        self.end_promises(now);
        self.split_sets_that_outgrew(now);
        let mut contested = self.choose(now);
        self.make_room(now);
        contested.extend(self.gpus_of(|phase| phase == Phase::Chosen));
        self.tell_who_waits(&contested);
        self.report_stuck(now);
    }

    /// A host that had no memory may have some by now.
    pub(crate) fn ask_hosts_again(&mut self, now: Time) {
        let mut next: Option<Time> = None;
        for account in self.clients.values_mut().flat_map(|c| c.accounts.values_mut()) {
            if account.stays_until.is_some_and(|until| until <= now) {
                account.stays_until = None;
            }
            next = next.into_iter().chain(account.stays_until).min();
        }
        if let Some(next) = next {
            self.wake_at(next);
        }
    }

    /// Room that an allocation waited for and did not use is room like any other.
    pub(crate) fn end_promises(&mut self, now: Time) {
        let mut next: Option<Time> = None;
        for account in self.clients.values_mut().flat_map(|c| c.accounts.values_mut()) {
            account.promised = account.promised.filter(|promise| promise.until > now);
            next = next.into_iter().chain(account.promised.map(|promise| promise.until)).min();
        }
        if let Some(next) = next {
            self.wake_at(next);
        }
    }

    /// Holders learn whether somebody waits for what they hold.
    pub(crate) fn tell_who_waits(&mut self, contested: &BTreeSet<GpuUuid>) {
        for id in self.ids(|c| c.phase.holds()) {
            let waiting = self.gpus_used_by(id).iter().any(|gpu| contested.contains(gpu));
            let Some(client) = self.clients.get_mut(&id) else { continue };
            if client.told_waiting != waiting {
                client.told_waiting = waiting;
                self.send(id, SchedulerMessage::Waiters { waiting });
            }
        }
    }

    /// Who does not answer in time is reported, and no longer waited for where others can do without.
    pub(crate) fn report_stuck(&mut self, now: Time) {
        let grace = self.config.grace;
        for id in self.ids(|c| !c.reported_stuck) {
            let (due, what) = match self.clients.get(&id).map(|c| c.phase) {
                Some(Phase::Dropping { since, .. }) => {
                    (since + grace.max(self.patience_with(id)), "give the lock back")
                }
                Some(Phase::Granted { until, .. }) => (until, "run under its grant"),
                _ => continue,
            };
            if now < due {
                self.wake_at(due);
                continue;
            }
            self.with(id, |client| {
                client.reported_stuck = true;
                // Its turn counts as begun, so that it can be over.
                client.claims = false;
            });
            for uuid in self.gpus_used_by(id) {
                if let Some(gpu) = self.gpus.get_mut(&uuid) {
                    gpu.turn_started.get_or_insert(now);
                }
            }
            self.wake_at(now);
            self.warn(format!("client {id} does not answer: it should {what} and keeps the GPU"));
        }
        for id in self.ids(|c| c.accounts.values().any(|account| account.order.is_some())) {
            for uuid in self.gpus_used_by(id) {
                let Some(Order { since, .. }) = self.account(id, uuid).and_then(|a| a.order) else {
                    continue;
                };
                if now < since + grace {
                    self.wake_at(since + grace);
                    continue;
                }
                self.with_account(id, uuid, |account| {
                    account.order = None;
                    account.stays_until = Some(now + RETRY);
                });
                self.wake_at(now);
                self.warn(format!(
                    "client {id} was asked for memory of {uuid} and does not answer; others go on without it"
                ));
            }
        }
    }
}
