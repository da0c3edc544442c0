//! Whether a program that holds the lock while others wait has become idle: it submits nothing, and all its work is complete.
//!
//! Complete work alone does not tell: a program that waits for each of its steps [pauses](crate::pauses) between them.

use std::time::Duration;

use super::{Action, MoverOrder};
use crate::pauses::Pauses;

/// Time without a submission after which the mover looks whether all work is complete.
const PROBE_AFTER: Duration = Duration::from_millis(5);
/// How far apart looks at the count of submissions are.
const LOOK: Duration = Duration::from_millis(5);
/// The same for a program that has been busy for long. Until then it is a part of the busy time: a short burst does not leave the GPU
/// idle for long.
const LOOK_AT_BUSY: Duration = Duration::from_millis(10);
const PART: u32 = 16;

/// Whether submitted work is complete, as far as known, while the program submits none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Probe {
    /// Not known.
    None,
    /// The mover looks at the work.
    Looking,
    /// All work is complete that was submitted until the count was `submissions`; known since this time.
    Complete { submissions: u64, since: Duration },
}

/// A holder's work, as far as it is known.
#[derive(Debug)]
pub(super) struct Idleness {
    /// The count of submissions at the last look.
    submissions: u64,
    /// The time since when that count is the same. It counts anew when others begin to wait, and when work is found incomplete.
    unchanged_since: Duration,
    /// The time since when all work has not been known to be complete.
    busy_since: Duration,
    probe: Probe,
    pauses: Pauses,
}

impl Idleness {
    pub(super) fn new(now: Duration) -> Self {
        let (probe, pauses) = (Probe::None, Pauses::default());
        Self { submissions: 0, unchanged_since: now, busy_since: now, probe, pauses }
    }

    /// The gate opens. The result of an earlier look says nothing about the work that it opens for.
    pub(super) fn begin(&mut self, now: Duration) {
        self.count_from(now);
        self.forget();
        self.pauses.begin(now);
    }

    /// The program is idle, and its gate is closed.
    pub(super) fn end(&mut self, now: Duration) {
        self.pauses.end(now);
    }

    /// Work of the program waits at the gate.
    pub(super) fn resume(&mut self, now: Duration) {
        self.pauses.resume(now);
    }

    /// The time counts from now on: others begin to wait, or the gate opens.
    pub(super) fn count_from(&mut self, now: Duration) {
        self.unchanged_since = now;
        self.busy_since = now;
    }

    /// Forgets whether work is complete.
    pub(super) fn forget(&mut self) {
        self.probe = Probe::None;
    }

    /// Some work is not complete.
    pub(super) fn incomplete(&mut self, now: Duration) {
        self.probe = Probe::None;
        self.unchanged_since = now;
    }

    /// All work is complete that was submitted until the count had this value.
    pub(super) fn complete(&mut self, submissions: u64, now: Duration) {
        self.probe = Probe::Complete { submissions, since: now };
        self.busy_since = now;
    }

    /// Time until the next look is due; `None`: the mover's answer comes first.
    pub(super) fn next_look(&self, now: Duration) -> Option<Duration> {
        match self.probe {
            Probe::Looking => None,
            Probe::Complete { since, .. } => {
                Some((since + self.pauses.idle_after()).saturating_sub(now).min(LOOK))
            }
            Probe::None => Some((now.saturating_sub(self.busy_since) / PART).clamp(LOOK, LOOK_AT_BUSY)),
        }
    }

    /// Looks at the count of submissions, and whether allocations lack room: the program has work, though it submits none.
    pub(super) fn look(&mut self, submissions: u64, lacking: bool, now: Duration) -> Option<Action> {
        if self.submissions != submissions || lacking {
            (self.submissions, self.unchanged_since) = (submissions, now);
            if let Probe::Complete { since, .. } = self.probe {
                self.pauses.note(now.saturating_sub(since));
            }
            if self.probe != Probe::Looking {
                self.probe = Probe::None;
            }
            return None;
        }
        match self.probe {
            Probe::None if now.saturating_sub(self.unchanged_since) >= PROBE_AFTER => {
                self.probe = Probe::Looking;
                Some(Action::Post(MoverOrder::Probe))
            }
            Probe::Complete { submissions, since }
                if now.saturating_sub(since) >= self.pauses.idle_after() =>
            {
                self.probe = Probe::None;
                Some(Action::TryIdle { submissions })
            }
            Probe::None | Probe::Looking | Probe::Complete { .. } => None,
        }
    }
}
