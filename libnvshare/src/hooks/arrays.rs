//! Arrays, mipmapped or not.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use super::target::{answer, target};
use crate::driver::functions::signatures;
use crate::driver::types::{CUarray, CUmipmappedArray, CUresult};
use crate::memory::arrays;
use crate::memory::charge::charged;

/// `CUDA_ARRAY3D_SPARSE` and `CUDA_ARRAY3D_DEFERRED_MAPPING`: the array has no memory of its own.
const UNBACKED: c_uint = 0x40 | 0x80;

/// `CUDA_ARRAY3D_LAYERED` and `CUDA_ARRAY3D_CUBEMAP`.
const LAYERED: c_uint = 0x1 | 0x4;

/// No card has this many bytes. Such an extent is an error, which the driver reports.
const BEYOND_ANY: u64 = 1 << 50;

fn product(of: [u64; 4]) -> u64 {
    of.into_iter().fold(1, u64::saturating_mul)
}

/// Extent, format and flags of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    extent: [u64; 3],
    format: c_int,
    channels: c_uint,
    flags: c_uint,
}

impl Shape {
    /// Bytes of the first `levels` levels of a mipmap. An array has one level.
    fn bytes(&self, levels: c_uint) -> u64 {
        if self.flags & UNBACKED != 0 {
            return 0;
        }
        // `CUarray_format`. Most formats that are not listed take four bytes or less.
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
                // Compressed: blocks of four by four texels; the channels do not matter.
                0x91..=0x9e => {
                    let block = if matches!(self.format, 0x91 | 0x92 | 0x97 | 0x98) { 8 } else { 16 };
                    product([width.div_ceil(4), height.div_ceil(4), depth, block])
                }
                _ => product([width, height, depth, component * u64::from(self.channels.max(1))]),
            });
            // The number of layers, or of a cube's faces, stays the same in each level.
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
    let target = bytes.filter(|bytes| (1..BEYOND_ANY).contains(bytes) && !place.is_null()).zip(target());
    let Some((bytes, (device, context))) = target else { return real(place) };
    let made = charged(device, bytes, || {
        let mut made = nothing;
        real(&raw mut made).ok()?;
        Ok(made)
    });
    let made = made.map(|(made, charge)| {
        arrays::insert(handle(&made), (Arc::clone(&context), charge));
        made
    });
    // SAFETY: not null, and where the driver would write.
    unsafe { answer(made, place) }
}

macro_rules! array_create {
    ($($name:ident: $shape:ident<$n:ty>;)*) => {$(
        /// # Safety
        /// As for the driver's function.
        pub(crate) unsafe fn $name(
            real: signatures::cuArrayCreate_v2,
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
    real: signatures::cuMipmappedArrayCreate,
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
    // Remove the entry first: once the array is destroyed, the driver may give the same handle to another thread.
    let known = arrays::remove(handle);
    let result = call();
    if let (true, Some(known)) = (result != CUresult::SUCCESS, known) {
        arrays::insert(handle, known);
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn array_destroy(real: signatures::cuArrayDestroy, array: CUarray) -> CUresult {
    // SAFETY: the caller's argument.
    destroy(array.0 as usize, || unsafe { real(array) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn mipmapped_destroy(
    real: signatures::cuMipmappedArrayDestroy,
    array: CUmipmappedArray,
) -> CUresult {
    // SAFETY: the caller's argument.
    destroy(array.0 as usize, || unsafe { real(array) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_take_the_bytes_of_their_texels() {
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
