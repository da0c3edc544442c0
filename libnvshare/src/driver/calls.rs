//! The driver calls that the library itself makes.
//!
//! A call that could disturb a stream capture of another thread is made with [`Relaxed`] in force.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nvshare_proto::GpuUuid;

use super::functions;
use super::types::{
    CU_EVENT_DISABLE_TIMING, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, CU_LIMIT_STACK_SIZE,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEMHOSTREGISTER_PORTABLE, CU_MEMORYTYPE_DEVICE,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
    CU_MEMPOOL_ATTR_USED_MEM_CURRENT, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_IS_MANAGED,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_STATUS_NONE,
    CU_STREAM_NON_BLOCKING, CU_STREAM_PER_THREAD, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction,
    CUgreenCtx, CUmemAccessDesc, CUmemAllocationProp, CUmemHandle, CUmemoryPool, CUmodule, CUresult,
    CUstream,
};
use crate::process::lifecycle;

/// While this lives, the calling thread's driver calls do not disturb stream captures of other threads.
#[derive(Debug)]
pub(crate) struct Relaxed {
    before: c_int,
}

impl Relaxed {
    pub(crate) fn begin() -> Self {
        Self { before: exchange(CU_STREAM_CAPTURE_MODE_RELAXED) }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        exchange(self.before);
    }
}

fn exchange(mut mode: c_int) -> c_int {
    if let Some(exchange) = functions::cuThreadExchangeStreamCaptureMode.get() {
        // SAFETY: reads and writes the one word. Before `cuInit` it fails and changes nothing.
        unsafe { exchange(&raw mut mode) };
    }
    mode
}

macro_rules! call {
    ($name:ident($($arg:expr),*)) => {
        match functions::$name.get() {
            // SAFETY: the arguments' types are those of the driver's function; the wrapper around this says why
            // what they point to is valid.
            Some(function) => unsafe { function($($arg),*) }.ok(),
            None => Err(CUresult::NOT_SUPPORTED),
        }
    };
}

/// Whether the driver has shut down, as it does in its own exit handler. From then on every call answers DEINITIALIZED, and
/// nothing runs on a device.
pub(crate) fn has_ended() -> bool {
    static ENDED: AtomicBool = AtomicBool::new(false);
    let mut count = 0;
    let mut ends = || {
        let ended = call!(cuDeviceGetCount(&raw mut count)) == Err(CUresult::DEINITIALIZED);
        ENDED.store(ended, Ordering::Relaxed);
        ended
    };
    lifecycle::is_exiting() && (ENDED.load(Ordering::Relaxed) || ends())
}

pub(crate) fn current_context() -> Result<CUcontext, CUresult> {
    let mut context = CUcontext::NULL;
    call!(cuCtxGetCurrent(&raw mut context))?;
    if context == CUcontext::NULL { Err(CUresult::INVALID_CONTEXT) } else { Ok(context) }
}

pub(crate) fn current_device() -> Result<CUdevice, CUresult> {
    let mut device = 0;
    call!(cuCtxGetDevice(&raw mut device))?;
    Ok(device)
}

/// Runs `body` with a context current, and then restores the thread's own. The context must live until `body` returns.
pub(crate) fn with_current<T>(
    context: CUcontext,
    body: impl FnOnce() -> Result<T, CUresult>,
) -> Result<T, CUresult> {
    if current_context() == Ok(context) {
        return body();
    }
    // Push and pop: another thread may have destroyed the thread's own context, so its handle must not be used.
    call!(cuCtxPushCurrent_v2(context))?;
    let result = body();
    let mut popped = CUcontext::NULL;
    let _ = call!(cuCtxPopCurrent_v2(&raw mut popped));
    result
}

/// The context of a stream; for default streams, the current context. The stream must live through the call.
pub(crate) fn context_of(stream: CUstream) -> Result<CUcontext, CUresult> {
    if stream.0 as usize <= CU_STREAM_PER_THREAD {
        return current_context();
    }
    let mut context = CUcontext::NULL;
    call!(cuStreamGetCtx(stream, &raw mut context))?;
    Ok(context)
}

/// The context that stands for a green context. The green context must live through the call.
pub(crate) fn context_of_green(green: CUgreenCtx) -> Result<CUcontext, CUresult> {
    let mut context = CUcontext::NULL;
    call!(cuCtxFromGreenCtx(&raw mut context, green))?;
    Ok(context)
}

pub(crate) fn synchronize_context() -> Result<(), CUresult> {
    call!(cuCtxSynchronize())
}

/// The bytes that each thread of a kernel may have as its stack, in the current context.
pub(crate) fn stack_limit() -> Result<usize, CUresult> {
    let mut bytes = 0;
    call!(cuCtxGetLimit(&raw mut bytes, CU_LIMIT_STACK_SIZE))?;
    Ok(bytes)
}

/// Sets it. The card's memory for stacks follows at once (measured on an H200: 264 MiB for each KiB).
pub(crate) fn set_stack_limit(bytes: usize) -> Result<(), CUresult> {
    call!(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, bytes))
}

pub(crate) fn device_count() -> Result<c_int, CUresult> {
    let mut count = 0;
    call!(cuDeviceGetCount(&raw mut count))?;
    Ok(count)
}

pub(crate) fn device(ordinal: c_int) -> Result<CUdevice, CUresult> {
    let mut device = 0;
    call!(cuDeviceGet(&raw mut device, ordinal))?;
    Ok(device)
}

pub(crate) fn device_attribute(device: CUdevice, attribute: c_int) -> Result<c_int, CUresult> {
    let mut value = 0;
    call!(cuDeviceGetAttribute(&raw mut value, attribute, device))?;
    Ok(value)
}

pub(crate) fn device_uuid(device: CUdevice) -> Result<[u8; 16], CUresult> {
    let mut uuid = [0; 16];
    // The second form tells MIG instances apart; older drivers lack it.
    call!(cuDeviceGetUuid_v2(&raw mut uuid, device))
        .or_else(|_| call!(cuDeviceGetUuid(&raw mut uuid, device)))?;
    Ok(uuid)
}

pub(crate) fn device_total(device: CUdevice) -> Result<u64, CUresult> {
    let mut total = 0usize;
    call!(cuDeviceTotalMem_v2(&raw mut total, device))?;
    Ok(total as u64)
}

/// Free bytes on the current device.
pub(crate) fn free_memory() -> Result<u64, CUresult> {
    let _relaxed = Relaxed::begin();
    let (mut free, mut total) = (0usize, 0usize);
    call!(cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
    Ok(free as u64)
}

pub(crate) fn primary_is_active(device: CUdevice) -> bool {
    let (mut flags, mut active) = (0, 0);
    call!(cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active)).is_ok() && active != 0
}

/// The primary context of a device, if it is active.
pub(crate) fn primary_context(device: CUdevice) -> Result<CUcontext, CUresult> {
    if !primary_is_active(device) {
        return Err(CUresult::INVALID_CONTEXT);
    }
    let mut context = CUcontext::NULL;
    call!(cuDevicePrimaryCtxRetain(&raw mut context, device))?;
    call!(cuDevicePrimaryCtxRelease_v2(device))?;
    Ok(context)
}

pub(crate) fn create_stream() -> Result<CUstream, CUresult> {
    let mut stream = CUstream::NULL;
    call!(cuStreamCreate(&raw mut stream, CU_STREAM_NON_BLOCKING))?;
    Ok(stream)
}

pub(crate) fn synchronize_stream(stream: CUstream) -> Result<(), CUresult> {
    call!(cuStreamSynchronize(stream))
}

/// Whether a stream is capturing; false if the driver does not answer.
pub(crate) fn is_capturing(stream: CUstream) -> bool {
    let mut status = CU_STREAM_CAPTURE_STATUS_NONE;
    call!(cuStreamIsCapturing(stream, &raw mut status)).is_ok() && status != CU_STREAM_CAPTURE_STATUS_NONE
}

/// An event in the current context. Must be called with [`Relaxed`] in force, as all that follow here.
pub(crate) fn create_event() -> Result<CUevent, CUresult> {
    let mut event = CUevent::NULL;
    call!(cuEventCreate(&raw mut event, CU_EVENT_DISABLE_TIMING))?;
    Ok(event)
}

/// The event's context must live through the call.
pub(crate) fn destroy_event(event: CUevent) {
    let _ = call!(cuEventDestroy_v2(event));
}

/// The stream must live through the call.
pub(crate) fn record_event(event: CUevent, stream: CUstream) -> Result<(), CUresult> {
    call!(cuEventRecord(event, stream))
}

/// The driver has no [`record_context_event`].
static NO_CONTEXT_EVENTS: AtomicBool = AtomicBool::new(false);

/// Whether the driver has [`record_context_event`].
pub(crate) fn can_record_context() -> bool {
    !NO_CONTEXT_EVENTS.load(Ordering::Relaxed) && functions::cuCtxRecordEvent.get().is_some()
}

/// Remembers that the driver has no [`record_context_event`].
pub(crate) fn cannot_record_context() {
    NO_CONTEXT_EVENTS.store(true, Ordering::Relaxed);
}

/// The context must live through the call.
pub(crate) fn record_context_event(event: CUevent, context: CUcontext) -> Result<(), CUresult> {
    call!(cuCtxRecordEvent(context, event))
}

/// Whether the work before an event is complete. The event's context must live through the call.
pub(crate) fn query_event(event: CUevent) -> Result<(), CUresult> {
    call!(cuEventQuery(event))
}

/// Whether the work on a stream is complete. The stream must live through the call.
pub(crate) fn query_stream(stream: CUstream) -> Result<(), CUresult> {
    call!(cuStreamQuery(stream))
}

/// The pool that stream-ordered allocations on a device come from, unless the program chooses another.
pub(crate) fn default_pool(device: CUdevice) -> Result<CUmemoryPool, CUresult> {
    let mut pool = CUmemoryPool::NULL;
    call!(cuDeviceGetDefaultMemPool(&raw mut pool, device))?;
    Ok(pool)
}

fn pool_attribute(pool: CUmemoryPool, attribute: c_int) -> Result<u64, CUresult> {
    let mut value = 0u64;
    call!(cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()))?;
    Ok(value)
}

/// Bytes that a pool holds, has not handed out, and does not give back by itself.
pub(crate) fn pool_keeps(pool: CUmemoryPool) -> Result<u64, CUresult> {
    let reserved = pool_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
    let threshold = pool_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)?;
    let used = pool_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
    Ok(reserved.min(threshold).saturating_sub(used))
}

/// Bytes that a pool holds and has not handed out.
pub(crate) fn pool_unused(pool: CUmemoryPool) -> Result<u64, CUresult> {
    let reserved = pool_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
    let used = pool_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
    Ok(reserved.saturating_sub(used))
}

/// Releases the memory of a pool that is not handed out.
pub(crate) fn trim_pool(pool: CUmemoryPool) -> Result<(), CUresult> {
    call!(cuMemPoolTrimTo(pool, 0))
}

/// Bytes of a device that the driver holds for graphs, whether a graph uses them now or not.
pub(crate) fn graph_memory(device: CUdevice) -> Result<u64, CUresult> {
    let mut value = 0u64;
    let place = (&raw mut value).cast();
    call!(cuDeviceGetGraphMemAttribute(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, place))?;
    Ok(value)
}

/// Releases the memory of graphs that no running graph uses.
pub(crate) fn trim_graph_memory(device: CUdevice) -> Result<(), CUresult> {
    call!(cuDeviceGraphMemTrim(device))
}

/// The arguments of a step of the driver's checkpoint: nothing, but for the lock, whose first word is its patience in milliseconds.
type CheckpointArguments = [c_uint; 16];

/// Whether the driver can take processes off their cards.
pub(crate) fn can_checkpoint() -> bool {
    functions::cuCheckpointProcessLock.get().is_some()
        && functions::cuCheckpointProcessCheckpoint.get().is_some()
        && functions::cuCheckpointProcessRestore.get().is_some()
        && functions::cuCheckpointProcessUnlock.get().is_some()
}

fn own_number() -> c_int {
    // SAFETY: it only asks.
    unsafe { libc::getpid() }
}

/// Locks this process: waits for its work, for this long at most, and then its calls wait.
pub(crate) fn lock_process(patience: Duration) -> Result<(), CUresult> {
    let mut arguments = CheckpointArguments::default();
    if let Some(millis) = arguments.first_mut() {
        *millis = c_uint::try_from(patience.as_millis()).unwrap_or(c_uint::MAX);
    }
    call!(cuCheckpointProcessLock(own_number(), (&raw mut arguments).cast()))
}

/// Takes this process, which is locked, off its cards.
pub(crate) fn checkpoint_process() -> Result<(), CUresult> {
    let mut arguments = CheckpointArguments::default();
    call!(cuCheckpointProcessCheckpoint(own_number(), (&raw mut arguments).cast()))
}

/// Brings this process back to its cards, still locked. `pairs`: each card that it sees, and the card that takes its place; or nothing. If a
/// card is missing, the driver answers [`CUresult::INVALID_VALUE`], and all is as before (measured on H200s).
pub(crate) fn restore_process(pairs: &[[GpuUuid; 2]]) -> Result<(), CUresult> {
    /// A pointer and a count, and nothing in the rest of the 64 bytes.
    #[repr(C)]
    struct Arguments {
        pairs: *const [GpuUuid; 2],
        count: c_uint,
        rest: [c_uint; 13],
    }
    const { assert!(size_of::<Arguments>() == size_of::<CheckpointArguments>()) }
    let first = if pairs.is_empty() { std::ptr::null() } else { pairs.as_ptr() };
    let mut arguments = Arguments { pairs: first, count: pairs.len() as c_uint, rest: [0; 13] };
    call!(cuCheckpointProcessRestore(own_number(), (&raw mut arguments).cast()))
}

pub(crate) fn unlock_process() -> Result<(), CUresult> {
    let mut arguments = CheckpointArguments::default();
    call!(cuCheckpointProcessUnlock(own_number(), (&raw mut arguments).cast()))
}

/// The base address of the allocation that `pointer` points into.
pub(crate) fn base_of(pointer: CUdeviceptr) -> Result<CUdeviceptr, CUresult> {
    let mut base = 0;
    call!(cuMemGetAddressRange_v2(&raw mut base, std::ptr::null_mut(), pointer))?;
    Ok(base)
}

/// Whether a pointer points into plain memory of this device.
pub(crate) fn is_device_memory(pointer: CUdeviceptr, device: CUdevice) -> bool {
    let attribute = |attribute: c_int| {
        let mut value: c_int = 0;
        call!(cuPointerGetAttribute((&raw mut value).cast(), attribute, pointer)).map(|()| value)
    };
    attribute(CU_POINTER_ATTRIBUTE_MEMORY_TYPE) == Ok(CU_MEMORYTYPE_DEVICE)
        && attribute(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) == Ok(device)
        && attribute(CU_POINTER_ATTRIBUTE_IS_MANAGED) == Ok(0)
}

/// Whether work of a device can be given access to memory of another.
pub(crate) fn can_access_peer(device: CUdevice, other: CUdevice) -> bool {
    let mut can: c_int = 0;
    call!(cuDeviceCanAccessPeer(&raw mut can, device, other)).is_ok() && can != 0
}

/// Managed memory, for which `flags` say who may reach it first.
pub(crate) fn allocate_managed(bytes: u64, flags: c_uint) -> Result<CUdeviceptr, CUresult> {
    let mut base = 0;
    call!(cuMemAllocManaged(&raw mut base, bytes as usize, flags))?;
    Ok(base)
}

pub(crate) fn prefetch(
    address: CUdeviceptr,
    bytes: u64,
    to: CUdevice,
    stream: CUstream,
) -> Result<(), CUresult> {
    call!(cuMemPrefetchAsync(address, bytes as usize, to, stream))
}

/// Addresses for mappings, a multiple of the granularity.
pub(crate) fn reserve_addresses(bytes: u64) -> Result<CUdeviceptr, CUresult> {
    let mut base = 0;
    call!(cuMemAddressReserve(&raw mut base, bytes as usize, 0, 0, 0))?;
    Ok(base)
}

/// Frees addresses at which nothing is mapped, and nothing may be mapped any more.
pub(crate) fn free_addresses(base: CUdeviceptr, bytes: u64) -> Result<(), CUresult> {
    call!(cuMemAddressFree(base, bytes as usize))
}

/// Creates physical memory. The memory belongs to no context.
pub(crate) fn create_physical(properties: &CUmemAllocationProp, bytes: u64) -> Result<CUmemHandle, CUresult> {
    let mut handle = 0;
    call!(cuMemCreate(&raw mut handle, bytes as usize, std::ptr::from_ref(properties).cast(), 0))?;
    Ok(CUmemHandle(handle))
}

/// Releases physical memory, which lives on as long as it is mapped.
pub(crate) fn release_physical(handle: CUmemHandle) -> Result<(), CUresult> {
    call!(cuMemRelease(handle.0))
}

/// Maps the whole memory at reserved addresses, where nothing is mapped.
pub(crate) fn map(base: CUdeviceptr, bytes: u64, handle: CUmemHandle) -> Result<(), CUresult> {
    call!(cuMemMap(base, bytes as usize, 0, handle.0, 0))
}

/// The range must consist of whole mappings.
pub(crate) fn unmap(base: CUdeviceptr, bytes: u64) -> Result<(), CUresult> {
    call!(cuMemUnmap(base, bytes as usize))
}

/// Sets who may access a range of whole mappings, and how.
pub(crate) fn set_access(base: CUdeviceptr, bytes: u64, access: &[CUmemAccessDesc]) -> Result<(), CUresult> {
    call!(cuMemSetAccess(base, bytes as usize, access.as_ptr().cast(), access.len()))
}

/// A descriptor of physical memory that was made for it. The memory lives while the descriptor is open anywhere.
pub(crate) fn export_physical(handle: CUmemHandle) -> Result<OwnedFd, CUresult> {
    let mut descriptor: c_int = -1;
    let place = (&raw mut descriptor).cast();
    call!(cuMemExportToShareableHandle(place, handle.0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0))?;
    if descriptor < 0 {
        return Err(CUresult::NOT_SUPPORTED);
    }
    // SAFETY: the driver has made the descriptor, and nobody else knows it. The flag keeps it from programs that this one starts.
    unsafe {
        libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC);
        Ok(OwnedFd::from_raw_fd(descriptor))
    }
}

/// Physical memory of another process, by a descriptor.
pub(crate) fn import_physical(descriptor: &OwnedFd) -> Result<CUmemHandle, CUresult> {
    let (mut handle, number) = (0, descriptor.as_raw_fd() as usize as *mut c_void);
    call!(cuMemImportFromShareableHandle(&raw mut handle, number, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))?;
    Ok(CUmemHandle(handle))
}

/// Copies within a card's memory.
pub(crate) fn copy_within(
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: u64,
    stream: CUstream,
) -> Result<(), CUresult> {
    call!(cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream))
}

/// Page-locks memory of the process for all of its contexts, until it is [unregistered](unregister_host) or the current
/// context ends. The memory must outlive that.
pub(crate) fn register_host(memory: *mut c_void, bytes: u64) -> Result<(), CUresult> {
    call!(cuMemHostRegister_v2(memory, bytes as usize, CU_MEMHOSTREGISTER_PORTABLE))
}

/// Memory that no copy uses is not page-locked any more.
pub(crate) fn unregister_host(memory: *mut c_void) -> Result<(), CUresult> {
    call!(cuMemHostUnregister(memory))
}

/// The host's memory must live until the copy is complete, and nobody may read it before.
pub(crate) fn copy_out(
    to: *mut c_void,
    from: CUdeviceptr,
    bytes: u64,
    stream: CUstream,
) -> Result<(), CUresult> {
    call!(cuMemcpyDtoHAsync_v2(to, from, bytes as usize, stream))
}

/// The host's memory must live and stay as it is until the copy is complete.
pub(crate) fn copy_in(
    to: CUdeviceptr,
    from: *const c_void,
    bytes: u64,
    stream: CUstream,
) -> Result<(), CUresult> {
    call!(cuMemcpyHtoDAsync_v2(to, from, bytes as usize, stream))
}

/// Makes memory of a card zero; `bytes` is a multiple of four.
pub(crate) fn fill_with_zeros(at: CUdeviceptr, bytes: u64, stream: CUstream) -> Result<(), CUresult> {
    call!(cuMemsetD32Async(at, 0, bytes as usize / 4, stream))
}

/// A kernel of a program in PTX, which the driver compiles for the current context, and keeps until that ends.
pub(crate) fn load_kernel(ptx: &CStr, name: &CStr) -> Result<CUfunction, CUresult> {
    let (mut module, mut function) = (CUmodule::NULL, CUfunction::NULL);
    call!(cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()))?;
    call!(cuModuleGetFunction(&raw mut function, module, name.as_ptr()))?;
    Ok(function)
}

/// Launches a kernel in blocks in a row.
///
/// # Safety
/// `parameters` point to what the kernel takes, and what those name lives until the kernel is complete.
pub(crate) unsafe fn launch(
    kernel: CUfunction,
    blocks: c_uint,
    threads: c_uint,
    parameters: &mut [*mut c_void],
    stream: CUstream,
) -> Result<(), CUresult> {
    let (parameters, none) = (parameters.as_mut_ptr(), std::ptr::null_mut());
    call!(cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, none))
}
