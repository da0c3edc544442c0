//! Sleep: a client's process goes off the card, with its contexts and modules, and comes back.
//!
//! ```text
//! No ──▶ Ordered ──▶ Told ──▶ Away ──▶ Wanted ──▶ Waking ──▶ No
//!                                        └──▶ Sent: it registers anew, as another client on another GPU
//! ```
//!
//! An administrator orders it, or the client has [rested](super::rest) for long enough. The client's room is taken, and it is told. It wants to come back when a call
//! of its program waits, or when an administrator says so. It is woken when its turn comes and the card has
//! room for what it had there. Work before it is told ends the order.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use nvshare_proto::GpuUuid;

use crate::Time;
use crate::state::client::ClientId;

/// Where a client stands between the card and its sleep.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Sleep {
    /// The process is on the card, and is to stay.
    #[default]
    No,
    /// The process is to go as soon as nothing of it can be moved any more. `evicted`: it was told to give
    /// back all of its room. `looked`: since then, its GPUs are being measured.
    Ordered { since: Time, evicted: bool, looked: bool },
    /// SLEEP is sent. `wakes`: it is to come back at once, as an administrator said meanwhile.
    Told { since: Time, wakes: bool },
    /// The process is off the card.
    Away,
    /// The process is off the card and is to come back.
    Wanted { since: Time },
    /// MOVE is sent; the process should have registered anew there by `until`. If it has not, it waits here again.
    Sent { to: GpuUuid, until: Time },
    /// WAKE is sent; the process should be back by `until`. `late`: it was not, and others do not wait for it.
    Waking { until: Time, late: bool },
}

impl Sleep {
    pub(crate) fn is_ordered(self) -> bool {
        matches!(self, Self::Ordered { .. })
    }

    /// Whether the process was ordered to go, or its memory has left for that, no earlier than this: a look that was asked for
    /// then may show memory that is not there any more.
    pub(crate) fn is_later_than(self, time: Time) -> bool {
        matches!(self, Self::Ordered { since, .. } if since >= time)
    }

    /// Whether the process is off the card, or on its way back: it gets nothing, and is asked for nothing.
    pub(crate) fn is_off_card(self) -> bool {
        matches!(self, Self::Away | Self::Wanted { .. } | Self::Sent { .. } | Self::Waking { .. })
    }

    /// Whether the process gives nothing back when it is asked.
    pub(crate) fn keeps_still(self) -> bool {
        self.is_off_card() || matches!(self, Self::Told { .. })
    }

    /// Returns when a process that was woken should be back, until it counts as late.
    pub(crate) fn due(self) -> Option<Time> {
        match self {
            Self::Waking { until, late: false } => Some(until),
            _ => None,
        }
    }
}

/// The sleep of a client, as its entry has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sleeper {
    pub(crate) sleep: Sleep,
    /// Bytes that its contexts and modules need on the GPU to come back.
    pub(crate) needs: u64,
}

/// The processes that are off one GPU. It is a part of the GPU's ledger, and follows its entries.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Sleepers {
    /// The bytes that each needs which is off the card and was not sent WAKE.
    asleep: BTreeSet<(u64, ClientId)>,
    /// Those that are to come back and can be expected to, the first to be woken first.
    wanted: BTreeSet<(Time, ClientId)>,
    /// The bytes that each needs which was sent WAKE.
    waking: BTreeMap<ClientId, u64>,
    /// How many of these are not late.
    awaited: usize,
}

impl Sleepers {
    /// Counts a client in. `is_silent`: it is not expected to do anything.
    pub(in crate::state) fn put_in(&mut self, id: ClientId, sleeper: Sleeper, is_silent: bool) {
        match sleeper.sleep {
            Sleep::No | Sleep::Ordered { .. } | Sleep::Told { .. } => return,
            Sleep::Away | Sleep::Sent { .. } => {}
            Sleep::Wanted { since } => {
                if !is_silent {
                    self.wanted.insert((since, id));
                }
            }
            Sleep::Waking { late, .. } => {
                self.waking.insert(id, sleeper.needs);
                self.awaited += usize::from(!late);
                return;
            }
        }
        self.asleep.insert((sleeper.needs, id));
    }

    /// Takes a client out that was counted in like this.
    pub(in crate::state) fn take_out(&mut self, id: ClientId, sleeper: Sleeper) {
        self.asleep.remove(&(sleeper.needs, id));
        match sleeper.sleep {
            Sleep::Wanted { since } => {
                self.wanted.remove(&(since, id));
            }
            Sleep::Waking { late, .. } => {
                self.waking.remove(&id);
                self.awaited -= usize::from(!late);
            }
            _ => {}
        }
    }

    /// Returns the client that is to be woken first.
    pub(crate) fn first(&self) -> Option<ClientId> {
        self.wanted.first().map(|&(_, id)| id)
    }

    /// Returns all that are to be woken, in this order.
    pub(crate) fn wanted(&self) -> impl Iterator<Item = ClientId> + '_ {
        self.wanted.iter().map(|&(_, id)| id)
    }

    /// Returns those for which room is made: all that have waited since `passed_over` or longer, which others may pass, and the first
    /// behind them.
    pub(crate) fn next(&self, passed_over: Time) -> impl Iterator<Item = ClientId> + '_ {
        let passed = self.wanted.range(..=(passed_over, ClientId::MAX));
        passed.chain(self.first_behind(passed_over)).map(|&(_, id)| id)
    }

    /// Returns the first of those that wait since a time after `passed_over`, and that time.
    pub(crate) fn first_behind(&self, passed_over: Time) -> Option<&(Time, ClientId)> {
        let last = (passed_over, ClientId::MAX);
        self.wanted.range((Bound::Excluded(last), Bound::Unbounded)).next()
    }

    /// Whether a client that has waited from `since` on comes before all others, but for those that have waited since
    /// `passed_over` or longer.
    pub(crate) fn is_next(&self, id: ClientId, since: Time, passed_over: Time) -> bool {
        self.wanted.range(..(since, id)).next_back().is_none_or(|&(before, _)| before <= passed_over)
    }

    /// Whether a client is on its way back, and is not late.
    pub(crate) fn is_one_awaited(&self) -> bool {
        self.awaited > 0
    }

    /// Returns those on their way back.
    pub(crate) fn waking(&self) -> impl Iterator<Item = ClientId> + '_ {
        self.waking.keys().copied()
    }

    /// Returns the bytes that those on their way back need.
    pub(crate) fn needed_by_waking(&self) -> u64 {
        self.waking.values().fold(0, |sum, &needs| sum.saturating_add(needs))
    }

    /// Returns the most bytes that one which was not sent WAKE needs.
    pub(crate) fn largest(&self) -> u64 {
        self.asleep.last().map_or(0, |&(needs, _)| needs)
    }

    /// Returns the bytes of the GPU that are kept for them: for all on their way back, and for any one of the
    /// others.
    pub(crate) fn to_set_aside(&self) -> u64 {
        self.needed_by_waking().saturating_add(self.largest())
    }

    /// Returns the bytes that all need together to come back.
    pub(crate) fn needed_by_all(&self) -> u64 {
        let asleep = self.asleep.iter().map(|&(needs, _)| needs);
        asleep.fold(self.needed_by_waking(), u64::saturating_add)
    }
}
