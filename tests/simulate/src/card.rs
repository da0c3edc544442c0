//! A GPU that programs share: its time, and its link to the host.

use std::time::Duration;

use nvshare_core::Time;
use nvshare_proto::MemoryMode;

/// Work that programs of several processes do together, if each fills the card, compared with one alone: the driver's
/// own time slicing costs 6 % (measured on an H200).
const SLICED: f64 = 0.94;

/// Rates of memory moves over the link, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Link {
    pub(crate) evict: f64,
    pub(crate) restore: f64,
    /// For libraries that copy memory themselves, in pieces: the rate of both directions at once, in sum. None: the driver moves
    /// it, one way at a time.
    pub(crate) both: Option<f64>,
    /// Memory that has not changed since it came is not copied when it leaves.
    pub(crate) by_content: bool,
}

const GIB: f64 = (1u64 << 30) as f64;

impl Link {
    /// Managed memory in bulk, as measured on an H200.
    pub(crate) const MANAGED: Self =
        Self { evict: 17.0 * GIB, restore: 46.0 * GIB, both: None, by_content: false };
    /// Explicit copies, as measured: the next client restores while the last one evicts.
    pub(crate) const SWAP: Self =
        Self { evict: 50.8 * GIB, restore: 51.0 * GIB, both: Some(77.0 * GIB), by_content: true };
    /// The same where all that leaves is copied (`NVSHARE_CONTENT=off`).
    pub(crate) const COPIES: Self = Self { by_content: false, ..Self::SWAP };
    /// Page faults.
    pub(crate) const FAULTS: Self =
        Self { evict: 16.0 * GIB, restore: 8.0 * GIB, both: None, by_content: false };
}

impl Link {
    /// How the clients' libraries move memory over such a link.
    pub(crate) fn memory(&self) -> MemoryMode {
        if self.both.is_some() { MemoryMode::Swap } else { MemoryMode::Managed }
    }
}

/// Unchanged memory leaves at this rate, in bytes per second: it is looked at and unmapped (measured on an H200: 8.6 GiB in 32
/// ms).
const UNCHANGED: f64 = 268.0 * GIB;

/// One GPU.
#[derive(Debug)]
pub(crate) struct Card {
    pub(crate) link: Link,
    /// Clients whose work is on the card now.
    pub(crate) active: Vec<usize>,
    /// Clients that have work for the card, in whatever state.
    wanted_by: usize,
    wanted_since: Time,
    /// Time in which any client had work for the card.
    pub(crate) wanted: Duration,
    busy_until: [Time; 2],
}

impl Card {
    pub(crate) fn new(link: Link) -> Self {
        Self {
            link,
            active: Vec::new(),
            wanted_by: 0,
            wanted_since: Time::ZERO,
            wanted: Duration::ZERO,
            busy_until: [Time::ZERO; 2],
        }
    }

    /// The speed of each active client, compared with one alone.
    pub(crate) fn rate(&self) -> f64 {
        match self.active.len() {
            0 | 1 => 1.0,
            several => SLICED / several as f64,
        }
    }

    pub(crate) fn wanted_by_one_more(&mut self, now: Time) {
        if self.wanted_by == 0 {
            self.wanted_since = now;
        }
        self.wanted_by += 1;
    }

    pub(crate) fn wanted_by_one_less(&mut self, now: Time) {
        self.wanted_by -= 1;
        if self.wanted_by == 0 {
            self.wanted += now - self.wanted_since;
        }
    }

    /// Ends the simulation at this time.
    pub(crate) fn close(&mut self, now: Time) {
        if self.wanted_by > 0 {
            self.wanted += now - self.wanted_since;
            self.wanted_since = now;
        }
    }

    /// The time at which `bytes` are on the host.
    pub(crate) fn evict(&mut self, bytes: u64, now: Time) -> Time {
        self.transfer(0, bytes as f64 / self.link.evict, now)
    }

    /// The time at which `bytes` are on the card.
    pub(crate) fn restore(&mut self, bytes: u64, now: Time) -> Time {
        self.transfer(0, bytes as f64 / self.link.restore, now)
    }

    /// The time at which a piece has left, of which `copied` bytes were copied and `unchanged` were not.
    pub(crate) fn piece_leaves(&mut self, copied: f64, unchanged: f64, now: Time) -> Time {
        let seconds = copied / self.rate_beside(1, self.link.evict, now) + unchanged / UNCHANGED;
        self.transfer(0, seconds, now)
    }

    /// The time at which a piece of `bytes` bytes is on the card.
    pub(crate) fn piece_comes(&mut self, bytes: u64, now: Time) -> Time {
        self.transfer(1, bytes as f64 / self.rate_beside(0, self.link.restore, now), now)
    }

    /// The rate of one direction beside what the other one does.
    fn rate_beside(&self, other: usize, alone: f64, now: Time) -> f64 {
        let is_busy = self.busy_until.get(other).is_some_and(|&until| until > now);
        self.link.both.filter(|_| is_busy).map_or(alone, |both| alone.min(both / 2.0))
    }

    fn transfer(&mut self, direction: usize, seconds: f64, now: Time) -> Time {
        let Some(busy) = self.busy_until.get_mut(direction) else { return now };
        *busy = now.max(*busy) + Duration::from_secs_f64(seconds);
        *busy
    }
}
