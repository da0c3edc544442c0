//! A GPU that programs share: its time, and its link to the host.

use std::time::Duration;

use nvshare_core::Time;

/// Work that programs of several processes do together, if each fills the card, compared with one alone: the driver's
/// own time slicing costs 6 % (measured on an H200).
const SLICED: f64 = 0.94;

/// Rates of memory moves over the link, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Link {
    pub(crate) evict: f64,
    pub(crate) restore: f64,
    /// Whether both directions work at the same time, each at its own rate.
    pub(crate) duplex: bool,
}

const GIB: f64 = (1u64 << 30) as f64;

impl Link {
    /// Managed memory in bulk, as measured on an H200.
    pub(crate) const MANAGED: Self = Self { evict: 17.0 * GIB, restore: 46.0 * GIB, duplex: false };
    /// Explicit copies of pinned memory.
    pub(crate) const SWAP: Self = Self { evict: 43.0 * GIB, restore: 43.0 * GIB, duplex: true };
    /// Explicit copies where the next client restores while the last one evicts: a hand-over takes 0.6 of the time.
    pub(crate) const EXCHANGE: Self =
        Self { evict: 43.0 / 0.6 * GIB, restore: 43.0 / 0.6 * GIB, duplex: true };
    /// Page faults.
    pub(crate) const FAULTS: Self = Self { evict: 16.0 * GIB, restore: 8.0 * GIB, duplex: false };
}

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
        self.transfer(usize::from(self.link.duplex), bytes as f64 / self.link.restore, now)
    }

    fn transfer(&mut self, direction: usize, seconds: f64, now: Time) -> Time {
        let Some(busy) = self.busy_until.get_mut(direction) else { return now };
        *busy = now.max(*busy) + Duration::from_secs_f64(seconds);
        *busy
    }
}
