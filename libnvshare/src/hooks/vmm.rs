//! Physical memory of the VMM calls.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_ulonglong, c_void};
use std::sync::{Arc, Mutex};

use crate::driver::types::{CUdeviceptr, CUresult};
use crate::hooks::memory;
use crate::memory::charge::{Charge, Properties, charged, lock};

/// `CUmemGenericAllocationHandle`
type Handle = c_ulonglong;
type Create = unsafe extern "C-unwind" fn(*mut Handle, usize, *const c_void, c_ulonglong) -> CUresult;
type Release = unsafe extern "C-unwind" fn(Handle) -> CUresult;
type Map = unsafe extern "C-unwind" fn(CUdeviceptr, usize, usize, Handle, c_ulonglong) -> CUresult;
type Unmap = unsafe extern "C-unwind" fn(CUdeviceptr, usize) -> CUresult;
type Retain = unsafe extern "C-unwind" fn(*mut Handle, *mut c_void) -> CUresult;

/// Physical memory that was created here. It lives while it has a handle or is mapped; so does its charge.
#[derive(Debug, Default)]
struct Physical {
    /// By handle, once for each time that it has to be released.
    handles: HashMap<Handle, Vec<Arc<Charge>>>,
    /// By address: where the mapping ends.
    mappings: BTreeMap<CUdeviceptr, (CUdeviceptr, Arc<Charge>)>,
}

static PHYSICAL: Mutex<Option<Physical>> = Mutex::new(None);

fn physical<T>(look: impl FnOnce(&mut Physical) -> T) -> T {
    look(lock(&PHYSICAL).get_or_insert_default())
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create(
    real: Create,
    handle: *mut Handle,
    bytes: usize,
    properties: *const c_void,
    flags: c_ulonglong,
) -> CUresult {
    let valid = !handle.is_null() && bytes > 0;
    // SAFETY: the caller's properties.
    let Some(device) = valid.then(|| unsafe { Properties::device(properties) }).flatten() else {
        // SAFETY: the caller's arguments.
        return unsafe { real(handle, bytes, properties, flags) };
    };
    let made = charged(device, bytes as u64, || {
        let mut made = 0;
        // SAFETY: a place for the handle, and the caller's arguments.
        unsafe { real(&raw mut made, bytes, properties, flags) }.ok()?;
        Ok(made)
    });
    let made = made.map(|(made, charge)| {
        physical(|physical| physical.handles.entry(made).or_default().push(Arc::new(charge)));
        made
    });
    // SAFETY: not null, and where the driver would write.
    unsafe { memory::answer(made, handle) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn release(real: Release, handle: Handle) -> CUresult {
    // Taken off first: once it is released, the driver may give the same handle to another thread.
    let charge = physical(|physical| {
        let charges = physical.handles.get_mut(&handle)?;
        let charge = charges.pop();
        if charges.is_empty() {
            physical.handles.remove(&handle);
        }
        charge
    });
    // SAFETY: the caller's argument.
    let result = unsafe { real(handle) };
    if let (true, Some(charge)) = (result != CUresult::SUCCESS, charge) {
        physical(|physical| physical.handles.entry(handle).or_default().push(charge));
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn map(
    real: Map,
    address: CUdeviceptr,
    bytes: usize,
    offset: usize,
    handle: Handle,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(address, bytes, offset, handle, flags) };
    if result == CUresult::SUCCESS {
        physical(|physical| {
            let charge = physical.handles.get(&handle).and_then(|charges| charges.last()).cloned();
            if let Some(charge) = charge {
                physical.mappings.insert(address, (address.saturating_add(bytes as u64), charge));
            }
        });
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn unmap(real: Unmap, address: CUdeviceptr, bytes: usize) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(address, bytes) };
    if result == CUresult::SUCCESS {
        let end = address.saturating_add(bytes as u64);
        // The charges are given back outside the lock.
        let _gone: Vec<_> = physical(|physical| {
            let inside: Vec<CUdeviceptr> =
                physical.mappings.range(address..end).map(|(&base, _)| base).collect();
            inside.into_iter().filter_map(|base| physical.mappings.remove(&base)).collect()
        });
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn retain(real: Retain, handle: *mut Handle, address: *mut c_void) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(handle, address) };
    if result == CUresult::SUCCESS && !handle.is_null() {
        // SAFETY: the driver wrote it.
        let handle = unsafe { *handle };
        let address = address as CUdeviceptr;
        physical(|physical| {
            let mapping = physical.mappings.range(..=address).next_back();
            let charge = mapping.filter(|(_, (end, _))| address < *end).map(|(_, (_, c))| Arc::clone(c));
            if let Some(charge) = charge {
                physical.handles.entry(handle).or_default().push(charge);
            }
        });
    }
    result
}
