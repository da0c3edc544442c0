//! Fills.

use std::ffi::{c_uchar, c_uint, c_ushort};
use std::sync::Arc;

use super::{status, submit, submit_now, twins};
use crate::capture::Kind;
use crate::memory;
use crate::process::{self, Failure, INVALID_VALUE};
use crate::stream::Work;

/// The area of a fill: `height` rows of `width` elements, each `pitch` bytes behind the one before.
#[derive(Debug, Clone, Copy)]
pub(super) struct Area {
    pub(super) address: u64,
    pub(super) pitch: usize,
    pub(super) width: usize,
    pub(super) height: usize,
}

fn line(address: u64, width: usize) -> Area {
    Area { address, pitch: 0, width, height: 1 }
}

twins! { per_thread:
    fn cuMemsetD8_v2 / cuMemsetD8_v2_ptds (address: u64, value: c_uchar, count: usize) { status(fill_now(line(address, count), [value], per_thread)) }
    fn cuMemsetD16_v2 / cuMemsetD16_v2_ptds (address: u64, value: c_ushort, count: usize) { status(fill_now(line(address, count), value.to_le_bytes(), per_thread)) }
    fn cuMemsetD32_v2 / cuMemsetD32_v2_ptds (address: u64, value: c_uint, count: usize) { status(fill_now(line(address, count), value.to_le_bytes(), per_thread)) }
    fn cuMemsetD8Async / cuMemsetD8Async_ptsz (address: u64, value: c_uchar, count: usize, stream: usize) { status(fill_on(line(address, count), [value], stream, per_thread)) }
    fn cuMemsetD16Async / cuMemsetD16Async_ptsz (address: u64, value: c_ushort, count: usize, stream: usize) { status(fill_on(line(address, count), value.to_le_bytes(), stream, per_thread)) }
    fn cuMemsetD32Async / cuMemsetD32Async_ptsz (address: u64, value: c_uint, count: usize, stream: usize) { status(fill_on(line(address, count), value.to_le_bytes(), stream, per_thread)) }
    fn cuMemsetD2D8_v2 / cuMemsetD2D8_v2_ptds (address: u64, pitch: usize, value: c_uchar, width: usize, height: usize) { status(fill_now(Area { address, pitch, width, height }, [value], per_thread)) }
    fn cuMemsetD2D16_v2 / cuMemsetD2D16_v2_ptds (address: u64, pitch: usize, value: c_ushort, width: usize, height: usize) { status(fill_now(Area { address, pitch, width, height }, value.to_le_bytes(), per_thread)) }
    fn cuMemsetD2D32_v2 / cuMemsetD2D32_v2_ptds (address: u64, pitch: usize, value: c_uint, width: usize, height: usize) { status(fill_now(Area { address, pitch, width, height }, value.to_le_bytes(), per_thread)) }
    fn cuMemsetD2D8Async / cuMemsetD2D8Async_ptsz (address: u64, pitch: usize, value: c_uchar, width: usize, height: usize, stream: usize) { status(fill_on(Area { address, pitch, width, height }, [value], stream, per_thread)) }
    fn cuMemsetD2D16Async / cuMemsetD2D16Async_ptsz (address: u64, pitch: usize, value: c_ushort, width: usize, height: usize, stream: usize) { status(fill_on(Area { address, pitch, width, height }, value.to_le_bytes(), stream, per_thread)) }
    fn cuMemsetD2D32Async / cuMemsetD2D32Async_ptsz (address: u64, pitch: usize, value: c_uint, width: usize, height: usize, stream: usize) { status(fill_on(Area { address, pitch, width, height }, value.to_le_bytes(), stream, per_thread)) }
}

/// The work of a fill, and whether a synchronous call waits for it: it does for managed memory.
pub(super) fn fill_work<const N: usize>(area: Area, pattern: [u8; N]) -> Result<(Work, bool), Failure> {
    let p = process::get()?;
    let Area { address, pitch, width, height } = area;
    let row = width.checked_mul(N).ok_or(INVALID_VALUE)?;
    if !address.is_multiple_of(N as u64) || !pitch.is_multiple_of(N) || height > 1 && pitch < row {
        return Err(INVALID_VALUE);
    }
    let extent = pitch.checked_mul(height.saturating_sub(1)).and_then(|all| all.checked_add(row));
    let waits = p.is_managed(address, extent.ok_or(INVALID_VALUE)? as u64)?;
    let work: Work = Arc::new(move || {
        for i in (0..height).filter(|_| row > 0) {
            let begin = address + (i * pitch) as u64;
            p.touch(begin, row as u64, |store, piece| memory::fill(store, piece, &pattern));
        }
    });
    Ok((work, waits))
}

/// Refuses memory that the card of a stream cannot reach (measured for other cards' memory without peer access).
fn check_reach(area: Area, size: usize, stream: usize, per_thread: bool) -> Result<(), Failure> {
    let mut tables = process::get()?.tables();
    let stream = tables.stream(stream, per_thread)?;
    let rows = (0..area.height).map(|row| area.address + (row * area.pitch) as u64);
    let bytes = (area.width * size) as u64;
    let closed = |at| tables.out_of_reach(stream.gpu, stream.context, at, bytes).is_some();
    if bytes > 0 && rows.into_iter().any(closed) { Err(INVALID_VALUE) } else { Ok(()) }
}

fn fill_now<const N: usize>(area: Area, pattern: [u8; N], per_thread: bool) -> Result<(), Failure> {
    let (work, waits) = fill_work(area, pattern)?;
    check_reach(area, N, 0, per_thread)?;
    submit_now(per_thread, Kind::Fill, waits, Vec::new(), Ok(work))
}

fn fill_on<const N: usize>(
    area: Area,
    pattern: [u8; N],
    stream: usize,
    per_thread: bool,
) -> Result<(), Failure> {
    let (work, _) = fill_work(area, pattern)?;
    check_reach(area, N, stream, per_thread)?;
    submit(stream, per_thread, Kind::Fill, Ok(work))
}
