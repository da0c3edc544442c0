//! The list of the process's allocations, by base address, as programs free by it. Each allocation knows which part of it is
//! on the card ([`Residency`]).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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

/// The part of a slab that a small allocation is.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) slab: Arc<Allocation>,
    /// Bytes that the program asked for.
    pub(crate) asked: u64,
}

/// An allocation that the program made; or memory of which the program knows no address, which is created by `cuMemCreate` or
/// is a slab.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) base: CUdeviceptr,
    /// Bytes in the account; a part of a slab has none of its own.
    pub(crate) size: u64,
    /// A number that no other allocation of the process ever has.
    pub(crate) id: u64,
    pub(crate) device: CUdevice,
    pub(crate) context: Arc<Context>,
    pub(crate) kind: Kind,
    /// The chunks behind the addresses, if the library maps the memory.
    pub(crate) mapped: Option<Mapped>,
    /// The part of a slab that the allocation is, if it is small.
    pub(crate) part: Option<Part>,
    /// Whether the memory is a slab without parts, which is [set aside](nvshare_client::Account::set_aside).
    spare: AtomicBool,
    /// A number in the place of the driver's, since the program allocated the memory again after a free; 0: the driver's.
    again: AtomicU64,
    /// Whether the program has set an attribute of memory that the driver allocates.
    attributed: AtomicBool,
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
        Self {
            base,
            size,
            id: new_id(),
            device,
            context,
            kind,
            mapped: None,
            part: None,
            spare: AtomicBool::new(false),
            again: AtomicU64::new(0),
            attributed: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            residency: Mutex::new(Residency::new(size, charged)),
        }
    }

    /// A small allocation: a part of a slab, from an address on.
    pub(crate) fn in_slab(base: CUdeviceptr, part: Part) -> Self {
        let (device, context) = (part.slab.device, Arc::clone(&part.slab.context));
        Self { part: Some(part), ..Self::new(base, 0, device, context, Kind::Mapped, 0) }
    }

    /// The allocation with its chunks, if the library maps the memory.
    pub(crate) fn with_chunks(self, mapped: Option<Mapped>) -> Self {
        Self { mapped, ..self }
    }

    /// Bytes that the program asked for, if the library maps the memory.
    pub(crate) fn asked(&self) -> Option<u64> {
        let part = self.part.as_ref().map(|part| part.asked);
        part.or_else(|| self.mapped.as_ref().map(|mapped| mapped.asked))
    }

    /// The memory that moves when this allocation does: its slab, or itself.
    pub(crate) fn holder(&self) -> &Self {
        self.part.as_ref().map_or(self, |part| &part.slab)
    }

    /// Whether the program does not know the memory's addresses.
    fn is_hidden(&self) -> bool {
        self.mapped.as_ref().is_some_and(Mapped::is_hidden)
    }

    /// Whether the allocation counts as immovable, because its context is broken, or others reach its memory.
    pub(crate) fn is_pinned(&self) -> bool {
        self.mapped.as_ref().is_some_and(Mapped::is_pinned)
    }

    /// Whether the memory ends with the context that it was created in. Memory of pools, and of `cuMemCreate`, belongs to the device and
    /// lives on, also after a reset of the primary context (measured: `pool_reset_probe.py`).
    pub(super) fn ends_with_its_context(&self) -> bool {
        let is_programs = self.mapped.as_ref().is_some_and(Mapped::is_programs);
        !self.kind.is_pools() && !is_programs
    }

    /// Whether the allocation can be moved.
    pub(crate) fn is_movable(&self) -> bool {
        self.kind.is_movable()
    }

    /// The context in which memory that the library maps is moved: the allocation's own. Memory that the program created
    /// by `cuMemCreate` belongs to none: another of the device takes it over when that one ends, if there is one.
    pub(crate) fn context_to_move_in(&self) -> Arc<Context> {
        let Some(place) = self.mapped.as_ref().and_then(Mapped::context_to_move_in) else {
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

    /// The program has freed the memory and allocates it again: it is other memory for it.
    pub(super) fn begin_reuse(&self) {
        self.again.store(new_id(), Ordering::Relaxed);
    }

    /// The number that tells the memory from what it was before the program freed it, if it did.
    pub(crate) fn id_of_reuse(&self) -> Option<u64> {
        Some(self.again.load(Ordering::Relaxed)).filter(|&id| id != 0)
    }

    /// Notes that the program has set an attribute of it, which stays as long as the driver has the memory.
    pub(crate) fn set_attributed(&self) {
        self.attributed.store(true, Ordering::Relaxed);
    }

    /// Whether the program has set an attribute of it.
    pub(crate) fn is_attributed(&self) -> bool {
        self.attributed.load(Ordering::Relaxed)
    }

    /// Notes that the slab has no parts and is set aside in the account, or has parts again.
    pub(super) fn set_spare(&self, spare: bool) {
        self.spare.store(spare, Ordering::SeqCst);
    }

    /// Whether the slab is set aside in the account.
    pub(super) fn is_spare(&self) -> bool {
        self.spare.load(Ordering::SeqCst)
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
        lock(&self.residency)
    }
}

/// Numbers of buffers that the driver gives are far smaller.
fn new_id() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(1 << 48);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

type List = DashMap<CUdeviceptr, Arc<Allocation>>;

/// The allocations that the program knows.
fn list() -> &'static List {
    static LIST: OnceLock<List> = OnceLock::new();
    LIST.get_or_init(DashMap::new)
}

/// Memory of which the program knows no address. The first part of a slab has the slab's.
fn hidden() -> &'static List {
    static HIDDEN: OnceLock<List> = OnceLock::new();
    HIDDEN.get_or_init(DashMap::new)
}

fn list_of(allocation: &Allocation) -> &'static List {
    if allocation.is_hidden() { hidden() } else { list() }
}

/// All memory, whether or not it moves.
fn all() -> impl Iterator<Item = Arc<Allocation>> {
    let each = |list: &'static List| list.iter().map(|entry| Arc::clone(&entry));
    each(list()).chain(each(hidden()))
}

/// Enters an allocation. Returns the old allocation at this address, if there is one. The program has freed that by a function
/// without a hook, since the driver returns an address again only after a free.
pub(crate) fn insert(allocation: &Arc<Allocation>) -> Option<Arc<Allocation>> {
    let before = list_of(allocation).insert(allocation.base, Arc::clone(allocation));
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
    list_of(&allocation).insert(allocation.base, allocation);
}

/// Allocations that the library maps, in the order of their addresses: the driver does not know them while they are away.
static MAPPED: RwLock<BTreeMap<CUdeviceptr, Arc<Allocation>>> = RwLock::new(BTreeMap::new());

fn is_indexed(allocation: &Allocation) -> bool {
    allocation.asked().is_some() && !allocation.is_hidden()
}

/// Any address within an allocation that the library maps finds it.
fn index(allocation: &Arc<Allocation>) {
    if is_indexed(allocation) {
        let mut mapped = MAPPED.write().unwrap_or_else(PoisonError::into_inner);
        mapped.insert(allocation.base, Arc::clone(allocation));
    }
}

/// The allocation that the library maps, to which an address leads.
pub(crate) fn mapped_at(pointer: CUdeviceptr) -> Option<Arc<Allocation>> {
    let mapped = MAPPED.read().unwrap_or_else(PoisonError::into_inner);
    let (_, allocation) = mapped.range(..=pointer).next_back()?;
    (pointer - allocation.base < allocation.asked()?).then(|| Arc::clone(allocation))
}

/// Looks at all memory that the library maps.
pub(crate) fn each_mapped(look: impl FnMut(&Arc<Allocation>)) {
    // Not while parts of the lists are locked.
    let found: Vec<Arc<Allocation>> = all().filter(|allocation| allocation.mapped.is_some()).collect();
    found.iter().for_each(look);
}

/// Removes an allocation that the program knows. `None`: there is none that begins at this address.
pub(crate) fn remove(base: CUdeviceptr) -> Option<Arc<Allocation>> {
    let (_, allocation) = list().remove(&base)?;
    forget_index(&allocation);
    Some(allocation)
}

/// Removes this allocation, which the program knows, and no later one at its address. Returns whether it was on the list.
pub(crate) fn remove_this(allocation: &Arc<Allocation>) -> bool {
    let removed = list().remove_if(&allocation.base, |_, other| Arc::ptr_eq(other, allocation));
    removed.iter().for_each(|(_, gone)| forget_index(gone));
    removed.is_some()
}

fn forget_index(allocation: &Allocation) {
    if is_indexed(allocation) {
        MAPPED.write().unwrap_or_else(PoisonError::into_inner).remove(&allocation.base);
    }
}

/// Removes memory of which the program knows no address. Returns whether it was on the list.
pub(crate) fn remove_hidden(allocation: &Arc<Allocation>) -> bool {
    hidden().remove_if(&allocation.base, |_, other| Arc::ptr_eq(other, allocation)).is_some()
}

/// The memory of a device, largest first and then by address, so that the order is always the same. Parts of slabs are not
/// among it, as the slabs are.
pub(crate) fn of_device(device: CUdevice) -> Vec<Arc<Allocation>> {
    let is_here = |allocation: &Arc<Allocation>| allocation.device == device && allocation.part.is_none();
    let mut found: Vec<Arc<Allocation>> = all().filter(is_here).collect();
    found.sort_by_key(|allocation| (std::cmp::Reverse(allocation.size), allocation.base));
    found
}

/// Removes the allocations that end with a context.
pub(crate) fn remove_context(context: &Arc<Context>) -> Vec<Arc<Allocation>> {
    let goes = |allocation: &Allocation| {
        Arc::ptr_eq(&allocation.context, context) && allocation.ends_with_its_context()
    };
    let going: Vec<Arc<Allocation>> = all().filter(|allocation| goes(allocation)).collect();
    let remove = |allocation: Arc<Allocation>| {
        let is_removed =
            if allocation.is_hidden() { remove_hidden(&allocation) } else { remove_this(&allocation) };
        is_removed.then_some(allocation)
    };
    going.into_iter().filter_map(remove).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::types::CUcontext;

    fn context(address: usize) -> Arc<Context> {
        context_on(0, address)
    }

    fn context_on(device: CUdevice, address: usize) -> Arc<Context> {
        contexts::learn(CUcontext(address as *mut _), device)
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
    fn memory_of_pools_outlives_contexts() {
        let (one, other) = (context_on(52, 0x30_0000), context_on(53, 0x31_0000));
        enter(0x30_1000, 1, 52, &one, Kind::DeviceAsManaged);
        enter(0x30_2000, 1, 52, &one, Kind::ManagedPool);
        enter(0x30_3000, 1, 52, &other, Kind::ProgramsManaged);
        // From a pool of the other device.
        enter(0x30_5000, 1, 53, &one, Kind::PlainPool);
        let bases = |gone: Vec<Arc<Allocation>>| gone.iter().map(|gone| gone.base).collect::<Vec<_>>();
        assert_eq!(bases(remove_context(&one)), [0x30_1000]);
        assert_eq!(bases(of_device(52)), [0x30_2000, 0x30_3000]);
        assert_eq!(bases(of_device(53)), [0x30_5000]);
    }
}
