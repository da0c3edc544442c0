//! The share of one job on one GPU: its terms, and how its virtual time grows.
//!
//! A job's time is what it gets while its gate is open, until its work is drained. While memory moves, nobody
//! computes, and that time is nobody's. Otherwise a light job, which pays for one switch in each of its short
//! turns, would get less than a heavy one with long turns. But it costs the others as much as it takes. So a
//! turn counts for as long as it computed, or for as long as its restore took if that is more. A job that is
//! expensive to switch costs others no more time than it gets itself, or is charged for.

use crate::Time;
use crate::policy::entitled::Terms;
use crate::policy::pace::{Pace, PaceState};
use crate::state::virtual_time::{DEFAULT_SCALED_WEIGHT, Nanos, VirtualTime, to_real, to_virtual};

/// One job on one GPU.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Share {
    pub(crate) terms: Terms,
    /// The weight by which time is shared with the jobs that want the GPU now.
    pub(crate) weight: u64,
    /// How the job's limit is enforced, if it is.
    pub(crate) pace: Option<Pace>,
    /// The job's virtual time before its present turn.
    pub(crate) time_before_turn: VirtualTime,
    /// How long the job has computed in its present turn, up to the service `counted_from`.
    ran: Nanos,
    /// How long the job has restored in this turn.
    restored: Nanos,
    counted_from: Served,
    /// How far the job was behind when it last stopped wanting the GPU.
    pub(crate) behind: VirtualTime,
    /// When that was.
    pub(crate) stopped_at: Time,
    /// The job's processes: how many are there, want the GPU, hold it, have their time counted, and run.
    pub(crate) present: u32,
    pub(crate) active: u32,
    pub(crate) holding: u32,
    pub(crate) counted: u32,
    pub(crate) running: u32,
    /// How many of those that want it are not interactive.
    pub(crate) long: u32,
}

/// The service of a GPU, in nanoseconds for a job that had it all the time. It is counted by jobs whose time
/// counts, and by all that hold the GPU, restoring included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Served {
    pub(crate) counted: Nanos,
    pub(crate) held: Nanos,
}

/// The activity of one process, as its job's share counts it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Activity {
    /// The process wants the GPU or has it.
    pub(crate) active: bool,
    /// The process has the GPU, and restores or computes.
    pub(crate) holds: bool,
    /// The process's time is charged to its job: it holds the GPU and has restored.
    pub(crate) counted: bool,
    /// The process's gate is open, or its work completes.
    pub(crate) runs: bool,
    /// The process wants the GPU or has it, and is not interactive: it uses whole turns.
    pub(crate) long: bool,
}

impl Share {
    pub(crate) fn new(terms: Terms) -> Self {
        Self {
            terms,
            weight: DEFAULT_SCALED_WEIGHT,
            pace: None,
            time_before_turn: 0,
            ran: 0,
            restored: 0,
            counted_from: Served::default(),
            behind: 0,
            stopped_at: Time::ZERO,
            present: 0,
            active: 0,
            holding: 0,
            counted: 0,
            running: 0,
            long: 0,
        }
    }

    /// Counts a process of the job, whose activity has changed.
    pub(crate) fn count(&mut self, before: Option<Activity>, after: Option<Activity>) {
        let (old, new) = (before.unwrap_or_default(), after.unwrap_or_default());
        count(&mut self.present, before.is_some(), after.is_some());
        count(&mut self.active, old.active, new.active);
        count(&mut self.holding, old.holds, new.holds);
        count(&mut self.counted, old.counted, new.counted);
        count(&mut self.running, old.runs, new.runs);
        count(&mut self.long, old.long, new.long);
    }

    /// Returns the job's virtual time.
    pub(crate) fn time(&self, served: Served) -> VirtualTime {
        let (ran, restored) = self.turn(served);
        self.time_before_turn.saturating_add(to_virtual(ran.max(restored), self.weight))
    }

    /// Returns for how long the job has to go on until its virtual time is `time`, in nanoseconds of its own.
    pub(crate) fn time_to_reach(&self, time: VirtualTime, served: Served) -> Nanos {
        let (ran, restored) = self.turn(served);
        let whole = to_real(time.saturating_sub(self.time_before_turn), self.weight);
        if whole > restored.max(ran) { whole - ran } else { 0 }
    }

    /// Returns how long the job has computed in its turn, and how long it had restored.
    fn turn(&self, served: Served) -> (Nanos, Nanos) {
        match (self.counted, self.holding) {
            (1.., _) => (self.ran.saturating_add(served.counted - self.counted_from.counted), self.restored),
            (0, 1..) => (self.ran, self.restored.saturating_add(served.held - self.counted_from.held)),
            (0, 0) => (0, 0),
        }
    }

    /// Counts the service up to now. It is called before the counts of the job's processes change.
    pub(crate) fn count_service(&mut self, served: Served) {
        (self.ran, self.restored) = self.turn(served);
        self.counted_from = served;
    }

    /// Ends the turn when the job holds the GPU no longer. Returns by how much its restore took longer than
    /// its work.
    pub(crate) fn end_turn(&mut self) -> Nanos {
        let (ran, restored) = (std::mem::take(&mut self.ran), std::mem::take(&mut self.restored));
        self.time_before_turn =
            self.time_before_turn.saturating_add(to_virtual(ran.max(restored), self.weight));
        (restored - ran).max(0)
    }

    pub(crate) fn pace_state(&self) -> PaceState {
        match (self.running, self.active) {
            (1.., _) => PaceState::Runs,
            (0, 1..) => PaceState::Waits,
            (0, 0) => PaceState::Sleeps,
        }
    }

    /// Sets another weight from now on.
    pub(crate) fn set_weight(&mut self, weight: u64, served: Served) {
        if weight == self.weight {
            return;
        }
        self.count_service(served);
        let ran = std::mem::take(&mut self.ran);
        self.restored = (self.restored - ran).max(0);
        self.time_before_turn = self.time_before_turn.saturating_add(to_virtual(ran, self.weight));
        self.weight = weight;
    }
}

fn count(number: &mut u32, before: bool, after: bool) {
    match (before, after) {
        (false, true) => *number += 1,
        (true, false) => *number -= 1,
        _ => {}
    }
}
