//! `fork`: the child has the memory of the parent and none of its threads.
//!
//! The driver refuses to work in a child of a process that has initialised it, so nothing of ours needs to: the
//! child lets everything pass and drops the connection, which would otherwise keep a dead parent's lock.

use crate::session;
use crate::work::gate;

/// Has children step out of the way.
pub(crate) fn watch() {
    extern "C" fn in_child() {
        gate::after_fork_in_child();
        session::after_fork_in_child();
    }
    // SAFETY: a function that is never unmapped, and that takes no lock.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
}
