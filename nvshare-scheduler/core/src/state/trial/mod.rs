//! The trial of a GPU: whether the jobs that fit it get more done side by side or by turns (see
//! [`progress`]).
//!
//! | stage | jobs run | ends |
//! |---|---|---|
//! | rests | side by side | when the set may be tried (again) |
//! | counts | side by side | when it is known what a window got done |
//! | shortens | side by side | when what is in flight is short |
//! | separates | side by side | when all have given the lock back: then the count of each is exact |
//! | turns | by turns | when a round is complete; if turns are decided upon, when they are to be checked |
//!
//! Work counts when it is complete. Side by side, clients are asked at both ends of the window. Each answers
//! as soon as all is complete that it had submitted when it was asked, however much that is. The answer
//! counts from the moment that it comes. In turns nobody is asked. A client says its counters each time that
//! it gives the lock back, when all that it has submitted is complete.
//!
//! A program that never waits for its work has as much in flight as the driver takes: half a second of work,
//! or several. A drain of that would be given up. So from the end of the first window on, until the trial is
//! over, launch windows bound what is in flight as if somebody waited. By the answers at that end all is
//! complete that was submitted before; then clients are asked until they answer soon.

mod aim;
mod seen;
mod set;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nvshare_proto::units::saturate_u32;

use crate::Time;
use crate::policy::progress::{self, Finding};
use crate::state::client::{ClientId, Job};

use aim::{Aim, Checks};
use seen::{Counted, Said};
pub(crate) use seen::{Sight, Todo};

/// A client has completed within this time what it had submitted when it was asked: more than any queue of
/// work.
const ANSWERS: Duration = Duration::from_secs(30);
/// Submitted work is complete within this time after all were asked for the lock.
const SEPARATES: Duration = Duration::from_secs(10);
/// Answers that come within this time say that what is in flight is short: a drain of it is not given up.
const SHORT_FLIGHT: Duration = Duration::from_millis(150);
/// Work in flight becomes short within this time, or not at all: a single kernel may be long.
const SHORTENS: Duration = Duration::from_secs(10);
/// Time beyond its slices that a round may take.
const ROUND_DELAYS: Duration = Duration::from_secs(2);
/// This many more sleeps of jobs than [`ROUNDS_A_SLEEP`] forgives end turns.
const MAX_SLEEPS: u32 = 3 * ROUNDS_A_SLEEP;
/// A sleep is forgotten after this many rounds.
const ROUNDS_A_SLEEP: u32 = 8;

const DID_NOTHING: &str = "a job did nothing in its turn";
const LEAVES_GAPS: &str = "a job leaves gaps";
const CANNOT_DRAIN: &str = "a client cannot drain";

#[derive(Debug, Clone, Copy, PartialEq)]
enum Stage {
    Rests {
        until: Time,
    },
    /// From and to when work is counted, and how often clients were asked. In the first window of a trial,
    /// nothing is bounded yet.
    Counts {
        from: Time,
        to: Time,
        asked: u32,
        first: bool,
    },
    /// Since when what is in flight is to become short, and when clients were asked last.
    Shortens {
        since: Time,
        asked: Time,
    },
    Separates {
        since: Time,
    },
    /// Since when, and whether a job slept in this round, whose rates say nothing then.
    Turns {
        since: Time,
        slept: bool,
    },
}

impl Default for Stage {
    fn default() -> Self {
        Self::Rests { until: Time::ZERO }
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Trial {
    stage: Stage,
    aim: Aim,
    /// The set, and since when it is the same.
    set: BTreeMap<ClientId, Job>,
    since: Time,
    /// The time that turns may have lost since then.
    lost: Duration,
    failures: u32,
    quiet: u32,
    said: BTreeMap<ClientId, Said>,
    /// The ticket of the last question.
    ticket: u64,
    /// The submissions of each client when it last gave the lock back.
    counts: BTreeMap<ClientId, u64>,
    given_back: Time,
    /// The rates of jobs side by side: in the window in which nothing was bounded, in the last one, and in
    /// the one before.
    native: BTreeMap<Job, f64>,
    beside: BTreeMap<Job, f64>,
    before: BTreeMap<Job, f64>,
    /// The work of jobs in the turns of the current round, and their rates in the last one.
    round: BTreeMap<Job, Counted>,
    alone: BTreeMap<Job, f64>,
    /// Sleeps of jobs that are not forgotten yet, each counted [`ROUNDS_A_SLEEP`] times.
    sleeps: u32,
    /// The last sum, to be shown.
    shown: Option<f64>,
}

impl Trial {
    /// Whether jobs take turns though they fit.
    pub(crate) fn takes_turns(&self) -> bool {
        matches!(self.stage, Stage::Separates { .. } | Stage::Turns { .. })
    }

    /// Whether what is in flight is bounded, though nobody may wait.
    pub(crate) fn is_bounding(&self) -> bool {
        match self.stage {
            Stage::Rests { .. } => false,
            Stage::Counts { asked, first, .. } => !first || asked == 2,
            Stage::Shortens { .. } | Stage::Separates { .. } | Stage::Turns { .. } => true,
        }
    }

    /// Whether turns are what was decided upon, and not a trial alone.
    pub(crate) fn is_decided(&self) -> bool {
        matches!(self.aim, Aim::Turns(_))
    }

    /// Returns the progress side by side, against that by turns, as last measured for this set.
    pub(crate) fn shown(&self) -> Option<f64> {
        self.shown
    }

    /// Returns the length of a turn.
    pub(crate) fn slice(&self) -> Duration {
        progress::slice(self.jobs(), matches!(self.aim, Aim::Trial { glanced: false, .. }))
    }

    /// Returns when there is something to do, if nothing happens before; a GPU with one job has nothing to
    /// do.
    pub(crate) fn rests_until(&self) -> Option<Time> {
        match self.stage {
            Stage::Rests { until } => Some(until),
            _ => None,
        }
    }

    /// Returns the clients of the set.
    pub(crate) fn clients(&self) -> impl Iterator<Item = ClientId> {
        self.set.keys().copied()
    }

    /// Notes how many submissions of a client are complete, in answer to the question with this ticket.
    /// Returns whether that was waited for.
    pub(crate) fn completed(&mut self, client: ClientId, ticket: u64, submissions: u64, now: Time) -> bool {
        let is_last = match self.stage {
            Stage::Counts { asked: 1, .. } => false,
            Stage::Counts { asked: 2, .. } | Stage::Shortens { .. } => true,
            _ => return false,
        };
        if ticket != self.ticket || !self.set.contains_key(&client) {
            return false;
        }
        let said = self.said.entry(client).or_default();
        *(if is_last { &mut said.last } else { &mut said.first }) = Some((submissions, now));
        true
    }

    /// Counts the turn of a client that has given the lock back: all that it has submitted is complete, and
    /// `submissions` counts it.
    pub(crate) fn given_back(&mut self, client: ClientId, submissions: u64, now: Time) {
        // Others than the set may use the GPU as well; side by side, the answers of clients count.
        let Some(&job) = self.set.get(&client).filter(|_| self.takes_turns()) else { return };
        let before = self.counts.insert(client, submissions);
        let Stage::Turns { .. } = self.stage else { return };
        let turn = self.round.entry(job).or_default();
        turn.submissions += before.map_or(0, |before| submissions.saturating_sub(before));
        turn.took += now.saturating_sub(self.given_back);
        self.given_back = now;
    }

    /// Counts a sleep of a client that has nothing to do.
    pub(crate) fn fall_asleep(&mut self, client: ClientId) {
        // Others than the set may use the GPU as well.
        let Some(&job) = self.set.get(&client) else { return };
        let counts = match &mut self.stage {
            Stage::Turns { slept, .. } => {
                *slept = true;
                true
            }
            Stage::Shortens { .. } => self.native.get(&job).is_some_and(|rate| *rate > 0.0),
            _ => false,
        };
        self.sleeps += if counts { ROUNDS_A_SLEEP } else { 0 };
    }

    /// Goes on with the trial.
    pub(crate) fn go_on(&mut self, sight: Sight<'_>) -> Todo {
        let mut todo = Todo::default();
        // A step that changes the stage is followed by another one; more than a few do not follow each other.
        for _ in 0..4 {
            let stage = self.stage;
            self.step(sight, &mut todo);
            if self.stage == stage {
                break;
            }
        }
        todo.wake = self.rests_until().or(todo.wake);
        todo
    }

    fn step(&mut self, sight: Sight<'_>, todo: &mut Todo) {
        let now = sight.now;
        let Some(set) = sight.set else {
            if matches!(self.stage, Stage::Rests { until } if until <= now) {
                self.stage = Stage::Rests { until: now + progress::QUIET };
            }
            let why = if sight.cannot_drain { CANNOT_DRAIN } else { "they are not to be measured" };
            return self.end(now, why, todo);
        };
        if let Stage::Rests { until } = self.stage {
            if now >= until {
                self.consider(set, now);
            }
            return;
        }
        if sight.is_gone || !set.keys().all(|client| self.set.contains_key(client)) {
            self.end(now, "a job has come or gone", todo);
            // It is another set, and tried as soon as one may be.
            return self.rest(now);
        }
        if matches!(self.stage, Stage::Turns { .. }) && !set.values().all(|job| self.is_measured(*job)) {
            return self.end(now, "another job has work", todo);
        }
        match self.stage {
            Stage::Rests { .. } => {}
            Stage::Counts { from, to, asked: 0, first } => {
                todo.wake = Some(from);
                if now >= from {
                    self.ask(todo);
                    self.stage = Stage::Counts { from: now, to: now + (to - from), asked: 1, first };
                }
            }
            Stage::Counts { from, to, asked: 1, first } => match self.answered(|said| said.first) {
                None => self.wait_for_answers(from, now, todo),
                Some(answered) => {
                    // Work in flight delays the answers at the other end as well, so clients are asked
                    // earlier.
                    let queue = if first { answered.saturating_sub(from) } else { Duration::ZERO };
                    let to = to.saturating_sub(queue);
                    todo.wake = Some(to);
                    if now >= to {
                        self.ask(todo);
                        self.stage = Stage::Counts { from, to: now, asked: 2, first };
                    }
                }
            },
            Stage::Counts { to, .. } => match self.answered(|said| said.last) {
                None => self.wait_for_answers(to, now, todo),
                Some(_) => self.finish_count(now, todo),
            },
            Stage::Shortens { since, asked } => self.shorten(since, asked, now, todo),
            Stage::Separates { since } => {
                todo.wake = Some(since + SEPARATES);
                if sight.is_free {
                    todo.begin = true;
                    self.given_back = now;
                    self.begin_round(now);
                } else if now >= since + SEPARATES {
                    self.end(now, "their work does not come to an end", todo);
                }
            }
            Stage::Turns { since, slept } => self.take_round(since, slept, now, todo),
        }
    }

    fn ask(&mut self, todo: &mut Todo) {
        self.ticket += 1;
        todo.ask = Some(self.ticket);
    }

    /// Returns when the last client answered, if all have.
    fn answered(&self, which: impl Fn(&Said) -> Option<(u64, Time)>) -> Option<Time> {
        let answer = |client| self.said.get(client).and_then(&which).map(|(_, at)| at);
        self.set.keys().map(answer).try_fold(Time::ZERO, |latest, at| at.map(|at| at.max(latest)))
    }

    fn wait_for_answers(&mut self, asked: Time, now: Time, todo: &mut Todo) {
        todo.wake = Some(asked + ANSWERS);
        if now >= asked + ANSWERS {
            self.end(now, "a client does not say when its work is complete", todo);
        }
    }

    /// Whether a job did something in the last window.
    fn is_measured(&self, job: Job) -> bool {
        self.beside.get(&job).is_some_and(|rate| *rate > 0.0)
    }

    /// Returns the number of jobs that are measured.
    fn jobs(&self) -> usize {
        self.beside.values().filter(|rate| **rate > 0.0).count()
    }

    /// Begins a trial of a set with a count, as soon as the set may be tried.
    fn consider(&mut self, set: &BTreeMap<ClientId, Job>, now: Time) {
        if *set != self.set {
            *self = Self { set: set.clone(), since: now, ticket: self.ticket, ..Self::default() };
        }
        let jobs = set.values().collect::<BTreeSet<_>>().len();
        let cost = self.lost + progress::first_round_costs(jobs);
        let begins = (self.since + progress::pays_for(cost))
            .saturating_sub(progress::FIRST_WINDOW + progress::SHORT_WINDOW);
        if now < begins {
            self.stage = Stage::Rests { until: begins };
        } else {
            self.count_for(Duration::ZERO, progress::FIRST_WINDOW, true, now);
        }
    }

    fn count_for(&mut self, after: Duration, window: Duration, first: bool, now: Time) {
        self.said.clear();
        self.before = std::mem::take(&mut self.beside);
        self.stage = Stage::Counts { from: now + after, to: now + after + window, asked: 0, first };
    }

    /// Ends a window side by side, of which it is known what it got done, and goes on to what follows from
    /// that.
    fn finish_count(&mut self, now: Time, todo: &mut Todo) {
        for (client, said) in &self.said {
            if let (Some(counted), Some(&job)) = (said.counted(), self.set.get(client)) {
                *self.beside.entry(job).or_default() += counted.rate();
            }
        }
        if self.jobs() < 2 {
            self.quiet += 1;
            return self.rest(now + progress::quiet(self.quiet));
        }
        self.quiet = 0;
        if self.alone.is_empty() {
            self.sleeps = 0;
            self.native.clone_from(&self.beside);
            self.said.clear();
            self.ask(todo);
            self.stage = Stage::Shortens { since: now, asked: now };
            return;
        }
        // The round in which a check ends is still to come.
        if self.is_decided() {
            return self.separate(now, todo);
        }
        let mean = |(job, &beside): (&Job, &f64)| {
            self.before.get(job).map_or(beside, |before| f64::midpoint(beside, *before))
        };
        let Some(sum) = self.progress(mean) else { return self.end(now, DID_NOTHING, todo) };
        self.shown = Some(sum);
        match self.finding_with(sum) {
            Finding::SideBySide => return self.stay(now, sum, todo),
            Finding::Unknown => {}
            // Side by side without bounds they get as much done: bounds cost what turns seem to gain.
            Finding::Turns
                if self.progress(|(job, _)| self.native_rate(*job)).is_none_or(|sum| sum >= 1.0) =>
            {
                return self.stay(now, sum, todo);
            }
            Finding::Turns => self.decide(now, todo),
        }
        self.separate(now, todo);
    }

    /// Returns the finding of the rounds of a trial, with one more.
    fn finding_with(&mut self, sum: f64) -> Finding {
        match &mut self.aim {
            Aim::Trial { sums, .. } => {
                sums.push(sum);
                progress::finding(sums)
            }
            Aim::Turns(_) => Finding::Turns,
        }
    }

    /// Waits before the first round until what is in flight is short. It shows meanwhile whether jobs sleep.
    fn shorten(&mut self, since: Time, asked: Time, now: Time, todo: &mut Todo) {
        if self.sleeps > 0 {
            return self.end(now, LEAVES_GAPS, todo);
        }
        let Some(answered) = self.answered(|said| said.last) else {
            return self.wait_for_answers(asked, now, todo);
        };
        if answered > asked + SHORT_FLIGHT && now >= since + SHORTENS {
            self.end(now, "their work in flight does not become short", todo);
        } else if answered > asked + SHORT_FLIGHT {
            self.said.clear();
            self.ask(todo);
            self.stage = Stage::Shortens { since, asked: now };
        } else if now < since + progress::SHORT_WINDOW {
            todo.wake = Some(since + progress::SHORT_WINDOW);
        } else {
            self.separate(now, todo);
        }
    }

    fn native_rate(&self, job: Job) -> f64 {
        self.native.get(&job).copied().unwrap_or_default()
    }

    /// Returns the progress of the jobs that are measured, by their rates side by side.
    fn progress(&self, beside: impl Fn((&Job, &f64)) -> f64) -> Option<f64> {
        let measured = self.beside.iter().filter(|(_, rate)| **rate > 0.0);
        progress::progress(measured.map(|(job, rate)| (beside((job, rate)), self.rate_alone(*job))))
    }

    fn rate_alone(&self, job: Job) -> f64 {
        self.alone.get(&job).copied().unwrap_or_default()
    }

    fn separate(&mut self, now: Time, todo: &mut Todo) {
        self.counts.clear();
        self.stage = Stage::Separates { since: now };
        todo.separate = true;
        todo.wake = Some(now + SEPARATES);
    }

    /// Decides upon turns, for which all rounds of the trial speak, each with the windows before and after
    /// it.
    fn decide(&mut self, now: Time, todo: &mut Todo) {
        self.failures = 0;
        self.sleeps = 0;
        if let Aim::Trial { sums, .. } =
            std::mem::replace(&mut self.aim, Aim::Turns(Checks::after(now, false)))
        {
            let sums = sums.iter().map(|sum| format!("{sum:.3}")).collect::<Vec<_>>().join(", ");
            todo.note = Some(format!(
                "{} jobs that fit take turns: side by side they do {sums} of what they do by turns",
                self.jobs()
            ));
        }
    }

    /// Checks by a window side by side, and the round after it, whether turns are still right. If they are
    /// not, they have not been `since`.
    fn check(&mut self, doubted: bool, since: Time, now: Time, todo: &mut Todo) {
        let Some(sum) = self.progress(|(_, beside)| *beside) else {
            return self.end(now, DID_NOTHING, todo);
        };
        self.shown = Some(sum);
        self.lost += progress::loss(sum, now.saturating_sub(since));
        let finding = progress::still(sum, doubted);
        self.aim = Aim::Turns(Checks::after(now, finding == Finding::Unknown));
        if finding == Finding::SideBySide {
            self.end(now, "they get as much done so", todo);
        }
    }

    fn begin_round(&mut self, now: Time) {
        self.round.clear();
        self.stage = Stage::Turns { since: now, slept: false };
    }

    fn take_round(&mut self, since: Time, slept: bool, now: Time, todo: &mut Todo) {
        if self.sleeps > if self.is_decided() { MAX_SLEEPS } else { 0 } {
            return self.end(now, LEAVES_GAPS, todo);
        }
        let had_turn = |job: &Job| self.round.get(job).is_some_and(|turn| !turn.took.is_zero());
        if !self.beside.iter().filter(|(_, rate)| **rate > 0.0).all(|(job, _)| had_turn(job)) {
            let slices = self.slice() * saturate_u32(self.jobs());
            let late = since + slices * 3 + ROUND_DELAYS;
            todo.wake = Some(late);
            if now >= late {
                self.end(now, "a job does not come for its turn", todo);
            }
            return;
        }
        self.sleeps = self.sleeps.saturating_sub(1);
        if !slept {
            let round = std::mem::take(&mut self.round);
            self.alone = round.into_iter().map(|(job, turn)| (job, turn.rate())).collect();
        }
        let Aim::Turns(checks) = &mut self.aim else {
            return self.finish_round(now.saturating_sub(since), now, todo);
        };
        let mut other = checks.compare_work(&self.alone);
        if !other {
            checks.same_until = now;
        }
        if checks.under_way && !slept {
            let since = if other { checks.same_until } else { checks.ended };
            let doubted = checks.doubted;
            self.check(doubted, since, now, todo);
            other = false;
        }
        // A check may have ended them.
        let Aim::Turns(checks) = &mut self.aim else { return };
        if now >= checks.next || other && now >= checks.ended + progress::CHECK_SOON {
            checks.under_way = true;
            self.count_for(progress::MIXES, progress::WINDOW, false, now);
        } else {
            self.begin_round(now);
        }
    }

    /// Ends a complete round of the trial.
    fn finish_round(&mut self, took: Duration, now: Time, todo: &mut Todo) {
        let Some(sum) = self.progress(|(_, beside)| *beside) else {
            return self.end(now, DID_NOTHING, todo);
        };
        self.shown = Some(sum);
        self.lost += progress::loss(sum, took);
        let Aim::Trial { sums, glanced } = &mut self.aim else {
            debug_assert!(false, "rounds of turns that are decided upon are no trial");
            return;
        };
        if sum > progress::CLEARLY && !progress::is_outlier(sums) {
            self.stay(now, sum, todo);
        } else if !std::mem::replace(glanced, true) {
            self.begin_round(now);
        } else {
            self.count_for(progress::MIXES, progress::WINDOW, false, now);
        }
    }

    fn rest(&mut self, until: Time) {
        self.alone.clear();
        self.aim = Aim::default();
        self.stage = Stage::Rests { until };
    }

    /// Ends a trial that does not speak for turns: jobs stay side by side.
    fn stay(&mut self, now: Time, sum: f64, todo: &mut Todo) {
        let jobs = self.jobs();
        todo.note = Some(format!(
            "{jobs} jobs that fit stay side by side, where they do {sum:.3} of what they do by turns"
        ));
        self.rest_after_failure(now);
    }

    fn rest_after_failure(&mut self, now: Time) {
        self.failures += 1;
        self.rest(now + progress::retry(self.failures));
    }

    /// Ends the trial, or turns: jobs run side by side.
    fn end(&mut self, now: Time, why: &str, todo: &mut Todo) {
        let lost = match self.stage {
            Stage::Rests { .. } => return,
            // Nobody knows how much a round lost that was not complete, nor how much turns lost to gaps.
            // In a drain that was given up, a program may have waited for itself.
            Stage::Turns { since, .. } | Stage::Separates { since } => now.saturating_sub(since),
            Stage::Counts { .. } | Stage::Shortens { .. } => Duration::ZERO,
        };
        self.lost += lost;
        *todo = Todo::default();
        // A drain that was given up says nothing of the jobs: it does not put the next trial off further and
        // further.
        let failures = self.failures;
        if self.is_decided() {
            todo.note = Some(format!("jobs that fit run side by side again: {why}"));
        } else if self.is_bounding() {
            todo.note = Some(format!("a trial of jobs that fit side by side is over: {why}"));
        }
        self.rest_after_failure(now);
        if why == CANNOT_DRAIN {
            self.failures = failures;
            self.rest(now + progress::RETRY);
        }
    }
}
