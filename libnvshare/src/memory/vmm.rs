//! Physical memory that the program makes and maps itself, and what was charged for it.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_ulonglong;
use std::sync::{Arc, Mutex};

use super::charge::Charge;
use crate::driver::types::CUdeviceptr;
use crate::process::lock::lock;

/// `CUmemGenericAllocationHandle`
pub(crate) type Handle = c_ulonglong;

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

/// Physical memory was made: its handle has to be released once.
pub(crate) fn insert(handle: Handle, charge: Arc<Charge>) {
    physical(|physical| physical.handles.entry(handle).or_default().push(charge));
}

/// A handle is about to be released once.
pub(crate) fn remove(handle: Handle) -> Option<Arc<Charge>> {
    physical(|physical| {
        let charges = physical.handles.get_mut(&handle)?;
        let charge = charges.pop();
        if charges.is_empty() {
            physical.handles.remove(&handle);
        }
        charge
    })
}

/// Physical memory was mapped.
pub(crate) fn map(handle: Handle, address: CUdeviceptr, bytes: u64) {
    physical(|physical| {
        let charge = physical.handles.get(&handle).and_then(|charges| charges.last()).cloned();
        if let Some(charge) = charge {
            physical.mappings.insert(address, (address.saturating_add(bytes), charge));
        }
    });
}

/// The mappings that begin in a range are gone.
pub(crate) fn unmap(address: CUdeviceptr, bytes: u64) {
    let end = address.saturating_add(bytes);
    // The charges are given back outside the lock.
    let _gone: Vec<_> = physical(|physical| {
        let inside: Vec<CUdeviceptr> = physical.mappings.range(address..end).map(|(&base, _)| base).collect();
        inside.into_iter().filter_map(|base| physical.mappings.remove(&base)).collect()
    });
}

/// A handle of what is mapped at an address has to be released once more.
pub(crate) fn retain(handle: Handle, address: CUdeviceptr) {
    physical(|physical| {
        let mapping = physical.mappings.range(..=address).next_back();
        let charge = mapping.filter(|(_, (end, _))| address < *end).map(|(_, (_, c))| Arc::clone(c));
        if let Some(charge) = charge {
            physical.handles.entry(handle).or_default().push(charge);
        }
    });
}
