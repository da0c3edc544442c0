//! How the program's memory comes to be shared with other processes (CUDA IPC).
//!
//! With the first handle of an allocation its memory is [exchanged](super::mapping::Mapped::make_exportable), while none of the
//! program's work runs. The memory stays on the card from then on. A small allocation is shared with its slab, as the driver does.

use std::sync::{Arc, Mutex, MutexGuard};

use nvshare_proto::ThrottledLine;
use nvshare_proto::units::MIB;

use super::allocations::{Allocation, Kind};
use super::backing::{AllocationRequest, Work};
use super::exports::Means;
use super::mapping::least_piece;
use super::{admission, deferred_free, devices, exports, free, physical};
use crate::driver::types::{CUipcMemHandle, CUresult};
use crate::process::lock::lock;
use crate::process::{log, passing};
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

/// The handle of an allocation that has one. An error: the program has freed it.
pub(crate) fn handle_of(allocation: &Allocation) -> Option<Result<CUipcMemHandle, CUresult>> {
    if deferred_free::is_freed(allocation.base) {
        return Some(Err(CUresult::INVALID_VALUE));
    }
    exports::handle_of(allocation.id).map(Ok)
}

/// Memory on the card that makes way for the memory that is exchanged. It is in the account, and other programs make room for it.
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
        let bytes = least_piece(holder.size, passing::MAX_DESCRIPTORS);
        let request = AllocationRequest::new(device, holder.context_to_move_in(), Kind::Mapped, bytes);
        let made = admission::make(&request, || Err(CUresult::NOT_SUPPORTED)).map(Self);
        made.inspect_err(|error| say_refused(allocation, format_args!("{error:?}")))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        free::free(self.0.base, Work::Complete, || CUresult::SUCCESS);
    }
}

/// Makes the handle of an allocation that has none. The thread holds [`one_at_a_time`] and is inside the gate. Where the card is full,
/// there has to be [`Room`].
///
/// # Errors
/// The driver's, if the memory cannot be exchanged. NOT_READY: the program's work does not come to an end. OPERATING_SYSTEM: the process
/// has no descriptors, or no thread, to give the memory to others.
pub(crate) fn share(allocation: &Arc<Allocation>, room: Option<Room>) -> Result<CUipcMemHandle, CUresult> {
    // Another thread may have been first.
    if let Some(handle) = handle_of(allocation) {
        return handle;
    }
    let no_means = |why: std::fmt::Arguments<'_>| {
        say_refused(allocation, why);
        CUresult::OPERATING_SYSTEM
    };
    let refused = |error: &CUresult| say_refused(allocation, format_args!("{error:?}"));
    let means = Means::get().map_err(|error| no_means(format_args!("{error}")))?;
    let holder = allocation.holder();
    let mapped = holder.mapped.as_ref().ok_or(CUresult::INVALID_VALUE)?;
    let context = holder.context_to_move_in();
    let export = match exports::find(holder.id) {
        Some(export) if export.is_intact() => export,
        Some(_lost) => exports::describe(holder.id, &means, mapped.describe(&context).inspect_err(refused)?),
        None if means.descriptors == 0 => {
            return Err(no_means(format_args!(
                "half of the descriptors that this process may have (RLIMIT_NOFILE) are of shared memory"
            )));
        }
        None => {
            let is_last_try = room.is_some();
            let parts = standstill::make(|| {
                drop(room);
                let most = means.descriptors;
                let parts = mapped.make_exportable(holder.base, holder.device, &context, most)?;
                physical::pin_allocated(allocation, "other processes can reach them");
                Ok(parts)
            });
            let parts = parts.unwrap_or(Err(CUresult::NOT_READY)).inspect_err(|error| {
                if is_last_try || *error != CUresult::OUT_OF_MEMORY {
                    refused(error);
                }
            })?;
            exports::describe(holder.id, &means, parts)
        }
    };
    let (offset, asked) = (allocation.base - holder.base, allocation.asked().unwrap_or(0));
    exports::add(allocation.id, &export, offset, asked, &means);
    if allocation.is_leaving() {
        // Another thread frees it, and may have been there before.
        exports::forget(allocation.id);
    }
    handle_of(allocation).unwrap_or(Err(CUresult::INVALID_VALUE))
}

fn say_refused(allocation: &Allocation, why: std::fmt::Arguments<'_>) {
    static REFUSED: ThrottledLine = ThrottledLine::new(log::warn);
    let mib = allocation.asked().unwrap_or(0).div_ceil(MIB);
    REFUSED.say(format_args!("{mib} MiB cannot be shared with other processes: {why}"));
}
