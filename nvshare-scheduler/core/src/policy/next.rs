//! Who is next: the waiter that is furthest behind its fair share.
//!
//! Each client has a virtual time: the wall-clock time that it held the lock, from open gate to drained, divided
//! by the number of clients that ran beside it. The smallest virtual time goes first, the longest wait breaks a
//! tie. A client that comes back from a pause starts no further behind than the client furthest behind among
//! those that are active ([`on_wake`]): time not asked for is not saved up.

use std::time::Duration;

/// The sort key of a waiter: smallest first.
#[must_use]
pub fn key(virtual_time: Duration, waiting_since: Duration, id: u64) -> (Duration, Duration, u64) {
    (virtual_time, waiting_since, id)
}

/// The virtual time of a client that asks for the lock after a pause.
#[must_use]
pub fn on_wake(own: Duration, active: impl Iterator<Item = Duration>) -> Duration {
    active.min().map_or(own, |least| own.max(least))
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: fn(u64) -> Duration = Duration::from_secs;

    #[test]
    fn least_served_first_then_longest_waiting() {
        let mut waiters = [(S(5), S(0), 1), (S(3), S(9), 2), (S(3), S(7), 3)];
        waiters.sort_by_key(|&(v, w, id)| key(v, w, id));
        assert_eq!(waiters.map(|w| w.2), [3, 2, 1]);
    }

    #[test]
    fn a_pause_earns_nothing() {
        assert_eq!(on_wake(S(1), [S(100), S(90)].into_iter()), S(90));
        assert_eq!(on_wake(S(95), [S(100), S(90)].into_iter()), S(95));
        assert_eq!(on_wake(S(1), std::iter::empty()), S(1));
    }
}
