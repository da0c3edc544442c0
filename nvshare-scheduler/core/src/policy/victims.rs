//! Which clients give memory back so that the next client fits, and how much.
//!
//! First, room that was given and not used, from any client, since that costs nothing. Then memory of clients that do not
//! run, in the order of Belady's rule, the furthest next turn first: clients that do not want the lock at all, then the
//! last of the queue. Never more than is needed.

use std::cmp::Reverse;
use std::time::Duration;

/// The bytes that a client could give back on the GPU in question.
#[derive(Debug, Clone, Copy)]
pub struct Candidate {
    /// The client.
    pub id: u64,
    /// Room that the client has and does not use.
    pub unused: u64,
    /// Resident memory that could be moved to the host; 0 for clients that run.
    pub movable: u64,
    /// The client's place in the order of turns: virtual time, and since when it waits; `None`: it does not want the lock.
    pub next_turn: Option<(i64, Duration)>,
}

/// The clients to ask, and bytes of each, so that `needed` bytes become free, or as many as possible.
#[must_use]
pub fn choose(needed: u64, candidates: &[Candidate]) -> Vec<(u64, u64)> {
    let mut order: Vec<&Candidate> = candidates.iter().collect();
    order.sort_by_key(|c| (c.next_turn.is_some(), Reverse(c.next_turn), c.id));
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
    use super::*;

    fn candidate(id: u64, unused: u64, movable: u64, next_turn: Option<i64>) -> Candidate {
        Candidate { id, unused, movable, next_turn: next_turn.map(|time| (time, Duration::ZERO)) }
    }

    #[test]
    fn unused_room_first_then_the_furthest_turn() {
        let candidates = [
            candidate(1, 2, 0, None),
            candidate(2, 0, 12, Some(0)),
            candidate(3, 0, 12, Some(1)),
            candidate(4, 0, 3, None),
        ];
        assert_eq!(choose(1, &candidates), [(1, 1)]);
        assert_eq!(choose(4, &candidates), [(1, 2), (4, 2)]);
        assert_eq!(choose(10, &candidates), [(1, 2), (4, 3), (3, 5)]);
        assert_eq!(choose(18, &candidates), [(1, 2), (4, 3), (3, 12), (2, 1)]);
    }

    #[test]
    fn no_client_is_asked_for_more_than_it_has() {
        assert_eq!(choose(100, &[candidate(1, 2, 3, Some(0))]), [(1, 5)]);
        assert!(choose(100, &[]).is_empty());
        assert!(choose(0, &[candidate(1, 2, 3, Some(0))]).is_empty());
    }
}
