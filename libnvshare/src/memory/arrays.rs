//! The arrays that live, and the charge of each. Mipmapped arrays are arrays too.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::charge::Charge;
use crate::process::lock::lock;
use crate::work::contexts::Context;

/// An array's context and its charge.
pub(crate) type Entry = (Arc<Context>, Charge);

/// Arrays by handle.
static ARRAYS: Mutex<BTreeMap<usize, Entry>> = Mutex::new(BTreeMap::new());

/// Enters an array, by its handle.
pub(crate) fn insert(handle: usize, entry: Entry) {
    lock(&ARRAYS).insert(handle, entry);
}

/// Takes an array off the list.
pub(crate) fn remove(handle: usize) -> Option<Entry> {
    lock(&ARRAYS).remove(&handle)
}

/// Removes the arrays of a context that has ended.
pub(crate) fn forget_context(context: &Arc<Context>) {
    let mut arrays = lock(&ARRAYS);
    let (gone, left) =
        std::mem::take(&mut *arrays).into_iter().partition(|(_, (of, _))| Arc::ptr_eq(of, context));
    *arrays = left;
    drop(arrays);
    drop::<BTreeMap<_, _>>(gone);
}
