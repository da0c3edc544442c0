//! How the program's memory comes to be shared with other processes (CUDA IPC).
//!
//! With the first handle of an allocation its memory is [exchanged](Mapped::make_exportable), while none of the program's work
//! runs. The memory stays on the card from then on. A small allocation is shared with its slab, as the driver does.

use std::sync::{Arc, Mutex, MutexGuard};

use nvshare_proto::Seldom;
use nvshare_proto::units::MIB;

use super::allocations::Allocation;
use super::mapping::Mapped;
use super::{deferred_free, devices, exports, physical};
use crate::driver::types::{CUipcMemHandle, CUresult};
use crate::process::lock::lock;
use crate::process::log;
use crate::work::standstill;

/// Held while an allocation comes to be shared: from before the thread passes the gate.
pub(crate) fn one_at_a_time() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    lock(&ONE)
}

/// Whether the driver can share memory that the library maps on the device of an allocation.
pub(crate) fn is_possible(allocation: &Allocation) -> bool {
    devices::get(allocation.device).is_some_and(devices::Device::shares_by_descriptor)
}

/// The handle of an allocation that has one.
///
/// # Errors
/// The process has no descriptors, or no thread, to give the memory to others.
pub(crate) fn handle_of(allocation: &Allocation) -> Option<Result<CUipcMemHandle, CUresult>> {
    if deferred_free::is_freed(allocation.base) {
        return Some(Err(CUresult::INVALID_VALUE));
    }
    let handle = exports::handle_of(allocation.id)?;
    Some(handle.map_err(|error| {
        say_refused(allocation, format_args!("{error}"));
        CUresult::OPERATING_SYSTEM
    }))
}

/// Makes the handle of an allocation that has none. The thread holds [`one_at_a_time`] and is inside the gate.
///
/// # Errors
/// The driver's, if the memory cannot be exchanged; NOT_READY, if the program's work does not come to an end; or as for [`handle_of`].
pub(crate) fn share(allocation: &Arc<Allocation>) -> Result<CUipcMemHandle, CUresult> {
    // Another thread may have been first.
    if let Some(handle) = handle_of(allocation) {
        return handle;
    }
    let holder = allocation.holder();
    let export = match exports::find(holder.id) {
        Some(export) => export,
        None => {
            let exchange = |mapped: &Mapped| {
                mapped.make_exportable(holder.base, holder.device, &holder.context_to_move_in())
            };
            let mapped = holder.mapped.as_ref().ok_or(CUresult::INVALID_VALUE)?;
            let parts = standstill::make(|| {
                let parts = exchange(mapped)?;
                physical::pin_allocated(allocation, "other processes can reach them");
                Ok(parts)
            });
            let parts = parts.unwrap_or(Err(CUresult::NOT_READY)).inspect_err(|error| {
                say_refused(allocation, format_args!("{error:?}"));
            })?;
            exports::describe(holder.id, parts)
        }
    };
    let (offset, asked) = (allocation.base - holder.base, allocation.asked().unwrap_or(0));
    exports::add(allocation.id, export, offset, asked).map_err(|_| CUresult::OPERATING_SYSTEM)?;
    if allocation.is_leaving() {
        // Another thread frees it, and may have been there before.
        exports::forget(allocation.id);
    }
    handle_of(allocation).unwrap_or(Err(CUresult::INVALID_VALUE))
}

fn say_refused(allocation: &Allocation, why: std::fmt::Arguments<'_>) {
    static REFUSED: Seldom = Seldom::new(log::warn);
    let mib = allocation.asked().unwrap_or(0).div_ceil(MIB);
    REFUSED.say(format_args!("{mib} MiB cannot be shared with other processes: {why}"));
}
