//! Which clients are interactive: a client whose work between its sleeps is short, as the scheduler measured
//! it.
//!
//! A spell of work is the time with an open gate between two sleeps, turns that were interrupted included. A
//! sleep is the time in which the client neither runs nor asks for the lock. Both count only while another
//! client waits, since a client does not say that it is idle before. A client that asks again at once has not
//! slept.

use std::collections::VecDeque;
use std::time::Duration;

use nvshare_proto::pace::IDLE_AFTER;

/// Work of an interactive client between two sleeps is no longer than this.
pub(crate) const MAX_SHORT_WORK: Duration = Duration::from_millis(500);
/// Less than this is no sleep.
pub(crate) const MIN_SLEEP: Duration = Duration::from_millis(20);
/// A client is expected if it comes again within this time.
const EXPECTED: Duration = Duration::from_secs(10);
/// How many spells of a client are remembered, each with the sleep behind it.
const MAX_SPELLS: usize = 4;
/// How many spells have to be seen before a client can count as interactive. One spell is too few to tell.
const MIN_SPELLS: usize = 2;

/// Work between two sleeps, and the sleep behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Spell {
    worked: Duration,
    slept: Duration,
}

/// The last spells of work of a client, and its sleeps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Rhythm {
    work: Duration,
    asleep_since: Option<Duration>,
    /// The last ones, the oldest first.
    spells: VecDeque<Spell>,
}

impl Rhythm {
    /// Counts time for which the client has run.
    pub(crate) fn add_work(&mut self, took: Duration) {
        self.work = self.work.saturating_add(took);
    }

    /// Begins a sleep: from now on the client neither runs nor asks for the lock.
    pub(crate) fn fall_asleep(&mut self, now: Duration) {
        self.asleep_since = Some(now);
    }

    /// Ends the sleep when the client asks for the lock, or runs.
    pub(crate) fn wake(&mut self, now: Duration) {
        let slept = self.asleep_since.take().map(|since| now.saturating_sub(since));
        let Some(slept) = slept.filter(|&slept| slept >= MIN_SLEEP) else { return };
        if self.spells.len() == MAX_SPELLS {
            self.spells.pop_front();
        }
        self.spells.push_back(Spell { worked: std::mem::take(&mut self.work), slept });
    }

    /// Forgets the present work when no other client waits: from now on the client does not say when it is
    /// idle.
    pub(crate) fn discard_current_work(&mut self) {
        self.work = Duration::ZERO;
    }

    /// Whether all remembered spells and the present one are short, and the client slept for at least as long
    /// as it worked.
    #[must_use]
    pub(crate) fn is_interactive(&self) -> bool {
        let worked: Duration = self.spells.iter().map(|spell| spell.worked).sum();
        let slept: Duration = self.spells.iter().map(|spell| spell.slept).sum();
        let short =
            self.spells.iter().all(|spell| spell.worked <= MAX_SHORT_WORK) && self.work <= MAX_SHORT_WORK;
        self.spells.len() >= MIN_SPELLS && short && worked <= slept
    }

    /// Returns when the client fell asleep, or `None` if it has not, runs, or asks for the lock.
    #[must_use]
    pub(crate) fn asleep_since(&self) -> Option<Duration> {
        self.asleep_since
    }

    /// Whether the client sleeps, and not for longer than it may be expected to: twice the longest of its
    /// remembered sleeps.
    #[must_use]
    pub(crate) fn may_wake_soon(&self, now: Duration) -> bool {
        let longest = self.spells.iter().map(|spell| spell.slept).max().unwrap_or(Duration::ZERO);
        self.asleep_since.is_some_and(|since| now.saturating_sub(since) <= longest.saturating_mul(2))
    }

    /// Returns the time within which the client asks again, from the beginning of a spell: twice the longest of
    /// its remembered spells, each with its sleep. Nothing, if that is longer than [`EXPECTED`].
    #[must_use]
    pub(crate) fn asks_again_within(&self) -> Duration {
        let longest = self.spells.iter().map(|spell| spell.worked.saturating_add(spell.slept)).max();
        let within = longest.unwrap_or_default().saturating_mul(2);
        if within <= EXPECTED { within } else { Duration::ZERO }
    }

    /// Returns for how long a GPU stood still, at most, until it was known that the present spell was over. A
    /// spell that was shorter than [`IDLE_AFTER`] shows that the library knew the program better.
    #[must_use]
    pub(crate) fn idle_detection(&self) -> Duration {
        self.work.min(IDLE_AFTER)
    }

    /// Returns the same of the remembered spells.
    #[must_use]
    pub(crate) fn usual_idle_detection(&self) -> Duration {
        self.spells.iter().map(|spell| spell.worked).max().unwrap_or(IDLE_AFTER).min(IDLE_AFTER)
    }

    /// Returns how long the client slept before its present spell; nothing if that is not known.
    #[must_use]
    pub(crate) fn last_sleep(&self) -> Duration {
        self.spells.back().map_or(Duration::ZERO, |spell| spell.slept)
    }

    /// Returns for how long an idle client keeps its place: for `usual`, or not at all. It is not at all if
    /// keeping it through the remembered sleeps would have cost more than a hand-over at each. `cost`: the
    /// time of a hand-over, there and back.
    #[must_use]
    pub(crate) fn patience(&self, cost: Duration, usual: Duration) -> Duration {
        let kept = |slept: Duration| if slept <= usual { slept } else { usual.saturating_add(cost) };
        let keeping =
            self.spells.iter().map(|spell| kept(spell.slept)).fold(Duration::ZERO, Duration::saturating_add);
        let leaving = cost.saturating_mul(self.spells.len() as u32);
        if self.spells.len() >= MIN_SPELLS && keeping > leaving { Duration::ZERO } else { usual }
    }
}

#[cfg(test)]
#[path = "rhythm_tests.rs"]
mod tests;
