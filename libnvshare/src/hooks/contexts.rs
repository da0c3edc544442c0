//! Functions that create, end and select contexts.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::driver;
use crate::driver::functions::signatures;
use crate::driver::types::{CUcontext, CUdevice, CUgreenCtx, CUresult};
use crate::memory::allocations;
use crate::memory::mapping::peers;
use crate::memory::{arrays, deferred_free, free, imports};
use crate::process::lock::lock;
use crate::work::contexts::{self, Context};
use crate::work::{captures, gate, streams};

/// A device's primary context, and how often the program retains it.
#[derive(Debug)]
struct Primary {
    device: CUdevice,
    context: Arc<Context>,
    retained: u32,
}

static PRIMARY: Mutex<Vec<Primary>> = Mutex::new(Vec::new());
/// Held during each retain and release of a device's primary context, and while the library notes it. Without this, a release during
/// which another thread retains the context could not be distinguished from a release that ends it. Each device has its own: the end of
/// a context waits for its work, which may wait for a thread that retains another one.
static PRIMARY_CALLS: [Mutex<()>; MAX_DEVICES] = [const { Mutex::new(()) }; MAX_DEVICES];
/// Devices beyond this number share the locks of others.
const MAX_DEVICES: usize = 64;

/// Waits until no other thread is in such a call for this device.
fn in_order(device: CUdevice) -> Option<MutexGuard<'static, ()>> {
    PRIMARY_CALLS.get(device.unsigned_abs() as usize % MAX_DEVICES).map(lock)
}

/// Green contexts, and the contexts that stand for them.
static GREEN: Mutex<Vec<(CUgreenCtx, Arc<Context>)>> = Mutex::new(Vec::new());

/// The current context may get work from now on.
fn learn_current(result: CUresult) -> CUresult {
    if result == CUresult::SUCCESS {
        contexts::learn_current();
        gate::note_other_context();
    }
    result
}

/// A new context of a device is in `place`, and current.
///
/// # Safety
/// `place` is valid if `result` is success.
unsafe fn made(result: CUresult, place: *mut CUcontext, device: CUdevice) -> CUresult {
    if result == CUresult::SUCCESS && !place.is_null() {
        // SAFETY: the driver wrote it.
        contexts::learn(unsafe { *place }, device);
        gate::note_other_context();
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create(
    real: signatures::cuCtxCreate,
    context: *mut CUcontext,
    flags: c_uint,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments; the driver answered for this place.
    unsafe { made(real(context, flags, device), context, device) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create_v3(
    real: signatures::cuCtxCreate_v3,
    context: *mut CUcontext,
    params: *mut c_void,
    count: c_int,
    flags: c_uint,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments; the driver answered for this place.
    unsafe { made(real(context, params, count, flags, device), context, device) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create_v4(
    real: signatures::cuCtxCreate_v4,
    context: *mut CUcontext,
    params: *mut c_void,
    flags: c_uint,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments; the driver answered for this place.
    unsafe { made(real(context, params, flags, device), context, device) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn set_current(real: signatures::cuCtxSetCurrent, context: CUcontext) -> CUresult {
    // SAFETY: the caller's arguments.
    learn_current(unsafe { real(context) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn pop_current(real: signatures::cuCtxPopCurrent, context: *mut CUcontext) -> CUresult {
    // SAFETY: the caller's arguments.
    learn_current(unsafe { real(context) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn retain_primary(
    real: signatures::cuDevicePrimaryCtxRetain,
    context: *mut CUcontext,
    device: CUdevice,
) -> CUresult {
    let _order = in_order(device);
    // SAFETY: the caller's arguments.
    let result = unsafe { real(context, device) };
    if result == CUresult::SUCCESS && !context.is_null() {
        // SAFETY: the driver wrote it.
        let context = contexts::learn(unsafe { *context }, device);
        let mut primary = lock(&PRIMARY);
        match primary.iter_mut().find(|known| known.device == device) {
            Some(known) if Arc::ptr_eq(&known.context, &context) => known.retained += 1,
            Some(known) => *known = Primary { device, context, retained: 1 },
            None => primary.push(Primary { device, context, retained: 1 }),
        }
    }
    result
}

/// Forgets everything that was in a context.
fn gone(context: &Arc<Context>) {
    streams::forget_context(context);
    gate::forget_context(context);
    captures::forget_context(context);
    arrays::forget_context(context);
    deferred_free::forget_context(context);
    free::forget_context(context);
    let _alone = lock(&ACCESS_CHANGES);
    for (device, other) in peers::forget_context(context) {
        set_peers(device, Some(other));
    }
}

/// Held while cards gain or lose access to each other's memory. A call that finds that the access is there returns once it is.
pub(super) static ACCESS_CHANGES: Mutex<()> = Mutex::new(());

/// Sets the access to memory of a device that the library maps, and to what was opened there, as peers have it now.
pub(super) fn set_peers(device: CUdevice, may_no_more: Option<CUdevice>) {
    for allocation in allocations::of_device(device) {
        if let Some(mapped) = &allocation.mapped {
            mapped.set_peers(allocation.base, device, may_no_more);
        }
    }
    imports::set_peers(device, may_no_more);
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn enable_peer(
    real: signatures::cuCtxEnablePeerAccess,
    peer: CUcontext,
    flags: c_uint,
) -> CUresult {
    let _alone = lock(&ACCESS_CHANGES);
    // SAFETY: the caller's arguments.
    let result = unsafe { real(peer, flags) };
    if result == CUresult::SUCCESS
        && let Some((from, to)) = contexts::current().zip(contexts::find(peer))
        && let Some(device) = peers::enable(&from, &to)
    {
        set_peers(device, None);
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn disable_peer(real: signatures::cuCtxDisablePeerAccess, peer: CUcontext) -> CUresult {
    let _alone = lock(&ACCESS_CHANGES);
    // SAFETY: the caller's argument.
    let result = unsafe { real(peer) };
    if result == CUresult::SUCCESS
        && let Some((from, to)) = contexts::current().zip(contexts::find(peer))
    {
        let (device, other) = peers::disable(&from, &to);
        set_peers(device, Some(other));
    }
    result
}

/// Ends a context by `call`, unless the driver reports an error.
fn end(context: CUcontext, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(known) = contexts::find(context) else { return call() };
    let (result, ended) = contexts::end(&known, call, || false);
    if ended {
        gone(&known);
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn destroy(real: signatures::cuCtxDestroy, context: CUcontext) -> CUresult {
    // SAFETY: the caller's arguments.
    end(context, || unsafe { real(context) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn attach(
    real: signatures::cuCtxAttach,
    context: *mut CUcontext,
    flags: c_uint,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(context, flags) };
    if result == CUresult::SUCCESS
        && let Some(current) = contexts::current()
    {
        current.attach();
    }
    result
}

/// A context ends when it has been detached once for its creation, and once for each time that it was attached.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn detach(real: signatures::cuCtxDetach, context: CUcontext) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { real(context) };
    let Some(known) = contexts::find(context) else { return call() };
    if known.detach() {
        return end(context, call);
    }
    let result = call();
    if result != CUresult::SUCCESS {
        known.attach();
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn release_primary(
    real: signatures::cuDevicePrimaryCtxRelease,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { real(device) };
    let _order = in_order(device);
    let stays = lock(&PRIMARY).iter().any(|known| known.device == device && known.retained > 1);
    // A function without a hook may have retained it.
    let result = if stays { call() } else { end_primary(device, call, || driver::primary_is_active(device)) };
    if result == CUresult::SUCCESS {
        let mut primary = lock(&PRIMARY);
        let known = primary.iter_mut().find(|known| known.device == device);
        known.into_iter().for_each(|known| known.retained = known.retained.saturating_sub(1));
    }
    result
}

/// A reset ends what is in the context, even if the program still retains it.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn reset_primary(real: signatures::cuDevicePrimaryCtxReset, device: CUdevice) -> CUresult {
    let _order = in_order(device);
    // SAFETY: the caller's argument.
    end_primary(device, || unsafe { real(device) }, || false)
}

/// The primary context of a device, if it is known as a context.
fn primary_of(device: CUdevice) -> Option<Arc<Context>> {
    let retained = lock(&PRIMARY).iter().find(|known| known.device == device).map(|k| Arc::clone(&k.context));
    // A function without a hook may have created it.
    retained.or_else(|| contexts::find(driver::primary_context(device).ok()?))
}

fn end_primary(
    device: CUdevice,
    call: impl FnOnce() -> CUresult,
    lives_on: impl FnOnce() -> bool,
) -> CUresult {
    let Some(context) = primary_of(device) else { return call() };
    let (result, ended) = contexts::end(&context, call, lives_on);
    if ended {
        lock(&PRIMARY).retain(|known| !Arc::ptr_eq(&known.context, &context));
        gone(&context);
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create_green(
    real: signatures::cuGreenCtxCreate,
    place: *mut CUgreenCtx,
    description: *mut c_void,
    device: CUdevice,
    flags: c_uint,
) -> CUresult {
    // The function retains the primary context.
    let _order = in_order(device);
    // SAFETY: the caller's arguments.
    let result = unsafe { real(place, description, device, flags) };
    if result == CUresult::SUCCESS && !place.is_null() {
        // SAFETY: the driver wrote it.
        let green = unsafe { *place };
        if let (Ok(context), Ok(primary)) = (driver::context_of_green(green), driver::primary_context(device))
        {
            let context = contexts::learn(context, device);
            context.mark_green(contexts::learn(primary, device));
            lock(&GREEN).push((green, context));
        }
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn destroy_green(real: signatures::cuGreenCtxDestroy, green: CUgreenCtx) -> CUresult {
    // SAFETY: the caller's argument.
    let call = || unsafe { real(green) };
    let take = |known: &mut Vec<(CUgreenCtx, _)>| {
        let at = known.iter().position(|(of, _)| *of == green)?;
        Some(known.swap_remove(at).1)
    };
    let known = take(&mut lock(&GREEN));
    let Some(context) = known else { return call() };
    let device = context.device();
    let _order = in_order(device);
    let end_green = || {
        let (result, ended) = contexts::end(&context, call, || false);
        if ended {
            gone(&context);
        } else {
            lock(&GREEN).push((green, Arc::clone(&context)));
        }
        result
    };
    let is_retained = lock(&PRIMARY).iter().any(|known| known.device == device && known.retained > 0);
    if is_retained {
        end_green()
    } else {
        // This green context may be the last that retains the primary context, which then ends with it.
        end_primary(device, end_green, || driver::primary_is_active(device))
    }
}
