//! The list of the process's allocations, by base address, as programs free by it. Each allocation knows which part of it is
//! on the card ([`Residency`]).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, TryLockError};

use dashmap::DashMap;
pub(crate) use nvshare_client::Kind;
use nvshare_client::Residency;

use crate::driver::types::{CUdevice, CUdeviceptr};
use crate::memory::mapping::Mapped;
use crate::process::lock::lock;
use crate::work::contexts::{self, Context};

/// Smaller device memory stays plain, in bytes. It would share pages with other allocations and never be evicted. Also, flags
/// and semaphores of `cuStreamWriteValue32` and similar functions are small, and these functions refuse managed memory.
pub(crate) const SMALLEST_MANAGED: u64 = 64 * 1024;

/// An allocation that the program made.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) base: CUdeviceptr,
    pub(crate) size: u64,
    pub(crate) device: CUdevice,
    pub(crate) context: Arc<Context>,
    pub(crate) kind: Kind,
    /// The chunks behind the addresses, if the library maps the memory.
    pub(crate) mapped: Option<Mapped>,
    /// Whether the program is freeing the allocation. No more of it is moved then.
    leaving: AtomicBool,
    /// Locked while a piece of the allocation is being moved, so that the program does not free it meanwhile.
    residency: Mutex<Residency>,
}

impl Allocation {
    pub(crate) fn new(
        base: CUdeviceptr,
        size: u64,
        device: CUdevice,
        context: Arc<Context>,
        kind: Kind,
        charged: u64,
    ) -> Self {
        let residency = Mutex::new(Residency::new(size, charged));
        Self { base, size, device, context, kind, mapped: None, leaving: AtomicBool::new(false), residency }
    }

    /// The allocation with its chunks, if the library maps the memory.
    pub(crate) fn with_chunks(self, mapped: Option<Mapped>) -> Self {
        Self { mapped, ..self }
    }

    /// Whether the allocation counts as immovable, because its context is broken, or others reach its memory.
    pub(crate) fn is_pinned(&self) -> bool {
        self.mapped.as_ref().is_some_and(Mapped::is_pinned)
    }

    /// Whether the allocation can be moved.
    pub(crate) fn is_movable(&self) -> bool {
        self.kind.is_movable()
    }

    /// The context in which memory that the library maps is moved: the allocation's own. Memory that the program created
    /// by `cuMemCreate` belongs to none: another of the device takes it over when that one ends, if there is one.
    pub(crate) fn place(&self) -> Arc<Context> {
        let Some(place) = self.mapped.as_ref().and_then(Mapped::place) else {
            return Arc::clone(&self.context);
        };
        let mut place = lock(place);
        if place.life().is_over()
            && let Some(other) = contexts::lasting(self.device)
        {
            *place = other;
        }
        Arc::clone(&place)
    }

    /// Notes that the program begins to free the allocation, or that the free has failed.
    pub(crate) fn set_leaving(&self, leaving: bool) {
        self.leaving.store(leaving, Ordering::SeqCst);
    }

    /// Whether the program is freeing the allocation.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::SeqCst)
    }

    /// Which part of the allocation is on the card. `None`: the allocation is being moved or freed.
    pub(crate) fn try_residency(&self) -> Option<MutexGuard<'_, Residency>> {
        match self.residency.try_lock() {
            Ok(residency) => Some(residency),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Which part of the allocation is on the card. Waits while it is being moved or freed.
    pub(crate) fn residency(&self) -> MutexGuard<'_, Residency> {
        self.residency.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn list() -> &'static DashMap<CUdeviceptr, Arc<Allocation>> {
    static LIST: OnceLock<DashMap<CUdeviceptr, Arc<Allocation>>> = OnceLock::new();
    LIST.get_or_init(DashMap::new)
}

/// Enters an allocation. Returns the old allocation at this address, if there is one: the driver returns an address again only
/// after a free, so the program freed the old one by a function without a hook.
pub(crate) fn insert(allocation: &Arc<Allocation>) -> Option<Arc<Allocation>> {
    let before = list().insert(allocation.base, Arc::clone(allocation));
    index(allocation);
    before
}

/// The allocation that begins at this address.
pub(crate) fn find(base: CUdeviceptr) -> Option<Arc<Allocation>> {
    list().get(&base).map(|allocation| Arc::clone(&allocation))
}

/// Enters an allocation again that could not be freed.
pub(crate) fn put_back(allocation: Arc<Allocation>) {
    index(&allocation);
    list().insert(allocation.base, allocation);
}

/// Memory that the library maps, in the order of its addresses: the driver does not know it while it is away.
static MAPPED: RwLock<BTreeMap<CUdeviceptr, Arc<Allocation>>> = RwLock::new(BTreeMap::new());

/// Any address within memory that the library maps finds it.
fn index(allocation: &Arc<Allocation>) {
    if allocation.mapped.is_some() {
        let mut mapped = MAPPED.write().unwrap_or_else(PoisonError::into_inner);
        mapped.insert(allocation.base, Arc::clone(allocation));
    }
}

/// The memory that the library maps, to which an address leads.
pub(crate) fn mapped_at(pointer: CUdeviceptr) -> Option<Arc<Allocation>> {
    let mapped = MAPPED.read().unwrap_or_else(PoisonError::into_inner);
    let (_, allocation) = mapped.range(..=pointer).next_back()?;
    (pointer - allocation.base < allocation.mapped.as_ref()?.asked).then(|| Arc::clone(allocation))
}

/// Looks at all memory that the library maps.
pub(crate) fn each_mapped(look: impl FnMut(&Arc<Allocation>)) {
    MAPPED.read().unwrap_or_else(PoisonError::into_inner).values().for_each(look);
}

/// Removes an allocation. `None`: it was not on the list.
pub(crate) fn remove(base: CUdeviceptr) -> Option<Arc<Allocation>> {
    let (_, allocation) = list().remove(&base)?;
    if allocation.mapped.is_some() {
        MAPPED.write().unwrap_or_else(PoisonError::into_inner).remove(&allocation.base);
    }
    Some(allocation)
}

/// The allocations of a device, largest first and then by address, so that the order is always the same.
pub(crate) fn of_device(device: CUdevice) -> Vec<Arc<Allocation>> {
    let mut found: Vec<Arc<Allocation>> =
        list().iter().filter(|entry| entry.device == device).map(|entry| Arc::clone(&entry)).collect();
    found.sort_by_key(|allocation| (std::cmp::Reverse(allocation.size), allocation.base));
    found
}

/// Allocations that end with a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// All allocations that were created in it. Memory of pools, and of `cuMemCreate`, belongs to the device and lives on.
    Context,
    /// Everything in the device's primary context. The device's pools end too.
    Device,
}

/// Removes the allocations that end with a context.
pub(crate) fn remove_context(context: &Arc<Context>, ending: Ending) -> Vec<Arc<Allocation>> {
    let goes = |allocation: &Allocation| {
        let is_programs = allocation.mapped.as_ref().is_some_and(Mapped::is_programs);
        Arc::ptr_eq(&allocation.context, context)
            && !is_programs
            && (ending == Ending::Device || !allocation.kind.is_pools())
    };
    let bases: Vec<CUdeviceptr> = list().iter().filter(|entry| goes(entry)).map(|entry| entry.base).collect();
    bases.into_iter().filter_map(remove).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::types::CUcontext;

    fn context(address: usize) -> Arc<Context> {
        contexts::learn(CUcontext(address as *mut _), 0)
    }

    fn enter(base: CUdeviceptr, size: u64, device: CUdevice, context: &Arc<Context>, kind: Kind) {
        let allocation = Allocation::new(base, size, device, Arc::clone(context), kind, 0);
        assert!(insert(&Arc::new(allocation)).is_none());
    }

    #[test]
    fn an_address_that_comes_again_shows_that_its_allocation_is_gone() {
        let context = context(0x10_0000);
        enter(0x10_1000, 1, 50, &context, Kind::DeviceAsManaged);
        let again = Allocation::new(0x10_1000, 2, 50, Arc::clone(&context), Kind::DeviceAsManaged, 0);
        assert_eq!(insert(&Arc::new(again)).map(|gone| gone.size), Some(1));
        assert_eq!(find(0x10_1000).map(|allocation| allocation.size), Some(2));
        let taken = remove(0x10_1000).unwrap();
        assert!(find(0x10_1000).is_none() && remove(0x10_1000).is_none());
        put_back(taken);
        assert!(find(0x10_1000).is_some());
    }

    #[test]
    fn the_largest_come_first_and_others_by_address() {
        let context = context(0x20_0000);
        for (base, size) in [(0x20_3000, 5), (0x20_1000, 5), (0x20_2000, 9), (0x20_4000, 1)] {
            enter(base, size, 51, &context, Kind::DeviceAsManaged);
        }
        let order: Vec<u64> = of_device(51).iter().map(|allocation| allocation.base).collect();
        assert_eq!(order, [0x20_2000, 0x20_1000, 0x20_3000, 0x20_4000]);
    }

    #[test]
    fn memory_of_pools_outlives_a_context_but_not_the_devices_own() {
        let (one, other) = (context(0x30_0000), context(0x31_0000));
        enter(0x30_1000, 1, 52, &one, Kind::DeviceAsManaged);
        enter(0x30_2000, 1, 52, &one, Kind::ManagedPool);
        enter(0x30_3000, 1, 52, &other, Kind::ProgramsManaged);
        let bases = |gone: Vec<Arc<Allocation>>| gone.iter().map(|gone| gone.base).collect::<Vec<_>>();
        assert_eq!(bases(remove_context(&one, Ending::Context)), [0x30_1000]);
        assert_eq!(bases(remove_context(&one, Ending::Device)), [0x30_2000]);
        assert_eq!(bases(of_device(52)), [0x30_3000]);
    }
}
