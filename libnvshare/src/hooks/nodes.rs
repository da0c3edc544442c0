//! Nodes of graphs that fill memory, and copies among nodes of any kind.
//!
//! The driver runs such a node in the context to which its memory belongs, even if the program names another or none. Memory of
//! `cuMemCreate` belongs to none, and the driver refuses it if the program names none (measured, `tests/gpu/inferred.py`). So
//! for memory of `cuMemAlloc` that the library maps, the library names the context in which it was allocated.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use super::target::pass_gate_for_addresses;
use super::{copies, graphs};
use crate::driver;
use crate::driver::functions::signatures;
use crate::driver::types::{CUcontext, CUdeviceptr, CUgraph, CUgraphExec, CUresult};
use crate::memory::{allocations, imports};

/// `CUgraphNodeParams`, which has 256 bytes; some are left as they are.
type Params = [MaybeUninit<u64>; 32];

/// `CU_GRAPH_NODE_TYPE_MEMCPY`
const COPY: c_int = 1;
/// Where its context is, in words.
const CONTEXT_OF_COPY: usize = 3;
/// `CU_GRAPH_NODE_TYPE_MEMSET`
const FILL: c_int = 2;
/// Where its address and its context are, in words.
const ADDRESS: usize = 2;
const CONTEXT: usize = 7;

/// The context in which a fill runs, for the one that is named.
fn context_for(address: CUdeviceptr, named: CUcontext) -> CUcontext {
    let allocation = allocations::mapped_at(address).filter(|allocation| allocation.asked().is_some());
    let context = allocation.map(|allocation| allocation.context.handle());
    context.or_else(|| imports::context_of(address)).unwrap_or(named)
}

/// The address that `CUDA_MEMSET_NODE_PARAMS` begin with.
///
/// # Safety
/// Null, or such parameters.
unsafe fn address_of(fill: *const c_void) -> CUdeviceptr {
    // SAFETY: promised by the caller.
    unsafe { fill.cast::<CUdeviceptr>().as_ref() }.copied().unwrap_or_default()
}

/// The parameters of a fill with the context in which it runs; `None`: they are right as they are.
///
/// # Safety
/// Null, or parameters of a node of any kind.
unsafe fn in_its_context(params: *const c_void) -> Option<Params> {
    // SAFETY: promised by the caller: the first word is the kind, and of this kind the others are these.
    unsafe {
        if params.cast::<c_int>().as_ref() != Some(&FILL) {
            return None;
        }
        let named = params.cast::<CUcontext>().add(CONTEXT).read();
        let context = context_for(params.cast::<CUdeviceptr>().add(ADDRESS).read(), named);
        let mut own = params.cast::<Params>().read();
        own.get_mut(CONTEXT)?.write(context.0 as u64);
        (context != named).then_some(own)
    }
}

/// The context of a copy; `None`: it is a node of another kind.
///
/// # Safety
/// As for [`in_its_context`].
unsafe fn context_of_copy(params: *const c_void) -> Option<CUcontext> {
    // SAFETY: promised by the caller: the first word is the kind, and of this kind the others are these.
    unsafe {
        let is_copy = params.cast::<c_int>().as_ref() == Some(&COPY);
        is_copy.then(|| params.cast::<CUcontext>().add(CONTEXT_OF_COPY).read())
    }
}

/// Calls the driver with parameters of a node, and again if the card that copies has [gained access](super::copies) meanwhile.
///
/// # Safety
/// As for [`in_its_context`].
unsafe fn with_params(params: *mut c_void, call: impl Fn(*mut c_void) -> CUresult) -> CUresult {
    // SAFETY: promised by the caller.
    let mut own = unsafe { in_its_context(params) };
    let params = own.as_mut().map_or(params, |own| own.as_mut_ptr().cast());
    match call(params) {
        // SAFETY: promised by the caller.
        CUresult::INVALID_VALUE if unsafe { context_of_copy(params) }.is_some_and(copies::gain_access_in) => {
            call(params)
        }
        result => result,
    }
}

/// Adds a node of any kind, if a limit admits what it allocates, while all memory is on the card.
///
/// # Safety
/// As for [`in_its_context`].
unsafe fn add_by(params: *mut c_void, call: impl Fn(*mut c_void) -> CUresult) -> CUresult {
    // SAFETY: promised by the caller.
    let add = || pass_gate_for_addresses(|| unsafe { with_params(params, call) });
    // SAFETY: promised by the caller.
    unsafe { graphs::add_node_of_any_kind(params, add) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn add(
    real: signatures::cuGraphAddNode,
    node: *mut c_void,
    graph: CUgraph,
    dependencies: *const c_void,
    count: usize,
    params: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    unsafe { add_by(params, |params| real(node, graph, dependencies, count, params)) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn add_v2(
    real: signatures::cuGraphAddNode_v2,
    node: *mut c_void,
    graph: CUgraph,
    dependencies: *const c_void,
    data: *const c_void,
    count: usize,
    params: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    unsafe { add_by(params, |params| real(node, graph, dependencies, data, count, params)) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn set(
    real: signatures::cuGraphNodeSetParams,
    node: *mut c_void,
    params: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    unsafe { with_params(params, |params| real(node, params)) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn set_in_exec(
    real: signatures::cuGraphExecNodeSetParams,
    exec: CUgraphExec,
    node: *mut c_void,
    params: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    unsafe { with_params(params, |params| real(exec, node, params)) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn add_fill(
    real: signatures::cuGraphAddMemsetNode,
    node: *mut c_void,
    graph: CUgraph,
    dependencies: *const c_void,
    count: usize,
    fill: *const c_void,
    context: CUcontext,
) -> CUresult {
    // SAFETY: the caller's arguments.
    unsafe {
        let context = context_for(address_of(fill), context);
        real(node, graph, dependencies, count, fill, context)
    }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn set_fill_in_exec(
    real: signatures::cuGraphExecMemsetNodeSetParams,
    exec: CUgraphExec,
    node: *mut c_void,
    fill: *const c_void,
    context: CUcontext,
) -> CUresult {
    // SAFETY: the caller's arguments.
    unsafe {
        let context = context_for(address_of(fill), context);
        real(exec, node, fill, context)
    }
}

/// The parameters name no context, and a thread without a current one may set them too.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn set_fill(
    real: signatures::cuGraphMemsetNodeSetParams,
    node: *mut c_void,
    fill: *const c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let set = || unsafe { real(node, fill) };
    // SAFETY: the caller's parameters.
    let context = context_for(unsafe { address_of(fill) }, CUcontext::NULL);
    if context == CUcontext::NULL || driver::current_context().is_ok() {
        return set();
    }
    driver::with_current(context, || Ok(set())).unwrap_or_else(|_| set())
}
