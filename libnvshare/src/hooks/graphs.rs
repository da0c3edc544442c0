//! Graphs that allocate. An allocation node takes memory when its graph runs, from the device's pool for graphs.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use nvshare_proto::units::MIB;

use super::target::{device_of_properties, pass_gate_for_addresses, pass_gate_on};
use crate::driver::functions::signatures;
use crate::driver::types::{CUdevice, CUgraph, CUgraphExec, CUresult, CUstream, MemoryProperties};
use crate::memory::devices::{self, Device};
use crate::memory::{charge, driver_reserve, free};
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
    driver_reserve::note_graphs();
    if let Some(device) = device {
        device.note_graph_node(bytes);
    }
    if device.is_some_and(|device| !may_have(device, bytes)) { CUresult::OUT_OF_MEMORY } else { add() }
}

/// Whether the limit leaves room for these bytes, or does once spare slabs are freed.
fn may_have(device: &Device, bytes: u64) -> bool {
    device.wait_for_limit();
    let has_left = || device.account().has_left(bytes);
    has_left() || (free::end_spare_slabs(device) && has_left())
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

/// Adds a node of any kind to a graph, by `add`. A node that allocates must be admitted first: see [`add_if_admitted`].
///
/// # Safety
/// Null, or parameters of a node of any kind.
pub(super) unsafe fn add_node_of_any_kind(params: *const c_void, add: impl FnOnce() -> CUresult) -> CUresult {
    // SAFETY: the first word is the kind.
    let kind = unsafe { params.cast::<c_int>().as_ref() };
    if kind != Some(&MEM_ALLOC) {
        return add();
    }
    // SAFETY: the kind says that the rest is the parameters of a node that allocates.
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

/// Counts the launches of each graph. The first ones of a graph take memory, later ones rarely do.
struct Launches {
    counts: [LaunchCount; 64],
}

/// The launches of the graph that came here last: two graphs with one place count anew each time.
struct LaunchCount {
    graph: AtomicUsize,
    count: AtomicU32,
}

impl Launches {
    const fn new() -> Self {
        Self { counts: [const { LaunchCount { graph: AtomicUsize::new(0), count: AtomicU32::new(0) } }; 64] }
    }

    /// Counts a launch of the graph with this handle. Returns whether it may have taken memory: the first 16 launches may, and of
    /// the others each 64th is looked at.
    fn count(&self, graph: usize) -> bool {
        // Handles are addresses of allocations: their lowest bits are alike.
        let place = (graph >> 4 ^ graph >> 10) % self.counts.len();
        let Some(place) = self.counts.get(place) else { return true };
        if place.graph.swap(graph, Ordering::Relaxed) != graph {
            place.count.store(0, Ordering::Relaxed);
        }
        let launches = place.count.fetch_add(1, Ordering::Relaxed);
        launches < 16 || launches.is_multiple_of(64)
    }
}

static LAUNCHES: Launches = Launches::new();

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
    let launch = || pass_gate_on(StreamKey::new(stream, PER_THREAD), || unsafe { real(exec, stream) });
    let mut result = launch();
    if result == CUresult::OUT_OF_MEMORY && driver_reserve::has_graphs() {
        result = launch_with_room(launch);
    }
    let has_run = result == CUresult::SUCCESS || result == CUresult::OUT_OF_MEMORY;
    if has_run && driver_reserve::has_graphs() && LAUNCHES.count(exec.0.addr()) {
        devices::used().for_each(driver_reserve::refresh);
    }
    result
}

/// Room for the memory of a graph that is tried first, in bytes.
const FIRST_ROOM: u64 = 256 * MIB;

/// How often a launch is tried again.
const MAX_TRIES: u32 = 16;

/// Launches a graph again that takes more memory than the driver has, as others have it. They leave for a larger and larger part of
/// what all graphs of the program allocate, as far as it may be had. Returns the last result.
#[cold]
fn launch_with_room(launch: impl Fn() -> CUresult) -> CUresult {
    for device in devices::used() {
        let (mut tried, mut most) = (0, device.bytes_of_graph_nodes());
        for _ in 0..MAX_TRIES {
            let bytes = (tried * 2).max(FIRST_ROOM).min(most);
            if bytes <= tried {
                break;
            }
            let Ok(((), room)) = charge::charged(device, bytes, || Ok(())) else {
                most = u64::midpoint(tried, bytes);
                continue;
            };
            let result = launch();
            if result != CUresult::OUT_OF_MEMORY {
                // The graph's memory counts before the room goes to others.
                driver_reserve::refresh(device);
                return result;
            }
            drop(room);
            tried = bytes;
        }
    }
    CUresult::OUT_OF_MEMORY
}

#[cfg(test)]
mod tests {
    use super::Launches;

    #[test]
    fn each_graphs_first_launches_are_looked_at_however_often_others_ran() {
        let launches = Launches::new();
        let looks = |graph: usize, times| (0..times).filter(|_| launches.count(graph)).count();
        let [first, second, beside_first] = [0x7000_1000, 0x7000_1010, 0x7000_1410];
        assert_eq!(looks(first, 20), 16);
        assert_eq!(looks(second, 1), 1);
        assert_eq!(looks(first, 44), 0);
        assert_eq!(looks(first, 1), 1, "the 64th later one");
        // Two graphs with one place are looked at each time.
        assert_eq!([looks(beside_first, 1), looks(first, 1)], [1, 1]);
    }
}
