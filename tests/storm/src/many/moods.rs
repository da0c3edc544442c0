//! Moods of the simulated driver: some seeds have one that is older, slower, or short of memory, or that loses its card.

use std::collections::BTreeMap;

/// A mood of the driver: one seed in eight has it.
#[derive(Debug)]
pub(crate) struct Mood {
    /// The remainder, divided by eight, of the seeds that have the mood.
    which: u64,
    pub(crate) name: &'static str,
    pub(crate) setting: (&'static str, &'static str),
}

const MOODS: [Mood; 4] = [
    // Now and then a context cannot be looked at, which says nothing about its work.
    Mood { which: 3, name: "events of contexts that fail", setting: ("NVSIM_CTX_RECORD_FAILS", "3") },
    // Longer than a client with a new grant waits for an allocation before it restores; natively nothing waits for it.
    Mood { which: 6, name: "slow allocations", setting: ("NVSIM_SLOW_ALLOCATIONS", "8:700") },
    Mood { which: 1, name: "driver before 12.5", setting: ("NVSIM_CTX_RECORD", "0") },
    // The card is lost to the program at a random moment: under nvshare it ends with the driver's error, and does not hang. The value is a
    // file of the trial.
    Mood { which: 5, name: "card lost", setting: ("NVSIM_LOST", "") },
];

impl Mood {
    /// Whether an allocation may take longer than the grant of the lock.
    pub(crate) fn is_slow(&self) -> bool {
        self.setting.0 == "NVSIM_SLOW_ALLOCATIONS"
    }

    /// Whether the card is lost.
    pub(crate) fn is_loss(&self) -> bool {
        self.setting.0 == "NVSIM_LOST"
    }

    /// Whether the driver has the mood natively too.
    pub(crate) fn is_native(&self) -> bool {
        !self.is_slow() && !self.is_loss()
    }

    /// How much longer than with other drivers nothing may go on: with `NVSHARE_MEMORY=swap` a hand-over makes allocations as well, and
    /// a program waits for those of all that are ahead of it.
    pub(crate) fn patience(&self) -> u32 {
        if self.is_slow() { 4 } else { 1 }
    }
}

/// The mood for a seed; `None`: the driver behaves as on a card.
pub(crate) fn of(seed: u64) -> Option<&'static Mood> {
    MOODS.iter().find(|mood| mood.which == seed % 8)
}

/// The mood as a feature, to be counted.
pub(crate) fn feature(seed: u64) -> BTreeMap<String, u64> {
    of(seed).into_iter().map(|mood| (mood.name.to_owned(), 1)).collect()
}
