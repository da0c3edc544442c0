//! Clients that have rested for long enough go off the card by themselves: see `--sleep-after`.

use std::time::Duration;

use crate::policy::rest::Step;
use crate::state::client::ClientId;
use crate::steps::books::Books;

impl Books {
    /// Begins to follow the rest of a client, or goes on with it after an interruption, if clients go by themselves.
    pub(crate) fn follow_rest(&mut self, id: ClientId) {
        let Some(after) = self.state().config().sleep_after else { return };
        if self.state().client(id).is_some_and(|client| self.state().may_ever_sleep(client)) {
            self.look_at_rest_in(after, id);
        }
    }

    /// Follows the rests of all clients, when that has been off.
    pub(crate) fn follow_all_rests(&mut self) {
        for id in self.state().client_ids() {
            self.follow_rest(id);
        }
    }

    fn look_at_rest_in(&mut self, time: Duration, id: ClientId) {
        let at = self.state().now() + time;
        if self.change_rest(id, |rest| rest.look_at = Some(at)).is_some() {
            self.agenda_mut().follow_sleeper_at(at, id);
        }
    }

    /// Looks at the rest of a client on the card, if it is time.
    pub(crate) fn look_at_rest(&mut self, id: ClientId) {
        let now = self.state().now();
        let is_due = self.change_rest(id, |rest| rest.look_at.take_if(|at| *at <= now).is_some());
        let Some(client) = self.state().client(id).filter(|_| is_due == Some(true)) else { return };
        let is_another_going =
            self.agenda().going_by_itself().is_some_and(|other| self.state().is_going(other));
        match self.state().next_step_of_rest(client, is_another_going) {
            None => {}
            Some(Step::LookAgain(time)) => self.look_at_rest_in(time, id),
            Some(Step::Ask { look_in }) => {
                self.change_rest(id, |rest| rest.is_asked = true);
                self.ask_for_counters(id);
                self.look_at_rest_in(look_in, id);
            }
            Some(Step::Go) => self.go_by_itself(id),
        }
    }

    fn go_by_itself(&mut self, id: ClientId) {
        let now = self.state().now();
        let since = self.change_rest(id, |rest| {
            rest.is_cause = true;
            rest.since
        });
        self.agenda_mut().set_going_by_itself(id);
        let rested = now.saturating_sub(since.unwrap_or(now)).as_secs();
        self.report_mut().info(format!("client {id} has had no work for {rested} s, and goes to sleep"));
        self.order_to_go(id);
    }
}
