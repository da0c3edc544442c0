//! How much of a GPU clients may fill together.
//!
//! That is the GPU's memory, less a reserve, since the driver has its own needs. Each process's context and
//! modules are on the GPU beside what it allocates (half a GiB on an H200). Half of the reserve is the
//! driver's. Contexts and modules that are measured to take more than the other half are not given away
//! either. Many small programs would otherwise fill a GPU without allocating anything.

/// Returns the capacity of a GPU. All figures are bytes. `available`: the GPU's memory, less what processes
/// without the library have there. `overhead`: what clients' contexts and modules take. `largest`: the most
/// that one client has.
///
/// A client that has filled the GPU keeps what it has when others come. It could not know of them, and with
/// less memory it would never run without page faults again.
#[must_use]
pub(crate) fn usable(available: u64, reserve: u64, overhead: u64, largest: u64) -> u64 {
    let most = available.saturating_sub(reserve);
    let left = available.saturating_sub(reserve / 2).saturating_sub(overhead);
    most.min(left.max(largest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_beyond_the_reserve_are_not_given_away() {
        for (available, reserve, overhead, largest, expected) in [
            (160, 16, 0, 0, 144),
            // The reserve covers these.
            (160, 16, 8, 0, 144),
            (160, 16, 12, 0, 140),
            (160, 16, 40, 0, 112),
            // A client has more already, or as much as the GPU has.
            (160, 16, 40, 130, 130),
            (160, 16, 40, 200, 144),
            (160, 0, 12, 0, 148),
            (16, 16, 40, 8, 0),
            (u64::MAX, 16, u64::MAX, 0, 0),
        ] {
            assert_eq!(usable(available, reserve, overhead, largest), expected, "{overhead} of {available}");
        }
    }
}
