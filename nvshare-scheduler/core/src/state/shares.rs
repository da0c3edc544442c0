//! How jobs share the time of a GPU: the clock of the GPU, and the virtual time of each job on it.
//!
//! This is weighted fair queueing. A job's virtual time grows from the open gate of its processes until all
//! work is drained. It grows by the wall clock, divided by the number of jobs that use the GPU together and
//! by the job's weight. `share.rs` says how much a restore counts for. The clock grows with the service
//! given, divided by the weights of the jobs that want it. It is the virtual time of a job that had got its
//! exact share. A job that comes starts at the clock, so neither a new process nor a new connection earns
//! time. A job that stops wanting the GPU keeps what it is behind, and all that it is ahead until the clock
//! has passed it. If it stops for [`MIN_SLEEP`] or more, its lag is cut to a bound: twice the sum of the
//! quantum and the longest drain.
//!
//! Compute limits change the weights (see [`entitled`]): the weights in force depend on which jobs want the
//! GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::Time;
use crate::policy::entitled::{self, Terms};
use crate::policy::pace::Pace;
use crate::policy::rhythm::MIN_SLEEP;
use crate::policy::slices;
use crate::state::client::Job;
pub(crate) use crate::state::share::Activity;
use crate::state::share::{Served, Share};
use crate::state::virtual_time::{DEFAULT_SCALED_WEIGHT, Nanos, VirtualTime, nanos, to_virtual};

const DEFAULT_TERMS: Terms = Terms { weight: DEFAULT_SCALED_WEIGHT, limit: None, forced: false };

/// The largest number of jobs without a process that are remembered.
const MAX_REMEMBERED: usize = 1024;

/// The jobs of a GPU.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    clock: VirtualTime,
    served: Served,
    advanced_to: Time,
    /// The sum of the weights of the jobs that want the GPU.
    weights: u64,
    /// How many jobs of each weight of their own want the GPU, and how many of all these have a limit.
    active_by_weight: BTreeMap<u64, usize>,
    limited: usize,
    /// Whether compute limits shaped the weights that are in force.
    limits_applied: bool,
    /// How many jobs hold the GPU, and how many of them have their time counted.
    jobs_holding: i64,
    jobs_counted: i64,
    /// How many jobs use whole turns.
    long: usize,
    jobs: BTreeMap<Job, Share>,
    /// The jobs without a process, by their virtual time.
    remembered: BTreeSet<(VirtualTime, Job)>,
    /// Jobs whose limit is enforced.
    paced: BTreeSet<Job>,
}

impl Shares {
    pub(crate) fn advance(&mut self, now: Time) {
        let passed = now.saturating_sub(self.advanced_to);
        self.advanced_to = self.advanced_to.max(now);
        if self.jobs_holding > 0 && !passed.is_zero() {
            let passed = nanos(passed);
            self.served.held = self.served.held.saturating_add(passed / self.jobs_holding);
            if self.jobs_counted > 0 {
                self.served.counted = self.served.counted.saturating_add(passed / self.jobs_counted);
                self.clock = self.clock.saturating_add(to_virtual(passed, self.weights));
            }
        }
    }

    pub(crate) fn clock(&self) -> VirtualTime {
        self.clock
    }

    /// Returns the time up to which all is counted.
    pub(crate) fn now(&self) -> Time {
        self.advanced_to
    }

    /// Returns how many jobs hold the GPU.
    pub(crate) fn holding(&self) -> i64 {
        self.jobs_holding
    }

    pub(crate) fn is_holding(&self, job: Job) -> bool {
        self.jobs.get(&job).is_some_and(|share| share.holding > 0)
    }

    /// Returns a job's virtual time; a job that is not known would start at the clock.
    pub(crate) fn time(&self, job: Job) -> VirtualTime {
        self.jobs.get(&job).map_or(self.clock, |share| share.time(self.served))
    }

    /// Returns for how long a job that uses the GPU alone has to go on until its virtual time is this.
    pub(crate) fn time_to_reach(&self, job: Job, time: VirtualTime) -> Duration {
        let nanos = self.jobs.get(&job).map_or(0, |share| share.time_to_reach(time, self.served));
        Duration::from_nanos(nanos.max(0).unsigned_abs())
    }

    /// Returns the weight by which a job's time is shared now.
    pub(crate) fn weight(&self, job: Job) -> u64 {
        self.jobs.get(&job).map_or(DEFAULT_SCALED_WEIGHT, |share| share.weight)
    }

    /// Returns how far a job is ahead of the clock, whose client of several GPUs has waited for this long: see
    /// [`policy::order`](crate::policy::order). `turn`: how long a turn lasts. Each job that wants the GPU has one in a round, as
    /// long as its weight says.
    pub(crate) fn lead_of_waiter(&self, job: Job, waited: Duration, turn: Duration) -> VirtualTime {
        let weight = self.weight(job);
        let round = i128::from(nanos(turn)) * i128::from(self.weights) / i128::from(weight.max(1));
        let round = Nanos::try_from(round).unwrap_or(Nanos::MAX / 4);
        let owed = nanos(waited).saturating_sub(round.saturating_mul(2)).max(0);
        (self.time(job) - self.clock).saturating_sub(to_virtual(owed, weight))
    }

    /// Returns how many jobs want the GPU.
    pub(crate) fn active(&self) -> usize {
        self.active_by_weight.values().sum()
    }

    /// Returns how many jobs want the GPU for whole turns: they are not interactive.
    pub(crate) fn long(&self) -> usize {
        self.long
    }

    /// Returns how many jobs want the GPU for short work alone.
    pub(crate) fn short(&self) -> usize {
        self.active().saturating_sub(self.long)
    }

    /// Whether the jobs that want the GPU are to have different, or limited, parts of its time.
    pub(crate) fn are_unequal(&self) -> bool {
        slices::are_asked_for(self.active(), self.active_by_weight.len() > 1, self.limited > 0)
    }

    /// Returns the jobs whose limit is enforced.
    pub(crate) fn paced(&self) -> &BTreeSet<Job> {
        &self.paced
    }

    /// Returns when a process of a job whose limit is enforced may hold the GPU, if its drain takes this
    /// long. Returns `None` if it may at once, beside others of the job whose spell goes on.
    pub(crate) fn begins_at(&self, job: Job, drain: Duration) -> Option<Time> {
        let (share, pace) = self.pace(job)?;
        // Processes that drain when the spell is over make it no longer for others of their job.
        let goes_on = share.holding > 0 && pace.ends_at(drain).is_none_or(|end| end > self.advanced_to);
        (!goes_on).then(|| pace.begins_at())
    }

    /// Returns when a job whose limit is enforced has to leave, if its drain takes this long, or `None` if it
    /// does not run. Restoring does not count against the limit.
    pub(crate) fn ends_at(&self, job: Job, drain: Duration) -> Option<Time> {
        let (share, pace) = self.pace(job)?;
        if share.running > 0 { pace.ends_at(drain) } else { None }
    }

    /// Returns a job whose limit is enforced, and its pace now.
    fn pace(&self, job: Job) -> Option<(&Share, Pace)> {
        let share = self.jobs.get(&job)?;
        let mut pace = share.pace.clone()?;
        pace.advance(share.pace_state(), self.advanced_to);
        Some((share, pace))
    }

    /// Sets other terms from now on. Returns whether they differ from those before.
    pub(crate) fn set_terms(&mut self, job: Job, terms: Terms) -> bool {
        let now = self.advanced_to;
        // None: the job is not known here, or nothing differs.
        let Some(share) = self.jobs.get_mut(&job).filter(|share| share.terms != terms) else { return false };
        let before = std::mem::replace(&mut share.terms, terms);
        let does = share.pace_state();
        match (terms.limit.filter(|_| terms.forced), &mut share.pace) {
            (Some(percent), Some(pace)) => pace.set(percent, does, now),
            (Some(percent), slot) => *slot = Some(Pace::new(percent, now)),
            (None, pace) => *pace = None,
        }
        if share.pace.is_some() {
            self.paced.insert(job);
        } else {
            self.paced.remove(&job);
        }
        if share.active > 0 {
            self.remove_active(before);
            self.add_active(terms);
        }
        self.recompute_weights(job);
        true
    }

    fn add_active(&mut self, terms: Terms) {
        *self.active_by_weight.entry(terms.weight).or_default() += 1;
        self.limited += usize::from(terms.limit.is_some());
    }

    fn remove_active(&mut self, terms: Terms) {
        if let Some(count) = self.active_by_weight.get_mut(&terms.weight) {
            *count -= 1;
            if *count == 0 {
                self.active_by_weight.remove(&terms.weight);
            }
        }
        self.limited -= usize::from(terms.limit.is_some());
    }

    /// Computes the weights by which time is shared, after one job has changed.
    fn recompute_weights(&mut self, changed: Job) {
        let served = self.served;
        let limits = self.limited > 0;
        let were_applied = std::mem::replace(&mut self.limits_applied, limits);
        if limits || were_applied {
            let wanting: Vec<Terms> = self.jobs.values().filter(|s| s.active > 0).map(|s| s.terms).collect();
            let mut weights = entitled::weights(&wanting).into_iter();
            for share in self.jobs.values_mut() {
                let weight = if share.active > 0 { weights.next() } else { None };
                share.set_weight(weight.unwrap_or(share.terms.weight), served);
            }
        } else if let Some(share) = self.jobs.get_mut(&changed) {
            share.set_weight(share.terms.weight, served);
        }
        self.weights = if limits {
            self.jobs.values().filter(|share| share.active > 0).map(|share| share.weight).sum()
        } else {
            self.active_by_weight.iter().map(|(weight, count)| weight * *count as u64).sum()
        };
    }

    /// Counts a change of one process of a job. `bound`: how much of what a job is behind or ahead is kept at
    /// most.
    pub(in crate::state) fn change(
        &mut self,
        job: Job,
        before: Option<Activity>,
        after: Option<Activity>,
        bound: Duration,
    ) {
        let bound = nanos(bound);
        let mut was = self.jobs.get(&job).cloned().unwrap_or_else(|| Share::new(DEFAULT_TERMS));
        was.count_service(self.served);
        let now = self.advanced_to;
        let mut share = was.clone();
        share.count(before, after);
        let [begins, ends] = [was.active == 0 && share.active > 0, was.active > 0 && share.active == 0];
        if begins {
            self.place(job, &was, &mut share, bound);
        }
        let pace_state = share.pace_state();
        if let Some(pace) = share.pace.as_mut().filter(|_| was.pace_state() != pace_state) {
            pace.advance(was.pace_state(), now);
        }
        if was.holding > 0 && share.holding == 0 {
            self.end_turn(&mut share, bound);
        }
        if ends {
            share.behind = self.clock - share.time_before_turn;
            share.stopped_at = now;
        }
        let terms = share.terms;
        self.long = self.long + usize::from(share.long > 0) - usize::from(was.long > 0);
        self.jobs_holding += i64::from(share.holding > 0) - i64::from(was.holding > 0);
        self.jobs_counted += i64::from(share.counted > 0) - i64::from(was.counted > 0);
        self.store(job, &was, share);
        if begins {
            self.add_active(terms);
        } else if ends {
            self.remove_active(terms);
        } else {
            return;
        }
        self.recompute_weights(job);
    }

    /// Gives a job that begins to want the GPU its virtual time: what it was behind when it stopped, at most
    /// `bound`.
    fn place(&mut self, job: Job, was: &Share, share: &mut Share, bound: Nanos) {
        let known = self.jobs.contains_key(&job);
        self.catch_up();
        // A job that gives the lock back because it was asked to, and asks again at once, has not stopped
        // wanting the GPU.
        let paused = self.advanced_to.saturating_sub(was.stopped_at) >= MIN_SLEEP;
        let most = if paused { bound } else { VirtualTime::MAX };
        let start = self.clock - was.behind.clamp(0, most);
        share.time_before_turn = if known { was.time_before_turn.max(start) } else { start };
    }

    /// Ends the turn of a job that holds the GPU no longer. The time by which its restore took longer than
    /// its work is lost to all jobs alike. The job stays ahead by at most twice the `bound`.
    fn end_turn(&mut self, share: &mut Share, bound: Nanos) {
        let lost = share.end_turn();
        self.clock = self.clock.saturating_add(to_virtual(lost, self.weights));
        // The bound is in real time. A light job's virtual time grows faster, so its bound in virtual time is
        // larger.
        let most = to_virtual(bound.saturating_mul(2), share.weight.min(DEFAULT_SCALED_WEIGHT));
        share.time_before_turn = share.time_before_turn.min(self.clock.saturating_add(most));
    }

    /// Charges a job for time that others lose because of it.
    pub(crate) fn charge(&mut self, job: Job, lost: Duration) {
        if let Some(share) = self.jobs.get_mut(&job) {
            share.time_before_turn =
                share.time_before_turn.saturating_add(to_virtual(nanos(lost), share.weight));
        }
    }

    /// Moves the clock up to the job that is least ahead of those that want the GPU. Otherwise a newcomer
    /// would go first until it had caught up.
    fn catch_up(&mut self) {
        let mut least = None;
        for share in self.jobs.values().filter(|share| share.active > 0) {
            let time = share.time(self.served);
            // One job that is behind is enough, and mostly there is one among the first few.
            if time <= self.clock {
                return;
            }
            least = least.map_or(Some(time), |least: VirtualTime| Some(least.min(time)));
        }
        self.clock = self.clock.max(least.unwrap_or(self.clock));
    }

    /// Stores a job. A job without processes is dropped if remembering it would change nothing. Beyond
    /// [`MAX_REMEMBERED`], the jobs least ahead are dropped first.
    fn store(&mut self, job: Job, was: &Share, share: Share) {
        if was.present == 0 {
            self.remembered.remove(&(was.time_before_turn, job));
        }
        if share.present == 0 {
            self.remembered.insert((share.time_before_turn, job));
        }
        let is_as_good_as_new =
            share.present == 0 && share.behind <= 0 && share.time_before_turn <= self.clock;
        self.jobs.insert(job, share);
        if is_as_good_as_new {
            self.forget(job);
        }
        while self.remembered.len() > MAX_REMEMBERED
            && let Some(&(_, job)) = self.remembered.first()
        {
            self.forget(job);
        }
    }

    fn forget(&mut self, job: Job) {
        if let Some(share) = self.jobs.remove(&job) {
            self.remembered.remove(&(share.time_before_turn, job));
        }
        self.paced.remove(&job);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::virtual_time::WEIGHT_SCALE;

    const S: fn(u64) -> Duration = Duration::from_secs;
    const WAITS: Option<Activity> = Some(WANTS);
    const RESTORES: Option<Activity> = Some(Activity { holds: true, ..WANTS });
    const HOLDS: Option<Activity> = Some(Activity { holds: true, counted: true, runs: true, ..WANTS });
    const SITS: Option<Activity> = Some(Activity { active: false, long: false, ..WANTS });
    const WANTS: Activity = Activity { active: true, holds: false, counted: false, runs: false, long: true };

    fn job(n: u64) -> Job {
        Job::Process(n)
    }

    fn seconds(time: VirtualTime) -> i64 {
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
        // Both stop: the second is behind by ten seconds, the first is ahead by ten.
        shares.change(job(2), WAITS, SITS, S(60));
        shares.advance(S(100));
        shares.change(job(2), SITS, WAITS, S(60));
        assert_eq!(seconds(shares.clock() - shares.time(job(2))), 10);
        shares.change(job(2), WAITS, SITS, S(60));
        shares.advance(S(101));
        shares.change(job(2), SITS, WAITS, S(4));
        assert_eq!(seconds(shares.clock() - shares.time(job(2))), 4, "within the bound");
    }

    #[test]
    fn a_waiter_comes_forward_after_two_rounds() {
        let mut shares = Shares::default();
        for n in [1, 2] {
            shares.change(job(n), None, WAITS, S(60));
        }
        let lead = |shares: &Shares, waited| shares.lead_of_waiter(job(1), S(waited), S(3)) / 1_000_000_000;
        assert_eq!([0, 12, 13, 20].map(|waited| lead(&shares, waited)), [0, 0, -1, -8]);
        // With half of the weight of the other one, a round takes 9 s, and its time grows faster.
        shares.set_terms(job(1), terms(50, None, false));
        assert_eq!([18, 20].map(|waited| lead(&shares, waited)), [0, -4]);
    }

    #[test]
    fn who_gives_the_lock_back_and_asks_again_at_once_keeps_all_that_it_is_behind() {
        for (pause_ms, kept) in [(0, 10), (19, 10), (20, 4), (1000, 4)] {
            let mut shares = Shares::default();
            shares.change(job(1), None, HOLDS, S(60));
            shares.change(job(2), None, WAITS, S(60));
            shares.advance(S(20));
            shares.change(job(2), WAITS, SITS, S(4));
            shares.advance(S(20) + Duration::from_millis(pause_ms));
            shares.change(job(2), SITS, WAITS, S(4));
            assert_eq!(seconds(shares.clock() - shares.time(job(2))), kept, "{pause_ms} ms");
        }
    }

    #[test]
    fn a_job_that_has_had_its_share_is_remembered_when_it_comes_back() {
        let mut shares = Shares::default();
        shares.change(job(2), None, WAITS, S(60));
        shares.change(job(1), None, HOLDS, S(60));
        shares.advance(S(20));
        shares.change(job(1), HOLDS, None, S(60));
        shares.change(job(1), None, WAITS, S(60));
        assert_eq!(seconds(shares.time(job(1))), 20, "a new connection of the same process");
    }

    fn terms(weight: u64, limit: Option<u8>, forced: bool) -> Terms {
        Terms { weight: weight * WEIGHT_SCALE, limit, forced }
    }

    #[test]
    fn a_heavy_job_is_charged_less() {
        let mut shares = Shares::default();
        for (n, weight) in [(1, 200), (2, 50), (3, 100)] {
            shares.change(job(n), None, WAITS, S(60));
            assert_eq!(shares.set_terms(job(n), terms(weight, None, false)), weight != 100);
            assert!(!shares.set_terms(job(n), terms(weight, None, false)), "nothing new");
        }
        for n in [1, 2] {
            shares.change(job(n), WAITS, HOLDS, S(60));
            shares.advance(S(n * 20));
            shares.change(job(n), HOLDS, WAITS, S(60));
        }
        let times = [1, 2, 3].map(|n| seconds(shares.time(job(n))));
        assert_eq!((times, seconds(shares.clock())), ([10, 40, 0], 11), "40 s for weights of 350 in all");
        assert!(shares.are_unequal());
        // Another weight counts from now on.
        shares.change(job(1), WAITS, HOLDS, S(60));
        shares.advance(S(50));
        shares.set_terms(job(1), terms(100, None, false));
        shares.advance(S(60));
        assert_eq!(seconds(shares.time(job(1))), 10 + 5 + 10);
    }

    #[test]
    fn limits_count_while_their_jobs_want_the_gpu() {
        let mut shares = Shares::default();
        for (n, limit) in [(1, Some(25)), (2, None)] {
            shares.change(job(n), None, WAITS, S(60));
            shares.set_terms(job(n), terms(100, limit, false));
        }
        assert_eq!([1, 2].map(|n| shares.weight(job(n)) * 4 / DEFAULT_SCALED_WEIGHT), [2, 6]);
        assert!(shares.are_unequal());
        shares.change(job(2), WAITS, SITS, S(60));
        assert!(!shares.are_unequal());
        assert_eq!(shares.weight(job(1)), DEFAULT_SCALED_WEIGHT, "nobody else wants it");
        shares.change(job(2), SITS, WAITS, S(60));
        shares.change(job(1), WAITS, None, S(60));
        assert_eq!(shares.weight(job(2)), DEFAULT_SCALED_WEIGHT);
        assert_eq!((shares.active(), shares.weights), (1, DEFAULT_SCALED_WEIGHT));
    }

    #[test]
    fn an_enforced_limit_has_a_pace_while_it_holds() {
        let mut shares = Shares::default();
        shares.change(job(1), None, WAITS, S(60));
        shares.set_terms(job(1), terms(100, Some(50), true));
        assert_eq!((shares.begins_at(job(1), S(0)), shares.ends_at(job(1), S(0))), (Some(S(0)), None));
        shares.change(job(1), WAITS, HOLDS, S(60));
        assert_eq!(
            (shares.begins_at(job(1), S(0)), shares.ends_at(job(1), S(0))),
            (None, Some(Duration::from_millis(125)))
        );
        shares.advance(Duration::from_millis(125));
        assert_eq!(shares.begins_at(job(1), S(0)), Some(Duration::from_millis(250)), "its spell is over");
        shares.advance(S(1));
        shares.change(job(1), HOLDS, WAITS, S(60));
        assert_eq!(shares.begins_at(job(1), S(0)), Some(Duration::from_millis(2000)));
        shares.set_terms(job(1), terms(100, Some(50), false));
        assert_eq!(shares.begins_at(job(1), S(0)), None, "it is no longer enforced");
        assert!(shares.paced().is_empty());
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

    #[test]
    fn a_restore_counts_where_it_takes_longer_than_the_work_behind_it() {
        for (restores, works, expected) in [(3, 4, 4), (3, 3, 3), (3, 1, 3), (0, 4, 4), (3, 0, 3)] {
            let mut shares = Shares::default();
            shares.change(job(2), None, WAITS, S(60));
            shares.change(job(1), None, RESTORES, S(60));
            shares.advance(S(restores));
            shares.change(job(1), RESTORES, HOLDS, S(60));
            let before = seconds(shares.time(job(1)));
            let lacks = shares.time_to_reach(job(1), nanos(S(10)));
            shares.advance(S(restores + works));
            let counted = seconds(shares.time(job(1)));
            shares.change(job(1), HOLDS, WAITS, S(60));
            let what = format!("{restores} s, then {works} s");
            assert_eq!((before, lacks), (restores as i64, S(10)), "{what}");
            assert_eq!((counted, seconds(shares.time(job(1)))), (expected, expected), "{what}");
            assert_eq!(nanos(S(expected as u64)), shares.clock() * 2, "{what}: the clock has it too");
        }
    }

    #[test]
    fn another_weight_in_the_middle_of_a_turn_counts_from_then_on() {
        let mut shares = Shares::default();
        shares.change(job(1), None, RESTORES, S(60));
        shares.advance(S(3));
        shares.change(job(1), RESTORES, HOLDS, S(60));
        shares.advance(S(5));
        shares.set_terms(job(1), terms(50, None, false));
        // Two of the three seconds are worked off.
        assert_eq!(seconds(shares.time(job(1))), 2 + 2);
        shares.advance(S(9));
        assert_eq!(seconds(shares.time(job(1))), 2 + 8);
        assert_eq!(shares.time_to_reach(job(1), nanos(S(12))), S(1));
    }

    #[test]
    fn the_absent_jobs_least_ahead_are_forgotten_first() {
        let mut shares = Shares::default();
        shares.change(job(0), None, WAITS, S(60));
        let jobs = 2 * MAX_REMEMBERED as u64;
        for n in 1..=jobs {
            shares.change(job(n), None, HOLDS, S(60));
            shares.advance(S(n));
            shares.change(job(n), HOLDS, None, S(60));
        }
        assert_eq!(shares.jobs.len(), 1 + MAX_REMEMBERED);
        assert!(!shares.jobs.contains_key(&job(1)) && shares.jobs.contains_key(&job(jobs)));
        let absent = shares.jobs.iter().filter(|(_, share)| share.present == 0);
        assert!(
            absent.map(|(&job, share)| (share.time_before_turn, job)).collect::<BTreeSet<_>>()
                == shares.remembered
        );
    }
}
