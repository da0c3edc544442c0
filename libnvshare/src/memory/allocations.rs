//! The process's allocation list.
//!
//! Keyed by base address, as programs free. Each allocation knows how much of it is on the card: eviction takes
//! from its end, so one number says it, and restoring brings back exactly what was taken.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use dashmap::DashMap;

use crate::driver::types::{CUdevice, CUdeviceptr};
use crate::work::contexts::Context;

/// What an allocation is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Device memory that we hand out as managed memory, and populate.
    Device,
    /// Managed memory that the program asked for: it may want it on the host first.
    Managed,
    /// The driver's own device memory: it counts and cannot be moved.
    Plain,
    /// The same, of a pool, which may keep it when it is freed.
    Ordered,
    /// Managed memory of a pool that stands for one of device memory. The driver populates it when it hands it out.
    Pooled,
    /// The same, and too small to be worth a wait: it is charged when the lock comes.
    Small,
}

impl Kind {
    /// It can be moved.
    pub(crate) fn is_movable(self) -> bool {
        matches!(self, Self::Device | Self::Managed | Self::Pooled)
    }

    /// It is a pool's.
    pub(crate) fn is_pools(self) -> bool {
        matches!(self, Self::Ordered | Self::Pooled)
    }

    /// It was asked for as device memory and is managed.
    pub(crate) fn is_in_disguise(self) -> bool {
        matches!(self, Self::Device | Self::Pooled)
    }

    /// It has to have its room at once, wherever the lock is.
    pub(crate) fn needs_room(self) -> bool {
        matches!(self, Self::Plain | Self::Ordered | Self::Pooled)
    }
}

/// An allocation that the program made.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) base: CUdeviceptr,
    pub(crate) size: u64,
    pub(crate) device: CUdevice,
    pub(crate) context: Arc<Context>,
    pub(crate) kind: Kind,
    /// The program is freeing it: nothing more of it is moved.
    leaving: AtomicBool,
    place: Mutex<Place>,
}

/// Where an allocation is. Locked while a piece of it is being moved, so that it is not freed meanwhile.
#[derive(Debug)]
pub(crate) struct Place {
    /// Bytes from the base that are charged, and so on the card. What is beyond them is not, unless the device is
    /// oversubscribed: page faults may have brought it there.
    pub(crate) present: u64,
    /// It was on the card once: what is absent now was evicted and has contents.
    pub(crate) lived: bool,
    /// Bytes up to its end that have pages on the host: they were evicted once, and cost the host nothing the next time.
    pub(crate) hosted: u64,
    /// The program freed it.
    pub(crate) freed: bool,
}

impl Allocation {
    pub(crate) fn new(
        base: CUdeviceptr,
        size: u64,
        device: CUdevice,
        context: Arc<Context>,
        kind: Kind,
        present: u64,
    ) -> Self {
        let place = Place { present, lived: present > 0, hosted: 0, freed: false };
        Self { base, size, device, context, kind, leaving: AtomicBool::new(false), place: Mutex::new(place) }
    }

    /// It can be moved.
    pub(crate) fn is_movable(&self) -> bool {
        self.kind.is_movable()
    }

    /// The program begins to free it, or could not.
    pub(crate) fn set_leaving(&self, leaving: bool) {
        self.leaving.store(leaving, Ordering::SeqCst);
    }

    /// Whether the program is freeing it.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::SeqCst)
    }

    /// Where it is, unless somebody moves or frees it.
    pub(crate) fn try_place(&self) -> Option<MutexGuard<'_, Place>> {
        match self.place.try_lock() {
            Ok(place) => Some(place),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(crate) fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn list() -> &'static DashMap<CUdeviceptr, Arc<Allocation>> {
    static LIST: OnceLock<DashMap<CUdeviceptr, Arc<Allocation>>> = OnceLock::new();
    LIST.get_or_init(DashMap::new)
}

/// Enters an allocation. Returns what was there before: the driver gives an address again only when it was freed, so
/// that was, without our seeing it.
pub(crate) fn insert(allocation: Allocation) -> Option<Arc<Allocation>> {
    list().insert(allocation.base, Arc::new(allocation))
}

/// The allocation at this address; `None`: none begins there.
pub(crate) fn find(base: CUdeviceptr) -> Option<Arc<Allocation>> {
    list().get(&base).map(|allocation| Arc::clone(&allocation))
}

/// Puts an allocation back that could not be freed.
pub(crate) fn put_back(allocation: Arc<Allocation>) {
    list().insert(allocation.base, allocation);
}

/// Takes an allocation off the list; `None` for a pointer that was never on it.
pub(crate) fn remove(base: CUdeviceptr) -> Option<Arc<Allocation>> {
    list().remove(&base).map(|(_, allocation)| allocation)
}

/// The allocations of a device, largest first, then by address: always in the same order.
pub(crate) fn of_device(device: CUdevice) -> Vec<Arc<Allocation>> {
    let mut found: Vec<Arc<Allocation>> =
        list().iter().filter(|entry| entry.device == device).map(|entry| Arc::clone(&entry)).collect();
    found.sort_by_key(|allocation| (std::cmp::Reverse(allocation.size), allocation.base));
    found
}

/// Takes every allocation of a context off the list. Memory of pools is the device's, and outlives it, unless
/// `pools`.
pub(crate) fn remove_context(context: &Arc<Context>, pools: bool) -> Vec<Arc<Allocation>> {
    let goes = |allocation: &Allocation| {
        Arc::ptr_eq(&allocation.context, context) && (pools || !allocation.kind.is_pools())
    };
    let bases: Vec<CUdeviceptr> = list().iter().filter(|entry| goes(entry)).map(|entry| entry.base).collect();
    bases.into_iter().filter_map(remove).collect()
}
