//! Clients that run together: if their demand fits the GPU, they run side by side, uninterrupted.
//!
//! Programs hurt each other through memory: once their sum exceeds the GPU's memory, page faults move it. Below that,
//! the driver's own time slicing shares the GPU, and taking turns would only leave it idle in the gaps of
//! each program.

/// Whether `count` clients, with this demand together, fit a GPU beside what cannot be moved; all in bytes.
///
/// In exclusive mode no two clients share a GPU, whether they fit or not.
#[must_use]
pub(crate) fn fits(capacity: u64, pinned: u128, demand: u128, clients: usize, exclusive: bool) -> bool {
    if exclusive && clients > 1 {
        return false;
    }
    pinned + demand <= u128::from(capacity)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_share_what_fits() {
        for (capacity, pinned, demand, clients, exclusive, expected) in [
            (16, 0, 16, 2, false, true),
            (16, 1, 16, 2, false, false),
            (16, 0, 24, 2, false, false),
            (16, 0, 16, 1, false, true),
            (16, 0, 0, 0, false, true),
            (16, 0, 2, 2, true, false),
            (16, 0, 16, 1, true, true),
            (u64::MAX, u128::from(u64::MAX), 1, 1, false, false),
        ] {
            let fit = fits(capacity, pinned, demand, clients, exclusive);
            assert_eq!(fit, expected, "{clients} with {demand} in {capacity}");
        }
    }
}
