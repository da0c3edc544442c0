//! Streams, captures of them, and waits in them.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::{api, give, give_new, looked_at, status, submit, twins, with_place, with_stream};
use crate::capture::Kind;
use crate::config::Held;
use crate::memory;
use crate::process::{self, Failure, INVALID_VALUE, NOT_READY, SUCCESS};
use crate::stream::{Point, Work};

const NON_BLOCKING: c_uint = 1;

type HostFunction = Option<extern "C" fn(*mut c_void)>;
type Callback = Option<extern "C" fn(usize, c_int, *mut c_void)>;

api! {
    fn cuStreamCreate(place: *mut usize, flags: c_uint) { unsafe { give_new(place, || new_stream(flags)) } }
    /// A stream of which a library between the program and the driver does not hear.
    fn nvsimStreamCreate(place: *mut usize, flags: c_uint) { unsafe { give_new(place, || new_stream(flags)) } }
    fn cuStreamCreateWithPriority(place: *mut usize, flags: c_uint, _priority: c_int) { unsafe { give_new(place, || new_stream(flags)) } }
    fn cuStreamDestroy_v2(stream: usize) {
        status(process::get().and_then(|p| {
            let mut tables = p.tables();
            let stream = tables.streams.end(stream)?;
            tables.end_stream(&stream);
            drop(tables);
            p.see_frees_on(stream.id);
            Ok(())
        }))
    }
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) {
        // SAFETY: null, or readable and writable.
        match unsafe { mode.as_mut() } {
            Some(mode) if (0..=2).contains(mode) => { *mode = process::exchange_mode(*mode); SUCCESS }
            _ => INVALID_VALUE,
        }
    }
}

twins! { per_thread:
    fn cuStreamSynchronize / cuStreamSynchronize_ptsz (stream: usize) { status(with_stream(looked_at(stream), per_thread, |p, s| {
        let mut tables = p.tables();
        tables.look_at_stream(&s)?;
        tables.unsafe_call()?;
        let points = tables.all_ends(|other| other.id == s.id || s.is_legacy() && other.is_blocking_in(s.context));
        drop(tables);
        points.iter().for_each(Point::wait);
        p.see_frees(&points);
        p.sticky()
    })) }
    fn cuStreamQuery / cuStreamQuery_ptsz (stream: usize) { status(with_stream(looked_at(stream), per_thread, |p, s| {
        let mut tables = p.tables();
        tables.look_at_stream(&s)?;
        tables.unsafe_call()?;
        if tables.is_idle(&s) { p.sticky() } else { Err(NOT_READY) }
    })) }
    fn cuStreamWaitEvent / cuStreamWaitEvent_ptsz (stream: usize, event: usize, _flags: c_uint) { status(with_place(looked_at(stream), per_thread, |p, s| {
        let mut tables = p.tables();
        let mark = tables.events.get(event)?.mark.clone();
        tables.wait_event(&s, mark)
    })) }
    fn cuStreamGetCtx / cuStreamGetCtx_ptsz (stream: usize, context: *mut usize) {
        unsafe { give(context, with_stream(looked_at(stream), per_thread, |_, s| Ok(s.context_handle))) }
    }
    fn cuStreamGetFlags / cuStreamGetFlags_ptsz (stream: usize, flags: *mut c_uint) {
        unsafe { give(flags, with_stream(looked_at(stream), per_thread, |p, s| { p.tables().look_at_stream(&s)?; Ok(c_uint::from(s.non_blocking)) })) }
    }
    fn cuStreamGetPriority / cuStreamGetPriority_ptsz (stream: usize, priority: *mut c_int) {
        unsafe { give(priority, with_stream(looked_at(stream), per_thread, |_, _| Ok(0))) }
    }
    fn cuStreamIsCapturing / cuStreamIsCapturing_ptsz (stream: usize, place: *mut c_int) {
        unsafe { give(place, with_stream(looked_at(stream), per_thread, |p, s| Ok(p.tables().capture_status(&s)?.0))) }
    }
    fn cuStreamGetCaptureInfo_v2 / cuStreamGetCaptureInfo_v2_ptsz (stream: usize, place: *mut c_int, id: *mut u64, graph: *mut usize, nodes: *mut *const c_void, count: *mut usize) {
        let info = with_stream(looked_at(stream), per_thread, |p, s| p.tables().capture_status(&s));
        if let (Ok((_, known)), false) = (info, id.is_null()) { unsafe { *id = known } }
        // The nodes are not shown.
        unsafe {
            if !graph.is_null() { *graph = 0 }
            if !nodes.is_null() { *nodes = std::ptr::null() }
            if !count.is_null() { *count = 0 }
            give(place, info.map(|(status, _)| status))
        }
    }
    fn cuStreamBeginCapture_v2 / cuStreamBeginCapture_v2_ptsz (stream: usize, mode: c_int) {
        status(with_stream(stream, per_thread, |p, s| {
            p.world.config().wait_while_held(Held::Capture);
            p.tables().begin_capture(&s, mode)
        }))
    }
    fn cuStreamEndCapture / cuStreamEndCapture_ptsz (stream: usize, graph: *mut usize) {
        if graph.is_null() { return INVALID_VALUE }
        let captured = with_stream(stream, per_thread, |p, s| {
            let mut tables = p.tables();
            let captured = tables.end_capture(&s)?;
            Ok(tables.graphs.add(Arc::new(captured)))
        });
        // SAFETY: not null; it is written in any case, as the driver does.
        unsafe { *graph = captured.unwrap_or(0) }
        status(captured.map(|_| ()))
    }
    fn cuLaunchHostFunc / cuLaunchHostFunc_ptsz (stream: usize, function: HostFunction, data: *mut c_void) {
        let Some(function) = function else { return INVALID_VALUE };
        let data = data as usize;
        status(with_place(stream, per_thread, |p, s| {
            p.sticky()?;
            let queue = Arc::clone(&s.host_functions);
            let work: Work = Arc::new(move || queue.run(|| function(data as *mut c_void)));
            p.tables().submit(&s, Kind::Host, work, Vec::new()).map(|_| ())
        }))
    }
    fn cuStreamAddCallback / cuStreamAddCallback_ptsz (stream: usize, function: Callback, data: *mut c_void, _flags: c_uint) {
        let Some(function) = function else { return INVALID_VALUE };
        let data = data as usize;
        status(with_place(stream, per_thread, |p, s| {
            let queue = Arc::clone(&s.host_functions);
            let work: Work = Arc::new(move || queue.run(|| function(stream, 0, data as *mut c_void)));
            // No graph has callbacks.
            let mut tables = p.tables();
            tables.look_at_stream(&s)?;
            tables.submit(&s, Kind::Host, work, Vec::new()).map(|_| ())
        }))
    }
    fn cuStreamWaitValue32_v2 / cuStreamWaitValue32_v2_ptsz (stream: usize, address: u64, value: u32, flags: c_uint) {
        status(submit(stream, per_thread, Kind::Value, wait_work(address, 4, u64::from(value), flags)))
    }
    fn cuStreamWaitValue64_v2 / cuStreamWaitValue64_v2_ptsz (stream: usize, address: u64, value: u64, flags: c_uint) {
        status(submit(stream, per_thread, Kind::Value, wait_work(address, 8, value, flags)))
    }
    fn cuStreamWriteValue32_v2 / cuStreamWriteValue32_v2_ptsz (stream: usize, address: u64, value: u32, _flags: c_uint) {
        status(submit(stream, per_thread, Kind::Value, write_work(address, 4, u64::from(value))))
    }
    fn cuStreamWriteValue64_v2 / cuStreamWriteValue64_v2_ptsz (stream: usize, address: u64, value: u64, _flags: c_uint) {
        status(submit(stream, per_thread, Kind::Value, write_work(address, 8, value)))
    }
}

fn new_stream(flags: c_uint) -> Result<usize, Failure> {
    let p = process::get()?;
    drop(p.creation());
    let mut tables = p.tables();
    tables.unsafe_call()?;
    tables.new_stream(flags & NON_BLOCKING != 0)
}

/// Whether a word that a stream waits for is on the host. Managed memory has none.
fn is_on_host(address: u64, bytes: usize) -> Result<bool, Failure> {
    let p = process::get()?;
    let tables = p.tables();
    if address == 0 || !address.is_multiple_of(bytes as u64) {
        return Err(INVALID_VALUE);
    }
    if tables.is_host(address as usize, bytes) {
        return Ok(true);
    }
    if tables.find(address, bytes as u64)?.allocation.managed { Err(INVALID_VALUE) } else { Ok(false) }
}

fn wait_work(address: u64, bytes: usize, value: u64, flags: c_uint) -> Result<Work, Failure> {
    let p = process::get()?;
    let on_host = is_on_host(address, bytes)?;
    let mask = if bytes == 4 { u64::from(u32::MAX) } else { u64::MAX };
    let compare: fn(u64, u64, u64) -> bool = match flags & 3 {
        // The signed difference is not negative.
        0 => |now, value, mask| now.wrapping_sub(value) & mask <= mask >> 1,
        1 => |now, value, _| now == value,
        2 => |now, value, _| now & value != 0,
        _ => |now, value, mask| !(now | value) & mask != 0,
    };
    Ok(Arc::new(move || {
        loop {
            let now = if on_host {
                // SAFETY: page-locked memory of the host, aligned; the program keeps it while work names it.
                unsafe {
                    match bytes {
                        4 => u64::from((*(address as *const AtomicU32)).load(Ordering::SeqCst)),
                        _ => (*(address as *const AtomicU64)).load(Ordering::SeqCst),
                    }
                }
            } else {
                let mut word = [0; 8];
                if let Err(failure) = p.peek(address, &mut word[..bytes]) {
                    return p.stick(failure);
                }
                u64::from_le_bytes(word)
            };
            if compare(now, value, mask) {
                return;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }))
}

fn write_work(address: u64, bytes: usize, value: u64) -> Result<Work, Failure> {
    let p = process::get()?;
    let on_host = is_on_host(address, bytes)?;
    Ok(Arc::new(move || {
        if on_host {
            // SAFETY: page-locked memory of the host, aligned; the program keeps it while work names it.
            unsafe {
                match bytes {
                    4 => (*(address as *const AtomicU32)).store(value as u32, Ordering::SeqCst),
                    _ => (*(address as *const AtomicU64)).store(value, Ordering::SeqCst),
                }
            }
        } else {
            let word = value.to_le_bytes();
            p.touch(address, bytes as u64, |store, piece| memory::write(store, piece, &word[..bytes]));
        }
    }))
}
