//! The order of waiters: the one whose job is furthest behind its fair share is first, unless another may pass it.
//!
//! Each job has a virtual time on each GPU (see `shares`). The smallest goes first, the longest wait breaks a
//! tie. A client that uses several GPUs at once counts as far behind as on the GPU where it is least behind.
//! On a crowded GPU it gets its share, and the other GPUs give it no more than that. But it may never fall
//! behind on a GPU whose clock stands still, while others fall behind on a GPU where small clients get more
//! than their share. So a client that has waited for two rounds comes forward, as if it were owed each GPU
//! since then.

/// Returns how far a client that uses several GPUs at once is ahead of their clocks. Positive: ahead;
/// negative: behind.
#[must_use]
pub(crate) fn lead_on_all(lead_on_each: impl Iterator<Item = i64>) -> i64 {
    lead_on_each.max().unwrap_or(0)
}

/// Whether letting a waiter run now delays the head, which is ahead of it in the order and does not fit
/// yet. It does, unless the waiter can stay when the head comes. All figures are bytes. `own` and `first`:
/// the demands of the two. `stays`: what stays on the GPU meanwhile, which is clients that keep running
/// beside the other, and what cannot be moved. `capacity`: that of the GPU.
#[must_use]
pub(crate) fn would_delay(own: u128, first: u128, stays: u128, capacity: u64) -> bool {
    own + first + stays > u128::from(capacity)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gang_counts_where_it_is_least_behind() {
        assert_eq!(lead_on_all([-5, -2, -9].into_iter()), -2);
        assert_eq!(lead_on_all([-5, 3].into_iter()), 3);
        assert_eq!(lead_on_all(std::iter::empty()), 0);
    }

    #[test]
    fn a_waiter_that_can_stay_delays_nobody() {
        for (own, ahead, stays, expected) in
            [(2, 12, 2, false), (4, 12, 2, true), (16, 0, 0, false), (1, 16, 0, true)]
        {
            assert_eq!(would_delay(own, ahead, stays, 16), expected, "{own} beside {ahead} and {stays}");
        }
    }
}
