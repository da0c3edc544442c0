//! Which clients give memory back so that the next client fits, and how much.
//!
//! First, room that was given and not used, from any client, since that costs nothing. Then memory of clients
//! that do not run, the furthest next turn first (Belady's rule), as far as the order of turns is known:
//!
//! 1. Clients that sleep. When they ask again is not known. Those that have slept for longest go first. Those
//!    that usually sleep for a moment only, and then go ahead of others, go last.
//! 2. Clients that wait, the last of the queue first: by virtual time, then by who came later.
//!
//! Never more than is needed, so only the last one that is asked gives a part of what it has.

use std::cmp::Reverse;
use std::time::Duration;

/// A client's next turn, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextTurn {
    /// The client sleeps, and nobody knows when it asks again.
    Unknown {
        /// It is expected to ask soon, and not to wait for its turn then.
        soon: bool,
        /// When it fell asleep.
        asleep_since: Duration,
    },
    /// Its place in the order of turns.
    InOrder {
        /// Virtual time, in nanoseconds.
        time: i64,
        /// When it asked for the lock.
        since: Duration,
    },
}

/// The bytes that a client could give back on the GPU in question.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidate {
    /// The client.
    pub(crate) id: u64,
    /// Room that the client has and does not use.
    pub(crate) unused: u64,
    /// Resident memory that could be moved to the host; 0 for clients that run.
    pub(crate) movable: u64,
    /// When the client needs it again.
    pub(crate) next_turn: NextTurn,
}

impl Candidate {
    /// Orders memory by its use: the least useful has the smallest.
    fn usefulness(&self) -> impl Ord + use<> {
        match self.next_turn {
            NextTurn::Unknown { soon, asleep_since } => {
                (false, soon, asleep_since, Reverse((0, Duration::ZERO)), self.id)
            }
            NextTurn::InOrder { time, since } => {
                (true, false, Duration::ZERO, Reverse((time, since)), self.id)
            }
        }
    }
}

/// Returns the clients to ask, and bytes of each, so that `needed` bytes become free, or as many as possible.
#[must_use]
pub(crate) fn choose(needed: u64, candidates: &[Candidate]) -> Vec<(u64, u64)> {
    let mut order: Vec<&Candidate> = candidates.iter().collect();
    order.sort_by_key(|candidate| candidate.usefulness());
    let mut given = vec![0; order.len()];
    let mut left = needed;
    for (candidate, given) in order.iter().zip(&mut given) {
        let bytes = candidate.unused.min(left);
        *given += bytes;
        left -= bytes;
    }
    for (candidate, given) in order.iter().zip(&mut given) {
        let bytes = candidate.movable.min(left);
        *given += bytes;
        left -= bytes;
    }
    order.iter().zip(given).filter(|&(_, bytes)| bytes > 0).map(|(c, bytes)| (c.id, bytes)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn sleeps(id: u64, unused: u64, movable: u64, since: u64) -> Candidate {
        let next_turn = NextTurn::Unknown { soon: false, asleep_since: Duration::from_secs(since) };
        Candidate { id, unused, movable, next_turn }
    }

    fn waits(id: u64, unused: u64, movable: u64, time: i64) -> Candidate {
        let next_turn = NextTurn::InOrder { time, since: Duration::ZERO };
        Candidate { id, unused, movable, next_turn }
    }

    #[test]
    fn unused_room_first_then_the_furthest_turn() {
        let candidates = [
            sleeps(1, 2, 0, 9),
            waits(2, 0, 12, 0),
            waits(3, 0, 12, 1),
            sleeps(4, 0, 3, 5),
            sleeps(5, 0, 3, 4),
        ];
        assert_eq!(choose(1, &candidates), [(1, 1)]);
        assert_eq!(choose(4, &candidates), [(5, 2), (1, 2)]);
        assert_eq!(choose(10, &candidates), [(5, 3), (4, 3), (1, 2), (3, 2)]);
        assert_eq!(choose(21, &candidates), [(5, 3), (4, 3), (1, 2), (3, 12), (2, 1)]);
    }

    #[test]
    fn of_those_that_have_had_as_much_the_one_that_came_last_goes_first() {
        let at = |id, since| {
            let next_turn = NextTurn::InOrder { time: 7, since: Duration::from_secs(since) };
            Candidate { id, unused: 0, movable: 5, next_turn }
        };
        assert_eq!(choose(5, &[at(1, 3), at(2, 4)]), [(2, 5)]);
        assert_eq!(choose(5, &[at(1, 4), at(2, 3)]), [(1, 5)]);
    }

    #[test]
    fn no_client_is_asked_for_more_than_it_has() {
        assert_eq!(choose(100, &[waits(1, 2, 3, 0)]), [(1, 5)]);
        assert!(choose(100, &[]).is_empty());
        assert!(choose(0, &[waits(1, 2, 3, 0)]).is_empty());
    }

    fn any_candidates() -> impl Strategy<Value = Vec<Candidate>> {
        let next_turn = prop_oneof![
            (any::<bool>(), 0..5u64).prop_map(|(soon, s)| {
                let asleep_since = Duration::from_secs(s);
                NextTurn::Unknown { soon, asleep_since }
            }),
            (-5..5i64, 0..3u64)
                .prop_map(|(time, s)| NextTurn::InOrder { time, since: Duration::from_secs(s) }),
        ];
        let one = (0..4u64, 0..9u64, next_turn);
        prop::collection::vec(one, 0..9).prop_map(|all| {
            let candidate = |(id, (unused, movable, next_turn))| Candidate { id, unused, movable, next_turn };
            (1..).zip(all).map(candidate).collect()
        })
    }

    /// Whether the one needs its memory later than the other.
    fn is_later(one: NextTurn, other: NextTurn) -> bool {
        use NextTurn::{InOrder, Unknown};
        match (one, other) {
            (Unknown { soon: x, asleep_since: a }, Unknown { soon: y, asleep_since: b }) => (x, a) < (y, b),
            (Unknown { .. }, InOrder { .. }) => true,
            (InOrder { .. }, Unknown { .. }) => false,
            (InOrder { time: a, since: s }, InOrder { time: b, since: t }) => (a, s) > (b, t),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn the_least_useful_leaves_and_the_least_that_has_to(
            candidates in any_candidates(), needed in 0..60u64, more in 0..9u64, turned in 0..9usize,
        ) {
            let given: BTreeMap<u64, u64> = choose(needed, &candidates).into_iter().collect();
            let of = |candidate: &Candidate| given.get(&candidate.id).copied().unwrap_or(0);
            let all: u64 = candidates.iter().map(|c| c.unused + c.movable).sum();
            prop_assert_eq!(given.values().sum::<u64>(), needed.min(all));
            for one in &candidates {
                prop_assert!(of(one) <= one.unused + one.movable);
                let moves = of(one) > one.unused;
                for other in &candidates {
                    prop_assert!(!moves || of(other) >= other.unused, "memory moves while there is room: {:?}", given);
                    let stays = of(other) < other.unused + other.movable;
                    let all_of_it = other.movable == 0 || !stays;
                    prop_assert!(
                        !moves || all_of_it || !is_later(other.next_turn, one.next_turn),
                        "{one:?} leaves before {other:?}: {given:?}"
                    );
                }
            }
            // A stable subset: for less, the same clients are asked for a part of it, in whatever order they
            // are looked at.
            for (id, bytes) in &choose(needed + more, &candidates) {
                prop_assert!(given.get(id).copied().unwrap_or(0) <= *bytes);
            }
            let mut others = candidates.clone();
            others.rotate_left(turned % candidates.len().max(1));
            prop_assert_eq!(choose(needed, &others), choose(needed, &candidates));
        }
    }
}
