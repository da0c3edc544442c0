//! Who runs together: clients whose demand fits the GPU, side by side, uninterrupted.
//!
//! Memory is what makes programs hurt each other: once their sum exceeds the card, page faults move it. Below
//! that, the driver's own time slicing shares the GPU, and taking turns would only leave it idle in the gaps of
//! each program.

/// Whether members with these demands fit a GPU beside what cannot be moved, all in bytes.
///
/// In exclusive mode nobody shares, whatever fits.
#[must_use]
pub fn fits(capacity: u64, pinned: u64, demands: &[u64], exclusive: bool) -> bool {
    if exclusive && demands.len() > 1 {
        return false;
    }
    let sum = demands.iter().fold(pinned, |sum, &demand| sum.saturating_add(demand));
    sum <= capacity
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_data() {
        for (capacity, pinned, demands, exclusive, expected) in [
            (16, 0, &[8, 8][..], false, true),
            (16, 1, &[8, 8], false, false),
            (16, 0, &[12, 12], false, false),
            (16, 0, &[16], false, true),
            (16, 0, &[], false, true),
            (16, 0, &[1, 1], true, false),
            (16, 0, &[16], true, true),
            (u64::MAX, u64::MAX, &[u64::MAX], false, true),
        ] {
            assert_eq!(fits(capacity, pinned, demands, exclusive), expected, "{demands:?} in {capacity}");
        }
    }
}
