//! The devices that the program uses: it has submitted work to them, or asked for memory on them.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver;
use crate::driver::types::CUdevice;
use crate::process::bell;

/// Devices that one process can have.
pub(crate) const MAX_DEVICES: usize = u64::BITS as usize;

/// One bit for each device, by its ordinal.
static USED: AtomicU64 = AtomicU64::new(0);

/// The bit of a device; 0 if it has none.
fn bit(device: CUdevice) -> u64 {
    u32::try_from(device).ok().and_then(|ordinal| 1u64.checked_shl(ordinal)).unwrap_or(0)
}

/// Whether the program uses this device.
pub(crate) fn contains(device: CUdevice) -> bool {
    USED.load(Ordering::Relaxed) & bit(device) != 0
}

/// Whether the program uses the calling thread's device, or the thread has none.
pub(crate) fn contains_current() -> bool {
    driver::current_device().map_or(true, contains)
}

/// Notes that the program uses this device. The scheduler is told the first time.
pub(crate) fn add(device: CUdevice) {
    if !contains(device) && USED.fetch_or(bit(device), Ordering::Relaxed) & bit(device) == 0 {
        bell::ring();
    }
}

/// Notes that the program uses the calling thread's device.
pub(crate) fn add_current() {
    if let Ok(device) = driver::current_device() {
        add(device);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_used_from_its_first_use_on() {
        assert!(!contains(3));
        add(3);
        assert!(contains(3) && !contains(2) && !contains(63));
        for none in [-1, 64, CUdevice::MAX] {
            add(none);
            assert!(!contains(none), "{none}");
        }
    }
}
