//! Whose time on a GPU: the clock of a GPU and the virtual time of each job on it.
//!
//! As in weighted fair queueing. A job's virtual time grows while its processes hold the GPU, by the wall clock divided
//! by the jobs that hold it together, from the grant (restoring included) until all work is drained. The clock grows
//! with the service given, divided by the jobs that want it: it is where a job would be that had got its share. A job that
//! comes starts at the clock, so neither a new process nor a new connection earns time. A job that stops wanting keeps
//! what it is behind, within a bound, and all that it is ahead until the clock has passed it.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::Time;
use crate::client::Job;

/// Virtual time in nanoseconds. Differences may be negative.
pub(crate) type Virtual = i64;

/// Jobs that are remembered when none of their processes is there.
const MOST_REMEMBERED: usize = 1024;

/// One job on one GPU.
#[derive(Debug, Clone, Default, PartialEq)]
struct Share {
    /// Its virtual time, but for what it holds at the moment.
    time: Virtual,
    /// `served` when it began to hold.
    from: Virtual,
    /// What it was behind when it last stopped wanting.
    behind: Virtual,
    /// Its processes that are there, want the GPU, hold it.
    present: u32,
    active: u32,
    holding: u32,
}

/// What one process asks of its job's share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Part {
    /// It wants the GPU or has it.
    pub(crate) active: bool,
    /// Its time is charged.
    pub(crate) holds: bool,
}

/// The jobs of a GPU.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    clock: Virtual,
    /// What each job got that held the GPU all the time.
    served: Virtual,
    advanced_to: Time,
    active: i64,
    holding: i64,
    jobs: BTreeMap<Job, Share>,
}

impl Shares {
    pub(crate) fn advance(&mut self, now: Time) {
        let passed = now.saturating_sub(self.advanced_to);
        self.advanced_to = self.advanced_to.max(now);
        if self.holding > 0 && !passed.is_zero() {
            let passed = nanos(passed);
            self.served = self.served.saturating_add(passed / self.holding);
            self.clock = self.clock.saturating_add(passed / self.active.max(self.holding));
        }
    }

    pub(crate) fn clock(&self) -> Virtual {
        self.clock
    }

    /// How many jobs hold the GPU.
    pub(crate) fn holding(&self) -> i64 {
        self.holding
    }

    pub(crate) fn is_holding(&self, job: Job) -> bool {
        self.jobs.get(&job).is_some_and(|share| share.holding > 0)
    }

    /// A job's virtual time; who is not known would start at the clock.
    pub(crate) fn time(&self, job: Job) -> Virtual {
        self.jobs.get(&job).map_or(self.clock, |share| share.time(self.served))
    }

    /// A process of a job changes. `bound`: most that is kept of what a job is behind or ahead.
    pub(crate) fn change(&mut self, job: Job, before: Option<Part>, after: Option<Part>, bound: Duration) {
        let bound = nanos(bound);
        let was = self.jobs.get(&job).cloned().unwrap_or_default();
        let mut share = was.clone();
        let (old, new) = (before.unwrap_or_default(), after.unwrap_or_default());
        count(&mut share.present, before.is_some(), after.is_some());
        count(&mut share.active, old.active, new.active);
        count(&mut share.holding, old.holds, new.holds);
        if was.active == 0 && share.active > 0 {
            let known = self.jobs.contains_key(&job);
            self.catch_up();
            let start = self.clock - was.behind.clamp(0, bound);
            share.time = if known { was.time.max(start) } else { start };
        }
        if was.holding == 0 && share.holding > 0 {
            share.from = self.served;
        }
        if was.holding > 0 && share.holding == 0 {
            share.time = was.time(self.served).min(self.clock.saturating_add(bound.saturating_mul(2)));
        }
        if was.active > 0 && share.active == 0 {
            share.behind = self.clock - share.time;
        }
        self.active += i64::from(share.active > 0) - i64::from(was.active > 0);
        self.holding += i64::from(share.holding > 0) - i64::from(was.holding > 0);
        let forgotten = share.present == 0 && share.behind <= 0 && share.time <= self.clock;
        if forgotten {
            self.jobs.remove(&job);
        } else {
            self.jobs.insert(job, share);
            self.forget_some();
        }
    }

    /// The clock is not behind everybody who wants the GPU: else who comes would go first until it had caught up.
    fn catch_up(&mut self) {
        let active = self.jobs.values().filter(|share| share.active > 0);
        if let Some(least) = active.map(|share| share.time(self.served)).min() {
            self.clock = self.clock.max(least);
        }
    }

    fn forget_some(&mut self) {
        if self.jobs.len() > MOST_REMEMBERED {
            let clock = self.clock;
            self.jobs.retain(|_, share| share.present > 0 || share.time > clock);
        }
        if self.jobs.len() > 2 * MOST_REMEMBERED
            && let Some((&job, _)) = self.jobs.iter().find(|(_, share)| share.present == 0)
        {
            self.jobs.remove(&job);
        }
    }
}

impl Share {
    fn time(&self, served: Virtual) -> Virtual {
        if self.holding > 0 { self.time.saturating_add(served - self.from) } else { self.time }
    }
}

fn count(number: &mut u32, before: bool, after: bool) {
    match (before, after) {
        (false, true) => *number += 1,
        (true, false) => *number -= 1,
        _ => {}
    }
}

pub(crate) fn nanos(time: Duration) -> Virtual {
    Virtual::try_from(time.as_nanos()).unwrap_or(Virtual::MAX / 4).min(Virtual::MAX / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: fn(u64) -> Duration = Duration::from_secs;
    const WAITS: Option<Part> = Some(Part { active: true, holds: false });
    const HOLDS: Option<Part> = Some(Part { active: true, holds: true });
    const SITS: Option<Part> = Some(Part { active: false, holds: false });

    fn job(n: u64) -> Job {
        Job::Process(n)
    }

    fn seconds(time: Virtual) -> i64 {
        (time + 500_000_000) / 1_000_000_000
    }

    #[test]
    fn a_newcomer_starts_at_the_clock() {
        let mut shares = Shares::default();
        shares.change(job(1), None, HOLDS, S(60));
        shares.change(job(2), None, WAITS, S(60));
        shares.advance(S(20));
        assert_eq!([shares.time(job(1)), shares.time(job(2)), shares.clock()].map(seconds), [20, 0, 10]);
        shares.change(job(3), None, WAITS, S(60));
        assert_eq!(seconds(shares.time(job(3))), 10, "where it would be with its share");
    }

    #[test]
    fn a_pause_earns_nothing_and_costs_nothing() {
        let mut shares = Shares::default();
        shares.change(job(1), None, HOLDS, S(60));
        shares.change(job(2), None, WAITS, S(60));
        shares.advance(S(20));
        // Both stop; the second was behind by ten seconds, the first ahead by ten.
        shares.change(job(2), WAITS, SITS, S(60));
        shares.advance(S(100));
        shares.change(job(2), SITS, WAITS, S(60));
        assert_eq!(seconds(shares.clock() - shares.time(job(2))), 10);
        shares.change(job(2), WAITS, SITS, S(60));
        shares.change(job(2), SITS, WAITS, S(4));
        assert_eq!(seconds(shares.clock() - shares.time(job(2))), 4, "within the bound");
    }

    #[test]
    fn who_has_had_its_share_is_remembered_when_it_comes_back() {
        let mut shares = Shares::default();
        shares.change(job(2), None, WAITS, S(60));
        shares.change(job(1), None, HOLDS, S(60));
        shares.advance(S(20));
        shares.change(job(1), HOLDS, None, S(60));
        shares.change(job(1), None, WAITS, S(60));
        assert_eq!(seconds(shares.time(job(1))), 20, "a new connection of the same process");
    }

    #[test]
    fn processes_of_a_job_are_charged_once() {
        let mut shares = Shares::default();
        shares.change(job(1), None, HOLDS, S(60));
        shares.change(job(1), None, HOLDS, S(60));
        shares.change(job(2), None, HOLDS, S(60));
        shares.advance(S(20));
        assert_eq!([shares.time(job(1)), shares.time(job(2))].map(seconds), [10, 10]);
    }
}
