//! The capabilities of the driver, found by using each once: programs are composed of those that exist.

use std::collections::BTreeSet;

use crate::exec;
use nvshare_test_cuda::{CudaError, Driver, cu};

/// All capabilities that a driver may lack; `docs/internals/testing.md` says what each is for.
pub(crate) const ALL: &[&str] = &[
    "async",
    "attach",
    "graph memory",
    "graph update",
    "green",
    "joins",
    "managed by the host",
    "mapped",
    SHARING,
    "modes",
    "nodes",
    "peer",
    "peer access",
    "pitch",
    "register",
    "rows",
    SLEEP,
    "small fills",
    "two devices",
];

/// Memory that processes share by handles (CUDA IPC).
pub(crate) const SHARING: &str = "memory shared with a process";
/// Processes that go off the card (`nvshare-ctl sleep`).
pub(crate) const SLEEP: &str = "sleep";
const MANAGED_AT_THE_SAME_TIME: i32 = 89;
const RELAXED: i32 = 2;
const OF_THE_THREAD: i32 = 1;

type Look = fn(&Driver) -> Result<bool, CudaError>;

/// Looks for the driver's capabilities, in the primary context of its first device, which is released again.
pub(crate) fn look(d: &Driver) -> Result<BTreeSet<String>, CudaError> {
    let mut context = 0u64;
    cu!(d, "cuDevicePrimaryCtxRetain", &raw mut context => *mut u64, 0 => i32)?;
    cu!(d, "cuCtxSetCurrent", context => u64)?;
    let looks: [(&str, Look); 19] = [
        ("async", stream_order),
        ("attach", attach),
        ("graph memory", graph_memory),
        ("graph update", |d| Ok(d.has("cuGraphExecUpdate_v2"))),
        ("green", green),
        ("joins", joins),
        ("managed by the host", managed_by_the_host),
        ("mapped", mapped),
        (SHARING, shared),
        ("modes", modes),
        ("nodes", |d| Ok(d.has("cuGraphAddNode_v2"))),
        ("peer", |d| Ok(d.has("cuMemcpyPeerAsync"))),
        ("peer access", peer_access),
        ("pitch", pitch),
        ("register", |d| Ok(d.has("cuMemHostRegister_v2"))),
        ("rows", |d| Ok(d.has("cuMemcpy2DAsync_v2"))),
        (SLEEP, |d| Ok(d.has("cuCheckpointProcessLock"))),
        ("small fills", |d| Ok(d.has("cuMemsetD8Async") && d.has("cuMemsetD16Async"))),
        ("two devices", two_devices),
    ];
    let has = looks.iter().filter(|(_, look)| look(d).unwrap_or(false));
    let has = has.map(|(name, _)| (*name).to_owned()).collect();
    cu!(d, "cuCtxSetCurrent", 0 => u64)?;
    cu!(d, "cuDevicePrimaryCtxRelease_v2", 0 => i32)?;
    Ok(has)
}

fn new_stream(d: &Driver) -> Result<u64, CudaError> {
    let mut stream = 0u64;
    cu!(d, "cuStreamCreate", &raw mut stream => *mut u64, 1 => u32)?;
    Ok(stream)
}

fn end_stream(d: &Driver, stream: u64) -> Result<(), CudaError> {
    cu!(d, "cuStreamSynchronize", stream => u64)?;
    cu!(d, "cuStreamDestroy_v2", stream => u64)
}

fn stream_order(d: &Driver) -> Result<bool, CudaError> {
    let stream = new_stream(d)?;
    let mut address = 0u64;
    cu!(d, "cuMemAllocAsync", &raw mut address => *mut u64, 4096 => usize, stream => u64)?;
    cu!(d, "cuMemFreeAsync", address => u64, stream => u64)?;
    end_stream(d, stream)?;
    Ok(d.has("cuDeviceGetDefaultMemPool"))
}

fn attach(d: &Driver) -> Result<bool, CudaError> {
    if !d.has("cuCtxAttach") || !d.has("cuCtxDetach") {
        return Ok(false);
    }
    let (mut made, mut attached) = (0u64, 0u64);
    cu!(d, "cuCtxCreate_v2", &raw mut made => *mut u64, 0 => u32, 0 => i32)?;
    let works = cu!(d, "cuCtxAttach", &raw mut attached => *mut u64, 0 => u32).is_ok()
        && cu!(d, "cuCtxDetach", attached => u64).is_ok();
    cu!(d, "cuCtxDestroy_v2", made => u64)?;
    current_primary(d)?;
    Ok(works)
}

fn shared(d: &Driver) -> Result<bool, CudaError> {
    let (mut address, mut handle) = (0u64, [0u8; 64]);
    cu!(d, "cuMemAlloc_v2", &raw mut address => *mut u64, 4096 => usize)?;
    let given = cu!(d, "cuIpcGetMemHandle", handle.as_mut_ptr() => *mut u8, address => u64);
    cu!(d, "cuMemFree_v2", address => u64)?;
    Ok(given.is_ok())
}

fn current_primary(d: &Driver) -> Result<(), CudaError> {
    let mut context = 0u64;
    cu!(d, "cuDevicePrimaryCtxRetain", &raw mut context => *mut u64, 0 => i32)?;
    cu!(d, "cuCtxSetCurrent", context => u64)?;
    cu!(d, "cuDevicePrimaryCtxRelease_v2", 0 => i32)
}

fn graph_memory(d: &Driver) -> Result<bool, CudaError> {
    let stream = new_stream(d)?;
    let (mut inside, mut graph, mut exec) = (0u64, 0u64, 0u64);
    cu!(d, "cuStreamBeginCapture", stream => u64, RELAXED => i32)?;
    let captured = cu!(d, "cuMemAllocAsync", &raw mut inside => *mut u64, 4096 => usize, stream => u64)
        .and_then(|()| cu!(d, "cuMemsetD32Async", inside => u64, 1 => u32, 1024 => usize, stream => u64))
        .and_then(|()| cu!(d, "cuMemFreeAsync", inside => u64, stream => u64));
    cu!(d, "cuStreamEndCapture", stream => u64, &raw mut graph => *mut u64)?;
    captured?;
    cu!(d, "cuGraphInstantiateWithFlags", &raw mut exec => *mut u64, graph => u64, 0 => u64)?;
    cu!(d, "cuGraphLaunch", exec => u64, stream => u64)?;
    cu!(d, "cuGraphLaunch", exec => u64, stream => u64)?;
    end_stream(d, stream)?;
    cu!(d, "cuGraphExecDestroy", exec => u64)?;
    cu!(d, "cuGraphDestroy", graph => u64)?;
    Ok(true)
}

fn green(d: &Driver) -> Result<bool, CudaError> {
    let green = green_context(d, 0)?;
    let (mut context, mut stream) = (0u64, 0u64);
    cu!(d, "cuCtxFromGreenCtx", &raw mut context => *mut u64, green => u64)?;
    cu!(d, "cuGreenCtxStreamCreate", &raw mut stream => *mut u64, green => u64, 1 => u32, 0 => i32)?;
    end_stream(d, stream)?;
    cu!(d, "cuGreenCtxDestroy", green => u64)?;
    Ok(true)
}

/// A green context of all of a device.
pub(crate) fn green_context(d: &Driver, device: i32) -> Result<u64, CudaError> {
    const SM: i32 = 1;
    const DEFAULT_STREAM: u32 = 1;
    // Larger than the structure is on any driver so far.
    let mut resource = [0u64; 64];
    let (mut description, mut green) = (0u64, 0u64);
    let place = resource.as_mut_ptr();
    cu!(d, "cuDeviceGetDevResource", device => i32, place => *mut u64, SM => i32)?;
    cu!(d, "cuDevResourceGenerateDesc", &raw mut description => *mut u64, place => *mut u64, 1 => u32)?;
    cu!(d, "cuGreenCtxCreate", &raw mut green => *mut u64, description => u64, device => i32,
        DEFAULT_STREAM => u32)?;
    Ok(green)
}

fn joins(d: &Driver) -> Result<bool, CudaError> {
    let (first, second) = (new_stream(d)?, new_stream(d)?);
    let mut events = [0u64; 2];
    for event in &mut events {
        cu!(d, "cuEventCreate", &raw mut *event => *mut u64, 2 => u32)?;
    }
    let (mut graph, mut status) = (0u64, 0i32);
    cu!(d, "cuStreamBeginCapture", first => u64, RELAXED => i32)?;
    cu!(d, "cuEventRecord", events[0] => u64, first => u64)?;
    cu!(d, "cuStreamWaitEvent", second => u64, events[0] => u64, 0 => u32)?;
    cu!(d, "cuStreamIsCapturing", second => u64, &raw mut status => *mut i32)?;
    cu!(d, "cuEventRecord", events[1] => u64, second => u64)?;
    cu!(d, "cuStreamWaitEvent", first => u64, events[1] => u64, 0 => u32)?;
    cu!(d, "cuStreamEndCapture", first => u64, &raw mut graph => *mut u64)?;
    cu!(d, "cuGraphDestroy", graph => u64)?;
    for event in events {
        cu!(d, "cuEventDestroy_v2", event => u64)?;
    }
    end_stream(d, first)?;
    end_stream(d, second)?;
    Ok(status == 1)
}

/// Whether the host can reach managed memory while the card works.
fn managed_by_the_host(d: &Driver) -> Result<bool, CudaError> {
    let mut concurrent = 0i32;
    cu!(d, "cuDeviceGetAttribute", &raw mut concurrent => *mut i32, MANAGED_AT_THE_SAME_TIME => i32, 0 => i32)?;
    let mut address = 0u64;
    cu!(d, "cuMemAllocManaged", &raw mut address => *mut u64, 1 << 21 => usize, 1 => u32)?;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let covers = |line: &str| {
        let (low, rest) = line.split_once('-')?;
        let high = rest.split(' ').next()?;
        let range = u64::from_str_radix(low, 16).ok()?..u64::from_str_radix(high, 16).ok()?;
        Some(range.contains(&address) && rest.contains(" rw"))
    };
    let reached = maps.lines().any(|line| covers(line) == Some(true));
    cu!(d, "cuMemFree_v2", address => u64)?;
    Ok(reached && concurrent != 0)
}

fn mapped(d: &Driver) -> Result<bool, CudaError> {
    let mut address = 0u64;
    let physical = exec::map(d, 2 << 20, &mut address)?;
    let used = cu!(d, "cuMemsetD32_v2", address => u64, 1 => u32, 1024 => usize);
    cu!(d, "cuStreamSynchronize", 0 => usize)?;
    exec::unmap(d, physical, address, 2 << 20)?;
    Ok(used.is_ok())
}

/// Whether the mode of a capture decides which calls of others break it.
fn modes(d: &Driver) -> Result<bool, CudaError> {
    let (first, other) = (new_stream(d)?, new_stream(d)?);
    let (mut graph, mut context) = (0u64, 0u64);
    cu!(d, "cuCtxGetCurrent", &raw mut context => *mut u64)?;
    cu!(d, "cuStreamBeginCapture", first => u64, OF_THE_THREAD => i32)?;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = cu!(d, "cuCtxSetCurrent", context => u64);
            let _ = cu!(d, "cuStreamQuery", other => u64);
        });
    });
    let ended = cu!(d, "cuStreamEndCapture", first => u64, &raw mut graph => *mut u64);
    if ended.is_ok() {
        cu!(d, "cuGraphDestroy", graph => u64)?;
    }
    end_stream(d, first)?;
    end_stream(d, other)?;
    Ok(ended.is_ok())
}

fn pitch(d: &Driver) -> Result<bool, CudaError> {
    let (mut address, mut pitch) = (0u64, 0usize);
    cu!(d, "cuMemAllocPitch_v2", &raw mut address => *mut u64, &raw mut pitch => *mut usize, 4096 => usize,
        4 => usize, 4 => u32)?;
    cu!(d, "cuMemFree_v2", address => u64)?;
    Ok(pitch == 4096)
}

fn two_devices(d: &Driver) -> Result<bool, CudaError> {
    let mut count = 0i32;
    cu!(d, "cuDeviceGetCount", &raw mut count => *mut i32)?;
    Ok(count > 1)
}

/// Whether kernels of the first device reach the memory of a second one.
fn peer_access(d: &Driver) -> Result<bool, CudaError> {
    let mut reaches = 0i32;
    cu!(d, "cuDeviceCanAccessPeer", &raw mut reaches => *mut i32, 0 => i32, 1 => i32)?;
    Ok(reaches != 0 && d.has("cuCtxEnablePeerAccess") && d.has("cuCtxDisablePeerAccess"))
}
