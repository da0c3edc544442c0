//! Graphs that allocate. An allocation node takes memory when its graph runs, from the device's pool for graphs.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use super::target::{device_of_properties, pass_gate_for_addresses, pass_gate_on};
use crate::driver::functions::signatures;
use crate::driver::types::{CUdevice, CUgraph, CUgraphExec, CUresult, CUstream, MemoryProperties};
use crate::memory::devices::{self, Device};
use crate::memory::{driver_reserve, free};
use crate::work::stream_key::StreamKey;

/// `CUDA_MEM_ALLOC_NODE_PARAMS`
#[repr(C)]
struct AllocNode {
    properties: MemoryProperties,
    rest_of_properties: [u64; 9],
    access: *const c_void,
    access_count: usize,
    bytes: usize,
    address: u64,
}

const _: () = assert!(std::mem::offset_of!(AllocNode, bytes) == 104);

/// `CUgraphNodeParams`
#[repr(C)]
struct Node {
    kind: c_int,
    reserved: [c_int; 3],
    alloc: AllocNode,
}

/// `CU_GRAPH_NODE_TYPE_MEM_ALLOC`
const MEM_ALLOC: c_int = 10;

/// Adds an allocation of this size to a graph, by `add`. Returns out of memory if the limit could never admit it, whatever
/// the graph frees.
pub(crate) fn add_if_admitted(
    device: Option<&Device>,
    bytes: u64,
    add: impl FnOnce() -> CUresult,
) -> CUresult {
    LAUNCHES.store(0, Ordering::Relaxed);
    driver_reserve::note_graphs();
    match device {
        Some(device) if !device.account().has_left(bytes) && !free_spares_for(device, bytes) => {
            CUresult::OUT_OF_MEMORY
        }
        _ => add(),
    }
}

/// Whether it is add_if_admitted once memory that the library keeps is given up.
fn free_spares_for(device: &Device, bytes: u64) -> bool {
    free::end_spare_slabs(device) && device.account().has_left(bytes)
}

/// # Safety
/// Null, or parameters of such a node.
unsafe fn add_alloc_node(node: *const AllocNode, add: impl FnOnce() -> CUresult) -> CUresult {
    // SAFETY: promised by the caller.
    let Some(node) = (unsafe { node.as_ref() }) else { return add() };
    // SAFETY: the beginning of what was promised.
    let device = unsafe { device_of_properties((&raw const node.properties).cast()) };
    add_if_admitted(device, node.bytes as u64, add)
}

/// Adds a node of any kind to a graph, by `add`; one that allocates as [`add_if_admitted`] says.
///
/// # Safety
/// Null, or parameters of a node of any kind.
pub(super) unsafe fn add_node_of_any_kind(params: *const c_void, add: impl FnOnce() -> CUresult) -> CUresult {
    // SAFETY: the first word is the kind.
    let kind = unsafe { params.cast::<c_int>().as_ref() };
    if kind != Some(&MEM_ALLOC) {
        return add();
    }
    // SAFETY: of that kind the rest is.
    unsafe { add_alloc_node(&raw const (*params.cast::<Node>()).alloc, add) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn add_mem_alloc_node(
    real: signatures::cuGraphAddMemAllocNode,
    node: *mut c_void,
    graph: CUgraph,
    dependencies: *const c_void,
    count: usize,
    params: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let add = || pass_gate_for_addresses(|| unsafe { real(node, graph, dependencies, count, params) });
    // SAFETY: the caller's parameters.
    unsafe { add_alloc_node(params.cast(), add) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn trim(real: signatures::cuDeviceGraphMemTrim, device: CUdevice) -> CUresult {
    // SAFETY: the caller's argument.
    let result = unsafe { real(device) };
    devices::get(device).into_iter().for_each(driver_reserve::refresh);
    result
}

/// Launches of graphs since a node was last added.
static LAUNCHES: AtomicU32 = AtomicU32::new(0);

/// Launches or uploads a graph. The graph takes its memory then, and the amount is not known before. So the memory is charged
/// afterwards. A process that exceeds its limit by it can run no other graph until the driver has released enough.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn launch<const PER_THREAD: bool>(
    real: signatures::cuGraphLaunch,
    exec: CUgraphExec,
    stream: CUstream,
) -> CUresult {
    if driver_reserve::is_over_by_graphs() {
        return CUresult::OUT_OF_MEMORY;
    }
    // SAFETY: the caller's arguments.
    let result = pass_gate_on(StreamKey::new(stream, PER_THREAD), || unsafe { real(exec, stream) });
    let has_run = result == CUresult::SUCCESS || result == CUresult::OUT_OF_MEMORY;
    if has_run && driver_reserve::has_graphs() {
        // The first launches of a graph take memory; later ones rarely do.
        let launches = LAUNCHES.fetch_add(1, Ordering::Relaxed);
        if launches < 16 || launches.is_multiple_of(64) {
            devices::used().for_each(driver_reserve::refresh);
        }
    }
    result
}
