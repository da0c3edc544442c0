//! Who is next: the waiter whose job is furthest behind its fair share.
//!
//! Each job has a virtual time on each GPU (see `shares`). The smallest goes first, the longest wait breaks a tie. Who uses
//! several GPUs at once is as far behind as it is on the GPU where it is least behind: on the crowded one it gets its
//! share, and no more for it on the others.

/// How far ahead of the clocks of its GPUs a client is that uses all of them at once: positive, ahead; negative, behind.
#[must_use]
pub fn ahead_on_all(ahead_on_each: impl Iterator<Item = i64>) -> i64 {
    ahead_on_each.max().unwrap_or(0)
}

/// Whether a waiter may go before one that is ahead of it in the order and does not fit: only if it is in nobody's way, and
/// can stay when the other comes. All in bytes: what they demand, what of the GPU stays as it is meanwhile (members that
/// keep running beside the other, and what cannot be moved), and the GPU's capacity.
#[must_use]
pub fn delays_nobody(own: u128, ahead: u128, stays: u128, capacity: u64) -> bool {
    own + ahead + stays <= u128::from(capacity)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gang_counts_where_it_is_least_behind() {
        assert_eq!(ahead_on_all([-5, -2, -9].into_iter()), -2);
        assert_eq!(ahead_on_all([-5, 3].into_iter()), 3);
        assert_eq!(ahead_on_all(std::iter::empty()), 0);
    }

    #[test]
    fn who_can_stay_delays_nobody() {
        for (own, ahead, stays, expected) in
            [(2, 12, 2, true), (4, 12, 2, false), (16, 0, 0, true), (1, 16, 0, false)]
        {
            assert_eq!(delays_nobody(own, ahead, stays, 16), expected, "{own} beside {ahead} and {stays}");
        }
    }
}
