//! Which parts of slabs are free: small allocations share slabs, as in the driver.
//!
//! A slab is [`SLAB`] bytes of addresses, at a multiple of as many. A part is taken from the smallest hole that it fits, and of
//! equal holes from the first. So the parts of slabs that are nearly full are taken first, and slabs become empty.
//!
//! Invariants: holes do not overlap, lie within one slab, and do not touch each other; their begins and lengths are multiples
//! of [`ALIGNMENT`]. A part that was taken is in no hole until it is given back.

use std::collections::{BTreeMap, BTreeSet};

use nvshare_proto::units::MIB;

/// Bytes of a slab. The driver takes as many from the card when small allocations need more.
pub const SLAB: u64 = 2 * MIB;
/// Parts of slabs begin at multiples of this, as the driver's small allocations do, in bytes. Textures may be made of them.
pub const ALIGNMENT: u64 = 512;

/// The free parts of a number of slabs.
#[derive(Debug, Default)]
pub struct Slabs {
    /// Begin and length.
    holes: BTreeMap<u64, u64>,
    /// Those that parts are taken from: length and begin.
    by_length: BTreeSet<(u64, u64)>,
    /// Slabs of which no more parts are taken.
    closed: BTreeSet<u64>,
}

/// The length of the part that an allocation of `bytes` bytes takes; `None`: it does not fit a slab.
fn length(bytes: u64) -> Option<u64> {
    bytes.max(1).checked_next_multiple_of(ALIGNMENT).filter(|length| *length <= SLAB)
}

/// The slab that an address is in.
fn slab_of(address: u64) -> u64 {
    address - address % SLAB
}

impl Slabs {
    fn insert(&mut self, begin: u64, length: u64) {
        self.holes.insert(begin, length);
        if !self.closed.contains(&slab_of(begin)) {
            self.by_length.insert((length, begin));
        }
    }

    fn remove(&mut self, begin: u64) -> Option<u64> {
        let length = self.holes.remove(&begin)?;
        self.by_length.remove(&(length, begin));
        Some(length)
    }

    /// Takes a part for an allocation of `bytes` bytes. `None`: no hole is as long.
    pub fn take(&mut self, bytes: u64) -> Option<u64> {
        let wanted = length(bytes)?;
        let (hole, begin) = *self.by_length.range((wanted, 0)..).next()?;
        self.remove(begin);
        if hole > wanted {
            self.insert(begin + wanted, hole - wanted);
        }
        Some(begin)
    }

    /// Adds a slab, the first part of which an allocation of `bytes` bytes has taken.
    pub fn add(&mut self, slab: u64, bytes: u64) {
        let taken = length(bytes).unwrap_or(SLAB);
        if taken < SLAB {
            self.insert(slab + taken, SLAB - taken);
        }
    }

    /// Adds a slab of which nothing is taken.
    pub fn add_empty(&mut self, slab: u64) {
        self.insert(slab, SLAB);
    }

    /// No more parts of a slab are taken. It goes when those that were taken are free.
    pub fn close(&mut self, slab: u64) {
        self.closed.insert(slab);
        for (&begin, &length) in self.holes.range(slab..slab + SLAB) {
            self.by_length.remove(&(length, begin));
        }
    }

    /// Whether there is a slab of which nothing is taken.
    #[must_use]
    pub fn has_empty(&self) -> bool {
        self.empty().next().is_some()
    }

    fn empty(&self) -> impl Iterator<Item = u64> {
        self.by_length.range((SLAB, 0)..).map(|&(_, begin)| begin)
    }

    /// Takes all slabs away of which nothing is taken: they are forgotten.
    pub fn remove_empty(&mut self) -> Vec<u64> {
        let empty: Vec<u64> = self.empty().collect();
        for slab in &empty {
            self.remove(*slab);
        }
        empty
    }

    /// The part of an allocation of `bytes` bytes is free again. Returns its slab if that is empty now: it is forgotten, and no
    /// more parts of it are taken.
    pub fn give_back(&mut self, address: u64, bytes: u64) -> Option<u64> {
        let (slab, mut begin, mut free) = (slab_of(address), address, length(bytes)?);
        if let Some((&before, &hole)) = self.holes.range(slab..address).next_back()
            && before + hole == address
        {
            self.remove(before);
            (begin, free) = (before, hole + free);
        }
        if begin + free < slab + SLAB
            && let Some(hole) = self.remove(begin + free)
        {
            free += hole;
        }
        if free == SLAB {
            self.closed.remove(&slab);
            return Some(slab);
        }
        self.insert(begin, free);
        None
    }

    /// Bytes that are free.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.holes.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_hole_is_taken_and_neighbours_become_one() {
        let mut slabs = Slabs::default();
        let at = 8 * SLAB;
        slabs.add(at, 1);
        let second = slabs.take(1000).unwrap();
        let third = slabs.take(100).unwrap();
        let fourth = slabs.take(513).unwrap();
        assert_eq!([second, third, fourth].map(|part| part - at), [512, 1536, 2048]);
        assert_eq!(slabs.give_back(third, 100), None);
        assert_eq!(slabs.take(512), Some(third), "the smallest hole");
        assert_eq!(slabs.give_back(second, 1000), None);
        assert_eq!(slabs.give_back(third, 512), None);
        assert_eq!(slabs.holes.get(&second), Some(&1536), "both together");
        assert_eq!(slabs.take(SLAB), None);
        assert_eq!(slabs.give_back(fourth, 513), None);
        assert_eq!(slabs.free_bytes(), SLAB - 512);
        assert_eq!(slabs.give_back(at, 1), Some(at));
        assert_eq!((slabs.take(1), slabs.free_bytes()), (None, 0));
    }

    #[test]
    fn an_empty_slab_is_taken_from_last_and_goes_when_it_is_told() {
        let mut slabs = Slabs::default();
        slabs.add(4 * SLAB, SLAB / 2);
        assert!(!slabs.has_empty());
        slabs.add_empty(2 * SLAB);
        assert!(slabs.has_empty());
        assert_eq!(slabs.take(1), Some(4 * SLAB + SLAB / 2), "the other one has room");
        assert_eq!(slabs.take(SLAB), Some(2 * SLAB));
        assert!(!slabs.has_empty());
        assert_eq!(slabs.give_back(2 * SLAB, SLAB), Some(2 * SLAB));
        slabs.add_empty(2 * SLAB);
        assert_eq!(slabs.remove_empty(), [2 * SLAB]);
        assert!(!slabs.has_empty() && slabs.take(SLAB).is_none());
    }

    #[test]
    fn a_closed_slab_gives_no_more_parts_and_goes_when_it_is_empty() {
        let mut slabs = Slabs::default();
        slabs.add(SLAB, 512);
        slabs.add(2 * SLAB, 512);
        let second = slabs.take(512).unwrap();
        assert_eq!(second, SLAB + 512);
        slabs.close(SLAB);
        assert_eq!(slabs.take(512), Some(2 * SLAB + 512));
        assert_eq!(slabs.give_back(second, 512), None);
        assert_eq!(slabs.take(512), Some(2 * SLAB + 1024), "what is given back is not taken again");
        assert_eq!(slabs.give_back(SLAB, 512), Some(SLAB));
        slabs.add(SLAB, 512);
        slabs.close(2 * SLAB);
        assert_eq!(slabs.take(512), Some(SLAB + 512), "another slab at this address is open");
    }

    #[test]
    fn neighbouring_slabs_stay_two() {
        let mut slabs = Slabs::default();
        slabs.add(4 * SLAB, 512);
        slabs.add(5 * SLAB, 512);
        assert_eq!(slabs.take(SLAB - 511), None);
        assert_eq!(slabs.give_back(5 * SLAB, 512), Some(5 * SLAB));
        assert_eq!(slabs.holes, BTreeMap::from([(4 * SLAB + 512, SLAB - 512)]));
    }

    #[test]
    fn one_allocation_may_fill_a_slab() {
        let mut slabs = Slabs::default();
        slabs.add(SLAB, SLAB - 1);
        assert_eq!(slabs.take(1), None);
        assert_eq!(slabs.give_back(SLAB, SLAB - 1), Some(SLAB));
        assert_eq!(
            (length(0), length(SLAB), length(SLAB + 1), length(u64::MAX)),
            (Some(512), Some(SLAB), None, None)
        );
    }
}
