//! Overdue things: answers that do not come, promises that are over, drains that may be tried again.

use std::time::Duration;

use nvshare_proto::GpuUuid;
use nvshare_proto::units::Bytes;

use crate::policy::patience::{self, RETRY};
use crate::report::warnings::Topic;
use crate::state::account::{Account, Order, Stays};
use crate::state::client::{Client, ClientId, Phase};
use crate::state::config::Config;
use crate::{Core, Time};

impl Config {
    /// The first time at which something about a client on a GPU is overdue.
    pub(crate) fn first_due(&self, client: &Client, account: &Account) -> Option<Time> {
        let answer = match client.phase {
            Phase::Dropping { due, .. } if !client.stuck => Some(due),
            Phase::Granted { until, .. } if !client.stuck => Some(until),
            _ => None,
        };
        let eviction = account.order.map(|order| order.since + self.grace);
        let promise = account.promised.map(|promise| promise.until);
        let stays = account.stays.map(|stays| stays.until);
        [answer, eviction, promise, stays, client.stubborn_until, client.may_go_on_until]
            .into_iter()
            .flatten()
            .min()
    }
}

impl Core {
    /// Handles all that is overdue on a GPU.
    pub(crate) fn see_to_what_is_overdue(&mut self, uuid: GpuUuid) {
        while let Some((due, id)) = self.gpus.get(&uuid).and_then(|gpu| gpu.ledger.first_due())
            && due <= self.now
        {
            if self.clients.contains_key(&id) {
                self.see_to(id, uuid);
            } else {
                self.report_departed(id, uuid);
            }
        }
    }

    fn see_to(&mut self, id: ClientId, uuid: GpuUuid) {
        let (now, grace) = (self.now, self.config.grace);
        let mut unanswered = false;
        self.with(id, |client| {
            client.stubborn_until = client.stubborn_until.filter(|&until| until > now);
            client.may_go_on_until = client.may_go_on_until.filter(|&until| until > now);
            let Some(account) = client.accounts.get_mut(&uuid) else { return };
            account.promised = account.promised.filter(|promise| promise.until > now);
            // A host that had no memory may have some by now.
            account.stays = account.stays.filter(|stays| stays.until > now);
            if let Some(Order { since, .. }) = account.order
                && since + grace <= now
            {
                account.order = None;
                account.stays = Some(Stays { bytes: account.room, until: now + RETRY });
                unanswered = true;
            }
        });
        if unanswered {
            let text = format!(
                "client {id} was asked for memory of {uuid} and does not answer; others go on without it"
            );
            self.warn_of_client(Topic::NoAnswer, id, Some(uuid), &text);
        }
        let what = match self.clients.get(&id) {
            Some(Client { phase: Phase::Dropping { due, .. }, stuck: false, .. }) if *due <= now => {
                "give the lock back"
            }
            Some(Client { phase: Phase::Granted { until, .. }, stuck: false, .. }) if *until <= now => {
                "run under its grant"
            }
            _ => return,
        };
        self.with(id, |client| {
            client.stuck = true;
            // The client's turn counts as begun, so that it can be over.
            if let Phase::Granted { begins, .. } = &mut client.phase {
                *begins = false;
            }
        });
        for uuid in self.gpus_used_by(id) {
            if let Some(gpu) = self.gpus.get_mut(&uuid) {
                gpu.turn_started.get_or_insert(now);
            }
        }
        self.release_drained(id);
        let Some(Client { name, pid, accounts, .. }) = self.clients.get(&id) else { return };
        let keeps = Bytes(accounts.values().map(|account| account.room).fold(0, u64::saturating_add));
        let text = format!(
            "client {id} ({name}, pid {pid}) does not answer: it should {what}, and keeps {keeps}; if its process is stopped, \
             `kill -CONT {pid}` lets it go on, and `kill -KILL {pid}` frees its memory"
        );
        self.warn_of_client(Topic::Stuck, id, None, &text);
    }

    /// How long a client's drain may make no progress.
    pub(crate) fn patience_with(&self, id: ClientId) -> Duration {
        let gpus = self.gpus_used_by(id);
        let deferrals = gpus.iter().filter_map(|uuid| self.gpus.get(uuid)).map(|gpu| gpu.deferrals).max();
        patience::patience(deferrals.unwrap_or(0))
    }
}
