//! Physical memory of the driver's, which stays: its handles, its mappings, and its charges.

use std::sync::Arc;

use super::{Handle, Mapping, Of, write};
use crate::driver::types::{CUdeviceptr, CUresult};
use crate::memory::charge::Charge;

/// Enters new memory of the driver's, or one more release that its handle needs.
pub(crate) fn enter(handle: Handle, charge: Arc<Charge>) {
    write().charges.entry(handle).or_default().push(charge);
}

/// Removes one release of a handle of the driver's, which is about to be made.
pub(crate) fn remove(handle: Handle) -> Option<Arc<Charge>> {
    let mut books = write();
    let charges = books.charges.get_mut(&handle)?;
    let charge = charges.pop();
    if charges.is_empty() {
        books.charges.remove(&handle);
    }
    charge
}

/// Notes that the driver's handle of the memory at an address has to be released once more.
pub(crate) fn retain(handle: Handle, at: CUdeviceptr) {
    let mut books = write();
    if let Some((_, Mapping { of: Of::Driver(Some(charge)), .. })) = books.mappings_in(at, 1).pop() {
        books.charges.entry(handle).or_default().push(charge);
    }
}

/// Maps the driver's memory by `call`, if the library has nothing mapped there.
pub(crate) fn map(handle: Handle, at: CUdeviceptr, bytes: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let mut books = write();
    if books.mappings_in(at, bytes).iter().any(|(_, mapping)| mapping.handle().is_some()) {
        return CUresult::INVALID_VALUE;
    }
    let result = call();
    if result == CUresult::SUCCESS {
        let charge = books.charges.get(&handle).and_then(|charges| charges.last()).cloned();
        if charge.is_none() {
            // It was not created here.
            super::note_reached();
        }
        books.mappings.insert(at, Mapping { bytes, of: Of::Driver(charge) });
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::physical;

    fn unmap(at: CUdeviceptr, bytes: u64) {
        assert_eq!(physical::unmap(at, bytes, |_, _| CUresult::SUCCESS), CUresult::SUCCESS);
    }

    fn map(handle: Handle, at: CUdeviceptr, bytes: u64) {
        assert_eq!(super::map(handle, at, bytes, || CUresult::SUCCESS), CUresult::SUCCESS);
    }

    /// Memory of the driver's with this handle; whether its charge is still there.
    fn make(handle: Handle) -> impl Fn() -> bool {
        let charge = Arc::new(Charge::of_nothing());
        let weak = Arc::downgrade(&charge);
        enter(handle, charge);
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
