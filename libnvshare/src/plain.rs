//! Memory that stays the driver's own: counted, and immovable.
//!
//! Stream-ordered allocations, physical memory of the VMM calls, arrays. None of it can be handed out as managed
//! memory without becoming something else than the program asked for, so the limits hold for it, the scheduler
//! keeps room for it, and it stays on the card.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cuda::{
    CU_MEM_LOCATION_TYPE_DEVICE, CUarray, CUcontext, CUdevice, CUdeviceptr, CUmemLocation, CUmemoryPool,
    CUmipmappedArray, CUresult, CUstream,
};
use crate::devices::{self, Device};
use crate::ledger::Kind;
use crate::streams::StreamKey;
use crate::{callbacks, capture, memory, session};

/// What was charged for something that is no allocation by address; given back when it is dropped.
#[derive(Debug)]
struct Charge {
    device: CUdevice,
    bytes: u64,
    /// Of these, on the card: all, unless one program may have more than fits.
    charged: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        if let Some(device) = devices::get(self.device) {
            device.release(self.bytes, self.charged);
            session::freed(device);
        }
    }
}

/// Makes something of `bytes` bytes on a device, under the limits.
fn charged<T>(
    device: &'static Device,
    bytes: u64,
    make: impl Fn() -> Result<T, CUresult>,
) -> Result<(T, Charge), CUresult> {
    memory::admitted(device, bytes, Kind::Plain, |charged| {
        Ok((make()?, Charge { device: device.ordinal, bytes, charged }))
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// ---- stream-ordered ----

type AllocAsync = unsafe extern "C-unwind" fn(*mut CUdeviceptr, usize, CUstream) -> CUresult;
type AllocFromPoolAsync =
    unsafe extern "C-unwind" fn(*mut CUdeviceptr, usize, CUmemoryPool, CUstream) -> CUresult;
type FreeAsync = unsafe extern "C-unwind" fn(CUdeviceptr, CUstream) -> CUresult;
type PoolCreate = unsafe extern "C-unwind" fn(*mut CUmemoryPool, *const c_void) -> CUresult;
type PoolDestroy = unsafe extern "C-unwind" fn(CUmemoryPool) -> CUresult;

/// The beginning of `CUmemPoolProps`, and of `CUmemAllocationProp`.
#[repr(C)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: CUmemLocation,
}

impl Properties {
    /// The device that memory with these properties is on; `None`: it is on none.
    ///
    /// # Safety
    /// Null, or what the driver's contract says.
    unsafe fn device(properties: *const c_void) -> Option<&'static Device> {
        // SAFETY: promised by the caller.
        let properties = unsafe { properties.cast::<Self>().as_ref() }?;
        // What the driver's own thread asks for, the driver answers.
        if properties.location.kind != CU_MEM_LOCATION_TYPE_DEVICE || callbacks::running() {
            return None;
        }
        session::start();
        let device = devices::get(properties.location.id)?;
        session::uses(device);
        Some(device)
    }
}

/// The program's own pools, by the device that they are on; `None`: on none.
static POOLS: Mutex<BTreeMap<usize, Option<CUdevice>>> = Mutex::new(BTreeMap::new());

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn pool_create(
    real: PoolCreate,
    pool: *mut CUmemoryPool,
    properties: *const c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(pool, properties) };
    if result == CUresult::SUCCESS && !pool.is_null() {
        // SAFETY: the driver accepted both.
        let (pool, device) = unsafe { (*pool, Properties::device(properties)) };
        lock(&POOLS).insert(pool.0 as usize, device.map(|device| device.ordinal));
    }
    result
}

/// Allocations of the pool live on until they are freed.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn pool_destroy(real: PoolDestroy, pool: CUmemoryPool) -> CUresult {
    let known = lock(&POOLS).remove(&(pool.0 as usize));
    // SAFETY: the caller's argument.
    let result = unsafe { real(pool) };
    if let (true, Some(device)) = (result != CUresult::SUCCESS, known) {
        lock(&POOLS).insert(pool.0 as usize, device);
    }
    result
}

/// Whether an allocation on a stream becomes a node of a graph: that takes memory when the graph runs, of the graph's
/// own pool.
fn in_graph(stream: CUstream, twin: bool) -> bool {
    capture::is_capturing(StreamKey::new(stream, twin))
}

/// # Safety
/// `place` is null or where the driver would write.
unsafe fn ordered(
    on: Option<(&'static Device, CUcontext)>,
    place: *mut CUdeviceptr,
    bytes: usize,
    real: impl Fn(*mut CUdeviceptr) -> CUresult,
) -> CUresult {
    let Some((device, context)) = on.filter(|_| !place.is_null() && bytes > 0) else { return real(place) };
    let made = memory::allocate(device, context, bytes as u64, Kind::Plain, || {
        let mut base = 0;
        real(&raw mut base).ok()?;
        Ok(base)
    });
    // SAFETY: not null, and where the driver would write.
    unsafe { memory::answer(made, place) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn alloc_async<const TWIN: bool>(
    real: AllocAsync,
    place: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let on = memory::target().filter(|_| !in_graph(stream, TWIN));
    // SAFETY: the caller's arguments, `place` or a place of ours.
    unsafe { ordered(on, place, bytes, |place| real(place, bytes, stream)) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn alloc_from_pool_async<const TWIN: bool>(
    real: AllocFromPoolAsync,
    place: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> CUresult {
    let known = lock(&POOLS).get(&(pool.0 as usize)).copied();
    let on = match known {
        _ if in_graph(stream, TWIN) => None,
        // A default pool: the current device's, as good as always.
        None => memory::target(),
        Some(None) => None,
        Some(Some(device)) => {
            memory::target().and_then(|(_, context)| Some((devices::get(device)?, context)))
        }
    };
    // SAFETY: the caller's arguments, `place` or a place of ours.
    unsafe { ordered(on, place, bytes, |place| real(place, bytes, pool, stream)) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn free_async(real: FreeAsync, base: CUdeviceptr, stream: CUstream) -> CUresult {
    memory::free_with(base, || {
        // SAFETY: the caller's arguments.
        unsafe { real(base, stream) }
    })
}

// ---- physical memory ----

/// `CUmemGenericAllocationHandle`
type Handle = c_ulonglong;
type Create = unsafe extern "C-unwind" fn(*mut Handle, usize, *const c_void, c_ulonglong) -> CUresult;
type Release = unsafe extern "C-unwind" fn(Handle) -> CUresult;
type Map = unsafe extern "C-unwind" fn(CUdeviceptr, usize, usize, Handle, c_ulonglong) -> CUresult;
type Unmap = unsafe extern "C-unwind" fn(CUdeviceptr, usize) -> CUresult;
type Retain = unsafe extern "C-unwind" fn(*mut Handle, *mut c_void) -> CUresult;

/// Physical memory that was created here. It lives while it has a handle or is mapped; so does its charge.
#[derive(Debug, Default)]
struct Physical {
    /// By handle, once for each time that it has to be released.
    handles: HashMap<Handle, Vec<Arc<Charge>>>,
    /// By address: where the mapping ends.
    mappings: BTreeMap<CUdeviceptr, (CUdeviceptr, Arc<Charge>)>,
}

static PHYSICAL: Mutex<Option<Physical>> = Mutex::new(None);

fn physical<T>(look: impl FnOnce(&mut Physical) -> T) -> T {
    look(lock(&PHYSICAL).get_or_insert_default())
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create(
    real: Create,
    handle: *mut Handle,
    bytes: usize,
    properties: *const c_void,
    flags: c_ulonglong,
) -> CUresult {
    let valid = !handle.is_null() && bytes > 0;
    // SAFETY: the caller's properties.
    let Some(device) = valid.then(|| unsafe { Properties::device(properties) }).flatten() else {
        // SAFETY: the caller's arguments.
        return unsafe { real(handle, bytes, properties, flags) };
    };
    let made = charged(device, bytes as u64, || {
        let mut made = 0;
        // SAFETY: a place for the handle, and the caller's arguments.
        unsafe { real(&raw mut made, bytes, properties, flags) }.ok()?;
        Ok(made)
    });
    let made = made.map(|(made, charge)| {
        physical(|physical| physical.handles.entry(made).or_default().push(Arc::new(charge)));
        made
    });
    // SAFETY: not null, and where the driver would write.
    unsafe { memory::answer(made, handle) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn release(real: Release, handle: Handle) -> CUresult {
    // Taken off first: once it is released, the driver may give the same handle to another thread.
    let charge = physical(|physical| {
        let charges = physical.handles.get_mut(&handle)?;
        let charge = charges.pop();
        if charges.is_empty() {
            physical.handles.remove(&handle);
        }
        charge
    });
    // SAFETY: the caller's argument.
    let result = unsafe { real(handle) };
    if let (true, Some(charge)) = (result != CUresult::SUCCESS, charge) {
        physical(|physical| physical.handles.entry(handle).or_default().push(charge));
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn map(
    real: Map,
    address: CUdeviceptr,
    bytes: usize,
    offset: usize,
    handle: Handle,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(address, bytes, offset, handle, flags) };
    if result == CUresult::SUCCESS {
        physical(|physical| {
            let charge = physical.handles.get(&handle).and_then(|charges| charges.last()).cloned();
            if let Some(charge) = charge {
                physical.mappings.insert(address, (address.saturating_add(bytes as u64), charge));
            }
        });
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn unmap(real: Unmap, address: CUdeviceptr, bytes: usize) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(address, bytes) };
    if result == CUresult::SUCCESS {
        let end = address.saturating_add(bytes as u64);
        // The charges are given back outside the lock.
        let _gone: Vec<_> = physical(|physical| {
            let inside: Vec<CUdeviceptr> =
                physical.mappings.range(address..end).map(|(&base, _)| base).collect();
            inside.into_iter().filter_map(|base| physical.mappings.remove(&base)).collect()
        });
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn retain(real: Retain, handle: *mut Handle, address: *mut c_void) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(handle, address) };
    if result == CUresult::SUCCESS && !handle.is_null() {
        // SAFETY: the driver wrote it.
        let handle = unsafe { *handle };
        let address = address as CUdeviceptr;
        physical(|physical| {
            let mapping = physical.mappings.range(..=address).next_back();
            let charge = mapping.filter(|(_, (end, _))| address < *end).map(|(_, (_, c))| Arc::clone(c));
            if let Some(charge) = charge {
                physical.handles.entry(handle).or_default().push(charge);
            }
        });
    }
    result
}

// ---- arrays ----

type ArrayCreate = unsafe extern "C-unwind" fn(*mut CUarray, *const c_void) -> CUresult;
type MipmappedCreate = unsafe extern "C-unwind" fn(*mut CUmipmappedArray, *const c_void, c_uint) -> CUresult;
type ArrayDestroy = unsafe extern "C-unwind" fn(CUarray) -> CUresult;
type MipmappedDestroy = unsafe extern "C-unwind" fn(CUmipmappedArray) -> CUresult;

/// Arrays, mipmapped or not, by handle.
static ARRAYS: Mutex<BTreeMap<usize, (CUcontext, Charge)>> = Mutex::new(BTreeMap::new());

/// `CUDA_ARRAY3D_SPARSE` and `CUDA_ARRAY3D_DEFERRED_MAPPING`: no memory comes with it.
const UNBACKED: c_uint = 0x40 | 0x80;

/// `CUDA_ARRAY3D_LAYERED` and `CUDA_ARRAY3D_CUBEMAP`.
const LAYERED: c_uint = 0x1 | 0x4;

fn product(of: [u64; 4]) -> u64 {
    of.into_iter().fold(1, u64::saturating_mul)
}

/// What an array is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    extent: [u64; 3],
    format: c_int,
    channels: c_uint,
    flags: c_uint,
}

impl Shape {
    /// Bytes of the first `levels` levels of a mipmap; an array has one.
    fn bytes(&self, levels: c_uint) -> u64 {
        if self.flags & UNBACKED != 0 {
            return 0;
        }
        // `CUarray_format`; of what is not listed, most take four bytes or less.
        let component = match self.format {
            0x01 | 0x08 | 0xc0..=0xc2 | 0xc6..=0xc8 => 1,
            0x02 | 0x09 | 0x10 | 0xc3..=0xc5 | 0xc9..=0xcb => 2,
            _ => 4,
        };
        let mut extent = self.extent.map(|n| n.max(1));
        let mut sum = 0u64;
        for _ in 0..levels.clamp(1, 32) {
            let [width, height, depth] = extent;
            sum = sum.saturating_add(match self.format {
                // Compressed: blocks of four by four texels, whatever the channels.
                0x91..=0x9e => {
                    let block = if matches!(self.format, 0x91 | 0x92 | 0x97 | 0x98) { 8 } else { 16 };
                    product([width.div_ceil(4), height.div_ceil(4), depth, block])
                }
                _ => product([width, height, depth, component * u64::from(self.channels.max(1))]),
            });
            // Layers and faces of a cube do not become fewer.
            let layers = if self.flags & LAYERED == 0 { (depth / 2).max(1) } else { depth };
            extent = [(width / 2).max(1), (height / 2).max(1), layers];
        }
        sum.checked_next_multiple_of(512).unwrap_or(sum)
    }
}

/// `CUDA_ARRAY_DESCRIPTOR` and `CUDA_ARRAY3D_DESCRIPTOR`, with sizes of 32 bits (before CUDA 3.2) or of 64.
#[repr(C)]
struct Descriptor2<N> {
    extent: [N; 2],
    format: c_int,
    channels: c_uint,
}

#[repr(C)]
struct Descriptor3<N> {
    extent: [N; 3],
    format: c_int,
    channels: c_uint,
    flags: c_uint,
}

/// # Safety
/// Null, or a descriptor of two dimensions.
unsafe fn shape2<N: Copy + Into<u64>>(descriptor: *const c_void) -> Option<Shape> {
    // SAFETY: promised by the caller.
    let d = unsafe { descriptor.cast::<Descriptor2<N>>().as_ref() }?;
    let [width, height] = d.extent.map(Into::into);
    Some(Shape { extent: [width, height, 1], format: d.format, channels: d.channels, flags: 0 })
}

/// # Safety
/// Null, or a descriptor of three dimensions.
unsafe fn shape3<N: Copy + Into<u64>>(descriptor: *const c_void) -> Option<Shape> {
    // SAFETY: promised by the caller.
    let d = unsafe { descriptor.cast::<Descriptor3<N>>().as_ref() }?;
    Some(Shape { extent: d.extent.map(Into::into), format: d.format, channels: d.channels, flags: d.flags })
}

/// # Safety
/// `place` is null or where the driver would write a handle.
unsafe fn array<T>(
    place: *mut T,
    bytes: Option<u64>,
    handle: impl Fn(&T) -> usize,
    nothing: T,
    real: impl Fn(*mut T) -> CUresult,
) -> CUresult
where
    T: Copy,
{
    let target = bytes.filter(|&bytes| bytes > 0 && !place.is_null()).zip(memory::target());
    let Some((bytes, (device, context))) = target else { return real(place) };
    let made = charged(device, bytes, || {
        let mut made = nothing;
        real(&raw mut made).ok()?;
        Ok(made)
    });
    let made = made.map(|(made, charge)| {
        lock(&ARRAYS).insert(handle(&made), (context, charge));
        made
    });
    // SAFETY: not null, and where the driver would write.
    unsafe { memory::answer(made, place) }
}

macro_rules! array_create {
    ($($name:ident: $shape:ident<$n:ty>;)*) => {$(
        /// # Safety
        /// As for the driver's function.
        pub(crate) unsafe fn $name(
            real: ArrayCreate,
            place: *mut CUarray,
            descriptor: *const c_void,
        ) -> CUresult {
            // SAFETY: the caller's descriptor.
            let bytes = unsafe { $shape::<$n>(descriptor) }.map(|shape| shape.bytes(1));
            // SAFETY: the caller's arguments, `place` or a place of ours.
            unsafe { array(place, bytes, |a| a.0 as usize, CUarray::NULL, |place| real(place, descriptor)) }
        }
    )*};
}

array_create! {
    array_create_v1: shape2<u32>;
    array_create: shape2<u64>;
    array_3d_create_v1: shape3<u32>;
    array_3d_create: shape3<u64>;
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn mipmapped_create(
    real: MipmappedCreate,
    place: *mut CUmipmappedArray,
    descriptor: *const c_void,
    levels: c_uint,
) -> CUresult {
    // SAFETY: the caller's descriptor.
    let bytes = unsafe { shape3::<u64>(descriptor) }.map(|shape| shape.bytes(levels));
    let handle = |a: &CUmipmappedArray| a.0 as usize;
    // SAFETY: the caller's arguments, `place` or a place of ours.
    unsafe { array(place, bytes, handle, CUmipmappedArray::NULL, |place| real(place, descriptor, levels)) }
}

fn destroy(handle: usize, call: impl FnOnce() -> CUresult) -> CUresult {
    // Taken off first: once it is destroyed, the driver may give the same handle to another thread.
    let known = lock(&ARRAYS).remove(&handle);
    let result = call();
    if let (true, Some(known)) = (result != CUresult::SUCCESS, known) {
        lock(&ARRAYS).insert(handle, known);
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn array_destroy(real: ArrayDestroy, array: CUarray) -> CUresult {
    // SAFETY: the caller's argument.
    destroy(array.0 as usize, || unsafe { real(array) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn mipmapped_destroy(real: MipmappedDestroy, array: CUmipmappedArray) -> CUresult {
    // SAFETY: the caller's argument.
    destroy(array.0 as usize, || unsafe { real(array) })
}

/// A context is gone, and its arrays with it.
pub(crate) fn forget_context(context: CUcontext) {
    let mut arrays = lock(&ARRAYS);
    let (gone, left) = std::mem::take(&mut *arrays).into_iter().partition(|(_, (of, _))| *of == context);
    *arrays = left;
    drop(arrays);
    drop::<BTreeMap<_, _>>(gone);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_take_what_their_texels_take() {
        let shape = |extent, format, channels, flags| Shape { extent, format, channels, flags };
        for (shape, levels, expected) in [
            (shape([1024, 1024, 0], 0x20, 4, 0), 1, 16 << 20),
            (shape([1024, 0, 0], 0x01, 1, 0), 1, 1024),
            (shape([256, 256, 256], 0x10, 1, 0), 1, 32 << 20),
            (shape([1024, 1024, 1], 0x20, 1, 0), 2, 5 << 20),
            (shape([1024, 1024, 1], 0x20, 1, 0x40), 1, 0),
            (shape([1024, 1024, 0], 0x91, 4, 0), 1, 1 << 19),
            (shape([1024, 1024, 6], 0x01, 1, 0x4), 2, (6 << 20) + (6 << 18)),
            (shape([u64::MAX; 3], 0x20, 4, 0), 1, u64::MAX),
        ] {
            if expected == u64::MAX {
                assert!(shape.bytes(levels) >= u64::MAX - 512);
            } else {
                assert_eq!(shape.bytes(levels), expected, "{shape:?}");
            }
        }
    }
}
