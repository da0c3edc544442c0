//! The processes that this one shares memory with, by giving or by opening it (CUDA IPC). The scheduler makes those a gang.

use std::sync::Mutex;

use nvshare_proto::MAX_GANG_MEMBERS;

use crate::process::lock::lock;
use crate::process::{answering, bell};

/// A number of each process that memory is of, this one included. Further ones are left out: a gang has no more members.
static NUMBERS: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Memory of the process that answers under this name is shared.
pub(super) fn note(of: &answering::Name) {
    let number = of.first_chunk().map_or(0, |part| u64::from_ne_bytes(*part));
    let mut numbers = lock(&NUMBERS);
    if numbers.len() < MAX_GANG_MEMBERS as usize && !numbers.contains(&number) {
        numbers.push(number);
        drop(numbers);
        bell::ring();
    }
}

/// The numbers from this place in the list on.
pub(crate) fn numbers(from: usize) -> Vec<u64> {
    lock(&NUMBERS).iter().skip(from).copied().collect()
}
