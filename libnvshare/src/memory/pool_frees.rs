//! Memory that was freed to pools, and that the driver has not taken back.
//!
//! A pool keeps what was freed to it until somebody synchronizes with the context, or with the stream that freed it. Queries are
//! not enough, and trimming gives nothing back before (measured). In the account the memory is free at once. So the mover
//! synchronizes with the contexts before room goes to other programs. A running program may give back room whose memory the
//! pool still has: it comes with the next drain.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::allocations::Allocation;
use crate::driver;
use crate::process::{lifecycle, threads};
use crate::work::contexts::{self, Context};
use crate::work::drain::Drain;

/// The longest wait for work before the frees, and for the driver.
const PATIENCE: Duration = Duration::from_millis(5);

/// Notes that an allocation of a pool was freed.
pub(super) fn note(allocation: &Allocation) {
    let context = &allocation.context;
    context.note_pool_free();
    // The stream that frees it is of the current context, as a rule.
    let current = driver::current_context().ok().filter(|&current| current != context.handle());
    current.and_then(contexts::find).iter().for_each(|current| current.note_pool_free());
}

/// Synchronizes with the contexts in which memory was freed to pools, if their work is complete. The mover calls this.
pub(super) fn see() {
    let unseen: Vec<Arc<Context>> =
        contexts::all().into_iter().filter(|context| context.has_unseen_frees()).collect();
    let begin = Instant::now();
    let is_complete = |mut work: Drain| loop {
        match work.poll() {
            0 => break true,
            _ if begin.elapsed() >= PATIENCE || lifecycle::is_exiting() => break false,
            _ => threads::pause(),
        }
    };
    if !unseen.is_empty() && is_complete(Drain::of_contexts(unseen.iter().cloned())) {
        is_complete(Drain::synchronize(unseen.into_iter()));
    }
}
