//! Graphs, and executable graphs.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use super::{api, give, give_new, status, twins, with_place, with_stream};
use crate::capture::{Exec, Graph, Kind};
use crate::objects::Stream;
use crate::process::{self, Failure, INVALID_VALUE, NOT_SUPPORTED, Process, SUCCESS};
use crate::stream::Work;

/// The members of `CUDA_GRAPH_INSTANTIATE_PARAMS` that are written.
#[repr(C)]
#[derive(Debug)]
pub(super) struct InstantiateParams {
    flags: u64,
    upload_stream: usize,
    error_node: usize,
    result: c_int,
}

/// `CUgraphExecUpdateResultInfo`
#[repr(C)]
#[derive(Debug)]
pub(super) struct UpdateInfo {
    result: c_int,
    error_node: usize,
    error_from_node: usize,
}

api! {
    fn cuGraphInstantiate(exec: *mut usize, graph: usize, _node: *mut usize, _log: *mut c_char, _bytes: usize) { unsafe { give_new(exec, || instantiate(graph)) } }
    fn cuGraphInstantiateWithFlags(exec: *mut usize, graph: usize, _flags: u64) { unsafe { give_new(exec, || instantiate(graph)) } }
    fn cuGraphExecUpdate_v2(exec: usize, graph: usize, info: *mut UpdateInfo) {
        let updated = process::get().and_then(|p| {
            let mut tables = p.tables();
            let graph = Arc::clone(tables.graphs.get(graph)?);
            let exec = tables.execs.get_mut(exec)?;
            exec.graph.can_become(&graph)?;
            exec.graph = graph;
            Ok(())
        });
        // SAFETY: null, or writable.
        if let Some(info) = unsafe { info.as_mut() } {
            *info = UpdateInfo { result: c_int::from(updated.is_err()), error_node: 0, error_from_node: 0 };
        }
        status(updated)
    }
    fn cuGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize) {
        // Only the number of nodes is answered; nodes have no handles.
        if !nodes.is_null() { return NOT_SUPPORTED }
        unsafe { give(count, process::get().and_then(|p| Ok(p.tables().graphs.get(graph)?.len()))) }
    }
    fn cuGraphExecDestroy(exec: usize) { status(process::get().and_then(|p| p.tables().execs.end(exec).map(|_| ()))) }
    fn cuGraphDestroy(graph: usize) { status(process::get().and_then(|p| p.tables().graphs.end(graph).map(|_| ()))) }
    fn cuGraphCreate(graph: *mut usize, flags: c_uint) {
        if flags != 0 { return INVALID_VALUE }
        unsafe { give_new(graph, || Ok(process::get()?.tables().graphs.add(Arc::new(Graph::default())))) }
    }
}

twins! { per_thread:
    fn cuGraphInstantiateWithParams / cuGraphInstantiateWithParams_ptsz (exec: *mut usize, graph: usize, params: *mut InstantiateParams) {
        let _ = per_thread;
        // SAFETY: null, or writable.
        let Some(params) = (unsafe { params.as_mut() }) else { return INVALID_VALUE };
        let made = unsafe { give_new(exec, || instantiate(graph)) };
        params.error_node = 0;
        params.result = c_int::from(made != SUCCESS);
        made
    }
    fn cuGraphLaunch / cuGraphLaunch_ptsz (exec: usize, stream: usize) { status(launch(exec, stream, per_thread)) }
    fn cuGraphUpload / cuGraphUpload_ptsz (exec: usize, stream: usize) {
        status(with_stream(stream, per_thread, |p, _| { let graph = graph_of(p, exec)?; p.allocate_for_graph(&graph) }))
    }
}

fn instantiate(graph: usize) -> Result<usize, Failure> {
    let p = process::get()?;
    let mut tables = p.tables();
    let graph = Arc::clone(tables.graphs.get(graph)?);
    // The call takes memory of the card: a global capture of another thread does not survive it (measured).
    tables.unsafe_call()?;
    Ok(tables.execs.add(Exec { graph, last: None }))
}

/// The graph behind an executable one, none of whose nodes has lost its context.
fn graph_of(p: &Process, exec: usize) -> Result<Arc<Graph>, Failure> {
    let tables = p.tables();
    let graph = Arc::clone(&tables.execs.get(exec)?.graph);
    if graph.is_lost(&tables) {
        tables.execs.lost(exec);
    }
    Ok(graph)
}

fn launch(exec: usize, stream: usize, per_thread: bool) -> Result<(), Failure> {
    with_place(stream, per_thread, |p, stream| {
        p.sticky()?;
        let graph = graph_of(p, exec)?;
        let run = Arc::clone(&graph);
        let work: Work = Arc::new(move || run.run());
        if p.tables().is_capturing(&stream) {
            // A child graph, which may not have memory of its own.
            if graph.has_memory() {
                return Err(NOT_SUPPORTED);
            }
            return p.tables().submit(&stream, Kind::Child, work, Vec::new()).map(|_| ());
        }
        p.tables().pool.launching += 1;
        let launched = submit(p, &stream, exec, &graph, work);
        p.tables().pool.launching -= 1;
        launched
    })
}

/// Gets a graph's memory, and submits the graph.
fn submit(p: &Process, stream: &Stream, exec: usize, graph: &Graph, work: Work) -> Result<(), Failure> {
    p.allocate_for_graph(graph)?;
    let mut tables = p.tables();
    // An executable graph does not run beside itself.
    let after = tables.execs.get(exec)?.last.clone();
    let point = tables.submit(stream, Kind::Child, work, after.into_iter().collect())?;
    tables.execs.get_mut(exec)?.last.clone_from(&point);
    if graph.has_memory() {
        tables.pool.launches.extend(point);
    }
    Ok(())
}

const _: () = assert!(size_of::<UpdateInfo>() == 3 * size_of::<*const c_void>());
