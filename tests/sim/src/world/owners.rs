//! The processes that have blocks on a card, and the blocks that nobody has any more.

use std::io::ErrorKind;

use super::World;

impl World {
    /// Frees the blocks of processes that are gone, and of descriptors that are closed.
    pub(crate) fn reap(&self, gpu: usize) {
        let _held = self.hold(gpu, false);
        self.reap_held(gpu);
    }

    /// Registers a process that has blocks; `None`: there are too many. Under the card's lock.
    pub(super) fn own(&self, gpu: usize, process: u32) -> Option<()> {
        // SAFETY: the card's field, under its lock.
        let owners = unsafe { &mut (*self.gpu(gpu)).owners };
        if owners.contains(&process) {
            return Some(());
        }
        *owners.iter_mut().find(|owner| **owner == 0)? = process;
        Some(())
    }

    /// Under the card's lock.
    pub(super) fn reap_held(&self, gpu: usize) {
        // SAFETY: the card's fields, under its lock.
        let (owners, high) = unsafe { (&mut (*self.gpu(gpu)).owners, (*self.gpu(gpu)).high) };
        let me = std::process::id();
        for owner in owners.iter_mut().filter(|owner| **owner != 0 && **owner != me) {
            if is_alive(*owner) {
                continue;
            }
            for index in 0..high {
                self.leave(gpu, index, *owner);
            }
            *owner = 0;
        }
        self.free_undescribed(gpu);
    }
}

/// Whether a process still has its memory: a process that has ended, even without being waited for, has none.
pub(crate) fn is_alive(process: u32) -> bool {
    let stat = match std::fs::read_to_string(format!("/proc/{process}/stat")) {
        Ok(stat) => stat,
        // A process that has no free descriptors cannot look, and must not take others for dead.
        Err(error) => {
            return error.kind() != ErrorKind::NotFound && error.raw_os_error() != Some(libc::ESRCH);
        }
    };
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    !matches!(state, Some('Z' | 'X'))
}
