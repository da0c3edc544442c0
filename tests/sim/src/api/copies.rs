//! Copies and prefetches.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::time::Duration;

use super::{api, status, submit, submit_now, twins, with_place};
use crate::capture::Kind;
use crate::config::Held;
use crate::memory;
use crate::process::{
    self, CAPTURE_UNSUPPORTED, Failure, INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, Process,
};
use crate::stream::{Point, Work};
use crate::world::{BLOCK, Way};

/// `CU_DEVICE_P2P_ATTRIBUTE_…`
const PERFORMANCE_RANK: c_uint = 1;
const ACCESS_SUPPORTED: c_uint = 2;
const NATIVE_ATOMICS: c_uint = 3;
const ARRAY_ACCESS: c_uint = 4;

/// One end of a copy.
#[derive(Debug, Clone, Copy)]
enum End {
    Host(usize),
    Device(u64),
}

use End::{Device, Host};

/// `CUDA_MEMCPY2D`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Copy2D {
    from: Plane,
    to: Plane,
    width: usize,
    height: usize,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Plane {
    x: usize,
    y: usize,
    kind: c_uint,
    host: usize,
    device: u64,
    array: usize,
    pitch: usize,
}

/// `CUDA_MEMCPY3D`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Copy3D {
    from: Space,
    to: Space,
    width: usize,
    height: usize,
    depth: usize,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Space {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    kind: c_uint,
    host: usize,
    device: u64,
    array: usize,
    reserved: usize,
    pitch: usize,
    height: usize,
}

twins! { per_thread:
    fn cuMemcpyHtoD_v2 / cuMemcpyHtoD_v2_ptds (to: u64, from: *const c_void, bytes: usize) { status(copy_now(Device(to), Host(from as usize), bytes, per_thread)) }
    fn cuMemcpyDtoH_v2 / cuMemcpyDtoH_v2_ptds (to: *mut c_void, from: u64, bytes: usize) { status(copy_now(Host(to as usize), Device(from), bytes, per_thread)) }
    fn cuMemcpyDtoD_v2 / cuMemcpyDtoD_v2_ptds (to: u64, from: u64, bytes: usize) { status(copy_now(Device(to), Device(from), bytes, per_thread)) }
    fn cuMemcpy / cuMemcpy_ptds (to: u64, from: u64, bytes: usize) { status(ends(to, from).and_then(|(to, from)| copy_now(to, from, bytes, per_thread))) }
    fn cuMemcpyHtoDAsync_v2 / cuMemcpyHtoDAsync_v2_ptsz (to: u64, from: *const c_void, bytes: usize, stream: usize) { status(copy_on(Device(to), Host(from as usize), bytes, stream, per_thread)) }
    fn cuMemcpyDtoHAsync_v2 / cuMemcpyDtoHAsync_v2_ptsz (to: *mut c_void, from: u64, bytes: usize, stream: usize) { status(copy_on(Host(to as usize), Device(from), bytes, stream, per_thread)) }
    fn cuMemcpyDtoDAsync_v2 / cuMemcpyDtoDAsync_v2_ptsz (to: u64, from: u64, bytes: usize, stream: usize) { status(copy_on(Device(to), Device(from), bytes, stream, per_thread)) }
    fn cuMemcpyAsync / cuMemcpyAsync_ptsz (to: u64, from: u64, bytes: usize, stream: usize) { status(ends(to, from).and_then(|(to, from)| copy_on(to, from, bytes, stream, per_thread))) }
    fn cuMemcpy2D_v2 / cuMemcpy2D_v2_ptds (copy: *const Copy2D) { status(unsafe { rows(copy) }.and_then(|rows| rows_now(&rows, per_thread))) }
    fn cuMemcpy2DUnaligned_v2 / cuMemcpy2DUnaligned_v2_ptds (copy: *const Copy2D) { status(unsafe { rows(copy) }.and_then(|rows| rows_now(&rows, per_thread))) }
    fn cuMemcpy2DAsync_v2 / cuMemcpy2DAsync_v2_ptsz (copy: *const Copy2D, stream: usize) {
        status(unsafe { rows(copy) }.and_then(|rows| {
            check_reach(stream, per_thread, &ends_of(&rows))?;
            submit(stream, per_thread, Kind::Copy, rows_work(&rows))
        }))
    }
    fn cuMemcpyPeer / cuMemcpyPeer_ptds (to: u64, to_context: usize, from: u64, from_context: usize, bytes: usize) {
        status(process::get().and_then(|p| {
            // The copy comes behind all work of both contexts, and before their later work.
            let tables = p.tables();
            let contexts = [tables.context(to_context)?.id, tables.context(from_context)?.id];
            let after = tables.ends(|stream| contexts.contains(&stream.context));
            drop(tables);
            submit_now(per_thread, Kind::Copy, true, after, copy_work(p, Device(to), Device(from), bytes))
        }))
    }
    fn cuMemcpyPeerAsync / cuMemcpyPeerAsync_ptsz (to: u64, to_context: usize, from: u64, from_context: usize, bytes: usize, stream: usize) {
        status(process::get().and_then(|p| {
            let tables = p.tables();
            tables.context(to_context).and(tables.context(from_context))?;
            drop(tables);
            // It ends a capture (measured).
            with_place(stream, per_thread, |p, stream| {
                let mut tables = p.tables();
                if tables.is_capturing(&stream) { tables.look_at_stream(&stream).and(Err(CAPTURE_UNSUPPORTED)) } else { Ok(()) }
            })?;
            submit(stream, per_thread, Kind::Copy, copy_work(p, Device(to), Device(from), bytes))
        }))
    }
}

api! {
    fn cuMemPrefetchAsync(address: u64, bytes: usize, device: c_int, stream: usize) { status(prefetch(address, bytes as u64, device, stream)) }
    fn cuDeviceCanAccessPeer(place: *mut c_int, device: c_int, peer: c_int) {
        unsafe { super::give(place, process::get().and_then(|p| {
            let is_other = p.gpu_of(device)? != p.gpu_of(peer)?;
            Ok(c_int::from(is_other && !p.world.config().refuses_peers()))
        })) }
    }
    fn cuDeviceGetP2PAttribute(place: *mut c_int, attribute: c_uint, device: c_int, peer: c_int) {
        unsafe { super::give(place, process::get().and_then(|p| {
            if p.gpu_of(device)? == p.gpu_of(peer)? { return Err(INVALID_DEVICE) }
            let can = c_int::from(!p.world.config().refuses_peers());
            match attribute {
                PERFORMANCE_RANK => Ok(0),
                ACCESS_SUPPORTED | NATIVE_ATOMICS | ARRAY_ACCESS => Ok(can),
                _ => Err(INVALID_VALUE),
            }
        })) }
    }
}

/// The kinds of two addresses of the common address space.
fn ends(to: u64, from: u64) -> Result<(End, End), Failure> {
    let p = process::get()?;
    let end =
        |address| if p.is_managed(address, 1).is_ok() { Device(address) } else { Host(address as usize) };
    Ok((end(to), end(from)))
}

/// Refuses mapped memory to which the card of a stream has no access, at either end of a copy; the driver itself copies other plain
/// memory between cards (measured). Copies that name both contexts need no access.
fn check_reach(stream: usize, per_thread: bool, ends: &[(End, usize)]) -> Result<(), Failure> {
    let card = process::get()?.tables().stream(stream, per_thread)?.gpu;
    check_reach_of(card, ends)
}

/// The same for work of a card. A refused call leaves a capture as it is (measured).
fn check_reach_of(card: usize, ends: &[(End, usize)]) -> Result<(), Failure> {
    let tables = process::get()?.tables();
    let is_closed = |&(end, bytes): &(End, usize)| match end {
        Host(_) => false,
        Device(address) => tables.vmm.closed_to(card, address, bytes as u64).is_some(),
    };
    if ends.iter().any(is_closed) { Err(INVALID_VALUE) } else { Ok(()) }
}

/// Refuses an address without memory. Returns whether the memory is plain memory of a card.
fn check(p: &Process, end: End, bytes: usize) -> Result<bool, Failure> {
    match end {
        Host(0) if bytes > 0 => Err(INVALID_VALUE),
        Host(_) => Ok(false),
        Device(address) => Ok(!p.is_managed(address, bytes as u64)?),
    }
}

/// Copies at once. The ends were checked; memory that was freed since is an error of the program.
fn run_copy(p: &Process, to: End, from: End, bytes: usize) {
    match (to, from) {
        // SAFETY: the caller's buffers, which live until the copy is done; they may overlap.
        (Host(to), Host(from)) => unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) },
        (Host(host), Device(from)) => copy_over_link(p, Way::ToHost, host, from, bytes),
        (Device(to), Host(host)) => copy_over_link(p, Way::ToDevice, host, to, bytes),
        (Device(to), Device(from)) => {
            let mut between = vec![0; bytes];
            p.touch(from, bytes as u64, |store, piece| memory::read(store, piece, &mut between));
            p.touch(to, bytes as u64, |store, piece| memory::write(store, piece, &between));
        }
    }
}

/// Copies between the host and a card. Page-locked memory takes the link for as long as its rate says; copies of other,
/// small buffers take no time.
fn copy_over_link(p: &Process, way: Way, host: usize, device: u64, bytes: usize) {
    let is_locked = p.tables().is_host(host, bytes);
    let config = p.world.config();
    if is_locked {
        config.wait_while_held(if way == Way::ToHost { Held::Out } else { Held::In });
    }
    p.touch(device, bytes as u64, |store, piece| {
        let at = host + piece.in_range as usize;
        // With NVSIM_SPARSE, a whole block is kept as the store has it: the rest of the host's memory is not touched.
        let is_sparse =
            config.sparse && is_locked && piece.bytes == BLOCK && (at as u64).is_multiple_of(BLOCK);
        let (length, piece) =
            if is_sparse { (store.len(), None) } else { (piece.bytes as usize, Some(piece.alone())) };
        // SAFETY: a part of the caller's buffer, which lives until the copy is done; the store is another memory.
        let buffer = unsafe { std::slice::from_raw_parts_mut(at as *mut u8, length) };
        match (way, piece) {
            (Way::ToHost, None) => buffer.copy_from_slice(store),
            (Way::ToDevice, None) => store.copy_from_slice(buffer),
            (Way::ToHost, Some(piece)) => memory::read(store, piece, buffer),
            (Way::ToDevice, Some(piece)) => memory::write(store, piece, buffer),
        }
    });
    if is_locked && let Ok(found) = p.find(device, bytes as u64) {
        let rate = if way == Way::ToHost { config.copy_out } else { config.to_device };
        p.world.transfer(found.allocation.gpu, way, Duration::from_secs_f64(bytes as f64 / rate));
    }
}

fn copy_work(p: &'static Process, to: End, from: End, bytes: usize) -> Result<Work, Failure> {
    check(p, to, bytes)?;
    check(p, from, bytes)?;
    Ok(Arc::new(move || {
        if bytes > 0 {
            run_copy(p, to, from, bytes)
        }
    }))
}

/// A synchronous copy: it returns when it is done, unless both ends are plain memory of a card.
fn copy_now(to: End, from: End, bytes: usize, per_thread: bool) -> Result<(), Failure> {
    let p = process::get()?;
    let waits = !(check(p, to, bytes)? && check(p, from, bytes)?);
    check_reach(0, per_thread, &[(to, bytes), (from, bytes)])?;
    submit_now(per_thread, Kind::Copy, waits, Vec::new(), copy_work(p, to, from, bytes))
}

fn copy_on(to: End, from: End, bytes: usize, stream: usize, per_thread: bool) -> Result<(), Failure> {
    check_reach(stream, per_thread, &[(to, bytes), (from, bytes)])?;
    let p = process::get()?;
    let spans = |end| matches!(end, Host(base) if p.tables().spans_page_locks(base, bytes));
    if spans(to) || spans(from) {
        return Err(INVALID_VALUE);
    }
    submit(stream, per_thread, Kind::Copy, copy_work(p, to, from, bytes))
}

/// A row of a copy in two dimensions.
#[derive(Debug, Clone, Copy)]
struct Row {
    to: End,
    from: End,
    bytes: usize,
}

/// # Safety
/// `copy` is null or readable.
unsafe fn rows(copy: *const Copy2D) -> Result<Vec<Row>, Failure> {
    // SAFETY: promised by the caller.
    let copy = unsafe { copy.as_ref() }.ok_or(INVALID_VALUE)?;
    let p = process::get()?;
    let end = |plane: &Plane, row: usize| {
        let offset = (plane.y + row) * plane.pitch.max(copy.width) + plane.x;
        Ok(match plane.kind {
            1 => Host(plane.host + offset),
            2 => Device(plane.device + offset as u64),
            4 if p.is_managed(plane.device, 1).is_ok() => Device(plane.device + offset as u64),
            4 => Host(plane.device as usize + offset),
            _ => return Err(INVALID_VALUE),
        })
    };
    (0..copy.height)
        .map(|row| Ok(Row { to: end(&copy.to, row)?, from: end(&copy.from, row)?, bytes: copy.width }))
        .collect()
}

/// A copy of one row by a card; of others nothing is known here.
///
/// # Safety
/// `copy` is null or readable.
pub(super) unsafe fn copy_3d(copy: *const Copy3D, card: usize) -> Result<Work, Failure> {
    // SAFETY: promised by the caller.
    let copy = unsafe { copy.as_ref() }.ok_or(INVALID_VALUE)?;
    if (copy.height, copy.depth) != (1, 1) {
        return Err(NOT_SUPPORTED);
    }
    let end = |space: &Space| match space.kind {
        1 => Ok(Host(space.host + space.x)),
        2 => Ok(Device(space.device + space.x as u64)),
        _ => Err(NOT_SUPPORTED),
    };
    let (to, from) = (end(&copy.to)?, end(&copy.from)?);
    check_reach_of(card, &[(to, copy.width), (from, copy.width)])?;
    copy_work(process::get()?, to, from, copy.width)
}

fn ends_of(rows: &[Row]) -> Vec<(End, usize)> {
    rows.iter().flat_map(|row| [(row.to, row.bytes), (row.from, row.bytes)]).collect()
}

fn rows_work(rows: &[Row]) -> Result<Work, Failure> {
    let p = process::get()?;
    for row in rows {
        check(p, row.to, row.bytes)?;
        check(p, row.from, row.bytes)?;
    }
    let rows = rows.to_vec();
    Ok(Arc::new(move || rows.iter().for_each(|row| run_copy(p, row.to, row.from, row.bytes))))
}

fn rows_now(rows: &[Row], per_thread: bool) -> Result<(), Failure> {
    let p = process::get()?;
    let mut waits = false;
    for row in rows {
        waits |= !(check(p, row.to, row.bytes)? && check(p, row.from, row.bytes)?);
    }
    check_reach(0, per_thread, &ends_of(rows))?;
    submit_now(per_thread, Kind::Copy, waits, Vec::new(), rows_work(rows))
}

/// On an idle stream, the prefetch is done when the call returns, as the driver's call takes that long; else it is done in
/// the stream's order, from the queue of host functions.
fn prefetch(address: u64, bytes: u64, device: c_int, stream: usize) -> Result<(), Failure> {
    let way = if device < 0 { Way::ToHost } else { Way::ToDevice };
    with_place(stream, false, |p, stream| {
        if !p.is_managed(address, bytes)? {
            return Err(INVALID_VALUE);
        }
        let mut tables = p.tables();
        if tables.is_capturing(&stream) {
            return tables.look_at_stream(&stream).and(Err(CAPTURE_UNSUPPORTED));
        }
        tables.unsafe_call()?;
        let before = tables.mark(&stream);
        if before.is_reached() {
            drop(tables);
            return p.prefetch(address, bytes, way);
        }
        let queue = Arc::clone(&stream.host_functions);
        let work: Work = Arc::new(move || {
            // Memory that does not fit comes by faults.
            queue.in_turn(|| _ = p.prefetch(address, bytes, way));
        });
        tables.submit(&stream, Kind::Copy, work, Vec::new()).map(|_: Option<Point>| ())
    })
}
