//! Processes that are stopped, as by Ctrl-Z. They answer nothing until they go on: they get nothing, and
//! nobody waits for them.

use nvshare_proto::units::Bytes;

use crate::report::warnings::Topic;
use crate::state::client::{Client, ClientId};
use crate::steps::books::Books;

impl Books {
    /// Notes that a client's process was stopped, or goes on.
    pub(crate) fn on_stopped(&mut self, id: ClientId, stopped: bool) {
        let (now, until) = (self.state().now(), self.state().now() + self.state().config().grace);
        if self.state().client(id).is_none_or(|client| client.stopped == stopped) {
            return;
        }
        self.change_client(id, |client| {
            client.stopped = stopped;
            client.may_go_on_until = Some(until).filter(|_| stopped);
            if stopped {
                client.expect_no_answer(now);
            } else {
                // It can be asked again.
                client.accounts.values_mut().for_each(|account| account.unevictable = None);
            }
        });
        for &member in self.state().unit(id).iter() {
            self.rewrite_entries(member);
        }
        // Its gang waits with it.
        self.queue(self.state().gpus_of(&self.state().unit(id)));
        if let Some(client @ Client { name, pid, .. }) = self.state().client(id).filter(|_| stopped) {
            let keeps = Bytes(client.room());
            let text = format!(
                "client {id} ({name}, pid {pid}) is stopped, and keeps {keeps}; `kill -CONT {pid}` lets it go on, and \
                 `kill -KILL {pid}` frees its memory"
            );
            self.warn_of_client(Topic::Stuck, id, None, &text);
        }
    }
}
