//! Which seats go: those that no container has had for a while.
//!
//! The slots of a GPU are few, and each is a seat for ever. The sets of slots are many, and the number of seats is bounded. So a set
//! goes once neither the kubelet's record nor its list of pods has named it for a while, and it was not given out in the meantime: the kubelet notes
//! what it was given a moment later. The scheduler refuses as long as a process uses the seat.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use nvshare_proto::SeatName;

/// Since when no container has been seen to have a seat.
#[derive(Debug, Default)]
pub struct Unused(BTreeMap<SeatName, Instant>);

impl Unused {
    /// Takes a look into account, at which containers had `held`. Only what may go is looked at.
    pub fn look(
        &mut self,
        may_go: impl IntoIterator<Item = SeatName>,
        held: &BTreeSet<SeatName>,
        now: Instant,
    ) {
        let old = std::mem::take(&mut self.0);
        let unheld = may_go.into_iter().filter(|name| !held.contains(name));
        self.0 = unheld.map(|name| (name, old.get(&name).copied().unwrap_or(now))).collect();
    }

    /// The seat is given out, or stays for another reason: its time begins anew.
    pub fn keep(&mut self, name: SeatName) {
        self.0.remove(&name);
    }

    /// Whether no container has had the seat for the time after which it goes.
    #[must_use]
    pub fn is_over(&self, name: SeatName, patience: Duration, now: Instant) -> bool {
        self.0.get(&name).is_some_and(|&since| now.saturating_duration_since(since) >= patience)
    }

    /// The seats that no container has had for that time.
    #[must_use]
    pub fn over(&self, patience: Duration, now: Instant) -> Vec<SeatName> {
        self.0.keys().copied().filter(|&name| self.is_over(name, patience, now)).collect()
    }
}

#[cfg(test)]
mod tests {
    use nvshare_proto::{GpuUuid, Slot};

    use super::*;

    #[test]
    fn a_seat_goes_when_no_look_finds_it_for_a_while() {
        let [a, b] = [0, 1].map(|number| SeatName::of(&[Slot { gpu: GpuUuid([1; 16]), number }]));
        let (start, patience) = (Instant::now(), Duration::from_secs(10));
        let mut unused = Unused::default();
        // At each second: what containers have, and what is given out after that; then, what goes.
        for (second, held, given, gone) in [
            (0, vec![a], None, vec![]),
            (1, vec![], None, vec![]),
            (9, vec![], None, vec![]),
            (10, vec![], None, vec![b]),
            (11, vec![], Some(b), vec![a]),
            (12, vec![a], None, vec![]),
            (21, vec![], None, vec![]),
            (22, vec![], None, vec![b]),
            (31, vec![], Some(a), vec![b]),
            (32, vec![], None, vec![b]),
        ] {
            let now = start + Duration::from_secs(second);
            unused.look([a, b], &held.into_iter().collect(), now);
            given.into_iter().for_each(|name| unused.keep(name));
            let mut over = unused.over(patience, now);
            over.sort_by_key(|&name| name != a);
            assert_eq!(over, gone, "{second}");
        }
        unused.look([], &BTreeSet::new(), start);
        assert_eq!(unused.over(Duration::ZERO, start), []);
    }
}
