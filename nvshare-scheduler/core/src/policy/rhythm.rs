//! Who is interactive: a client whose work between its sleeps is short, as the scheduler measured it.
//!
//! A spell of work is the time with an open gate between two sleeps, turns that were interrupted included; a sleep is the time
//! in which it neither runs nor asks. Both count only while others wait: nobody says that it is idle before. Who asks again at
//! once has not slept.

use std::time::Duration;

/// Work of an interactive client between two sleeps is no longer than this.
pub const SHORT: Duration = Duration::from_millis(500);
/// Less than this is no sleep.
pub const SHORTEST_SLEEP: Duration = Duration::from_millis(20);
/// So many spells, and the sleeps behind them, are remembered.
const KEPT: usize = 4;
/// After so many spells a client is known.
const KNOWN: usize = 2;

/// The last spells of work of a client, and its sleeps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rhythm {
    work: Duration,
    asleep_since: Option<Duration>,
    /// Each with the sleep behind it; the oldest is overwritten.
    spells: Vec<(Duration, Duration)>,
    oldest: usize,
}

impl Rhythm {
    /// It has run for so long.
    pub fn works(&mut self, took: Duration) {
        self.work = self.work.saturating_add(took);
    }

    /// It neither runs nor asks from now on.
    pub fn falls_asleep(&mut self, now: Duration) {
        self.asleep_since = Some(now);
    }

    /// It asks, or runs.
    pub fn wakes(&mut self, now: Duration) {
        let slept = self.asleep_since.take().map(|since| now.saturating_sub(since));
        let Some(slept) = slept.filter(|&slept| slept >= SHORTEST_SLEEP) else { return };
        let spell = (std::mem::take(&mut self.work), slept);
        match self.spells.get_mut(self.oldest) {
            Some(oldest) => *oldest = spell,
            None => self.spells.push(spell),
        }
        self.oldest = (self.oldest + 1) % KEPT;
    }

    /// Nobody waits: when it is idle is not said from now on.
    pub fn is_not_watched(&mut self) {
        self.work = Duration::ZERO;
    }

    /// Whether each spell of late was short, the present one is, and it slept for longer than it worked.
    #[must_use]
    pub fn is_interactive(&self) -> bool {
        let worked: Duration = self.spells.iter().map(|spell| spell.0).sum();
        let slept: Duration = self.spells.iter().map(|spell| spell.1).sum();
        let short = self.spells.iter().all(|spell| spell.0 <= SHORT) && self.work <= SHORT;
        self.spells.len() >= KNOWN && short && worked <= slept
    }

    /// For how long its place is kept when it is idle: not at all if that would have cost more, each sleep of late counted,
    /// than a hand-over each time; else for `usual`. `cost`: of a hand-over, there and back.
    #[must_use]
    pub fn patience(&self, cost: Duration, usual: Duration) -> Duration {
        let kept = |slept: Duration| if slept <= usual { slept } else { usual.saturating_add(cost) };
        let keeping =
            self.spells.iter().map(|spell| kept(spell.1)).fold(Duration::ZERO, Duration::saturating_add);
        let leaving = cost.saturating_mul(self.spells.len() as u32);
        if self.spells.len() >= KNOWN && keeping > leaving { Duration::ZERO } else { usual }
    }
}

#[cfg(test)]
#[path = "rhythm_tests.rs"]
mod tests;
