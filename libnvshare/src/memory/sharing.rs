//! How the program's memory comes to be shared with other processes (CUDA IPC).
//!
//! With the first handle of an allocation its memory is [exchanged](super::mapping::Mapped::make_exportable), while none of the
//! program's work runs. From then on other processes can [get](super::exports) it. A small allocation is shared with its slab, as the
//! driver does.
//!
//! A device that reaches the memory by its descriptor (dma-buf) would go on to reach the old memory. So such memory is not exchanged
//! any more. It is exchanged before, since many programs do both with the same memory.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use nvshare_proto::ThrottledLine;
use nvshare_proto::units::MIB;

use super::allocations::{Allocation, Kind};
use super::backing::AllocationRequest;
use super::exports::Means;
use super::mapping::Mapped;
use super::{admission, deferred_free, devices, exports, free, lending, slabs};
use crate::driver::types::{CUipcMemHandle, CUresult};
use crate::process::lock::lock;
use crate::process::{lifecycle, log, passing, threads};
use crate::work::standstill;

/// How often the program's work may run for too long before a device reaches memory. Each time, a call of the program waits.
const MAX_RESTLESS: u32 = 8;

/// Held while an allocation comes to be shared: from before the thread passes the gate.
pub(crate) fn one_at_a_time() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    lock(&ONE)
}

/// Whether the driver can share memory that the library maps on the device of an allocation.
pub(crate) fn is_possible(allocation: &Allocation) -> bool {
    devices::get(allocation.device).is_some_and(devices::Device::shares_by_descriptor)
}

/// The handle of an allocation that has one. An error: the program has freed it.
pub(crate) fn handle_of(allocation: &Allocation) -> Option<Result<CUipcMemHandle, CUresult>> {
    if deferred_free::is_freed(allocation.base) {
        return Some(Err(CUresult::INVALID_VALUE));
    }
    exports::handle_of(allocation.id).map(Ok)
}

/// Whether the exchange of an allocation harms nobody: its memory is exchanged already, or no device reaches it.
fn may_be_exchanged(allocation: &Allocation) -> bool {
    let is_exchanged = || allocation.mapped.as_ref().is_some_and(Mapped::is_exportable);
    !allocation.is_pinned() || is_exchanged()
}

/// Exchanges an allocation, as far as it has not been exchanged. None of the program's work runs.
fn exchange(holder: &Allocation, most: usize) -> Result<(), CUresult> {
    if !may_be_exchanged(holder) {
        return Err(CUresult::INVALID_VALUE);
    }
    let mapped = holder.mapped.as_ref().ok_or(CUresult::INVALID_VALUE)?;
    mapped.make_exportable(holder.base, holder.device, &holder.context_to_move_in(), most)
}

/// Whether an allocation can be exchanged before a device reaches it.
pub(crate) fn is_exchange_due(allocation: &Allocation) -> bool {
    let holder = allocation.holder();
    is_possible(allocation)
        && !lifecycle::is_forked()
        && !holder.is_pinned()
        && !holder.mapped.as_ref().is_none_or(Mapped::is_exportable)
}

/// Exchanges an allocation before a device reaches it, so that it can get a handle later. Without rest, or room, it gets none later.
/// The thread holds [`one_at_a_time`] and is inside the gate.
pub(crate) fn exchange_before_reach(allocation: &Allocation) {
    static RESTLESS: AtomicU32 = AtomicU32::new(0);
    // An exchange that ends half-way leaves addresses without memory.
    let _whole = threads::Uncancelled::begin();
    if !is_exchange_due(allocation) || RESTLESS.load(Ordering::Relaxed) >= MAX_RESTLESS {
        return;
    }
    let make = || exchange(allocation.holder(), passing::MAX_DESCRIPTORS);
    let Some(made) = standstill::make_at_rest(Duration::ZERO, make) else {
        RESTLESS.fetch_add(1, Ordering::Relaxed);
        return;
    };
    if let Err(error) = made {
        log::debug(format_args!("memory is not exchanged before a device reaches it: {error:?}"));
    }
}

/// Memory on the card that makes way for the memory that is exchanged. It is in the account until the exchange is over, and other
/// programs make room for it.
#[derive(Debug)]
pub(crate) struct Room(Arc<Allocation>);

impl Room {
    /// Gets room for the exchange of an allocation, as an allocation of the program would. The thread is outside the gate.
    ///
    /// # Errors
    /// Out of memory.
    pub(crate) fn get(allocation: &Allocation) -> Result<Self, CUresult> {
        let holder = allocation.holder();
        let device = devices::get(holder.device).ok_or(CUresult::OUT_OF_MEMORY)?;
        let mapped = holder.mapped.as_ref().ok_or(CUresult::INVALID_VALUE)?;
        let bytes = mapped.room_to_exchange(exports::descriptors_left());
        let request = AllocationRequest::new(device, holder.context_to_move_in(), Kind::Mapped, bytes);
        let made = admission::make(&request, || Err(CUresult::NOT_SUPPORTED)).map(Self);
        made.inspect_err(|error| say_refused(allocation, format_args!("{error:?}")))
    }

    /// Gives the card the memory back, which is not given to others.
    fn make_way(&self) {
        self.0.mapped.iter().for_each(|mapped| mapped.empty(self.0.base));
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        free::free_mapped(&self.0);
    }
}

/// Makes the handle of an allocation that has none. The thread holds [`one_at_a_time`] and is inside the gate. Where the card is full,
/// there has to be [`Room`].
///
/// # Errors
/// The driver's, if the memory cannot be exchanged. NOT_READY: the program's work does not come to an end. OPERATING_SYSTEM: the process
/// has no descriptors, or no thread, to give the memory to others.
pub(crate) fn share(allocation: &Arc<Allocation>, room: Option<Room>) -> Result<CUipcMemHandle, CUresult> {
    // Descriptors are closed here.
    let _whole = threads::Uncancelled::begin();
    // Another thread may have been first.
    if let Some(handle) = handle_of(allocation) {
        return handle;
    }
    let no_means = |why: std::fmt::Arguments<'_>| {
        say_refused(allocation, why);
        CUresult::OPERATING_SYSTEM
    };
    let refused = |error: &CUresult| say_refused(allocation, format_args!("{error:?}"));
    let holder = allocation.holder();
    if !may_be_exchanged(holder) {
        say_refused(allocation, format_args!("other devices may reach this memory where it is now"));
        return Err(CUresult::INVALID_VALUE);
    }
    let means = Means::get(lending::TASKS).map_err(|error| no_means(format_args!("{error}")))?;
    let mapped = holder.mapped.as_ref().ok_or(CUresult::INVALID_VALUE)?;
    let is_exchanged = mapped.is_exportable();
    let needed = if is_exchanged { mapped.parts() } else { 1 };
    let export = match exports::find(holder.id) {
        Some(export) if export.is_intact() => export,
        None if means.descriptors < needed => {
            return Err(no_means(format_args!(
                "half of the descriptors that this process may have (RLIMIT_NOFILE) are of shared memory"
            )));
        }
        // It stays where it is.
        _ if is_exchanged => {
            let parts = mapped.describe(&holder.context_to_move_in()).inspect_err(refused)?;
            exports::describe(&means, parts)
        }
        _ => {
            let is_last_try = room.is_some();
            let parts = standstill::make(|| exchange_and_describe(allocation, means.descriptors, room));
            let parts = parts.unwrap_or(Err(CUresult::NOT_READY)).inspect_err(|error| {
                if is_last_try || *error != CUresult::OUT_OF_MEMORY {
                    refused(error);
                }
            })?;
            exports::describe(&means, parts)
        }
    };
    let (offset, asked) = (allocation.base - holder.base, allocation.asked().unwrap_or(0));
    let memory = allocation.part.as_ref().map_or(allocation, |part| {
        // Others reach all of it.
        slabs::close(&part.slab);
        &part.slab
    });
    exports::add(allocation, memory, &export, offset, asked, &means);
    if allocation.is_leaving() {
        // Another thread frees it, and may have been there before.
        exports::forget(allocation.id);
    }
    handle_of(allocation).unwrap_or(Err(CUresult::INVALID_VALUE))
}

/// Exchanges an allocation and describes it. None of the program's work runs.
fn exchange_and_describe(
    allocation: &Allocation,
    most: usize,
    room: Option<Room>,
) -> Result<Vec<(u64, OwnedFd)>, CUresult> {
    let holder = allocation.holder();
    let mapped = holder.mapped.as_ref().ok_or(CUresult::INVALID_VALUE)?;
    room.iter().for_each(Room::make_way);
    exchange(holder, most)?;
    drop(room);
    let parts = mapped.describe(&holder.context_to_move_in())?;
    log::info(format_args!("other processes can open {} MiB of the program's memory", holder.size / MIB));
    Ok(parts)
}

fn say_refused(allocation: &Allocation, why: std::fmt::Arguments<'_>) {
    static REFUSED: ThrottledLine = ThrottledLine::new(log::warn);
    let mib = allocation.asked().unwrap_or(0).div_ceil(MIB);
    REFUSED.say(format_args!("{mib} MiB cannot be shared with other processes: {why}"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::types::{CUcontext, CUdeviceptr};
    use crate::memory::allocations;
    use crate::work::contexts;

    #[test]
    fn room_whose_context_has_ended_frees_no_other_memory() {
        const BASE: CUdeviceptr = 0x63_1000;
        let context = contexts::learn(CUcontext(0x63_0000 as *mut _), 63);
        let new = || Arc::new(Allocation::new(BASE, 8, 63, Arc::clone(&context), Kind::Mapped, 0));
        let (room, other) = (Room(new()), new());
        allocations::insert(&room.0);
        allocations::remove(BASE);
        allocations::insert(&other);
        drop(room);
        assert!(allocations::remove(BASE).is_some_and(|now| Arc::ptr_eq(&now, &other)));
    }
}
