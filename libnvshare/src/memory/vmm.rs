//! Physical memory that the program creates and maps itself, and its charges.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_ulonglong;
use std::sync::{Arc, Mutex};

use super::charge::Charge;
use crate::driver::types::CUdeviceptr;
use crate::process::lock::lock;

/// `CUmemGenericAllocationHandle`
pub(crate) type Handle = c_ulonglong;

/// Physical memory of this process. It lives, and its charge with it, while it has a handle or is mapped.
#[derive(Debug, Default)]
struct Physical {
    /// By handle: the charge, once for each time that the handle has to be released.
    handles: HashMap<Handle, Vec<Arc<Charge>>>,
    /// By address: the end of the mapping, and the charge.
    mappings: BTreeMap<CUdeviceptr, (CUdeviceptr, Arc<Charge>)>,
}

static PHYSICAL: Mutex<Option<Physical>> = Mutex::new(None);

fn physical<T>(look: impl FnOnce(&mut Physical) -> T) -> T {
    look(lock(&PHYSICAL).get_or_insert_default())
}

/// Enters new physical memory, or one more release that its handle needs.
pub(crate) fn insert(handle: Handle, charge: Arc<Charge>) {
    physical(|physical| physical.handles.entry(handle).or_default().push(charge));
}

/// Removes one release of a handle, which is about to be made.
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

/// Enters a mapping.
pub(crate) fn map(handle: Handle, address: CUdeviceptr, bytes: u64) {
    physical(|physical| {
        let charge = physical.handles.get(&handle).and_then(|charges| charges.last()).cloned();
        if let Some(charge) = charge {
            physical.mappings.insert(address, (address.saturating_add(bytes), charge));
        }
    });
}

/// Removes the mappings that begin in a range.
pub(crate) fn unmap(address: CUdeviceptr, bytes: u64) {
    let end = address.saturating_add(bytes);
    // The charges are dropped without the lock.
    let _gone: Vec<_> = physical(|physical| {
        let inside: Vec<CUdeviceptr> = physical.mappings.range(address..end).map(|(&base, _)| base).collect();
        inside.into_iter().filter_map(|base| physical.mappings.remove(&base)).collect()
    });
}

/// Notes that the handle of the memory at an address has to be released once more.
pub(crate) fn retain(handle: Handle, address: CUdeviceptr) {
    physical(|physical| {
        let mapping = physical.mappings.range(..=address).next_back();
        let charge = mapping.filter(|(_, (end, _))| address < *end).map(|(_, (_, c))| Arc::clone(c));
        if let Some(charge) = charge {
            physical.handles.entry(handle).or_default().push(charge);
        }
    });
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;

    /// Physical memory with this handle; whether its charge is still there.
    fn make(handle: Handle) -> impl Fn() -> bool {
        let charge = Arc::new(Charge::of_nothing());
        let weak: Weak<Charge> = Arc::downgrade(&charge);
        insert(handle, charge);
        move || weak.upgrade().is_some()
    }

    #[test]
    fn physical_memory_is_charged_while_it_has_a_handle_or_is_mapped() {
        let is_charged = make(1);
        map(1, 0x1000, 0x1000);
        drop(remove(1));
        assert!(is_charged(), "it is mapped");
        unmap(0x1000, 0x1000);
        assert!(!is_charged());
        assert!(remove(1).is_none());
    }

    #[test]
    fn a_handle_is_released_as_often_as_it_was_retained() {
        let is_charged = make(2);
        map(2, 0x9000, 0x1000);
        retain(2, 0x9fff);
        // Nothing is mapped there.
        retain(2, 0xa000);
        unmap(0x9000, 0x1000);
        drop(remove(2));
        assert!(is_charged());
        drop(remove(2));
        assert!(!is_charged() && remove(2).is_none());
    }

    #[test]
    fn mappings_that_begin_in_a_range_end_with_it() {
        let (one, two) = (make(3), make(4));
        map(3, 0x2_0000, 0x1000);
        map(4, 0x2_1000, 0x1000);
        drop((remove(3), remove(4)));
        unmap(0x2_0000, 0x1000);
        assert!(!one() && two());
        unmap(0x2_0000, 0x10_0000);
        assert!(!two());
    }
}
