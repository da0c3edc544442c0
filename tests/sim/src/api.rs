//! The driver's entry points, as far as programs of the test suites call them.
//!
//! Each takes raw arguments as the driver does; null out-pointers are refused with INVALID_VALUE.

#![allow(non_snake_case, reason = "the driver's own names")]
#![allow(clippy::missing_safety_doc, reason = "each is the driver's function of that name")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;
use std::time::Duration;

use nvshare_proto::units::GIB;

use crate::process::{
    self, CAPTURE_INVALIDATED, Context, Failure, Graph, INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE,
    NOT_FOUND, NOT_READY, NOT_SUPPORTED, Process, SUCCESS, Stream,
};
use crate::stream::Work;
use crate::world::{BLOCK, Way};

const VERSION: c_int = 13_000;
const CAPTURING: c_int = 1;
const NON_BLOCKING: c_uint = 1;
/// The handle of the first card's default pool.
const POOLS: usize = 0x900;
/// The handle of the first card's managed pool.
const MANAGED_POOLS: usize = 0xa00;

/// The card of a pool, and whether the pool is managed.
fn pool_of(pool: usize) -> Result<(usize, bool), Failure> {
    match pool {
        MANAGED_POOLS.. => Ok((pool - MANAGED_POOLS, true)),
        POOLS.. => Ok((pool - POOLS, false)),
        _ => Err(INVALID_VALUE),
    }
}

fn status(result: Result<(), Failure>) -> c_int {
    result.err().unwrap_or(SUCCESS)
}

/// Writes an answer where the caller wants it.
unsafe fn give<T>(place: *mut T, answer: Result<T, Failure>) -> c_int {
    if place.is_null() {
        return INVALID_VALUE;
    }
    match answer {
        Ok(value) => {
            // SAFETY: not null, and the driver's contract says that it is writable.
            unsafe { place.write(value) };
            SUCCESS
        }
        Err(failure) => failure,
    }
}

macro_rules! api {
    ($( fn $name:ident ($($arg:ident : $ty:ty),*) $body:block )*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> c_int $body
    )*

        /// Every entry point by its exported name.
        pub(crate) static NAMES: &[(&str, crate::Address)] = &[$( (stringify!($name), crate::Address($name as *const c_void)) ),*];
    };
}

api! {
    fn cuInit(_flags: c_uint) { status(process::init()) }
    fn cuDriverGetVersion(version: *mut c_int) { unsafe { give(version, Ok(VERSION)) } }
    fn cuDeviceGetCount(count: *mut c_int) { unsafe { give(count, process::get().map(|p| p.world.config().visible.len() as c_int)) } }
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        let known = process::get().and_then(|p| p.gpu_of(ordinal).map(|_| ordinal));
        unsafe { give(device, known) }
    }
    fn cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) {
        let text = c"Simulated GPU".to_bytes_with_nul();
        if name.is_null() || (length as usize) < text.len() { return INVALID_VALUE }
        // SAFETY: checked to be long enough.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len()) };
        SUCCESS
    }
    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) { unsafe { give(uuid, process::get().and_then(|p| p.gpu_of(device)).map(uuid_of)) } }
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) { unsafe { give(uuid, process::get().and_then(|p| p.gpu_of(device)).map(uuid_of)) } }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) { unsafe { give(bytes, process::get().map(|p| p.world.config().memory as usize)) } }
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) {
        let concurrent = i32::from(std::env::var_os("NVSIM_NO_CONCURRENT_ACCESS").is_none());
        unsafe { give(value, Ok(match attribute { 16 => 40, 41 | 83 => 1, 75 => 7, 76 => 5, 89 => concurrent, _ => 0 })) }
    }
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) {
        unsafe { give(context, process::get().and_then(|p| {
            let gpu = p.gpu_of(device)?;
            let mut tables = p.tables();
            let known = tables.primary.get(&gpu).copied();
            let handle = known.unwrap_or_else(|| p.handle());
            tables.primary.insert(gpu, handle);
            let new = || Context { gpu, retained: 0, legacy: p.new_stream(handle, false) };
            tables.contexts.entry(handle).or_insert_with(new).retained += 1;
            Ok(handle)
        })) }
    }
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) { status(process::get().and_then(|p| release_primary(p, device, false))) }
    fn cuDevicePrimaryCtxReset_v2(device: c_int) { status(process::get().and_then(|p| release_primary(p, device, true))) }
    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) {
        let state = process::get().and_then(|p| { let gpu = p.gpu_of(device)?; Ok(c_int::from(p.tables().primary.contains_key(&gpu))) });
        unsafe { give(flags, Ok(0)); give(active, state) }
    }
    fn cuCtxCreate_v2(context: *mut usize, _flags: c_uint, device: c_int) {
        unsafe { give(context, process::get().and_then(|p| {
            let gpu = p.gpu_of(device)?;
            let handle = p.handle();
            let new = Context { gpu, retained: 1, legacy: p.new_stream(handle, false) };
            p.tables().contexts.insert(handle, new);
            process::set_current_context(handle);
            Ok(handle)
        })) }
    }
    fn cuCtxDestroy_v2(context: usize) { status(process::get().and_then(|p| destroy_context(p, context))) }
    fn cuCtxSetCurrent(context: usize) { process::set_current_context(context); SUCCESS }
    fn cuCtxPushCurrent_v2(context: usize) { process::set_current_context(context); SUCCESS }
    fn cuCtxPopCurrent_v2(context: *mut usize) {
        let current = process::current_context();
        process::set_current_context(0);
        unsafe { give(context, Ok(current)) }
    }
    fn cuCtxGetCurrent(context: *mut usize) { unsafe { give(context, Ok(process::current_context())) } }
    fn cuCtxGetDevice(device: *mut c_int) { unsafe { give(device, process::get().and_then(|p| Ok(p.ordinal_of(p.current_gpu()?)))) } }
    fn cuCtxSynchronize() { status(process::get().and_then(|p| {
        let context = process::current_context();
        // Whatever the thread's mode.
        p.break_captures(|stream| stream.context == context)?;
        p.synchronize(|stream| stream.context == context);
        p.sticky()
    })) }

    fn cuMemAlloc_v2(place: *mut u64, bytes: usize) { unsafe { give(place, process::get().and_then(|p| p.allocate(bytes as u64, false))) } }
    fn cuMemAllocManaged(place: *mut u64, bytes: usize, _flags: c_uint) { unsafe { give(place, process::get().and_then(|p| p.allocate(bytes as u64, true))) } }
    fn cuMemAllocPitch_v2(place: *mut u64, pitch: *mut usize, width: usize, height: usize, _element: c_uint) {
        let row = width.next_multiple_of(512);
        let made = process::get().and_then(|p| p.allocate((row * height) as u64, false));
        unsafe { match give(place, made) { SUCCESS => give(pitch, Ok(row)), failure => failure } }
    }
    fn cuMemFree_v2(base: u64) { status(process::get().and_then(|p| {
        if base == 0 { return Ok(()) }
        if !p.is_pooled(base) { return p.free(base) }
        p.free_ordered(base, || p.synchronize(|_| true))
    })) }
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let known = process::get().and_then(|p| p.current_gpu().map(|gpu| (p.world.free_bytes(gpu) as usize, p.world.config().memory as usize)));
        unsafe { match known { Ok((f, t)) => { give(free, Ok(f)); give(total, Ok(t)) } Err(failure) => failure } }
    }
    fn cuMemHostAlloc(place: *mut usize, bytes: usize, _flags: c_uint) {
        // SAFETY: an allocation of this size, or null.
        let memory = unsafe { libc::calloc(1, bytes.max(1)) } as usize;
        unsafe { give(place, if memory == 0 { Err(2) } else { Ok(memory) }) }
    }
    fn cuMemFreeHost(memory: *mut c_void) {
        // SAFETY: from the function above.
        unsafe { libc::free(memory) };
        SUCCESS
    }
    fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: u64) {
        match process::get().and_then(|p| p.find(address, 1)) {
            // SAFETY: each may be null.
            Ok(found) => unsafe {
                if let Some(base) = base.as_mut() { *base = found.base }
                if let Some(bytes) = bytes.as_mut() { *bytes = found.blocks.len() * BLOCK as usize }
                SUCCESS
            },
            Err(failure) => failure,
        }
    }
    fn cuMemAllocAsync(place: *mut u64, bytes: usize, stream: usize) {
        // A managed pool never takes the place of the plain one here (measured).
        match process::get().and_then(|p| p.gpu_of_stream(&*p.stream(stream, false)?)) {
            // SAFETY: the caller's arguments.
            Ok(gpu) => unsafe { cuMemAllocFromPoolAsync(place, bytes, POOLS + gpu, stream) },
            Err(failure) => failure,
        }
    }
    fn cuMemAllocFromPoolAsync(place: *mut u64, bytes: usize, pool: usize, stream: usize) {
        unsafe { give(place, process::get().and_then(|p| {
            let stream = p.stream(stream, false)?;
            let (gpu, managed) = pool_of(pool)?;
            if !stream.is_capturing() { return p.allocate_ordered(gpu, bytes as u64, managed) }
            // Graphs have a pool of their own.
            if managed { return Err(NOT_SUPPORTED) }
            let node = p.graph_node(bytes as u64)?;
            if stream.record_node(node) { Ok(node.base()) } else { Err(CAPTURE_INVALIDATED) }
        })) }
    }
    fn cuMemFreeAsync(base: u64, stream: usize) { status(with_stream(stream, false, |p, s| p.free_ordered(base, || s.queue.end().wait()))) }
    fn cuDeviceGetDefaultMemPool(pool: *mut usize, device: c_int) { unsafe { give(pool, process::get().and_then(|p| Ok(POOLS + p.gpu_of(device)?))) } }
    fn cuDeviceGetMemPool(pool: *mut usize, device: c_int) { unsafe { give(pool, process::get().and_then(|p| Ok(POOLS + p.gpu_of(device)?))) } }
    fn cuDeviceSetMemPool(device: c_int, pool: usize) { status(process::get().and_then(|p| if pool_of(pool)?.0 == p.gpu_of(device)? { Ok(()) } else { Err(INVALID_VALUE) })) }
    fn cuMemPoolCreate(pool: *mut usize, properties: *const [c_int; 4]) {
        // SAFETY: null, or what begins with the kind, the kinds of handles, and the location.
        let Some(&[kind, handles, location, device]) = (unsafe { properties.as_ref() }) else { return INVALID_VALUE };
        unsafe { give(pool, process::get().and_then(|p| {
            // One managed pool for each card is all that anybody has wanted.
            if (kind, handles, location) != (2, 0, 1) || !p.world.config().managed_pools { return Err(INVALID_VALUE) }
            Ok(MANAGED_POOLS + p.gpu_of(device)?)
        })) }
    }
    fn cuMemPoolDestroy(pool: usize) { status(pool_of(pool).and_then(|(_, managed)| if managed { Ok(()) } else { Err(INVALID_VALUE) })) }
    fn cuMemPoolSetAttribute(_pool: usize, attribute: c_int, value: *const u64) {
        if value.is_null() || attribute != 4 { return INVALID_VALUE }
        // SAFETY: not null.
        status(process::get().map(|p| p.tables().pool.threshold = unsafe { *value }))
    }
    fn cuMemPoolGetAttribute(pool: usize, attribute: c_int, value: *mut u64) {
        unsafe { give(value, process::get().and_then(|p| {
            let (gpu, managed) = pool_of(pool)?;
            let (used, idle) = p.pool_bytes(gpu, managed);
            match attribute { 4 => Ok(p.tables().pool.threshold), 5 => Ok(used + idle), 7 => Ok(used), _ => Err(INVALID_VALUE) }
        })) }
    }
    fn cuMemPoolTrimTo(pool: usize, _keep: usize) { status(process::get().and_then(|p| { let (gpu, managed) = pool_of(pool)?; p.trim_pool(gpu, managed); Ok(()) })) }
    fn cuDeviceGetGraphMemAttribute(device: c_int, attribute: c_int, value: *mut u64) {
        unsafe { give(value, process::get().and_then(|p| if attribute == 2 { Ok(p.graph_bytes(p.gpu_of(device)?)) } else { Err(INVALID_VALUE) })) }
    }
    fn cuDeviceGraphMemTrim(device: c_int) { status(process::get().and_then(|p| p.trim_graphs(p.gpu_of(device)?))) }
    fn cuMemCreate(handle: *mut u64, bytes: usize, properties: *const c_int, _flags: u64) {
        if properties.is_null() || bytes == 0 { return INVALID_VALUE }
        unsafe { give(handle, process::get().and_then(|p| p.allocate(bytes as u64, false))) }
    }
    fn cuMemAddressReserve(place: *mut u64, bytes: usize, _alignment: usize, _address: u64, _flags: u64) {
        unsafe { give(place, process::get().map(|p| p.reserve(bytes as u64))) }
    }
    fn cuMemAddressFree(_address: u64, _bytes: usize) { SUCCESS }
    fn cuMemMap(address: u64, bytes: usize, _offset: usize, handle: u64, _flags: u64) {
        status(process::get().and_then(|p| { p.find(handle, 1)?; p.tables().mappings.push((address, bytes as u64, handle)); Ok(()) }))
    }
    fn cuMemSetAccess(_address: u64, _bytes: usize, _access: *const c_void, _count: usize) { SUCCESS }
    fn cuMemUnmap(address: u64, bytes: usize) {
        status(process::get().and_then(|p| {
            let end = address + bytes as u64;
            let (gone, left) = std::mem::take(&mut p.tables().mappings).into_iter().partition::<Vec<_>, _>(|m| (address..end).contains(&m.0));
            p.tables().mappings = left;
            if gone.is_empty() { return Err(INVALID_VALUE) }
            gone.into_iter().try_for_each(|(_, _, handle)| p.free_physical(handle))
        }))
    }
    fn cuMemRelease(handle: u64) {
        status(process::get().and_then(|p| {
            p.find(handle, 1)?;
            if !p.tables().released.insert(handle) { return Err(INVALID_VALUE) }
            p.free_physical(handle)
        }))
    }
    fn cuArray3DCreate_v2(place: *mut u64, descriptor: *const usize) {
        if descriptor.is_null() { return INVALID_VALUE }
        // SAFETY: three extents, a format (one byte here) and the channels.
        let bytes = unsafe { *descriptor * (*descriptor.add(1)).max(1) * (*descriptor.add(2)).max(1) };
        unsafe { give(place, process::get().and_then(|p| p.allocate(bytes as u64, false))) }
    }
    fn cuArrayDestroy(array: u64) { status(process::get().and_then(|p| p.free(array))) }
    fn cuIpcGetMemHandle(handle: *mut [u8; 64], address: u64) {
        let found = process::get().and_then(|p| p.find(address, 1)).and_then(|found| if found.managed { Err(INVALID_VALUE) } else { Ok([7; 64]) });
        unsafe { give(handle, found) }
    }
    fn cuPointerGetAttributes(count: c_uint, attributes: *const c_int, places: *const *mut c_void, address: u64) {
        if attributes.is_null() || places.is_null() { return INVALID_VALUE }
        for i in 0..count as usize {
            // SAFETY: this many of both.
            let failure = unsafe { cuPointerGetAttribute(*places.add(i), *attributes.add(i), address) };
            if failure != SUCCESS { return failure }
        }
        SUCCESS
    }
    fn cuStreamAddCallback(stream: usize, function: Option<extern "C" fn(usize, c_int, *mut c_void)>, data: *mut c_void, _flags: c_uint) {
        let Some(function) = function else { return INVALID_VALUE };
        let data = data as usize;
        status(submit(stream, false, Ok(Arc::new(move || function(stream, 0, data as *mut c_void)))))
    }
    fn cuPointerGetAttribute(place: *mut c_void, attribute: c_int, address: u64) {
        let found = process::get().and_then(|p| p.find(address, 1));
        match (attribute, found) {
            (_, Err(failure)) => failure,
            (2, Ok(_)) => unsafe { give(place.cast::<c_uint>(), Ok(2)) },
            (4, Ok(allocation)) if allocation.managed => unsafe { give(place.cast::<u64>(), Ok(address)) },
            (9, Ok(allocation)) => unsafe { give(place.cast::<c_uint>(), Ok(allocation.gpu as c_uint)) },
            (8, Ok(allocation)) => unsafe { give(place.cast::<c_uint>(), Ok(c_uint::from(allocation.managed))) },
            _ => INVALID_VALUE,
        }
    }
    fn cuMemPrefetchAsync(address: u64, bytes: usize, device: c_int, stream: usize) { status(prefetch(address, bytes, device, stream)) }

    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) { status(copy_now(0, false, write_work(to, from as usize, bytes))) }
    fn cuMemcpyHtoD_v2_ptds(to: u64, from: *const c_void, bytes: usize) { status(copy_now(0, true, write_work(to, from as usize, bytes))) }
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) { status(copy_now(0, false, read_work(to as usize, from, bytes))) }
    fn cuMemcpyDtoH_v2_ptds(to: *mut c_void, from: u64, bytes: usize) { status(copy_now(0, true, read_work(to as usize, from, bytes))) }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: usize) { status(submit(stream, false, write_work(to, from as usize, bytes))) }
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: usize) { status(submit(stream, false, read_work(to as usize, from, bytes))) }
    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) { status(copy_now(0, false, copy_work(to, from, bytes))) }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) { status(submit(stream, false, copy_work(to, from, bytes))) }
    fn cuMemsetD32_v2(address: u64, value: c_uint, words: usize) { status(copy_now(0, false, fill_work(address, value, words))) }
    fn cuMemsetD32Async(address: u64, value: c_uint, words: usize, stream: usize) { status(submit(stream, false, fill_work(address, value, words))) }

    fn cuStreamCreate(place: *mut usize, flags: c_uint) { unsafe { give(place, new_stream(flags)) } }
    fn cuStreamCreateWithPriority(place: *mut usize, flags: c_uint, _priority: c_int) { unsafe { give(place, new_stream(flags)) } }
    fn cuStreamDestroy_v2(stream: usize) { status(process::get().and_then(|p| p.tables().streams.remove(&stream).map(|_| ()).ok_or(INVALID_HANDLE))) }
    fn cuStreamSynchronize(stream: usize) { status(with_stream(stream, false, |p, s| {
        if s.is_capturing() { s.break_capture(); return Err(900) }
        p.unsafe_call()?;
        s.queue.end().wait();
        p.sticky()
    })) }
    fn cuStreamQuery(stream: usize) { status(with_stream(stream, false, |p, s| { p.unsafe_call()?; if s.queue.end().is_reached() { p.sticky() } else { Err(NOT_READY) } })) }
    fn cuStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) { status(with_stream(stream, false, |p, s| {
        let point = p.tables().events.get(&event).cloned().ok_or(INVALID_HANDLE)?;
        s.queue.submit(None, point.into_iter().collect());
        Ok(())
    })) }
    fn cuStreamGetCtx(stream: usize, context: *mut usize) { unsafe { give(context, process::get().and_then(|p| p.stream(stream, false)).map(|s| s.context)) } }
    fn cuStreamGetFlags(stream: usize, flags: *mut c_uint) {
        unsafe { give(flags, process::get().and_then(|p| p.stream(stream, false)).and_then(|s| {
            // What asks a capturing stream for them breaks the capture.
            if s.is_capturing() { s.break_capture(); return Err(900) }
            Ok(c_uint::from(s.non_blocking))
        })) }
    }
    fn cuStreamIsCapturing(stream: usize, place: *mut c_int) { unsafe { give(place, process::get().and_then(|p| p.stream(stream, false)).map(|s| c_int::from(s.is_capturing()) * CAPTURING)) } }
    fn cuStreamBeginCapture_v2(stream: usize, _mode: c_int) { status(with_stream(stream, false, |_, s| s.begin_capture())) }
    fn cuStreamEndCapture(stream: usize, graph: *mut usize) {
        unsafe { give(graph, process::get().and_then(|p| {
            let captured = p.stream(stream, false)?.end_capture()?;
            let handle = p.handle();
            p.tables().graphs.insert(handle, Arc::new(captured));
            Ok(handle)
        })) }
    }
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) {
        if mode.is_null() { return INVALID_VALUE }
        // SAFETY: not null.
        unsafe { *mode = process::exchange_mode(*mode) };
        SUCCESS
    }
    fn cuGraphInstantiateWithFlags(exec: *mut usize, graph: usize, _flags: u64) {
        unsafe { give(exec, process::get().and_then(|p| {
            let mut tables = p.tables();
            let graph = tables.graphs.get(&graph).cloned().ok_or(INVALID_HANDLE)?;
            let handle = p.handle();
            tables.graphs.insert(handle, graph);
            Ok(handle)
        })) }
    }
    fn cuGraphLaunch(exec: usize, stream: usize) {
        status(process::get().and_then(|p| {
            let graph: Arc<Graph> = p.tables().graphs.get(&exec).cloned().ok_or(INVALID_HANDLE)?;
            graph.nodes.iter().try_for_each(|&node| p.allocate_for_graph(node))?;
            let allocates = !graph.nodes.is_empty();
            let work: Work = Arc::new(move || graph.works.iter().for_each(|work| work()));
            let point = p.submit(&p.stream(stream, false)?, work)?;
            p.tables().pool.launches.extend(point.filter(|_| allocates));
            Ok(())
        }))
    }
    fn cuGraphExecDestroy(exec: usize) { status(process::get().map(|p| { p.tables().graphs.remove(&exec); })) }
    fn cuGraphDestroy(graph: usize) { status(process::get().map(|p| { p.tables().graphs.remove(&graph); })) }

    fn cuEventCreate(place: *mut usize, _flags: c_uint) { unsafe { give(place, process::get().map(|p| { let handle = p.handle(); p.tables().events.insert(handle, None); handle })) } }
    fn cuEventDestroy_v2(event: usize) { status(process::get().and_then(|p| p.tables().events.remove(&event).map(|_| ()).ok_or(INVALID_HANDLE))) }
    fn cuEventRecord(event: usize, stream: usize) { status(record(event, stream, false)) }
    fn cuEventRecord_ptsz(event: usize, stream: usize) { status(record(event, stream, true)) }
    fn cuEventQuery(event: usize) { status(process::get().and_then(|p| {
        p.unsafe_call()?;
        let point = p.tables().events.get(&event).cloned().ok_or(INVALID_HANDLE)?;
        if point.is_none_or(|point| point.is_reached()) { Ok(()) } else { Err(NOT_READY) }
    })) }
    fn cuEventSynchronize(event: usize) { status(process::get().and_then(|p| {
        p.unsafe_call()?;
        let point = p.tables().events.get(&event).cloned().ok_or(INVALID_HANDLE)?;
        if let Some(point) = point { point.wait() }
        p.sticky()
    })) }

    fn cuModuleLoadData(place: *mut usize, image: *const c_char) {
        if image.is_null() { return INVALID_VALUE }
        // SAFETY: PTX is a C string.
        let text = unsafe { CStr::from_ptr(image) }.to_string_lossy();
        let entries = text.split(".entry ").skip(1).filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()).map(str::to_owned).collect();
        unsafe { give(place, process::get().map(|p| { let handle = p.handle(); p.tables().modules.insert(handle, entries); handle })) }
    }
    fn cuModuleUnload(module: usize) { status(process::get().map(|p| { p.tables().modules.remove(&module); })) }
    fn cuModuleGetFunction(place: *mut usize, module: usize, name: *const c_char) {
        if name.is_null() { return INVALID_VALUE }
        // SAFETY: a C string.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        unsafe { give(place, process::get().and_then(|p| {
            let mut tables = p.tables();
            if !tables.modules.get(&module).ok_or(INVALID_HANDLE)?.contains(&name) { return Err(NOT_FOUND) }
            let handle = p.handle();
            tables.functions.insert(handle, name);
            Ok(handle)
        })) }
    }
    fn cuLaunchKernel(function: usize, _gx: c_uint, _gy: c_uint, _gz: c_uint, _bx: c_uint, _by: c_uint, _bz: c_uint, _shared: c_uint, stream: usize, params: *mut *mut c_void, _extra: *mut *mut c_void) {
        status(kernel_work(function, params).and_then(|work| submit(stream, false, Ok(work))))
    }
    fn cuLaunchKernel_ptsz(function: usize, _gx: c_uint, _gy: c_uint, _gz: c_uint, _bx: c_uint, _by: c_uint, _bz: c_uint, _shared: c_uint, stream: usize, params: *mut *mut c_void, _extra: *mut *mut c_void) {
        status(kernel_work(function, params).and_then(|work| submit(stream, true, Ok(work))))
    }
    fn cuLaunchHostFunc(stream: usize, function: Option<extern "C" fn(*mut c_void)>, data: *mut c_void) {
        let Some(function) = function else { return INVALID_VALUE };
        let data = data as usize;
        status(submit(stream, false, Ok(Arc::new(move || function(data as *mut c_void)))))
    }

    fn cuGetErrorName(_error: c_int, name: *mut *const c_char) { unsafe { give(name, Ok(c"CUDA_ERROR_SIMULATED".as_ptr())) } }
    fn cuGetErrorString(_error: c_int, text: *mut *const c_char) { unsafe { give(text, Ok(c"simulated error".as_ptr())) } }
    fn cuGetExportTable(_table: *mut *const c_void, _id: *const c_void) { NOT_FOUND }
    fn cuGetProcAddress(symbol: *const c_char, place: *mut *mut c_void, version: c_int, flags: u64) {
        unsafe { cuGetProcAddress_v2(symbol, place, version, flags, std::ptr::null_mut()) }
    }
    fn cuGetProcAddress_v2(symbol: *const c_char, place: *mut *mut c_void, _version: c_int, flags: u64, found: *mut c_int) {
        if symbol.is_null() || place.is_null() { return INVALID_VALUE }
        // SAFETY: a C string.
        let name = unsafe { CStr::from_ptr(symbol) }.to_string_lossy();
        let twins: &[&str] = if flags & 2 != 0 { &["_ptsz", "_ptds", ""] } else { &[""] };
        let address = twins.iter().flat_map(|twin| ["_v2", ""].map(|v| format!("{name}{v}{twin}"))).find_map(|full| crate::address_of(&full));
        // SAFETY: not null; the second may be.
        unsafe {
            *place = address.unwrap_or(std::ptr::null_mut());
            if let Some(found) = found.as_mut() { *found = c_int::from(address.is_none()) }
        }
        if address.is_some() { SUCCESS } else { NOT_FOUND }
    }

    fn nvsimMoved(device: c_int, moved: *mut [u64; 5]) { unsafe { give(moved, process::get().map(|p| p.world.moved(device as usize))) } }
    fn nvsimTrace(ran: *mut crate::world::Ran, most: usize, count: *mut usize) {
        unsafe { give(count, process::get().map(|p| {
            let trace = p.world.trace();
            let kept = trace.len().min(most);
            // SAFETY: the caller's room for `most`.
            std::ptr::copy_nonoverlapping(trace[trace.len() - kept..].as_ptr(), ran, kept);
            kept
        })) }
    }
}

fn uuid_of(gpu: usize) -> [u8; 16] {
    let mut uuid = *b"\x51\x60\0\0\0\0\x40\0\x80\0\0\0\0\0\0\0";
    uuid[15] = gpu as u8;
    uuid
}

fn destroy_context(p: &Process, context: usize) -> Result<(), Failure> {
    p.synchronize(|stream| stream.context == context);
    let mut tables = p.tables();
    tables.contexts.remove(&context).ok_or(INVALID_CONTEXT)?;
    tables.streams.retain(|_, stream| stream.context != context);
    Ok(())
}

fn release_primary(p: &Process, device: c_int, reset: bool) -> Result<(), Failure> {
    let gpu = p.gpu_of(device)?;
    let handle = p.tables().primary.get(&gpu).copied().ok_or(INVALID_CONTEXT)?;
    let last = match p.tables().contexts.get_mut(&handle) {
        Some(context) => {
            context.retained -= 1;
            reset || context.retained == 0
        }
        None => true,
    };
    if last {
        p.tables().primary.remove(&gpu);
        destroy_context(p, handle)?;
    }
    Ok(())
}

fn new_stream(flags: c_uint) -> Result<usize, Failure> {
    let p = process::get()?;
    p.unsafe_call()?;
    let context = process::current_context();
    if !p.tables().contexts.contains_key(&context) {
        return Err(INVALID_CONTEXT);
    }
    let stream = p.new_stream(context, flags & NON_BLOCKING != 0);
    let handle = p.handle();
    p.tables().streams.insert(handle, stream);
    Ok(handle)
}

fn with_stream(
    handle: usize,
    per_thread: bool,
    body: impl FnOnce(&'static Process, Arc<Stream>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let p = process::get()?;
    body(p, p.stream(handle, per_thread)?)
}

fn submit(handle: usize, per_thread: bool, work: Result<Work, Failure>) -> Result<(), Failure> {
    let work = work?;
    with_stream(handle, per_thread, |p, stream| p.submit(&stream, work).map(|_| ()))
}

/// A copy that returns when it is done.
fn copy_now(handle: usize, per_thread: bool, work: Result<Work, Failure>) -> Result<(), Failure> {
    let work = work?;
    with_stream(handle, per_thread, |p, stream| {
        p.unsafe_call()?;
        match p.submit(&stream, work)? {
            Some(point) => point.wait(),
            None => return Err(CAPTURE_INVALIDATED),
        }
        p.sticky()
    })
}

fn record(event: usize, stream: usize, per_thread: bool) -> Result<(), Failure> {
    with_stream(stream, per_thread, |p, stream| {
        let legacy =
            p.tables().contexts.get(&stream.context).is_some_and(|c| Arc::ptr_eq(&c.legacy, &stream));
        if legacy {
            // Whatever the thread's mode: it stands behind the blocking streams, and they are capturing.
            p.break_captures(|other| other.context == stream.context && !other.non_blocking)?;
        }
        let point = stream.queue.submit(None, Vec::new());
        let mut tables = p.tables();
        *tables.events.get_mut(&event).ok_or(INVALID_HANDLE)? = Some(point);
        Ok(())
    })
}

fn prefetch(address: u64, bytes: usize, device: c_int, stream: usize) -> Result<(), Failure> {
    let p = process::get()?;
    // The stream's order is kept: what was submitted there is done before memory moves.
    p.stream(stream, false)?.queue.end().wait();
    p.prefetch(address, bytes as u64, if device < 0 { Way::ToHost } else { Way::ToDevice })
}

/// Where a byte of a block is in the store: several of a program's bytes share one of the store's.
fn at(offset: u64, real: usize) -> usize {
    (offset % BLOCK) as usize % real
}

fn write_work(to: u64, from: usize, bytes: usize) -> Result<Work, Failure> {
    let p = process::get()?;
    p.find(to, bytes as u64)?;
    Ok(Arc::new(move || {
        p.touch(to, bytes as u64, |store, start| {
            let begin = to.max(start);
            let end = (to + bytes as u64).min(start + BLOCK);
            for address in begin..end {
                // SAFETY: within the caller's buffer, which lives until the copy is done.
                store[at(address - start, store.len())] =
                    unsafe { *((from as u64 + (address - to)) as *const u8) };
            }
        });
    }))
}

fn read_work(to: usize, from: u64, bytes: usize) -> Result<Work, Failure> {
    let p = process::get()?;
    p.find(from, bytes as u64)?;
    Ok(Arc::new(move || {
        p.touch(from, bytes as u64, |store, start| {
            let begin = from.max(start);
            let end = (from + bytes as u64).min(start + BLOCK);
            for address in begin..end {
                let byte = store[at(address - start, store.len())];
                // SAFETY: within the caller's buffer, which lives until the copy is done.
                unsafe { *((to as u64 + (address - from)) as *mut u8) = byte };
            }
        });
    }))
}

fn copy_work(to: u64, from: u64, bytes: usize) -> Result<Work, Failure> {
    process::get()?.find(from, bytes as u64)?;
    process::get()?.find(to, bytes as u64)?;
    Ok(Arc::new(move || {
        let mut between = vec![0u8; bytes];
        let between = between.as_mut_ptr() as usize;
        for half in [read_work(between, from, bytes), write_work(to, between, bytes)] {
            half.expect("found before")();
        }
    }))
}

fn fill_work(address: u64, value: c_uint, words: usize) -> Result<Work, Failure> {
    let p = process::get()?;
    p.find(address, words as u64 * 4)?;
    Ok(Arc::new(move || {
        p.touch(address, words as u64 * 4, |store, start| {
            let begin = at(address.saturating_sub(start), store.len());
            let bytes = ((address + words as u64 * 4).min(start + BLOCK) - address.max(start)) as usize;
            let end = (begin + bytes).min(store.len());
            for word in store[begin..end].as_chunks_mut::<4>().0 {
                *word = value.to_ne_bytes();
            }
        });
    }))
}

/// The kernels that programs of the test suites launch; on a real card their PTX runs.
fn kernel_work(function: usize, params: *mut *mut c_void) -> Result<Work, Failure> {
    let p = process::get()?;
    let name = p.tables().functions.get(&function).cloned().ok_or(INVALID_HANDLE)?;
    if params.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: each kernel below takes an address, a number of words, a value and a time.
    let (address, words, value, micros) = unsafe {
        (
            *(*params).cast::<u64>(),
            *(*params.add(1)).cast::<u64>(),
            *(*params.add(2)).cast::<u32>(),
            *(*params.add(3)).cast::<u32>(),
        )
    };
    let gpu = p.current_gpu()?;
    let body: fn(&mut [u8], u64, u32) = match name.as_str() {
        "step" => |store, _, value| {
            for word in store.as_chunks_mut::<4>().0 {
                *word = u32::from_ne_bytes(*word).wrapping_add(value).to_ne_bytes();
            }
        },
        "fill" => |store, block, value| {
            for (i, word) in store.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *word = pattern(value, block, i as u64).to_ne_bytes();
            }
        },
        _ => return Err(NOT_FOUND),
    };
    let reads_memory = words > 0;
    Ok(Arc::new(move || {
        p.world.run_kernel(gpu, || {
            if reads_memory {
                p.touch(address, words * 4, |store, start| body(store, (start - address) / BLOCK, value));
            }
            std::thread::sleep(Duration::from_micros(u64::from(micros)));
        });
    }))
}

/// What `fill` writes: see the kernel's PTX in the workload client.
fn pattern(seed: u32, block: u64, word: u64) -> u32 {
    seed.wrapping_add((block as u32).wrapping_mul(0x9e37_79b1)).wrapping_add((word % 1024) as u32 * 2_654_435)
}

const _: () = assert!(GIB.is_multiple_of(BLOCK));
