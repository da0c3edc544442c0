//! A process that leaves the cards and comes back.

use std::ffi::{c_int, c_uint, c_void};

use super::{api, give, status};
use crate::checkpoint;
use crate::process;
use crate::world::Uuid;

/// The arguments of a lock, 64 bytes, as far as they are read.
#[repr(C)]
#[derive(Debug)]
pub(super) struct LockArguments {
    millis: c_uint,
}

/// The arguments of a restore, 64 bytes, as far as they are read.
#[repr(C)]
#[derive(Debug)]
pub(super) struct RestoreArguments {
    pairs: *const [Uuid; 2],
    count: c_uint,
}

api! {
    fn cuCheckpointProcessGetState(pid: c_int, state: *mut c_int) { unsafe { give(state, checkpoint::phase(pid).map(|phase| phase as c_int)) } }
    fn cuCheckpointProcessLock(pid: c_int, arguments: *const LockArguments) {
        // SAFETY: null, or readable.
        let millis = unsafe { arguments.as_ref() }.map_or(0, |arguments| arguments.millis);
        status(process::get().and_then(|p| checkpoint::lock(p, pid, millis)))
    }
    fn cuCheckpointProcessCheckpoint(pid: c_int, _arguments: *const c_void) { status(process::get().and_then(|p| checkpoint::checkpoint(p, pid))) }
    fn cuCheckpointProcessRestore(pid: c_int, arguments: *const RestoreArguments) {
        // SAFETY: null, or readable; the pairs as many as it says.
        let pairs = unsafe {
            arguments.as_ref().filter(|it| !it.pairs.is_null()).map_or(&[][..], |it| std::slice::from_raw_parts(it.pairs, it.count as usize))
        };
        status(process::get().and_then(|p| checkpoint::restore(p, pid, pairs)))
    }
    fn nvsimTaken(bytes: *mut u64) { unsafe { give(bytes, process::get().map(|_| checkpoint::taken())) } }
    fn cuCheckpointProcessUnlock(pid: c_int, _arguments: *const c_void) { status(checkpoint::unlock(pid)) }
}
