//! Messages about the account to the scheduler, and from it about the GPU.

use nvshare_proto::units::MIB;
use nvshare_proto::{GpuUuid, Usage};

use super::{Account, LimitUse, Reported, TenantQuota};

/// Growth beyond this is reported at once, in bytes.
const REPORT_STEP: u64 = 64 * MIB;

impl<T: TenantQuota> Account<T> {
    /// The usage that the scheduler is told; notes it as told. Lost room counts as allocated: a process that runs beside this
    /// one has to do without it.
    pub fn usage(&mut self) -> Usage {
        self.reported = Reported { allocated: self.allocated + self.lost, charged: self.charged + self.lost };
        Usage {
            gpu: self.facts.gpu,
            total: self.facts.total,
            limit: self.facts.limit.unwrap_or(0),
            allocated: self.allocated + self.lost,
            absent: self.absent(),
            immovable: self.allocated.saturating_sub(self.movable).saturating_sub(self.reserve.managed_pools),
        }
    }

    /// The usage for a scheduler that knows nothing of this process: it charges the bytes that are charged now, and
    /// there is no unused room.
    pub fn usage_to_register(&mut self) -> Usage {
        self.room = 0;
        self.made = 0;
        self.lost = 0;
        self.refused = 0;
        self.usage()
    }

    /// Whether the last reported usage is too old. A process that did not fit the card and does now may wait for nothing else.
    #[must_use]
    pub fn is_usage_stale(&self) -> bool {
        let (now, reported) = (self.allocated + self.lost, self.reported.allocated);
        let most = self.most_on_card();
        !self.unmetered && (now.abs_diff(reported) > REPORT_STEP || reported > most && now <= most)
    }

    /// Room that evictions have made since the last call: the caller tells the scheduler of it.
    pub fn take_made(&mut self) -> u64 {
        std::mem::take(&mut self.made)
    }

    /// The GPU's name.
    #[must_use]
    pub fn gpu(&self) -> GpuUuid {
        self.facts.gpu
    }

    /// The device is another GPU from now on, which is as large. The scheduler learns of it when the process registers again.
    pub fn set_gpu(&mut self, gpu: GpuUuid) {
        self.facts.gpu = gpu;
    }

    /// The limit in bytes of the process, or of its tenant.
    #[must_use]
    pub fn allocation_limit(&self) -> Option<u64> {
        self.facts.limit
    }

    /// Sets another limit. Memory beyond it stays, and no more is admitted.
    pub fn set_allocation_limit(&mut self, limit: Option<u64>) {
        self.facts.limit = limit;
    }

    /// Sets the bytes that the GPU's clients may fill together: they were measured anew, and lost room is without them.
    pub fn set_capacity(&mut self, bytes: u64) {
        self.capacity = Some(bytes);
        self.limit_use = LimitUse::Known;
        self.find_lost();
    }

    /// Other processes of the tenant may have its whole limit: the scheduler has no place for this one, or has not answered.
    pub fn shut_out(&mut self) {
        self.limit_use = LimitUse::ShutOut;
    }

    /// The scheduler has registered the process, which was shut out or not. It tells the capacity next.
    pub fn let_in(&mut self) {
        if self.limit_use != LimitUse::Known {
            self.limit_use = LimitUse::Coming;
        }
    }

    /// The connection is gone. A scheduler that was about to tell the capacity does not.
    pub fn lose_scheduler(&mut self) {
        if self.limit_use == LimitUse::Coming {
            self.limit_use = LimitUse::Unknown;
        }
    }

    /// There is no scheduler that processes could share the limit by: each has the whole.
    pub fn find_nobody(&mut self) {
        if self.limit_use == LimitUse::Unknown {
            self.limit_use = LimitUse::Known;
        }
    }

    /// Whether the process still waits to hear the GPU's capacity, or that there is no scheduler, or no place for this process. A
    /// scheduler that does not schedule tells the capacity too.
    #[must_use]
    pub fn is_capacity_awaited(&self) -> bool {
        let is_awaited = match self.limit_use {
            LimitUse::Coming => true,
            LimitUse::Unknown | LimitUse::Known => !self.unmetered,
            LimitUse::ShutOut => false,
        };
        self.capacity.is_none() && is_awaited
    }

    /// Whether the limit is a seat's, which its processes have together.
    #[must_use]
    pub fn is_limit_of_seat(&self) -> bool {
        self.facts.is_of_seat
    }

    /// Whether it is not known yet which processes share the limit: the scheduler says so before it tells the capacity. A seat's
    /// process waits also after the session has given up the wait for an answer.
    #[must_use]
    pub fn is_limit_awaited(&self) -> bool {
        let is_awaited = match self.limit_use {
            LimitUse::Coming => true,
            LimitUse::Unknown => self.facts.is_of_seat || !self.unmetered,
            LimitUse::Known | LimitUse::ShutOut => false,
        };
        self.facts.limit.is_some() && is_awaited
    }
}
