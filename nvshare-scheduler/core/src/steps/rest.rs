//! When the core looks whether clients have rested for long enough to go off the card by themselves: see `--sleep-after`.

use std::time::Duration;

use crate::state::client::ClientId;
use crate::steps::books::Books;

impl Books {
    /// Begins to follow the rest of a client, or goes on with it after an interruption, if clients go by themselves.
    pub(crate) fn follow_rest(&mut self, id: ClientId) {
        let Some(after) = self.state().config().sleep_after else { return };
        let now = self.state().now();
        let Some(client) = self.state().client(id).filter(|client| self.state().may_ever_sleep(client))
        else {
            return;
        };
        // Each change of a setting comes here, and must not put off the look.
        let planned = client.rest.look_at.map_or(after, |at| at.saturating_sub(now));
        self.look_at_rest_in(planned.min(after), id);
    }

    /// Follows the rests of all clients, when that has been off.
    pub(crate) fn follow_all_rests(&mut self) {
        for id in self.state().client_ids() {
            self.follow_rest(id);
        }
    }

    /// Looks at the rest of a client after this time.
    pub(crate) fn look_at_rest_in(&mut self, time: Duration, id: ClientId) {
        let at = self.state().now() + time;
        if self.change_rest(id, |rest| rest.look_at = Some(at)).is_some() {
            self.agenda_mut().follow_sleeper_at(at, id);
        }
    }
}
