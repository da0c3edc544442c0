//! Slabs: memory that the library maps, and that small allocations share.
//!
//! The driver, too, takes 2 MiB from the card for small allocations, and gives their addresses out in small steps. A slab
//! belongs to a context, is in the account as an allocation of its own, and moves as one chunk. The program knows the
//! addresses of the parts, and each part is on the list as an allocation that takes nothing of its own. A part is taken again
//! only when it was given back, so after the work before its free.
//!
//! A slab without parts ends, but one of each context is kept. Otherwise a program that allocates and frees something small in
//! each step would make and end a slab each time. This spare slab is set aside in the account. It ends when its room or its
//! place in a limit is needed. So it ends before the process evicts or restores memory, waits for room, or is refused an
//! allocation.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use nvshare_client::slabs::Slabs;

use super::allocations::{Allocation, Part};
use super::devices;
use super::mapping::Mapped;
use crate::driver::types::{CUdevice, CUdeviceptr};
use crate::process::lock::lock;
use crate::work::contexts::Context;

/// The slabs of a context.
#[derive(Debug)]
struct Pool {
    context: Arc<Context>,
    slabs: BTreeMap<CUdeviceptr, Arc<Allocation>>,
    free: Slabs,
}

static POOLS: Mutex<Vec<Pool>> = Mutex::new(Vec::new());

fn of<'a>(pools: &'a mut [Pool], context: &Arc<Context>) -> Option<&'a mut Pool> {
    pools.iter_mut().find(|pool| Arc::ptr_eq(&pool.context, context))
}

/// Takes a part of a context's slabs for an allocation of `bytes` bytes. Returns its address, and its slab. `None`: no slab has
/// room for it.
pub(super) fn take(context: &Arc<Context>, bytes: u64) -> Option<(CUdeviceptr, Arc<Allocation>)> {
    let mut pools = lock(&POOLS);
    let pool = of(&mut pools, context)?;
    let at = pool.free.take(bytes)?;
    let (_, slab) = pool.slabs.range(..=at).next_back()?;
    if slab.is_spare() {
        let device = devices::get(slab.device)?;
        if device.update(|account| account.take_again(slab.size)).is_err() {
            if let Some(empty) = pool.free.give_back(at, bytes) {
                pool.free.add_empty(empty);
            }
            return None;
        }
        slab.set_spare(false);
    }
    Some((at, Arc::clone(slab)))
}

/// Adds a new slab. Its first part, of `bytes` bytes, is taken.
pub(super) fn add(slab: &Arc<Allocation>, bytes: u64) {
    let mut pools = lock(&POOLS);
    let context = &slab.context;
    if of(&mut pools, context).is_none() {
        pools.push(Pool { context: Arc::clone(context), slabs: BTreeMap::new(), free: Slabs::default() });
    }
    if let Some(pool) = of(&mut pools, context) {
        pool.slabs.insert(slab.base, Arc::clone(slab));
        pool.free.add(slab.base, bytes);
    }
}

/// No more parts of a slab are taken: attributes that the driver was told for its memory would hold for them as well.
pub(super) fn close(slab: &Allocation) {
    if let Some(pool) = of(&mut lock(&POOLS), &slab.context) {
        pool.free.close(slab.base);
    }
}

/// The part of an allocation is free again. Returns its slab if that has no part any more and is not kept: it ends.
pub(super) fn give_back(allocation: &Allocation, part: &Part) -> Option<Arc<Allocation>> {
    let mut pools = lock(&POOLS);
    let pool = of(&mut pools, &allocation.context)?;
    // Slabs that ended with a context may have been at the same addresses.
    if !pool.slabs.get(&part.slab.base).is_some_and(|slab| Arc::ptr_eq(slab, &part.slab)) {
        return None;
    }
    let empty = pool.free.give_back(allocation.base, part.asked)?;
    // Pinned memory is not kept, as it does not move, nor memory that other processes could get.
    if let Some(device) = devices::get(part.slab.device)
        && !pool.free.has_empty()
        && !part.slab.is_pinned()
        && !part.slab.mapped.as_ref().is_some_and(Mapped::is_shared)
    {
        pool.free.add_empty(empty);
        part.slab.set_spare(true);
        device.update(|account| account.set_aside(part.slab.size));
        return None;
    }
    pool.slabs.remove(&empty)
}

/// Takes the spare slabs of a device away, which the caller ends.
pub(super) fn take_spares(device: CUdevice) -> Vec<Arc<Allocation>> {
    let mut pools = lock(&POOLS);
    let mut spares = Vec::new();
    for Pool { slabs, free, context: _ } in pools.iter_mut() {
        if slabs.values().any(|slab| slab.device == device) {
            spares.extend(free.remove_empty().iter().filter_map(|empty| slabs.remove(empty)));
        }
    }
    spares
}

/// Forgets the slabs of a context that ends.
pub(super) fn forget_context(context: &Arc<Context>) {
    lock(&POOLS).retain(|pool| !Arc::ptr_eq(&pool.context, context));
}
