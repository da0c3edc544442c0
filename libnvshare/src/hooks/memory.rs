//! `cuMemAlloc` and its kin: quota, then managed memory, then the ledger.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::sync::{Arc, Mutex, PoisonError};

use nvshare_client::{Admission, Residency};
use nvshare_proto::MemoryMode;

use crate::driver::types::{CU_MEM_ATTACH_GLOBAL, CUdevice, CUdeviceptr, CUdeviceptrV1, CUresult, CUstream};
use crate::entry_points::real;
use crate::hooks::{arrays, callbacks};
use crate::memory::allocations::{self, Allocation, Kind};
use crate::memory::devices::{self, Device};
use crate::memory::{deferred_free, driver_reserve, mover, plain};
use crate::process::unwind::OnUnwind;
use crate::process::{lifecycle, log};
use crate::work::contexts::{self, Context};
use crate::work::gate::{self, Mark};
use crate::{driver, session};

type Alloc = unsafe extern "C-unwind" fn(*mut CUdeviceptr, usize) -> CUresult;
type AllocV1 = unsafe extern "C-unwind" fn(*mut CUdeviceptrV1, c_uint) -> CUresult;
type AllocPitch = unsafe extern "C-unwind" fn(*mut CUdeviceptr, *mut usize, usize, usize, c_uint) -> CUresult;
type AllocPitchV1 =
    unsafe extern "C-unwind" fn(*mut CUdeviceptrV1, *mut c_uint, c_uint, c_uint, c_uint) -> CUresult;
type AllocManaged = unsafe extern "C-unwind" fn(*mut CUdeviceptr, usize, c_uint) -> CUresult;
type Free = unsafe extern "C-unwind" fn(CUdeviceptr) -> CUresult;
type FreeV1 = unsafe extern "C-unwind" fn(CUdeviceptrV1) -> CUresult;
type GetInfo = unsafe extern "C-unwind" fn(*mut usize, *mut usize) -> CUresult;
type GetInfoV1 = unsafe extern "C-unwind" fn(*mut c_uint, *mut c_uint) -> CUresult;
type TotalMem = unsafe extern "C-unwind" fn(*mut usize, CUdevice) -> CUresult;
type TotalMemV1 = unsafe extern "C-unwind" fn(*mut c_uint, CUdevice) -> CUresult;

/// The device and context that the calling thread would allocate in; `None`: the driver has to say why not.
pub(crate) fn target() -> Option<(&'static Device, Arc<Context>)> {
    // What the driver's own thread asks for, the driver answers.
    if callbacks::running() {
        return None;
    }
    // Its creation may have gone by a way that is not seen, and its memory is to be moved.
    let context = contexts::current()?;
    session::start();
    let device = devices::get(context.device())?;
    device.meet();
    session::uses(device);
    Some((device, context))
}

/// The same for what is ordered in a stream: the device is the stream's.
pub(crate) fn target_of(stream: CUstream) -> Option<(&'static Device, Arc<Context>)> {
    let current = target()?;
    if devices::all().nth(1).is_none() {
        return Some(current);
    }
    match driver::context_of(stream).ok()? {
        context if context == current.1.handle() => Some(current),
        context => driver::with_current(context, || Ok(target())).ok()?,
    }
}

/// Makes an allocation by `make`, which returns its address, under the limits and into the ledger.
pub(crate) fn allocate(
    device: &'static Device,
    context: Arc<Context>,
    bytes: u64,
    kind: Kind,
    make: impl Fn() -> Result<CUdeviceptr, CUresult>,
) -> Result<CUdeviceptr, CUresult> {
    let base = admitted(device, bytes, kind, make, |base, charged| {
        let allocation = Allocation::new(base, bytes, device.ordinal, Arc::clone(&context), kind, charged);
        if let Some(gone) = allocations::insert(allocation) {
            forget(&gone);
        }
        if kind == Kind::Device && charged > 0 {
            mover::populate(base, charged, device, &context);
        }
        base
    })?;
    if let Some(allocation) = allocations::find(base) {
        settle(device, &allocation);
    }
    Ok(base)
}

/// Charges an allocation that was admitted while the lock was elsewhere, if the lock has come while the driver made it: the
/// grant has restored what was on the list by then, and this was not.
fn settle(device: &'static Device, allocation: &Allocation) {
    let is_settled = |residency: &Residency| residency.is_freed() || residency.resident_bytes() > 0;
    while !is_settled(&allocation.residency()) && device.account().is_holding() {
        let mark = Mark::new();
        let Some(pass) = gate::try_enter(&mark) else {
            gate::pause();
            continue;
        };
        let mut residency = allocation.residency();
        let charge = || device.update(|account| account.charge_whole(allocation.size));
        let charged = if is_settled(&residency) { Ok(0) } else { charge() };
        if let Ok(charged @ 1..) = charged {
            residency.restored(charged);
            drop(residency);
            if allocation.kind == Kind::Device {
                mover::populate(allocation.base, charged, device, &allocation.context);
            }
        } else {
            drop(residency);
        }
        gate::leave(pass, &mark, CUresult::SUCCESS);
        match charged {
            Ok(_) => return,
            // The scheduler has none: the driver brings its pages when they are touched.
            Err(lacks) if !device.wait_for_room(lacks, false, session::wake) => return,
            Err(_) => {}
        }
    }
}

/// Makes something that takes memory by `make`, under the limits, and enters it by `enter`, which is told how much of it
/// is charged, before the gate can close.
pub(crate) fn admitted<T, U>(
    device: &'static Device,
    bytes: u64,
    kind: Kind,
    make: impl Fn() -> Result<T, CUresult>,
    enter: impl Fn(T, u64) -> U,
) -> Result<U, CUresult> {
    deferred_free::sweep();
    // The driver refuses its own memory itself.
    if kind.is_in_disguise()
        && !device.has_it_alone(bytes)
        && !(driver_reserve::give_up(device) && device.has_it_alone(bytes))
    {
        return Err(CUresult::OUT_OF_MEMORY);
    }
    loop {
        let mark = Mark::new();
        let pass = gate::try_enter(&mark);
        let inside = pass.is_some();
        // Between the grant and the open gate, or between the closed gate and the drain: nearly over.
        if !inside && device.account().is_holding() {
            gate::pause();
            continue;
        }
        match device.admit(bytes, kind, inside) {
            Ok(Admission::Lacks(lacks)) => {
                leave(pass, &mark);
                let waited = device.wait_for_room(lacks, kind.needs_room(), session::wake);
                if !waited && !driver_reserve::give_up(device) {
                    return Err(CUresult::OUT_OF_MEMORY);
                }
            }
            Ok(Admission::Again) => leave(pass, &mark),
            Ok(Admission::Charged(charged)) => {
                let undo = OnUnwind::new(|| device.release(bytes, charged, kind));
                let made = make();
                undo.done();
                let made = match made {
                    Ok(made) => {
                        log::debug(format_args!("allocated {bytes} bytes, {kind:?}, {charged} on the card"));
                        Ok(enter(made, charged))
                    }
                    Err(error) => {
                        device.release(bytes, charged, kind);
                        Err(error)
                    }
                };
                leave(pass, &mark);
                if made.is_ok() && device.is_usage_stale() {
                    session::wake();
                }
                return made;
            }
            Err(error) => {
                leave(pass, &mark);
                if !driver_reserve::give_up(device) {
                    return Err(error);
                }
            }
        }
    }
}

fn leave(pass: Option<gate::Pass>, mark: &Mark) {
    if let Some(pass) = pass {
        gate::leave(pass, mark, CUresult::SUCCESS);
    }
}

fn managed(bytes: usize, flags: c_uint) -> Result<CUdeviceptr, CUresult> {
    let mut base = 0;
    let real = real::cuMemAllocManaged.get().ok_or(CUresult::NOT_SUPPORTED)?;
    // SAFETY: a place for the address, and values.
    unsafe { real(&raw mut base, bytes, flags) }.ok()?;
    Ok(base)
}

/// Device memory below this stays the driver's own. It would share the pages of others and never be evicted; and the
/// flags and semaphores of `cuStreamWriteValue32` and its relatives, which refuse managed memory, are that small.
pub(crate) const SMALLEST_MANAGED: u64 = 64 * 1024;

/// How device memory of this size is handed out.
fn kind_of(device: &Device, bytes: u64) -> Kind {
    if device.memory == MemoryMode::Off || plain::needs_plain(bytes) {
        Kind::Plain
    } else if bytes < SMALLEST_MANAGED || lifecycle::has_begun() {
        Kind::Small
    } else {
        Kind::Device
    }
}

/// Writes an address where the caller wants it.
///
/// # Safety
/// `place` is writable.
pub(crate) unsafe fn answer<T>(made: Result<T, CUresult>, place: *mut T) -> CUresult {
    match made {
        Ok(value) => {
            // SAFETY: promised by the caller.
            unsafe { *place = value };
            CUresult::SUCCESS
        }
        Err(error) => error,
    }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn alloc(real: Alloc, place: *mut CUdeviceptr, bytes: usize) -> CUresult {
    // What the driver refuses, it refuses itself.
    let Some((device, context)) = (!place.is_null() && bytes > 0).then(target).flatten() else {
        // SAFETY: the caller's arguments.
        return unsafe { real(place, bytes) };
    };
    let kind = kind_of(device, bytes as u64);
    let made = allocate(device, context, bytes as u64, kind, || {
        if kind == Kind::Device {
            return managed(bytes, CU_MEM_ATTACH_GLOBAL);
        }
        let mut base = 0;
        // SAFETY: a place for the address, and a value.
        unsafe { real(&raw mut base, bytes) }.ok()?;
        Ok(base)
    });
    // SAFETY: not null, and where the driver would write.
    unsafe { answer(made, place) }
}

/// The 32-bit form of CUDA 3.1: its addresses do not reach managed memory, so it stays the driver's own.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn alloc_v1(real: AllocV1, place: *mut CUdeviceptrV1, bytes: c_uint) -> CUresult {
    let Some((device, context)) = (!place.is_null() && bytes > 0).then(target).flatten() else {
        // SAFETY: the caller's arguments.
        return unsafe { real(place, bytes) };
    };
    let made = allocate(device, context, u64::from(bytes), Kind::Plain, || {
        let mut base = 0;
        // SAFETY: a place for the address, and a value.
        unsafe { real(&raw mut base, bytes) }.ok()?;
        Ok(CUdeviceptr::from(base))
    });
    // SAFETY: not null, and where the driver would write; the address came from 32 bits.
    unsafe { answer(made.map(|base| base as CUdeviceptrV1), place) }
}

/// The pitch that the driver chooses: a single row tells it, once, for its free waits for the device. `None`: so many are
/// known that no more are asked for.
fn pitch_of(
    real: AllocPitch,
    device: &Device,
    width: usize,
    element: c_uint,
) -> Result<Option<usize>, CUresult> {
    static KNOWN: Mutex<BTreeMap<(CUdevice, usize, c_uint), usize>> = Mutex::new(BTreeMap::new());
    const MOST: usize = 4096;
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (device.ordinal, width, element);
    if let Some(&pitch) = known().get(&key) {
        return Ok(Some(pitch));
    }
    if known().len() >= MOST {
        return Ok(None);
    }
    let (mut row, mut pitch) = (0, 0);
    // SAFETY: places for both answers, and values.
    unsafe { real(&raw mut row, &raw mut pitch, width, 1, element) }.ok()?;
    if let Some(free) = real::cuMemFree_v2.get() {
        // SAFETY: what was allocated above.
        unsafe { free(row) };
    }
    known().insert(key, pitch);
    Ok(Some(pitch))
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn alloc_pitch(
    real: AllocPitch,
    place: *mut CUdeviceptr,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> CUresult {
    let valid = !place.is_null() && !pitch.is_null() && width > 0 && height > 0;
    let Some((device, context)) = valid.then(target).flatten() else {
        // SAFETY: the caller's arguments.
        return unsafe { real(place, pitch, width, height, element) };
    };
    let known_pitch = match pitch_of(real, device, width, element) {
        Ok(pitch) => pitch,
        Err(error) => return error,
    };
    let Some(bytes) = known_pitch.unwrap_or(width).checked_mul(height) else {
        return CUresult::OUT_OF_MEMORY;
    };
    // Where the pitch is not known, the rows' padding is not known before, and the memory is the driver's own.
    let kind = known_pitch.map_or(Kind::Plain, |_| kind_of(device, bytes as u64));
    let made_pitch = Cell::new(known_pitch.unwrap_or(0));
    let made = allocate(device, context, bytes as u64, kind, || {
        if kind == Kind::Device {
            return managed(bytes, CU_MEM_ATTACH_GLOBAL);
        }
        let (mut base, mut row) = (0, 0);
        // SAFETY: places for both answers, and values.
        unsafe { real(&raw mut base, &raw mut row, width, height, element) }.ok()?;
        made_pitch.set(row);
        Ok(base)
    });
    // SAFETY: neither is null, and both are where the driver would write.
    unsafe {
        let result = answer(made, place);
        if result == CUresult::SUCCESS {
            *pitch = made_pitch.get();
        }
        result
    }
}

/// The 32-bit form of CUDA 3.1. See [`alloc_v1`].
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn alloc_pitch_v1(
    real: AllocPitchV1,
    place: *mut CUdeviceptrV1,
    pitch: *mut c_uint,
    width: c_uint,
    height: c_uint,
    element: c_uint,
) -> CUresult {
    let valid = !place.is_null() && !pitch.is_null() && width > 0 && height > 0;
    let Some((device, context)) = valid.then(target).flatten() else {
        // SAFETY: the caller's arguments.
        return unsafe { real(place, pitch, width, height, element) };
    };
    // The rows' padding is not known before; it is small beside what such a program allocates.
    let made = allocate(device, context, u64::from(width) * u64::from(height), Kind::Plain, || {
        let mut base = 0;
        // SAFETY: a place for the address, the caller's for the pitch, and values.
        unsafe { real(&raw mut base, pitch, width, height, element) }.ok()?;
        Ok(CUdeviceptr::from(base))
    });
    // SAFETY: not null, and where the driver would write; the address came from 32 bits.
    unsafe { answer(made.map(|base| base as CUdeviceptrV1), place) }
}

/// The program's own managed memory counts, and is evicted and restored, like ours.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn alloc_managed(
    real: AllocManaged,
    place: *mut CUdeviceptr,
    bytes: usize,
    flags: c_uint,
) -> CUresult {
    let Some((device, context)) = (!place.is_null() && bytes > 0).then(target).flatten() else {
        // SAFETY: the caller's arguments.
        return unsafe { real(place, bytes, flags) };
    };
    let made = allocate(device, context, bytes as u64, Kind::Managed, || managed(bytes, flags));
    // SAFETY: not null, and where the driver would write.
    unsafe { answer(made, place) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn free(real: Free, base: CUdeviceptr) -> CUresult {
    free_with(base, || {
        // SAFETY: the caller's argument.
        unsafe { real(base) }
    })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn free_v1(real: FreeV1, base: CUdeviceptrV1) -> CUresult {
    free_with(CUdeviceptr::from(base), || {
        // SAFETY: the caller's argument.
        unsafe { real(base) }
    })
}

pub(crate) fn free_with(base: CUdeviceptr, call: impl FnOnce() -> CUresult) -> CUresult {
    if deferred_free::is_freed(base) {
        return CUresult::INVALID_VALUE;
    }
    // A pointer that we never saw is the driver's business alone.
    let Some(allocation) = allocations::remove(base) else { return call() };
    let undo = OnUnwind::new(|| {
        allocation.set_leaving(false);
        allocations::put_back(Arc::clone(&allocation));
    });
    allocation.set_leaving(true);
    // A piece that is being moved is waited for.
    let mut residency = allocation.residency();
    let result = call();
    undo.done();
    if result != CUresult::SUCCESS {
        drop(residency);
        allocation.set_leaving(false);
        allocations::put_back(allocation);
        return result;
    }
    let charged = residency.free();
    drop(residency);
    match devices::get(allocation.device) {
        Some(device) if allocation.kind.is_pools() && driver_reserve::is_kept_by_pools() => {
            driver_reserve::freed(device, &allocation, charged);
        }
        _ => forget(&allocation),
    }
    result
}

/// An allocation that is off the list is gone: what was charged for it is given back.
fn forget(allocation: &Allocation) {
    let charged = allocation.residency().free();
    if let Some(device) = devices::get(allocation.device) {
        device.release(allocation.size, charged, allocation.kind);
        session::freed(device);
    }
}

/// A context is gone, and its memory with it; the device's pools as well, if it was the device's own (`primary`).
pub(crate) fn forget_context(context: &Arc<Context>, primary: bool) {
    arrays::forget_context(context);
    deferred_free::forget_context(context);
    for allocation in allocations::remove_context(context, primary) {
        forget(&allocation);
    }
}

/// What the program may have, and has left, on the current device; `None`: nothing is known to be different from
/// what the driver says.
fn view(driver_free: u64, driver_total: u64) -> Option<(u64, u64)> {
    // Programs size their pools by this before they allocate anything: the first contact is due, and the answer to it.
    let (device, _) = target()?;
    device.wait_for_capacity();
    deferred_free::sweep();
    driver_reserve::look(device);
    let account = device.account();
    let fits = account.capacity().unwrap_or(driver_total).min(driver_total);
    let limit = device.limit.unwrap_or(u64::MAX);
    // The runtime asks for the total before there is anybody to ask what fits, and keeps it: it is the same everywhere.
    let total = limit.min(driver_total);
    // The limit is the tenant's, the card's room each program's own: it moves.
    let left = limit.saturating_sub(account.used()).min(fits.saturating_sub(account.allocated()));
    // With a scheduler, memory of others is not in the way: it moves. Without one, the card has what it has.
    let free = if account.capacity().is_some() { left } else { left.min(driver_free) };
    Some((free, total))
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_info(real: GetInfo, free: *mut usize, total: *mut usize) -> CUresult {
    // SAFETY: the caller's arguments; whether they may be null is the driver's to say.
    let result = unsafe { real(free, total) };
    if result == CUresult::SUCCESS {
        // SAFETY: the driver wrote what is not null.
        let (free, total) = unsafe { (free.as_mut(), total.as_mut()) };
        let driver =
            (free.as_deref().map_or(usize::MAX, |&f| f), total.as_deref().map_or(usize::MAX, |&t| t));
        if let Some((our_free, our_total)) = view(driver.0 as u64, driver.1 as u64) {
            if let Some(free) = free {
                *free = our_free as usize;
            }
            if let Some(total) = total {
                *total = our_total as usize;
            }
        }
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn get_info_v1(real: GetInfoV1, free: *mut c_uint, total: *mut c_uint) -> CUresult {
    // SAFETY: the caller's arguments; whether they may be null is the driver's to say.
    let result = unsafe { real(free, total) };
    if result == CUresult::SUCCESS {
        // SAFETY: the driver wrote what is not null.
        let (free, total) = unsafe { (free.as_mut(), total.as_mut()) };
        let driver = (
            free.as_deref().map_or(u64::MAX, |&f| f.into()),
            total.as_deref().map_or(u64::MAX, |&t| t.into()),
        );
        if let Some((our_free, our_total)) = view(driver.0, driver.1) {
            if let Some(free) = free {
                *free = our_free.try_into().unwrap_or(c_uint::MAX);
            }
            if let Some(total) = total {
                *total = our_total.try_into().unwrap_or(c_uint::MAX);
            }
        }
    }
    result
}

/// The process's limit on a device.
fn limit_of(device: CUdevice) -> Option<u64> {
    crate::process::config::get().ok()?.limit(usize::try_from(device).ok()?)
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn total_mem(real: TotalMem, bytes: *mut usize, device: CUdevice) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(bytes, device) };
    if result == CUresult::SUCCESS
        && let Some(limit) = limit_of(device)
    {
        // SAFETY: the driver wrote it.
        unsafe { *bytes = (*bytes).min(limit.try_into().unwrap_or(usize::MAX)) };
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn total_mem_v1(real: TotalMemV1, bytes: *mut c_uint, device: CUdevice) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(bytes, device) };
    if result == CUresult::SUCCESS
        && let Some(limit) = limit_of(device)
    {
        // SAFETY: the driver wrote it.
        unsafe { *bytes = (*bytes).min(limit.try_into().unwrap_or(c_uint::MAX)) };
    }
    result
}
