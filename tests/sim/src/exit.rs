//! The end of the process: the driver shuts down in an exit handler that `cuInit` registers.
//!
//! From then on each call answers DEINITIALIZED: calls of exit handlers that were registered before `cuInit`, and of threads that
//! still run. The driver bears a call of the program that is under way as it shuts down, but not one that moves memory which it frees
//! at that moment: such a call stops the process with a line. That a checkpoint is such a call was not measured.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::handles::stop_with;
use crate::process::{self, DEINITIALIZED, Failure};

/// The calls that say where memory is.
const MOVES: [&str; 9] = [
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuMemPrefetchAsync",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAddressFree",
];

static IS_DOWN: AtomicBool = AtomicBool::new(false);
/// The calls of [`MOVES`] that are under way.
static MOVING: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());
/// Calls that came since the driver has shut down.
static LATE: AtomicU64 = AtomicU64::new(0);

/// A call that is under way.
#[derive(Debug)]
pub(crate) struct Call(Option<&'static str>);

impl Drop for Call {
    fn drop(&mut self) {
        if let Some(name) = self.0 {
            let mut moving = moving();
            let at = moving.iter().position(|&other| other == name);
            at.map(|at| moving.swap_remove(at));
        }
    }
}

fn moving() -> MutexGuard<'static, Vec<&'static str>> {
    MOVING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call begins, unless the driver has shut down.
pub(crate) fn hold_off(name: &'static str) -> Result<Call, Failure> {
    let is_move = MOVES.contains(&name) && !process::is_forked();
    let mut moving = is_move.then(moving);
    if IS_DOWN.load(Ordering::SeqCst) {
        LATE.fetch_add(1, Ordering::SeqCst);
        return Err(DEINITIALIZED);
    }
    if let Some(moving) = &mut moving {
        moving.push(name);
    }
    Ok(Call(is_move.then_some(name)))
}

/// See [`LATE`].
pub(crate) fn late_calls() -> u64 {
    LATE.load(Ordering::SeqCst)
}

/// Shuts the driver down when the process exits.
pub(crate) fn watch() {
    // SAFETY: a function that is never unmapped.
    unsafe { libc::atexit(shut_down) };
}

extern "C" fn shut_down() {
    // In a child of the process there is no driver.
    if process::is_forked() {
        return;
    }
    let moving = moving();
    IS_DOWN.store(true, Ordering::SeqCst);
    if let Some(name) = moving.first() {
        stop_with(&format!("nvsim: {name} is under way while the driver shuts down\n"));
    }
}
