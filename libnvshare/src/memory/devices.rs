//! The process's devices, and the books of its memory on each.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nvshare_proto::{GpuUuid, MemoryMode, Usage};

use crate::driver;
use crate::driver::types::{CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, CUdevice, CUresult};
use crate::memory::allocations::Kind;
use crate::memory::quota::{self, Seat};
use crate::process::config::Config;
use crate::process::log;
use crate::process::unwind::OnUnwind;

/// Devices that one process can have.
const MOST: usize = 64;

/// One device of the process.
#[derive(Debug)]
pub(crate) struct Device {
    /// The program's own ordinal.
    pub(crate) ordinal: CUdevice,
    pub(crate) uuid: GpuUuid,
    /// Bytes that the driver says it has.
    total: u64,
    /// The process's limit in bytes.
    pub(crate) limit: Option<u64>,
    /// How memory is handed out on it.
    pub(crate) memory: MemoryMode,
    /// One program may have more than fits: what does not comes and goes by page faults.
    pub(crate) oversubscribe: bool,
    /// Memory was asked for or work submitted: the scheduler is told of it.
    used: AtomicBool,
    /// What was free on it when the process first came to it.
    free_at_first: OnceLock<u64>,
    account: Mutex<Account>,
    /// Room came, or there will be none, or it is no longer needed.
    changed: Condvar,
}

/// A process's memory on one device, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Account {
    /// Allocated, wherever it is; with what the driver keeps.
    pub(crate) allocated: u64,
    /// Of these, what can be moved.
    movable: u64,
    /// Of these, the program's own managed memory: the driver lets it have more than the card holds.
    managed: u64,
    /// Of these, what the driver keeps for itself.
    pub(crate) kept: Kept,
    /// Of these, on the card as far as the ledger goes: room was taken for them.
    charged: u64,
    /// What may be charged beyond that. Below zero for a moment when a process that ran alone joins a scheduler.
    room: i64,
    /// What the GPU's clients may fill together, as the scheduler says.
    pub(crate) capacity: Option<u64>,
    /// The process holds the lock: new memory becomes resident at once.
    pub(crate) holding: bool,
    /// There is no scheduler, or it does not schedule: room is not counted.
    free: bool,
    /// What waiting allocations lack.
    needs: u64,
    /// Allocations that wait.
    waiting: u32,
    /// The scheduler has no room for them.
    refused: bool,
    /// Room that an eviction has made and the scheduler has not been told of. A registration says what is charged then,
    /// and so takes it in.
    made: u64,
    /// What the scheduler was last told: allocated and charged.
    reported: (u64, u64),
    /// The limit is shared with the tenant's other processes.
    pub(crate) seat: Option<Seat>,
}

/// What the driver keeps for itself on a device, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Kept {
    /// Freed, and kept by pools of the driver's own memory.
    pub(crate) ordered: u64,
    /// Freed, and kept by managed pools.
    pub(crate) pooled: u64,
    /// Of graphs.
    pub(crate) graphs: u64,
}

impl Kept {
    /// What pools of this kind of memory keep.
    pub(crate) fn of(&mut self, kind: Kind) -> Option<&mut u64> {
        match kind {
            Kind::Ordered => Some(&mut self.ordered),
            Kind::Pooled => Some(&mut self.pooled),
            _ => None,
        }
    }

    pub(crate) fn sum(self) -> u64 {
        self.ordered + self.pooled + self.graphs
    }
}

impl Account {
    /// What counts towards the limit: of all processes of the tenant, where that is known.
    pub(crate) fn used(&self) -> u64 {
        self.seat.map_or(self.allocated, |seat| seat.used())
    }

    /// Allocated and not charged: evicted, or not brought to the card yet.
    fn absent(&self) -> u64 {
        self.allocated.saturating_sub(self.charged)
    }

    /// An allocation of so many bytes entered the books.
    fn enter(&mut self, bytes: u64, kind: Kind) {
        if kind.is_movable() {
            self.movable += bytes;
        }
        if kind == Kind::Managed {
            self.managed += bytes;
        }
    }

    /// An allocation of so many bytes left them.
    fn leave(&mut self, bytes: u64, kind: Kind) {
        if kind.is_movable() {
            self.movable = self.movable.saturating_sub(bytes);
        }
        if kind == Kind::Managed {
            self.managed = self.managed.saturating_sub(bytes);
        }
    }

    /// Takes up to this much room; how much.
    fn charge(&mut self, bytes: u64) -> u64 {
        let bytes = if self.free { bytes } else { bytes.min(self.room.max(0) as u64) };
        if !self.free {
            self.room -= bytes as i64;
        }
        self.charged += bytes;
        bytes
    }

    /// The room that is lacking for so much.
    fn lacks(&self, bytes: u64) -> u64 {
        if self.free { 0 } else { (bytes as i64).saturating_sub(self.room).max(0) as u64 }
    }

    /// Gives room back that was taken.
    fn discharge(&mut self, bytes: u64) {
        self.charged = self.charged.saturating_sub(bytes);
    }
}

/// How an allocation enters the books.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    /// It is allocated, and this much of it is charged: it may be on the card.
    Charged(u64),
    /// It has to wait for this much room, outside the gate.
    Lacks(u64),
    /// The lock has come meanwhile: the caller can have the gate open.
    Again,
}

static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();

/// The devices, once [`discover`]ed.
pub(crate) fn all() -> impl Iterator<Item = &'static Device> {
    DEVICES.get().into_iter().flatten()
}

/// The devices that are in use.
pub(crate) fn used() -> impl Iterator<Item = &'static Device> {
    all().filter(|device| device.used.load(Ordering::Relaxed))
}

/// The device of this ordinal.
pub(crate) fn get(ordinal: CUdevice) -> Option<&'static Device> {
    all().find(|device| device.ordinal == ordinal)
}

/// The device of this UUID.
pub(crate) fn by_uuid(uuid: GpuUuid) -> Option<&'static Device> {
    all().find(|device| device.uuid == uuid)
}

/// Asks the driver for the process's devices, once. Needs `cuInit` to have succeeded.
pub(crate) fn discover(config: &Config) {
    DEVICES.get_or_init(|| {
        let count = driver::device_count().unwrap_or(0).max(0) as usize;
        let warn = |index: usize, error: &CUresult| log::warn(format_args!("device {index}: {error:?}"));
        (0..count.min(MOST))
            .filter_map(|index| describe(index, config).inspect_err(|error| warn(index, error)).ok())
            .collect()
    });
}

fn describe(index: usize, config: &Config) -> Result<Device, CUresult> {
    let ordinal = driver::device(index as i32)?;
    let concurrent = driver::device_attribute(ordinal, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS)? != 0;
    let mut memory = config.memory;
    if memory == MemoryMode::Managed && !concurrent {
        log::warn(format_args!("device {index} cannot share managed memory; its memory is not moved"));
        memory = MemoryMode::Off;
    }
    Ok(Device {
        ordinal,
        uuid: GpuUuid(driver::device_uuid(ordinal)?),
        total: driver::device_total(ordinal)?,
        limit: config.limit(index),
        memory,
        oversubscribe: config.oversubscribe,
        used: AtomicBool::new(false),
        free_at_first: OnceLock::new(),
        account: Mutex::new(Account::default()),
        changed: Condvar::new(),
    })
}

/// An allocation of who runs waits this long for room before the program sees the driver's own out-of-memory.
const PATIENCE: Duration = Duration::from_secs(60);
/// More than the session waits for the answer of a scheduler that is there; where there is none it says so at once.
const FIRST_CONTACT: Duration = Duration::from_secs(6);
/// Growth beyond this is reported at once.
const REPORT_STEP: u64 = 64 << 20;

impl Device {
    /// The books, as they are now.
    pub(crate) fn account(&self) -> Account {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the books, and wakes who waits for a change.
    fn update<T>(&self, change: impl FnOnce(&mut Account) -> T) -> T {
        let mut account = self.lock();
        let result = change(&mut account);
        let waiting = account.waiting > 0;
        drop(account);
        if waiting {
            self.changed.notify_all();
        }
        result
    }

    /// The device is in use from now on. True: it was not before.
    pub(crate) fn mark_used(&self) -> bool {
        !self.used.load(Ordering::Relaxed) && !self.used.swap(true, Ordering::Relaxed)
    }

    /// The process comes to the device. Its context is current.
    pub(crate) fn meet(&self) {
        self.free_at_first.get_or_init(|| driver::free_memory().unwrap_or(self.total));
    }

    /// Whether so much more is on the card, for a process that has met no scheduler: nobody makes room for it. Its own
    /// memory that it frees the driver may keep and call used, so either what was free at first or what is now will do.
    pub(crate) fn has_it_alone(&self, bytes: u64) -> bool {
        let first = self.free_at_first.get().copied().unwrap_or(self.total);
        let account = self.account();
        let others = account.allocated.saturating_sub(account.managed);
        if self.oversubscribe || others.saturating_add(bytes) <= first {
            return true;
        }
        // Whether there is a scheduler may not be known yet.
        self.wait_for_capacity();
        self.account().capacity.is_some() || driver::free_memory().is_ok_and(|free| bytes <= free)
    }

    /// What one process may have on the card at most.
    fn capacity(&self, account: &Account) -> u64 {
        account.capacity.unwrap_or(self.total)
    }

    /// Enters an allocation into the books, if limits allow. One of a pool takes first what the pool has kept.
    ///
    /// `holding`: the caller holds the gate open, so that the next drain sees the allocation, and what can be moved is
    /// about to be on the card. What [needs room](Kind::needs_room) needs it in any case.
    ///
    /// # Errors
    /// Out of memory when it exceeds the limit or the GPU; the books are unchanged.
    pub(crate) fn admit(&self, bytes: u64, kind: Kind, holding: bool) -> Result<Admission, CUresult> {
        let mut account = self.lock();
        let again = account.kept.of(kind).map_or(0, |kept| bytes.min(*kept));
        let more = bytes - again;
        let allocated = account.allocated.saturating_add(more);
        let spills = self.spills(&account, kind);
        let most = if kind == Kind::Managed { self.limit.unwrap_or(u64::MAX) } else { self.most(&account) };
        if allocated > most {
            drop(account);
            log::info(format_args!(
                "allocation of {bytes} bytes refused: {} of {most} are in use",
                allocated - more
            ));
            return Err(CUresult::OUT_OF_MEMORY);
        }
        if !holding && !kind.needs_room() {
            if account.holding {
                return Ok(Admission::Again);
            }
            self.charge_quota(&account, more)?;
            account.allocated = allocated;
            account.enter(bytes, kind);
            return Ok(Admission::Charged(0));
        }
        let fits = self.capacity(&account).saturating_sub(account.charged);
        let wanted = if spills { more.min(fits) } else { more };
        let lacks = account.lacks(wanted);
        if lacks > 0 {
            return Ok(Admission::Lacks(lacks));
        }
        self.charge_quota(&account, more)?;
        if let Some(kept) = account.kept.of(kind) {
            *kept -= again;
        }
        account.allocated = allocated;
        account.enter(bytes, kind);
        Ok(Admission::Charged(again + account.charge(wanted)))
    }

    /// Charges the tenant, if the limit is shared.
    fn charge_quota(&self, account: &Account, bytes: u64) -> Result<(), CUresult> {
        let Some(seat) = account.seat else { return Ok(()) };
        let limit = self.limit.unwrap_or(u64::MAX);
        seat.charge(bytes, limit).map_err(|used| {
            log::info(format_args!(
                "allocation of {bytes} bytes refused: {used} of {limit} are in use by this program's processes"
            ));
            CUresult::OUT_OF_MEMORY
        })
    }

    /// The limit is shared from now on, or no more. What there is counts, even if it is too much by then.
    pub(crate) fn share_quota(&self, page: Option<quota::Mapped>) {
        let mut account = self.lock();
        account.seat = page.and_then(|page| page.seat(self.uuid));
        if let Some(seat) = account.seat {
            let _ = seat.charge(account.allocated, u64::MAX);
        }
    }

    /// Takes an allocation out of the books, `charged` bytes of which were charged.
    pub(crate) fn release(&self, bytes: u64, charged: u64, kind: Kind) {
        self.update(|account| {
            account.leave(bytes, kind);
            account.allocated = account.allocated.saturating_sub(bytes);
            if let Some(seat) = account.seat {
                seat.discharge(bytes);
            }
            account.discharge(charged);
            if !account.free {
                account.room += charged as i64;
            }
        });
    }

    /// What the driver keeps for itself on the card, as of now. It counts like an allocation that cannot be moved,
    /// wanted or not.
    pub(crate) fn set_kept(&self, kept: Kept) {
        self.update(|account| {
            let before = std::mem::replace(&mut account.kept, kept).sum();
            let (more, less) = (kept.sum().saturating_sub(before), before.saturating_sub(kept.sum()));
            account.allocated = (account.allocated + more).saturating_sub(less);
            account.charged = (account.charged + more).saturating_sub(less);
            if !account.free {
                account.room += less as i64 - more as i64;
            }
            if let Some(seat) = account.seat {
                seat.discharge(less);
                let _ = seat.charge(more, u64::MAX);
            }
        });
    }

    /// An allocation of a pool is freed, `charged` bytes of which were charged: the pool keeps them.
    pub(crate) fn keep(&self, bytes: u64, charged: u64, kind: Kind) {
        self.release(bytes - charged, 0, kind);
        self.update(|account| {
            account.leave(charged, kind);
            if let Some(kept) = account.kept.of(kind) {
                *kept += charged;
            }
        });
    }

    /// What the process may have at most. Its own managed memory is in nobody's way: the driver makes place.
    fn most(&self, account: &Account) -> u64 {
        let fits = self.capacity(account).saturating_add(account.managed);
        self.limit.unwrap_or(u64::MAX).min(if self.oversubscribe { u64::MAX } else { fits })
    }

    /// Whether an allocation that does not fit beside what is charged is left to the driver, which moves pages when they
    /// are touched.
    fn spills(&self, account: &Account, kind: Kind) -> bool {
        self.oversubscribe || account.managed > 0 || kind == Kind::Managed
    }

    /// Whether pages of such memory may be on the card beyond what is charged.
    pub(crate) fn may_spill(&self, kind: Kind) -> bool {
        self.spills(&self.lock(), kind)
    }

    /// Whether graphs have brought the process, or its tenant, over its limit.
    pub(crate) fn is_over_limit_by_graphs(&self) -> bool {
        let account = self.lock();
        account.kept.graphs > 0 && self.limit.is_some_and(|limit| account.used() > limit)
    }

    /// Whether so much more would be within the limits, were nothing kept.
    pub(crate) fn has_left(&self, bytes: u64) -> bool {
        let account = self.lock();
        let fits =
            |used: u64, most: u64| used.saturating_sub(account.kept.sum()).saturating_add(bytes) <= most;
        fits(account.allocated, self.most(&account)) && fits(account.used(), self.limit.unwrap_or(u64::MAX))
    }

    /// Charges up to this much for what comes back to the card; how much.
    pub(crate) fn charge(&self, bytes: u64) -> u64 {
        self.update(|account| account.charge(bytes))
    }

    /// Charges as much of an allocation as the card can hold beside what is charged; how much.
    ///
    /// # Errors
    /// The room that is lacking for that.
    pub(crate) fn charge_whole(&self, bytes: u64) -> Result<u64, u64> {
        self.update(|account| {
            let fits = self.capacity(account).saturating_sub(account.charged);
            let wanted = if account.free { bytes } else { bytes.min(fits) };
            match account.lacks(wanted) {
                0 => Ok(account.charge(wanted)),
                lacks => Err(lacks),
            }
        })
    }

    /// Something that was charged did not come to the card.
    pub(crate) fn uncharge(&self, bytes: u64) {
        self.update(|account| {
            account.discharge(bytes);
            if !account.free {
                account.room += bytes as i64;
            }
        });
    }

    /// What was charged has left the card; its room is the scheduler's.
    pub(crate) fn discharge(&self, bytes: u64) {
        self.update(|account| {
            account.discharge(bytes);
            account.made += bytes;
        });
    }

    /// Gives up to so much unused room to the eviction that is under way; how much.
    pub(crate) fn evict_unused(&self, bytes: u64) -> u64 {
        self.update(|account| {
            let taken = bytes.min(account.room.max(0) as u64);
            account.room -= taken as i64;
            account.made += taken;
            taken
        })
    }

    /// Room that evictions have made since this was asked.
    pub(crate) fn take_made(&self) -> u64 {
        self.update(|account| std::mem::take(&mut account.made))
    }

    /// Waits until more room may be there. False: there will be none.
    ///
    /// `even_parked`: it is needed also while the lock is elsewhere. `ask` tells the session that something is
    /// needed.
    pub(crate) fn wait_for_room(&self, lacks: u64, even_parked: bool, ask: impl FnOnce()) -> bool {
        let mut account = self.lock();
        account.needs = account.needs.max(lacks);
        account.waiting += 1;
        account.refused = false;
        drop(account);
        // The thread may be cancelled while it tells the session.
        let undo = OnUnwind::new(|| self.update(|account| account.waiting -= 1));
        ask();
        undo.done();
        let mut account = self.lock();
        // Who is parked waits for its turn, which may be long in coming; who runs is served or refused soon.
        let mut left = PATIENCE;
        while account.needs > 0
            && (account.holding || even_parked)
            && !account.free
            && !account.refused
            && !left.is_zero()
        {
            let (was_holding, begin) = (account.holding, Instant::now());
            (account, _) = self.changed.wait_timeout(account, left).unwrap_or_else(PoisonError::into_inner);
            if was_holding && account.holding {
                left = left.saturating_sub(begin.elapsed());
            }
        }
        account.waiting -= 1;
        let refused = account.refused || left.is_zero();
        if refused || account.free {
            account.needs = 0;
        }
        !refused
    }

    /// Room came from the scheduler.
    pub(crate) fn give(&self, bytes: u64) {
        self.update(|account| {
            account.room = account.room.saturating_add_unsigned(bytes);
            account.needs = 0;
        });
    }

    /// The scheduler has no room for what waits.
    pub(crate) fn refuse(&self) {
        self.update(|account| {
            account.refused = account.waiting > 0;
            account.needs = 0;
        });
    }

    /// What the GPU's clients may fill together.
    pub(crate) fn set_capacity(&self, bytes: u64) {
        self.lock().capacity = Some(bytes);
        self.changed.notify_all();
    }

    /// Waits, for a moment, until the scheduler has said what the GPU's clients may fill, or there is none.
    pub(crate) fn wait_for_capacity(&self) {
        let unknown = |account: &mut Account| account.capacity.is_none() && !account.free;
        let account = self.lock();
        drop(self.changed.wait_timeout_while(account, FIRST_CONTACT, unknown));
    }

    /// Takes up to `bytes` of unused room; how much. What is absent and about to come back, if it is, keeps its
    /// room.
    pub(crate) fn take_unused(&self, bytes: u64, coming_back: bool) -> u64 {
        self.update(|account| {
            let kept = if coming_back { account.absent() } else { 0 };
            let taken = bytes.min((account.room.max(0) as u64).saturating_sub(kept));
            account.room -= taken as i64;
            taken
        })
    }

    /// Room is not counted any more: there is nobody to share with.
    pub(crate) fn unlimit(&self) {
        self.update(|account| {
            account.free = true;
            account.needs = 0;
        });
        self.changed.notify_all();
    }

    /// Room is counted again. The scheduler has charged what it was last told.
    pub(crate) fn limit(&self) {
        self.update(|account| {
            account.free = false;
            // What an eviction has made and is still to be told is the scheduler's already.
            account.room = account.reported.1 as i64 - account.charged as i64 - account.made as i64;
        });
    }

    fn beyond_capacity(&self, account: &Account) -> u64 {
        account.allocated.saturating_sub(self.capacity(account))
    }

    /// What one program has beyond what the card can hold.
    pub(crate) fn never_fits(&self) -> u64 {
        self.beyond_capacity(&self.account())
    }

    /// The lock is ours: memory becomes resident when it is allocated. False: some is absent that would fit, and
    /// the lock is no use yet, unless `anyway`.
    pub(crate) fn hold(&self, anyway: bool) -> bool {
        self.update(|account| {
            let never_fits = self.beyond_capacity(account);
            if account.absent() > never_fits && !anyway {
                return false;
            }
            account.holding = true;
            true
        })
    }

    /// The lock is not ours any more.
    pub(crate) fn let_go(&self) {
        self.update(|account| {
            account.holding = false;
            account.needs = 0;
        });
    }

    /// What is lacking now, for allocations that wait or to make good what was taken too much.
    pub(crate) fn lacking(&self) -> u64 {
        let account = self.lock();
        if account.free { 0 } else { account.needs.max((-account.room).max(0) as u64) }
    }

    /// Unused room.
    pub(crate) fn unused(&self) -> u64 {
        let account = self.lock();
        // What has just come is somebody's who is about to take it.
        let is_awaited = account.waiting > 0 && account.needs == 0;
        if account.free || is_awaited { 0 } else { account.room.max(0) as u64 }
    }

    /// What the scheduler is told.
    pub(crate) fn usage(&self) -> Usage {
        self.tell(&mut self.lock())
    }

    /// What a scheduler is told that knows nothing of us yet: it charges what is charged, and there is no unused
    /// room.
    pub(crate) fn usage_to_register(&self) -> Usage {
        let mut account = self.lock();
        account.room = 0;
        account.made = 0;
        self.tell(&mut account)
    }

    fn tell(&self, account: &mut Account) -> Usage {
        account.reported = (account.allocated, account.charged);
        Usage {
            gpu: self.uuid,
            total: self.total,
            limit: self.limit.unwrap_or(0),
            allocated: account.allocated,
            absent: account.absent(),
            immovable: account.allocated.saturating_sub(account.movable).saturating_sub(account.kept.pooled),
        }
    }

    /// Whether the scheduler's idea of what is allocated is too old.
    pub(crate) fn is_usage_stale(&self) -> bool {
        let account = self.lock();
        !account.free && account.allocated.abs_diff(account.reported.0) > REPORT_STEP
    }
}
