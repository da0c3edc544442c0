//! The books: how much of the host's memory each owner has.

use std::collections::BTreeMap;

/// Whose memory it is: a tenant, or a process that belongs to none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owner {
    /// A tenant, by its number.
    Tenant(u64),
    /// A process, by the kernel's number for it.
    Process(u64),
    /// A client of which the kernel tells nothing.
    Client(u64),
}

/// The budget, in bytes. The memory that is handed out never exceeds it; with what clients had from an earlier scheduler it may.
#[derive(Debug)]
pub(super) struct Ledger {
    all: u64,
    each: u64,
    out: BTreeMap<Owner, u64>,
    sum: u64,
}

impl Ledger {
    pub(super) fn new(all: u64, each: u64) -> Self {
        Self { all, each: each.min(all), out: BTreeMap::new(), sum: 0 }
    }

    fn has(&self, owner: Owner) -> u64 {
        self.out.get(&owner).copied().unwrap_or(0)
    }

    /// Bytes that are not out.
    pub(super) fn room(&self) -> u64 {
        self.all.saturating_sub(self.sum)
    }

    /// Bytes that an owner may still get.
    pub(super) fn left(&self, owner: Owner) -> u64 {
        self.room().min(self.left_of_part(owner))
    }

    /// Bytes that an owner could still get if nobody else had any.
    pub(super) fn left_of_part(&self, owner: Owner) -> u64 {
        self.each.saturating_sub(self.has(owner))
    }

    /// An owner gets `bytes`, if that much is left for it.
    pub(super) fn take(&mut self, owner: Owner, bytes: u64) -> bool {
        let fits = bytes <= self.left(owner);
        if fits {
            self.add(owner, bytes);
        }
        fits
    }

    /// An owner says that it has `bytes` from an earlier scheduler. Returns how many count: no more than it may have.
    pub(super) fn claim(&mut self, owner: Owner, bytes: u64) -> u64 {
        let counted = bytes.min(self.each.saturating_sub(self.has(owner)));
        self.add(owner, counted);
        counted
    }

    fn add(&mut self, owner: Owner, bytes: u64) {
        *self.out.entry(owner).or_default() += bytes;
        self.sum += bytes;
    }

    /// An owner has `bytes` less.
    pub(super) fn give_back(&mut self, owner: Owner, bytes: u64) {
        let has = self.has(owner);
        let bytes = bytes.min(has);
        self.sum -= bytes;
        if bytes == has {
            self.out.remove(&owner);
        } else {
            self.out.insert(owner, has - bytes);
        }
    }

    /// Bytes that are out.
    pub(super) fn sum(&self) -> u64 {
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Owner = Owner::Tenant(1);
    const B: Owner = Owner::Process(1);

    #[test]
    fn neither_budget_is_exceeded() {
        let mut ledger = Ledger::new(10, 6);
        assert!(ledger.take(A, 6) && !ledger.take(A, 1));
        assert_eq!((ledger.left(A), ledger.left(B)), (0, 4));
        assert!(!ledger.take(B, 5) && ledger.take(B, 4) && !ledger.take(B, 1));
        ledger.give_back(A, 2);
        assert_eq!((ledger.left(A), ledger.left(B), ledger.sum()), (2, 2, 8));
        ledger.give_back(A, 100);
        assert_eq!((ledger.left(A), ledger.sum()), (6, 4));
    }

    #[test]
    fn what_is_said_to_be_had_counts_up_to_the_owners_part() {
        let mut ledger = Ledger::new(10, 6);
        assert_eq!(ledger.claim(A, u64::MAX), 6);
        assert_eq!(ledger.claim(A, 1), 0);
        assert_eq!(ledger.claim(B, 6), 6, "it has it, though there is not so much");
        assert_eq!((ledger.left(Owner::Client(1)), ledger.sum()), (0, 12));
        ledger.give_back(B, 6);
        assert!(ledger.take(Owner::Client(1), 4));
    }
}
