//! Allocations that become nodes of graphs: they take memory when the graph runs, of the device's own pool for graphs.

use std::ffi::{c_int, c_void};

use super::{Properties, kept};
use crate::cuda::{CUdevice, CUgraph, CUresult};
use crate::devices::{self, Device};

type Trim = unsafe extern "C-unwind" fn(CUdevice) -> CUresult;
type AddMemAllocNode =
    unsafe extern "C-unwind" fn(*mut c_void, CUgraph, *const c_void, usize, *mut c_void) -> CUresult;
type AddNode =
    unsafe extern "C-unwind" fn(*mut c_void, CUgraph, *const c_void, usize, *mut c_void) -> CUresult;
type AddNodeV2 = unsafe extern "C-unwind" fn(
    *mut c_void,
    CUgraph,
    *const c_void,
    *const c_void,
    usize,
    *mut c_void,
) -> CUresult;

/// `CUDA_MEM_ALLOC_NODE_PARAMS`
#[repr(C)]
struct AllocNode {
    properties: Properties,
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

/// An allocation of this size becomes a node. One that could never be is refused at once.
///
/// # Errors
/// Out of memory if the limit leaves no room for it, whatever the graph frees.
pub(super) fn admit(device: Option<&Device>, bytes: u64) -> Result<(), CUresult> {
    kept::uses_graphs();
    match device {
        Some(device) if !device.has_left(bytes) => Err(CUresult::OUT_OF_MEMORY),
        _ => Ok(()),
    }
}

/// # Safety
/// Null, or parameters of such a node.
unsafe fn admit_node(node: *const AllocNode) -> Result<(), CUresult> {
    // SAFETY: promised by the caller.
    let Some(node) = (unsafe { node.as_ref() }) else { return Ok(()) };
    // SAFETY: the beginning of what was promised.
    let device = unsafe { Properties::device((&raw const node.properties).cast()) };
    admit(device, node.bytes as u64)
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn add_mem_alloc_node(
    real: AddMemAllocNode,
    node: *mut c_void,
    graph: CUgraph,
    dependencies: *const c_void,
    count: usize,
    params: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's parameters.
    match unsafe { admit_node(params.cast()) } {
        // SAFETY: the caller's arguments.
        Ok(()) => unsafe { real(node, graph, dependencies, count, params) },
        Err(error) => error,
    }
}

/// # Safety
/// Null, or parameters of a node of any kind.
unsafe fn admit_any(params: *const c_void) -> Result<(), CUresult> {
    // SAFETY: the first word is the kind.
    let kind = unsafe { params.cast::<c_int>().as_ref() };
    if kind != Some(&MEM_ALLOC) {
        return Ok(());
    }
    // SAFETY: of that kind the rest is.
    unsafe { admit_node(&raw const (*params.cast::<Node>()).alloc) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn add_node(
    real: AddNode,
    node: *mut c_void,
    graph: CUgraph,
    dependencies: *const c_void,
    count: usize,
    params: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's parameters.
    match unsafe { admit_any(params) } {
        // SAFETY: the caller's arguments.
        Ok(()) => unsafe { real(node, graph, dependencies, count, params) },
        Err(error) => error,
    }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn add_node_v2(
    real: AddNodeV2,
    node: *mut c_void,
    graph: CUgraph,
    dependencies: *const c_void,
    data: *const c_void,
    count: usize,
    params: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's parameters.
    match unsafe { admit_any(params) } {
        // SAFETY: the caller's arguments.
        Ok(()) => unsafe { real(node, graph, dependencies, data, count, params) },
        Err(error) => error,
    }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn trim(real: Trim, device: CUdevice) -> CUresult {
    // SAFETY: the caller's argument.
    let result = unsafe { real(device) };
    devices::get(device).into_iter().for_each(kept::look);
    result
}
