//! How long a program pauses in its work, and when it counts as idle.
//!
//! A program that waits for each of its steps pauses between them. So it counts as idle only when it has submitted nothing for
//! [`IDLE_AFTER`] since its work was complete. A program whose last `SPELLS` spells of work were short, and had no long pauses, is known
//! better. It counts as idle after twice the longest of these pauses, at least `LEARNED_IDLE_AFTER`: the GPU stands still until
//! then. All this is about times at which another client waits.

use std::time::Duration;

use nvshare_proto::pace::IDLE_AFTER;

/// The same of a program that is known, at least. Most such work is requests, or cells of a notebook.
const LEARNED_IDLE_AFTER: Duration = Duration::from_millis(4);
/// A spell of work that is longer than this, the waiting in it included, tells nothing: the program is not known any more.
const SHORT_SPELL: Duration = Duration::from_millis(500);
/// How many spells of a program tell when it is idle.
const SPELLS: usize = 4;

/// The pauses of a program in its last spells of work. A spell lasts from the grant behind one idleness to the next idleness.
#[derive(Debug, Clone)]
pub struct Pauses {
    /// The longest of each of the last spells, the oldest first.
    longest: [Duration; SPELLS],
    /// The longest of the present spell.
    present: Duration,
    spell_began: Option<Duration>,
    idle_since: Option<Duration>,
}

impl Default for Pauses {
    /// Nothing is known of the program.
    fn default() -> Self {
        Self { longest: [IDLE_AFTER; SPELLS], present: Duration::ZERO, spell_began: None, idle_since: None }
    }
}

impl Pauses {
    /// Returns how long a pause lasts after which the program counts as idle.
    #[must_use]
    pub fn idle_after(&self) -> Duration {
        let longest = self.longest.into_iter().fold(self.present, Duration::max);
        longest.saturating_mul(2).clamp(LEARNED_IDLE_AFTER, IDLE_AFTER)
    }

    /// The gate opens for a spell, or for the rest of one.
    pub fn begin(&mut self, now: Duration) {
        self.spell_began.get_or_insert(now);
    }

    /// The program has paused for this long, and works again.
    pub fn note(&mut self, pause: Duration) {
        self.present = self.present.max(pause);
    }

    /// The spell is over: the program has become idle.
    pub fn end(&mut self, now: Duration) {
        let began = self.spell_began.take();
        let present = std::mem::take(&mut self.present);
        if began.is_some_and(|began| now.saturating_sub(began) <= SHORT_SPELL) {
            self.longest.rotate_left(1);
            self.longest[SPELLS - 1] = present;
        } else {
            self.longest = Self::default().longest;
        }
        self.idle_since = Some(now);
    }

    /// Work waits behind an idleness. If it comes soon, that was a pause.
    pub fn resume(&mut self, now: Duration) {
        let since = self.idle_since.take();
        if since.is_some_and(|since| now.saturating_sub(since) < IDLE_AFTER) {
            self.longest[SPELLS - 1] = IDLE_AFTER;
        }
    }
}
