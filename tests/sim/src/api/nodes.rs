//! Nodes that a program adds to graphs itself: copies and fills of a card's memory. A node's handle tells its graph, and its place there,
//! from 1 on.
//!
//! A fill runs in the context of the memory, whichever context the program names, none as well; memory that belongs to no context
//! is filled in the one that is named. An executable graph keeps the contexts of its fills. A copy may name any context, or none
//! (all measured, `tests/gpu/inferred.py`).

use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use super::copies::{Copy3D, copy_3d};
use super::fills::{Area, fill_work};
use super::{api, give_new, status};
use crate::capture::Kind;
use crate::process::{self, Failure, INVALID_VALUE, NOT_SUPPORTED};
use crate::stream::Work;

/// `CUDA_MEMSET_NODE_PARAMS`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Fill {
    address: u64,
    pitch: usize,
    value: c_uint,
    element: c_uint,
    width: usize,
    height: usize,
}

/// `CUgraphNodeParams`, as far as it is simulated.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct NodeParams {
    kind: c_int,
    reserved: [c_int; 3],
    of_kind: OfKind,
}

#[repr(C)]
#[derive(Clone, Copy)]
union OfKind {
    copy: CopyParams,
    fill: FillParams,
    size: [u64; 30],
}

/// `CUDA_MEMCPY_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy)]
struct CopyParams {
    flags: [c_int; 2],
    context: usize,
    copy: Copy3D,
}

/// `CUDA_MEMSET_NODE_PARAMS_v2`
#[repr(C)]
#[derive(Clone, Copy)]
struct FillParams {
    fill: Fill,
    context: usize,
}

const COPY: c_int = 1;
const FILL: c_int = 2;

/// The work of a node, and its context.
struct Does {
    kind: Kind,
    work: Work,
    /// None: no context is named, and none follows from the memory.
    context: Option<u64>,
}

api! {
    fn cuGraphAddMemcpyNode(node: *mut usize, graph: usize, after: *const usize, count: usize, copy: *const Copy3D, context: usize) {
        unsafe { give_new(node, || add(graph, &places(after, count), copies(copy, context)?)) }
    }
    fn cuGraphAddMemsetNode(node: *mut usize, graph: usize, after: *const usize, count: usize, fill: *const Fill, context: usize) {
        unsafe { give_new(node, || add(graph, &places(after, count), fills(fill, context)?)) }
    }
    fn cuGraphAddNode(node: *mut usize, graph: usize, after: *const usize, count: usize, params: *const NodeParams) {
        unsafe { give_new(node, || add(graph, &places(after, count), any(params)?)) }
    }
    fn cuGraphAddNode_v2(node: *mut usize, graph: usize, after: *const usize, _data: *const usize, count: usize, params: *const NodeParams) {
        unsafe { give_new(node, || add(graph, &places(after, count), any(params)?)) }
    }
    fn cuGraphMemcpyNodeSetParams(node: usize, copy: *const Copy3D) { status(unsafe { copies(copy, 0) }.and_then(|does| set(node, does))) }
    fn cuGraphMemsetNodeSetParams(node: usize, fill: *const Fill) { status(unsafe { fills(fill, 0) }.and_then(|does| set(node, does))) }
    fn cuGraphNodeSetParams(node: usize, params: *const NodeParams) { status(unsafe { any(params) }.and_then(|does| set(node, does))) }
    fn cuGraphExecMemcpyNodeSetParams(exec: usize, node: usize, copy: *const Copy3D, context: usize) {
        status(unsafe { copies(copy, context) }.and_then(|does| change(exec, node, does)))
    }
    fn cuGraphExecMemsetNodeSetParams(exec: usize, node: usize, fill: *const Fill, context: usize) {
        status(unsafe { fills(fill, context) }.and_then(|does| change(exec, node, does)))
    }
    fn cuGraphExecNodeSetParams(exec: usize, node: usize, params: *const NodeParams) {
        status(unsafe { any(params) }.and_then(|does| change(exec, node, does)))
    }
}

/// A graph has fewer nodes.
const MAX_NODES: usize = 1 << 16;

/// # Safety
/// `count` handles are readable at `after`.
unsafe fn places(after: *const usize, count: usize) -> Vec<usize> {
    // SAFETY: promised by the caller.
    (0..count).map(|i| unsafe { after.add(i).read() } % MAX_NODES).collect()
}

/// # Safety
/// `fill` is null or readable.
unsafe fn work_of(fill: *const Fill) -> Result<Work, Failure> {
    // SAFETY: promised by the caller.
    let fill = unsafe { fill.as_ref() }.ok_or(INVALID_VALUE)?;
    let area = Area { address: fill.address, pitch: fill.pitch, width: fill.width, height: fill.height };
    match fill.element {
        1 => fill_work(area, [fill.value as u8]),
        2 => fill_work(area, (fill.value as u16).to_le_bytes()),
        4 => fill_work(area, fill.value.to_le_bytes()),
        _ => Err(INVALID_VALUE),
    }
    .map(|(work, _)| work)
}

/// # Safety
/// `copy` is null or readable.
unsafe fn copies(copy: *const Copy3D, named: usize) -> Result<Does, Failure> {
    let tables = process::get()?.tables();
    let named = if named == 0 { tables.current() } else { tables.context(named) }?;
    let (card, context) = (named.gpu, Some(named.id));
    drop(tables);
    // SAFETY: promised by the caller.
    let work = unsafe { copy_3d(copy, card) }?;
    Ok(Does { kind: Kind::Copy, work, context })
}

/// # Safety
/// `fill` is null or readable.
unsafe fn fills(fill: *const Fill, named: usize) -> Result<Does, Failure> {
    // SAFETY: promised by the caller.
    let (work, address) = unsafe { (work_of(fill)?, (*fill).address) };
    let tables = process::get()?.tables();
    let named = (named != 0).then(|| tables.context(named).map(|context| context.id)).transpose()?;
    let context = tables.find(address, 1)?.allocation.context.or(named);
    Ok(Does { kind: Kind::Fill, work, context })
}

/// # Safety
/// `params` is null or readable.
unsafe fn any(params: *const NodeParams) -> Result<Does, Failure> {
    // SAFETY: promised by the caller; the kind says which member is valid.
    unsafe {
        let params = params.as_ref().ok_or(INVALID_VALUE)?;
        match params.kind {
            COPY => copies(&raw const params.of_kind.copy.copy, params.of_kind.copy.context),
            FILL => fills(&raw const params.of_kind.fill.fill, params.of_kind.fill.context),
            _ => Err(NOT_SUPPORTED),
        }
    }
}

fn add(graph: usize, after: &[usize], Does { kind, work, context }: Does) -> Result<usize, Failure> {
    let mut tables = process::get()?.tables();
    let of = tables.graphs.get_mut(graph)?;
    *of = Arc::new(of.with(kind, after, work, context.ok_or(INVALID_VALUE)?)?);
    if of.len() < MAX_NODES { Ok(graph * MAX_NODES + of.len()) } else { Err(NOT_SUPPORTED) }
}

fn set(node: usize, Does { kind, work, context }: Does) -> Result<(), Failure> {
    let mut tables = process::get()?.tables();
    let of = tables.graphs.get_mut(node / MAX_NODES)?;
    *of = Arc::new(of.with_work(node % MAX_NODES, kind, work, context)?);
    Ok(())
}

fn change(exec: usize, node: usize, Does { kind, work, context }: Does) -> Result<(), Failure> {
    let mut tables = process::get()?.tables();
    let exec = tables.execs.get_mut(exec)?;
    let context = context.filter(|_| kind == Kind::Fill);
    let changed = exec.graph.with_work(node % MAX_NODES, kind, work, context)?;
    if !changed.runs_where(&exec.graph) {
        return Err(INVALID_VALUE);
    }
    exec.graph = Arc::new(changed);
    Ok(())
}

const _: () =
    assert!(size_of::<Fill>() == 40 && size_of::<CopyParams>() == 216 && size_of::<NodeParams>() == 256);
