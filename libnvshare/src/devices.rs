//! The process's devices, and the books of its memory on each.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nvshare_proto::{GpuUuid, MemoryMode, Usage};

use crate::config::Config;
use crate::cuda::{CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, CUdevice, CUresult};
use crate::{driver, log};

/// Devices that one process can have.
const MOST: usize = 64;

/// One device of the process.
#[derive(Debug)]
pub(crate) struct Device {
    /// The program's own ordinal.
    pub(crate) ordinal: CUdevice,
    pub(crate) uuid: GpuUuid,
    /// Bytes that the driver says it has.
    pub(crate) total: u64,
    /// The process's limit in bytes.
    pub(crate) limit: Option<u64>,
    /// How memory is handed out on it.
    pub(crate) memory: MemoryMode,
    oversubscribe: bool,
    /// Memory was asked for or work submitted: the scheduler is told of it.
    used: AtomicBool,
    account: Mutex<Account>,
    /// Room came, or there will be none, or it is no longer needed.
    changed: Condvar,
}

/// A process's memory on one device, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Account {
    /// Allocated, wherever it is.
    pub(crate) allocated: u64,
    /// Of these, not on the card: evicted, or never brought there.
    pub(crate) absent: u64,
    /// What may become resident beyond what is. Below zero for a moment when a process that ran alone joins a
    /// scheduler.
    pub(crate) room: i64,
    /// What the GPU's clients may fill together, as the scheduler says.
    pub(crate) capacity: Option<u64>,
    /// The process holds the lock: new memory becomes resident at once.
    pub(crate) holding: bool,
    /// There is no scheduler, or it does not schedule: room is not counted.
    pub(crate) free: bool,
    /// What waiting allocations lack.
    pub(crate) needs: u64,
    /// Allocations that wait.
    waiting: u32,
    /// The scheduler has no room for them.
    refused: bool,
    /// What the scheduler was last told: allocated, and on the card.
    reported: (u64, u64),
}

/// How an allocation enters the books.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    /// It may become resident.
    Resident,
    /// It stays off the card until the lock is granted.
    Absent,
    /// It has to wait for this much room, outside the gate.
    Lacks(u64),
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
        (0..count.min(MOST))
            .filter_map(|index| describe(index, config).inspect_err(|e| log::warn(format_args!("device {index}: {e:?}"))).ok())
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
        account: Mutex::new(Account {
            allocated: 0,
            absent: 0,
            room: 0,
            capacity: None,
            holding: false,
            free: false,
            needs: 0,
            waiting: 0,
            refused: false,
            reported: (0, 0),
        }),
        changed: Condvar::new(),
    })
}

/// An allocation waits this long for room before the program sees the driver's own out-of-memory.
const PATIENCE: Duration = Duration::from_secs(60);
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
    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut Account) -> T) -> T {
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

    /// What the process may allocate at most: its limit, and what the GPU can hold.
    fn most(&self, account: &Account) -> u64 {
        let capacity = account.capacity.unwrap_or(self.total);
        let capacity = if self.oversubscribe { u64::MAX } else { capacity };
        self.limit.unwrap_or(u64::MAX).min(capacity)
    }

    /// Enters an allocation into the books, if limits allow.
    ///
    /// `inside`: the caller holds the gate open, so that what it is about to make resident is seen by the next
    /// drain.
    ///
    /// # Errors
    /// Out of memory when it exceeds the limit or the GPU; the books are unchanged.
    pub(crate) fn admit(&self, bytes: u64, inside: bool) -> Result<Admission, CUresult> {
        let mut account = self.lock();
        let most = self.most(&account);
        let allocated = account.allocated.saturating_add(bytes);
        if allocated > most {
            drop(account);
            log::info(format_args!("allocation of {bytes} bytes refused: {} of {most} are in use", allocated - bytes));
            return Err(CUresult::OUT_OF_MEMORY);
        }
        if !inside {
            account.allocated = allocated;
            account.absent += bytes;
            return Ok(Admission::Absent);
        }
        let resident = account.allocated - account.absent;
        // What exceeds the GPU comes and goes by page faults; its room is that of the whole GPU.
        let wanted = if self.oversubscribe {
            bytes.min(account.capacity.unwrap_or(self.total).saturating_sub(resident))
        } else {
            bytes
        };
        let lacks = (wanted as i64).saturating_sub(account.room);
        if lacks > 0 && !account.free {
            return Ok(Admission::Lacks(lacks as u64));
        }
        account.allocated = allocated;
        if !account.free {
            account.room -= wanted as i64;
        }
        Ok(Admission::Resident)
    }

    /// Takes an allocation out of the books, `absent` bytes of which were off the card.
    pub(crate) fn release(&self, bytes: u64, absent: u64) {
        self.update(|account| {
            account.allocated = account.allocated.saturating_sub(bytes);
            account.absent = account.absent.saturating_sub(absent);
            if !account.free {
                account.room += (bytes - absent.min(bytes)) as i64;
            }
        });
    }

    /// Waits until more room may be there. False: there will be none.
    ///
    /// `even_parked`: it is needed also while the lock is elsewhere. `ask` tells the session that `needs` changed.
    pub(crate) fn wait_for_room(&self, lacks: u64, even_parked: bool, ask: impl FnOnce()) -> bool {
        let deadline = Instant::now() + PATIENCE;
        let mut account = self.lock();
        account.needs = account.needs.max(lacks);
        account.waiting += 1;
        account.refused = false;
        drop(account);
        ask();
        let mut account = self.lock();
        while account.needs > 0 && (account.holding || even_parked) && !account.free && !account.refused {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { break };
            (account, _) = self.changed.wait_timeout(account, left).unwrap_or_else(PoisonError::into_inner);
        }
        account.waiting -= 1;
        let refused = account.refused || Instant::now() >= deadline;
        if refused || account.free {
            account.needs = 0;
        }
        !refused
    }

    /// Room came from the scheduler.
    pub(crate) fn give(&self, bytes: u64) {
        self.update(|account| {
            account.room += bytes as i64;
            account.needs = 0;
        });
    }

    /// The scheduler has no room for what waits.
    pub(crate) fn refuse(&self) {
        self.update(|account| account.refused = true);
    }

    /// Takes room for up to `absent` bytes that come back to the card; how much.
    pub(crate) fn take_for_restore(&self, absent: u64) -> u64 {
        self.update(|account| {
            let bytes = if account.free { absent } else { absent.min(account.room.max(0) as u64) };
            if !account.free {
                account.room -= bytes as i64;
            }
            account.absent = account.absent.saturating_sub(bytes);
            bytes
        })
    }

    /// Takes up to `bytes` of unused room; how much. What is absent and about to come back, if it is, keeps its
    /// room.
    pub(crate) fn take_unused(&self, bytes: u64, coming_back: bool) -> u64 {
        self.update(|account| {
            let kept = if coming_back { account.absent } else { 0 };
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
    }

    /// Room is counted again. The scheduler has charged what it was last told.
    pub(crate) fn limit(&self) {
        self.update(|account| {
            account.free = false;
            account.room = account.reported.1 as i64 - (account.allocated - account.absent) as i64;
        });
    }

    /// The lock is ours: memory becomes resident when it is allocated. False: some is absent, and the lock is no
    /// use yet, unless `anyway`.
    pub(crate) fn hold(&self, anyway: bool) -> bool {
        self.update(|account| {
            if account.absent > 0 && !anyway {
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
        if account.free { 0 } else { account.room.max(0) as u64 }
    }

    /// What the scheduler is told.
    pub(crate) fn usage(&self) -> Usage {
        let mut account = self.lock();
        account.reported = (account.allocated, account.allocated - account.absent);
        Usage {
            gpu: self.uuid,
            total: self.total,
            limit: self.limit.unwrap_or(0),
            allocated: account.allocated,
            absent: account.absent,
        }
    }

    /// Whether the scheduler's idea of what is allocated is too old.
    pub(crate) fn is_usage_stale(&self) -> bool {
        let account = self.lock();
        !account.free && account.allocated.abs_diff(account.reported.0) > REPORT_STEP
    }
}
