//! The view that a trial has of a GPU and its clients, and its requests.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::Time;
use crate::state::client::{ClientId, Job};

/// Submissions that became complete in some time.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counted {
    pub(super) submissions: u64,
    pub(super) took: Duration,
}

impl Counted {
    pub(super) fn rate(self) -> f64 {
        self.submissions as f64 / self.took.as_secs_f64()
    }
}

/// How many submissions of a client were complete, and when, as it answered the first and the last question
/// of a window.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Said {
    pub(super) first: Option<(u64, Time)>,
    pub(super) last: Option<(u64, Time)>,
}

impl Said {
    /// Returns the submissions that became complete between the two.
    pub(super) fn counted(self) -> Option<Counted> {
        let ((first, from), (last, to)) = self.first.zip(self.last)?;
        Some(Counted { submissions: last.saturating_sub(first), took: to.saturating_sub(from) })
    }
}

/// The tasks of the core for the trial.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Todo {
    /// Ask the clients of the set, with this ticket, to say when what they have submitted by now is complete.
    pub(crate) ask: Option<u64>,
    /// Ask all holders for the lock.
    pub(crate) separate: bool,
    /// All holders have given it back: the first turn begins.
    pub(crate) begin: bool,
    /// Look again then, if no event comes before.
    pub(crate) wake: Option<Time>,
    /// A line for the log.
    pub(crate) note: Option<String>,
}

/// The view that the core has of a GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sight<'a> {
    /// The clients that hold the GPU or wait for it, and their jobs, or `None` if they are not to be measured
    /// now.
    pub(crate) set: Option<&'a BTreeMap<ClientId, Job>>,
    /// Nobody holds the GPU.
    pub(crate) is_free: bool,
    /// A client could not drain, and is asked again later.
    pub(crate) cannot_drain: bool,
    /// A client that was in the set is gone.
    pub(crate) is_gone: bool,
    pub(crate) now: Time,
}
