//! The turn of a GPU: when it began, and whether short work interrupts it.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::Time;
use crate::state::client::ClientId;

/// When a GPU's turn began.
#[derive(Debug, Default)]
pub(crate) struct TurnClock {
    started: Option<Time>,
    /// Clients whose turn was interrupted by short work: the turn goes on when that work is done.
    interrupted: BTreeSet<ClientId>,
    /// How long the interrupted turn had lasted.
    lasted: Duration,
    count: u64,
}

impl TurnClock {
    /// Returns when the turn's first client ran; `None` while there is no turn.
    pub(crate) fn started(&self) -> Option<Time> {
        self.started
    }

    /// Returns how many turns there were.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Whether a client's turn was interrupted.
    pub(crate) fn is_interrupted(&self, id: ClientId) -> bool {
        self.interrupted.contains(&id)
    }

    /// Notes that a client runs under its grant. A turn begins if `begins`, or if there is none: one that was
    /// interrupted goes on.
    pub(crate) fn run(&mut self, id: ClientId, begins: bool, now: Time) {
        if !begins && self.started.is_some() {
            return;
        }
        self.started = Some(now);
        if self.interrupted.contains(&id) {
            self.interrupted.clear();
            self.started = Some(now.saturating_sub(std::mem::take(&mut self.lasted)));
        }
        self.count += 1;
    }

    /// Begins a turn if there is none, when a client holds the GPU.
    pub(crate) fn begin_if_none(&mut self, now: Time) {
        self.started.get_or_insert(now);
    }

    /// Begins a new turn for the other holders, when some were asked to leave.
    pub(crate) fn restart(&mut self, now: Time) {
        self.started = self.started.map(|_| now);
    }

    /// Ends the turn when no client holds the GPU.
    pub(crate) fn end(&mut self) {
        self.started = None;
    }

    /// Interrupts the turn of these clients for short work: it goes on when that is done.
    pub(crate) fn interrupt(&mut self, leavers: impl IntoIterator<Item = ClientId>, now: Time) {
        self.interrupted = leavers.into_iter().collect();
        self.lasted = self.started.map_or(Duration::ZERO, |started| now.saturating_sub(started));
    }

    /// Passes the turn to a unit: one that was interrupted is over, unless it is the unit's own.
    pub(crate) fn pass_to(&mut self, unit: &[ClientId]) {
        if !unit.iter().any(|id| self.interrupted.contains(id)) {
            self.interrupted.clear();
        }
    }
}
