//! The free and total memory that the program sees.

use std::ffi::c_uint;

use super::target::target;
use crate::driver::functions::signatures;
use crate::driver::types::{CUdevice, CUresult};
use crate::memory::{deferred_free, driver_reserve};
use crate::process::config;

/// Free and total bytes of the current device for the program. `None`: the driver's own answer is right.
fn free_and_total(driver_free: u64, driver_total: u64) -> Option<(u64, u64)> {
    // Programs size their pools by this before they allocate: so start the session, and wait for the scheduler's answer.
    let (device, _) = target()?;
    device.wait_for_capacity();
    deferred_free::free_without_waiting();
    driver_reserve::refresh(device);
    let account = device.account();
    let fits = account.capacity().unwrap_or(driver_total).min(driver_total);
    let limit = device.allocation_limit().unwrap_or(u64::MAX);
    // The runtime asks for the total before the scheduler is known, and keeps it. So the total does not depend on the
    // scheduler.
    let total = limit.min(driver_total);
    // The limit is shared by the tenant's processes. The card's size is not shared among processes, since memory moves.
    let left =
        limit.saturating_sub(account.used()).min(fits.saturating_sub(account.allocated() - account.aside()));
    // With a scheduler, other clients' memory can move. Without one, only what is free on the card counts.
    let free = if account.capacity().is_some() { left } else { left.min(driver_free + account.aside()) };
    Some((free, total))
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_info(
    real: signatures::cuMemGetInfo_v2,
    free: *mut usize,
    total: *mut usize,
) -> CUresult {
    // SAFETY: the caller's arguments; whether they may be null is the driver's to say.
    let result = unsafe { real(free, total) };
    if result == CUresult::SUCCESS {
        // SAFETY: the driver wrote what is not null.
        let (free, total) = unsafe { (free.as_mut(), total.as_mut()) };
        let (driver_free, driver_total) =
            (free.as_deref().map_or(usize::MAX, |&f| f), total.as_deref().map_or(usize::MAX, |&t| t));
        if let Some((our_free, our_total)) = free_and_total(driver_free as u64, driver_total as u64) {
            if let Some(free) = free {
                *free = our_free as usize;
            }
            if let Some(total) = total {
                *total = our_total as usize;
            }
        }
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_info_v1(
    real: signatures::cuMemGetInfo,
    free: *mut c_uint,
    total: *mut c_uint,
) -> CUresult {
    // SAFETY: the caller's arguments; whether they may be null is the driver's to say.
    let result = unsafe { real(free, total) };
    if result == CUresult::SUCCESS {
        // SAFETY: the driver wrote what is not null.
        let (free, total) = unsafe { (free.as_mut(), total.as_mut()) };
        let (driver_free, driver_total) = (
            free.as_deref().map_or(u64::MAX, |&f| f.into()),
            total.as_deref().map_or(u64::MAX, |&t| t.into()),
        );
        if let Some((our_free, our_total)) = free_and_total(driver_free, driver_total) {
            if let Some(free) = free {
                *free = our_free.try_into().unwrap_or(c_uint::MAX);
            }
            if let Some(total) = total {
                *total = our_total.try_into().unwrap_or(c_uint::MAX);
            }
        }
    }
    result
}

/// The limit of the process on a device, in bytes.
fn limit_of(device: CUdevice) -> Option<u64> {
    config::get().ok()?.limit(usize::try_from(device).ok()?)
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn total_mem(
    real: signatures::cuDeviceTotalMem_v2,
    bytes: *mut usize,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(bytes, device) };
    if result == CUresult::SUCCESS
        && let Some(limit) = limit_of(device)
    {
        // SAFETY: the driver wrote it.
        unsafe { *bytes = (*bytes).min(limit.try_into().unwrap_or(usize::MAX)) };
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn total_mem_v1(
    real: signatures::cuDeviceTotalMem,
    bytes: *mut c_uint,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(bytes, device) };
    if result == CUresult::SUCCESS
        && let Some(limit) = limit_of(device)
    {
        // SAFETY: the driver wrote it.
        unsafe { *bytes = (*bytes).min(limit.try_into().unwrap_or(c_uint::MAX)) };
    }
    result
}
