//! Times that pass: answers that a client owes, promises to it, and waits on it that end by themselves.

use std::time::Duration;

use nvshare_proto::GpuUuid;

use crate::Time;
use crate::policy::patience::EVICT_RETRY;
use crate::state::account::{Account, EvictOrder, Unevictable};
use crate::state::client::{Client, Phase};

/// The answers that a client should have given by now.
#[derive(Debug, Default)]
pub(crate) struct Unanswered {
    /// It was asked for memory.
    pub(crate) eviction: bool,
    /// It was granted the lock, or asked to give it back: its phase.
    pub(crate) lock: Option<Phase>,
    /// It was told to come back to the card.
    pub(crate) wake: bool,
}

impl Client {
    /// Returns the first time at which [`Self::expire`] has something to do.
    pub(crate) fn first_due(&self, account: &Account, grace: Duration) -> Option<Time> {
        let eviction = account.evict_order.map(|order| order.since + grace);
        let promise = account.promised.map(|promise| promise.until);
        let stays = account.unevictable.map(|stays| stays.until);
        [
            self.lock_due(),
            eviction,
            promise,
            stays,
            self.stubborn_until,
            self.may_go_on_until,
            self.sleep.due(),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Ends each of the client's times on a GPU that has passed. The answer about the lock stays due until
    /// the client counts as stuck.
    pub(crate) fn expire(&mut self, uuid: GpuUuid, now: Time, grace: Duration) -> Unanswered {
        let lock = Some(self.phase()).filter(|_| self.lock_due().is_some_and(|due| due <= now));
        let wake = self.sleep.due().is_some_and(|due| due <= now);
        let has_not_passed = |until: &Time| *until > now;
        self.stubborn_until = self.stubborn_until.filter(has_not_passed);
        self.may_go_on_until = self.may_go_on_until.filter(has_not_passed);
        let Some(account) = self.accounts.get_mut(&uuid) else {
            debug_assert!(false, "a client without an account has no entry");
            return Unanswered { eviction: false, lock, wake };
        };
        account.promised = account.promised.filter(|promise| has_not_passed(&promise.until));
        // A host that had no memory may have some by now.
        account.unevictable = account.unevictable.filter(|stays| has_not_passed(&stays.until));
        let eviction = account.evict_order.is_some_and(|EvictOrder { since, .. }| since + grace <= now);
        if eviction {
            account.evict_order = None;
            account.unevictable = Some(Unevictable { bytes: account.room, until: now + EVICT_RETRY });
        }
        Unanswered { eviction, lock, wake }
    }

    /// Returns when the client should have run under its grant, or have given the lock back.
    fn lock_due(&self) -> Option<Time> {
        match self.phase() {
            Phase::Dropping { due, .. } | Phase::Granted { until: due, .. } if !self.is_unresponsive => {
                Some(due)
            }
            _ => None,
        }
    }
}
