//! The pools of stream-ordered memory.
//!
//! From CUDA 13 on, a pool can consist of managed memory. Its allocations are as fast as those of a plain pool (measured), and
//! can be moved. So the program's own pools become managed pools, and the library has a managed pool that stands for a device's
//! default pool. The driver may have no managed pools, or other processes may have to reach the memory. Then the program gets
//! the pool that it asked for; its memory is counted and not moved.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::allocations::Kind;
use super::devices::Device;
use super::plain;
use crate::driver::functions;
use crate::driver::types::{
    CU_MEM_LOCATION_TYPE_DEVICE, CUdevice, CUmemLocation, CUmemoryPool, CUresult, MemoryProperties,
};
use crate::driver::{self, Relaxed};
use crate::process::lock::lock;
use crate::process::log;

/// `CU_MEM_ALLOCATION_TYPE_MANAGED`
pub(crate) const MANAGED: c_int = 2;

/// A pool that was created.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pool {
    /// `None`: it is not on a device.
    pub(crate) device: Option<CUdevice>,
    /// The kind of its allocations.
    pub(crate) kind: Kind,
}

/// The program's own pools and the library's, by handle.
static POOLS: Mutex<BTreeMap<usize, Pool>> = Mutex::new(BTreeMap::new());
/// The pool that stands for each device's default pool. `None`: there is none.
static STAND_INS: Mutex<BTreeMap<CUdevice, Option<usize>>> = Mutex::new(BTreeMap::new());
/// The process has had a managed pool, the library's, the program's or the driver's. The library's and the driver's do not end.
static HAS_MANAGED: AtomicBool = AtomicBool::new(false);
/// The program has made a pool with a largest size.
static HAS_BOUNDED: AtomicBool = AtomicBool::new(false);
/// The current pool of each device, as the program has set it. The driver has one current pool for each kind of memory, and
/// `cuMemAllocAsync` uses the one for device memory (measured). So managed pools have to be kept here.
static CURRENT: Mutex<BTreeMap<CUdevice, usize>> = Mutex::new(BTreeMap::new());

/// `CUmemPoolProps`
#[repr(C)]
#[derive(Debug)]
pub(crate) struct PoolProperties {
    pub(crate) properties: MemoryProperties,
    /// Security attributes, the largest size, the usage, and reserved fields.
    pub(crate) rest: [u64; 9],
}

/// The place of the largest size behind the properties of the memory; 0: the driver's own.
const LARGEST_SIZE: usize = 1;

/// The properties of a managed pool on a device.
pub(crate) fn managed_on(device: CUdevice) -> PoolProperties {
    let location = CUmemLocation { kind: CU_MEM_LOCATION_TYPE_DEVICE, id: device };
    PoolProperties { properties: MemoryProperties { kind: MANAGED, handle_types: 0, location }, rest: [0; 9] }
}

/// Whether pools on a device may be managed.
pub(crate) fn may_be_managed(device: &Device) -> bool {
    device.managed_pools && !plain::needs_plain_pools()
}

pub(crate) fn enter(handle: CUmemoryPool, pool: Pool) {
    if pool.kind == Kind::ManagedPool {
        note_managed();
    }
    lock(&POOLS).insert(handle.0 as usize, pool);
}

/// Notes that the driver has made a managed pool.
pub(crate) fn note_managed() {
    HAS_MANAGED.store(true, Ordering::SeqCst);
}

/// Notes the properties of a pool that the program has made.
pub(crate) fn note_properties(properties: &PoolProperties) {
    if properties.properties.kind == MANAGED {
        note_managed();
    }
    if properties.rest.get(LARGEST_SIZE).is_some_and(|&bytes| bytes > 0) {
        HAS_BOUNDED.store(true, Ordering::SeqCst);
    }
}

/// Whether a pool may refuse memory because it has a largest size.
pub(crate) fn are_any_bounded() -> bool {
    HAS_BOUNDED.load(Ordering::SeqCst)
}

/// Whether the process has had a managed pool.
pub(crate) fn has_managed() -> bool {
    HAS_MANAGED.load(Ordering::SeqCst)
}

/// A pool by its handle. `None`: the program did not create it, so it is a default pool.
pub(crate) fn find(pool: CUmemoryPool) -> Option<Pool> {
    lock(&POOLS).get(&(pool.0 as usize)).copied()
}

/// The pool that stands for a device's default pool, from the first call on. `None`: there is none.
pub(crate) fn stand_in(device: &Device) -> Option<CUmemoryPool> {
    let mut stand_ins = lock(&STAND_INS);
    let known = stand_ins.entry(device.ordinal).or_insert_with(|| {
        let _relaxed = Relaxed::begin();
        make_stand_in(device)
            .inspect_err(|error| {
                log::info(format_args!("no managed pools ({error:?}): stream-ordered memory is not moved"))
            })
            .ok()
    });
    known.map(|handle| CUmemoryPool(handle as *mut c_void))
}

fn make_stand_in(device: &Device) -> Result<usize, CUresult> {
    if !may_be_managed(device) {
        return Err(CUresult::NOT_SUPPORTED);
    }
    let create = functions::cuMemPoolCreate.get().ok_or(CUresult::NOT_SUPPORTED)?;
    let mut pool = CUmemoryPool::NULL;
    let properties = managed_on(device.ordinal);
    // SAFETY: a place for the handle, and properties that live as long as the call.
    unsafe { create(&raw mut pool, (&raw const properties).cast()) }.ok()?;
    enter(pool, Pool { device: Some(device.ordinal), kind: Kind::ManagedPool });
    Ok(pool.0 as usize)
}

/// The managed pool that `cuMemAllocAsync` uses on a device. `None`: it uses one of the driver's own.
pub(crate) fn current(device: &Device) -> Option<CUmemoryPool> {
    let chosen = lock(&CURRENT).get(&device.ordinal).map(|&handle| CUmemoryPool(handle as *mut c_void));
    chosen.or_else(|| stand_in(device)).filter(|&pool| managed_of(pool).is_some())
}

/// The program's own pool of plain memory that it has made a device's current one. `None`: plain memory comes from the default pool.
pub(crate) fn current_plain(device: &Device) -> Option<CUmemoryPool> {
    let chosen = lock(&CURRENT).get(&device.ordinal).map(|&handle| CUmemoryPool(handle as *mut c_void));
    chosen.filter(|&chosen| find(chosen).is_some_and(|pool| pool.kind == Kind::PlainPool))
}

/// The device of a managed pool. `None`: the pool is not managed.
pub(crate) fn managed_of(pool: CUmemoryPool) -> Option<CUdevice> {
    find(pool).filter(|pool| pool.kind == Kind::ManagedPool)?.device
}

/// Makes a pool a device's current one. While it is a managed pool, the driver's own current pool is its default pool.
pub(crate) fn make_current(
    device: &Device,
    pool: CUmemoryPool,
    set: impl FnOnce(CUmemoryPool) -> CUresult,
) -> CUresult {
    let result = match managed_of(pool) {
        Some(of) if of == device.ordinal => driver::default_pool(of).map_or_else(|error| error, set),
        Some(_) => CUresult::INVALID_VALUE,
        None => set(pool),
    };
    if result == CUresult::SUCCESS {
        if stand_in(device) == Some(pool) {
            lock(&CURRENT).remove(&device.ordinal);
        } else {
            lock(&CURRENT).insert(device.ordinal, pool.0 as usize);
        }
    }
    result
}

/// Makes one driver call with each pool of a device, and the kind of its memory. No pool ends during its call.
pub(crate) fn each(device: CUdevice, mut call: impl FnMut(CUmemoryPool, Kind)) {
    driver::default_pool(device).into_iter().for_each(|pool| call(pool, Kind::PlainPool));
    let of_device = |pool: &Pool| pool.device == Some(device);
    let handles: Vec<usize> =
        lock(&POOLS).iter().filter(|(_, pool)| of_device(pool)).map(|(&handle, _)| handle).collect();
    for handle in handles {
        // The end of a pool first removes it from this list, and so waits for this call.
        let pools = lock(&POOLS);
        if let Some(pool) = pools.get(&handle).filter(|pool| of_device(pool)) {
            call(CUmemoryPool(handle as *mut c_void), pool.kind);
        }
    }
}

/// Calls the driver with a pool. The end of the pool waits for this call.
///
/// # Errors
/// Those of the call, or that the pool is not the program's.
pub(crate) fn while_it_lives<T>(
    pool: CUmemoryPool,
    call: impl FnOnce(CUmemoryPool) -> Result<T, CUresult>,
) -> Result<T, CUresult> {
    let pools = lock(&POOLS);
    if pools.contains_key(&(pool.0 as usize)) { call(pool) } else { Err(CUresult::INVALID_VALUE) }
}

/// The device whose default pool this pool stands for. `None`: it stands for none.
pub(crate) fn stands_for(pool: CUmemoryPool) -> Option<CUdevice> {
    let handle = pool.0 as usize;
    lock(&STAND_INS).iter().find(|(_, ours)| **ours == Some(handle)).map(|(&device, _)| device)
}

/// Removes a pool that is about to be destroyed.
pub(crate) fn remove(pool: CUmemoryPool) -> Option<Pool> {
    lock(&POOLS).remove(&(pool.0 as usize))
}

/// Notes that a pool was destroyed. It is no device's current pool any more.
pub(crate) fn destroyed(pool: CUmemoryPool) {
    let handle = pool.0 as usize;
    lock(&CURRENT).retain(|_, current| *current != handle);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(handle: usize) -> CUmemoryPool {
        CUmemoryPool(handle as *mut c_void)
    }

    fn handles(device: CUdevice) -> Vec<(usize, Kind)> {
        let mut found = Vec::new();
        // Without a driver there is no default pool.
        each(device, |pool, kind| found.push((pool.0 as usize, kind)));
        found
    }

    #[test]
    fn pools_are_found_by_their_device() {
        enter(pool(0x100), Pool { device: Some(40), kind: Kind::ManagedPool });
        enter(pool(0x200), Pool { device: Some(40), kind: Kind::PlainPool });
        enter(pool(0x300), Pool { device: Some(41), kind: Kind::PlainPool });
        enter(pool(0x400), Pool { device: None, kind: Kind::PlainPool });
        assert_eq!(handles(40), [(0x100, Kind::ManagedPool), (0x200, Kind::PlainPool)]);
        assert_eq!(handles(41), [(0x300, Kind::PlainPool)]);
        assert!(find(pool(0x400)).is_some() && find(pool(0x900)).is_none());
    }

    #[test]
    fn a_pool_is_managed_only_as_long_as_it_is_known() {
        enter(pool(0x500), Pool { device: Some(42), kind: Kind::ManagedPool });
        enter(pool(0x600), Pool { device: Some(42), kind: Kind::PlainPool });
        assert_eq!([0x500, 0x600, 0x700].map(|handle| managed_of(pool(handle))), [Some(42), None, None]);
        assert!(remove(pool(0x500)).is_some() && remove(pool(0x500)).is_none());
        assert_eq!(managed_of(pool(0x500)), None);
        assert_eq!(stands_for(pool(0x600)), None);
    }
}
