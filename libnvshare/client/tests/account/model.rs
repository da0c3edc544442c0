//! A model of an account, which computes everything anew.

use std::cell::Cell;

use nvshare_client::Kind;
use nvshare_client::account::{Account, DeviceFacts, DriverReserve, TenantQuota};
use nvshare_proto::GpuUuid;

pub(crate) const TOTAL: u64 = 200;
const LIMIT: u64 = 120;

pub(crate) fn terms(limited: bool, oversubscribe: bool) -> DeviceFacts {
    DeviceFacts {
        gpu: GpuUuid([1; 16]),
        total: TOTAL,
        limit: limited.then_some(LIMIT),
        is_of_seat: false,
        oversubscribe,
    }
}

/// A sum that this process shares with others, which have nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shared(&'static Cell<u64>);

impl Shared {
    /// Another page is the tenant's from now on.
    pub(crate) fn leave(self, bytes: u64) {
        self.discharge(bytes);
    }
}

impl TenantQuota for Shared {
    fn used(&self) -> u64 {
        self.0.get()
    }

    fn charge(&self, bytes: u64, limit: u64) -> Result<(), u64> {
        let used = self.0.get();
        if used + bytes > limit {
            return Err(used);
        }
        self.0.set(used + bytes);
        Ok(())
    }

    fn discharge(&self, bytes: u64) {
        self.0.set(self.0.get().checked_sub(bytes).expect("more is given back than there was"));
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Allocation {
    pub(crate) bytes: u64,
    pub(crate) charged: u64,
    pub(crate) kind: Kind,
}

#[derive(Debug)]
pub(crate) struct Model {
    allocations: Vec<Allocation>,
    /// Freed, and kept.
    pub(crate) aside: Vec<Allocation>,
    pub(crate) reserve: DriverReserve,
    /// Bytes that the scheduler has given and not got back.
    pub(crate) granted: i128,
    /// The part of it that the card does not have.
    pub(crate) lost: u64,
    pub(crate) turns_without: u32,
    pub(crate) is_metered: bool,
    /// Charged bytes, as the scheduler was last told.
    pub(crate) told: u64,
    pub(crate) waiting: u32,
    /// Bytes of the largest allocation that waits.
    pub(crate) awaited: u64,
    pub(crate) tenant: Shared,
    is_limited: bool,
}

impl Model {
    pub(crate) fn new(is_limited: bool) -> Self {
        Self {
            allocations: Vec::new(),
            aside: Vec::new(),
            reserve: DriverReserve::default(),
            granted: 0,
            lost: 0,
            turns_without: 0,
            is_metered: true,
            told: 0,
            waiting: 0,
            awaited: 0,
            tenant: Shared(Box::leak(Box::new(Cell::new(0)))),
            is_limited,
        }
    }

    pub(crate) fn limit(&self) -> u64 {
        if self.is_limited { LIMIT } else { u64::MAX }
    }

    pub(crate) fn insert(&mut self, bytes: u64, charged: u64, kind: Kind) {
        self.allocations.push(Allocation { bytes, charged, kind });
    }

    pub(crate) fn choose(&mut self, which: usize) -> Option<&mut Allocation> {
        let many = self.allocations.len().max(1);
        self.allocations.get_mut(which % many)
    }

    pub(crate) fn remove(&mut self, which: usize) -> Option<Allocation> {
        let many = self.allocations.len();
        (many > 0).then(|| self.allocations.swap_remove(which % many))
    }

    /// A refused or postponed allocation changes nothing.
    pub(crate) fn assert_unchanged(&self, before: &Account<Shared>, after: &Account<Shared>) {
        assert_eq!(format!("{before:?}"), format!("{after:?}"));
    }

    /// The room that was given and is not used. Below zero: more is used than was given.
    pub(crate) fn room(&self, account: &Account<Shared>) -> i128 {
        let made = { *account }.take_made();
        self.granted - i128::from(account.charged()) - i128::from(self.lost) - i128::from(made)
    }

    /// Compares everything that the account says with what follows from its history.
    pub(crate) fn agrees(&self, account: &Account<Shared>, after: &str) {
        let sum =
            |what: fn(&Allocation) -> u64| self.allocations.iter().chain(&self.aside).map(what).sum::<u64>();
        let aside: u64 = self.aside.iter().map(|a| a.bytes).sum();
        let allocated = sum(|a| a.bytes) + self.reserve.sum();
        let charged = sum(|a| a.charged) + self.reserve.sum();
        let movable = sum(|a| if a.kind.is_movable() { a.bytes } else { 0 });
        assert_eq!(account.allocated(), allocated, "allocated, after {after}");
        assert_eq!(account.aside(), aside, "aside, after {after}");
        assert_eq!(account.charged(), charged, "charged, after {after}");
        assert_eq!(account.absent(), allocated - charged, "absent, after {after}");
        assert_eq!(account.reserve(), self.reserve, "reserve, after {after}");
        let mut copy = *account;
        let immovable = allocated - movable - self.reserve.managed_pools;
        assert_eq!(copy.usage().immovable, immovable, "immovable, after {after}");
        if account.tenant().is_some() {
            assert_eq!(account.used(), allocated - aside, "the tenant's sum, after {after}");
        }
        let has_managed = self.allocations.iter().any(|a| a.kind == Kind::ProgramsManaged);
        let spills = account.may_spill(Kind::DeviceAsManaged);
        assert!(!has_managed || spills, "managed memory spills, after {after}");
        if self.is_metered {
            // All given room is charged, lost, unused, or on its way back.
            let room = self.room(account);
            assert_eq!(i128::from(account.unused_room()), room.max(0), "what was given, after {after}");
            let lacking = (i128::from(self.awaited) - room).max(0) as u64;
            assert_eq!(account.lacking(), lacking, "what is lacking, after {after}");
            // Below zero: what left while nothing was counted is told now. A scheduler takes no more than it has given.
            let asks_for = i128::from(account.to_ask_for(1));
            assert_eq!(asks_for, self.granted.max(0) + 1, "what was given, and is lacking, after {after}");
            assert_eq!(account.to_ask_for(0), 0, "nothing is lacking, after {after}");
            assert!(
                self.waiting > 0 || self.awaited == 0,
                "room is needed for an allocation that waits, after {after}"
            );
        } else {
            assert_eq!(account.lacking(), 0, "nothing lacks where nothing is counted, after {after}");
        }
        assert_eq!(account.is_anybody_waiting(), self.waiting > 0, "after {after}");
    }
}
