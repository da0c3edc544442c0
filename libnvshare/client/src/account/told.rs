//! What the scheduler is told of the account, and says of the GPU.

use nvshare_proto::Usage;
use nvshare_proto::units::MIB;

use super::{Account, Tenant};

/// Growth beyond this is reported at once, in bytes.
const REPORT_STEP: u64 = 64 * MIB;

impl<T: Tenant> Account<T> {
    /// What the scheduler is told.
    pub fn usage(&mut self) -> Usage {
        self.reported = (self.allocated, self.charged);
        Usage {
            gpu: self.terms.gpu,
            total: self.terms.total,
            limit: self.terms.limit.unwrap_or(0),
            allocated: self.allocated,
            absent: self.absent(),
            immovable: self.allocated.saturating_sub(self.movable).saturating_sub(self.reserve.pooled),
        }
    }

    /// What a scheduler is told that knows nothing of us yet: it charges what is charged, and there is no unused
    /// room.
    pub fn usage_to_register(&mut self) -> Usage {
        self.room = 0;
        self.made = 0;
        self.usage()
    }

    /// Whether the scheduler's idea of what is allocated is too old.
    #[must_use]
    pub fn is_usage_stale(&self) -> bool {
        !self.unmetered && self.allocated.abs_diff(self.reported.0) > REPORT_STEP
    }

    /// Room that evictions have made since this was asked: the scheduler is to be told of it.
    pub fn take_made(&mut self) -> u64 {
        std::mem::take(&mut self.made)
    }

    /// The limit in bytes of the process, or of its tenant.
    #[must_use]
    pub fn allocation_limit(&self) -> Option<u64> {
        self.terms.limit
    }

    /// The limit is another from now on. What is beyond it stays, and nothing is added.
    pub fn set_allocation_limit(&mut self, limit: Option<u64>) {
        self.terms.limit = limit;
    }

    /// What the GPU's clients may fill together.
    pub fn set_capacity(&mut self, bytes: u64) {
        self.capacity = Some(bytes);
    }

    /// Whether it is still to be seen what the GPU's clients may fill together, or that there is no scheduler.
    #[must_use]
    pub fn is_capacity_awaited(&self) -> bool {
        self.capacity.is_none() && !self.unmetered
    }
}
