//! Admission of allocations to the account, and their release.

use super::{Account, DriverReserve, LimitUse, TenantQuota};
use crate::kind::Kind;

/// Bytes that a process can address. The driver refuses more at once, so nobody makes room for it.
const ADDRESSES: u64 = 1 << 47;

/// The outcome of an admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// The allocation is admitted, and this many bytes of it are charged: they may be on the card.
    Charged(u64),
    /// The allocation has to wait, outside the gate, until there is room for this many bytes.
    NeedsRoom(u64),
    /// The process has got the lock meanwhile: the caller can enter the open gate and try again.
    Again,
}

/// Why an allocation is not admitted. All sizes are bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The process would have more than its limit, or more than the GPU can hold.
    Own {
        /// Bytes that the process has.
        used: u64,
        /// Bytes that the process may have.
        most: u64,
    },
    /// The tenant's processes would have more than their limit together.
    Tenants {
        /// Bytes that the tenant's processes have.
        used: u64,
        /// Bytes that they may have.
        limit: u64,
    },
}

/// Where the thread is that makes an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// Inside the open gate: the next drain sees the allocation, and movable memory is about to be on the card.
    InsideGate,
    /// The gate is closed.
    OutsideGate,
}

impl<T: TenantQuota> Account<T> {
    /// Admits an allocation, if limits allow. An allocation from a pool first takes bytes that the pool has kept. `kept` is the most
    /// that these are: it gets none that other pools of its kind have kept.
    ///
    /// Inside the gate all memory needs room; outside, only memory that [needs room](Kind::needs_room) wherever the lock is.
    ///
    /// # Errors
    /// The allocation exceeds the limit or the GPU; nothing is changed.
    pub fn admit(&mut self, bytes: u64, kind: Kind, kept: u64, caller: Caller) -> Result<Admission, Refusal> {
        let again = self.reserve.of(kind).map_or(0, |all| bytes.min(*all).min(kept));
        let more = bytes - again;
        let allocated = self.allocated.saturating_add(more);
        let most = if kind == Kind::ProgramsManaged { self.own_limit() } else { self.most() };
        let most = most.min(ADDRESSES);
        if allocated > most {
            return Err(Refusal::Own { used: self.allocated, most });
        }
        if caller == Caller::OutsideGate && !kind.needs_room() {
            if self.holding {
                return Ok(Admission::Again);
            }
            self.charge_tenant(more)?;
            self.allocated = allocated;
            self.enter(bytes, kind);
            if kind == Kind::Mapped {
                self.unmapped += bytes;
            }
            return Ok(Admission::Charged(0));
        }
        let fits = self.most_on_card().saturating_sub(self.charged);
        let wanted = if self.may_spill(kind) { more.min(fits) } else { more };
        // An allocation that takes no room need not wait for any, though the process may lack room for what it has.
        if wanted > 0 && self.lacks(wanted) > 0 {
            return Ok(Admission::NeedsRoom(wanted));
        }
        self.charge_tenant(more)?;
        if let Some(kept) = self.reserve.of(kind) {
            *kept -= again;
        }
        self.allocated = allocated;
        self.enter(bytes, kind);
        Ok(Admission::Charged(again + self.charge(wanted)))
    }

    /// An allocation is freed, and its memory stays for the program's next allocation. It is in the account as before, but
    /// counts towards no limit, so that no process of the tenant is refused because of it. Before this process's own sums
    /// refuse an allocation, it is dropped ([`Self::release_aside`]).
    pub fn set_aside(&mut self, bytes: u64) {
        self.aside += bytes;
        if let Some(tenant) = self.tenant {
            tenant.discharge(bytes);
        }
    }

    /// Memory that was set aside is an allocation again.
    ///
    /// # Errors
    /// The tenant's processes would have more than their limit; nothing is changed.
    pub fn take_again(&mut self, bytes: u64) -> Result<(), Refusal> {
        let allocated = self.allocated - self.aside + bytes;
        let most = self.own_limit();
        if allocated > most {
            return Err(Refusal::Own { used: self.used(), most });
        }
        self.charge_tenant(bytes)?;
        self.aside = self.aside.saturating_sub(bytes);
        Ok(())
    }

    /// Takes memory out of the account that was set aside, `charged` bytes of which were charged.
    pub fn release_aside(&mut self, bytes: u64, charged: u64, kind: Kind) {
        self.aside = self.aside.saturating_sub(bytes);
        self.take_out(bytes, charged, kind);
    }

    /// Takes an allocation out of the account, `charged` bytes of which were charged.
    pub fn release(&mut self, bytes: u64, charged: u64, kind: Kind) {
        self.take_out(bytes, charged, kind);
        if let Some(tenant) = self.tenant {
            tenant.discharge(bytes);
        }
    }

    fn take_out(&mut self, bytes: u64, charged: u64, kind: Kind) {
        self.leave(bytes, kind);
        if kind == Kind::Mapped {
            self.map(bytes - charged);
        }
        self.allocated = self.allocated.saturating_sub(bytes);
        self.uncharge(charged);
    }

    /// An allocation of a pool is freed, `charged` bytes of which were charged: the pool keeps them.
    pub fn keep(&mut self, bytes: u64, charged: u64, kind: Kind) {
        self.release(bytes - charged, 0, kind);
        self.leave(charged, kind);
        if let Some(kept) = self.reserve.of(kind) {
            *kept += charged;
        }
    }

    /// Sets the driver's reserve, as measured now. It counts like an allocation that cannot be moved, whether or not
    /// it exceeds the limit.
    pub fn set_reserve(&mut self, reserve: DriverReserve) {
        let before = std::mem::replace(&mut self.reserve, reserve).sum();
        let (more, less) = (reserve.sum().saturating_sub(before), before.saturating_sub(reserve.sum()));
        self.allocated = (self.allocated + more).saturating_sub(less);
        self.charged = (self.charged + more).saturating_sub(less);
        self.return_room(less);
        self.take_room(more);
        if let Some(tenant) = self.tenant {
            tenant.discharge(less);
            let _ = tenant.charge(more, u64::MAX);
        }
    }

    /// From now on the limit is shared, or not any more. All that is allocated counts, even if it exceeds the limit.
    pub fn share_limit(&mut self, tenant: Option<T>) {
        self.tenant = tenant;
        if let Some(tenant) = tenant {
            let _ = tenant.charge(self.allocated - self.aside, u64::MAX);
        }
    }

    /// Whether pages of such memory may be on the card beyond the charged bytes: the driver moves them when they are touched.
    #[must_use]
    pub fn may_spill(&self, kind: Kind) -> bool {
        kind != Kind::Mapped
            && (self.facts.oversubscribe || self.managed > 0 || kind == Kind::ProgramsManaged)
    }

    /// Whether graphs have brought the process, or its tenant, over its limit. A process that is shut out keeps what it has.
    #[must_use]
    pub fn is_over_limit_by_graphs(&self) -> bool {
        self.reserve.graphs > 0 && self.facts.limit.is_some_and(|limit| self.used() > limit)
    }

    /// Whether `bytes` more would be within the limits without the driver's reserve.
    #[must_use]
    pub fn has_left(&self, bytes: u64) -> bool {
        let fits =
            |used: u64, most: u64| used.saturating_sub(self.reserve.sum()).saturating_add(bytes) <= most;
        fits(self.allocated, self.most()) && fits(self.used(), self.own_limit())
    }

    /// Whether `bytes` more fit the card for a process without a scheduler. `free_at_first` was free when the process
    /// first used the device.
    #[must_use]
    pub fn fits_alone(&self, bytes: u64, free_at_first: u64) -> bool {
        let unmanaged = self.allocated.saturating_sub(self.managed);
        self.facts.oversubscribe || unmanaged.saturating_add(bytes) <= free_at_first
    }

    /// Bytes that the process may have at most. Its own managed memory takes no place: the driver moves it away.
    fn most(&self) -> u64 {
        let fits = self.most_on_card().saturating_add(self.managed);
        self.own_limit().min(if self.facts.oversubscribe { u64::MAX } else { fits })
    }

    fn own_limit(&self) -> u64 {
        let Some(limit) = self.facts.limit else { return u64::MAX };
        match self.limit_use {
            LimitUse::Known => limit,
            LimitUse::Unknown | LimitUse::Coming if !self.facts.is_of_seat => limit,
            LimitUse::Unknown | LimitUse::Coming | LimitUse::ShutOut => 0,
        }
    }

    /// Charges the tenant's sum, if the limit is shared.
    fn charge_tenant(&self, bytes: u64) -> Result<(), Refusal> {
        let limit = self.own_limit();
        let charged = self.tenant.map_or(Ok(()), |tenant| tenant.charge(bytes, limit));
        charged.map_err(|used| Refusal::Tenants { used, limit })
    }

    fn enter(&mut self, bytes: u64, kind: Kind) {
        if kind.is_movable() {
            self.movable += bytes;
        }
        if kind == Kind::ProgramsManaged {
            self.managed += bytes;
        }
    }

    fn leave(&mut self, bytes: u64, kind: Kind) {
        if kind.is_movable() {
            self.movable = self.movable.saturating_sub(bytes);
        }
        if kind == Kind::ProgramsManaged {
            self.managed = self.managed.saturating_sub(bytes);
        }
    }
}
