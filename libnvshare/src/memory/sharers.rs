//! The processes that this one shares memory with now, by giving or by opening it (CUDA IPC). The scheduler makes those a gang.

use std::collections::BTreeMap;
use std::sync::Mutex;

use nvshare_proto::MAX_GANG_MEMBERS;

use crate::process::lock::lock;
use crate::process::{answering, bell};

/// A number of each process that shared memory is of, this one included, and how often memory of it is shared.
static NUMBERS: Mutex<BTreeMap<u64, u32>> = Mutex::new(BTreeMap::new());

/// Memory is shared as long as this lives.
#[derive(Debug)]
pub(super) struct Sharing(u64);

impl Sharing {
    /// Memory of the process that answers under a name is shared.
    pub(super) fn begin(of: &answering::Name) -> Self {
        let number = of.first_chunk().map_or(0, |part| u64::from_ne_bytes(*part));
        change(number, |times| times + 1);
        Self(number)
    }
}

impl Drop for Sharing {
    fn drop(&mut self) {
        change(self.0, |times| times - 1);
    }
}

fn change(number: u64, change: impl FnOnce(u32) -> u32) {
    let mut numbers = lock(&NUMBERS);
    let before = numbers.remove(&number).unwrap_or(0);
    let times = change(before);
    if times > 0 {
        numbers.insert(number, times);
    }
    drop(numbers);
    if (before == 0) != (times == 0) {
        bell::ring();
    }
}

/// The numbers; of further processes none, as a gang has no more members.
pub(crate) fn numbers() -> Vec<u64> {
    lock(&NUMBERS).keys().take(MAX_GANG_MEMBERS as usize).copied().collect()
}
