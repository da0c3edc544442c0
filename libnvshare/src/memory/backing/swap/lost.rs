//! Memory that cannot come back: the card is lost, or the memory's context is broken or has ended.
//!
//! Each try ends in an error, and the gate would stay closed for ever. So the memory is given up: it leaves the account, the
//! gate opens, and calls that submit work in its [context](Context::failure) answer the driver's error. They would do so with
//! the memory, too.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nvshare_proto::units::MIB;

use super::moves::pin_context;
use crate::driver::types::CUresult;
use crate::memory::allocations;
use crate::memory::devices::Device;
use crate::process::lock::lock;
use crate::process::log;
use crate::work::contexts::Context;

/// Memory is given up after this time, if the error is one that may pass, or another context may take the memory over.
const PATIENCE: Duration = Duration::from_secs(5);

/// A context whose memory does not come back.
#[derive(Debug)]
struct Failing {
    context: Arc<Context>,
    error: CUresult,
    /// Memory may come back nevertheless.
    may_pass: bool,
    since: Instant,
    last: Instant,
}

static FAILING: Mutex<Vec<Failing>> = Mutex::new(Vec::new());

/// Notes that memory of a context could not come back. The card being full is no such error.
pub(super) fn note_failure(context: &Arc<Context>, error: CUresult) {
    note(context, error, !error.ends_all_work());
}

/// Notes that memory could not come back in a context that has ended, if it has. A later context of the device takes memory over that
/// belongs to none.
pub(super) fn note_end(context: &Arc<Context>) {
    if context.life().is_over() {
        note(context, CUresult::CONTEXT_IS_DESTROYED, true);
    }
}

fn note(context: &Arc<Context>, error: CUresult, may_pass: bool) {
    let now = Instant::now();
    let mut all = lock(&FAILING);
    if let Some(failing) = all.iter_mut().find(|failing| Arc::ptr_eq(&failing.context, context)) {
        // Nothing is tried between two turns, so that time does not count.
        let since = if now - failing.last < PATIENCE { failing.since } else { now };
        *failing = Failing { context: Arc::clone(context), error, may_pass, since, last: now };
    } else {
        all.push(Failing { context: Arc::clone(context), error, may_pass, since: now, last: now });
    }
}

/// Notes that memory of a context has come back.
pub(super) fn note_success(context: &Arc<Context>) {
    lock(&FAILING).retain(|failing| !Arc::ptr_eq(&failing.context, context));
}

/// Gives up the absent memory of a device's contexts, where it cannot come back. None of it may be on its way.
pub(super) fn give_up(device: &Device) {
    let cannot_recover =
        |failing: &Failing| !failing.may_pass || failing.last.duration_since(failing.since) >= PATIENCE;
    let mut lost = Vec::new();
    lock(&FAILING).retain(|failing| {
        let is_here = failing.context.device() == device.ordinal;
        if is_here && cannot_recover(failing) {
            lost.push((Arc::clone(&failing.context), failing.error));
            return false;
        }
        !failing.context.life().is_over() || failing.last.elapsed() < PATIENCE
    });
    lost.iter().for_each(|(context, error)| give_up_in(context, device, *error));
}

fn give_up_in(context: &Arc<Context>, device: &Device, error: CUresult) {
    let (mut bytes, mut has_failed) = (0, false);
    allocations::each_mapped(|allocation| {
        if !Arc::ptr_eq(&allocation.context_to_move_in(), context) {
            return;
        }
        let absent = allocation.residency().give_up_absent();
        // Before the account: with the last absent bytes gone, the gate may open. An eviction may have met the error before any
        // memory was away.
        if absent > 0 && !std::mem::replace(&mut has_failed, true) {
            context.fail(error);
        }
        device.update(|account| {
            if allocation.is_pinned() {
                account.unpin(absent);
            }
            if allocation.is_spare() {
                account.release_aside(absent, 0, allocation.kind);
            } else {
                account.release(absent, 0, allocation.kind);
            }
        });
        bytes += absent;
    });
    // From now on, memory that is still on the GPU stays there.
    pin_context(context, error);
    if bytes > 0 {
        log::error(format_args!(
            "{} MiB of the program's memory cannot come back to the card, and its calls there fail: {error:?}",
            bytes / MIB
        ));
    }
}
