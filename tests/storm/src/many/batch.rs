//! The seeds of one process, one after the other: a finding at one of them is no reason to leave out the later ones.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::RunOptions;
use crate::plan;

use super::moods::{self, Mood};
use super::trial::{self, Finding, Running};
use super::world::{self, World};
use super::{Found, INTERRUPTED, Storm, TIMES_NATIVE, lock};

/// The end of a process with a finding.
#[derive(Debug)]
enum Ended {
    /// A program ended it, whose seed is named: later programs did not run.
    At(u64, Finding),
    /// The process ended by itself, and there was a finding.
    Well(Finding),
}

impl Storm<'_> {
    /// Runs a batch's programs both ways. Each finding ends a process; another process runs the rest of the batch.
    pub(super) fn batch(&self, mine: &World, whole: &RunOptions, job: usize) {
        for one in whole.each() {
            let plan = plan::compose(&one.recipe(self.all.known.clone()));
            lock(&self.all.coverage).add(&plan.features);
        }
        if self.world.parts.simulator.is_some() {
            lock(&self.all.coverage).add(&moods::feature(whole.seed));
        }
        let patience = Duration::from_secs(self.all.options.patience);
        let mut clean = vec![(whole.clone(), patience)];
        if !self.all.options.skip_native {
            clean.clear();
            self.parts_of(whole, true, |part| {
                let log = mine.dir.join("native.log");
                let nobody = Running::default();
                let command = trial::command(mine, part, &self.all.caps);
                let ended = trial::trial(command, part, &log, patience, &nobody, None);
                let good = match &ended {
                    Ok(took) => {
                        let each = *took / part.count as u32;
                        lock(&self.all.native_ms).extend((0..part.count).map(|_| each.as_millis() as u64));
                        Some((part.clone(), patience.max(each * TIMES_NATIVE)))
                    }
                    // The programs before that one are clean natively, and not known to be slow.
                    Err(finding) => {
                        part.before(finding.seed.unwrap_or(part.seed)).map(|good| (good, patience))
                    }
                };
                clean.extend(good);
                ended.map(|_| ()).map_err(|finding| Ended::At(finding.seed.unwrap_or(part.seed), finding))
            });
        }
        if self.all.options.native {
            return;
        }
        for (part, patience) in clean {
            self.parts_of(&part, false, |part| self.in_turns(part, patience, job));
        }
    }

    /// Runs programs, and after each finding the rest of them.
    fn parts_of(
        &self,
        programs: &RunOptions,
        native: bool,
        mut run: impl FnMut(&RunOptions) -> Result<(), Ended>,
    ) {
        let mut left = Some(programs.clone());
        let mut is_first = true;
        while let Some(part) = left.take() {
            let is_over = !is_first && (self.is_late() || self.all.stop.load(Ordering::SeqCst));
            if is_over || INTERRUPTED.load(Ordering::SeqCst) {
                return;
            }
            is_first = false;
            let (seed, finding) = match run(&part) {
                Ok(()) => {
                    self.tried(native, part.count);
                    return;
                }
                Err(Ended::Well(finding)) => {
                    self.tried(native, part.count);
                    (part.seed, finding)
                }
                Err(Ended::At(seed, finding)) => {
                    self.tried(native, seed - part.seed + 1);
                    left = part.behind(seed);
                    (seed, finding)
                }
            };
            let Some(options) = part.each().find(|one| one.seed == seed) else { return };
            self.note(options, finding, native);
        }
    }

    fn tried(&self, native: bool, seeds: u64) {
        if native || self.all.options.skip_native {
            self.all.tried.fetch_add(seeds, Ordering::SeqCst);
        }
    }

    fn note(&self, options: RunOptions, finding: Finding, native: bool) {
        if INTERRUPTED.load(Ordering::SeqCst) {
            return;
        }
        if finding.is_loss() {
            self.all.lost.fetch_add(1, Ordering::SeqCst);
            return;
        }
        if self.all.options.chaos && !native && finding.is_refused_alone() {
            self.all.refused_alone.fetch_add(1, Ordering::SeqCst);
            return;
        }
        if !native && self.world.has_lost_card() && finding.is_refused_beside_others() {
            self.all.refused_beside_lost.fetch_add(1, Ordering::SeqCst);
            return;
        }
        let found = Found { options, finding, native };
        println!("{found}");
        lock(&self.all.found).push(found);
        if !native && !self.all.options.keep_going {
            self.all.stop.store(true, Ordering::SeqCst);
        }
    }

    fn in_turns(&self, part: &RunOptions, patience: Duration, job: usize) -> Result<(), Ended> {
        let log = self.world.dir.join(format!("seed-{job}.log"));
        let mut command = trial::under(&self.world, part, &self.all.caps, &self.all.options.log);
        if !self.all.options.chaos && moods::of(part.seed).is_some_and(Mood::is_slow) {
            command.arg("--populated");
        }
        let patience = patience * trial::mood(&self.world, part).map_or(1, Mood::patience);
        let ended = trial::trial(command, part, &log, patience, &self.running, Some(&self.world));
        let logged = std::fs::read_to_string(&log).unwrap_or_default();
        self.ended_alone.fetch_add(world::said_alone(&logged), Ordering::SeqCst);
        let took = ended.map_err(|finding| Ended::At(finding.seed.unwrap_or(part.seed), finding))?;
        let each = took / part.count as u32;
        lock(&self.all.shared_ms).extend((0..part.count).map(|_| each.as_millis() as u64));
        self.nothing_moved_by_itself(part.seed).map_err(Ended::Well)?;
        if self.world.scheduler_died() {
            let log = std::fs::read_to_string(self.world.dir.join("scheduler.log")).unwrap_or_default();
            let text = trial::tail(&log, 25);
            return Err(Ended::Well(Finding { kind: "the scheduler ended".to_owned(), text, seed: None }));
        }
        Ok(())
    }
}
