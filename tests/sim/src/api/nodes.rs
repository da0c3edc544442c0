//! Nodes that a program adds to graphs itself: copies and fills of a card's memory. A node's handle is its place in the graph, from 1 on.

use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use super::copies::{Copy3D, copy_3d};
use super::fills::{Area, fill_work};
use super::{api, give_new, status};
use crate::capture::Kind;
use crate::process::{self, Failure, INVALID_VALUE};
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

api! {
    fn cuGraphAddMemcpyNode(node: *mut usize, graph: usize, after: *const usize, count: usize, copy: *const Copy3D, context: usize) {
        unsafe { give_new(node, || add(graph, Kind::Copy, &places(after, count), copy_3d(copy)?, context)) }
    }
    fn cuGraphAddMemsetNode(node: *mut usize, graph: usize, after: *const usize, count: usize, fill: *const Fill, context: usize) {
        unsafe { give_new(node, || add(graph, Kind::Fill, &places(after, count), work_of(fill)?, context)) }
    }
    fn cuGraphExecMemcpyNodeSetParams(exec: usize, node: usize, copy: *const Copy3D, _context: usize) {
        status(unsafe { copy_3d(copy) }.and_then(|work| change(exec, node, Kind::Copy, work)))
    }
    fn cuGraphExecMemsetNodeSetParams(exec: usize, node: usize, fill: *const Fill, _context: usize) {
        status(unsafe { work_of(fill) }.and_then(|work| change(exec, node, Kind::Fill, work)))
    }
}

/// # Safety
/// So many handles are readable.
unsafe fn places(after: *const usize, count: usize) -> Vec<usize> {
    // SAFETY: promised by the caller.
    (0..count).map(|i| unsafe { after.add(i).read() }).collect()
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

fn add(graph: usize, kind: Kind, after: &[usize], work: Work, context: usize) -> Result<usize, Failure> {
    let mut tables = process::get()?.tables();
    let context = tables.context(context)?.id;
    let graph = tables.graphs.get_mut(graph)?;
    *graph = Arc::new(graph.with(kind, after, work, context)?);
    Ok(graph.len())
}

fn change(exec: usize, node: usize, kind: Kind, work: Work) -> Result<(), Failure> {
    let mut tables = process::get()?.tables();
    let exec = tables.execs.get_mut(exec)?;
    exec.graph = Arc::new(exec.graph.with_work(node, kind, work)?);
    Ok(())
}

const _: () = assert!(size_of::<Fill>() == 40 && size_of::<c_int>() == 4);
