//! How long a client waits for a scheduler that does not answer.

use std::time::Duration;

use nvshare_proto::ClientMessage;

use super::{Action, Machine};

/// Longest time that a parked program waits for a scheduler that is lost or does not answer. Then the program runs alone.
pub const RETURN_PATIENCE: Duration = Duration::from_secs(5);
/// The same for a process that is off the card. A scheduler that is replaced is back within this time. Without one, nobody knows whether the card
/// has room, and a process that finds too little is lost.
pub(super) const WAKE_PATIENCE: Duration = Duration::from_secs(30);
/// A program that waits longer than this for a scheduler's answer tells the user.
const SAY_AFTER: Duration = Duration::from_secs(1);
/// Time without a message of the scheduler, while a program waits, after which a PING asks whether the scheduler lives.
pub(super) const PING_AFTER: Duration = Duration::from_secs(5);

impl Machine {
    /// The scheduler may come back soon, and others keep what it gave them: an allocation that finds no memory waits for it.
    pub(super) fn expect_scheduler(&mut self, now: Duration) {
        self.expects_since = Some(now);
        self.act(Action::Expect(true));
    }

    pub(super) fn expect_nobody(&mut self) {
        if self.expects_since.take().is_some() {
            self.act(Action::Expect(false));
        }
    }

    /// The scheduler that was lost is waited for no longer than a parked program waits.
    pub(super) fn wait_no_longer(&mut self, now: Duration) {
        if self.expects_since.is_some_and(|since| now.saturating_sub(since) >= RETURN_PATIENCE) {
            self.expect_nobody();
        }
    }

    /// Whether the program waits for something that the scheduler may have to give: the lock, or room for memory that comes back.
    pub(super) fn waits(&self) -> bool {
        self.threads_wait || self.sleeper.is_wanted() || self.is_restoring()
    }

    /// Whether a line that the program waits tells the user something new. A process off the card waits for long, though it was said before that
    /// there is no scheduler.
    fn may_say_waiting(&self) -> bool {
        !self.warned || !self.sleeper.is_awake()
    }

    /// A program whose gate is closed and that has work, or lacks room, waits for a scheduler that answers, but not for ever.
    pub(super) fn wait_for_the_scheduler(&mut self, lacking: bool, now: Duration) {
        let waits = lacking || self.waits();
        if let Some(since) = self.silent_since {
            let Some(since) = self.sleeper.counts_from(since) else { return };
            let patience = if self.sleeper.is_awake() { RETURN_PATIENCE } else { WAKE_PATIENCE };
            if now.saturating_sub(since) >= patience {
                self.reconnect();
                self.go_alone();
            } else if now.saturating_sub(since) >= SAY_AFTER && !self.said_waiting && self.may_say_waiting() {
                // A part of the program waits: a thread at the gate, an allocation, or the call that made the first contact.
                self.said_waiting = waits || !self.was_answered;
                if self.said_waiting {
                    self.act(Action::SayWaiting(patience));
                }
            }
        } else if waits && now.saturating_sub(self.heard_at) >= PING_AFTER {
            self.silent_since = Some(now);
            self.act(Action::Send(ClientMessage::Ping));
        }
    }
}
