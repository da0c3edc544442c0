//! Small allocations in slabs, against a list of what lives.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};

use nvshare_client::slabs::{ALIGNMENT, SLAB, Slabs};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    Allocate(u64),
    /// Frees one of those that live: this number, modulo how many there are.
    Free(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let sizes = prop_oneof![
        4 => 1..4096u64,
        2 => 1..256 * 1024u64,
        2 => 1..SLAB,
        1 => Just(SLAB - 1),
        1 => (1..SLAB / ALIGNMENT).prop_map(|parts| parts * ALIGNMENT),
    ];
    prop_oneof![5 => sizes.prop_map(Step::Allocate), 4 => any::<usize>().prop_map(Step::Free)]
}

/// The slabs as a library uses them: it adds one where none has a hole, and ends those that become empty.
#[derive(Debug, Default)]
struct World {
    slabs: Slabs,
    /// Slabs that exist.
    there: BTreeSet<u64>,
    /// Live allocations: address to size.
    lives: BTreeMap<u64, u64>,
    made: u64,
}

impl World {
    fn allocate(&mut self, bytes: u64) {
        let address = self.slabs.take(bytes).unwrap_or_else(|| {
            // Some slabs are neighbours.
            self.made += 1 + self.made % 2;
            let slab = self.made * SLAB;
            self.slabs.add(slab, bytes);
            self.there.insert(slab);
            slab
        });
        assert!(address.is_multiple_of(ALIGNMENT));
        let slab = address - address % SLAB;
        assert!(self.there.contains(&slab) && address + bytes <= slab + SLAB, "outside of all slabs");
        let before = self.lives.range(..address + bytes).next_back();
        assert!(before.is_none_or(|(at, length)| at + length <= address), "two have the same bytes");
        self.lives.insert(address, bytes);
    }

    fn free(&mut self, which: usize) {
        if self.lives.is_empty() {
            return;
        }
        let address = *self.lives.keys().nth(which % self.lives.len()).unwrap();
        let bytes = self.lives.remove(&address).unwrap();
        if let Some(slab) = self.slabs.give_back(address, bytes) {
            assert!(self.there.remove(&slab), "a slab that is not there");
        }
    }

    fn check(&self) {
        let in_use: BTreeSet<u64> = self.lives.keys().map(|address| address - address % SLAB).collect();
        assert_eq!(in_use, self.there, "slabs are there exactly while something in them lives");
        let taken: u64 = self.lives.values().map(|bytes| bytes.next_multiple_of(ALIGNMENT)).sum();
        assert_eq!(self.slabs.free_bytes() + taken, self.there.len() as u64 * SLAB, "nothing is lost");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn no_two_share_a_byte_and_empty_slabs_go(steps in prop::collection::vec(step(), 1..200)) {
        let mut world = World::default();
        for step in &steps {
            match step {
                Step::Allocate(bytes) => world.allocate(*bytes),
                Step::Free(which) => world.free(*which),
            }
            world.check();
        }
        while !world.lives.is_empty() {
            world.free(0);
            world.check();
        }
        prop_assert_eq!(world.slabs.free_bytes(), 0);
    }
}
