//! Overdue things: answers that do not come, promises that are over, drains that may be tried again.

use nvshare_proto::GpuUuid;
use nvshare_proto::units::Bytes;

use crate::policy::patience::EVICT_RETRY;
use crate::report::warnings::Topic;
use crate::state::account::{Order, Stays};
use crate::state::client::{Client, ClientId, Phase};
use crate::steps::books::Books;

impl Books {
    /// Handles all that is overdue on a GPU.
    pub(crate) fn see_to_what_is_overdue(&mut self, uuid: GpuUuid) {
        while let Some((due, id)) = self.state().gpu(uuid).and_then(|gpu| gpu.ledger.first_due())
            && due <= self.state().now()
        {
            if self.state().client(id).is_some() {
                self.see_to(id, uuid);
            } else {
                self.report_departed(id, uuid);
            }
        }
    }

    fn see_to(&mut self, id: ClientId, uuid: GpuUuid) {
        let (now, grace) = (self.state().now(), self.state().config().grace);
        let unanswered = self.change_client(id, |client| {
            client.stubborn_until = client.stubborn_until.filter(|&until| until > now);
            client.may_go_on_until = client.may_go_on_until.filter(|&until| until > now);
            let Some(account) = client.accounts.get_mut(&uuid) else {
                debug_assert!(false, "a client without an account has no entry");
                return false;
            };
            account.promised = account.promised.filter(|promise| promise.until > now);
            // A host that had no memory may have some by now.
            account.stays = account.stays.filter(|stays| stays.until > now);
            if let Some(Order { since, .. }) = account.order
                && since + grace <= now
            {
                account.order = None;
                account.stays = Some(Stays { bytes: account.room, until: now + EVICT_RETRY });
                return true;
            }
            false
        });
        if unanswered == Some(true) {
            let text = format!(
                "client {id} was asked for memory of {uuid} and does not answer; others go on without it"
            );
            self.warn_of_client(Topic::NoAnswer, id, Some(uuid), &text);
        }
        let asked = self.state().client(id).filter(|client| !client.stuck).map(Client::phase);
        match asked {
            Some(Phase::Dropping { due, .. }) if due <= now => self.count_as_stuck(id, "give the lock back"),
            Some(Phase::Granted { until, .. }) if until <= now => {
                self.count_as_stuck(id, "run under its grant");
            }
            _ => {}
        }
    }

    /// A client did not do what it should: nobody waits for it any longer.
    fn count_as_stuck(&mut self, id: ClientId, what: &str) {
        let now = self.state().now();
        self.change_client(id, |client| {
            client.stuck = true;
            client.count_turn_as_begun();
        });
        self.change_each_gpu_of(id, |gpu, _| gpu.turn.begin_if_none(now));
        self.release_drained(id);
        if let Some(client @ Client { name, pid, .. }) = self.state().client(id) {
            let keeps = Bytes(client.room());
            let text = format!(
                "client {id} ({name}, pid {pid}) does not answer: it should {what}, and keeps {keeps}; if its process is stopped, \
                 `kill -CONT {pid}` lets it go on, and `kill -KILL {pid}` frees its memory"
            );
            self.warn_of_client(Topic::Stuck, id, None, &text);
        }
    }
}
