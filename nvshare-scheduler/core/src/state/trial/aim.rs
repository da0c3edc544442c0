//! The aim of a trial's rounds: turns are tried, or they are taken and checked now and then.

use std::collections::BTreeMap;

use crate::Time;
use crate::policy::progress;
use crate::state::client::Job;

/// The aim of rounds of turns.
#[derive(Debug)]
pub(super) enum Aim {
    /// They are tried.
    Trial {
        /// The first round, which is short, is complete.
        glanced: bool,
        /// The progress that each of the rounds shows.
        sums: Vec<f64>,
    },
    /// They are taken until a check says otherwise.
    Turns(Checks),
}

impl Default for Aim {
    fn default() -> Self {
        Self::Trial { glanced: false, sums: Vec::new() }
    }
}

/// When turns that were decided upon are checked.
#[derive(Debug)]
pub(super) struct Checks {
    /// A check is under way.
    pub(super) under_way: bool,
    /// When the last one ended, and when the next one begins.
    pub(super) ended: Time,
    pub(super) next: Time,
    /// The last one spoke against turns, and is repeated.
    pub(super) doubted: bool,
    /// The rates of jobs in the first round after the last one.
    usual: BTreeMap<Job, f64>,
    /// The last round in which jobs launched about as much as that.
    pub(super) same_until: Time,
}

impl Checks {
    /// Returns the next checks, after a check has ended or turns were decided upon.
    pub(super) fn after(now: Time, doubted: bool) -> Self {
        let next = now + if doubted { progress::CHECK_SOON } else { progress::CHECK_EVERY };
        Self { under_way: false, ended: now, next, doubted, usual: BTreeMap::new(), same_until: now }
    }

    /// Compares the rates of jobs with those at the last check, for which the first rates behind it stand.
    /// Returns whether jobs launch more, or less, in their turns.
    pub(super) fn compare_work(&mut self, alone: &BTreeMap<Job, f64>) -> bool {
        if self.usual.is_empty() {
            self.usual.clone_from(alone);
        }
        let other = |(job, rate): (&Job, &f64)| {
            let usual = self.usual.get(job).copied().unwrap_or_default();
            (rate - usual).abs() > usual * progress::OTHER_WORK
        };
        alone.iter().any(other)
    }
}
